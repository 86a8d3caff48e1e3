"""Attention over slices on one device."""

from __future__ import annotations

from typing import Any

import torch

import counterpoint as cp
from counterpoint.compat.magi.common.enum import AttnSinkLayout
from counterpoint.compat.magi.common.forward_meta import AttnForwardMeta
from counterpoint.compat.magi.functional.utils import correct_attn_out_lse_with_sink
from counterpoint.compat.magi.hints import hints, refuse
from counterpoint.functional import flex_attention
from counterpoint.recent import Recent

# Ranges that lie on a GPU, as masks: reading them waits for the device.
_masks: Recent[tuple[object, ...], tuple[tuple[torch.Tensor | None, ...], cp.Mask]] = Recent(64)


def flex_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor | None = None,
    k_ranges: torch.Tensor | None = None,
    attn_type_map: torch.Tensor | None = None,
    *,
    index_attn_indices: torch.Tensor | None = None,
    q_block_size: int = 1,
    k_block_size: int = 1,
    sink: torch.Tensor | None = None,
    sink_layout: AttnSinkLayout = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    auto_range_merge: bool = False,
    swap_ab: bool = False,
    pack_gqa: bool = False,
    cat_gqa: bool = False,
    sparse_load: bool = False,
    index_attn: bool = False,
    swap_bwd_qk_loop: bool = False,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention over slices: `(out, AttnForwardMeta(lse, max_logits))`; `max_logits [heads]` with `return_max_logits`, else None.

    `q [rows, heads, head_dim]`, `k` and `v` likewise of their rows and heads; `q_ranges` and `k_ranges [slices, 2]`,
    `attn_type_map [slices]` (0 full, 1 causal, 2 inverse causal, 3 both; all full without it). Slices that overlap are an error.
    `sink [sink tokens, heads]` is f32; `[rows, sink tokens, heads]` with `sink_layout="ssh"`. Arguments after `deterministic`,
    but for what is refused, are hints.
    """
    if index_attn_indices is not None or index_attn or (q_block_size, k_block_size) != (1, 1):
        refuse("index_attn_indices", "keys that are chosen for each query by index are no slices; use q_ranges and k_ranges")
    if sink is not None and sink_layout not in ("sh", "ssh"):
        refuse(
            f"sink_layout={sink_layout!r}", "sinks are logits: 'sh', [sink tokens, heads], or 'ssh', [rows, sink tokens, heads]"
        )
    of_rows = sink if sink_layout == "ssh" else None
    if of_rows is not None and (of_rows.ndim != 3 or (of_rows.shape[0], of_rows.shape[2]) != tuple(q.shape[:2])):
        raise AssertionError(
            f"sink is {list(of_rows.shape)}; the layout ssh is [{q.shape[0]} rows, sink tokens, {q.shape[1]} heads]"
        )
    if q_ranges is None or k_ranges is None:
        raise AssertionError("q_ranges and k_ranges are missing; they say which queries see which keys")
    given = {
        "sm_margin": (sm_margin, 0),
        "disable_fwd_atomic_reduction": (disable_fwd_atomic_reduction, False),
        "disable_bwd_dkv_atomic_reduction": (disable_bwd_dkv_atomic_reduction, False),
        "ref_block_size": (ref_block_size, None),
        "max_seqlen_q": (max_seqlen_q, None),
        "auto_range_merge": (auto_range_merge, False),
        "swap_ab": (swap_ab, False),
        "pack_gqa": (pack_gqa, False),
        "cat_gqa": (cat_gqa, False),
        "sparse_load": (sparse_load, False),
        "swap_bwd_qk_loop": (swap_bwd_qk_loop, False),
    }
    hints(given, "its kernels are chosen by shape")
    mask = mask_of(q_ranges, k_ranges, attn_type_map, q.shape[0], k.shape[0])
    out, lse, *largest = flex_attention(
        q,
        k,
        v,
        mask,
        sink=None if of_rows is not None else sink,
        scale=softmax_scale,
        softcap=softcap,
        deterministic=True if deterministic else None,
        return_max_logits=return_max_logits,
    )
    if of_rows is not None:
        # The engine's sinks are the same for all rows. Its gradients flow through lse, so that merging is exact.
        out, lse = correct_attn_out_lse_with_sink(out, lse, of_rows, "ssh")
    return out, AttnForwardMeta(lse=lse, max_logits=largest[0] if return_max_logits else None)


def mask_of(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None, seqlen_q: int, seqlen_k: int) -> cp.Mask:
    """The slices as a mask. Kept for tensors on a GPU as long as they do not change, which those of inference_mode do not say."""
    tensors = (q_ranges, k_ranges, types)
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if not any(tensor.is_cuda for tensor in given) or any(tensor.is_inference() for tensor in given):
        return _read(q_ranges, k_ranges, types, seqlen_q, seqlen_k)
    # The tensors are kept too, so that no others can come to lie at their addresses.
    key: tuple[object, ...] = (seqlen_q, seqlen_k)
    for tensor in tensors:
        if tensor is not None:
            key += (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version)
    known = _masks.get(key) or _masks.put(key, (tensors, _read(q_ranges, k_ranges, types, seqlen_q, seqlen_k)))
    return known[1]


def _read(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None, seqlen_q: int, seqlen_k: int) -> cp.Mask:
    queries, keys = _listed(q_ranges), _listed(k_ranges)
    kinds = [0] * len(queries) if types is None else _listed(types)
    return mask_of_slices(queries, keys, kinds, seqlen_q, seqlen_k)


def _listed(numbers: torch.Tensor) -> list[Any]:
    made: list[Any] = numbers.tolist() if isinstance(numbers, torch.Tensor) else torch.as_tensor(numbers, device="cpu").tolist()
    return made


def mask_of_slices(queries: list[list[int]], keys: list[list[int]], kinds: list[int], seqlen_q: int, seqlen_k: int) -> cp.Mask:
    """A mask of slices, of which those without queries or without keys see nothing."""
    if not len(queries) == len(keys) == len(kinds):
        raise cp.MaskError(f"{len(queries)} q_ranges, {len(keys)} k_ranges and {len(kinds)} types; a slice has one of each")
    slices = zip(queries, keys, kinds, strict=True)
    made = [(q, k, kind) for q, k, kind in slices if len(q) != 2 or len(k) != 2 or (q[0] != q[1] and k[0] != k[1])]
    q_made, k_made, kinds_made = ([part[axis] for part in made] for axis in range(3))
    return cp.Mask.from_slices(q_made, k_made, kinds_made, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
