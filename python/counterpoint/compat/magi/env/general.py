"""Environment variables of MagiAttention that concern no communication. Read at every call."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.compat.magi.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision

__all__ = [
    "dist_attn_backward_hide_tail_reduce",
    "dist_attn_runtime_dict_size",
    "is_auto_range_merge_enable",
    "is_cat_gqa_enable",
    "is_cpp_backend_enable",
    "is_cuda_device_max_connections_one",
    "is_deterministic_mode_enable",
    "is_flatten_head_groups_enable",
    "is_profile_mode_enable",
    "is_sanity_check_enable",
    "kernel_backend",
    "log_level",
    "min_chunks_per_rank",
    "precision",
]


def is_on(name: str) -> bool:
    """Whether the variable MAGI_ATTENTION_`name` is 1."""
    return os.environ.get(f"MAGI_ATTENTION_{name}", "0") == "1"


def log_level() -> int:
    """The level of log messages; WARN."""
    name = os.environ.get("MAGI_ATTENTION_LOG_LEVEL", "WARN").upper()
    levels: dict[str, int] = {
        "WARN": logging.WARNING,
        **{level: getattr(logging, level) for level in ("DEBUG", "INFO", "ERROR", "CRITICAL")},
    }
    return levels.get(name, logging.WARNING)


def is_sanity_check_enable() -> bool:
    """Whether slices that theirs takes unchecked are checked; here they always are."""
    return is_on("SANITY_CHECK")


def is_flatten_head_groups_enable() -> bool:
    """A hint."""
    return is_on("FLATTEN_HEAD_GROUPS")


def kernel_backend() -> MagiAttentionKernelBackend:
    """What computes: `sdpa` is the dense reference in PyTorch, all others are this engine."""
    from counterpoint.compat.magi.common.enum import MagiAttentionKernelBackend

    older = {"SDPA": is_on("SDPA_BACKEND"), "FA4": is_on("FA4_BACKEND")}
    named = os.environ.get("MAGI_ATTENTION_KERNEL_BACKEND")
    if sum(older.values()) + (named is not None) > 1:
        raise AssertionError(
            "of MAGI_ATTENTION_KERNEL_BACKEND, MAGI_ATTENTION_SDPA_BACKEND and MAGI_ATTENTION_FA4_BACKEND more than one is set"
        )
    for name, chosen in older.items():
        if chosen:
            return MagiAttentionKernelBackend[name]
    return MagiAttentionKernelBackend("ffa" if named is None else named.lower())


def precision() -> MagiAttentionPrecision | None:
    """A hint; the type of the tensors is what attention computes in."""
    from counterpoint.compat.magi.common.enum import MagiAttentionPrecision

    name = os.environ.get("MAGI_ATTENTION_PRECISION")
    return None if name is None else MagiAttentionPrecision(name.lower())


def is_cuda_device_max_connections_one() -> bool:
    """Whether CUDA_DEVICE_MAX_CONNECTIONS is 1."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8") == "1"


def is_deterministic_mode_enable() -> bool:
    """Whether plans are deterministic."""
    return is_on("DETERMINISTIC_MODE")


def is_profile_mode_enable() -> bool:
    """A hint; `counterpoint.profile()` takes times."""
    return is_on("PROFILE_MODE")


def is_auto_range_merge_enable() -> bool:
    """A hint."""
    return is_on("AUTO_RANGE_MERGE")


def is_cat_gqa_enable() -> bool:
    """A hint."""
    return is_on("CATGQA")


def dist_attn_backward_hide_tail_reduce() -> bool:
    """A hint."""
    return is_on("BWD_HIDE_TAIL_REDUCE")


def dist_attn_runtime_dict_size() -> int:
    """Keys that are kept of a group; 1000."""
    return int(os.environ.get("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE", "1000"))


def min_chunks_per_rank() -> int:
    """Chunks of a rank, at least, where the chunk size allows it; 8."""
    return int(os.environ.get("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK", "8"))


def is_cpp_backend_enable() -> bool:
    """A hint; there is one implementation."""
    return is_on("CPP_BACKEND")
