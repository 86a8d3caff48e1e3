"""Products and collectives by PyTorch: torch.mm and NCCL one after the other; the fused operators of async tensor parallelism
(torch.ops.symm_mem), of which none does an all-reduce: there a gather follows the reduce-scatter; and torch.mm before its
two-shot all-reduce in symmetric memory. One process a GPU; `counterpoint bench gemm-collective --peers` starts it.

Times are taken as that benchmark takes them: one run that is not timed, then several one after the other between two events, by
the device's clock, of the slowest rank. Every result is compared with the sequential one computed in f32 on a sample of rows.
"""
import argparse
import json
import os
import statistics
import sys
import warnings

try:
    import torch
    import torch.distributed as dist
except ImportError:
    sys.exit(3)

COLLECTIVES = ("reduce-scatter", "all-reduce", "all-gather")
PEERS = ("mm-nccl", "async-tp", "symm-mem")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default="all")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--shapes", required=True, help="m:n:k of each rank's product, joined by commas, a list for each collective")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


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


def seconds(run, iterations, cycles):
    samples = []
    run()
    for _ in range(cycles):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        run()
        begin.record()
        for _ in range(iterations):
            run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end) / iterations * 1e-3], device="cuda", dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(slowest.item())
    return statistics.median(samples)


def symmetric_memory(rank):
    """PyTorch's symmetric memory, if it has one; importing it registers the fused operators."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        with warnings.catch_warnings():
            # Newer ones need no such call, and say so.
            warnings.simplefilter("ignore")
            symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    except (ImportError, AttributeError) as error:
        if rank == 0:
            print(f"symmetric memory: {error}", file=sys.stderr, flush=True)
        return None
    return symmetric


def main():
    given = arguments()
    if not torch.cuda.is_available() or torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        sys.exit(3)
    # Nobody may need multicast objects, which a host may not allow.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    names = PEERS if given.peers == "all" else tuple(given.peers.split(","))
    symmetric = symmetric_memory(rank) if names != ("mm-nccl",) else None
    if symmetric is None:
        names = tuple(name for name in names if name == "mm-nccl")
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float16
    bound = 1e-2 if given.dtype == "bf16" else 2e-3
    wrong = []
    lists = given.shapes.split("/")
    for collective, shapes in zip(given.collectives.split(","), lists):
        for text in shapes.split(","):
            shape = tuple(int(size) for size in text.split(":"))
            case = Case(collective, shape, dtype, rank, world)
            flops = 2.0 * shape[0] * shape[1] * shape[2]
            iterations = max(2, min(given.iterations, int(0.01 / (2e-5 + flops / 6e14))))
            for name in names:
                run = case.way(name)
                if run is None:
                    continue
                if name == "symm-mem":
                    case.share(symmetric)
                error = case.error(run())
                took = seconds(run, iterations, given.cycles)
                row = {"by": name, "collective": collective, "ranks": world, "m": shape[0], "n": shape[1], "k": shape[2],
                       "seconds": took, "error": error}
                if not error <= bound:
                    wrong.append(f"{name} {collective} {text}: {error:.1e}")
                elif rank == 0 and given.json:
                    print(json.dumps(row), flush=True)
                elif rank == 0:
                    print(f"{collective:14} {shape[0]:6} {shape[1]:6} {shape[2]:6}  {name:18} {1e6 * took:9.1f}  error {error:.1e}",
                          flush=True)
            del case
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    if wrong:
        print("results out of bounds: " + "; ".join(wrong), file=sys.stderr)
        sys.exit(1)


main()
