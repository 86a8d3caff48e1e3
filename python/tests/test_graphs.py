"""Updates of CUDA graphs that are refused before a GPU is asked: other groups, other shapes, graphs that PyTorch has not kept."""

from __future__ import annotations

from typing import Any, cast

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")


class Kept:
    """Stands in for a graph that was made with keep_graph=True."""

    def raw_cuda_graph(self) -> int:
        return 0

    def raw_cuda_graph_exec(self) -> int:
        return 0


class NotKept(Kept):
    """One without it."""

    def raw_cuda_graph(self) -> int:
        raise RuntimeError("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with keep_graph=true")


def planned(group: cp.LocalGroup, rows: int, dispatch: str = "sequential") -> cp.Plan:
    return group.plan(cp.Mask.causal(rows), heads=2, head_dim=8, dtype=torch.float32, chunk=16, dispatch=dispatch)


def test_what_no_graph_can_have_is_refused_with_a_sentence() -> None:
    group, other = cp.LocalGroup(2), cp.LocalGroup(2)
    plan, new, elsewhere = planned(group, 64), planned(group, 64), planned(group, 64, dispatch="zigzag")
    q = torch.zeros(64, 2, 8)
    cp.attention(q, q, q, plan)
    for graph, given, sentence in (
        (NotKept(), new, "keep_graph=True"),
        (object(), new, "keep_graph=True"),
        (Kept(), planned(other, 64), "another group"),
        (Kept(), planned(group, 128), "other shapes or types"),
        (Kept(), new, "no call of this plan"),
        (Kept(), elsewhere, "moves rows of the plan that was captured"),
    ):
        plan._moves_rows_in_graphs = given is elsewhere
        with pytest.raises(cp.Error, match=sentence):
            plan.update_graph(cast(Any, graph), given)
    assert cp.attention(q, q, q, plan)[0].shape == q.shape
    group.close()
    other.close()
