"""Attention as operators of `torch.compile`, forward and backward.

A call is an operator that is decomposed while it is traced: what runs are its forward and its backward, which have no formula
for autograd that a compiled step would have to pass by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from counterpoint import ops
from counterpoint.fitting import accumulator
from counterpoint.lookup import kept_by, of_handle

if TYPE_CHECKING:
    from counterpoint.plan import Plan

_library = torch.library.Library("counterpoint", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink"
# Results are as new tensors are, whatever the inputs' strides.
_TAGS = (torch.Tag.needs_fixed_stride_order,)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        max_logits: bool,
        settings: tuple[Any, ...],
    ) -> tuple[torch.Tensor, ...]:
        *made, kept = _operator(f"{name}_forward")(q, k, v, sink, max_logits, *settings)
        ctx.name, ctx.settings = name, settings
        ctx.save_for_backward(q, k, v, sink, made[0], made[1], kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*made[2:])
        return tuple(made)

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None, None, None
        q, k, v, sink, out, lse, kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        made = _operator(f"{ctx.name}_backward")(dout, q, k, v, sink, out, lse, dlse, kept, *ctx.settings)
        return None, *made, *([None] if sink is None else []), None, None


def _operator(name: str) -> Any:
    return getattr(torch.ops.counterpoint, name).default


def _forward_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, max_logits: bool, *_: Any
) -> list[torch.Tensor]:
    rows, heads, _dim = q.shape
    statistic = accumulator(q.dtype)
    made = [q.new_empty((rows, heads, v.shape[2])), q.new_empty((rows, heads), dtype=statistic)]
    if max_logits:
        made.append(q.new_empty(heads, dtype=statistic))
    return [*made, q.new_empty(0)]


def _backward_shapes(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, *_: Any
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (q, k, v, sink) if tensor is not None]


def register(name: str, settings: str, plan_of: Callable[..., tuple[Plan, object]]) -> None:
    """Registers an operator that gives [out, lse], or [out, lse, max_logits], and those that it is made of.

    `plan_of` finds the plan by the tensors q, k, v and sink, and by `settings`, arguments of the operator. With it comes what
    must live for the backward to find the plan again: the operator that runs a forward gives a tensor that keeps it.
    """

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, max_logits: bool, *given: Any
    ) -> list[torch.Tensor]:
        plan, found_by = plan_of(q, k, v, sink, *given)
        kept = kept_by(q, found_by)
        if sink is not None or not ops.fit(plan, q, k, v):
            ops.check(plan, q, k, v, sink)
        if not max_logits:
            return [*ops.run_forward(plan, q, k, v, sink), kept]
        largest = ops.empty_max_logits(plan, q)
        return [*ops.run_forward(plan, q, k, v, sink, largest), largest[: q.shape[1]].clone(), kept]

    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        kept: torch.Tensor,
        *given: Any,
    ) -> list[torch.Tensor]:
        plan, _ = plan_of(q, k, v, sink, *given)
        dq, dk, dv, dsink = ops.run_backward(plan, dout, q, k, v, sink, out, lse, dlse)
        return [dq, dk, dv] if dsink is None else [dq, dk, dv, dsink]

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, max_logits: bool, *given: Any
    ) -> list[torch.Tensor]:
        trained = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
        if trained and torch.is_grad_enabled():
            return [*_Differentiable.apply(name, q, k, v, sink, max_logits, given)]
        made: list[torch.Tensor] = _operator(f"{name}_forward")(q, k, v, sink, max_logits, *given)
        return made[:-1]

    _library.define(f"{name}({_TENSORS}, bool max_logits, {settings}) -> Tensor[]", tags=_TAGS)
    _library.define(f"{name}_forward({_TENSORS}, bool max_logits, {settings}) -> Tensor[]", tags=_TAGS)
    of_forward = "Tensor out, Tensor lse, Tensor? dlse, Tensor kept"
    _library.define(f"{name}_backward(Tensor dout, {_TENSORS}, {of_forward}, {settings}) -> Tensor[]", tags=_TAGS)
    _library.impl(name, call, "CompositeImplicitAutograd")
    _library.impl(f"{name}_forward", forward, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"counterpoint::{name}_forward", _forward_shapes, lib=_library)
    torch.library.register_fake(f"counterpoint::{name}_backward", _backward_shapes, lib=_library)


def _of_handle(q: Any, k: Any, v: Any, sink: Any, handle: int) -> tuple[Plan, Plan]:
    plan = of_handle(handle)
    return plan, plan


register("attention", "SymInt plan", _of_handle)
