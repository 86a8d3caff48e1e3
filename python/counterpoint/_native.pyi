"""Types of the compiled module. `python/tests/test_stubs.py` holds them to it."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

__version__: str

def _panic(message: str) -> None: ...
def _search_packages(folders: Sequence[str]) -> None: ...

class Mask:
    def __new__(cls, expression: str | os.PathLike[str]) -> Mask: ...
    @staticmethod
    def full(s: int, keys: int | None = None) -> Mask: ...
    @staticmethod
    def causal(s: int, keys: int | None = None) -> Mask: ...
    @staticmethod
    def varlen(
        cu_seqlens: Any,
        cu_seqlens_k: Any | None = None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] = (-1, -1),
        global_tokens: int = 0,
    ) -> Mask: ...
    @staticmethod
    def sliding_window(s: int, left: int | None, right: int | None, global_tokens: int = 0) -> Mask: ...
    @staticmethod
    def prefix_tree(parents: Any, lengths: Any) -> Mask: ...
    @staticmethod
    def block_sparse(
        blocks: Any,
        *,
        block: int | tuple[int, int],
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
    ) -> Mask: ...
    @staticmethod
    def from_slices(
        q_ranges: Any,
        k_ranges: Any,
        types: Any,
        *,
        seqlen_q: int,
        seqlen_k: int,
        overlapping: Literal["error", "union"] = "error",
    ) -> Mask: ...
    @staticmethod
    def from_dense(array: Any) -> Mask: ...
    @staticmethod
    def from_document_ids(ids: Any, *, causal: bool = True) -> Mask: ...
    @staticmethod
    def from_position_ids(position_ids: Any, *, causal: bool = True) -> Mask: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_k(self) -> int: ...
    @property
    def slices(self) -> list[tuple[tuple[int, int], tuple[int, int], str]]: ...
    @property
    def area(self) -> int: ...
    def __contains__(self, pair: tuple[int, int]) -> bool: ...
    def __hash__(self) -> int: ...
    def to_dense(self) -> Any: ...
    def to_json(self) -> str: ...
    def picture(self, width: int = 64, height: int = 32) -> str: ...
    def svg(self, *, title: str = "Attention mask") -> str: ...
    def _repr_html_(self) -> str: ...
    def _repr_mimebundle_(self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None) -> dict[str, str]: ...

_Tensor = tuple[int, tuple[int, ...], tuple[int, ...], str, Any]

class Timeline:
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def spans(self) -> list[tuple[int, str, str, str, int | None, float, float]]: ...
    @property
    def overlap(self) -> dict[str, float | None]: ...
    def to_json(self) -> str: ...
    def chrome_trace(self) -> str: ...

class Solution:
    def __new__(
        cls,
        mask: Mask,
        *,
        ranks: int,
        heads_q: int,
        heads_k: int,
        head_dim: int,
        head_dim_v: int,
        dtype: str,
        scale: float,
        softcap: float,
        sink_rows: int,
        chunk: int | None,
        dispatch: str,
        stages: str | int,
        queries: str,
        ranks_per_node: int,
        profile: str | None,
        on: Solution | None,
    ) -> Solution: ...
    @classmethod
    def from_json(cls, text: str) -> Solution: ...
    def to_json(self) -> str: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def ranks(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    def ranges(self, rank: int, role: str) -> list[tuple[int, int]]: ...
    @property
    def self_attention(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    def summary_json(self) -> str: ...
    def table(self) -> str: ...
    def predict(self) -> tuple[Timeline, Timeline]: ...
    def svg(self, *, small: bool = False) -> str: ...
    def html(
        self,
        title: str,
        setup: list[tuple[str, str]],
        forward: Timeline | None,
        backward: Timeline | None,
    ) -> str: ...

_Place = tuple[int, int, int]

class Calls:
    def forward(
        self,
        stream: int,
        q: _Place,
        k: _Place,
        v: _Place,
        sink: int | None,
        out: int,
        lse: int,
        tensors: tuple[Any, ...],
        /,
    ) -> Timeline | None: ...
    def backward(
        self,
        stream: int,
        dout: _Place,
        q: _Place,
        k: _Place,
        v: _Place,
        sink: int | None,
        out: int,
        lse: int,
        dq: int,
        dk: int,
        dv: int,
        dsink: int | None,
        tensors: tuple[Any, ...],
        /,
    ) -> Timeline | None: ...

# allocate(bytes, stream), free(address), cached().
_Allocator = tuple[Callable[[int, int], int | None], Callable[[int], None], Callable[[], int]]

class Ranks:
    @staticmethod
    def local(size: int, *, slow_link: tuple[float, float] | None, limit: float) -> Ranks: ...
    @staticmethod
    def join(store: Any, rank: int, size: int, *, address: str, limit: float) -> Ranks: ...
    @staticmethod
    def join_cuda(
        store: Any,
        rank: int,
        size: int,
        ordinal: int,
        *,
        address: str,
        limit: float,
        transport: str,
        nodes: int,
        allocator: _Allocator,
    ) -> Ranks: ...
    @staticmethod
    def cuda(size: int, ordinal: int, *, limit: float, allocator: _Allocator) -> Ranks: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def transport(self) -> str: ...
    @property
    def size(self) -> int: ...
    def prepare(self, solution: Solution, *, overlap: str, deterministic: bool, stream: int | None) -> Calls: ...
    def prepare_measured(self, solution: Solution, *, overlap: str, deterministic: bool) -> Calls: ...
    def rows(
        self, solution: Solution, what: str, role: str, *, shift: int, stream: int, source: _Tensor, target: _Tensor
    ) -> None: ...
    def check(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
