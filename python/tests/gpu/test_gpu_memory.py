"""Memory on a GPU: the engine's is PyTorch's, and goes back there; expandable segments, emptied caches, new masks without end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, packed, plan_of, tensors  # noqa: E402


def allocated() -> int:
    return torch.cuda.memory_allocated()


def test_scratch_is_of_pytorch_and_goes_back() -> None:
    gc.collect()
    group = cp.LocalGroup(1, device=DEVICE)
    given = tensors(8192)
    before = allocated()
    plan = plan_of(group, packed([8192]))
    out, lse = cp.attention(*given[:3], plan)
    gradients = torch.autograd.grad(out, given[:3], given[3])
    torch.cuda.synchronize()
    results = sum(tensor.untyped_storage().nbytes() for tensor in (out, lse, *gradients))
    scratch = allocated() - before - results
    # A backward adds up dq in f32: 8,192 rows of 4 heads of 64.
    assert scratch >= 8192 * 4 * 64 * 4, scratch
    del plan, out, lse, gradients
    group.close()
    del group
    gc.collect()
    torch.cuda.synchronize()
    assert allocated() <= before + (1 << 20), allocated() - before


def test_many_masks_leave_nothing_behind() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    q, k, v, dout = tensors(2048)

    def some(first: int, count: int) -> None:
        for number in range(first, first + count):
            cut = 1 + number * 13 % 2046
            plan = plan_of(group, packed([cut, 2048 - cut]))
            out, _ = cp.attention(q, k, v, plan)
            torch.autograd.grad(out, (q, k, v), dout)

    some(0, 100)
    torch.cuda.synchronize()
    before, reserved = allocated(), torch.cuda.memory_reserved()
    some(100, 300)
    torch.cuda.synchronize()
    some(0, 2)
    assert allocated() - before <= 16 << 20, allocated() - before
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20


def test_an_emptied_cache_takes_nothing_from_calls() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plan = plan_of(group, packed([700, 324]), deterministic=True)
    q, k, v, dout = tensors(1024)
    out, _ = cp.attention(q, k, v, plan)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    for _ in range(5):
        others = torch.empty(64 << 20, device=DEVICE)
        again, _ = cp.attention(q, k, v, plan)
        del others
        torch.cuda.empty_cache()
        found = torch.autograd.grad(again, (q, k, v), dout)
        torch.cuda.empty_cache()
        assert torch.equal(again, out) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_pytorch_has_cached_counts_as_free() -> None:
    """All but a little of the GPU is in PyTorch's cache: the driver has too little for a plan, PyTorch has enough."""
    group = cp.LocalGroup(1, device=DEVICE)
    given = tensors(1 << 16, heads=8)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (64 << 20), dtype=torch.uint8, device=DEVICE)
    del hog  # to the cache
    # A backward adds up dq in f32: 65,536 rows of 8 heads of 64 elements are 128 MiB.
    assert torch.cuda.mem_get_info()[0] < 100 << 20
    plan = plan_of(group, cp.Mask.sliding_window(1 << 16, 64, 0), heads=8)
    out, _ = cp.attention(*given[:3], plan)
    torch.autograd.grad(out, given[:3], given[3])
    torch.cuda.synchronize()
    group.check()
    del plan, out
    torch.cuda.empty_cache()


def test_too_little_memory_is_pytorchs_error() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (400 << 20), dtype=torch.uint8, device=DEVICE)
    try:
        rows = 1 << 18  # dq in f32: 256 MiB a head
        with pytest.raises(torch.OutOfMemoryError) as raised:
            plan_of(group, cp.Mask.sliding_window(rows, 64, 0), heads=8)._ready(0)
        assert isinstance(raised.value, cp.OutOfMemoryError) and raised.value.needed > raised.value.available
        group.check()
    finally:
        del hog
        torch.cuda.empty_cache()


WITH_ALLOCATOR = """
import torch, counterpoint as cp
q, k, v, dout = (torch.randn(1024, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(4))
dense = [t.detach().double().cpu().transpose(0, 1).requires_grad_() for t in (q, k, v)]
right = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True)
for size in (1, 2):
    group = cp.LocalGroup(size, device="cuda")
    for step in range(20):
        plan = group.plan(cp.Mask.causal(1024), heads=4, head_dim=64, dtype=torch.bfloat16, deterministic=step % 2 == 0)
        local = [plan.dispatch(t) for t in (q, k, v)]
        out = plan.undispatch(cp.attention(*local, plan)[0])
        found = torch.autograd.grad(out, (q, k, v), dout.detach())
        torch.cuda.empty_cache()
    error = float((out.detach().double().cpu().transpose(0, 1) - right.detach()).norm() / right.detach().norm())
    assert error < 1e-2, error
    assert all(t.isfinite().all() for t in found)
    group.check()
    group.close()
print("fine")
"""


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "expandable_segments:False", "backend:cudaMallocAsync"])
def test_allocators_of_all_kinds(allocator: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    run = subprocess.run([sys.executable, "-c", WITH_ALLOCATOR], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "fine" in run.stdout, run.stdout + run.stderr
