"""Long runs of groups on CPU ranks, in small: `gpu/test_gpu_long_runs.py` has them on GPUs, in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from long_runs import (
    LIMIT,
    attention_concurrent_collectives,
    grown,
    last_rank_is_killed,
    layers_concurrent_collectives,
    masks_come_and_go,
)
from ranks import Died, Ranks

import counterpoint as cp


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks of this module's own: their group has a limit that others have not."""
    with Ranks(2) as pool:
        yield pool


def test_masks_come_and_go_and_nothing_grows(pair: Ranks) -> None:
    for result in pair.run(masks_come_and_go, "cpu", 160, 60, 80):
        assert result["wrong"] == 0 and result["looked"] > 0, result
        more = grown(result)
        assert more["threads"] <= 0 and more["descriptors"] <= 0, more
        # Of the C library's heaps, which threads get as they come.
        assert more["mappings"] <= 8 and more["host"] <= 16 << 20, more


def test_attention_concurrent_collectives_of_the_process_group(pair: Ranks) -> None:
    for result in pair.run(attention_concurrent_collectives, "cpu", 20, 80):
        assert result == {"rounds": 20, "unlike": 0, "wrong": 0}


def test_layers_concurrent_collectives_of_the_process_group(pair: Ranks) -> None:
    for result in pair.run(layers_concurrent_collectives, "cpu", 20, "auto"):
        assert result == {"rounds": 20, "unlike": 0, "wrong": 0}


@pytest.mark.parametrize("when", ["in a call", "while others drop"])
def test_a_rank_that_is_killed_is_named(when: str) -> None:
    with Ranks(3) as pool:
        *others, killed = pool.run(last_rank_is_killed, 3, "cpu", when, 200)
        assert killed == Died()
        for result in others:
            assert "of rank 2" in result["heard"] or "rank 2" in result["heard"], result
            assert result["seconds"] < LIMIT + 5.0 and result["wrong"] == 0, result


def test_streams_are_of_gpus() -> None:
    group = cp.LocalGroup(2)
    with pytest.raises(cp.DeviceError, match="stream is 7; order_with takes a CUDA stream, and this group is on the CPU"):
        group.order_with(7)  # type: ignore[arg-type]
    group.close()
