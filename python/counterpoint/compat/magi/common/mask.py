"""A mask as a dense matrix and as slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from counterpoint.compat.magi.common.enum import AttnMaskType
from counterpoint.compat.magi.common.range import AttnRange
from counterpoint.compat.magi.common.ranges import AttnRanges


class AttnMask(torch.nn.Module):
    """Made by `from_ranges` or `from_mask`; 1 where a query sees a key."""

    _can_instantiate = False
    meta_info_dim_size = 1
    mask_flag_dim_idx = 0
    masked_flag = 0
    unmasked_flag = 1
    device = "cpu"

    def __new__(cls, *args: Any, **kwargs: Any) -> AttnMask:
        if not cls._can_instantiate:
            raise RuntimeError("an AttnMask is made by AttnMask.from_ranges or AttnMask.from_mask")
        return super().__new__(cls)

    def __init__(
        self,
        mask_tensor: torch.Tensor,
        q_ranges: AttnRanges,
        k_ranges: AttnRanges,
        attn_mask_type: list[AttnMaskType],
        total_seqlen_q: int,
        total_seqlen_k: int,
    ) -> None:
        super().__init__()
        self.mask_tensor = mask_tensor
        self.q_ranges, self.k_ranges, self.attn_mask_type = q_ranges, k_ranges, attn_mask_type
        self.total_seqlen_q, self.total_seqlen_k = total_seqlen_q, total_seqlen_k
        self.mask_flag_array = mask_tensor[..., self.mask_flag_dim_idx].ne(self.masked_flag).int().numpy()

    def tuples(self) -> Iterable[tuple[AttnRange, AttnRange, AttnMaskType]]:
        """The slices: (queries, keys, type)."""
        yield from zip(self.q_ranges, self.k_ranges, self.attn_mask_type, strict=True)

    @classmethod
    def from_ranges(
        cls,
        q_ranges: AttnRanges,
        k_ranges: AttnRanges,
        attn_mask_type: list[AttnMaskType],
        total_seqlen_q: int | None = None,
        total_seqlen_k: int | None = None,
    ) -> AttnMask:
        """From slices of types full and causal; the later of two that overlap wins."""
        if not len(q_ranges) == len(k_ranges) == len(attn_mask_type):
            counts = f"{len(q_ranges)} q_ranges, {len(k_ranges)} k_ranges and {len(attn_mask_type)} types"
            raise AssertionError(f"{counts}; a slice has one of each")
        seqlen_q = q_ranges.end if total_seqlen_q is None else total_seqlen_q
        seqlen_k = k_ranges.end if total_seqlen_k is None else total_seqlen_k
        dense = torch.full((seqlen_q, seqlen_k, cls.meta_info_dim_size), cls.masked_flag, dtype=torch.int32, device=cls.device)
        for q, k, kind in zip(q_ranges, k_ranges, attn_mask_type, strict=True):
            if kind not in (AttnMaskType.FULL, AttnMaskType.CAUSAL):
                raise ValueError(f"Invalid mask type {kind}: an AttnMask has slices of types full and causal")
            seen = torch.ones((q.seqlen, k.seqlen), dtype=torch.int32, device=cls.device)
            if kind is AttnMaskType.CAUSAL:
                seen = cls.make_causal_mask(q.seqlen, k.seqlen)
            flags = torch.where(seen == 1, cls.unmasked_flag, cls.masked_flag).int()
            dense[q.start : q.end, k.start : k.end, cls.mask_flag_dim_idx] = flags
        with cls.can_instantiate_ctx():
            return AttnMask(dense, q_ranges, k_ranges, attn_mask_type, seqlen_q, seqlen_k)

    @classmethod
    def from_mask(cls, mask: list[list[int]] | torch.Tensor) -> AttnMask:
        """From a matrix of whose rows each is one run of ones, or none."""
        dense = torch.as_tensor(mask, dtype=torch.int32, device=cls.device)
        cls._check_mask_valid(dense)
        slices: list[tuple[AttnRange, AttnRange, AttnMaskType]] = []
        for row in range(dense.shape[0]):
            columns = dense[row].nonzero().flatten().tolist()
            seen = AttnRange(columns[0], columns[-1] + 1) if columns else AttnRange(row, row)
            _add_row(slices, row, seen)
        q_ranges = AttnRanges.from_ranges([q for q, _, _ in slices])
        k_ranges = AttnRanges.from_ranges([k for _, k, _ in slices])
        types = [kind for _, _, kind in slices]
        with cls.can_instantiate_ctx():
            return AttnMask(dense.unsqueeze(-1), q_ranges, k_ranges, types, dense.shape[0], dense.shape[1])

    @classmethod
    def _check_mask_valid(cls, mask: torch.Tensor) -> None:
        if mask.ndim != 2:
            raise AssertionError(f"the mask has {mask.ndim} axes; it has two, of queries and of keys")
        for row in range(mask.shape[0]):
            columns = mask[row].nonzero().flatten().tolist()
            if columns and columns[-1] - columns[0] + 1 != len(columns):
                raise AssertionError(f"row {row} of the mask is not one run of ones: {columns}")

    def _check_sub_range_valid(self, q_range: AttnRange, k_range: AttnRange) -> None:
        if q_range.end > self.total_seqlen_q or k_range.end > self.total_seqlen_k:
            shape = f"{self.total_seqlen_q} x {self.total_seqlen_k}"
            raise AssertionError(f"queries {q_range} and keys {k_range} do not lie in a mask of {shape}")

    def calc_sub_area(self, q_range: AttnRange, k_range: AttnRange) -> int:
        """Pairs that are seen in a part."""
        self._check_sub_range_valid(q_range, k_range)
        return int(self.mask_flag_array[q_range.start : q_range.end, k_range.start : k_range.end].sum())

    def make_sub_mask(self, q_range: AttnRange, k_range: AttnRange) -> AttnMask:
        """A part as a mask of its own."""
        self._check_sub_range_valid(q_range, k_range)
        rows, columns = slice(q_range.start, q_range.end), slice(k_range.start, k_range.end)
        return AttnMask.from_mask(self.mask_tensor[rows, columns, self.mask_flag_dim_idx])

    @property
    def area(self) -> int:
        """Pairs that are seen."""
        return int(self.mask_flag_array.sum())

    def is_square(self) -> bool:
        """Whether there are as many keys as queries."""
        return self.total_seqlen_q == self.total_seqlen_k

    def is_pure_full(self) -> bool:
        """Whether every query sees every key."""
        return self.area == self.total_seqlen_q * self.total_seqlen_k

    def is_pure_causal(self) -> bool:
        """Whether it is one causal slice."""
        causal = self.make_causal_mask(self.total_seqlen_q, self.total_seqlen_k)
        return torch.equal(torch.from_numpy(self.mask_flag_array), causal)

    def is_varlen_full(self) -> bool:
        """Whether it is packed documents, each of which sees itself."""
        return self._is_varlen(AttnMaskType.FULL)

    def is_varlen_causal(self) -> bool:
        """Whether it is packed documents, each causal."""
        return self._is_varlen(AttnMaskType.CAUSAL)

    def _is_varlen(self, kind: AttnMaskType) -> bool:
        packed = self.q_ranges.is_cu_seqlens(self.total_seqlen_q) and self.k_ranges.is_cu_seqlens(self.total_seqlen_k)
        return packed and bool(self.attn_mask_type) and all(found is kind for found in self.attn_mask_type)

    def is_empty(self) -> bool:
        """Whether no query sees a key."""
        return self.area == 0

    @staticmethod
    def make_causal_mask(
        seqlen_q: int,
        seqlen_k: int,
        align: str = "bottom-right",
        dtype: torch.dtype = torch.int32,
        device: str = "cpu",
    ) -> torch.Tensor:
        """A dense causal mask, aligned at the last or at the first pair."""
        if align not in ("bottom-right", "top-left"):
            raise ValueError(f"Invalid alignment {align!r}; it is 'bottom-right' or 'top-left'")
        shift = seqlen_k - seqlen_q if align == "bottom-right" else 0
        return torch.ones((seqlen_q, seqlen_k)).tril(shift).to(dtype=dtype, device=device)

    def visualize(self, save_path: str | None = None) -> None:
        """Writes the picture as SVG to `save_path`, or prints it; `Mask` shows itself in notebooks."""
        from counterpoint._native import Mask

        mask = Mask.from_dense(torch.from_numpy(self.mask_flag_array))
        if save_path is None:
            print(mask.picture())
        else:
            with open(save_path, "w", encoding="utf-8") as file:
                file.write(mask.svg())

    def __repr__(self) -> str:
        shape = f"AttnMask({self.total_seqlen_q} x {self.total_seqlen_k}, area={self.area})"
        slices = [f"  {q} x {k} {kind.value}" for q, k, kind in self.tuples()]
        rows = ["  " + " ".join(map(str, row)) for row in self.mask_flag_array.tolist()]
        return "\n".join([shape, *slices, *rows])

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, AttnMask)
            and torch.equal(self.mask_tensor, other.mask_tensor)
            and (self.q_ranges, self.k_ranges) == (other.q_ranges, other.k_ranges)
            and self.attn_mask_type == other.attn_mask_type
        )

    __hash__ = torch.nn.Module.__hash__

    @classmethod
    @contextmanager
    def can_instantiate_ctx(cls) -> Iterator[None]:
        """Inside it, the class can be called."""
        cls._can_instantiate = True
        try:
            yield
        finally:
            cls._can_instantiate = False


def _add_row(slices: list[tuple[AttnRange, AttnRange, AttnMaskType]], row: int, seen: AttnRange) -> None:
    """Adds a row to the last slice where that stays full or causal, or begins another slice."""
    full, causal = AttnMaskType.FULL, AttnMaskType.CAUSAL
    alone = (AttnRange(row, row + 1), seen, causal if seen.is_empty() else full)
    if not slices:
        slices.append(alone)
        return
    q, k, kind = slices[-1]
    longer = AttnRange(q.start, q.end + 1)
    grows_by_one = seen.start == k.start and seen.end == k.end + 1
    if kind is full and seen == k:
        slices[-1] = (longer, k, full)
    elif kind is full and grows_by_one:
        # The last row of a full slice is the first of a causal one.
        if q.seqlen == 1:
            slices.pop()
        else:
            slices[-1] = (AttnRange(q.start, q.end - 1), k, full)
        slices.append((AttnRange(row - 1, row + 1), seen, causal))
    elif kind is causal and k.is_empty() and seen.seqlen <= 1:
        # Rows that see nothing are the top of a causal slice of more queries than keys.
        slices[-1] = (longer, k if seen.is_empty() else seen, causal)
    elif kind is causal and not k.is_empty() and grows_by_one:
        slices[-1] = (longer, seen, causal)
    else:
        slices.append(alone)
