"""Tensors that fit a plan: their shapes, types and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fitting:
    """Shapes, types and the device of tensors that fit a plan."""

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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of a type are made: of `lse`, `sink` and gradients of weights."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
