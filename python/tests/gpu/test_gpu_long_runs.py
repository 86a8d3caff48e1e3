"""Long runs of groups on GPUs, a process a rank: thousands of masks, NCCL's collectives during calls, ranks that are killed."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from gpu_ranks import run  # noqa: E402
from long_runs import LIMIT, grown  # noqa: E402

# Masks, and rounds with another library: `run.sh long` has 10,000.
COUNT = int(os.environ.get("LONG_RUN_COUNT", "200"))
# Seconds of one run.
LONG = 400.0
PROGRAM = """
import json, torch, torch.distributed as dist, long_runs
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group({backend!r})
print("RESULT", json.dumps(long_runs.{call}), flush=True)
# Not through the end of a process group that may lack a rank.
import os
os._exit(0)
"""
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks with GPUs of their own need two")


def sizes() -> list[int]:
    """Ranks to have, at most one a GPU."""
    return [size for size in (2, 4) if size <= torch.cuda.device_count()] or [2]


def results(size: int, call: str, backend: str = "gloo", killed: int | None = None) -> list[dict[str, Any]]:
    """What each rank that lives gave."""
    found = []
    for rank, output in enumerate(run(size, PROGRAM.format(backend=backend, call=call), limit=LONG)):
        if rank == killed:
            assert "ended with -9" in output, output
            continue
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == 1 and "ended with 0" in output, f"rank {rank}:\n{output}"
        found.append(json.loads(lines[0].removeprefix("RESULT ")))
    print(found)
    return found


@pytest.mark.parametrize("size", sizes())
def test_masks_come_and_go_and_nothing_grows(size: int) -> None:
    for result in results(size, f"masks_come_and_go(rank, 'cuda', {COUNT}, {min(100, COUNT // 4)}, 1200)"):
        assert result["wrong"] == 0 and result["looked"] > 0, result
        more = grown(result)
        assert more["threads"] <= 0 and more["descriptors"] <= 0, more
        assert more["mappings"] <= 16 and more["host"] <= 128 << 20 and more["device"] <= 64 << 20, more


@several
@pytest.mark.parametrize("size", sizes())
def test_attention_with_nccl(size: int) -> None:
    for result in results(size, f"attention_concurrent_collectives(rank, 'cuda', {COUNT}, 1200)", "nccl"):
        assert result == {"rounds": COUNT, "unlike": 0, "wrong": 0}


@several
@pytest.mark.parametrize("size", sizes())
@pytest.mark.parametrize("overlap", ["fused", "concurrent"])
def test_layers_with_nccl(size: int, overlap: str) -> None:
    for result in results(size, f"layers_concurrent_collectives(rank, 'cuda', {COUNT}, {overlap!r})", "nccl"):
        assert result == {"rounds": COUNT, "unlike": 0, "wrong": 0}


@several
@pytest.mark.parametrize("size", sizes())
def test_masks_through_one_graph_a_rank(size: int) -> None:
    masks = min(COUNT, 1000)
    for result in results(size, f"masks_through_one_graph(rank, {masks}, 2048)"):
        assert result["masks"] == masks and result["unlike"] == 0, result


@several
@pytest.mark.parametrize("when", ["in a call", "while others drop"])
def test_a_rank_that_is_killed_is_named_and_gpus_go_on(when: str) -> None:
    size = sizes()[-1]
    call = f"last_rank_is_killed(rank, size, 'cuda', {when!r}, 1200)"
    for result in results(size, call, killed=size - 1):
        assert f"rank {size - 1}" in result["heard"], result
        assert result["seconds"] < LIMIT + 10.0 and result["wrong"] == 0, result
