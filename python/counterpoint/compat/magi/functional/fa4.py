"""Attention over slices by the name of MagiAttention's second kernel."""

from __future__ import annotations

import torch

import counterpoint as cp
from counterpoint.compat.magi.functional.flex_flash_attn import mask_of
from counterpoint.functional import flex_attention

# Theirs is another kernel, which may be missing; here it is the same one.
is_fa4_installed = True

_last: cp.Mask | None = None


def ffa_fa4_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor,
    k_ranges: torch.Tensor,
    attn_type_map: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    reuse_attn_arg: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `flex_flash_attn_func`: `(out, lse)`. `reuse_attn_arg` takes the slices of the call before, unread."""
    global _last
    if not reuse_attn_arg or _last is None:
        _last = mask_of(q_ranges, k_ranges, attn_type_map, q.shape[0], k.shape[0])
    careful = True if deterministic else None
    out, lse = flex_attention(q, k, v, _last, scale=softmax_scale, softcap=softcap, deterministic=careful)
    return out, lse
