"""Tensor-parallel linear layers, with Megatron-Core's contract and communication under computation."""

from counterpoint.nn.linear import ColumnParallelLinear, RowParallelLinear
from counterpoint.nn.shared_input import SharedInputLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "SharedInputLinear"]
