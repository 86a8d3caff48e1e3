"""MagiAttention's functions, under their names."""

from counterpoint.compat.magi.api.functools import (
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)
from counterpoint.compat.magi.api.magi_attn_interface import (
    DistAttnRuntimeDictManager,
    GeneralAttnMaskType,
    calc_attn,
    clear_cache,
    dispatch,
    dist_attn_runtime_dict_mgr,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_dispatch,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    roll_simple,
    undispatch,
)
from counterpoint.compat.magi.common.enum import AttnMaskType, AttnOverlapMode
from counterpoint.compat.magi.common.forward_meta import AttnForwardMeta
from counterpoint.compat.magi.common.ranges import AttnRanges
from counterpoint.compat.magi.config import (
    BSDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    GreedyOverlapAlg,
    GrpCollConfig,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    OverlapAlg,
    OverlapConfig,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
)
from counterpoint.compat.magi.dist_attn_runtime_mgr import DistAttnRuntimeKey
from counterpoint.compat.magi.functional import flex_flash_attn_func

__all__ = [
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnRanges",
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnRuntimeDictManager",
    "DistAttnRuntimeKey",
    "GeneralAttnMaskType",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "calc_attn",
    "clear_cache",
    "compute_pad_size",
    "dispatch",
    "dist_attn_runtime_dict_mgr",
    "flex_flash_attn_func",
    "get_most_recent_key",
    "get_position_ids",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "roll",
    "roll_simple",
    "squash_batch_dim",
    "undispatch",
]


def __getattr__(name: str) -> object:
    if name == "calc_dsa" or name.startswith("MagiDSA"):
        raise NotImplementedError(
            f"magi_attention.api.{name} chooses keys for each query by index, which counterpoint does not offer"
        )
    raise AttributeError(f"module 'magi_attention.api' has no attribute {name!r}")
