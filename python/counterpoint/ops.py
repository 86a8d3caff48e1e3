"""Attention forward and backward on tensors of PyTorch, with gradients by `autograd.Function`; operators are in `compiled.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from counterpoint.collectives import check_device, dense
from counterpoint.errors import Error, TensorError
from counterpoint.fitting import accumulator
from counterpoint.profiling import profiling

if TYPE_CHECKING:
    from counterpoint.plan import Plan

# An address; of a tensor that is not dense also the elements from a row to the next and from a head to the next.
Place = int | tuple[int, int, int]


def fit(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these are what the plan is for, with neither a batch axis nor a sink: one look at what most calls give."""
    fits = plan._fitting or plan._fits()
    dtype, ordinal = fits.dtype, fits.ordinal
    return (
        fits.sink is None
        and type(q) is type(k) is type(v) is torch.Tensor
        and q.shape == fits.q
        and k.shape == fits.k
        and v.shape == fits.v
        and q.dtype is k.dtype is v.dtype is dtype
        and q.get_device() == ordinal
        and k.get_device() == ordinal
        and v.get_device() == ordinal
        and (ordinal >= 0 or (q.is_cpu and k.is_cpu and v.is_cpu))
        and q.layout is k.layout is v.layout is torch.strided
    )


def check(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> None:
    """Refuses tensors that the plan is not for, before anything is enqueued."""
    fits = plan._fits()
    dtype = fits.dtype
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = {
        "q": (q, fits.q, dtype),
        "k": (k, fits.k, dtype),
        "v": (v, fits.v, dtype),
    }
    if sink is None and fits.sink is not None:
        raise TensorError(f"sink is missing, and the plan has sink_rows={fits.sink[0]}")
    if sink is not None:
        if fits.sink is None:
            raise TensorError("sink is given, and the plan has none; plan with sink_rows=1, or as many rows as it has")
        wanted["sink"] = (sink, fits.sink, fits.statistic)
    for name, (tensor, shape, type_) in wanted.items():
        if tensor.layout != torch.strided:
            raise TensorError(f"{name} is {tensor.layout}; attention takes dense tensors: give {name}.to_dense()")
        if tensor.dtype != type_ and name == "sink":
            raise TensorError(
                f"sink is {tensor.dtype}; with tensors of {dtype} it must be {type_}, as the statistics are: sink.to({type_})"
            )
        if tensor.dtype != type_:
            raise TensorError(f"{name} is {tensor.dtype}, and the plan is for {type_}; plan with dtype={tensor.dtype}")
        check_device(plan.group, name, tensor, "the plan's group")
        if tuple(tensor.shape) != shape:
            raise TensorError(f"{name} is {list(tensor.shape)}; the plan wants {list(shape)}: rows, heads, elements of a head")


def place(tensor: torch.Tensor, on_gpu: bool) -> tuple[Place, torch.Tensor]:
    """Where it lies, where the engine takes it so: rows and heads may be apart, on GPUs by multiples of 16 bytes. Or a copy.
    With the tensor that lies there."""
    if tensor.is_neg():
        # A view whose memory has the other sign.
        tensor = tensor.resolve_neg()
    address = tensor.data_ptr()
    if tensor.is_contiguous():
        if not on_gpu or not address & 15:
            return address, tensor
        tensor = tensor.clone()
        return tensor.data_ptr(), tensor
    row, head, element = tensor.stride()
    rows, heads, elements = tensor.shape
    copies = element != 1 and elements > 1
    if on_gpu and not copies:
        inside, outside = ((heads, head), (rows, row)) if head <= row else ((rows, row), (heads, head))
        reach = (inside[0] - 1) * inside[1] + elements
        overlaps = (inside[0] > 1 and inside[1] < elements) or (outside[0] > 1 and outside[1] < reach)
        copies = overlaps or bool((address | row * tensor.itemsize | head * tensor.itemsize) & 15)
    if copies:
        tensor = tensor.contiguous()
        return tensor.data_ptr(), tensor
    return (address, row, head), tensor


def places(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, on_gpu: bool
) -> tuple[Place, Place, Place, tuple[torch.Tensor, ...]]:
    """The same of all three at once, where all are dense."""
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (
        q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not (on_gpu and (at_q | at_k | at_v) & 15)
    ):
        return at_q, at_k, at_v, (q, k, v)
    (placed_q, q), (placed_k, k), (placed_v, v) = place(q, on_gpu), place(k, on_gpu), place(v, on_gpu)
    return placed_q, placed_k, placed_v, (q, k, v)


def run_forward(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the local rows: (out, lse). Writes `max_logits`, if it is given: a copy for each rank of this process."""
    fits = plan._fitting or plan._fits()
    stream, measured = fits.stream(), profiling()
    out, lse = fits.new_out(), fits.new_lse()
    if measured:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    at_q, at_k, at_v, inputs = places(q, k, v, fits.ordinal >= 0)
    sink = None if sink is None else sink.resolve_neg().contiguous()
    asked = max_logits is not None
    calls = plan._measured_calls(max_logits=asked) if measured else plan._asking(stream, max_logits=asked)
    try:
        timeline = calls.forward(
            stream,
            at_q,
            at_k,
            at_v,
            None if sink is None else sink.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            None if max_logits is None else max_logits.data_ptr(),
            (inputs, sink, out, lse, max_logits),
        )
    except BaseException as error:
        plan.group._note(error)
        raise
    if timeline is not None:
        plan._measured[False] = timeline
    return out, lse


def run_backward(
    plan: Plan,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v and, where there is one, sink."""
    fits = plan._fitting or plan._fits()
    stream, measured, on_gpu = fits.stream(), profiling(), fits.ordinal >= 0
    dq, dk, dv = fits.new_q(), fits.new_k(), fits.new_v()
    dsinks = None
    if sink is not None:
        # Every rank of this process writes the sum over all ranks.
        copies = len(plan._ranks_here())
        dsinks = sink.new_empty((copies * sink.shape[0], sink.shape[1]))
        sink = sink.resolve_neg().contiguous()
    if measured:
        dout, q, k, v = dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    at_q, at_k, at_v, inputs = places(q, k, v, on_gpu)
    at_dout, dout = place(dout, on_gpu)
    # Hooks on what is saved may lay it out as they like.
    out, lse = dense(out), dense(lse)
    if dlse is not None:
        dlse = dense(dlse)
    asked = dlse is not None
    calls = plan._measured_calls(dlse=asked) if measured else plan._asking(stream, dlse=asked)
    try:
        timeline = calls.backward(
            stream,
            at_dout,
            at_q,
            at_k,
            at_v,
            None if sink is None else sink.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            None if dlse is None else dlse.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            None if dsinks is None else dsinks.data_ptr(),
            (inputs, dout, sink, out, lse, dlse, dq, dk, dv, dsinks),
        )
    except BaseException as error:
        plan.group._note(error)
        raise
    if timeline is not None:
        plan._measured[True] = timeline
    if sink is None or dsinks is None:
        return dq, dk, dv, None
    dsink = dsinks[: sink.shape[0]]
    if plan._sink_grad == "share" and plan._rank:
        dsink.zero_()  # of shares, the sum over ranks is the gradient
    return dq, dk, dv, dsink.clone() if dsink.shape != dsinks.shape else dsink


def empty_max_logits(plan: Plan, q: torch.Tensor) -> torch.Tensor:
    """Room for the largest score of each head, a copy for each rank of this process."""
    return q.new_empty((len(plan._ranks_here()) * q.shape[1],), dtype=accumulator(q.dtype))


class Attention(torch.autograd.Function):
    """Attention of a plan in eager mode. Keeps nothing of the engine between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        plan: Plan,
        max_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_forward(plan, q, k, v, sink, max_logits)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_transforms()
        if torch.is_grad_enabled():
            raise Error("gradients of gradients of attention are not implemented; leave create_graph=True out")
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        q, k, v, sink, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        # Autograd drops those that nobody asked for.
        return *run_backward(ctx.plan, dout, q, k, v, sink, out, lse, dlse), None, None


# What autograd's node calls, which else finds out at every call which function it is for.
Attention._backward_cls.apply = Attention.backward  # type: ignore[attr-defined]


def refuse_transforms() -> None:
    """Refuses calls inside of transforms of torch.func, whose tensors have no memory of their own."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "attention is called inside of a transform of torch.func (grad, vjp, vmap), for which it has no rule: use "
            "backward or torch.autograd.grad, and pack what vmap would batch into one sequence"
        )


# What `Attention.apply` comes to outside of torch.func, without its steps for that, which take longer than the rest.
_apply = super(torch.autograd.Function, Attention).apply


def differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    plan: Plan,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the local rows, with gradients: (out, lse). Writes `max_logits`, as `run_forward` does."""
    refuse_transforms()
    made: tuple[torch.Tensor, torch.Tensor] = _apply(q, k, v, sink, plan, max_logits)
    return made
