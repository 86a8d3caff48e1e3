"""What a plan says of itself: its figures, its choices, its timelines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from counterpoint._native import Timeline


@dataclass(frozen=True)
class StageSummary:
    """One stage of a rank: unmasked pairs, and key rows that it receives for them."""

    area: int
    recv_tokens: int


@dataclass(frozen=True)
class RankSummary:
    """One rank of a plan. Token counts are rows; areas are unmasked pairs."""

    rank: int
    chunks: tuple[int, ...]
    tokens: int
    area: int
    recv_tokens: int
    send_tokens: int
    query_recv_tokens: int
    query_send_tokens: int
    hosted_area: int
    recv_ranges: tuple[tuple[int, int], ...]
    stages: tuple[StageSummary, ...]


@dataclass(frozen=True)
class CommSummary:
    """Rows that all ranks together receive: by this plan, at least, and by the usual methods."""

    recv_tokens: int
    query_tokens: int
    lower_bound_tokens: int
    ring_tokens: int
    all_gather_tokens: int


@dataclass(frozen=True)
class PlanSummary:
    """A plan in figures: what `counterpoint plan --json` prints."""

    area: int
    cp_size: int
    chunk_size: int
    num_chunks: int
    solve_seconds: float
    balance: float
    ranks: tuple[RankSummary, ...]
    comm: CommSummary

    @classmethod
    def from_json(cls, text: str) -> PlanSummary:
        """From the JSON of `counterpoint plan --json`; fields that are not known are left out."""
        fields = json.loads(text)

        def rank(entry: dict[str, Any]) -> RankSummary:
            entry["chunks"] = tuple(entry["chunks"])
            entry["recv_ranges"] = tuple((start, end) for start, end in entry["recv_ranges"])
            entry["stages"] = tuple(_known(StageSummary, stage) for stage in entry["stages"])
            made: RankSummary = _known(RankSummary, entry)
            return made

        fields["ranks"] = tuple(rank(entry) for entry in fields["ranks"])
        fields["comm"] = _known(CommSummary, fields["comm"])
        made: PlanSummary = _known(cls, fields)
        return made


def _known(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__dataclass_fields__})


@dataclass(frozen=True)
class Timelines:
    """Forward and backward."""

    forward: Timeline
    backward: Timeline | None

    def _repr_html_(self) -> str:
        return self.forward.svg() + ("" if self.backward is None else self.backward.svg())


@dataclass(frozen=True)
class Choices:
    """How a plan's chunks are given to ranks and how its passes overlap, and what that was chosen from.

    The dictionaries have the predicted seconds of what was compared: of a forward and a backward together by dispatch (None of
    one that was left out early), and of each pass by overlap policy. They are empty where nothing was compared; `reason` says why
    something was not that "auto" would have.
    """

    dispatch: str
    overlap: str
    dispatches: dict[str, float | None]
    forward: dict[str, float]
    backward: dict[str, float]
    reason: str | None

    @classmethod
    def from_json(cls, text: str) -> Choices:
        """From what the engine writes."""
        given = json.loads(text)
        return cls(**{**given, **{name: dict(given[name]) for name in ("dispatches", "forward", "backward")}})

    def rows(self) -> list[tuple[str, str]]:
        """In words, by what they are about."""
        why = f" ({self.reason})" if self.reason else ""
        overlap, dispatch = f"{self.overlap}{why}", f"{self.dispatch}{why}"
        if self.dispatches:
            dispatch = f"{self.dispatch}, of {_compared(self.dispatches)} for forward and backward"
        if self.forward:
            overlap = f"{self.overlap}, forward of {_compared(self.forward)}; backward of {_compared(self.backward)}"
        return [("dispatch", dispatch), ("overlap", overlap)]


def _compared(seconds: dict[str, Any]) -> str:
    return ", ".join(f"{name} {'no' if value is None else f'{value * 1e3:.3f}'} ms" for name, value in seconds.items())
