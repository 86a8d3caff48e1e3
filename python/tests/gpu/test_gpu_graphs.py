"""CUDA graphs that PyTorch captures: calls of one rank are replayed; what cannot be captured is refused in a sentence."""

from __future__ import annotations

import gc

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, packed, plan_of, tensors  # noqa: E402


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


def test_what_cannot_be_captured_is_refused_and_harms_nothing() -> None:
    q, k, v, _ = (tensor.detach() for tensor in tensors(512))
    alone, two = cp.LocalGroup(1, device=DEVICE), cp.LocalGroup(2, device=DEVICE)
    fresh, shared = plan_of(alone, packed([512])), plan_of(two, packed([512]))
    cp.attention(q, k, v, shared)
    torch.cuda.synchronize()
    for plan, sentence in (
        (fresh, "a plan that was never called cannot be called first inside of a graph"),
        (shared, "a group of 2 ranks cannot be captured"),
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
