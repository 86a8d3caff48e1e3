"""Tensor-parallel linear layers, with Megatron-Core's contract and communication under computation."""

from counterpoint.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
