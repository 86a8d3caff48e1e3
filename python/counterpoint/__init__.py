"""Distributed attention over any mask, and tensor-parallel linear layers, with communication under computation.

Importing this package imports neither PyTorch nor anything else that takes time: what needs PyTorch is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from counterpoint._native import Mask, Routing, Splits, StepTables, __version__
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

if TYPE_CHECKING:
    from counterpoint import compat as compat
    from counterpoint import megatron as megatron
    from counterpoint import nn as nn
    from counterpoint import parallel as parallel
    from counterpoint import transformers as transformers
    from counterpoint.batch import Batch
    from counterpoint.collectives import group_cast, group_reduce
    from counterpoint.described import GroupDescription
    from counterpoint.functional import attention, flex_attention
    from counterpoint.group import LocalGroup
    from counterpoint.nn import ExpertLayer
    from counterpoint.plan import Plan
    from counterpoint.processes import Group
    from counterpoint.profiling import profile

_LATER = {
    "Batch": "counterpoint.batch",
    "ExpertLayer": "counterpoint.nn",
    "Group": "counterpoint.processes",
    "GroupDescription": "counterpoint.described",
    "LocalGroup": "counterpoint.group",
    "Plan": "counterpoint.plan",
    "attention": "counterpoint.functional",
    "flex_attention": "counterpoint.functional",
    "group_cast": "counterpoint.collectives",
    "group_reduce": "counterpoint.collectives",
    "profile": "counterpoint.profiling",
}

_MODULES = ("compat", "megatron", "nn", "parallel", "transformers")

__all__ = [
    "Batch",
    "DeviceError",
    "Error",
    "ExpertLayer",
    "Group",
    "GroupDescription",
    "InternalError",
    "LocalGroup",
    "Mask",
    "MaskError",
    "MismatchError",
    "MissingLibraryError",
    "OutOfMemoryError",
    "PeerError",
    "Plan",
    "PlanError",
    "PolicyError",
    "Routing",
    "Splits",
    "StalledError",
    "StepTables",
    "TensorError",
    "__version__",
    "attention",
    "flex_attention",
    "group_cast",
    "group_reduce",
    "profile",
]


def __getattr__(name: str) -> Any:
    module = f"counterpoint.{name}" if name in _MODULES else _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")
    try:
        found = importlib.import_module(module)
        value = found if name in _MODULES else getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise MissingLibraryError(f"counterpoint.{name} needs PyTorch, which is not installed: pip install torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
