"""CUDA graphs that PyTorch captures: steps of one rank and of several are replayed; what cannot be captured is refused."""

from __future__ import annotations

import gc
import random
import time

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, packed, plan_of, tensors  # noqa: E402
from gpu_ranks import run  # noqa: E402


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_captured_step_is_replayed_on_new_contents(mode: str) -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plans = [plan_of(group, packed([700, 324]), deterministic=True), plan_of(group, packed([100, 924]), deterministic=True)]
    q, k, v, dout = tensors(1024)

    def model() -> list[torch.Tensor]:
        x = cp.attention(q, k, v, plans[0])[0]
        out, lse = cp.attention(x, k, v, plans[1])
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        captured = model()
    for seed in range(3):
        fresh = tensors(1024, seed=seed + 10)
        with torch.no_grad():
            for tensor, value in zip((q, k, v, dout), fresh, strict=True):
                tensor.copy_(value)
        for tensor in captured:
            tensor.detach().fill_(torch.nan)
        graph.replay()
        found = [tensor.detach().clone() for tensor in captured]
        expected = model()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    group.check()
    # A graph outlives what the program has of its plans.
    plans.clear()
    gc.collect()
    others = [plan_of(group, packed([512, 512])) for _ in range(3)]
    for other in others:
        cp.attention(q, k, v, other)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_a_replayed_backward_keeps_the_dense_copy_of_its_gradient() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plan, longer = plan_of(group, packed([1500, 548])), plan_of(group, packed([9000, 7384]))
    q, k, v, dout = tensors(2048)
    # Its heads lie outside of its rows, so a call makes a copy.
    strided = dout.transpose(0, 1).contiguous().transpose(0, 1)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(cp.attention(q, k, v, plan)[0], (q, k, v), strided)

    expected = [gradient.clone() for gradient in [step() for _ in range(3)][-1]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    *others, wide = tensors(16384)
    torch.autograd.grad(cp.attention(*others, longer)[0], others, wide.transpose(0, 1).contiguous().transpose(0, 1))
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    # Memory of the copy's size that is free.
    taken = [torch.full_like(dout, 7.0) for _ in range(256)]
    for gradient in found:
        gradient.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(found, expected, strict=True))
    assert all(bool((tensor == 7.0).all()) for tensor in taken)


def test_what_cannot_be_captured_is_refused_and_harms_nothing() -> None:
    q, k, v, _ = (tensor.detach() for tensor in tensors(512))
    alone, two = cp.LocalGroup(1, device=DEVICE), cp.LocalGroup(2, device=DEVICE)
    fresh, shared = plan_of(alone, packed([512])), plan_of(two, packed([512]))
    cp.attention(q, k, v, shared)
    torch.cuda.synchronize()
    for plan, sentence in (
        (fresh, "a plan that was never called cannot be called first inside of a graph"),
        (shared, "a group of 2 ranks in one process cannot be captured"),
    ):
        with pytest.raises(cp.DeviceError, match=sentence):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.zeros(1, device=DEVICE)
                cp.attention(q, k, v, plan)
        torch.cuda.synchronize()
        out, _ = cp.attention(q, k, v, plan)
        assert out.isfinite().all()
    alone.check()
    two.check()


def test_a_graph_is_replayed_with_other_masks() -> None:
    """As random packs as there are, some of which split tiles and some not: the bits are those of direct calls."""
    group = cp.LocalGroup(1, device=DEVICE)
    tokens = 2048
    generator = random.Random(5)

    def pack(count: int) -> list[int]:
        cuts = sorted(generator.sample(range(1, tokens), count - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]

    def planned(count: int) -> cp.Plan:
        return plan_of(group, packed(pack(count)), deterministic=True)

    masks = [planned(count) for count in (1, 2, 3, 12, 40, 7, 1, 1000)]
    window = plan_of(group, cp.Mask.sliding_window(tokens, left=100, right=0), deterministic=True)
    q, k, v, dout = tensors(tokens)

    def model(plan: cp.Plan) -> list[torch.Tensor]:
        x = cp.attention(q, k, v, plan)[0]
        y = cp.attention(x, k, v, window)[0]
        out, lse = cp.attention(y, k, v, plan)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    plan = planned(5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        captured = model(plan)
    for new in masks:
        plan.update_graph(graph, new)
        plan = new
        for tensor in captured:
            tensor.detach().fill_(torch.nan)
        graph.replay()
        found = [tensor.detach().clone() for tensor in captured]
        expected = model(plan)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            assert torch.equal(a, b), name
    group.check()


def test_what_cannot_be_updated_is_refused_and_the_graph_is_as_before() -> None:
    group, other = (cp.LocalGroup(1, device=DEVICE) for _ in range(2))
    plans = [plan_of(group, packed(cuts), deterministic=True) for cuts in ([512], [100, 412])]
    q, k, v, _ = (tensor.detach() for tensor in tensors(512))
    expected = [cp.attention(q, k, v, plan)[0] for plan in plans]
    graphs = [torch.cuda.CUDAGraph(keep_graph=kept) for kept in (True, False)]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(cp.attention(q, k, v, plans[0])[0])
    for graph, new, sentence in (
        (graphs[1], plans[1], "keep_graph=True"),
        (graphs[0], plan_of(other, packed([512])), "another group"),
        (graphs[0], plan_of(group, packed([1024])), "other shapes"),
    ):
        with pytest.raises(cp.Error, match=sentence):
            plans[0].update_graph(graph, new)
    with pytest.raises(cp.PlanError, match="no call of this plan"):
        plans[1].update_graph(graphs[0], plans[0])
    for graph, out in zip(graphs, captured, strict=True):
        graph.replay()
        assert torch.equal(out, expected[0])
    plans[0].update_graph(graphs[0], plans[1])
    graphs[0].replay()
    assert torch.equal(captured[0], expected[1])
    group.check()


def test_a_thousand_masks_through_one_graph() -> None:
    """Memory stays as it is, and an update costs the host little compared with what a step does."""
    group = cp.LocalGroup(1, device=DEVICE)
    tokens, layers = 4096, 8
    generator = random.Random(11)
    q, k, v, dout = tensors(tokens)

    def planned() -> cp.Plan:
        cuts = sorted(generator.sample(range(1, tokens), generator.randrange(1, 30)))
        return plan_of(group, packed([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]), deterministic=True)

    def model(plan: cp.Plan) -> list[torch.Tensor]:
        x = q
        for _ in range(layers):
            x = cp.attention(x, k, v, plan)[0]
        return [x, *torch.autograd.grad(x, (q, k, v), dout)]

    plan = planned()
    model(plan)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        captured = model(plan)
    memory, took = [], []
    for step in range(1000):
        new = planned()
        new._ready(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        began = time.perf_counter()
        plan.update_graph(graph, new)
        took.append(time.perf_counter() - began)
        plan = new
        graph.replay()
        if step % 50 == 0:
            found = [tensor.detach().clone() for tensor in captured]
            assert all(torch.equal(a, b) for a, b in zip(found, model(plan), strict=True)), step
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
    # Tables and scratch of the plans at hand, which differ; of a thousand that stayed it would be ten times as much.
    assert max(memory[4:]) <= max(memory[:4]) * 1.25, memory
    took.sort()
    print(f"update of {2 * layers} calls: median {1e6 * took[500]:.0f} us, worst of 1000 {1e6 * took[-1]:.0f} us")
    group.check()


STEP_OF_RANK = """
import torch, torch.distributed as dist, counterpoint as cp
from gpu_cases import packed
from counterpoint.nn import ColumnParallelLinear, RowParallelLinear
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo")
group = cp.Group(device="cuda", limit=60.0)
plans = [
    group.plan(packed(cuts), heads=4, head_dim=64, dtype=torch.bfloat16, chunk=64, deterministic=True, dispatch="zigzag")
    for cuts in ([1400, 648], [200, 1848])
]
layers = torch.nn.ModuleList(
    [
        ColumnParallelLinear(256, 512, bias=False, dtype=torch.bfloat16, tp_group=group, overlap="concurrent"),
        RowParallelLinear(512, 256, bias=False, dtype=torch.bfloat16, tp_group=group, overlap="concurrent"),
    ]
)
noise = torch.Generator("cuda").manual_seed(7 + rank)
def drawn(*shape):
    return torch.randn(shape, device="cuda", generator=noise).bfloat16()
with torch.no_grad():
    for parameter in layers.parameters():
        parameter.copy_(drawn(*parameter.shape) / 16)
rows = plans[0].sizes[rank]
assert rows == plans[1].sizes[rank]
inputs = [drawn(rows, 4, 64).requires_grad_() for _ in range(3)] + [drawn(256, 256).requires_grad_()]
last, dy = drawn(rows, 4, 64), drawn(256, 256)

def model():
    x, _ = cp.attention(*inputs[:3], plans[0])
    out, lse = cp.attention(x, *inputs[1:3], plans[1])
    y = layers[1](layers[0](inputs[3])[0])[0]
    gradients = torch.autograd.grad([out, y], [*inputs, *layers.parameters()], [last, dy])
    return [out.detach(), lse.detach(), y.detach(), *gradients]

def fresh(seed):
    with torch.no_grad():
        torch.manual_seed(seed)
        for tensor in (*inputs, last, dy):
            tensor.copy_(torch.randn_like(tensor))
"""

CAPTURED = (
    STEP_OF_RANK
    + """
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2):
        model()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=sys.argv[1]):
    captured = model()
for round in range(40):
    fresh(100 * rank + round)
    for tensor in captured:
        tensor.fill_(torch.nan)
    # Ranks come at other times.
    torch.cuda._sleep(200_000 * ((round * (rank + 3)) % 5))
    graph.replay()
    if round % 4 == 0:
        found = [tensor.clone() for tensor in captured]
        expected = model()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), round
torch.cuda.synchronize()
group.check()
print("replayed", flush=True)
group.close()
"""
)

SHARED = (
    STEP_OF_RANK
    + """
model()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        cp.attention(*inputs[:3], plans[0])
except cp.DeviceError as error:
    assert "its ranks synchronise on the host in every call" in str(error), str(error)
    print("refused", flush=True)
torch.cuda.synchronize()
fresh(rank)
assert all(tensor.isfinite().all() for tensor in model())
group.check()
group.close()
"""
)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_step_of_ranks_with_a_gpu_each_is_one_graph_on_each_rank(mode: str) -> None:
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip("one GPU")
    for output in run(ranks, CAPTURED, mode):
        assert "replayed" in output and "ended with 0" in output, output


def test_ranks_that_share_a_gpu_are_not_captured_and_work_on() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("a GPU for each rank")
    for output in run(2, SHARED):
        assert "refused" in output and "ended with 0" in output, output
