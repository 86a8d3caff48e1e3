"""Layers of experts on CUDA tensors against the dense definition in f64, under routings that come once, on one rank and two."""

from __future__ import annotations

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")

from counterpoint.nn import ExpertLayer  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 200, 128, 64, 8, 2


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm())
    assert error < 1e-2, f"{what} is off by {error:.1e}"


def ids_of(number: int, ranks: int) -> list[torch.Tensor]:
    """Of each rank; every third routing leaves half of the experts without rows."""
    draw = torch.Generator().manual_seed(number)
    popular = EXPERTS if number % 3 else EXPERTS // 2
    return [torch.rand(TOKENS - 17 * rank, popular, generator=draw).topk(CHOICES, 1).indices for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_are_the_dense_definition_under_routings_that_come_once(ranks: int) -> None:
    group = cp.LocalGroup(ranks, device="cuda")
    up = ExpertLayer("dispatch", HIDDEN, INNER, EXPERTS, group=group, dtype=torch.bfloat16)
    down = ExpertLayer("combine", INNER, HIDDEN, EXPERTS, group=group, dtype=torch.bfloat16)
    # More than are kept ready, in two rounds: what came before comes again.
    for number in [*range(6), *range(6)]:
        ids = ids_of(number, ranks)
        routing = cp.Routing.top_k(EXPERTS, ids)
        chosen = torch.cat(ids)
        draw = torch.Generator().manual_seed(100 + number)
        x = torch.randn(len(chosen), HIDDEN, generator=draw).bfloat16().cuda().requires_grad_()
        dy = torch.randn(len(chosen), HIDDEN, generator=draw).bfloat16()
        y = down(torch.relu(up(x, routing)), routing)
        found = torch.autograd.grad(y, [x, up.weight, down.weight], dy.cuda())
        leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in (x, up.weight, down.weight)]
        inner = torch.relu(torch.einsum("th,tkih->tki", leaves[0], leaves[1][chosen]))
        wanted = torch.einsum("tki,tkhi->th", inner, leaves[2][chosen])
        close(y, wanted, f"y of routing {number}")
        for name, one, other in zip(("dx", "dup", "ddown"), found, torch.autograd.grad(wanted, leaves, dy.double()), strict=True):
            close(one, other, f"{name} of routing {number}")
    group.check()
    group.close()
