"""Groups of ranks that are processes: what becomes of the others where one does not join, tries more often, or cannot."""

from __future__ import annotations

import time

import pytest

import counterpoint as cp

pytest.importorskip("torch")
from ranks import Ranks
from test_group import call, described, store


def is_absent(rank: int) -> dict[str, object]:
    if rank == 1:
        return {"text": "elsewhere"}
    began = time.monotonic()
    try:
        cp.Group(limit=0.5)
    except cp.Error as error:
        return described(error) | {"seconds": time.monotonic() - began}
    return {"text": "fine"}


def test_a_rank_that_makes_no_group_is_named() -> None:
    with Ranks(3) as pool:
        found = pool.run(is_absent)
        for rank in (0, 2):
            assert found[rank]["type"] == "PeerError" and found[rank]["peer"] == 1
            assert "for rank 1, which never joined the group; all 3 ranks must make it" in found[rank]["text"]
        # What ends the wait of one ends that of the other.
        assert max(found[rank]["seconds"] for rank in (0, 2)) > 0.4


def joins_after_others(rank: int, early: int) -> dict[str, object]:
    errors = []
    if rank == early:
        for _ in range(2):
            try:
                cp.Group(limit=0.5)
            except cp.PeerError as error:
                errors.append(described(error))
        store().set("gave up", "")
    store().wait(["gave up"])
    began = time.monotonic()
    for _ in range(2):
        try:
            group = cp.Group(limit=60.0)
            break
        except cp.PeerError as error:  # how the other's last attempt ended, if it has begun no other yet
            errors.append(described(error))
    return {"sum": float(call(group).sum()), "errors": errors, "seconds": time.monotonic() - began}


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_tried_unequally_often_join(early: int) -> None:
    with Ranks(2) as pool:
        found = pool.run(joins_after_others, early)
        assert all(one["seconds"] < 30.0 for one in found), found
        assert len(found[early]["errors"]) == 2 and len(found[1 - early]["errors"]) <= 1, found
        named = f"for rank {1 - early}, which never joined the group; all 2 ranks must make it"
        for error in found[0]["errors"] + found[1]["errors"]:
            assert (error["type"], error["peer"]) == ("PeerError", 1 - early) and named in error["text"], error


def joins_with(rank: int, failing: int, what: dict[str, object]) -> dict[str, object]:
    began, found = time.monotonic(), {"text": "fine", "type": None}
    try:
        cp.Group(**(what if rank == failing else {}))
    except cp.Error as error:
        found = described(error)
    found["seconds"] = time.monotonic() - began
    # One that tries again before another has tried at all would join it.
    store().set(f"tried {rank}", "")
    store().wait([f"tried {other}" for other in range(3)])
    return found | {"sum": float(call(cp.Group()).sum())}


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ({"profile": "/no"}, "PlanError", "profile '/no' cannot be read"),
        ({"profile": __file__}, "PlanError", ""),  # it can be read, and is no profile
        ({"device": "cuda"}, "DeviceError", "device is cuda"),
    ],
)
def test_a_rank_that_cannot_join_ends_the_attempt_of_all(failing: int, what: dict[str, object], kind: str, text: str) -> None:
    with Ranks(3, limit=100.0) as pool:
        found = pool.run(joins_with, failing, what)
    for rank, error in enumerate(found):
        assert error["seconds"] < 60.0 and text in error["text"], found
        if rank == failing:
            assert error["type"] == kind, error
        else:
            assert (error["type"], error["peer"]) == ("PeerError", failing), error
            assert error["text"].startswith(f"rank {failing} gave up: {kind}: "), error
        assert error["sum"] == 0.0
