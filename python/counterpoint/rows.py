"""Rows between the order of the whole sequence and that of ranks: dispatch, undispatch, roll, each with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from counterpoint.collectives import Borrowed, check_device, moved
from counterpoint.errors import TensorError

if TYPE_CHECKING:
    from counterpoint.plan import Plan, Role


def dispatch(plan: Plan, x: torch.Tensor, dim: int, role: Role, pad_value: float) -> torch.Tensor:
    """See `Plan.dispatch`."""
    _check_rows(x, dim, plan._given(role), f"all rows of {_NAMES[role]}")
    result: torch.Tensor = _Dispatch.apply(x, plan, dim, role, pad_value)
    return result


def undispatch(plan: Plan, x: torch.Tensor, dim: int, role: Role, grad: str) -> torch.Tensor:
    """See `Plan.undispatch`."""
    if grad not in ("take", "sum"):
        raise TensorError(f'grad is {grad!r}; it must be "take" or "sum"')
    _check_rows(x, dim, plan.q_rows if role == "q" else plan.k_rows, f"this process's rows of {_NAMES[role]}")
    result: torch.Tensor = _Undispatch.apply(x, plan, dim, role, grad)
    return result


def roll(plan: Plan, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
    """See `Plan.roll`."""
    if not isinstance(shift, int):
        raise TensorError(f"shift is {shift!r}; it must be a whole number")
    _check_rows(x, dim, plan.q_rows, f"this process's rows of {_NAMES['q']}")
    result: torch.Tensor = _Roll.apply(x, plan, shift, dim)
    return result


_NAMES = {"q": "queries", "k": "keys"}


def _check_rows(x: torch.Tensor, dim: int, wanted: int, what: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TensorError(f"x must be a torch.Tensor, not a {type(x).__name__}")
    if not isinstance(dim, int):
        raise TensorError(f"dim is {dim!r}; it must be a whole number")
    if not -x.ndim <= dim < x.ndim:
        raise TensorError(f"dim is {dim}, and x has {x.ndim} axes")
    if x.shape[dim] != wanted:
        raise TensorError(f"x has {x.shape[dim]} rows along dim {dim}; the plan has {wanted} for {what}")


def _select(plan: Plan, x: torch.Tensor, dim: int, role: Role, pad_value: float) -> torch.Tensor:
    index = plan._index(role, device=x.device)
    given = x.shape[dim]
    if plan._total(role) == given:
        return x.index_select(dim, index)
    chosen = x.index_select(dim, index.clamp(max=given - 1))
    padding = (index >= given).view([-1 if axis == dim % x.ndim else 1 for axis in range(x.ndim)])
    return chosen.masked_fill(padding, pad_value)


def _gather(plan: Plan, x: torch.Tensor, dim: int, role: Role) -> torch.Tensor:
    """All rows, of those that were given, from the local ones."""
    if plan._rank is None:
        whole = x.index_select(dim, plan._index(role, inverse=True, device=x.device))
    else:
        whole = _exchange(plan, x, dim, role, "gather", rows=plan._total(role))
    return whole.narrow(dim, 0, plan._given(role))


def _exchange(plan: Plan, x: torch.Tensor, dim: int, role: Role, what: str, *, rows: int, shift: int = 0) -> torch.Tensor:
    check_device(plan.group, "x", x, "the plan's group")
    group, solution = plan.group, plan._solution
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        plan._moves_rows_in_graphs = True

    def call(source: Borrowed, target: Borrowed) -> None:
        group._native.rows(solution, what, role, shift=shift, stream=group._stream(), source=source, target=target)

    return moved(group, x, dim, rows, call, sums=what == "reduce_scatter")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Plan, dim: int, role: Role, pad_value: float) -> torch.Tensor:
        ctx.plan, ctx.dim, ctx.role = plan, dim, role
        return _select(plan, x, dim, role, pad_value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _gather(ctx.plan, grad, ctx.dim, ctx.role), None, None, None, None


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Plan, dim: int, role: Role, grad: str) -> torch.Tensor:
        ctx.plan, ctx.dim, ctx.role, ctx.grad = plan, dim, role, grad
        return _gather(plan, x, dim, role)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        plan, dim, role = ctx.plan, ctx.dim, ctx.role
        if ctx.grad == "take" or plan._rank is None:
            return _select(plan, grad, dim, role, 0), None, None, None, None
        missing = plan._total(role) - grad.shape[dim]
        if missing:
            shape = list(grad.shape)
            shape[dim] = missing
            grad = torch.cat([grad, grad.new_zeros(shape)], dim)
        rows = plan.rows_of(plan._rank, role)
        return _exchange(plan, grad, dim, role, "reduce_scatter", rows=rows), None, None, None, None


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Plan, shift: int, dim: int) -> torch.Tensor:
        ctx.plan, ctx.shift, ctx.dim = plan, shift, dim
        return _rolled(plan, x, shift, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _rolled(ctx.plan, grad, -ctx.shift, ctx.dim), None, None, None


def _rolled(plan: Plan, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
    if plan._rank is None or plan._total("q") != plan._given("q"):
        return _select(plan, _gather(plan, x, dim, "q").roll(shift, dim), dim, "q", 0)
    return _exchange(plan, x, dim, "q", "roll", rows=plan.q_rows, shift=shift)
