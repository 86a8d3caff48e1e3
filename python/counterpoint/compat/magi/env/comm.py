"""Environment variables of MagiAttention that concern communication. Read at every call."""

from __future__ import annotations

import os

from counterpoint.compat.magi.env.general import is_cuda_device_max_connections_one, is_on

__all__ = [
    "dsink_all_reduce_op",
    "ffa_bwd_sm_margin_save_for_comm",
    "ffa_fwd_sm_margin_save_for_comm",
    "is_bwd_high_precision_reduce_enable",
    "is_fwd_high_precision_reduce_enable",
    "is_hierarchical_comm_enable",
    "is_native_grpcoll_enable",
    "is_qo_comm_enable",
]


def is_hierarchical_comm_enable() -> bool:
    """Whether a mesh of two dimensions, (nodes, ranks of a node), is asked for."""
    return is_on("HIERARCHICAL_COMM")


def _margin(name: str) -> int:
    return int(os.environ.get(f"MAGI_ATTENTION_FFA_{name}_SM_MARGIN", "0" if is_cuda_device_max_connections_one() else "4"))


def ffa_fwd_sm_margin_save_for_comm() -> int:
    """A hint."""
    return _margin("FORWARD")


def ffa_bwd_sm_margin_save_for_comm() -> int:
    """A hint."""
    return _margin("BACKWARD")


def is_qo_comm_enable() -> bool:
    """Whether queries may travel to keys instead of keys to queries."""
    return is_on("QO_COMM")


def is_fwd_high_precision_reduce_enable() -> bool:
    """A hint; partial outputs are added up in f32."""
    return is_on("FORWARD_HIGH_PRECISION_REDUCE")


def is_bwd_high_precision_reduce_enable() -> bool:
    """A hint; see docs/limits.md for what gradients travel in."""
    return is_on("BACKWARD_HIGH_PRECISION_REDUCE")


def is_native_grpcoll_enable() -> bool:
    """A hint."""
    return is_on("NATIVE_GRPCOLL")


def dsink_all_reduce_op() -> str:
    """What ranks get of the gradient of `sink`: "none" partial sums, "sum" all of it, "avg" the sum by the number of ranks."""
    found = os.environ.get("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "none")
    if found not in ("none", "sum", "avg"):
        raise AssertionError(f"MAGI_ATTENTION_DSINK_ALL_REDUCE_OP is {found!r}; it is none, sum or avg")
    return found
