"""Tensors that fit a plan: their shapes, types and device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    # A tensor of each shape, all of one element: `torch.empty_like` of it takes half as long as `Tensor.new_empty`, which reads
    # arguments.
    q_like: torch.Tensor = field(compare=False)
    k_like: torch.Tensor = field(compare=False)
    v_like: torch.Tensor = field(compare=False)
    out_like: torch.Tensor = field(compare=False)
    lse_like: torch.Tensor = field(compare=False)


@functools.cache
def element(dtype: torch.dtype, device: Any) -> torch.Tensor:
    """One element of a type on a device, which nobody reads."""
    import torch

    return torch.empty(1, dtype=dtype, device=device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of a type are made: of `lse`, `sink` and gradients of weights."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
