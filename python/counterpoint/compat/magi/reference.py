"""Dense attention in PyTorch on gathered rows: what MAGI_ATTENTION_KERNEL_BACKEND=sdpa computes, to compare with."""

from __future__ import annotations

from typing import Any

import torch

from counterpoint.plan import Plan


class ScaledGradient(torch.autograd.Function):
    """Changes nothing but the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    sink: torch.Tensor | None,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(out, lse) of the local rows, and max_logits if asked for, by the definition: every rank computes all. Collective."""
    arguments = plan._arguments
    whole_q = plan.undispatch(q)
    ratio = q.shape[1] // k.shape[1]
    keys, values = (plan.undispatch(tensor, role="k").repeat_interleave(ratio, 1) for tensor in (k, v))
    scale = arguments["scale"] if arguments["scale"] is not None else q.shape[2] ** -0.5
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = torch.einsum("qhd,khd->hqk", whole_q.to(wide), keys.to(wide)) * scale
    if arguments["softcap"]:
        logits = arguments["softcap"] * torch.tanh(logits / arguments["softcap"])
    seen = plan.mask.to_dense().to(q.device)
    logits = logits.masked_fill(~seen, -torch.inf)
    max_logits = logits.detach().amax((1, 2))
    if sink is not None:
        if plan._sink_grad == "share" and plan._rank:
            sink = ScaledGradient.apply(sink, 0.0)  # rank 0's share is all of it
        more = sink.to(wide).t().unsqueeze(1).expand(-1, logits.shape[1], -1)
        logits = torch.cat([logits, more], 2)
    # Rows that see nothing give 0, forwards and backwards.
    nothing = (logits == -torch.inf).all(2, keepdim=True)
    safe = logits.masked_fill(nothing, 0.0)
    lse = safe.logsumexp(2, keepdim=True)
    weights = (safe - lse).exp().masked_fill(nothing, 0.0)[:, :, : values.shape[0]]
    out = torch.einsum("hqk,khd->qhd", weights, values.to(wide)).to(q.dtype)
    lse = lse.masked_fill(nothing, -torch.inf).squeeze(2).t()
    results = plan.dispatch(out), plan.dispatch(lse)
    return (*results, max_logits) if return_max_logits else results
