"""What the arguments of a plan may be: numbers, heads, element types, and masks that are padded to even chunks."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any

from counterpoint._native import Mask, _chunk_size
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


_LARGEST = 2**63 - 1


def whole_number(name: str, value: Any, least: int) -> int:
    """An argument that counts something, of any type that is an integer."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if number > _LARGEST:
        raise PlanError(f"{name} is {number}; it must be at most {_LARGEST}")
    return number


_MOST_THREADS = 1024
# What lies beyond is a slip, and would leave the range of float32 together with scores that do not.
_LEAST_SCALE, _MOST = 2.0**-126, 1e6


def scale_of(scale: Any) -> float:
    """A factor on scores. Not a tensor: what it holds may change, and its gradient would be lost."""
    if not _is_number(scale) or not (scale == 0 or _LEAST_SCALE <= abs(scale) <= _MOST):
        raise PlanError(f"scale is {scale!r}; it must be a number, 0 or from 1.2e-38 to 1e6 in magnitude{_of_tensor(scale)}")
    return float(scale)


def softcap_of(softcap: Any) -> float:
    """A cap on scores, or 0 for none."""
    if not _is_number(softcap) or not (softcap == 0 or 1 / _MOST <= softcap <= _MOST):
        raise PlanError(f"softcap is {softcap!r}; it must be a number from 1e-6 to 1e6, or 0 for none{_of_tensor(softcap)}")
    return float(softcap)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _of_tensor(value: Any) -> str:
    return ": multiply q by it instead, so that its gradient flows" if hasattr(value, "requires_grad") else ""


def planning_threads_of(threads: Any) -> int:
    """Threads that make a plan side by side."""
    number = whole_number("planning_threads", threads, 1)
    if number > _MOST_THREADS:
        raise PlanError(f"planning_threads is {number}; it must be at most {_MOST_THREADS}")
    return number


def heads_of(heads: Any) -> tuple[int, int]:
    try:
        queries, keys = map(operator.index, heads if isinstance(heads, (tuple, list)) else (heads, heads))
    except (TypeError, ValueError):
        raise PlanError(f"heads is {heads!r}; it must be a number, or (of queries, of keys)") from None
    if max(queries, keys) > _LARGEST:
        raise PlanError(f"heads are {queries} of queries and {keys} of keys; there are at most {_LARGEST}")
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
        chunk = _chunk_size(longest, ranks)
        # A short sequence would be padding for the most part.
        chunk = min(chunk, max(1, -(-min(mask.seqlen_q, mask.seqlen_k) // ranks)))
    step = chunk * ranks
    return padded(mask, -(-mask.seqlen_q // step) * step, -(-mask.seqlen_k // step) * step), chunk
