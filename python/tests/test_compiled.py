"""What is compiled whole by `torch.compile`, besides attention: rows there and back, and layers, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from ranks import Ranks  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, ExpertLayer, RowParallelLinear, SharedInputLinear  # noqa: E402

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


def rows_by_splits(group: Any) -> int:
    """group_cast and group_reduce of other splits each step, which nobody keeps but the step."""
    torch._dynamo.reset()
    size, here = group.size, range(group.size) if isinstance(group, cp.LocalGroup) else [group.rank]

    def step(x: torch.Tensor, splits: list[cp.Splits]) -> torch.Tensor:
        there = cp.group_cast(x, splits, group)
        back = cp.group_reduce(there * there, splits, group, op="avg") + cp.group_reduce(there.cos(), splits, group)
        with torch.no_grad():
            merged, lse = cp.group_reduce(there[:, None], splits, group, op="lse", lse=there[:, :1])
        return back + merged[:, 0] * lse

    graphs, backend = counted()
    fast = torch.compile(step, fullgraph=True, backend=backend)

    def of_step(run: Callable[..., torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [[2 + (number * source + target) % 4 for target in range(size)] for source in range(size)]
        splits = [cp.Splits.all_to_all(rank, counts) for rank in here]
        rows = sum(one.rows[0] for one in splits)
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(number)).requires_grad_()
        return run(x, splits), x

    for number in range(8):
        results = []
        for run in (fast, step):
            y, x = of_step(run, number)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
        same(*results)
    return len(graphs)


def experts(group: Any) -> int:
    """Two products of experts around a gate, of other routings each step, which nobody keeps but the step; into main_grad too."""
    compiles, size = 0, group.size
    here = range(size) if isinstance(group, cp.LocalGroup) else [group.rank]
    for fused in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        count = 2 * size
        how = {"group": group, "gradient_accumulation_fusion": fused, "dtype": torch.float32}
        up, down = ExpertLayer("dispatch", 8, 12, count, **how), ExpertLayer("combine", 12, 8, count, **how)
        gates = torch.rand(100, count, requires_grad=True)

        def block(
            x: torch.Tensor, routing: cp.Routing, up: Any = up, down: Any = down, gates: torch.Tensor = gates
        ) -> torch.Tensor:
            tokens, experts = up.sources(routing)
            return down(torch.nn.functional.gelu(up(x, routing)) * gates[tokens, experts].unsqueeze(1), routing)

        def of_step(run: Callable[..., torch.Tensor], number: int, count: int = count) -> tuple[torch.Tensor, torch.Tensor]:
            drawn = torch.Generator().manual_seed(number)
            tokens = [5 + (number + rank) % 4 for rank in range(size)]
            ids = [torch.stack([torch.randperm(count, generator=drawn)[:2] for _ in range(of_rank)]) for of_rank in tokens]
            x = torch.randn(sum(tokens[rank] for rank in here), 8, generator=drawn).requires_grad_()
            return run(x, cp.Routing.top_k(count, ids)), x

        graphs, backend = counted()
        fast = torch.compile(block, fullgraph=True, backend=backend)
        for number in range(8):
            results = []
            for run in (fast, block):
                for weight in (up.weight, down.weight):
                    weight.grad = None
                    if fused:
                        weight.main_grad, weight.overwrite_main_grad = torch.ones_like(weight, requires_grad=False), number == 5
                        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
                gates.grad = None
                y, x = of_step(run, number)
                y.square().sum().backward()
                results.append([y.detach(), x.grad, gates.grad, up.weight.grad, down.weight.grad])
                if fused:
                    results[-1] += [up.weight.main_grad, down.weight.main_grad]
                    assert up.weight.grad_added_to_main_grad and down.weight.grad_added_to_main_grad
            same(*results)
        compiles = max(compiles, len(graphs))
    return compiles


def into_main_grads(group: Any) -> int:
    """Layers whose gradients of weights are added to a main_grad, replace it, or are left for later, with and without one."""
    compiles = 0
    for delayed, has_main, hooks, replaced in (
        (False, True, False, False),
        (False, True, True, False),
        (False, True, True, True),
        (True, True, False, False),
        (True, False, False, False),
    ):
        torch._dynamo.reset()
        torch.manual_seed(3)
        how = {"tp_group": group, "gradient_accumulation_fusion": True, "delay_wgrad_compute": delayed, "dtype": torch.float32}
        shared = SharedInputLinear(8, {"q": 16, "k": 8}, **how)
        up, down = ColumnParallelLinear(16 // group.size, 24, **how), RowParallelLinear(24, 8, **how)
        modules = torch.nn.ModuleList([shared, up, down])
        weights = [layer.weight for layer in (*shared.layers, up, down)]
        # As Megatron-Core has them: views of one buffer.
        buffer = torch.zeros(sum(weight.numel() for weight in weights))

        def block(x: torch.Tensor, shared: Any = shared, up: Any = up, down: Any = down) -> torch.Tensor:
            (q, k), _ = shared(x)
            return down(torch.nn.functional.gelu(up(q.tanh() + k.sum(-1, keepdim=True))[0]))[0]

        graphs, backend = counted()
        fast = torch.compile(block, fullgraph=True, backend=backend)
        results = []
        for run in (fast, block):
            buffer.fill_(0.5)
            parts = buffer.split([weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                if has_main:
                    weight.main_grad, weight.overwrite_main_grad = part.view(weight.shape), replaced
                if hooks:
                    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
            for parameter in modules.parameters():
                parameter.grad = None
            outputs: list[torch.Tensor] = []
            # The first has no gradient of its input.
            for number in range(3):
                x = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(number)).requires_grad_(number > 0)
                y = run(x)
                y.square().sum().backward()
                outputs += [y.detach(), *([] if x.grad is None else [x.grad])]
            if delayed:
                assert (buffer == 0.5).all() and all(weight.grad is None for weight in weights)
                for layer in modules:
                    layer.backward_dw()
            gradients = [torch.zeros(()) if parameter.grad is None else parameter.grad for parameter in modules.parameters()]
            results.append([buffer.clone(), *outputs, *gradients])
            assert not hooks or all(weight.grad_added_to_main_grad for weight in weights)
        same(*results)
        assert not (buffer == 0.5).all() if has_main else weights[0].grad is not None
        compiles = max(compiles, len(graphs))
    return compiles


def test_rows_by_splits_in_one_process() -> None:
    assert rows_by_splits(cp.LocalGroup(3)) <= 5


def test_experts_in_one_process() -> None:
    assert experts(cp.LocalGroup(1)) <= 4
    assert experts(cp.LocalGroup(2)) <= 5


def test_gradients_into_main_grads() -> None:
    # Once with, and once without a gradient of the input.
    assert into_main_grads(cp.LocalGroup(1)) <= 2


def test_largest_scores_in_one_process() -> None:
    assert largest_scores(cp.LocalGroup(2)) <= 3


def test_rows_in_one_process() -> None:
    assert rows_there_and_back(cp.LocalGroup(3)) <= 4


def test_layers_of_one_rank() -> None:
    # Once for parameters that are trained, and once for frozen ones.
    assert layers(cp.LocalGroup(1)) <= 4


def check_that_results_are_dense(group: Any) -> None:
    """As their shapes say, which Inductor's code checks, also where rows are not the first axis."""
    operators = torch.ops.counterpoint
    plan = group.plan(cp.Mask.causal(TOKENS), heads=1, head_dim=8, dtype="float32")
    local, whole = torch.randn(3, plan.q_rows, 2), torch.randn(3, TOKENS, 2)
    for made in (
        operators.roll(local, 1, 1, plan.handle),
        operators.dispatch(whole, 1, "q", 0.0, plan.q_rows, TOKENS, plan.handle),
        operators.undispatch(local, 1, "q", "sum", TOKENS, plan.q_rows, plan.handle),
        operators.undispatch_backward(whole, 1, "q", "sum", plan.q_rows, plan.handle),
    ):
        assert made.is_contiguous()


def of_rank(rank: int) -> list[int]:
    group = cp.Group()
    compiles = [of(group) for of in (rows_there_and_back, layers, largest_scores, rows_by_splits, experts, into_main_grads)]
    check_that_results_are_dense(group)
    return compiles


def test_ranks_that_are_processes() -> None:
    """Two, as each of them compiles everything."""
    with Ranks(2) as ranks:
        for compiles in ranks.run(of_rank):
            assert max(compiles) <= 5, compiles


def test_operators_are_what_pytorch_asks_of_them() -> None:
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(32), heads=1, head_dim=8, dtype="float32")
    layer = ColumnParallelLinear(4, 6, dtype=torch.float64)
    x = torch.randn(32, 3, dtype=torch.float64, requires_grad=True)
    operators = torch.ops.counterpoint
    torch.library.opcheck(operators.dispatch.default, (x, 0, "q", 0.0, plan.q_rows, 32, plan.handle))
    torch.library.opcheck(operators.undispatch.default, (x, 0, "q", "take", 32, 32, plan.handle))
    torch.library.opcheck(operators.roll.default, (x, 3, 0, plan.handle))
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    given = rows, [layer.weight], [layer.bias], [], 5, "written", "", layer._layer.number
    torch.library.opcheck(operators.product.default, given)
    main_grad = torch.zeros(6, 4, dtype=torch.float64)
    adding = rows, [layer.weight], [layer.bias], [main_grad], 5, "added:float64", "none", layer._layer.number
    torch.library.opcheck(operators.product.default, adding)
    assert torch.autograd.gradcheck(
        lambda *tensors: operators.product(tensors[0], [tensors[1]], [tensors[2]], *given[3:]),
        (*given[:1], layer.weight, layer.bias),
    )


def test_operators_of_splits_and_experts_are_what_pytorch_asks_of_them() -> None:
    operators, group = torch.ops.counterpoint, cp.LocalGroup(2)
    splits = [cp.Splits.all_to_all(rank, [[2, 3], [1, 4]]) for rank in range(2)]
    numbers, number = [one.number for one in splits], group._number
    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(operators.group_cast.default, (x, numbers, 10, number))
    for op in ("sum", "avg"):
        torch.library.opcheck(operators.group_reduce.default, (x, op, numbers, 10, number))
    out, lse = torch.randn(10, 2, 4), torch.randn(10, 2)
    torch.library.opcheck(operators.group_merge.default, (out, lse, numbers, 10, number))
    routing = cp.Routing.top_k(4, [[[0, 2], [1, 3]], [[3, 0]]])
    layer = ExpertLayer("dispatch", 3, 5, 4, group=group, dtype=torch.float64)
    tokens = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    of = routing.number, layer._numbered.number
    torch.library.opcheck(operators.expert_product.default, (tokens, layer.weight, [], 6, "written", "none", *of))
    main_grad = torch.zeros_like(layer.weight, requires_grad=False)
    adding = tokens, layer.weight, [main_grad], 6, "added:float64", "none", *of
    torch.library.opcheck(operators.expert_product.default, adding)
    torch.library.opcheck(operators.expert_sources.default, (layer.weight, 6, *of))
    assert torch.autograd.gradcheck(
        lambda *tensors: operators.expert_product(*tensors, [], 6, "written", "none", *of)[0], (tokens, layer.weight)
    )


def test_a_layer_that_is_gone_says_so() -> None:
    with pytest.raises(cp.TensorError, match="layer 987654321 is gone; keep its module"):
        torch.ops.counterpoint.product(torch.zeros(2, 4), [torch.zeros(6, 4)], [], [], 2, "written", "", 987654321)
