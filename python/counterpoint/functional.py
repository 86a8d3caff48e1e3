"""Attention as functions of tensors."""

from __future__ import annotations

import os
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from counterpoint import compiled, ops
from counterpoint._native import Mask
from counterpoint.alone import alone
from counterpoint.errors import MaskError, TensorError
from counterpoint.plan import Plan
from counterpoint.plan_arguments import scale_of, softcap_of
from counterpoint.recent import Recent


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    sink: torch.Tensor | None = None,
    return_max_logits: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    sink: torch.Tensor | None = None,
    return_max_logits: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    sink: torch.Tensor | None = None,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Attention of the local rows of a plan, over the keys of all its ranks: (out, lse). Collective.

    `q [q_rows, heads, head_dim]`, `k [k_rows, key heads, head_dim]` and `v [k_rows, key heads, head_dim_v]` are local rows in the
    order of `plan.position_ids`, with or without a batch axis of 1. `sink [sink_rows, heads]` is f32 (f64 for f64).
    `lse [q_rows, heads]` is the natural logarithm of the sum of exponentials, -inf where a row sees nothing (`out` is 0 there),
    f32 (f64 for f64); gradients flow through it as through `out`.

    With `return_max_logits` it gives (out, lse, max_logits): `max_logits [heads]` is the largest score of each head, that the
    softmax sees (scaled, capped, without sinks), over the rows of all ranks; the same on every rank, -inf where there is none, of
    lse's type, without a gradient.
    """
    if torch.compiler.is_compiling():
        return _compiled(q, k, v, plan, sink, return_max_logits)
    if return_max_logits:
        return _with_max_logits(q, k, v, plan, sink)
    _check_plan(plan)
    batched = False
    if sink is not None or not ops.fit(plan, q, k, v):
        q, k, v, batched = _rows_first(q, k, v)
        sink = None if sink is None else _sink_rows(sink)
        if sink is not None or not ops.fit(plan, q, k, v):
            ops.check(plan, q, k, v, sink)
    differentiable = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    if differentiable and torch.is_grad_enabled():
        out, lse = ops.differentiable(q, k, v, sink, plan)
    else:
        _check_tangents(q, k, v, sink)
        out, lse = ops.run_forward(plan, q, k, v, sink)
    return (out.unsqueeze(0), lse.unsqueeze(0)) if batched else (out, lse)


def _compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, sink: torch.Tensor | None, max_logits: bool
) -> tuple[torch.Tensor, ...]:
    q, k, v, batched = _rows_first(q, k, v)
    sink = None if sink is None else _sink_rows(sink)
    out, lse, *largest = torch.ops.counterpoint.attention(q, k, v, sink, max_logits, plan.handle)
    return (out.unsqueeze(0), lse.unsqueeze(0), *largest) if batched else (out, lse, *largest)


def _with_max_logits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, batched = _rows_first(q, k, v)
    if sink is not None:
        sink = _sink_rows(sink)
    _check_plan(plan)
    ops.check(plan, q, k, v, sink)
    largest = ops.empty_max_logits(plan, q)
    differentiable = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    if differentiable and torch.is_grad_enabled():
        out, lse = ops.differentiable(q, k, v, sink, plan, largest)
    else:
        _check_tangents(q, k, v, sink)
        out, lse = ops.run_forward(plan, q, k, v, sink, largest)
    largest = largest[: q.shape[1]]
    return (out.unsqueeze(0), lse.unsqueeze(0), largest) if batched else (out, lse, largest)


def _rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """The tensors without a batch axis, and whether they had one."""
    if type(q) is torch.Tensor and type(k) is torch.Tensor and type(v) is torch.Tensor and q.ndim == k.ndim == v.ndim == 3:
        return q, k, v, False
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
        if tensor.ndim not in (3, 4) or tensor.ndim != q.ndim or (tensor.ndim == 4 and tensor.shape[0] != 1):
            raise TensorError(
                f"{name} is {list(tensor.shape)}; all three are [tokens, heads, head_dim], or [1, tokens, heads, head_dim]: "
                "pack a batch of several sequences into one"
            )
    if q.ndim == 3:
        return q, k, v, False
    return q.squeeze(0), k.squeeze(0), v.squeeze(0), True


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{name} must be a torch.Tensor, not a {type(tensor).__name__}")
    if not torch.compiler.is_compiling() and is_traceable_wrapper_subclass(tensor):
        way = f": give {name}.to_local()" if hasattr(tensor, "to_local") else ""
        raise TensorError(f"{name} is a {type(tensor).__name__}, and attention takes the dense rows of this process{way}")


def _sink_rows(sink: torch.Tensor) -> torch.Tensor:
    _check_tensor("sink", sink)
    if sink.ndim not in (1, 2) or 0 in sink.shape:
        raise TensorError(f"sink is {list(sink.shape)}; it must be [heads] or [rows, heads], with a row at least")
    return sink.unsqueeze(0) if sink.ndim == 1 else sink


def _check_tangents(*tensors: torch.Tensor | None) -> None:
    """Refuses tensors with a derivative of forward mode, which would be lost, and others of torch.func's. `autograd.Function`
    refuses derivatives of forward mode by itself."""
    # A private name, by which most calls need not look at each tensor; without it they do.
    is_forward_mode = getattr(forward_ad, "_current_level", 0) >= 0
    if is_forward_mode and any(one is not None and forward_ad.unpack_dual(one).tangent is not None for one in tensors):
        raise NotImplementedError("counterpoint has no derivatives of forward mode (jvp); use backward")
    ops.refuse_transforms()


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TensorError(f"plan must be a counterpoint.Plan, as Group.plan makes it, not a {type(plan).__name__}")


# For the last masks and shapes.
_plans: Recent[Any, Plan] = Recent(64)
# A fork has no threads of their groups: there, calls are refused in the words of a process that cannot make one.
os.register_at_fork(after_in_child=_plans.clear)


def flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Attention over any mask on this device, without ranks: (out, lse), as `attention`, and max_logits if asked for.

    On a GPU the call is enqueued on PyTorch's current stream and returns at once. Plans are kept for the last 64 masks and
    shapes. Inside `torch.compile` it is an operator that takes the mask as a number, so a new mask compiles nothing again.
    """
    if not isinstance(mask, Mask):
        raise MaskError(
            f"mask must be a counterpoint.Mask, not a {type(mask).__name__}; Mask.from_dense takes a tensor of booleans"
        )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    rows_q, rows_k, rows_v, batched = _rows_first(q, k, v)
    if sink is not None:
        sink = _sink_rows(sink)
    if torch.compiler.is_compiling():
        settings = mask.number, scale, softcap, deterministic
        made = torch.ops.counterpoint.flex_attention(rows_q, rows_k, rows_v, sink, return_max_logits, *settings)
        out, lse, *largest = made
        return (out.unsqueeze(0), lse.unsqueeze(0), *largest) if batched else (out, lse, *largest)
    scale, softcap = None if scale is None else scale_of(scale), softcap_of(softcap)
    plan = _plan_for(rows_q, rows_k, rows_v, sink, mask, scale, softcap, deterministic)
    if return_max_logits:
        return _with_max_logits(q, k, v, plan, sink)
    return attention(q, k, v, plan, sink=sink)


def _plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    mask: Mask,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> Plan:
    """The plan of one device for these tensors, kept."""
    shape_q, shape_k, shape_v, queries, keys = q.shape, k.shape, v.shape, mask.seqlen_q, mask.seqlen_k
    if shape_q[0] != queries or shape_k[0] != keys or shape_v[0] != keys:
        for name, found, rows in (("q", shape_q[0], queries), ("k", shape_k[0], keys), ("v", shape_v[0], keys)):
            if found != rows:
                raise TensorError(f"{name} has {found} rows, and the mask {rows}; make a mask of as many rows")
    sink_rows = 0 if sink is None else sink.shape[0]
    key = (mask, shape_q[1:], shape_k[1], shape_v[2], q.dtype, q.device, scale, softcap, sink_rows, deterministic)
    plan = _plans.get(key)
    return _plan_alone(key) if plan is None or plan.group._is_failure_known else plan


def _plan_of_number(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    number: int,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> tuple[Plan, Mask]:
    mask = Mask.of_number(number)
    if mask is None:
        raise MaskError(f"mask {number} is gone; keep a reference to a mask as long as a compiled call may use it")
    return _plan_for(q, k, v, sink, mask, scale, softcap, deterministic), mask


compiled.register("flex_attention", "SymInt mask, float? scale, float softcap, bool deterministic", _plan_of_number)


def _plan_alone(key: Any) -> Plan:
    mask, (heads_q, head_dim), heads_k, head_dim_v, dtype, device, scale, softcap, sink_rows, deterministic = key
    plan = alone(device).plan(
        mask,
        heads=(heads_q, heads_k),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        scale=scale,
        softcap=softcap,
        sink_rows=sink_rows,
        deterministic=deterministic,
    )
    return _plans.put(key, plan)
