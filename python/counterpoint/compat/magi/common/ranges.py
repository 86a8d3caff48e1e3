"""Lists of ranges of tokens, and arithmetic with them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from counterpoint.compat.magi.common.range import AttnRange, NaiveRange

if TYPE_CHECKING:
    import torch

NaiveRanges: TypeAlias = Sequence[NaiveRange]

__all__ = ["AttnRanges", "check_valid_cu_seqlens", "is_valid_cu_seqlens"]


def is_valid_cu_seqlens(cu_seqlens: list[int], seq_len: int) -> bool:
    """Whether cumulative starts begin at 0, grow, and end at `seq_len`; nothing at all is valid too."""
    if not cu_seqlens:
        return True
    grows = all(before < after for before, after in pairwise(cu_seqlens))
    return cu_seqlens[0] == 0 and cu_seqlens[-1] == seq_len and grows


def check_valid_cu_seqlens(cu_seqlens: list[int], seq_len: int) -> None:
    """Raises `ValueError` unless `is_valid_cu_seqlens`."""
    if not is_valid_cu_seqlens(cu_seqlens, seq_len):
        raise ValueError(f"cu_seqlens are {cu_seqlens}; they must begin at 0, grow, and end at {seq_len}")


class AttnRanges:
    """A list of ranges, in any order; they may overlap."""

    def __init__(self) -> None:
        self._ranges: list[AttnRange] = []

    def is_valid(self) -> bool:
        """Whether no range ends before it starts."""
        return all(part.is_valid_close() for part in self._ranges)

    def check_valid(self) -> None:
        """Raises `ValueError` unless `is_valid`."""
        if not self.is_valid():
            raise ValueError(f"a range of {self._ranges} ends before it starts")

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        """Adds a range at the end."""
        if check:
            attn_range.check_valid()
        self._ranges.append(attn_range)

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        """Adds a range before that at `idx`."""
        if check:
            attn_range.check_valid()
        self._ranges.insert(idx, attn_range)

    def extend(self, attn_ranges: AttnRanges, check: bool = False) -> None:
        """Adds all of `attn_ranges` at the end."""
        if check:
            attn_ranges.check_valid()
        self._ranges.extend(attn_ranges._ranges)

    def pop(self, idx: int = -1) -> AttnRange:
        """Takes a range out."""
        if not self._ranges:
            raise IndexError("pop from empty ranges")
        return self._ranges.pop(idx)

    def clear_empty(self) -> AttnRanges:
        """Without ranges that have no token."""
        return _of(part for part in self._ranges if not part.is_empty())

    def sort(self) -> AttnRanges:
        """A copy, by start."""
        return _of(part.clone() for part in sorted(self._ranges, key=lambda part: part.start))

    def merge(self) -> AttnRanges:
        """The same tokens in as few ranges as possible, by start; ranges that touch become one."""
        return self.merge_with_split_alignment(1)

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """As `merge`, of ranges whose ends are first moved outwards to multiples of `split_alignment`."""
        merged: list[AttnRange] = []
        for part in sorted(self._ranges, key=lambda part: part.start):
            start = part.start // split_alignment * split_alignment
            end = -(-part.end // split_alignment) * split_alignment
            if not merged or start > merged[-1].end:
                merged.append(AttnRange(start, end))
            elif end > merged[-1].end:
                merged[-1].end = end
        return _of(merged)

    def chunk(self, chunk_size: int, check: bool = True) -> list[AttnRanges]:
        """Cut, in this order, into lists of `chunk_size` tokens; the last may have fewer."""
        if check and not self.is_non_overlap():
            raise AssertionError(f"only non-overlapping ranges can be cut into chunks, not {self}")
        chunks: list[AttnRanges] = []
        room = 0
        for part in self._ranges:
            start = part.start
            while start < part.end:
                if room == 0:
                    chunks.append(AttnRanges())
                    room = chunk_size
                end = min(part.end, start + room)
                chunks[-1].append(AttnRange(start, end))
                room -= end - start
                start = end
        return chunks

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """What lies between `start` and `end`, without what is empty there."""
        return _of(part.truncate(start, end) for part in self._ranges).clear_empty()

    def is_sorted(self) -> bool:
        """Whether starts never fall."""
        return all(a.start <= b.start for a, b in pairwise(self._ranges))

    def is_merged(self) -> bool:
        """Whether they are sorted, and neither overlap nor touch."""
        return self.is_sorted() and all(a.end < b.start for a, b in pairwise(self._ranges))

    def is_non_overlap(self) -> bool:
        """Whether no token is in two of them."""
        return self.total_seqlen == self.merge().total_seqlen

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Whether they cover `seqlen` tokens one after the other."""
        if not self._ranges:
            return seqlen == 0
        joined = all(a.end == b.start for a, b in pairwise(self._ranges))
        return joined and self._ranges[0].start == 0 and self._ranges[-1].end == seqlen

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Cumulative starts of ranges that cover `seq_len` tokens one after the other."""
        if not self.is_cu_seqlens(seq_len):
            raise AssertionError(f"{self} do not cover {seq_len} tokens one after the other")
        return [0, *(part.end for part in self._ranges)]

    def make_range_local(
        self, other_attn_range: AttnRange, is_self_merged: bool = False, prefix_offset: list[int] | None = None
    ) -> tuple[AttnRange, AttnRange]:
        """Where a range lies among the tokens of the merged ranges, counted from 0, and the merged range that has it."""
        merged = self if is_self_merged else self.merge()
        offsets = merged._offsets() if prefix_offset is None else prefix_offset
        if len(offsets) != len(merged):
            raise AssertionError(f"{len(offsets)} offsets for {len(merged)} merged ranges")
        found = bisect_right([part.start for part in merged], other_attn_range.start) - 1
        if found < 0 or not other_attn_range.is_subrange_of(merged[found]):
            # Callers match this text.
            raise ValueError(f"The attn_range {other_attn_range} is not in the (even merged) attn_ranges {merged}")
        return other_attn_range.offset(offsets[found] - merged[found].start), merged[found]

    def make_ranges_local(self, other_attn_ranges: AttnRanges, is_self_merged: bool = False) -> AttnRanges:
        """`make_range_local` of each."""
        merged = self if is_self_merged else self.merge()
        offsets = merged._offsets()
        return _of(merged.make_range_local(part, True, offsets)[0] for part in other_attn_ranges)

    def _offsets(self) -> list[int]:
        """Tokens before each range."""
        return list(accumulate((part.seqlen for part in self._ranges), initial=0))[:-1]

    def find_hole_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """Tokens of these ranges that are in none of `other_attn_ranges`, merged."""
        mine = self if is_self_merged else self.merge()
        theirs = (other_attn_ranges if is_other_merged else other_attn_ranges.merge())._ranges
        holes: list[AttnRange] = []
        next_of_theirs = 0
        for part in mine:
            start = part.start
            while next_of_theirs < len(theirs) and theirs[next_of_theirs].end <= start:
                next_of_theirs += 1
            at = next_of_theirs
            while at < len(theirs) and theirs[at].start < part.end:
                if start < theirs[at].start:
                    holes.append(AttnRange(start, theirs[at].start))
                start = max(start, theirs[at].end)
                at += 1
            if start < part.end:
                holes.append(AttnRange(start, part.end))
        return _of(holes)

    def find_overlap_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """Tokens of these ranges that are in `other_attn_ranges` too, by start."""
        mine = (self if is_self_merged else self.merge())._ranges
        theirs = (other_attn_ranges if is_other_merged else other_attn_ranges.merge())._ranges
        shared: list[AttnRange] = []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            if mine[i].is_overlap_with(theirs[j]):
                shared.append(mine[i].intersect(theirs[j]))
            if mine[i].end > theirs[j].end:
                j += 1
            else:
                i += 1
        return _of(shared)

    def to_tensor(self, device: str | torch.device | int = "cpu") -> torch.Tensor:
        """`[ranges, 2]`, int32."""
        import torch

        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=device).reshape(-1, 2)

    @staticmethod
    def from_cu_seqlens(cu_seqlens: list[int], seq_len: int) -> AttnRanges:
        """From cumulative starts."""
        check_valid_cu_seqlens(cu_seqlens, seq_len)
        return _of(AttnRange(start, end) for start, end in pairwise(cu_seqlens))

    def clone(self) -> AttnRanges:
        """A copy, ranges included."""
        return _of(part.clone() for part in self._ranges)

    @staticmethod
    def from_ranges(ranges: Iterable[NaiveRange | AttnRange] | AttnRanges, check: bool = False) -> AttnRanges:
        """From pairs, ranges, or a copy of a list of ranges."""
        made = _of(AttnRange.from_range(part) for part in ranges)
        if check:
            made.check_valid()
        return made

    def to_naive_ranges(self) -> list[NaiveRange]:
        """As pairs."""
        return [part.to_naive_range() for part in self._ranges]

    def intersect_size(self) -> int:
        """Tokens counted once too often by `total_seqlen`: all occurrences but one."""
        return self.total_seqlen - self.merge().total_seqlen

    def intersect_size_with(self, other: AttnRanges) -> int:
        """Occurrences, in both lists together, of tokens that both have, less one for each such token."""
        shared = self.find_overlap_ranges(other)
        occurrences: int = sum(part.intersect_size(common) for part in [*self, *other] for common in shared)
        return occurrences - shared.total_seqlen

    def union_size(self) -> int:
        """Tokens of all ranges; what overlaps counts as often as it occurs."""
        return self.total_seqlen

    def union_size_with(self, other: AttnRanges) -> int:
        """Tokens of both lists; what overlaps counts as often as it occurs."""
        return self.total_seqlen + other.total_seqlen

    @property
    def total_seqlen(self) -> int:
        """Tokens of all ranges; what overlaps counts as often as it occurs."""
        return sum(part.seqlen for part in self._ranges)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest."""
        return max((part.seqlen for part in self._ranges), default=0)

    @property
    def start(self) -> int:
        """The first token."""
        if not self._ranges:
            raise ValueError("no ranges have no start")
        return min(part.start for part in self._ranges)

    @property
    def end(self) -> int:
        """One past the last token."""
        if not self._ranges:
            raise ValueError("no ranges have no end")
        return max(part.end for part in self._ranges)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def points(self) -> list[int]:
        """All starts and ends, each once, sorted."""
        return sorted({point for part in self._ranges for point in (part.start, part.end)})

    def is_empty(self) -> bool:
        """Whether there is no range."""
        return not self._ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, idx: Any) -> Any:
        return _of(self._ranges[idx]) if isinstance(idx, slice) else self._ranges[idx]

    def __setitem__(self, idx: int | slice, value: AttnRange | AttnRanges) -> None:
        if isinstance(idx, slice):
            if not isinstance(value, AttnRanges) or idx.stop - idx.start != len(value):
                raise AssertionError(f"{idx} takes as many ranges as it names, not {value}")
            self._ranges[idx] = value._ranges
        elif isinstance(value, AttnRange):
            self._ranges[idx] = value
        else:
            raise AssertionError(f"an element is an AttnRange, not a {type(value).__name__}")

    def __iter__(self) -> Iterator[AttnRange]:
        return iter(self._ranges)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, AttnRanges) and self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return repr(self._ranges) if self._ranges else "[[,)]"


def _of(parts: Iterable[AttnRange]) -> AttnRanges:
    made = AttnRanges()
    made._ranges.extend(parts)
    return made


RangesType: TypeAlias = AttnRanges | NaiveRanges
