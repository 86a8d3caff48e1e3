"""Rows between ranks: tensors of any type and layout as the engine moves them; group_cast and group_reduce by splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.autograd.function import once_differentiable

from counterpoint._native import Splits
from counterpoint.errors import TensorError
from counterpoint.lookup import group_of_handle, kept_by

if TYPE_CHECKING:
    from counterpoint.group import _Group

Borrowed = tuple[int, tuple[int, ...], tuple[int, ...], str, torch.Tensor]

# The engine moves floats. Of other types it moves the bits, as floats of the same size; on GPUs 8 bytes are two floats, and what
# has one byte is widened to two.
_CARRIERS = {torch.int64: torch.float64, torch.int32: torch.float32, torch.int16: torch.float16}
_WIDENED = {torch.uint8, torch.int8, torch.bool}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_GRADIENT = 'op="lse" has no gradient; call it under torch.no_grad(), or detach what it takes'
_CARRIERS_ON_GPUS = {**_CARRIERS, torch.int64: torch.float32}
_NAME_OF = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def borrowed(tensor: torch.Tensor) -> Borrowed:
    """A tensor as the engine takes it, which keeps it alive as long as it uses the memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), _NAME_OF[tensor.dtype], tensor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and on GPUs where the engine reads it: at a multiple of 16 bytes."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() & 15 else tensor


def check_device(group: _Group, name: str, tensor: torch.Tensor, whose: str = "the group") -> None:
    """Refuses a tensor that is not where the group is."""
    ordinal = group._ordinal
    if tensor.get_device() != ordinal or (ordinal < 0 and not tensor.is_cpu):
        where = group.device
        raise TensorError(f"{name} is on {tensor.device}, and {whose} on {where}; move it there with .to({str(where)!r})")


def moved(
    group: _Group,
    x: torch.Tensor,
    dim: int,
    rows: int,
    call: Callable[[Borrowed, Borrowed], None],
    *,
    sums: bool = False,
) -> torch.Tensor:
    """`x` with `rows` rows along `dim`, which `call` writes.

    It is given the tensor as `[rows of x, elements]` of a type that the engine knows, and the result likewise, of which it
    writes every row. `sums` says that it adds up, into rows that are 0 else.
    """
    # The engine reads memory as it lies, and not through a view that conjugates or negates.
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        parts = moved(group, torch.view_as_real(x), dim % x.ndim, rows, call, sums=sums)
        return torch.view_as_complex(parts.contiguous())
    if x.is_cuda and x.dtype == torch.float64:
        if sums:
            raise TensorError("x is torch.float64; on GPUs rows are added up in float32, bfloat16 and float16")
        # Moved as the bits that they are.
        return moved(group, x.view(torch.int64), dim, rows, call).view(torch.float64)
    if sums and x.dtype not in _NAME_OF:
        raise TensorError(f"x is {x.dtype}; rows are added up in {', '.join(map(str, _NAME_OF))}")
    if x.is_quantized:
        raise TensorError(f"x is {x.dtype}; give its int_repr(), and its scales by themselves")
    if x.dtype not in _NAME_OF and x.dtype not in _CARRIERS and x.dtype not in _WIDENED:
        return moved(group, x.view(_BITS[x.element_size()]), dim, rows, call).view(x.dtype)
    first = x.movedim(dim, 0)
    tail, dtype = first.shape[1:], x.dtype
    carriers = _CARRIERS_ON_GPUS if x.is_cuda else _CARRIERS
    # Not -1, which of no rows could be any number.
    flat = first.reshape(first.shape[0], math.prod(tail)).contiguous()
    if dtype in carriers:
        flat = flat.view(carriers[dtype])
    elif dtype not in _NAME_OF:
        flat = flat.to(torch.int16).view(torch.float16)
    result = (flat.new_zeros if sums else flat.new_empty)((rows, flat.shape[1]))
    if flat.shape[1]:
        with group._named_errors():
            call(borrowed(flat), borrowed(result))
    if dtype in carriers:
        result = result.view(dtype)
    elif dtype not in _NAME_OF:
        result = result.view(torch.int16).to(dtype)
    return result.reshape(rows, *tail).movedim(0, dim)


def group_cast(x: torch.Tensor, splits: Splits | Sequence[Splits], group: _Group) -> torch.Tensor:
    """Sends every split of `x` to its own set of ranks, each row once to each: what comes to this rank. Collective.

    `x [rows, ...]` has the rows of `splits.rows[0]` of any type, the result those of `splits.rows[1]`. All ranks call it with
    rows of the same shape and type. The backward is `group_reduce` of the gradient. A `LocalGroup` takes splits of each of
    its ranks, and rows of all of them, one rank's after the other's. Inside of a CUDA graph of several ranks it has been called
    once before.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.counterpoint.group_cast(x, *_traced(splits, group, 1))[0]
        return compiled
    given = _checked(x, splits, group, 0)
    result: torch.Tensor = _Cast.apply(x, given, group)
    return result


@overload
def group_reduce(
    x: torch.Tensor, splits: Splits | Sequence[Splits], group: _Group, *, op: Literal["sum", "avg"] = "sum", lse: None = None
) -> torch.Tensor: ...


@overload
def group_reduce(
    x: torch.Tensor, splits: Splits | Sequence[Splits], group: _Group, *, op: Literal["lse"], lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def group_reduce(
    x: torch.Tensor,
    splits: Splits | Sequence[Splits],
    group: _Group,
    *,
    op: Literal["sum", "avg", "lse"] = "sum",
    lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Brings partial results back to where their rows came from by `group_cast`, and combines them there. Collective.

    `x [rows, ...]` has the rows of `splits.rows[1]`, the result those of `splits.rows[0]`; rows to which nothing comes are 0.
    Sums are in f32 (f64 of f64), of ranks in ascending order: the same bits every time. `op="avg"` divides by how many ranks
    a row comes from. The backward is `group_cast` of the gradient.

    `op="lse"` merges attention over other keys: `x [rows, heads, head_dim]` are outputs and `lse [rows, heads]`, f32 (f64 of
    f64), natural logarithms of their sums of exponentials. It gives both, with lse -inf where nothing comes, and has no
    gradient.
    """
    if op not in ("sum", "avg", "lse"):
        raise TensorError(f'op is {op!r}; it must be "sum", "avg" or "lse"')
    if op != "lse" and lse is not None:
        raise TensorError(f'lse is given with op={op!r}; only op="lse" takes it')
    if torch.compiler.is_compiling():
        merged: tuple[torch.Tensor, torch.Tensor]
        if op == "lse":
            merged = torch.ops.counterpoint.group_merge(x, lse, *_traced(splits, group, 0))
            return merged
        compiled: torch.Tensor = torch.ops.counterpoint.group_reduce(x, op, *_traced(splits, group, 0))[0]
        return compiled
    given = _checked(x, splits, group, 1)
    if op == "lse":
        return _merged(x, lse, given, group)
    result: torch.Tensor = _Reduce.apply(x, given, group, op)
    return result


def _checked(x: torch.Tensor, splits: Splits | Sequence[Splits], group: _Group, side: int) -> tuple[Splits, ...]:
    given = tuple(splits) if isinstance(splits, Sequence) else (splits,)
    if not all(isinstance(one, Splits) for one in given):
        raise TensorError("splits must be counterpoint.Splits, or a list of one for each rank of a LocalGroup")
    here = group.size if group._native.rank is None else 1
    if len(given) != here:
        raise TensorError(f"splits are of {len(given)} ranks; the group has {here} in this process")
    if not isinstance(x, torch.Tensor):
        raise TensorError(f"x must be a torch.Tensor, not a {type(x).__name__}")
    check_device(group, "x", x)
    wanted = sum(one.rows[side] for one in given)
    if x.ndim == 0 or x.shape[0] != wanted:
        raise TensorError(f"x is {list(x.shape)}; the splits have {wanted} rows for it")
    return given


def _traced(splits: Splits | Sequence[Splits], group: _Group, side: int) -> tuple[list[int], int, int]:
    """What operators are given of splits and their group: numbers, and the rows of the result."""
    given = (splits,) if isinstance(splits, Splits) else tuple(splits)
    return [one.number for one in given], sum(one.rows[side] for one in given), group._number


def _move(x: torch.Tensor, splits: tuple[Splits, ...], group: _Group, what: str) -> torch.Tensor:
    def call(source: Borrowed, target: Borrowed) -> None:
        group._native.move_by_splits(list(splits), what, group._stream(), [(source, target)])

    side = 1 if what == "cast" else 0
    return moved(group, x, 0, sum(one.rows[side] for one in splits), call, sums=what != "cast")


def _merged(
    out: torch.Tensor, lse: torch.Tensor | None, splits: tuple[Splits, ...], group: _Group
) -> tuple[torch.Tensor, torch.Tensor]:
    statistic = torch.float64 if out.dtype == torch.float64 else torch.float32
    if lse is not None and not isinstance(lse, torch.Tensor):
        raise TensorError(f"lse must be a torch.Tensor, not a {type(lse).__name__}")
    if lse is None or lse.shape != out.shape[:2] or lse.dtype != statistic or out.ndim != 3 or out.dtype not in _NAME_OF:
        given = "not given" if lse is None else f"{list(lse.shape)} of {lse.dtype}"
        raise TensorError(
            f"lse is {given}, and x {list(out.shape)} of {out.dtype}; x is [rows, heads, head_dim] of floats, and lse "
            "[rows, heads] of torch.float32 (torch.float64 of torch.float64)"
        )
    check_device(group, "lse", lse)
    if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
        raise TensorError(_NO_GRADIENT)
    out, lse, rows = dense(out), dense(lse), sum(one.rows[0] for one in splits)
    merged, logarithms = out.new_zeros(rows, *out.shape[1:]), lse.new_full((rows, lse.shape[1]), -math.inf)
    if out.shape[1] and out.shape[2]:
        pairs = [(borrowed(out), borrowed(merged)), (borrowed(lse), borrowed(logarithms))]
        with group._named_errors():
            group._native.move_by_splits(list(splits), "lse", group._stream(), pairs)
    return merged, logarithms


def _counts(splits: tuple[Splits, ...], x: torch.Tensor) -> torch.Tensor:
    """How many ranks each row comes from, at least 1, `[rows, 1, ...]`."""
    on_host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    sizes = torch.tensor([size for one in splits for size in one.input_split_sizes], **on_host)
    counts = torch.tensor([max(len(ranks), 1) for one in splits for ranks in one.dst_ranks], **on_host)
    return counts.repeat_interleave(sizes).view(-1, *[1] * (x.ndim - 1)).to(x.device, x.dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: tuple[Splits, ...], group: _Group) -> torch.Tensor:
        ctx.splits, ctx.group = splits, group
        return _move(x, splits, group, "cast")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _move(grad, ctx.splits, ctx.group, "sum"), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: tuple[Splits, ...], group: _Group, op: str) -> torch.Tensor:
        ctx.splits, ctx.group, ctx.op = splits, group, op
        return _move(x, splits, group, op)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.op == "avg":
            grad = grad / _counts(ctx.splits, grad)
        return _move(grad, ctx.splits, ctx.group, "cast"), None, None, None


# The same under `torch.compile`: splits and groups are numbers there, so that new ones compile nothing again. `rows` are those of
# the result. Each gives another tensor too, which keeps the splits until the backward has run.
_library = torch.library.Library("counterpoint", "FRAGMENT")
_SPLITS = "SymInt[] splits, SymInt rows, SymInt group"
_library.define(f"group_cast(Tensor x, {_SPLITS}) -> (Tensor, Tensor)")
_library.define(f"group_reduce(Tensor x, str op, {_SPLITS}) -> (Tensor, Tensor)")
_library.define(f"group_cast_backward(Tensor grad, Tensor kept, {_SPLITS}) -> Tensor")
_library.define(f"group_reduce_backward(Tensor grad, Tensor kept, str op, {_SPLITS}) -> Tensor")
_library.define(f"group_merge(Tensor x, Tensor? lse, {_SPLITS}) -> (Tensor, Tensor)")


def _of_numbers(splits: Sequence[int]) -> tuple[Splits, ...]:
    found = [Splits.of_number(number) for number in splits]
    for number, one in zip(splits, found, strict=True):
        if one is None:
            raise TensorError(f"splits {number} are gone; keep a reference to splits as long as a compiled call may use them")
    return tuple(one for one in found if one is not None)


def _cast_operator(x: torch.Tensor, splits: list[int], rows: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = group_of_handle(group)
    given = _checked(x, _of_numbers(splits), own, 0)
    return _move(x, given, own, "cast"), kept_by(x, given)


def _reduce_operator(x: torch.Tensor, op: str, splits: list[int], rows: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = group_of_handle(group)
    given = _checked(x, _of_numbers(splits), own, 1)
    return _move(x, given, own, op), kept_by(x, given)


def _cast_backward_operator(grad: torch.Tensor, kept: torch.Tensor, splits: list[int], rows: int, group: int) -> torch.Tensor:
    return _move(grad, _of_numbers(splits), group_of_handle(group), "sum")


def _reduce_backward_operator(
    grad: torch.Tensor, kept: torch.Tensor, op: str, splits: list[int], rows: int, group: int
) -> torch.Tensor:
    given = _of_numbers(splits)
    grad = grad / _counts(given, grad) if op == "avg" else grad
    return _move(grad, given, group_of_handle(group), "cast")


def _merge_operator(
    x: torch.Tensor, lse: torch.Tensor | None, splits: list[int], rows: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own = group_of_handle(group)
    return _merged(x, lse, _checked(x, _of_numbers(splits), own, 1), own)


def _merge_without_gradient(
    x: torch.Tensor, lse: torch.Tensor | None, splits: list[int], rows: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and (x.requires_grad or (lse is not None and lse.requires_grad)):
        raise TensorError(_NO_GRADIENT)
    with torch._C._AutoDispatchBelowAutograd():
        made: tuple[torch.Tensor, torch.Tensor] = torch.ops.counterpoint.group_merge.default(x, lse, splits, rows, group)
    return made


def _with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


for _name, _run, _shapes in (
    ("group_cast", _cast_operator, lambda x, splits, rows, group: (_with_rows(x, rows), x.new_empty(0))),
    ("group_reduce", _reduce_operator, lambda x, op, splits, rows, group: (_with_rows(x, rows), x.new_empty(0))),
    ("group_cast_backward", _cast_backward_operator, lambda grad, kept, splits, rows, group: _with_rows(grad, rows)),
    ("group_reduce_backward", _reduce_backward_operator, lambda grad, kept, op, splits, rows, group: _with_rows(grad, rows)),
    ("group_merge", _merge_operator, lambda x, lse, splits, rows, group: (_with_rows(x, rows), _with_rows(lse, rows))),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"counterpoint::{_name}", _shapes, lib=_library)
_library.impl("group_merge", _merge_without_gradient, "Autograd")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, *ctx.given = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _cast_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    splits, _rows, group = ctx.given
    (kept,) = ctx.saved_tensors
    return torch.ops.counterpoint.group_cast_backward(grad, kept, splits, ctx.rows, group), None, None, None


def _reduce_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    op, splits, _rows, group = ctx.given
    (kept,) = ctx.saved_tensors
    return torch.ops.counterpoint.group_reduce_backward(grad, kept, op, splits, ctx.rows, group), None, None, None, None


torch.library.register_autograd("counterpoint::group_cast", _cast_backward, setup_context=_keep, lib=_library)
torch.library.register_autograd("counterpoint::group_reduce", _reduce_backward, setup_context=_keep, lib=_library)
