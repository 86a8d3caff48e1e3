#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for a tensor-parallel linear layer on the GPUs of one host.

Gradients of the weight are added to an f32 `main_grad`: by torch.addmm into f32 where this PyTorch has it, else by torch.mm and an
addition. Peers: `megatron`, torch.mm with NCCL's collectives started before the product that should hide them, as Megatron-LM's layers do
(an all-reduce or reduce-scatter of dx under the gradient of the weight, x gathered again under the product of dx), and
`async_tp`, PyTorch's fused operators on symmetric memory, where there is one for the pass. Needs PyTorch and at least two GPUs,
nothing of this project. How much overlaps depends on CUDA_DEVICE_MAX_CONNECTIONS, which is read when CUDA starts.

  python3 tensor_parallel.py                                  # all GPUs
  CUDA_DEVICE_MAX_CONNECTIONS=1 python3 tensor_parallel.py --gpus 2 --shapes 8192:8192:7168 --kinds column --json

A shape is tokens, features of the side that is not split, and features that a rank has of the side that is.

Rules of measuring: random normal data; a sample of rows of every result is compared with f32 products before a time counts;
CUDA events around a pass, all ranks started together; the median of the slowest rank.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import warnings

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"{sys.executable} has no PyTorch ({error}); pip install torch", file=sys.stderr)
    sys.exit(3)

KINDS = ["column", "row"]
PASSES = ["forward", "backward"]
ACTIVATIONS = ["replicated", "sequence_parallel"]
PEERS = ["megatron", "async_tp"]
# Rows of a result that are compared, and how many times the rounding of a sum's shares and of itself it may err.
SAMPLED_ROWS = 16
ERROR_FACTOR = 4.0


class Layer:
    """One rank's tensors of a layer: x, weight [out, in], dy."""

    def __init__(self, kind, activations, shape, device):
        tokens, hidden, local = shape
        self.kind, self.sequence_parallel = kind, activations == "sequence_parallel"
        self.tokens, self.ranks, self.rank = tokens, dist.get_world_size(), dist.get_rank()
        own = tokens // self.ranks if self.sequence_parallel else tokens
        x, weight, dy = {
            "column": ((own, hidden), (local, hidden), (tokens, local)),
            "row": ((tokens, local), (hidden, local), (own, hidden)),
        }[kind]
        # What all ranks have is drawn from one seed.
        common = torch.Generator(device=device).manual_seed(1)
        of_rank = torch.Generator(device=device).manual_seed(100 + self.rank)
        shared = of_rank if self.sequence_parallel else common
        generators = (shared, of_rank, of_rank) if kind == "column" else (of_rank, of_rank, shared)

        def normal(shape, generator):
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.x, self.weight, self.dy = (normal(s, g) for s, g in zip((x, weight, dy), generators))
        self.main_grad = torch.zeros(weight, dtype=torch.float32, device=device)

    def gathered(self, part):
        """All tokens, and what waits for them."""
        if not self.sequence_parallel:
            return part, None
        whole = part.new_empty((self.tokens, part.shape[1]))
        return whole, dist.all_gather_into_tensor(whole, part, async_op=True)

    def summed(self, shares):
        """A rank's sums, and what waits for them."""
        if not self.sequence_parallel:
            return shares, dist.all_reduce(shares, async_op=True)
        sums = shares.new_empty((self.tokens // self.ranks, shares.shape[1]))
        return sums, dist.reduce_scatter_tensor(sums, shares, async_op=True)


def accumulate(layer, dy, x):
    """main_grad += dy^T x"""
    if HAS_WIDE_ADDMM:
        torch.addmm(layer.main_grad, dy.t(), x, out_dtype=torch.float32, out=layer.main_grad)
    else:
        layer.main_grad.add_(torch.mm(dy.t(), x))
    return layer.main_grad


def has_wide_addmm(device):
    """Whether torch.addmm adds products of bf16 to f32 in place."""
    ones, sums = torch.ones((16, 16), dtype=torch.bfloat16, device=device), torch.ones((16, 16), device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=torch.float32, out=sums)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return bool((sums == 17.0).all())


HAS_WIDE_ADDMM = False


def wait(handle):
    if handle is not None:
        handle.wait()


def megatron_forward(layer):
    if layer.kind == "column":
        x, handle = layer.gathered(layer.x)
        wait(handle)
        return (torch.mm(x, layer.weight.t()),)
    y, handle = layer.summed(torch.mm(layer.x, layer.weight.t()))
    wait(handle)
    return (y,)


def megatron_backward(layer):
    if layer.kind == "column":
        x, gathered = layer.gathered(layer.x)
        shares = torch.mm(layer.dy, layer.weight)
        wait(gathered)
        dx, reduced = layer.summed(shares)
        dweight = accumulate(layer, layer.dy, x)
        wait(reduced)
        return dx, dweight
    dy, gathered = layer.gathered(layer.dy)
    wait(gathered)
    return torch.mm(dy, layer.weight), accumulate(layer, dy, layer.x)


def async_tp_forward(layer):
    group = dist.group.WORLD.group_name
    if layer.kind == "column":
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(layer.x, [layer.weight.t()], 0, group)
        return (y,)
    return (torch.ops.symm_mem.fused_matmul_reduce_scatter(layer.x, layer.weight.t(), "sum", 0, group),)


def async_tp_backward(layer):
    group = dist.group.WORLD.group_name
    if layer.kind == "column":
        x, gathered = layer.gathered(layer.x)
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(layer.dy, layer.weight, "sum", 0, group)
        wait(gathered)
        return dx, accumulate(layer, layer.dy, x)
    dy, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(layer.dy, [layer.weight], 0, group)
    return dx, accumulate(layer, dy, layer.x)


RUNS = {
    ("megatron", "forward"): megatron_forward,
    ("megatron", "backward"): megatron_backward,
    ("async_tp", "forward"): async_tp_forward,
    ("async_tp", "backward"): async_tp_backward,
}


def whole_rows(layer, part):
    """All tokens of a tensor that is split by tokens."""
    rows, handle = layer.gathered(part)
    wait(handle)
    return rows


def sampled(rows, count=SAMPLED_ROWS):
    return torch.linspace(0, rows - 1, min(count, rows)).long().tolist()


def error_of(layer, direction, results):
    """The largest ratio of a result's error to its bound, over all ranks."""
    x = whole_rows(layer, layer.x) if layer.kind == "column" else layer.x
    dy = layer.dy if layer.kind == "column" else whole_rows(layer, layer.dy)
    ratios = []

    def compare(found, expected, shares):
        bound = ERROR_FACTOR * 2.0**-9 * (expected.norm() + shares)
        ratios.append(((found.float() - expected).norm() / bound).item())

    def products(a, b, sums):
        """Rows of a b, summed over ranks where they are, and the norm of what was rounded before."""
        product = a.float() @ b.float()
        if not sums:
            return product, 0.0
        squares = product.square().sum()
        dist.all_reduce(product)
        dist.all_reduce(squares)
        return product, squares.sqrt()

    def local(sums):
        """Rows of a result that every rank looks at, as tokens and as rows of its own part."""
        split = sums and layer.sequence_parallel
        own = layer.tokens // layer.ranks
        tokens = sampled(layer.tokens)
        mine = [t for t in tokens if not split or t // own == layer.rank]
        return tokens, [tokens.index(t) for t in mine], [t - layer.rank * own if split else t for t in mine]

    if direction == "forward":
        sums = layer.kind == "row"
        tokens, picked, rows = local(sums)
        expected, shares = products(x[tokens], layer.weight.t(), sums)
        compare(results[0][rows], expected[picked], shares)
    else:
        sums = layer.kind == "column"
        tokens, picked, rows = local(sums)
        expected, shares = products(dy[tokens], layer.weight, sums)
        compare(results[0][rows], expected[picked], shares)
        features = sampled(layer.weight.shape[0])
        compare(results[1][features], dy[:, features].t().float() @ x.float(), 0.0)
    worst = torch.tensor([max(ratios)], device=layer.x.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def seconds(work, iterations):
    """The slowest rank's median, with its smallest and largest."""
    for _ in range(3):
        work()
    times = []
    for _ in range(iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    figures = torch.tensor([statistics.median(times), min(times), max(times)], device="cuda")
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return figures.tolist()


def rank_main(rank, ranks, arguments):
    # Nobody may need multicast objects, which a host may not allow.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    global HAS_WIDE_ADDMM
    HAS_WIDE_ADDMM = has_wide_addmm(device)
    if "async_tp" in arguments.peers:
        try:
            import torch.distributed._symmetric_memory as symmetric

            with warnings.catch_warnings():
                # Newer ones need no such call, and say so.
                warnings.simplefilter("ignore")
                symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        except (ImportError, AttributeError) as error:
            if rank == 0:
                print(f"async_tp: {error}", file=sys.stderr, flush=True)
            arguments.peers = [peer for peer in arguments.peers if peer != "async_tp"]
    for shape in arguments.shapes:
        for kind in arguments.kinds:
            for activations in arguments.activations:
                layer = Layer(kind, activations, shape, device)
                for direction in arguments.passes:
                    for peer in arguments.peers:
                        if peer == "async_tp" and not layer.sequence_parallel:
                            continue
                        try:
                            run = RUNS[peer, direction]
                            layer.main_grad.zero_()
                            error = error_of(layer, direction, run(layer))
                            times = seconds(lambda: run(layer), arguments.iterations)
                        except Exception as error:  # A peer that cannot is no reason to lose the others.
                            if rank == 0:
                                words = str(error).splitlines() or [repr(error)]
                                print(f"{peer}, {kind} {direction}: {words[0][:200]}", file=sys.stderr, flush=True)
                            continue
                        report(rank, arguments, peer, kind, direction, activations, shape, times, error)
                del layer
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def report(rank, arguments, peer, kind, direction, activations, shape, times, error):
    if rank != 0:
        return
    if not error <= 1.0:
        print(f"{peer}, {kind} {direction}: results are {error:.1f} times their bound off; not timed", file=sys.stderr)
        return
    median, low, high = times
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    tokens, hidden, local = shape
    products = 1 if direction == "forward" else 2
    tflops = products * 2.0 * tokens * hidden * local / median / 1e12
    if arguments.json:
        row = {
            "by": peer, "kind": kind, "pass": direction, "activations": activations, "shape": shape,
            "ranks": dist.get_world_size(), "connections": connections, "device": torch.cuda.get_device_name(),
            "iterations": arguments.iterations, "seconds": {"median": median, "min": low, "max": high},
            "tflops": tflops, "error_over_bound": error, "wide_addmm": HAS_WIDE_ADDMM,
        }
        print(json.dumps(row), flush=True)
    else:
        text = f"{tokens}:{hidden}:{local}"
        print(
            f"{peer:8}  {kind:6}  {direction:8}  {activations:17}  {text:18}  connections {connections:5}  "
            f"{tflops:6.0f} TFLOP/s  {median * 1e6:8.1f} us",
            flush=True,
        )


def spawned(rank, arguments, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank_main(rank, arguments.gpus, arguments)


def listed(allowed):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
        return names

    return parse


def shapes(text):
    return [[int(size) for size in shape.split(":")] for shape in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="GPUs to use [default: all; torchrun says it itself]")
    default = [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]]
    parser.add_argument("--shapes", type=shapes, default=default, metavar="T:HIDDEN:LOCAL")
    parser.add_argument("--kinds", type=listed(KINDS), default=KINDS)
    parser.add_argument("--passes", type=listed(PASSES), default=PASSES)
    parser.add_argument("--activations", type=listed(ACTIVATIONS), default=ACTIVATIONS)
    parser.add_argument("--peers", type=listed(PEERS), default=PEERS)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        arguments.gpus = int(os.environ["WORLD_SIZE"])
        if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", arguments.gpus)):
            print(f"{arguments.gpus} GPUs asked for, {torch.cuda.device_count()} here", file=sys.stderr)
            sys.exit(3)
        rank_main(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), arguments.gpus, arguments)
        return
    arguments.gpus = arguments.gpus or torch.cuda.device_count()
    if arguments.gpus < 2 or arguments.gpus > torch.cuda.device_count():
        print(f"{arguments.gpus} GPUs asked for, {torch.cuda.device_count()} here; at least 2 are needed", file=sys.stderr)
        sys.exit(3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, args=(arguments, port), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
