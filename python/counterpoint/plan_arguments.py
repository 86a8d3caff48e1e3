"""What the arguments of a plan may be: numbers, heads, element types, and masks that are padded to even chunks."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

from counterpoint._native import Mask
from counterpoint.errors import PlanError

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def dtype_name(dtype: Any) -> str:
    """`torch.float32`, its name, or the like as the engine's name."""
    name = str(dtype).removeprefix("torch.")
    name = {"bf16": "bfloat16", "f16": "float16", "half": "float16", "f32": "float32", "float": "float32", "f64": "float64"}.get(
        name, name
    )
    if name not in _DTYPES:
        raise PlanError(f"dtype is {dtype}; attention computes in {', '.join(_DTYPES)}")
    return name


def check_mask(mask: Any) -> None:
    if not isinstance(mask, Mask):
        raise PlanError(f"mask must be a counterpoint.Mask, not a {type(mask).__name__}")


def whole_number(name: str, value: Any, least: int) -> int:
    """An argument that counts something, of any type that is an integer."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number


def is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def heads_of(heads: Any) -> tuple[int, int]:
    try:
        queries, keys = map(operator.index, heads if isinstance(heads, (tuple, list)) else (heads, heads))
    except (TypeError, ValueError):
        raise PlanError(f"heads is {heads!r}; it must be a number, or (of queries, of keys)") from None
    if queries < 1 or keys < 1 or queries % keys:
        raise PlanError(
            f"heads are {queries} of queries and {keys} of keys; those of queries must be a multiple of those of keys"
        )
    return queries, keys


def is_deterministic(asked: bool | None) -> bool:
    if asked is not None:
        if not isinstance(asked, bool):
            raise PlanError(f"deterministic is {asked!r}; it must be True, False or None")
        return asked
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


def padded(mask: Mask, seqlen_q: int, seqlen_k: int) -> Mask:
    """The same pairs in longer sequences; what is added sees nothing."""
    if (seqlen_q, seqlen_k) == (mask.seqlen_q, mask.seqlen_k):
        return mask
    q, k, types = zip(*mask.slices, strict=True) if mask.slices else ((), (), ())
    return Mask.from_slices(list(q), list(k), list(types), seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def evened(mask: Mask, chunk: int | None, ranks: int) -> tuple[Mask, int]:
    """A mask whose rows are a multiple of chunk x ranks, and the chunk."""
    longest = max(mask.seqlen_q, mask.seqlen_k)
    if chunk is None:
        balanced = longest // (16 * ranks)
        chunk = min(max(1 << max(balanced.bit_length() - 1, 0), 64), 2048)
        # A short sequence would be padding for the most part.
        chunk = min(chunk, max(1, -(-min(mask.seqlen_q, mask.seqlen_k) // ranks)))
    step = chunk * ranks
    return padded(mask, -(-mask.seqlen_q // step) * step, -(-mask.seqlen_k // step) * step), chunk
