"""Tensors that fit a plan: their shapes, types and device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fitting:
    """Shapes, types and the device of tensors that fit a plan, and what results are made by."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    sink: tuple[int, int] | None
    out: tuple[int, int, int]
    lse: tuple[int, int]
    dtype: torch.dtype
    statistic: torch.dtype
    # As `Tensor.get_device` counts.
    ordinal: int
    # The handle of PyTorch's current stream there.
    stream: Callable[[], int] = field(compare=False)
    # What makes a result of each shape.
    new_q: Callable[[], torch.Tensor] = field(compare=False)
    new_k: Callable[[], torch.Tensor] = field(compare=False)
    new_v: Callable[[], torch.Tensor] = field(compare=False)
    new_out: Callable[[], torch.Tensor] = field(compare=False)
    new_lse: Callable[[], torch.Tensor] = field(compare=False)


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """What makes dense tensors of a shape, whose elements are anything."""
    import torch

    # Takes half as long as `Tensor.new_empty`, which reads arguments.
    usual = functools.partial(torch.empty_like, element(dtype, device).expand(shape))
    # What Inductor's code allocates by: without the dispatcher, in two thirds of that; on GPUs it is of the current one.
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if fast is None:
        return usual
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    made = functools.partial(fast, shape, strides, dtype)
    if device.type == "cpu" or torch.cuda.device_count() == 1:
        return made
    current, ordinal = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device), device.index
    return lambda: made() if current() == ordinal else usual()


@functools.cache
def element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element of a type on a device, which nobody reads."""
    import torch

    return torch.empty(1, dtype=dtype, device=device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of a type are made: of `lse`, `sink` and gradients of weights."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
