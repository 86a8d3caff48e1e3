"""Helpers that turn batches, cumulative starts and windows into slices, and that pad."""

from __future__ import annotations

import torch

from counterpoint.compat.magi.common.enum import AttnMaskType
from counterpoint.compat.magi.common.range import AttnRange
from counterpoint.compat.magi.common.ranges import AttnRanges

Slices = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Rows that are missing to a multiple of `chunk_size * cp_size`."""
    return -total_seqlen_q % (chunk_size * cp_size)


def squash_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """`[batch, tokens, ...]` as `[batch * tokens, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def infer_varlen_mask_from_batch(batch_size: int, seq_len: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative starts of queries and of keys of a batch of sequences of one length, int32."""
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return starts, starts


def pad_at_dim(x: torch.Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right") -> torch.Tensor:
    """`x` with `pad_size` elements of `value` more along `dim`, behind it or ("left") before it."""
    if pad_size == 0:
        return x
    shape = list(x.shape)
    shape[dim] = pad_size
    padding = x.new_full(shape, value)
    return torch.cat([padding, x] if side == "left" else [x, padding], dim)


def unpad_at_dim(x: torch.Tensor, dim: int, pad_size: int) -> torch.Tensor:
    """`x` without its last `pad_size` elements along `dim`."""
    return x.narrow(dim, 0, x.shape[dim] - pad_size)


def apply_padding(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: list[AttnMaskType],
    total_seqlen: int,
    pad_size: int,
) -> Slices:
    """Copies of the slices, and one more for `pad_size` queries at the end, which sees no key."""
    queries, keys = AttnRanges.from_ranges(q_ranges, check=True), AttnRanges.from_ranges(k_ranges, check=True)
    queries.append(AttnRange(total_seqlen, total_seqlen + pad_size))
    keys.append(AttnRange(0, 0))
    return queries, keys, [*attn_mask_type, AttnMaskType.FULL]


def _check_window(window_size: tuple[int, int]) -> None:
    if len(window_size) != 2:
        raise AssertionError(f"window_size is {window_size}; it is (left, right)")


def _reach(window: int, keys: int) -> int:
    """A side of a window in tokens; one that reaches as far as there are keys has no limit."""
    return keys if window == -1 or window >= keys - 1 else window


def infer_attn_mask_from_sliding_window(q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]) -> Slices:
    """The slices of one document with a window (left, right), -1 for no limit.

    The last query is level with the last key. Queries that are level with no key are left out.
    """
    _check_window(window_size)
    keys = k_range.seqlen
    left, right = (_reach(side, keys) for side in window_size)
    rows = min(q_range.seqlen, keys)
    first, level = q_range.end - rows, k_range.end - rows
    # Row i, of `rows`, sees the columns level + i - left to level + i + right, as far as there are keys.
    start, end = max(k_range.start, level - left), k_range.end
    cut_left = min(start - (level - left), rows)  # rows above see all keys from `start` on
    cut_right = max(0, rows - right)  # rows from here on see all keys up to `end`
    upper, lower = min(cut_left, cut_right), max(cut_left, cut_right)
    both = AttnMaskType.FULL if cut_left > cut_right else AttnMaskType.BICAUSAL
    parts = (
        (0, upper, start, min(end, start + left + right), AttnMaskType.CAUSAL),
        (upper, lower, start, end, both),
        (lower, rows, max(start, end - left - right), end, AttnMaskType.INVCAUSAL),
    )
    return _slices([(first + a, first + b, k0, k1, kind) for a, b, k0, k1, kind in parts])


def _slices(parts: list[tuple[int, int, int, int, AttnMaskType]]) -> Slices:
    """Those of (q start, q end, k start, k end, type) that have queries."""
    made = [part for part in parts if part[0] < part[1]]
    queries = AttnRanges.from_ranges([(part[0], part[1]) for part in made])
    keys = AttnRanges.from_ranges([(part[2], part[3]) for part in made])
    return queries, keys, [part[4] for part in made]


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """The slices of packed documents, and the tokens of all queries and of all keys.

    With `window_size`, which excludes `causal`, the first `global_window_size` keys of a document stay in sight of queries whose
    window has left them.
    """
    _check_window(window_size)
    if global_window_size < 0:
        raise AssertionError(f"global_window_size is {global_window_size}; it is not negative")
    windowed = tuple(window_size) != (-1, -1)
    if causal and windowed:
        raise AssertionError(f"causal is True and window_size {window_size}; a causal window is causal=False and (left, 0)")
    starts_q, starts_k = (torch.as_tensor(starts, device="cpu").tolist() for starts in (cu_seqlens_q, cu_seqlens_k))
    queries, keys = AttnRanges(), AttnRanges()
    types: list[AttnMaskType] = []
    for document in range(len(starts_q) - 1):
        q = AttnRange(starts_q[document], starts_q[document + 1])
        k = AttnRange(starts_k[document], starts_k[document + 1])
        if windowed:
            found = _with_global_keys(q, k, window_size, min(global_window_size, k.seqlen))
        else:
            kind = AttnMaskType.CAUSAL if causal else AttnMaskType.FULL
            found = (AttnRanges.from_ranges([q]), AttnRanges.from_ranges([k]), [kind])
        queries.extend(found[0])
        keys.extend(found[1])
        types.extend(found[2])
    return queries, keys, types, starts_q[-1], starts_k[-1]


def _with_global_keys(q: AttnRange, k: AttnRange, window_size: tuple[int, int], front: int) -> Slices:
    """One document with a window, whose first `front` keys are seen by all that may look so far to the right."""
    if front <= 0:
        return infer_attn_mask_from_sliding_window(q, k, window_size)
    right = _reach(window_size[1], k.seqlen)
    early = min(max(0, front - right - 1), q.seqlen)  # queries whose right side ends inside of the front
    queries, keys, types = _slices(
        [
            (q.start, q.start + early, k.start, k.start + early + right, AttnMaskType.CAUSAL),
            (q.start + early, q.end, k.start, k.start + front, AttnMaskType.FULL),
        ]
    )
    rest = AttnRange(k.start + front, k.end)
    if rest.is_empty():
        return queries, keys, types
    parts = [infer_attn_mask_from_sliding_window(q, rest, window_size)]
    # More queries than keys of the rest: the first are level with keys of the front, and may see into the rest on their right.
    level_with_rest = q.start + max(0, q.seqlen - rest.seqlen)
    first = max(q.start, rest.start - right)
    if right > 0 and first < level_with_rest:
        seen = first + right + 1 - rest.start  # keys of the rest that query `first` sees; each next one sees one more
        growing = min(level_with_rest - first, max(0, rest.seqlen - seen))
        parts.append(
            _slices(
                [
                    (first, first + growing, rest.start, rest.start + seen + growing - 1, AttnMaskType.CAUSAL),
                    (first + growing, level_with_rest, rest.start, rest.end, AttnMaskType.FULL),
                ]
            )
        )
    for more_queries, more_keys, more_types in parts:
        queries.extend(more_queries)
        keys.extend(more_keys)
        types.extend(more_types)
    return queries, keys, types
