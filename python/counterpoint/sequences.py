"""Masks of sequences as Megatron-Core batches, packs and cuts them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from counterpoint._native import Mask
from counterpoint.errors import TensorError

# Tokens to the left and to the right, -1 for no limit.
Window = tuple[int, int]


def documents(lengths_q: list[int], lengths_k: list[int], causal: bool, window: Window | None) -> Mask:
    """Sequences one after the other."""
    left, right = (-1, -1) if window is None else window
    starts_q, starts_k = ([0, *itertools.accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    return Mask.varlen(starts_q, starts_k, causal=causal, window=(left, 0 if causal and window is not None else right))


# Of parameters of micro-batches that are alive: all layers of a micro-batch have the same ones, and few kinds of masks.
_packed: dict[int, tuple[weakref.ref[Any], dict[Any, Mask]]] = {}


def packed_mask(given: Any, causal: bool, window: Window | None, rows_q: int, rows_k: int, ranks: int = 1) -> Mask:
    """The mask of Megatron-Core's `PackedSeqParams`, which are read once. Over several ranks it is that of their rows, one rank
    after the other; each has the pieces i and 2n - 1 - i of 2n of every sequence. `rows_q` and `rows_k` are those of all.
    """
    key, identity = (causal, window, rows_q, rows_k, ranks), id(given)
    if identity not in _packed:
        _packed[identity] = (weakref.ref(given, lambda _: _packed.pop(identity, None)), {})
    masks = _packed[identity][1]
    if key not in masks:
        masks[key] = _read(given, causal, window, rows_q, rows_k, ranks)
    return masks[key]


def _read(given: Any, causal: bool, window: Window | None, rows_q: int, rows_k: int, ranks: int) -> Mask:
    starts_q, room_q = _starts(given.cu_seqlens_q, given.cu_seqlens_q_padded)
    same = given.cu_seqlens_kv is None or given.cu_seqlens_kv is given.cu_seqlens_q
    starts_k, room_k = (starts_q, room_q) if same else _starts(given.cu_seqlens_kv, given.cu_seqlens_kv_padded)
    mask = _of_rooms((starts_q, room_q), (starts_k, room_k), causal, window, rows_q, rows_k)
    if ranks == 1:
        return mask
    return mask.rearranged(order_of_ranks("query", room_q, rows_q, ranks), order_of_ranks("key", room_k, rows_k, ranks))


def _starts(starts: torch.Tensor, padded: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Cumulative lengths of sequences, and of the room that they lie in."""
    values: list[int] = starts.tolist()
    return values, values if padded is None else padded.tolist()


def _of_rooms(
    q: tuple[list[int], list[int]], k: tuple[list[int], list[int]], causal: bool, window: Any, rows_q: int, rows_k: int
) -> Mask:
    """Sequences that may have padding behind them, which sees nothing."""
    lengths_q, lengths_k = ([end - start for start, end in itertools.pairwise(starts)] for starts, _ in (q, k))
    if (sum(lengths_q), sum(lengths_k)) == (rows_q, rows_k):
        return documents(lengths_q, lengths_k, causal, window)
    q_ranges, k_ranges, kinds = [], [], []
    for begin_q, length_q, begin_k, length_k in zip(q[1][:-1], lengths_q, k[1][:-1], lengths_k, strict=True):
        if not length_q or not length_k:
            continue
        for (start_q, end_q), (start_k, end_k), kind in documents([length_q], [length_k], causal, window).slices:
            q_ranges.append((begin_q + start_q, begin_q + end_q))
            k_ranges.append((begin_k + start_k, begin_k + end_k))
            kinds.append(kind)
    return Mask.from_slices(q_ranges, k_ranges, kinds, seqlen_q=rows_q, seqlen_k=rows_k)


def order_of_ranks(name: str, room: list[int], rows: int, ranks: int) -> list[tuple[int, int]]:
    """The ranges of rows of rank 0, then those of rank 1, and so on."""
    if room[-1] != rows:
        raise TensorError(
            f"{name} has {rows} rows on {ranks} ranks together, and packed_seq_params {room[-1]}, padding of sequences included"
        )
    pieces = []
    for start, end in itertools.pairwise(room):
        piece, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise TensorError(
                f"packed_seq_params have a sequence of {end - start} rows, padding included; over {ranks} context-parallel ranks "
                f"each must be a multiple of {2 * ranks}"
            )
        pieces.append((start, piece))
    return [
        (start + index * piece, start + (index + 1) * piece)
        for rank in range(ranks)
        for start, piece in pieces
        for index in (rank, 2 * ranks - 1 - rank)
    ]
