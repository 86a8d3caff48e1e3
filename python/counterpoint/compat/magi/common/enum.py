"""The enumerations of MagiAttention's face."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

import torch

GroupReduceOp: TypeAlias = Literal["sum", "avg", "lse"]
OutMaybeWithLSE: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
AttnSinkLayout: TypeAlias = Literal["sh", "shd", "ssh"]


class AttnType(Enum):
    """Whether queries and keys are of one sequence."""

    SELF_ATTN = "self_attn"
    CROSS_ATTN = "cross_attn"


class AttnRole(Enum):
    """What rows are of."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


class AttnMaskType(Enum):
    """The type of a slice. `to_int_type` is the number that kernels take, and that `Mask.from_slices` takes as well."""

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """0 full, 1 causal, 2 inverse causal, 3 both."""
        return (cls.FULL, cls.CAUSAL, cls.INVCAUSAL, cls.BICAUSAL)[_checked(int_type)]

    def to_int_type(self) -> int:
        """The inverse of `from_int_type`."""
        return (AttnMaskType.FULL, AttnMaskType.CAUSAL, AttnMaskType.INVCAUSAL, AttnMaskType.BICAUSAL).index(self)


def _checked(number: int) -> int:
    if number not in (0, 1, 2, 3):
        raise KeyError(number)
    return number


class AttnOverlapMode(Enum):
    """Whether the number of stages is given or found."""

    STATIC = "static"
    DYNAMIC = "dynamic"


class DispatchAlgType(Enum):
    """Names of dispatch algorithms."""

    LOWER_BOUND = "lower_bound"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    BINARY_SEARCH = "binary_search"
    MIN_HEAP = "min_heap"
    TOPP_HEAP = "topp_heap"
    BACKTRACKING_PRUNING = "backtracing_pruning"
    RANDOM_SELECT = "random_select"
    SEQUENTIAL_SELECT = "sequential_select"
    BATCH_TOPP_HEAP = "batch_topp_heap"
    SORTED_SEQUENTIAL_SELECT = "sorted_sequential_select"


class OverlapAlgType(Enum):
    """Names of overlap algorithms."""

    UNIFORM = "uniform"
    GREEDY = "greedy"


class DynamicAttnAlgType(Enum):
    """Names of algorithms that place work away from queries."""

    NON_COMMUNICATION_QO = "non_communication_qo"
    GREEDY_RANDOM_GRID = "greedy_random_grid"
    SIMPLEX_NETWORK_FLOW = "simplex_network_flow"
    FAST_SIMPLEX_NETWORK_FLOW = "fast_simplex_network_flow"
    BINARY_GREEDY = "binary_greedy"
    BINARY_GREEDY_PARALLEL = "binary_greedy_parallel"


class MagiAttentionKernelBackend(Enum):
    """What computes; `SDPA` is the dense reference."""

    FFA = "ffa"
    SDPA = "sdpa"
    SDPA_OL = "sdpa_ol"
    FA4 = "fa4"


class MagiAttentionPrecision(Enum):
    """Types of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"

    def to_torch_dtype(self) -> torch.dtype:
        """The type in PyTorch."""
        types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
        return types[self.value]


class GrpCollBufferName(Enum):
    """Names of buffers of collectives."""

    GroupCastDefault = "group_cast_default"
    GroupReduceDefault = "group_reduce_default"
    GroupCastQO = "group_cast_qo"
    GroupReduceQO = "group_reduce_qo"
