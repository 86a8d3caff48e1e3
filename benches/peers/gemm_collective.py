#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for a product and the collective before or behind it, on the GPUs of one host.

Peers: `mm-nccl`, torch.mm and NCCL one after the other; `async-tp`, the fused operators of async tensor parallelism
(torch.ops.symm_mem), of which none does an all-reduce: there a gather follows the reduce-scatter; and `symm-mem`, torch.mm before
the two-shot all-reduce in symmetric memory. Needs PyTorch and at least two GPUs, nothing of this project.

  python3 gemm_collective.py --shapes 4096:8192:3584
  python3 gemm_collective.py --gpus 2 --collectives reduce-scatter,all-gather --shapes 4096:8192:3584/4096:7168:8192 --json

A shape is m:n:k of each rank's product; a list of them for each collective, or one for all.

Rules of measuring: random normal data; every result is compared with the sequential one in f32 on a sample of rows; several
runs one after the other between two events are a cycle; the slowest rank's median of some cycles, behind three that are not timed.
"""

import json

from common.command_line import described, names, shapes
from common.interleaved import Way, ready, serve
from common.pytorch import dist, torch
from common.ranks import forbid_multicast, join, run, symmetric_memory

COLLECTIVES = ["reduce-scatter", "all-reduce", "all-gather"]
PEERS = ["mm-nccl", "async-tp", "symm-mem"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Relative errors (Frobenius) that a result may have: some roundings of an element type.
BOUNDS = {"bf16": 1e-2, "f16": 2e-3}


class Case:
    """One product with its collective, on this rank."""

    def __init__(self, collective, shape, dtype, rank, world):
        self.collective, self.rank, self.world = collective, rank, world
        self.m, self.n, self.k = shape
        generator = torch.Generator(device="cuda").manual_seed(17 + rank)

        def random(rows, columns):
            return torch.randn(rows, columns, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

        gathers = collective == "all-gather"
        self.a = random(self.m // world if gathers else self.m, self.k)
        self.b = random(self.n, self.k)
        self.whole = torch.empty(self.m, self.k if gathers else self.n, device="cuda", dtype=dtype)
        rows = self.m // world if collective == "reduce-scatter" else self.m
        self.out = torch.empty(rows, self.n, device="cuda", dtype=dtype)

    def sequential(self):
        if self.collective == "all-gather":
            dist.all_gather_into_tensor(self.whole, self.a)
            torch.mm(self.whole, self.b.t(), out=self.out)
        elif self.collective == "reduce-scatter":
            torch.mm(self.a, self.b.t(), out=self.whole)
            dist.reduce_scatter_tensor(self.out, self.whole)
        else:
            torch.mm(self.a, self.b.t(), out=self.out)
            dist.all_reduce(self.out)
        return self.out

    def async_tp(self):
        group = dist.group.WORLD.group_name
        if self.collective == "all-gather":
            return torch.ops.symm_mem.fused_all_gather_matmul(self.a, [self.b.t()], 0, group)[1][0]
        sums = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a, self.b.t(), "sum", 0, group)
        if self.collective == "reduce-scatter":
            return sums
        dist.all_gather_into_tensor(self.out, sums)
        return self.out

    def symm_mem(self):
        torch.mm(self.a, self.b.t(), out=self.shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(self.shared, "sum", dist.group.WORLD.group_name)

    def share(self, symmetric):
        """Memory of the result that all ranks reach."""
        self.shared = symmetric.empty(self.m, self.n, device=self.a.device, dtype=self.a.dtype)
        symmetric.rendezvous(self.shared, dist.group.WORLD.group_name)

    def iterations(self, most):
        """How many runs of a cycle take about 10 ms, by 600 TFLOP/s and 20 us for each."""
        flops = 2.0 * self.m * self.n * self.k
        return max(2, min(most, int(0.01 / (2e-5 + flops / 6e14))))

    def way(self, name):
        """What runs under that name, or None."""
        if name == "mm-nccl":
            return self.sequential
        if name == "async-tp":
            return self.async_tp if self.m % self.world == 0 else None
        # In pieces of 16 bytes, as many from every rank.
        return self.symm_mem if self.collective == "all-reduce" and self.m * self.n % (8 * self.world) == 0 else None

    def expected(self):
        """Some rows of the result in f32 and which they are."""
        rows = torch.linspace(0, self.m - 1, 64, device="cuda").long()
        b = self.b.float()
        if self.collective == "all-gather":
            whole = torch.empty_like(self.whole)
            dist.all_gather_into_tensor(whole, self.a)
            return rows, whole[rows].float() @ b.t()
        sums = self.a[rows].float() @ b.t()
        dist.all_reduce(sums)
        if self.collective == "reduce-scatter":
            own = self.m // self.world
            mine = rows // own == self.rank
            return rows[mine] - self.rank * own, sums[mine]
        return rows, sums

    def error(self, found):
        rows, expected = self.expected()
        parts = torch.stack([(found[rows].float() - expected).square().sum(), expected.square().sum()])
        dist.all_reduce(parts)
        return (parts[0] / parts[1]).sqrt().item()


def rank_main(rank, ranks, given):
    forbid_multicast()
    join(rank, ranks)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    symmetric = symmetric_memory(rank) if given.peers != ["mm-nccl"] else None
    peers = [peer for peer in given.peers if symmetric or peer == "mm-nccl"]

    def ways_of(collective, shape):
        case = Case(collective, shape, DTYPES[given.dtype], rank, ranks)
        for peer in peers:
            if case.way(peer) is not None:
                yield from ready(lambda: way_of(case, peer, symmetric, given), peer=peer, collective=collective, shape=shape)

    if given.turns:
        serve(ways_of)
    else:
        lists = given.shapes if len(given.shapes) > 1 else given.shapes * len(given.collectives)
        for collective, listed in zip(given.collectives, lists):
            for shape in listed:
                for way in ways_of(collective, shape):
                    median, _, _ = way.seconds(given.cycles)
                    if rank == 0:
                        report(given, collective, shape, ranks, way.known, median / way.known["iterations"])
                    # Before the next one takes its memory.
                    del way
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def way_of(case, peer, symmetric, given):
    """Several runs one after the other."""
    way = case.way(peer)
    if peer == "symm-mem":
        case.share(symmetric)
    error = case.error(way())
    iterations = case.iterations(given.iterations)

    def cycle():
        for _ in range(iterations):
            way()

    known = {"by": peer, "iterations": iterations, "error": error, "error_over_bound": error / BOUNDS[given.dtype]}
    yield Way(cycle, **known)


def report(given, collective, shape, ranks, known, took):
    m, n, k = shape
    peer, error = known["by"], known["error"]
    if given.json:
        row = {"by": peer, "collective": collective, "ranks": ranks, "m": m, "n": n, "k": k,
               "seconds": took, "error": error}  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        print(f"{collective:14} {m:6} {n:6} {k:6}  {peer:18} {1e6 * took:9.1f}  error {error:.1e}", flush=True)


def main():
    parser = described(__doc__)
    parser.add_argument("--gpus", type=int, help="GPUs to use [default: all; torchrun says it itself]")
    parser.add_argument("--peers", type=names(PEERS), default=PEERS)
    parser.add_argument("--collectives", type=names(COLLECTIVES), default=COLLECTIVES)
    parser.add_argument("--shapes", default=[], type=lambda text: [shapes(part) for part in text.split("/")],
                        metavar="M:N:K", help="joined by commas; a list for each collective, joined by slashes, or one for all")  # fmt: skip
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--iterations", type=int, default=20, help="runs of a cycle, fewer where one takes long")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--turns", action="store_true", help="run what standard input says, when it says so")
    given = parser.parse_args()
    if not given.turns and len(given.shapes) not in (1, len(given.collectives)):
        parser.error(f"--shapes: {len(given.shapes)} lists for {len(given.collectives)} collectives; give one for all, or one for each")
    run(rank_main, given)


if __name__ == "__main__":
    main()
