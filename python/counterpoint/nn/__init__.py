"""Tensor-parallel linear layers, with Megatron-Core's contract, and layers of experts: communication under computation."""

from counterpoint.nn import compiled as compiled
from counterpoint.nn import compiled_experts as compiled_experts
from counterpoint.nn.experts import ExpertLayer, ExpertPass, ExpertPasses
from counterpoint.nn.linear import ColumnParallelLinear, RowParallelLinear
from counterpoint.nn.product import LayerPass, LayerPasses
from counterpoint.nn.shared_input import SharedInputLinear

__all__ = [
    "ColumnParallelLinear",
    "ExpertLayer",
    "ExpertPass",
    "ExpertPasses",
    "LayerPass",
    "LayerPasses",
    "RowParallelLinear",
    "SharedInputLinear",
]
