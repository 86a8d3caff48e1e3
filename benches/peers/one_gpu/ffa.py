"""MagiAttention's FFA by `flex_flash_attn_func`: masks as slices of rows and columns, and its variants for a mask."""

from functools import partial

from common.pytorch import torch
from one_gpu.backends import Autograd
from one_gpu.masks import BLOCK, WINDOW
from one_gpu.tensors import PASSES

FULL, CAUSAL, INVERSE_CAUSAL, BIDIRECTIONAL_CAUSAL = range(4)


def slices(mask, by="query"):
    """(first row, end, first column, end, kind) of each slice: with disjoint rows, or `by="key"` with disjoint columns where there are such."""
    n, kind = mask.seqlen, CAUSAL if mask.name.endswith("causal") else FULL
    if mask.name == "sw_causal" and n > WINDOW:
        return [(0, WINDOW, 0, WINDOW, CAUSAL), (WINDOW, n, 1, n, BIDIRECTIONAL_CAUSAL)]
    out, start = [], 0
    for length in mask.lengths:
        end = start + length
        if mask.name.endswith("block_causal"):
            for at in range(start, end, BLOCK):
                upto = min(at + BLOCK, end)
                out.append((at, upto, start, upto, FULL) if by == "query" else (at, end, at, upto, FULL))
        else:
            out.append((start, end, start, end, kind))
        start = end
    return out


def disjoint_columns(found):
    """Whether they are sorted, and none has a column of another."""
    return all(a[3] <= b[2] for a, b in zip(found, found[1:]))


class Ffa(Autograd):
    """One variant."""

    def __init__(self, tensors, found, options):
        from magi_attention.functional import flex_flash_attn_func

        columns = lambda a, b: torch.tensor([one[a:b] for one in found], dtype=torch.int32, device="cuda")
        q_ranges, k_ranges, kinds = columns(0, 2), columns(2, 4), columns(4, 5).flatten()
        attend = lambda q, k, v: flex_flash_attn_func(q, k, v, q_ranges, k_ranges, kinds, **options)[0]
        super().__init__((tensors.q, tensors.k, tensors.v), tensors.dout, attend)


def variants(mask, is_grouped):
    """(name, slices, options, passes): as it is called by default, and with each of its options that this mask and these heads
    permit and that have been fastest on one."""
    rows, columns = slices(mask), slices(mask, "key")
    written = {"disable_fwd_atomic_reduction": True}
    longest_first = sorted(rows, key=lambda one: one[2] - one[3])
    tuned = {**written, **({"cat_gqa": True} if is_grouped else {})}
    if disjoint_columns(rows):
        tuned["disable_bwd_dkv_atomic_reduction"] = True
    yield "default", rows, {}, PASSES
    yield "tuned", rows, tuned, PASSES
    if longest_first != rows:
        yield "longest first", longest_first, written, ["forward"]
    for tile in ((128, 176), (192, 128)):
        yield f"tile {tile[0]}x{tile[1]}", rows, {**written, "ref_block_size": tile}, ["forward"]
    if is_grouped:
        yield "packed", rows, {**written, "pack_gqa": True}, ["forward"]
    if columns != rows and disjoint_columns(columns):
        # Their rows are not disjoint, so the forward adds up.
        options = {**tuned, "disable_bwd_dkv_atomic_reduction": True, "disable_fwd_atomic_reduction": False}
        yield "by key", columns, options, ["backward"]


def ffa(mask, tensors):
    for name, found, options, passes in variants(mask, tensors.shape.is_grouped):
        yield name, partial(Ffa, tensors, found, options), passes
