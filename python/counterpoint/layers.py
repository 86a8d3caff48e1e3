"""Attention of one layer of a model: on the dispatch of the model's plan, with the layer's own window, scale and cap.

Compiled, it is one operator: the layer's plan is found when it runs, so that a new plan each step compiles nothing again.
"""

from __future__ import annotations

from typing import Any

import torch

from counterpoint import ops
from counterpoint._native import Mask
from counterpoint.errors import PlanError
from counterpoint.fitting import accumulator
from counterpoint.functional import attention
from counterpoint.lookup import of_handle
from counterpoint.plan import Plan


def layer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    scale: float | None,
    softcap: float,
    window: int | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[rows, heads, elements]`; `sink` is `[1, heads]`, and `window` counts the token itself."""
    if torch.compiler.is_compiling():
        out: torch.Tensor
        out, _ = torch.ops.counterpoint.layer_attention(q, k, v, sink, plan.handle, scale, softcap, window)
        return out
    own = layer_plan(plan, q, k, v, scale, softcap, window, 0 if sink is None else 1)
    return attention(q, k, v, own, sink=sink)[0]


def layer_plan(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    softcap: float,
    window: int | None,
    sink_rows: int,
) -> Plan:
    """The plan of a layer's window, scale, cap and heads on the dispatch of `plan`; kept."""
    key = (window, q.shape[1:], k.shape[1], v.shape[2], q.dtype, scale, softcap, sink_rows)
    if key not in plan._layers:
        plan._layers[key] = plan.on(
            plan._given_mask if window is None else windowed(plan, window),
            heads=(q.shape[1], k.shape[1]),
            head_dim=q.shape[2],
            head_dim_v=v.shape[2],
            dtype=q.dtype,
            scale=scale,
            softcap=softcap,
            sink_rows=sink_rows,
        )
    return plan._layers[key]


def windowed(plan: Plan, window: int) -> Mask:
    """The mask of a plan for layers in which a token sees `window` tokens, itself among them."""
    if window in plan._windows:
        return plan._windows[window]
    mask = plan._given_mask
    if not all(q == k and kind == "causal" for q, k, kind in mask.slices):
        raise PlanError(
            f"a layer has a sliding window of {window}, and the plan's mask is not one of causal documents: "
            f"give the mask of such layers as Batch.prepare(..., windows={{{window}: mask}})"
        )
    parts = [part for q, _, _ in mask.slices for part in _windowed_document(*q, window)]
    q, k, kinds = ([part[axis] for part in parts] for axis in range(3))
    plan._windows[window] = Mask.from_slices(q, k, kinds, seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k)
    return plan._windows[window]


def _windowed_document(start: int, end: int, window: int) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """A causal document whose tokens see `window` tokens: a triangle, and the band below it."""
    full = min(end, start + window)
    first = ((start, full), (start, full), "causal")
    return [first, ((full, end), (full - window + 1, end), "bi_causal")] if full < end else [first]


_library = torch.library.Library("counterpoint", "FRAGMENT")
_SETTINGS = "SymInt plan, float? scale, float softcap, int? window"
_library.define(
    f"layer_attention(Tensor q, Tensor k, Tensor v, Tensor? sink, {_SETTINGS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    f"layer_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    plan: int,
    scale: float | None,
    softcap: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    own = layer_plan(of_handle(plan), q, k, v, scale, softcap, window, 0 if sink is None else 1)
    ops.check(own, q, k, v, sink)
    return ops.run_forward(own, q, k, v, sink)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: int,
    scale: float | None,
    softcap: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own = layer_plan(of_handle(plan), q, k, v, scale, softcap, window, 0 if sink is None else 1)
    return ops.operator_gradients(ops.run_backward(own, dout, q, k, v, sink, out, lse), lse)


_library.impl("layer_attention", _forward, "CompositeExplicitAutograd")
_library.impl("layer_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("counterpoint::layer_attention", lib=_library)  # type: ignore[untyped-decorator]
def _forward_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, plan: int, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=accumulator(q.dtype))


@torch.library.register_fake("counterpoint::layer_attention_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_shapes(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsink = q.new_empty(0 if sink is None else sink.shape, dtype=lse.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sink, *ctx.settings = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, sink, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, _dlse: None) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * len(ctx.settings)
    if dout is None:
        return None, None, None, None, *nothing
    q, k, v, sink, out, lse = ctx.saved_tensors
    backward = torch.ops.counterpoint.layer_attention_backward
    dq, dk, dv, dsink = backward(dout, q, k, v, sink, out, lse, *ctx.settings)
    return dq, dk, dv, None if sink is None else dsink, *nothing


torch.library.register_autograd("counterpoint::layer_attention", _differentiate, setup_context=_keep, lib=_library)
