"""What is compiled whole by `torch.compile`, besides attention: rows there and back, and layers, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from ranks import Ranks  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, RowParallelLinear, SharedInputLinear  # noqa: E402

TOKENS = 96


def counted() -> tuple[list[Any], Callable[..., Any]]:
    """A backend that keeps what it compiles."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    return graphs, backend


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def rows_there_and_back(group: Any) -> int:
    """Steps with another plan each, compiled and not: the same bits. How often was compiled?"""
    torch._dynamo.reset()

    def step(x: torch.Tensor, plan: cp.Plan) -> torch.Tensor:
        local = plan.dispatch(x)
        everyone = plan.undispatch(local * plan.roll(local, 1), grad="sum")
        return everyone + plan.undispatch(plan.dispatch(x, pad_value=2.0).square())

    graphs, backend = counted()
    fast = torch.compile(step, fullgraph=True, backend=backend)
    for number in range(8):
        mask = cp.Mask.varlen([0, 10 + 9 * number, TOKENS], causal=True)
        plan = group.plan(mask, heads=1, head_dim=8, dtype="float32", chunk=[8, 12][number % 2])
        x = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(number)).requires_grad_()
        results = []
        for run in (fast, step):
            y = run(x, plan)
            results.append([y.detach(), *torch.autograd.grad((y * x.detach()).sum(), x)])
        same(*results)
    return len(graphs)


def layers(group: Any) -> int:
    """A block of layers of all kinds, with and without sequence parallelism, parameters trained and frozen."""
    compiles = 0
    for sequence_parallel in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        how = {"tp_group": group, "sequence_parallel": sequence_parallel}
        shared = SharedInputLinear(8, {"q": 16, "k": 8}, **how)
        up, down = ColumnParallelLinear(16 // group.size, 24, **how), RowParallelLinear(24, 8, **how)
        modules = torch.nn.ModuleList([shared, up, down])

        def block(
            x: torch.Tensor, shared: Any = shared, up: Any = up, down: Any = down, sequence_parallel: bool = sequence_parallel
        ) -> torch.Tensor:
            (q, k), _ = shared(x)
            # Of sequence-parallel layers the next takes this rank's tokens.
            hidden = (
                (q.tanh() + k.sum(-1, keepdim=True))[: x.shape[0]] if sequence_parallel else q.tanh() + k.sum(-1, keepdim=True)
            )
            return down(torch.nn.functional.gelu(up(hidden)[0]))[0]

        graphs, backend = counted()
        fast = torch.compile(block, fullgraph=True, backend=backend)
        for number, frozen in enumerate((False, False, True)):
            for parameter in modules.parameters():
                parameter.requires_grad_(not frozen)
            x = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(number)).requires_grad_()
            inputs = [x, *(parameter for parameter in modules.parameters() if parameter.requires_grad)]
            results = []
            for run in (fast, block):
                y = run(x)
                results.append([y.detach(), *torch.autograd.grad(y.square().sum(), inputs)])
            same(*results)
        compiles += len(graphs)
    return compiles


def largest_scores(group: Any) -> int:
    """Attention with the largest score of each head, with a sink, and gradients through out and lse."""
    torch._dynamo.reset()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, plan: cp.Plan) -> tuple[torch.Tensor, ...]:
        out, lse, largest = cp.attention(q, k, v, plan, sink=sink, return_max_logits=True)
        return out.square().sum() + (lse.exp() + largest).sum(), largest * 2

    graphs, backend = counted()
    fast = torch.compile(step, fullgraph=True, backend=backend)
    for number in range(4):
        mask = cp.Mask.sliding_window(TOKENS, 5 + number, 3)
        plan = group.plan(mask, heads=(2, 1), head_dim=8, dtype="float32", sink_rows=1, chunk=[8, 12][number % 2])
        whole = torch.randn(TOKENS, 4, 8, generator=torch.Generator().manual_seed(number))
        q, k, v = (part.contiguous().requires_grad_() for part in plan.dispatch(whole).split([2, 1, 1], 1))
        sink = torch.zeros(2, requires_grad=True)
        results = []
        for run in (fast, step):
            loss, largest = run(q, k, v, sink, plan)
            results.append([loss.detach(), largest, *torch.autograd.grad(loss, (q, k, v, sink))])
        same(*results)
        assert not results[0][1].requires_grad
    return len(graphs)


def test_largest_scores_in_one_process() -> None:
    assert largest_scores(cp.LocalGroup(2)) <= 3


def test_rows_in_one_process() -> None:
    assert rows_there_and_back(cp.LocalGroup(3)) <= 4


def test_layers_of_one_rank() -> None:
    # Once for parameters that are trained, and once for frozen ones.
    assert layers(cp.LocalGroup(1)) <= 4


def of_rank(rank: int) -> tuple[int, int, int]:
    group = cp.Group()
    return rows_there_and_back(group), layers(group), largest_scores(group)


def test_ranks_that_are_processes(ranks: Ranks) -> None:
    for rows, of_layers, scores in ranks.run(of_rank):
        assert rows <= 4 and of_layers <= 4 and scores <= 4


def test_operators_are_what_pytorch_asks_of_them() -> None:
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(32), heads=1, head_dim=8, dtype="float32")
    layer = ColumnParallelLinear(4, 6, dtype=torch.float64)
    x = torch.randn(32, 3, dtype=torch.float64, requires_grad=True)
    operators = torch.ops.counterpoint
    torch.library.opcheck(operators.dispatch.default, (x, 0, "q", 0.0, plan.q_rows, 32, plan.handle))
    torch.library.opcheck(operators.undispatch.default, (x, 0, "q", "take", 32, 32, plan.handle))
    torch.library.opcheck(operators.roll.default, (x, 3, 0, plan.handle))
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    given = rows, [layer.weight], [layer.bias], 5, "written", layer._layer.number
    torch.library.opcheck(operators.product.default, given)
    assert torch.autograd.gradcheck(
        lambda *tensors: operators.product(tensors[0], [tensors[1]], [tensors[2]], *given[3:]),
        (*given[:1], layer.weight, layer.bias),
    )


def test_a_layer_that_is_gone_says_so() -> None:
    with pytest.raises(cp.TensorError, match="layer 987654321 is gone; keep its module"):
        torch.ops.counterpoint.product(torch.zeros(2, 4), [torch.zeros(6, 4)], [], 2, "written", 987654321)
