"""Arrays of other libraries as bytes, and back. Nothing here needs PyTorch but `dense`, which makes one of its tensors."""

from __future__ import annotations

import operator
import sys
from typing import Any

from counterpoint.errors import MaskError, MissingLibraryError


def torch_module(what: str) -> Any:
    """PyTorch, which `what` needs."""
    try:
        import torch
    except ImportError as error:
        raise MissingLibraryError(f"{what} needs PyTorch, which cannot be imported ({error}); pip install torch") from error
    return torch


def booleans(name: str, array: Any) -> tuple[int, int, bytes]:
    """An array of two axes as (rows, columns, one byte an element)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        _check_axes(name, array.ndim)
        if array.layout != torch.strided or array.is_meta:
            held = "on the meta device, without elements" if array.is_meta else f"{array.layout}"
            raise MaskError(f"{name} is {held}; give a dense tensor of booleans")
        if array.is_floating_point() or array.is_complex():
            raise _not_boolean(name, f"a tensor of {array.dtype}")
        flat = array.detach().to("cpu").ne(0).to(torch.uint8).contiguous()
        return array.shape[0], array.shape[1], _bytes_of(flat)
    if hasattr(array, "ndim") and hasattr(array, "astype"):
        _check_axes(name, array.ndim)
        if array.dtype.kind not in "biu":
            raise _not_boolean(name, f"an array of {array.dtype}")
        if hasattr(array, "filled"):
            raise MaskError(f"{name} is a masked array of NumPy's, whose masked elements are neither; give {name}.filled(...)")
        return array.shape[0], array.shape[1], (array != 0).astype("uint8").tobytes()
    if torch is not None and hasattr(array, "__dlpack__"):
        return booleans(name, torch.from_dlpack(array))
    try:
        nested = [list(row) for row in array]
    except TypeError:
        raise MaskError(f"{name} must be an array of two axes, not a {type(array).__name__}") from None
    rows = [bytes(_truth(name, element) for element in row) for row in nested]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise MaskError(f"{name} has rows of different lengths: {sorted(lengths)}")
    return len(rows), lengths.pop() if lengths else 0, b"".join(rows)


def _truth(name: str, element: Any) -> bool:
    """Of a boolean or a whole number, NumPy's among them, whose booleans are no indices."""
    if getattr(getattr(element, "dtype", None), "kind", "") == "b":
        return bool(element)
    try:
        return operator.index(element) != 0
    except TypeError:
        raise _not_boolean(name, f"a list with {element!r}") from None


def _not_boolean(name: str, found: str) -> MaskError:
    """Of floats nobody knows whether 0 is what a query sees, as where they are added to scores, or what it does not."""
    return MaskError(
        f"{name} is {found}; give booleans, true where a query sees a key: of a mask that is added to scores, `{name} == 0`"
    )


def _check_axes(name: str, axes: int) -> None:
    if axes != 2:
        raise MaskError(f"{name} has {axes} axes; it must have two, of queries and of keys")


def _bytes_of(tensor: Any) -> bytes:
    """The bytes of a contiguous tensor on the CPU; without NumPy, which PyTorch does not need."""
    import ctypes

    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def dense(seen: bytes, rows: int, columns: int) -> Any:
    """A tensor of booleans from one byte an element."""
    torch = torch_module("Mask.to_dense")
    return torch.frombuffer(bytearray(seen), dtype=torch.bool).reshape(rows, columns)
