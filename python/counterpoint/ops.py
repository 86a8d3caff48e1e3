"""The operators: attention forward and backward, eager through `autograd.Function`, compiled through `torch.library`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from counterpoint.errors import Error, TensorError
from counterpoint.plan import of_handle, profiling
from counterpoint.rows import borrowed, check_device

if TYPE_CHECKING:
    from counterpoint.plan import Plan


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of `lse` and `sink`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> None:
    """Refuses tensors that the plan is not for, before anything is enqueued."""
    arguments = plan._arguments
    heads = arguments["heads"]
    heads_q, heads_k = (heads, heads) if isinstance(heads, int) else heads
    head_dim, head_dim_v = arguments["head_dim"], arguments["head_dim_v"] or arguments["head_dim"]
    dtype = plan._dtype
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = {
        "q": (q, (plan.q_rows, heads_q, head_dim), dtype),
        "k": (k, (plan.k_rows, heads_k, head_dim), dtype),
        "v": (v, (plan.k_rows, heads_k, head_dim_v), dtype),
    }
    if sink is None and arguments["sink_rows"]:
        raise TensorError(f"sink is missing, and the plan has sink_rows={arguments['sink_rows']}")
    if sink is not None:
        if not arguments["sink_rows"]:
            raise TensorError("sink is given, and the plan has none; plan with sink_rows=1, or as many rows as it has")
        wanted["sink"] = (sink, (arguments["sink_rows"], heads_q), accumulator(dtype))
    for name, (tensor, shape, type_) in wanted.items():
        if tensor.dtype != type_:
            raise TensorError(f"{name} is {tensor.dtype}, and the plan is for {type_}; plan with dtype={tensor.dtype}")
        check_device(name, tensor)
        if tuple(tensor.shape) != shape:
            raise TensorError(f"{name} is {list(tensor.shape)}; the plan wants {list(shape)}: rows, heads, elements of a head")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With elements of a head next to each other; rows and heads may lie as they like."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _run(plan: Plan, backward: bool, given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
    """One pass of the engine: reads `given`, writes `made`."""
    group, settings, measured = plan.group, plan._settings, profiling()
    if measured:
        given = {name: tensor.contiguous() for name, tensor in given.items()}
    with group._named_errors():
        timeline = group._native.attention(
            plan._solution,
            backward=backward,
            overlap=settings.overlap,
            deterministic=settings.deterministic,
            measured=measured,
            inputs=[(name, borrowed(_dense(tensor))) for name, tensor in given.items()],
            outputs=[(name, borrowed(tensor)) for name, tensor in made.items()],
        )
    if timeline is not None:
        plan._measured[backward] = timeline


def run_forward(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the local rows: (out, lse)."""
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_empty((q.shape[0], q.shape[1]), dtype=accumulator(q.dtype))
    given = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    _run(plan, False, given, {"out": out, "lse": lse})
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and sink (of no elements without one)."""
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
    made = {"dq": dq, "dk": dk, "dv": dv}
    if sink is None:
        _run(plan, True, given, made)
        return dq, dk, dv, q.new_empty(0, dtype=lse.dtype)
    # Every rank of this process writes the sum over all ranks.
    dsinks = sink.new_empty((len(plan._ranks_here()) * sink.shape[0], sink.shape[1]))
    _run(plan, True, given | {"sink": sink}, made | {"dsink": dsinks})
    dsink = dsinks[: sink.shape[0]]
    if plan._settings.sink_grad == "share" and plan._rank:
        dsink.zero_()  # of shares, the sum over ranks is the gradient
    return dq, dk, dv, dsink.clone() if len(dsinks) > len(dsink) else dsink


class Attention(torch.autograd.Function):
    """Attention of a plan in eager mode. Keeps nothing of the engine between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_forward(plan, q, k, v, sink)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Error("gradients of gradients of attention are not implemented; leave create_graph=True out")
        if dout is None:
            return None, None, None, None, None
        q, k, v, sink, out, lse = ctx.saved_tensors
        gradients = run_backward(ctx.plan, dout, q, k, v, sink, out, lse)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return (*(gradient if needed else None for gradient, needed in wanted), None)


_library = torch.library.Library("counterpoint", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sink, SymInt plan) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, SymInt plan)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _forward_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, plan: int
) -> tuple[torch.Tensor, torch.Tensor]:
    made = of_handle(plan)
    check(made, q, k, v, sink)
    return run_forward(made, q, k, v, sink)


def _backward_operator(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return run_backward(of_handle(plan), dout, q, k, v, sink, out, lse)


_library.impl("attention", _forward_operator, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward_operator, "CompositeExplicitAutograd")


@torch.library.register_fake("counterpoint::attention", lib=_library)  # type: ignore[untyped-decorator]
def _forward_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, plan: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=accumulator(q.dtype))


@torch.library.register_fake("counterpoint::attention_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_shapes(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsink = q.new_empty(0 if sink is None else sink.shape, dtype=lse.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sink, ctx.plan = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, sink, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return None, None, None, None, None
    q, k, v, sink, out, lse = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.counterpoint.attention_backward(dout, q, k, v, sink, out, lse, ctx.plan)
    return dq, dk, dv, None if sink is None else dsink, None


torch.library.register_autograd("counterpoint::attention", _differentiate, setup_context=_keep, lib=_library)
