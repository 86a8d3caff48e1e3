"""Ranks with GPUs of their own: with NCCL's collectives, with every allocator, in several groups, when one fails or dies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from gpu_ranks import run  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 2048, 4, 2, 64
# Seconds that a rank waits for another.
LIMIT = 20.0
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks with GPUs of their own need two")


def sizes() -> list[int]:
    """Ranks to have, at most one a GPU."""
    return [size for size in (2, 4) if size <= max(2, torch.cuda.device_count())]


def program(call: str, device: str = "cuda") -> str:
    """What a process does that is a rank: a call of a function of this file."""
    return f"import test_gpu_ranks\ntest_gpu_ranks.{call.replace('(', f'(rank, size, {device!r}, ', 1)}"


def joined(rank: int, device: str, backend: str) -> None:
    """Connects the process, whose GPU is the one of its number; several share one where there are fewer."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend if device == "cuda" else "gloo")


class Steps:
    """Attention on a group, step by step, each with another mask, and what it is without ranks."""

    def __init__(self, group: cp.Group, device: str, seed: int = 7) -> None:
        self.group, self.device = group, device
        noise = torch.Generator().manual_seed(seed)
        heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
        self.whole = [torch.randn(TOKENS, count, HEAD_DIM, generator=noise).bfloat16().to(device) for count in heads]

    def mask(self, number: int) -> cp.Mask:
        """Two packed documents."""
        return cp.Mask.varlen([0, 100 + 311 * number % (TOKENS - 100), TOKENS], causal=True)

    def plan(self, number: int) -> cp.Plan:
        """Of a step."""
        shape: dict[str, Any] = {"heads": (HEADS, KEY_HEADS), "head_dim": HEAD_DIM, "dtype": torch.bfloat16}
        return self.group.plan(self.mask(number), **shape, chunk=64, deterministic=number % 2 == 0)

    def forward(self, number: int) -> tuple[Any, ...]:
        """A step's plan, leaves and out."""
        plan = self.plan(number)
        leaves = [plan.dispatch(tensor).detach().requires_grad_() for tensor in self.whole[:3]]
        return plan, leaves, cp.attention(*leaves, plan)[0]

    def backward(self, made: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
        """The plan, with out and the gradients of this rank's rows."""
        plan, leaves, out = made
        return plan, [out.detach(), *torch.autograd.grad(out, leaves, plan.dispatch(self.whole[3]))]

    def judge(self, number: int, made: tuple[Any, list[torch.Tensor]]) -> None:
        """Compares a step's results with those of one device. Collective."""
        plan, found = made
        leaves = [tensor.detach().requires_grad_() for tensor in self.whole[:3]]
        out, _ = cp.flex_attention(*leaves, self.mask(number))
        wanted = [out.detach(), *torch.autograd.grad(out, leaves, self.whole[3])]
        for part, right in zip(found, wanted, strict=True):
            error = float((plan.undispatch(part).double() - right.double()).norm() / right.double().norm())
            assert error < 2e-2, (number, error)


def emptied(device: str) -> None:
    """PyTorch's cache of memory."""
    if device == "cuda":
        torch.cuda.empty_cache()


def concurrent_collectives(rank: int, size: int, device: str, empties: bool) -> None:
    """Steps between collectives of PyTorch's process group, whose cache is emptied before, within and after each."""
    joined(rank, device, "nccl")
    group = cp.Group(device=device, limit=LIMIT)
    steps = Steps(group, device)
    for number in range(6):
        others = torch.ones(1 << 20, device=device) * (rank + number)
        dist.all_reduce(others)
        made = steps.forward(number)
        if empties:
            emptied(device)
        results = steps.backward(made)
        dist.all_reduce(others)
        if empties:
            del made
            emptied(device)
        steps.judge(number, results)
        assert float(others[-1]) == size * sum(other + number for other in range(size))
    group.check()
    print("rank", rank, "is right", flush=True)
    group.close()
    dist.destroy_process_group()


def in_groups(rank: int, size: int, device: str) -> None:
    """Steps of two groups, each a dimension of a mesh: enqueued alternately, compared when all are."""
    joined(rank, device, "gloo")
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    groups = [cp.Group(mesh[name], device=device, limit=LIMIT) for name in ("dp", "cp")]
    assert groups[0] is not groups[1]
    # The ranks of a group have the same rows, other groups others.
    both = [Steps(group, device, seed=group._global_ranks[0] + 10 * place) for place, group in enumerate(groups)]
    made = [[steps.backward(steps.forward(number)) for steps in both] for number in range(8)]
    for number, results in enumerate(made):
        for steps, one in zip(both, results, strict=True):
            steps.judge(number, one)
    print("rank", rank, "is right", flush=True)
    for group in groups:
        group.close()


def one_raises(rank: int, size: int, device: str) -> None:
    """The last rank raises within a step; all hear it; a new group of the same processes is right."""
    joined(rank, device, "gloo")
    group = cp.Group(device=device, limit=LIMIT)
    steps = Steps(group, device)
    try:
        for number in range(1000):
            made = steps.forward(number % 4)
            if rank == size - 1 and number == 3:
                with group.failing_together():
                    raise ValueError("the data ran out")
            steps.backward(made)
            if device == "cuda":
                torch.cuda.synchronize()
            group.check()
    except (cp.PeerError, ValueError) as error:
        assert "the data ran out" in str(error), str(error)
        print("rank", rank, "heard", flush=True)
    again = cp.Group(device=device, limit=LIMIT)
    assert again is not group
    steps = Steps(again, device)
    steps.judge(1, steps.backward(steps.forward(1)))
    print("rank", rank, "is right", flush=True)
    again.close()


def one_dies(rank: int, size: int, device: str) -> None:
    """The last rank is killed between two steps; the others name it within the limit, and their devices go on."""
    joined(rank, device, "gloo")
    group = cp.Group(device=device, limit=LIMIT)
    steps = Steps(group, device)
    steps.judge(0, steps.backward(steps.forward(0)))
    dist.barrier()
    began = time.monotonic()
    try:
        for number in range(1000):
            if rank == size - 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            steps.backward(steps.forward(number % 4))
            if device == "cuda":
                torch.cuda.synchronize()
            group.check()
    except cp.Error as error:
        took = time.monotonic() - began
        assert isinstance(error, (cp.PeerError, cp.StalledError)), repr(error)
        assert f"rank {size - 1}" in str(error) or error.peer == size - 1, (str(error), error.peer)
        assert took < LIMIT + 10.0, took
        print(f"rank {rank} named it after {took:.1f} s: {error}", flush=True)
    alone = cp.LocalGroup(1, device=device)
    steps.group = alone  # type: ignore[assignment]
    steps.judge(2, steps.backward(steps.forward(2)))
    print("rank", rank, "is right", flush=True)
    # Not through the end of a process group that lacks one.
    os._exit(0)


def moved(group: cp.Group, plan: cp.Plan, x: torch.Tensor) -> list[torch.Tensor]:
    """What collectives of rows make of this rank's rows of one tensor."""
    splits = cp.Splits.all_gather(group.rank, [plan.rows_of(rank) for rank in range(group.size)])
    gathered = cp.group_cast(x, splits, group)
    return [plan.undispatch(x), plan.roll(x, 5), gathered, cp.group_reduce(gathered, splits, group)]


def rows_move(rank: int, size: int, device: str, in_graph: bool) -> None:
    """Rows between orders, and by splits: of several types, and replayed on other rows by a graph."""
    joined(rank, device, "gloo")
    group = cp.Group(device=device, limit=LIMIT)
    plan = group.plan(cp.Mask.causal(1024), heads=2, head_dim=64, dtype=torch.bfloat16, chunk=32)

    def judge(whole: torch.Tensor, found: list[torch.Tensor]) -> None:
        own = plan.dispatch(whole)
        everyone = torch.cat([whole[plan_rows(plan, other, whole.device)] for other in range(size)])
        wanted = [whole, plan.dispatch(whole.roll(5, 0)), everyone, own * size]
        for number, (part, right) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(part, right), (number, whole.dtype)

    # Memory that stands in for tensors where others read them has had other rows.
    moved(group, plan, plan.dispatch(torch.full((1024, 64), -9.0, device=device)))
    draw = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = torch.randint(-8, 8, (1024, 16), generator=draw).to(device, dtype)
        judge(whole, moved(group, plan, plan.dispatch(whole)))
    ids = torch.randint(0, 1 << 40, (1024,), generator=draw).to(device)
    assert torch.equal(plan.undispatch(plan.dispatch(ids)), ids)
    if in_graph:
        graph, x = torch.cuda.CUDAGraph(), plan.dispatch(whole).clone()
        with torch.cuda.graph(graph):
            found = moved(group, plan, x)
        for _ in range(5):
            other = torch.randint(-8, 8, (1024, 16), generator=draw).to(device, torch.float16)
            x.copy_(plan.dispatch(other))
            graph.replay()
            judge(other, found)
        other_plan = group.plan(plan.mask, heads=2, head_dim=64, dtype=torch.bfloat16, chunk=32, dispatch="sequential")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                other_plan.roll(torch.zeros(other_plan.q_rows, 3, device=device), 1)
            raise AssertionError("rows of a new shape were captured")
        except cp.Error as error:
            assert "once before the capture" in str(error), error
    group.check()
    print("rank", rank, "is right", flush=True)
    group.close()


def plan_rows(plan: cp.Plan, rank: int, device: Any) -> torch.Tensor:
    """The rows of queries that a rank has."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in plan._ranges(rank, "q")])


def test_rows_move_between_ranks_that_share_a_gpu() -> None:
    for rank, output in enumerate(run(2, program("rows_move(False)"))):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output


def random_rows(rank: int, size: int, device: str) -> None:
    """Splits that go to none, some or all ranks, of rows of odd and even sizes, in memory that has had other rows."""
    from test_collectives import cast_by_hand, inputs_of, random_splits, reduced_by_hand

    joined(rank, device, "gloo")
    group = cp.Group(device=device, limit=LIMIT)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    for seed in range(24):
        splits, dtype = random_splits(seed, size), types[seed % len(types)]
        tail = ((8,), (3,), (2, 4))[seed % 3]
        xs = inputs_of(splits, 0, tail, dtype, seed)
        right = cast_by_hand(xs, splits)
        got = cp.group_cast(xs[rank].to(device), splits[rank], group)
        assert torch.equal(got.cpu(), right[rank]), (seed, dtype)
        if not dtype.is_floating_point:
            continue
        for op in ("sum", "avg"):
            found = cp.group_reduce(got, splits[rank], group, op=op)
            wanted = reduced_by_hand(right, splits, mean=op == "avg")[rank].to(dtype)
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=0.0)
    group.check()
    print("rank", rank, "is right", flush=True)
    group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_random_splits_between_ranks_that_may_share_a_gpu(size: int) -> None:
    for rank, output in enumerate(run(size, program("random_rows()"))):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output


@several
@pytest.mark.parametrize("size", sizes())
def test_rows_move_within_graphs(size: int) -> None:
    for rank, output in enumerate(run(size, program("rows_move(True)"))):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output


@several
@pytest.mark.parametrize("size", sizes())
@pytest.mark.parametrize("segments", ["False", "True"])
def test_steps_between_collectives_with_an_emptied_cache(size: int, segments: str) -> None:
    for rank, output in enumerate(run(size, program("concurrent_collectives(True)"), segments=segments)):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output


@several
def test_groups_side_by_side() -> None:
    """Four ranks, two a GPU where there are two."""
    for rank, output in enumerate(run(4, program("in_groups()"))):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output


@several
@pytest.mark.parametrize("size", sizes()[-1:])
def test_a_rank_that_raises_is_heard_and_a_new_group_is_right(size: int) -> None:
    for rank, output in enumerate(run(size, program("one_raises()"))):
        assert f"rank {rank} heard" in output and f"rank {rank} is right" in output and "ended with 0" in output, output


@several
@pytest.mark.parametrize("size", sizes()[-1:])
def test_a_rank_that_is_killed_is_named_and_gpus_go_on(size: int) -> None:
    *others, killed = run(size, program("one_dies()"))
    assert "ended with -9" in killed, killed
    for rank, output in enumerate(others):
        assert f"rank {rank} named it" in output and f"rank {rank} is right" in output and "ended with 0" in output, output
    for rank, output in enumerate(run(size, program("concurrent_collectives(False)"))):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output
