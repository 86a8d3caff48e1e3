"""Half-open ranges of tokens."""

from __future__ import annotations

from typing import Any, TypeAlias

NaiveRange: TypeAlias = tuple[int, int] | list[int]


class RangeError(Exception):
    """A range that ends before it starts."""


class AttnRange:
    """Tokens `start` up to, and without, `end`."""

    __slots__ = ("_end", "_start")

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self.check_valid()

    @property
    def start(self) -> int:
        """The first token."""
        return self._start

    @start.setter
    def start(self, value: int) -> None:
        # Unchecked: both ends may be moved, one after the other.
        self._start = value

    @property
    def end(self) -> int:
        """One past the last token."""
        return self._end

    @end.setter
    def end(self, value: int) -> None:
        self._end = value

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self._end - self._start

    def to_naive_range(self) -> NaiveRange:
        """(start, end)."""
        return (self._start, self._end)

    @staticmethod
    def from_range(attn_range: NaiveRange | AttnRange, check: bool = False) -> AttnRange:
        """From a pair, or a copy of a range."""
        start, end = attn_range.to_naive_range() if isinstance(attn_range, AttnRange) else (attn_range[0], attn_range[1])
        return AttnRange(start, end)

    def clone(self) -> AttnRange:
        """A copy."""
        return AttnRange(self._start, self._end)

    def offset(self, offset: int) -> AttnRange:
        """The same tokens, counted from elsewhere."""
        return AttnRange(self._start + offset, self._end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """What lies between `start` and `end`."""
        first = self._start if start is None else max(self._start, start)
        last = self._end if end is None else min(self._end, end)
        return AttnRange(first, max(first, last))

    def intersect(self, other: AttnRange) -> AttnRange:
        """Tokens of both; empty at the earlier end where there are none."""
        end = min(self._end, other._end)
        return AttnRange(min(max(self._start, other._start), end), end)

    def intersect_size(self, other: AttnRange) -> int:
        """Number of tokens of both."""
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """Tokens of either: one range where they overlap, else both."""
        if self.is_empty() or other.is_empty():
            return [self, other]
        if self.is_subrange_of(other):
            return [other]
        if other.is_subrange_of(self):
            return [self]
        if self.is_overlap_with(other):
            return [AttnRange(min(self._start, other._start), max(self._end, other._end))]
        return [self, other]

    def union_size(self, other: AttnRange) -> int:
        """Number of tokens of either."""
        return sum(part.seqlen for part in self.union(other))

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """Tokens of `other` that are not of this range."""
        if not self.is_overlap_with(other) and not self.is_subrange_of(other):
            return [] if other.is_empty() else [other.clone()]
        before, after = other.truncate(end=self._start), other.truncate(start=self._end)
        return [part for part in (before, after) if not part.is_empty()]

    def is_subrange_of(self, other: AttnRange) -> bool:
        """Whether `other` has all of its tokens."""
        return self._start >= other._start and self._end <= other._end

    def is_overlap_with(self, other: AttnRange) -> bool:
        """Whether the two share a token."""
        return self._start < other._end and other._start < self._end

    def is_empty(self) -> bool:
        """Whether it has no token."""
        return self._start == self._end

    def is_valid_close(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether `start <= end`, of this range or of what is given."""
        return (self._start if start is None else start) <= (self._end if end is None else end)

    def is_valid_open(self, start: int | None = None, end: int | None = None) -> bool:
        """Whether `start < end`, of this range or of what is given."""
        return (self._start if start is None else start) < (self._end if end is None else end)

    def check_valid(self, start: int | None = None, end: int | None = None) -> None:
        """Raises `RangeError` unless `start <= end`."""
        if not self.is_valid_close(start, end):
            first, last = self._start if start is None else start, self._end if end is None else end
            raise RangeError(f"a range from {first} to {last} ends before it starts")

    def __len__(self) -> int:
        return self.seqlen

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, AttnRange) and (self._start, self._end) == (other._start, other._end)

    def __hash__(self) -> int:
        return hash((self._start, self._end))

    def __repr__(self) -> str:
        return f"[{self._start}, {self._end})"


RangeType: TypeAlias = AttnRange | NaiveRange
