"""How keys are dispatched and overlapped, in MagiAttention's classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from counterpoint.compat.magi import env
from counterpoint.compat.magi.common.enum import AttnOverlapMode, DispatchAlgType, OverlapAlgType
from counterpoint.compat.magi.hints import hint, hints

__all__ = [
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
]


@dataclass(frozen=True)
class DispatchAlg(ABC):
    """Which rank gets which chunks. Only `type` chooses; the other properties are what theirs declare."""

    _traits: ClassVar[tuple[bool, bool, bool, bool]]

    @property
    @abstractmethod
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""

    @property
    def is_optimal(self) -> bool:
        """As theirs declares it."""
        return self._traits[0]

    @property
    def is_partitions_returned(self) -> bool:
        """As theirs declares it."""
        return self._traits[1]

    @property
    def is_equal_num_workloads(self) -> bool:
        """As theirs declares it."""
        return self._traits[2]

    @property
    def is_affinity_considered(self) -> bool:
        """As theirs declares it."""
        return self._traits[3]


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    """A hint: dispatched by affinity."""

    _traits = (False, False, False, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.LOWER_BOUND


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    """A hint: dispatched by affinity."""

    _traits = (True, False, False, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.DYNAMIC_PROGRAMMING


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    """A hint: dispatched by affinity."""

    _traits = (True, True, False, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.BINARY_SEARCH


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """The largest chunk to the rank with the least work."""

    _traits = (False, True, False, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.MIN_HEAP


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """Dispatched by affinity; `top_p` is a hint."""

    top_p: float = 0.0
    _traits = (False, True, True, True)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.TOPP_HEAP


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Chunks in order, as many to each rank."""

    _traits = (False, True, False, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.SEQUENTIAL_SELECT


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """A hint: dispatched by affinity."""

    allocation_ratio: float = 1.0
    _traits = (False, True, True, False)

    @property
    def type(self) -> DispatchAlgType:
        """The algorithm's name."""
        return DispatchAlgType.SORTED_SEQUENTIAL_SELECT


@dataclass(frozen=True)
class DispatchConfig:
    """Rows of a chunk (None: an eighth of a rank's), whether ranks may differ in rows, and the algorithm."""

    chunk_size: int | None = None
    uneven_shard: bool = False
    alg: DispatchAlg = MinHeapDispatchAlg()

    def dispatch(self) -> str:
        """The dispatch in words of `Group.plan`."""
        if isinstance(self.alg, MinHeapDispatchAlg):
            return "min-heap"
        if isinstance(self.alg, SequentialDispatchAlg):
            return "sequential"
        if isinstance(self.alg, ToppHeapDispatchAlg):
            hints({"top_p": (self.alg.top_p, 0.0)}, "affinity dispatch has no such threshold")
        else:
            hint(type(self.alg).__name__, "chunks are dispatched by affinity instead")
        return "affinity"


@dataclass(frozen=True)
class OverlapAlg(ABC):
    """How stages are cut; a hint."""

    @property
    @abstractmethod
    def type(self) -> OverlapAlgType:
        """The algorithm's name."""

    @property
    def is_optimal(self) -> bool:
        """As theirs declares it."""
        return False


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """A hint."""

    random_costs: bool = False
    random_seed: int | None = None

    @property
    def type(self) -> OverlapAlgType:
        """The algorithm's name."""
        return OverlapAlgType.UNIFORM


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """A hint."""

    @property
    def type(self) -> OverlapAlgType:
        """The algorithm's name."""
        return OverlapAlgType.GREEDY


@dataclass(frozen=True)
class OverlapConfig:
    """How much communication runs under computation.

    `degree` 0: nothing overlaps; n: n stages of rows that are received; None, with the mode dynamic: as many as are predicted
    to be best. The other fields are hints.
    """

    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    dynamic_max_degree: int | None = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = UniformOverlapAlg()
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0
    _no_overlap: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_no_overlap", self.degree == 0)
        if self.degree is not None and self.degree <= 1:
            object.__setattr__(self, "mode", AttnOverlapMode.STATIC)
        if self._no_overlap:
            object.__setattr__(self, "degree", 1)
            object.__setattr__(self, "max_num_chunks", 1)
        if self.mode is AttnOverlapMode.STATIC:
            _require(self.degree is not None, f"degree is {self.degree}; the static mode wants a number of stages")
            fits = self.degree is None or self.degree <= self.max_num_chunks
            _require(fits, f"degree is {self.degree}, above max_num_chunks={self.max_num_chunks}")
        else:
            _require(self.degree is None, f"degree is {self.degree}; the dynamic mode finds it, and wants None")
            most = self.dynamic_max_degree
            _require(most is None or most > 0, f"dynamic_max_degree is {most}; it is above 0, or None")
        for name in ("min_chunk_size", "max_num_chunks", "calc_cost_factor", "comm_cost_factor"):
            value = getattr(self, name)
            _require(value > 0, f"{name} is {value}; it is above 0")

    @property
    def no_overlap(self) -> bool:
        """Whether nothing overlaps: `degree` was 0."""
        return self._no_overlap

    @property
    def enable(self) -> bool:
        """Whether there is, or may be, more than one stage."""
        return not self._no_overlap and (self.degree is None or self.degree >= 2)

    def plan_arguments(self) -> dict[str, Any]:
        """The same in words of `Group.plan`."""
        defaults = OverlapConfig()
        names = ("dynamic_max_degree", "min_chunk_size", "calc_cost_factor", "comm_cost_factor", "alg")
        hints({name: (getattr(self, name), getattr(defaults, name)) for name in names}, "stages are cut by predicted time")
        if self._no_overlap:
            return {"stages": 1, "overlap": "sequential"}
        return {"stages": "auto" if self.degree is None else self.degree}


def _require(holds: bool, message: str) -> None:
    # Their class asserts; callers catch that.
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True)
class GrpCollConfig:
    """Buffers of their collectives; a hint, all of it."""

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0


@dataclass(frozen=True)
class DistAttnConfig:
    """All of it."""

    dispatch_config: DispatchConfig = DispatchConfig()
    overlap_config: OverlapConfig = OverlapConfig()
    grpcoll_config: GrpCollConfig = GrpCollConfig()

    def __post_init__(self) -> None:
        if env.comm.is_qo_comm_enable():
            object.__setattr__(self, "overlap_config", OverlapConfig(degree=1))

    def plan_arguments(self) -> dict[str, Any]:
        """The same in words of `Group.plan`."""
        if self.grpcoll_config != GrpCollConfig():
            hint("grpcoll_config", "counterpoint's collectives size their own buffers")
        queries = "auto" if env.comm.is_qo_comm_enable() else "never"
        return {"dispatch": self.dispatch_config.dispatch(), "queries": queries, **self.overlap_config.plan_arguments()}
