"""Rows between the order of the whole sequence and that of ranks: dispatch, undispatch, roll, each with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from counterpoint.collectives import Borrowed, check_device, moved
from counterpoint.errors import TensorError
from counterpoint.lookup import of_handle

if TYPE_CHECKING:
    from counterpoint.plan import Plan, Role


def dispatch(plan: Plan, x: torch.Tensor, dim: int, role: Role, pad_value: float) -> torch.Tensor:
    """See `Plan.dispatch`."""
    _check_rows(x, dim, plan._given(role), f"all rows of {_NAMES[role]}")
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.counterpoint.dispatch(
            x, dim, role, float(pad_value), _own_rows(plan, role), x.shape[dim], plan.handle
        )
        return compiled
    result: torch.Tensor = _Dispatch.apply(x, plan, dim, role, pad_value)
    return result


def undispatch(plan: Plan, x: torch.Tensor, dim: int, role: Role, grad: str) -> torch.Tensor:
    """See `Plan.undispatch`."""
    if grad not in ("take", "sum"):
        raise TensorError(f'grad is {grad!r}; it must be "take" or "sum"')
    _check_rows(x, dim, _own_rows(plan, role), f"this process's rows of {_NAMES[role]}")
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.counterpoint.undispatch(
            x, dim, role, grad, plan._given(role), x.shape[dim], plan.handle
        )
        return compiled
    result: torch.Tensor = _Undispatch.apply(x, plan, dim, role, grad)
    return result


def roll(plan: Plan, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
    """See `Plan.roll`."""
    if not isinstance(shift, int) or isinstance(shift, bool):
        raise TensorError(f"shift is {shift!r}; it must be a whole number")
    _check_rows(x, dim, plan.q_rows, f"this process's rows of {_NAMES['q']}")
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.counterpoint.roll(x, shift, dim, plan.handle)
        return compiled
    result: torch.Tensor = _Roll.apply(x, plan, shift, dim)
    return result


_NAMES = {"q": "queries", "k": "keys"}


def _own_rows(plan: Plan, role: Role) -> int:
    return plan.q_rows if role == "q" else plan.k_rows


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


def _ungather(plan: Plan, grad: torch.Tensor, dim: int, role: Role, how: str) -> torch.Tensor:
    """The gradient of the local rows, of that of all rows that were gathered."""
    if how == "take" or plan._rank is None:
        return _select(plan, grad, dim, role, 0)
    missing = plan._total(role) - grad.shape[dim]
    if missing:
        shape = list(grad.shape)
        shape[dim] = missing
        grad = torch.cat([grad, grad.new_zeros(shape)], dim)
    return _exchange(plan, grad, dim, role, "reduce_scatter", rows=plan.rows_of(plan._rank, role))


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
        return _ungather(ctx.plan, grad, ctx.dim, ctx.role, ctx.grad), None, None, None, None


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
    shift %= plan._given("q")
    if plan._rank is None or plan._total("q") != plan._given("q"):
        return _select(plan, _gather(plan, x, dim, "q").roll(shift, dim), dim, "q", 0)
    return _exchange(plan, x, dim, "q", "roll", rows=plan.q_rows, shift=shift)


# The same under `torch.compile`: a plan is a number there, so that a new one each step compiles nothing again. `rows` are those
# of the result along `dim`, `given` those of `x`.
_library = torch.library.Library("counterpoint", "FRAGMENT")
_library.define("dispatch(Tensor x, int dim, str role, float pad_value, SymInt rows, SymInt given, SymInt plan) -> Tensor")
_library.define("undispatch(Tensor x, int dim, str role, str grad, SymInt rows, SymInt given, SymInt plan) -> Tensor")
_library.define("undispatch_backward(Tensor grad, int dim, str role, str how, SymInt rows, SymInt plan) -> Tensor")
_library.define("roll(Tensor x, int shift, int dim, SymInt plan) -> Tensor")


# Results are dense, as compiled code was told: those of other ranks lie row after row, along whichever axis rows are.
def _impl(name: str, run: Callable[..., torch.Tensor], shapes: Callable[..., torch.Tensor]) -> None:
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"counterpoint::{name}", shapes, lib=_library)


def _with_rows(x: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape)


_impl(
    "dispatch",
    lambda x, dim, role, pad_value, rows, given, plan: _select(of_handle(plan), x, dim, role, pad_value),
    lambda x, dim, role, pad_value, rows, given, plan: _with_rows(x, dim, rows),
)
_impl(
    "undispatch",
    lambda x, dim, role, grad, rows, given, plan: _gather(of_handle(plan), x, dim, role).contiguous(),
    lambda x, dim, role, grad, rows, given, plan: _with_rows(x, dim, rows),
)
_impl(
    "undispatch_backward",
    lambda grad, dim, role, how, rows, plan: _ungather(of_handle(plan), grad, dim, role, how).contiguous(),
    lambda grad, dim, role, how, rows, plan: _with_rows(grad, dim, rows),
)
_impl(
    "roll",
    lambda x, shift, dim, plan: _rolled(of_handle(plan), x, shift, dim).contiguous(),
    lambda x, shift, dim, plan: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.given = inputs


def _dispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dim, role, _, rows, given, plan = ctx.given
    return torch.ops.counterpoint.undispatch(grad, dim, role, "take", given, rows, plan), *[None] * 6


def _undispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dim, role, how, _, given, plan = ctx.given
    return torch.ops.counterpoint.undispatch_backward(grad, dim, role, how, given, plan), *[None] * 6


def _roll_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    shift, dim, plan = ctx.given
    return torch.ops.counterpoint.roll(grad, -shift, dim, plan), None, None, None


for _name, _backward in (("dispatch", _dispatch_backward), ("undispatch", _undispatch_backward), ("roll", _roll_backward)):
    torch.library.register_autograd(f"counterpoint::{_name}", _backward, setup_context=_keep, lib=_library)
