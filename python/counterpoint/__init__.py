"""Distributed attention over any mask, and tensor-parallel linear layers, with communication under computation.

Importing this package imports neither PyTorch nor anything else that takes time: what needs PyTorch is loaded on first use.
"""

from __future__ import annotations

from counterpoint._native import Mask, __version__
from counterpoint.errors import (
    DeviceError,
    Error,
    InternalError,
    MaskError,
    MismatchError,
    MissingLibraryError,
    OutOfMemoryError,
    PeerError,
    PlanError,
    PolicyError,
    StalledError,
    TensorError,
)

__all__ = [
    "DeviceError",
    "Error",
    "InternalError",
    "Mask",
    "MaskError",
    "MismatchError",
    "MissingLibraryError",
    "OutOfMemoryError",
    "PeerError",
    "PlanError",
    "PolicyError",
    "StalledError",
    "TensorError",
    "__version__",
]
