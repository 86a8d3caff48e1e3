"""Order and time on a GPU: PyTorch's current stream, memory that others get at once, no waiting, errors that come later."""

from __future__ import annotations

import threading

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, packed, plan_of, tensors  # noqa: E402

# Long enough that a call that does not wait for it reads what was there before.
LATE = 30_000_000


@pytest.fixture(params=["default", "side"])
def stream(request: pytest.FixtureRequest):
    """The legacy default stream, or one of PyTorch's pool, which does not wait for it."""
    made = torch.cuda.default_stream() if request.param == "default" else torch.cuda.Stream()
    with torch.cuda.stream(made):
        yield made
    torch.cuda.synchronize()


def results(plan: cp.Plan, q, k, v, dout) -> list[torch.Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, lse = cp.attention(*inputs, plan)
    return [out.detach(), lse, *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("size", [1, 2])
def test_calls_wait_for_late_inputs_and_results_for_calls(size: int, stream) -> None:
    plan = plan_of(cp.LocalGroup(size, device=DEVICE), packed([300, 212]), deterministic=True)
    given = [tensor.detach() for tensor in tensors(512)]
    expected = results(plan, *given)
    late = [torch.full_like(tensor, torch.nan) for tensor in given]
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE)
    for tensor, value in zip(late, given, strict=True):
        tensor.copy_(value)
    copies = [tensor.clone() for tensor in results(plan, *late)]
    # Overwritten on the stream behind the calls.
    for tensor in late:
        tensor.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(copies, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_memory_of_dropped_tensors_goes_to_others_behind_the_call(size: int, stream) -> None:
    """Why no tensor is marked for a stream (`record_stream`): all that a call does is between what the current stream was given
    before and after it, so that memory which PyTorch gives to others in the order of that stream is not used any more."""
    plan = plan_of(cp.LocalGroup(size, device=DEVICE), packed([2048]), deterministic=True)
    given = [tensor.detach() for tensor in tensors(2048)]
    expected = results(plan, *given)
    for _ in range(5):
        q, k, v, dout = (tensor.clone() for tensor in given)
        addresses = {tensor.data_ptr() for tensor in (q, k, v)}
        torch.cuda._sleep(LATE // 10)
        out, lse = cp.attention(q, k, v, plan)
        del q, k, v
        # Of the same sizes, so in the same memory; written as soon as the stream comes to it.
        others = [torch.full_like(given[0], torch.nan) for _ in range(3)]
        assert addresses & {tensor.data_ptr() for tensor in others}
        del others
        q, k, v = (tensor.clone().requires_grad_() for tensor in given[:3])
        out_again, _ = cp.attention(q, k, v, plan)
        torch.cuda._sleep(LATE // 10)
        gradients = torch.autograd.grad(out_again, (q, k, v), dout)
        del q, k, v, dout, out_again
        others = [torch.full_like(given[0], torch.nan) for _ in range(6)]
        found = [out, lse, *gradients]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        del others


def test_two_streams_share_one_plan() -> None:
    plan = plan_of(cp.LocalGroup(1, device=DEVICE), packed([700, 324]), deterministic=True)
    given = [[tensor.detach() for tensor in tensors(1024, seed=seed)] for seed in range(4)]
    expected = [results(plan, *one) for one in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for index, one in enumerate(given):
        with torch.cuda.stream(streams[index % 2]):
            torch.cuda._sleep(LATE // (10 * (index + 1)))
            found.append(results(plan, *one))
    torch.cuda.synchronize()
    for one, right in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, right, strict=True))


def test_threads_share_one_group() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plans = [plan_of(group, packed([256 + 64 * index, 768 - 64 * index]), deterministic=True) for index in range(4)]
    given = [tensor.detach() for tensor in tensors(1024)]
    expected = [results(plan, *given) for plan in plans]
    torch.cuda.synchronize()
    wrong = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = results(plans[index], *given)
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(found, expected[index], strict=True)):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [1, 2])
def test_prepared_calls_wait_for_nothing_and_allocate_only_results(size: int) -> None:
    plan = plan_of(cp.LocalGroup(size, device=DEVICE), packed([300, 212]))
    q, k, v, dout = tensors(512)

    def both() -> None:
        out, _ = cp.attention(q, k, v, plan)
        torch.autograd.grad(out, (q, k, v), dout)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # out, lse, dq, dk, dv.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 10 * 5
    # PyTorch's mode sees PyTorch's own waits; the profiler sees everyone's.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        torch.cuda._sleep(LATE)
        for _ in range(10):
            both()
        busy = not torch.cuda.current_stream().query()
    assert busy, "the host came back after the device"
    waits = [
        event.name
        for event in profile.events()
        if "Synchronize" in event.name or event.name in ("cudaFree", "cuMemFree", "cudaMalloc")
    ]
    # The profiler's own, at its end.
    assert len(waits) <= 2, waits


def test_the_host_is_ahead_of_the_device() -> None:
    import time

    plan = plan_of(cp.LocalGroup(1, device=DEVICE), packed([512]))
    q, k, v, _ = tensors(512)
    cp.attention(q, k, v, plan)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * LATE)
    began = time.perf_counter()
    for _ in range(20):
        cp.attention(q, k, v, plan)
    took = time.perf_counter() - began
    assert not torch.cuda.current_stream().query() and took < 0.1, took
    torch.cuda.synchronize()


def test_a_failed_group_says_so_at_the_next_call() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plan = plan_of(group, packed([512]))
    q, k, v, _ = tensors(512)
    cp.attention(q, k, v, plan)
    group.fail("the data ran out")
    with pytest.raises(cp.PeerError, match="the data ran out"):
        group.check()
    with pytest.raises(cp.PeerError, match="the data ran out"):
        cp.attention(q, k, v, plan)
    # Others are not harmed.
    cp.flex_attention(q, k, v, packed([512]))
