"""The exceptions that this package raises. Each is also the built-in exception that callers would expect."""

from __future__ import annotations

import sys
from typing import Any


class Error(RuntimeError):
    """Any error of counterpoint.

    `rank` is the rank in its group that saw it, and `peer` the other rank that it concerns; `global_rank` and `global_peer` are
    the same ranks among all processes. None where it is not known.
    """

    rank: int | None = None
    global_rank: int | None = None
    peer: int | None = None
    global_peer: int | None = None


class MaskError(Error, ValueError):
    """A mask that is not valid."""


class PlanError(Error, ValueError):
    """A plan that cannot be made."""


class TensorError(Error, ValueError):
    """A tensor whose shape, type, device or layout does not fit."""


class PolicyError(Error, ValueError):
    """An overlap policy that this machine cannot follow."""


class OutOfMemoryError(Error):
    """Too little memory: `needed` and `available` are in bytes. Also `torch.OutOfMemoryError` where PyTorch is loaded."""

    needed: int = 0
    available: int = 0


class StalledError(Error, TimeoutError):
    """A wait reached its limit."""


class MismatchError(Error):
    """Ranks disagree about what they do together."""


class DeviceError(Error):
    """A device's driver or compiler failed."""


class PeerError(Error):
    """Another rank died, failed, left, or did not come."""


class MissingLibraryError(Error, ImportError):
    """A library that this call needs is not installed."""


class InternalError(Error):
    """A bug of counterpoint."""


def _out_of_memory() -> type[Error]:
    """The class of out-of-memory errors: also PyTorch's where that is loaded, so that its users' retries catch it."""
    torch = sys.modules.get("torch")
    theirs = getattr(torch, "OutOfMemoryError", None)
    if theirs is None:
        return OutOfMemoryError
    return type("OutOfMemoryError", (OutOfMemoryError, theirs), {"__module__": __name__})


def of(name: str, message: str, **attributes: Any) -> Error:
    """The exception that the compiled module raises for an error of the engine."""
    kind = _out_of_memory() if name == "OutOfMemoryError" else globals()[name]
    error: Error = kind(message)
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error
