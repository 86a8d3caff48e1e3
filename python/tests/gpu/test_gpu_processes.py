"""Ranks that are processes, on GPUs: a group from a gloo process group, whose ranks share a GPU where there are fewer."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from gpu_ranks import run  # noqa: E402

RANK = """
import torch, torch.distributed as dist, counterpoint as cp
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo")
group = cp.Group(device="cuda", limit=60.0)
assert group is cp.Group(device="cuda", limit=60.0) and (group.rank, group.size) == (rank, size)
if sys.argv[1] == "overlap":
    group.overlap_calls()
torch.manual_seed(7)
whole = [torch.randn(1024, 4, 64).bfloat16().cuda() for _ in range(4)]
masks = [cp.Mask.varlen([0, cut, 1024], causal=True) for cut in (100, 512, 900)]
for number in range(6):
    mask = masks[number % 3]
    leaves = [tensor.detach().requires_grad_() for tensor in whole[:3]]
    plan = group.plan(mask, heads=4, head_dim=64, dtype=torch.bfloat16, chunk=64, deterministic=number % 2 == 0)
    out, lse = cp.attention(*(plan.dispatch(leaf) for leaf in leaves), plan)
    # Rows of other types move too.
    ids = plan.undispatch(plan.dispatch(torch.arange(1024, device="cuda")))
    assert torch.equal(ids, torch.arange(1024, device="cuda"))
    together = plan.undispatch(out)
    gradients = torch.autograd.grad(together, leaves, whole[3])
    alone = [tensor.detach().requires_grad_() for tensor in whole[:3]]
    right, right_lse = cp.flex_attention(*alone, mask)
    expected = torch.autograd.grad(right, alone, whole[3])
    for found, wanted in zip((together.detach(), *gradients), (right.detach(), *expected), strict=True):
        error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        assert error < 2e-2, (number, error)
    assert torch.allclose(plan.undispatch(lse), right_lse, atol=1e-3)
group.check()
dist.barrier()  # no rank raises before the others have all that it sent
print("rank", rank, group.transport, flush=True)
if sys.argv[1] == "overlap":
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    batches = []
    for number, mask in enumerate(masks[:2]):
        plan = group.plan(mask, heads=4, head_dim=64, dtype=torch.bfloat16, chunk=64, deterministic=True)
        own = [plan.dispatch(tensor) for tensor in whole]
        batches.append((plan, own))
    def step(plan, own):
        leaves = [tensor.detach().requires_grad_() for tensor in own[:3]]
        out, _ = cp.attention(*leaves, plan)
        return [out.detach(), *torch.autograd.grad(out, leaves, own[3])]
    right = [step(*batch) for batch in batches]
    torch.cuda.synchronize()
    found = []
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            found.append(step(*batches[number % 2]))
    torch.cuda.synchronize()
    for number, results in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(results, right[number % 2], strict=True)), number
    print("overlapped", flush=True)
if sys.argv[1] == "fail":
    try:
        if rank == 1:
            with group.failing_together():
                raise ValueError("the data ran out")
        while True:
            cp.attention(*(plan.dispatch(leaf) for leaf in leaves), plan)
            torch.cuda.synchronize()
            group.check()
    except (cp.PeerError, ValueError) as error:
        assert "the data ran out" in str(error), str(error)
        print("heard", flush=True)
else:
    group.close()
"""


def test_ranks_that_are_processes_share_a_gpu() -> None:
    for rank, output in enumerate(run(2, RANK, "close")):
        assert f"rank {rank}" in output and "ended with 0" in output, output


def test_micro_batches_on_streams_of_their_own_overlap() -> None:
    for output in run(2, RANK, "overlap"):
        assert "overlapped" in output and "ended with 0" in output, output


def test_tensors_lie_in_memory_that_no_other_process_can_open() -> None:
    """PyTorch's expandable segments cannot be opened: rows that peers read are copied to the engine's memory."""
    for rank, output in enumerate(run(2, RANK, "close", segments="True")):
        assert f"rank {rank}" in output and "ended with 0" in output, output


def test_a_rank_that_raises_notifies_the_others() -> None:
    for output in run(2, RANK, "fail"):
        assert "heard" in output, output
