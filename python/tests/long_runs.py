"""What groups of processes live through: thousands of masks, another library's collectives during calls, ranks that are killed.

Each function is what one rank does, on CPUs or GPUs. The process is a rank of a process group already.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import counterpoint as cp

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
# Seconds that a rank waits for another.
LIMIT = 20.0
Tensors = list[torch.Tensor]


class Steps:
    """Attention of a rank on masks by number, the same on all ranks. The values of `v` are ones, so each mean of them is one."""

    def __init__(self, group: cp.Group, rows: int) -> None:
        self.group, self.rows = group, rows
        self.dtype = torch.bfloat16 if is_on_gpu(group) else torch.float32
        self.shape: dict[str, Any] = {"heads": (HEADS, KEY_HEADS), "head_dim": HEAD_DIM, "dtype": self.dtype, "chunk": 64}

    def mask(self, number: int) -> cp.Mask:
        """Two or three packed documents, of other lengths in each mask."""
        draw = random.Random(number)
        lengths = [draw.randint(self.rows // 2, self.rows) for _ in range(draw.randint(2, 3))]
        return cp.Mask.varlen([0, *itertools.accumulate(lengths)], causal=number % 3 != 0)

    def plan(self, number: int) -> cp.Plan:
        """Taken from `prefetch` where that was asked."""
        return self.group.plan(self.mask(number), **self.shape)

    def prefetch(self, number: int) -> None:
        self.group.prefetch(self.mask(number), **self.shape)

    def tensors(self, plan: cp.Plan, seed: int | None = None) -> Tensors:
        """q, k, v and dout of this rank's rows: constant, or random."""
        drawn = None if seed is None else torch.Generator().manual_seed(seed)
        made = []
        for role, heads, value in (("q", HEADS, 0.5), ("k", KEY_HEADS, 0.5), ("v", KEY_HEADS, 1.0), ("q", HEADS, 1.0)):
            shape = (plan.q_rows if role == "q" else plan.k_rows, heads, HEAD_DIM)
            tensor = torch.full(shape, value) if drawn is None else torch.randn(shape, generator=drawn)
            made.append(tensor.to(self.group.device, self.dtype))
        return made

    def call(self, plan: cp.Plan, given: Tensors, backward: bool) -> Tensors:
        """What is on its way: out, and gradients."""
        q, k, v, dout = given
        leaves = [tensor.detach().requires_grad_(backward) for tensor in (q, k, v)]
        out, _ = cp.attention(*leaves, plan)
        return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if backward else ())]


def is_on_gpu(group: cp.Group) -> bool:
    """Whether its ranks are GPUs."""
    return str(group.device) != "cpu"


def synchronized(group: cp.Group) -> None:
    """All that was enqueued has ended; raises what went wrong in it."""
    if is_on_gpu(group):
        torch.cuda.synchronize(group.device)
    group.check()


def figures(group: cp.Group) -> dict[str, int]:
    """What the process holds: threads, descriptors, mappings, bytes of the host and of the device."""
    gc.collect()
    held = {
        "threads": threading_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(pathlib.Path("/proc/self/maps").read_text().splitlines()),
        "host": 4096 * int(pathlib.Path("/proc/self/statm").read_text().split()[1]),
        "device": 0,
    }
    if is_on_gpu(group):
        free, total = torch.cuda.mem_get_info(group.device)
        # What PyTorch keeps for itself is not the group's.
        held["device"] = total - free - torch.cuda.memory_reserved(group.device)
    return held


def threading_count() -> int:
    """Threads of the process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


def masks_come_and_go(rank: int, device: str, masks: int, warm: int, rows: int) -> dict[str, Any]:
    """Plans of `masks` masks are made, some ahead, called, and dropped in an order of each rank's own, most while their calls are
    under way. What the process held after `warm` of them and after all, and how many elements of those looked at are wrong."""
    group = cp.Group(device=device, limit=LIMIT)
    steps, own = Steps(group, rows), random.Random(1000 + rank)
    kept: list[tuple[cp.Plan, Tensors, Tensors]] = []
    wrong = looked = 0
    held: dict[str, int] = {}
    prefetched = 0
    for number in range(masks):
        if number == warm:
            synchronized(group)
            held = figures(group)
        # A loader is up to three masks ahead, on some ranks.
        if own.random() < 0.5:
            for ahead in range(max(prefetched, number), min(number + own.randint(1, 3), masks)):
                steps.prefetch(ahead)
                prefetched = ahead + 1
        plan = steps.plan(number)
        given = steps.tensors(plan)
        kept.append((plan, given, steps.call(plan, given, backward=number % 2 == 0)))
        while len(kept) > own.randint(0, 5):
            _, _, found = kept.pop(own.randrange(len(kept)))
            if own.random() < 0.1:
                looked += 1
                wrong += int((~((found[0].float() - 1.0).abs() < 0.01)).sum())
        # No host is further ahead than this.
        if number % 16 == 0:
            synchronized(group)
    kept.clear()
    synchronized(group)
    after = figures(group)
    group.close()
    return {"wrong": wrong, "looked": looked, "warm": held, "after": after}


def grown(result: dict[str, Any]) -> dict[str, int]:
    """How much more a process held at the end than when it was warm."""
    return {what: result["after"][what] - before for what, before in result["warm"].items()}


class Neighbour:
    """Another library's collective: an all-reduce of PyTorch's process group, on a stream of its own, behind a random delay."""

    def __init__(self, group: cp.Group, seed: int) -> None:
        self.is_gpu = is_on_gpu(group)
        self.delays = random.Random(seed)
        self.stream = torch.cuda.Stream(group.device) if self.is_gpu else None
        self.sums = torch.ones(1 << (20 if self.is_gpu else 12), device=group.device)
        self.rounds = 0
        # The first collective of a process group makes NCCL's communicator, and waits on the host for what the GPU does: ranks
        # that call the group before it or behind it, as each likes, would wait for each other.
        self.begin()
        if self.stream is not None:
            self.stream.synchronize()
        dist.barrier()
        self.rounds = 0

    @contextlib.contextmanager
    def on_its_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            yield

    def begin(self) -> None:
        """Every rank adds a number of its own; the mean goes on to the next round."""
        with self.on_its_stream():
            delay(self.is_gpu, self.delays)
            dist.all_reduce(self.sums)
            self.sums /= dist.get_world_size()
        self.rounds += 1

    def wrong(self) -> int:
        """Means of ones are ones."""
        if self.stream is not None:
            self.stream.synchronize()
        return int((self.sums != 1.0).sum())


def delay(is_gpu: bool, draw: random.Random) -> None:
    """Up to 150 us, of the current stream or of the host."""
    if is_gpu:
        torch.cuda._sleep(draw.randrange(250_000))
    else:
        time.sleep(draw.random() * 150e-6)


def attention_concurrent_collectives(rank: int, device: str, rounds: int, rows: int) -> dict[str, Any]:
    """Forwards and backwards, each with an all-reduce before or behind it, as each rank likes on GPUs; ordered with nothing.
    Their bits are those of calls without."""
    group = cp.Group(device=device, limit=LIMIT)
    steps, own = Steps(group, rows), random.Random(2000 + rank)
    steps.shape["deterministic"] = True
    plans = [steps.plan(number) for number in range(4)]
    given = [steps.tensors(plan, seed=17 + rank) for plan in plans]
    right = [steps.call(plan, one, True) for plan, one in zip(plans, given, strict=True)]
    synchronized(group)
    # On the CPU a call is waited for, and so is gloo's collective: one order for all.
    order = own if device == "cuda" else random.Random(5)
    neighbour, unlike, results = Neighbour(group, rank), 0, []
    for number in range(rounds):
        first = order.random() < 0.5
        if first:
            neighbour.begin()
        delay(device == "cuda", own)
        results.append((number % 4, steps.call(plans[number % 4], given[number % 4], True)))
        if not first:
            neighbour.begin()
        if number % 50 == 49 or number == rounds - 1:
            synchronized(group)
            unlike += sum(not torch.equal(a, b) for which, found in results for a, b in zip(found, right[which], strict=True))
            results.clear()
    wrong = neighbour.wrong()
    group.close()
    return {"rounds": neighbour.rounds, "unlike": unlike, "wrong": wrong}


def layers_concurrent_collectives(rank: int, device: str, rounds: int, overlap: str) -> dict[str, Any]:
    """Tensor-parallel layers, forward and backward, with all-reduces on a stream that their group follows: both come in
    one order on all ranks, which is random. Their bits are those of calls without."""
    from counterpoint.nn import ColumnParallelLinear, RowParallelLinear

    group = cp.Group(device=device, limit=LIMIT)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(3)
    narrow, wide, tokens = 256, 512, 256
    more: dict[str, Any] = {"tp_group": group, "bias": False, "dtype": dtype, "sequence_parallel": True, "overlap": overlap}
    layers = [ColumnParallelLinear(narrow, wide, **more), RowParallelLinear(wide, narrow, **more)]
    x = torch.randn(tokens // group.size, narrow, generator=torch.Generator().manual_seed(rank)).to(group.device, dtype)

    def call() -> Tensors:
        leaf = x.detach().requires_grad_()
        y = layers[1](layers[0](leaf)[0])[0]
        return [y.detach(), *torch.autograd.grad(y, [leaf, *(layer.weight for layer in layers)], y.detach())]

    right = call()
    synchronized(group)
    neighbour, order, unlike, results = Neighbour(group, rank), random.Random(6), 0, []
    if neighbour.stream is not None:
        group.order_with(neighbour.stream)
    own = random.Random(3000 + rank)
    for number in range(rounds):
        first = order.random() < 0.5
        if first:
            neighbour.begin()
        delay(device == "cuda", own)
        results.append(call())
        if not first:
            neighbour.begin()
        if number % 50 == 49 or number == rounds - 1:
            synchronized(group)
            unlike += sum(not torch.equal(a, b) for found in results for a, b in zip(found, right, strict=True))
            results.clear()
    wrong = neighbour.wrong()
    group.close()
    return {"rounds": neighbour.rounds, "unlike": unlike, "wrong": wrong}


def masks_through_one_graph(rank: int, masks: int, rows: int) -> dict[str, Any]:
    """A step of two layers, forward and backward, is captured once and replayed with `masks` masks, after delays of a rank's own.
    Elements of replays that differ from direct calls, and what updates cost the host, in seconds."""
    group = cp.Group(device="cuda", limit=LIMIT)
    steps, own = Steps(group, rows), random.Random(4000 + rank)
    # Every mask has as many rows on each rank, and its work at once: the same operations, whatever rows travel.
    steps.shape |= {"deterministic": True, "dispatch": "zigzag", "stages": 0, "chunk": 128}

    def planned(number: int) -> cp.Plan:
        draw = random.Random(number)
        cuts = sorted(draw.sample(range(1, rows), draw.randrange(1, 8)))
        return group.plan(cp.Mask.varlen([0, *cuts, rows], causal=True), **steps.shape)

    plan = planned(0)
    q, k, v, dout = steps.tensors(plan, seed=rank)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step(plan: cp.Plan) -> Tensors:
        x = cp.attention(*leaves, plan)[0]
        out, lse = cp.attention(x, *leaves[1:], plan)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        captured = step(plan)
    unlike = torch.zeros((), device=group.device, dtype=torch.int64)
    took = []
    for number in range(1, masks + 1):
        new = planned(number)
        expected = step(new)
        torch.cuda.synchronize()
        began = time.perf_counter()
        plan.update_graph(graph, new)
        took.append(time.perf_counter() - began)
        plan = new
        for tensor in captured:
            tensor.fill_(torch.nan)
        delay(True, own)
        graph.replay()
        for found, right in zip(captured, expected, strict=True):
            unlike += (found != right).sum()
    synchronized(group)
    group.close()
    took.sort()
    return {"masks": masks, "unlike": int(unlike), "median": took[masks // 2], "worst": took[-1]}


def last_rank_is_killed(rank: int, size: int, device: str, when: str, rows: int) -> dict[str, Any]:
    """The last rank is killed within a call, or while the others drop plans. What the others hear and after how many seconds;
    then each attends by itself."""
    group = cp.Group(device=device, limit=LIMIT)
    steps = Steps(group, rows)
    kept = []
    for number in range(8):
        plan = steps.plan(number)
        given = steps.tensors(plan)
        kept.append((plan, given, steps.call(plan, given, True)))
    synchronized(group)
    dist.barrier()
    is_last, heard = rank == size - 1, ""
    if is_last and when == "in a call":
        later = threading.Timer(random.Random(4).uniform(0.01, 0.1), os.kill, (os.getpid(), signal.SIGKILL))
        later.daemon = True
        later.start()
    elif is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for number in range(100_000):
            if when == "while others drop" and kept:
                kept.pop(number % len(kept))
                gc.collect()
                continue
            plan = steps.plan(number % 64)
            given = steps.tensors(plan)
            steps.call(plan, given, True)
            synchronized(group)
    except cp.Error as error:
        heard = f"{type(error).__name__} of rank {getattr(error, 'peer', None)}: {error}"
    took = time.monotonic() - began
    # The device is as before.
    alone = cp.LocalGroup(1, device=device)
    mask = cp.Mask.causal(rows)
    plan = alone.plan(mask, heads=HEADS, head_dim=HEAD_DIM, dtype=steps.dtype)
    q = torch.full((rows, HEADS, HEAD_DIM), 0.5, device=group.device, dtype=steps.dtype)
    out, _ = cp.attention(q, q, torch.ones_like(q), plan)
    wrong = int((~((out.float() - 1.0).abs() < 0.01)).sum())
    alone.close()
    return {"heard": heard, "seconds": took, "wrong": wrong}
