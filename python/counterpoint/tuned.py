"""Tuned plans of linear layers, as `counterpoint tune gemm` keeps them: which a group's layers follow."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from counterpoint._native import _tuned_plans
from counterpoint.errors import Error, PlanError

if TYPE_CHECKING:
    from counterpoint._native import Ranks

TunedPlans = bool | str | os.PathLike[str]


def checked(asked: Any) -> bool | str:
    """What was asked for as `tuned`: whether to follow what is kept on this machine, or the path of a file."""
    if isinstance(asked, bool):
        return asked
    if isinstance(asked, (str, os.PathLike)):
        return os.fsdecode(asked)
    raise PlanError(f"tuned is {asked!r}; it must be True, False or the path of a file of `counterpoint tune gemm`")


def read_tuned(asked: bool | str, ranks: int) -> str | None:
    """The text of those for so many ranks; None where none are followed. A file of one's own must hold some; one that is kept and
    cannot be used is warned of."""
    if asked is False or ranks == 1:
        return None
    if asked is not True:
        return _tuned_plans(asked, ranks)
    try:
        return _tuned_plans(None, ranks)
    except Error as error:
        warnings.warn(f"{error}; linear layers run as predicted", stacklevel=2)
        return None


def warn_of_others(asked: bool | str, ranks: Ranks) -> None:
    """Says so where a file was named that has no plan for this device."""
    device, transport, count = ranks.tuned
    if isinstance(asked, str) and ranks.size > 1 and count == 0:
        warnings.warn(
            f"{asked} has no tuned plan for {ranks.size} ranks on {device} by {transport}; linear layers run as predicted",
            stacklevel=2,
        )
