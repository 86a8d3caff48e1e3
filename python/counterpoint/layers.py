"""Attention of one layer of a model: on the dispatch of the model's plan, with the layer's own window, scale and cap.

Compiled, it is one operator: the layer's plan is found when it runs, so that a new plan each step compiles nothing again.
"""

from __future__ import annotations

import torch

from counterpoint._native import Mask
from counterpoint.compiled import register
from counterpoint.errors import PlanError
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
        out, _ = torch.ops.counterpoint.layer_attention(q, k, v, sink, False, plan.handle, scale, softcap, window)
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
    known = plan._layers.get(key)
    if known is None:
        made = plan.on(
            plan._given_mask if window is None else windowed(plan, window),
            heads=(q.shape[1], k.shape[1]),
            head_dim=q.shape[2],
            head_dim_v=v.shape[2],
            dtype=q.dtype,
            scale=scale,
            softcap=softcap,
            sink_rows=sink_rows,
        )
        known = plan._layers.put(key, made)
    return known


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


def _plan_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    handle: int,
    scale: float | None,
    softcap: float,
    window: int | None,
) -> tuple[Plan, Plan]:
    plan = of_handle(handle)
    return layer_plan(plan, q, k, v, scale, softcap, window, 0 if sink is None else 1), plan


register("layer_attention", "SymInt plan, float? scale, float softcap, int? window", _plan_of)
