"""Layers of experts on CUDA tensors against the dense definition in f64, under routings that come once: ranks of one process, and
ranks that are processes with a GPU each."""

from __future__ import annotations

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from gpu_ranks import run  # noqa: E402

from counterpoint.nn import ExpertLayer  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 200, 128, 64, 8, 2


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error, size = float((found.detach().double().cpu() - wanted.detach()).norm()), float(wanted.detach().norm())
    # Of experts without rows both are nothing.
    assert error <= 1e-2 * size, f"{what} is off by {error:.1e} of {size:.1e}"


def ids_of(number: int, ranks: int) -> list[torch.Tensor]:
    """Of each rank; every third routing leaves half of the experts without rows."""
    draw = torch.Generator().manual_seed(number)
    popular = EXPERTS if number % 3 else EXPERTS // 2
    return [torch.rand(TOKENS - 17 * rank, popular, generator=draw).topk(CHOICES, 1).indices for rank in range(ranks)]


class Step:
    """A routing with tokens and gradients of all ranks, and what the definition makes of them."""

    def __init__(self, number: int, ranks: int, up: torch.Tensor, down: torch.Tensor) -> None:
        self.number, self.ids = number, ids_of(number, ranks)
        chosen, draw = torch.cat(self.ids), torch.Generator().manual_seed(100 + number)
        self.x, self.dy = (torch.randn(len(chosen), HIDDEN, generator=draw).bfloat16() for _ in range(2))
        leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in (self.x, up, down)]
        inner = torch.relu(torch.einsum("th,tkih->tki", leaves[0], leaves[1][chosen]))
        y = torch.einsum("tki,tkhi->th", inner, leaves[2][chosen])
        self.wanted = [y, *torch.autograd.grad(y, leaves, self.dy.double())]

    def tokens(self, whole: torch.Tensor, rank: int | None) -> torch.Tensor:
        """Those of a rank, or all."""
        return whole if rank is None else whole.split([len(ids) for ids in self.ids])[rank]

    def judge(
        self, layers: tuple[ExpertLayer, ExpertLayer], device: str, rank: int | None = None, backend: str = "eager"
    ) -> None:
        """Runs the layers on the tokens of a rank, or of all, and compares what is here."""
        up, down = layers
        routing = cp.Routing.top_k(EXPERTS, self.ids)
        for layer in layers if self.number % 2 else ():
            layer.prefetch(routing)
        x = self.tokens(self.x, rank).to(device).requires_grad_()

        def block(x: torch.Tensor, routing: cp.Routing) -> torch.Tensor:
            made: torch.Tensor = down(torch.relu(up(x, routing)), routing)
            return made

        call = block if backend == "eager" else torch.compile(block, fullgraph=True, backend=backend)
        y = call(x, routing)
        found = [y, *torch.autograd.grad(y, [x, up.weight, down.weight], self.tokens(self.dy, rank).to(device))]
        here = [self.tokens(whole, rank) for whole in self.wanted[:2]]
        experts = [whole if rank is None else whole.chunk(len(self.ids))[rank] for whole in self.wanted[2:]]
        for name, one, other in zip(("y", "dx", "dup", "ddown"), found, [*here, *experts], strict=True):
            close(one, other, f"{name} of routing {self.number}")


def layers_of(group: cp.Group | cp.LocalGroup) -> tuple[ExpertLayer, ExpertLayer]:
    torch.manual_seed(11)  # ranks of one seed have the same layer
    up = ExpertLayer("dispatch", HIDDEN, INNER, EXPERTS, group=group, dtype=torch.bfloat16)
    return up, ExpertLayer("combine", INNER, HIDDEN, EXPERTS, group=group, dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_are_the_dense_definition_under_routings_that_come_once(ranks: int, backend: str) -> None:
    torch._dynamo.reset()
    group = cp.LocalGroup(ranks, device="cuda")
    layers = layers_of(group)
    # More than are kept ready, in two rounds: what came before comes again.
    for number in [*range(6), *range(6)]:
        Step(number, ranks, layers[0].weight, layers[1].weight).judge(layers, "cuda", backend=backend)
    group.check()
    group.close()


def test_a_capture_goes_on_while_threads_make_passes_ready() -> None:
    """In PyTorch's default mode, in which another thread that allocates ends a capture."""
    group = cp.LocalGroup(1, device="cuda")
    up, _ = layers_of(group)
    routing = cp.Routing.top_k(EXPERTS, ids_of(1, 1))
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    with torch.no_grad():
        eager = up(x, routing)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(2, 12):
                up.prefetch(cp.Routing.top_k(EXPERTS, ids_of(number, 1)))
            y = up(x, routing)
            assert group._maker is not None
            group._maker.submit(lambda: None).result()
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)
    group.check()
    group.close()


def in_processes(rank: int, size: int, device: str) -> None:
    """The same on a rank that is a process, between collectives of NCCL's; each gathers what all others chose."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    apart = device == "cuda" and torch.cuda.device_count() >= size
    dist.init_process_group("nccl" if apart else "gloo")
    group = cp.Group(device=device, limit=60.0)
    layers = layers_of(group)
    # What the definition has whole: the same seed on one rank.
    alone = layers_of(cp.LocalGroup(1))
    for layer, other in zip(layers, alone, strict=True):
        assert torch.equal(layer.weight.cpu(), other.weight.chunk(size)[rank])
    for number in [*range(6), *range(6)]:
        others = torch.ones(1 << 16, device=device if apart else "cpu") * rank
        dist.all_reduce(others)
        Step(number, size, alone[0].weight, alone[1].weight).judge(layers, device, rank)
        dist.all_reduce(others)
        assert float(others[-1]) == size * sum(range(size))
    group.check()
    print("rank", rank, "is right", flush=True)
    group.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_processes(size: int) -> None:
    """With a GPU each, where there are as many; else they share."""
    if size > 2 and torch.cuda.device_count() < size:
        pytest.skip(f"{size} ranks with GPUs of their own need as many")
    program = "import test_gpu_experts\ntest_gpu_experts.in_processes(rank, size, 'cuda')"
    for rank, output in enumerate(run(size, program)):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output
