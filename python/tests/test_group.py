"""Groups of processes: values and gradients, rows, groups side by side, failures that every rank hears of."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import rank_cases


@pytest.mark.parametrize("seed", range(300, 306))
def test_attention_against_f64(ranks, seed: int) -> None:
    rows = ranks.run(rank_cases.attention_against_f64, seed, [7, 64][seed % 2])
    assert len(rows) == 4


def test_rows_there_and_back(ranks) -> None:
    ranks.run(rank_cases.rows_there_and_back)


def test_groups_side_by_side(ranks) -> None:
    assert ranks.run(rank_cases.groups_side_by_side) == [[rank] * 6 for rank in range(4)]


def test_a_dimension_of_a_mesh(ranks) -> None:
    assert ranks.run(rank_cases.mesh) == [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_a_rank_that_raises_tells_the_others(ranks) -> None:
    for rank, (said, waited) in enumerate(ranks.run(rank_cases.a_rank_that_raises)):
        assert "no such batch" in said and waited < 10, (rank, said, waited)
        assert said.startswith("KeyError" if rank == 2 else "PeerError"), (rank, said)


def test_plans_that_differ_are_found(ranks) -> None:
    said = ranks.run(rank_cases.plans_that_differ)
    assert all(text != "nothing" and ("Mismatch" in text or "Peer" in text) for text in said), said


def test_errors_name_global_ranks(ranks) -> None:
    found = ranks.run(rank_cases.errors_name_global_ranks)
    said, global_rank = found[2]
    assert "out of data" in said and "rank 0 is 2, rank 1 is 3" in said, found
    assert global_rank in (2, 3)


def test_a_new_mask_every_step_leaves_nothing_behind(ranks) -> None:
    for before, after in ranks.run(rank_cases.a_new_mask_every_step, 150):
        assert after <= before + 3, (before, after)


def test_bad_groups_are_one_sentence(ranks) -> None:
    said = ranks.run(rank_cases.bad_groups)[0]
    assert "group_or_mesh must be a ProcessGroup or a DeviceMesh, not a int" in said[0]
    assert said[1].startswith("DeviceError: device is cuda:0") and "transport is 'pigeon'" in said[2]
    assert said[3] == "PlanError: nodes is 2, which does not divide the 3 ranks of the group"
