"""Ranges, masks and enumerations of MagiAttention's face."""

from counterpoint.compat.magi.common import enum
from counterpoint.compat.magi.common.enum import AttnMaskType
from counterpoint.compat.magi.common.forward_meta import AttnForwardMeta
from counterpoint.compat.magi.common.mask import AttnMask
from counterpoint.compat.magi.common.range import AttnRange, RangeError
from counterpoint.compat.magi.common.ranges import AttnRanges
from counterpoint.compat.magi.env.general import is_cpp_backend_enable

# Theirs has a second implementation in C++; here there is one.
USE_CPP_BACKEND = False

__all__ = [
    "USE_CPP_BACKEND",
    "AttnForwardMeta",
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "RangeError",
    "enum",
    "is_cpp_backend_enable",
]


def __getattr__(name: str) -> object:
    if name in ("AttnRectangle", "AttnRectangles", "range_op", "jit"):
        raise NotImplementedError(f"magi_attention.common.{name} is a part of their kernels, and is not offered by counterpoint")
    raise AttributeError(f"module 'magi_attention.common' has no attribute {name!r}")
