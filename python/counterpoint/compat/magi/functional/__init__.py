"""Attention without keys, and merging of partial attention."""

from counterpoint.compat.magi.functional.fa4 import ffa_fa4_func
from counterpoint.compat.magi.functional.flex_flash_attn import flex_flash_attn_func
from counterpoint.compat.magi.functional.utils import (
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
)

__all__ = [
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "ffa_fa4_func",
    "flex_flash_attn_func",
]

_INTERNAL = {
    "dist_attn_func": "calc_attn",
    "dispatch_func": "dispatch",
    "undispatch_func": "undispatch",
    "roll_func": "roll",
    "roll_simple_func": "roll_simple",
}


def __getattr__(name: str) -> object:
    if name in _INTERNAL:
        raise NotImplementedError(
            f"magi_attention.functional.{name} takes their internal metadata; call api.{_INTERNAL[name]} with a key"
        )
    raise AttributeError(f"module 'magi_attention.functional' has no attribute {name!r}")
