"""Groups as values, by which processes that have not joined them, such as a data loader's workers, make plans and step tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterpoint._native import Described, StepTables
from counterpoint.errors import PlanError
from counterpoint.plan import Plan
from counterpoint.plan_arguments import is_deterministic
from counterpoint.planner import _Planner

if TYPE_CHECKING:
    from counterpoint.group import _Group

__all__ = ["GroupDescription", "StepTables"]


class GroupDescription(_Planner):
    """What plans and step tables of a group follow from: its ranks, how rows travel between them, and the device of those that
    are in the process that joined. Made by `Group.description`. A value: compared and hashed by what it says, and pickled.

    A process that has it needs neither a group nor a GPU. Its plans are those of the group, for the ranks of the process that
    joined; `Group.prefetch(plan, tables=tables)` takes both there.
    """

    def __init__(self, native: Described, *, deterministic: bool) -> None:
        self._native: Described = native
        # Whether PyTorch asked for deterministic algorithms where the description was made: a worker's own does not know.
        self._deterministic = deterministic

    @property
    def _on_gpu(self) -> bool:
        return self._native.on_gpu

    @property
    def device(self) -> str:
        """The device of the ranks, in words."""
        return self._native.device

    def tables(self, plan: Plan) -> StepTables:
        """The step tables of a plan for the ranks of the process that joined: what takes longest in making it ready there. They
        are bytes, and pickle; the group refuses those of another plan, rank, device or version. Calls that give max logits, or
        take the gradient of lse, have tables of their own, which the group makes."""
        if not isinstance(plan, Plan):
            raise PlanError(f"plan must be a counterpoint.Plan, not a {type(plan).__name__}")
        if plan._solution.ranks != self.size:
            raise PlanError(f"the plan is of {plan._solution.ranks} ranks, and this describes a group of {self.size}")
        return self._native.tables(plan._solution)

    def _is_deterministic(self, asked: bool | None) -> bool:
        return self._deterministic if asked is None else is_deterministic(asked)

    def _own(self, plan: Plan) -> Plan:
        plan._rank = self._native.rank
        return plan

    def _is_other(self, group: _Group) -> bool:
        return group.description != self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupDescription) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, self._value()

    def _value(self) -> tuple[str, bool]:
        return self._native.to_json(), self._deterministic

    def __repr__(self) -> str:
        return f"GroupDescription(rank={self.rank}, size={self.size}, transport={self.transport!r}, device={self.device!r})"


def _restored(text: str, deterministic: bool) -> GroupDescription:
    return GroupDescription(Described.from_json(text), deterministic=deterministic)
