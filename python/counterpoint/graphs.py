"""CUDA graphs of PyTorch's that replay with other plans than they were captured with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.errors import Error, PlanError

if TYPE_CHECKING:
    import torch

    from counterpoint.plan import Plan


def update_graph(graph: torch.cuda.CUDAGraph, old: Plan, new: Plan) -> None:
    """See `Plan.update_graph`."""
    group = old.group
    if new.group is not group:
        raise PlanError("the new plan is of another group than the plan that was captured; make both with one group")
    if new._fits() != old._fits():
        raise PlanError(
            f"the new plan is for tensors of other shapes or types than the graph has: {_shapes(new)}, and the graph was "
            f"captured for {_shapes(old)}; pad its mask to as many tokens"
        )
    if old._moves_rows_in_graphs and _rows(old) != _rows(new):
        raise PlanError(
            "a graph moves rows of the plan that was captured (undispatch, roll), and an update does not change that; the new "
            "plan gives its ranks other rows: move rows outside of the graph, or plan with on=, which keeps a plan's rows"
        )
    handles = _handles(graph)
    stream = group._stream()
    updated = 0
    for (max_logits, dlse), calls in [((False, False), old._calls), *old._asking_calls.items()]:
        if calls is not None:
            ready = new._asking(stream, max_logits=max_logits, dlse=dlse)
            with group._named_errors():
                updated += ready.update_graph(calls, *handles, stream)
    if not updated:
        raise PlanError(
            "the graph has no call of this plan; update it from the plan that it was captured with, or updated to last"
        )
    # Its rows are those that the graph moves, and the next update starts from it.
    new._moves_rows_in_graphs |= old._moves_rows_in_graphs


def _rows(plan: Plan) -> list[list[tuple[int, int]]]:
    """Those of every rank, of queries and of keys."""
    return [plan._ranges(rank, role) for rank in range(plan.group.size) for role in ("q", "k")]


def _handles(graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
    """The graph, and what was instantiated of it."""
    try:
        captured = graph.raw_cuda_graph()
    except (AttributeError, RuntimeError) as error:
        raise Error(
            "an update needs the graph that was captured, which PyTorch keeps if it is made as "
            "torch.cuda.CUDAGraph(keep_graph=True); a PyTorch whose graphs have no raw_cuda_graph_exec is too old (2.11 has it)"
        ) from error
    try:
        return captured, graph.raw_cuda_graph_exec()
    except RuntimeError:
        graph.instantiate()
        return captured, graph.raw_cuda_graph_exec()


def _shapes(plan: Plan) -> str:
    fits = plan._fits()
    sink = "" if fits.sink is None else f", sink {list(fits.sink)}"
    return f"q {list(fits.q)}, k {list(fits.k)}, v {list(fits.v)}{sink} of {fits.dtype}"
