"""Rows between the order of the whole sequence and that of ranks: dispatch, undispatch, roll, each with its gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from counterpoint.errors import TensorError

if TYPE_CHECKING:
    from counterpoint.plan import Plan, Role

# The engine moves floats. Of other types it moves the bits, as floats of the same size; on GPUs 8 bytes are two floats.
_CARRIERS = {torch.int64: torch.float64, torch.int32: torch.float32, torch.int16: torch.float16}
_CARRIERS_ON_GPUS = {**_CARRIERS, torch.int64: torch.float32}
_NAME_OF = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def borrowed(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], str, torch.Tensor]:
    """A tensor as the engine takes it, which keeps it alive as long as it uses the memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), _NAME_OF[tensor.dtype], tensor


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
    check_device(plan, "x", x)
    # The engine reads memory as it lies, and not through a view that conjugates or negates.
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        return torch.view_as_complex(
            _exchange(plan, torch.view_as_real(x), dim % x.ndim, role, what, rows=rows, shift=shift).contiguous()
        )
    if x.is_cuda and x.dtype == torch.float64:
        return _exchange_doubles(plan, x, dim, role, what, rows=rows, shift=shift)
    first = x.movedim(dim, 0)
    tail, dtype = first.shape[1:], x.dtype
    carriers = _CARRIERS_ON_GPUS if x.is_cuda else _CARRIERS
    # Not -1, which of no rows could be any number.
    flat = first.reshape(first.shape[0], math.prod(tail)).contiguous()
    if dtype in carriers:
        flat = flat.view(carriers[dtype])
    elif dtype not in _NAME_OF:
        flat = flat.to(torch.int16).view(torch.float16)
    result = flat.new_empty((rows, flat.shape[1]))
    if flat.shape[1]:
        group, tensors = plan.group, (borrowed(flat), borrowed(result))
        with group._named_errors():
            group._native.rows(
                plan._solution, what, role, shift=shift, stream=group._stream(), source=tensors[0], target=tensors[1]
            )
    if dtype in carriers:
        result = result.view(dtype)
    elif dtype not in _NAME_OF:
        result = result.view(torch.int16).to(dtype)
    return result.reshape(rows, *tail).movedim(0, dim)


def _exchange_doubles(plan: Plan, x: torch.Tensor, dim: int, role: Role, what: str, *, rows: int, shift: int) -> torch.Tensor:
    """On GPUs, where the engine adds up no f64: moved as the bits that they are."""
    if what == "reduce_scatter":
        raise TensorError("x is torch.float64; on GPUs rows are added up in float32, bfloat16 and float16")
    return _exchange(plan, x.view(torch.int64), dim, role, what, rows=rows, shift=shift).view(torch.float64)


def check_device(plan: Plan, name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that is not where the plan's group is."""
    ordinal = plan.group._ordinal
    if tensor.get_device() != ordinal or (ordinal < 0 and not tensor.is_cpu):
        where = plan.group.device
        raise TensorError(
            f"{name} is on {tensor.device}, and the plan's group on {where}; move it there with .to({str(where)!r})"
        )


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
