"""Plans that are found: by the number that compiled operators have, or as the one that is active."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from counterpoint.errors import PlanError

if TYPE_CHECKING:
    import torch

    from counterpoint.group import _Group
    from counterpoint.plan import Plan

_handles = itertools.count(1)
_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_groups: weakref.WeakValueDictionary[int, _Group] = weakref.WeakValueDictionary()


def numbered(plan: Plan) -> int:
    """A number by which the plan is found as long as it lives."""
    handle = next(_handles)
    _plans[handle] = plan
    return handle


def of_handle(handle: int) -> Plan:
    """The plan that a compiled operator was given as a number."""
    plan = _plans.get(int(handle))
    if plan is None:
        raise PlanError(f"plan {handle} is gone; keep a reference to a plan as long as a compiled call may use it")
    return plan


def numbered_group(group: _Group) -> int:
    """Likewise of a group."""
    handle = next(_handles)
    _groups[handle] = group
    return handle


def group_of_handle(handle: int) -> _Group:
    """The group that a compiled operator was given as a number."""
    group = _groups.get(int(handle))
    if group is None:
        raise PlanError(f"group {handle} is gone; keep a reference to a group as long as a compiled call may use it")
    return group


def kept_by(like: torch.Tensor, kept: object) -> torch.Tensor:
    """A tensor of no elements that keeps an object as long as somebody, such as a compiled step's backward, keeps the tensor."""
    keeper = like.new_empty(0)
    keeper.kept = kept  # type: ignore[attr-defined]
    return keeper


# (thread, plan) of every `Plan.active` that has been entered. Not a context variable: the threads of backwards, which recompute
# layers, have contexts of their own.
_active: list[tuple[int, Plan]] = []
_active_lock = threading.Lock()


def active_plan() -> Plan | None:
    """The plan of the innermost `Plan.active` of this thread, or, in a thread without, of the one that has any."""
    if not _active:
        return None
    with _active_lock:
        here = [plan for thread, plan in _active if thread == threading.get_ident()]
        if here:
            return here[-1]
        if len({thread for thread, _ in _active}) > 1:
            raise PlanError(
                "several threads have active plans, and this thread none: pass the plan to the model as counterpoint=plan"
            )
        return _active[-1][1] if _active else None


@contextlib.contextmanager
def activated(plan: Plan) -> Iterator[Plan]:
    """See `Plan.active`."""
    entry = (threading.get_ident(), plan)
    with _active_lock:
        _active.append(entry)
    try:
        yield plan
    finally:
        with _active_lock:
            del _active[len(_active) - 1 - _active[::-1].index(entry)]
