#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for attention on a sequence that is sharded over the GPUs of one host.

Peers: Ulysses (heads scattered by all-to-all, then cuDNN on whole sequences), all-gather of keys and values (then cuDNN on
the rank's query rows; full masks only, since cuDNN takes no offset under a causal one) and PyTorch's own ring attention
(`context_parallel`, causal, as many key heads as query heads because it takes no others). Needs PyTorch and at least two
GPUs, nothing of this project.

  python3 context_parallel.py                              # all GPUs, 8k tokens a GPU
  python3 context_parallel.py --gpus 2 --tokens 8k,32k --masks causal --json
  torchrun --nproc_per_node 4 context_parallel.py --tokens 16k

Rules of measuring: random normal data; out, dq, dk and dv of one key head a rank are compared with an f32 reference before a
time counts; CUDA events around a pass, all ranks started together; the median of the slowest rank. TFLOP/s count unmasked
pairs (4 x area x heads x head_dim, 2.5 times that backward), a GPU.
"""

import argparse
import json
import os
import socket
import statistics
import sys

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"{sys.executable} has no PyTorch ({error}); pip install torch", file=sys.stderr)
    sys.exit(3)

MASKS = ["full", "causal"]
PEERS = ["ulysses", "all_gather", "ring"]
# A result may err so many times as much as rounding the reference once does.
ERROR_FACTOR = 4.0
# Query rows of the reference that are computed at once.
REFERENCE_ROWS = 2048


class Scatter(torch.autograd.Function):
    """[tokens / ranks, heads, dim] to [tokens, heads / ranks, dim], and back in the backward."""

    @staticmethod
    def forward(ctx, x):
        return scatter_heads(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_heads(grad)


class Gather(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx, x):
        return gather_heads(x)

    @staticmethod
    def backward(ctx, grad):
        return scatter_heads(grad)


class AllGatherRows(torch.autograd.Function):
    """[tokens / ranks, ...] to [tokens, ...]; the backward sums over ranks."""

    @staticmethod
    def forward(ctx, x):
        whole = x.new_empty((x.shape[0] * dist.get_world_size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty((grad.shape[0] // dist.get_world_size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous())
        return part


def scatter_heads(x):
    ranks, (rows, heads, dim) = dist.get_world_size(), x.shape
    send = x.view(rows, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received.view(ranks * rows, heads // ranks, dim)


def gather_heads(x):
    ranks, (tokens, heads, dim) = dist.get_world_size(), x.shape
    received = torch.empty((ranks, tokens // ranks, heads, dim), dtype=x.dtype, device=x.device)
    dist.all_to_all_single(received, x.contiguous())
    return received.transpose(0, 1).reshape(tokens // ranks, ranks * heads, dim)


def attention(q, k, v, causal):
    """cuDNN on [rows, heads, dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def ulysses(q, k, v, causal):
    return Gather.apply(attention(Scatter.apply(q), Scatter.apply(k), Scatter.apply(v), causal))


def all_gather(q, k, v, causal):
    return attention(q, AllGatherRows.apply(k), AllGatherRows.apply(v), causal)


class Problem:
    """One rank's rows: q, k, v and dout, with gradients asked for."""

    def __init__(self, tokens, heads, head_dim, device, seed):
        generator = torch.Generator(device=device).manual_seed(seed + dist.get_rank())

        def rows(count):
            shape = (tokens, count, head_dim)
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.q, self.k, self.v = (rows(n).requires_grad_() for n in (heads[0], heads[1], heads[1]))
        self.dout = rows(heads[0])

    def inputs(self):
        return self.q, self.k, self.v


def whole(x):
    """All ranks' rows."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return torch.cat(gathered)


def error_of(problem, out, gradients, causal):
    """The largest ratio of a tensor's error to its bound, over one key head of each rank and all ranks."""
    group = problem.q.shape[1] // problem.k.shape[1]
    ratios = []
    for kv in range(min(dist.get_world_size(), problem.k.shape[1])):
        heads = slice(kv * group, (kv + 1) * group)
        pieces = [problem.q[:, heads], problem.k[:, kv : kv + 1], problem.v[:, kv : kv + 1], problem.dout[:, heads]]
        found = [out[:, heads], gradients[0][:, heads], gradients[1][:, kv : kv + 1], gradients[2][:, kv : kv + 1]]
        pieces = [whole(x.detach()) for x in pieces]
        found = [whole(x.detach()) for x in found]
        if kv == dist.get_rank():
            expected = reference(*pieces, causal)
            ratios += [
                ((x.float() - y).norm() / y.norm()).item() / (ERROR_FACTOR * rounding(y))
                for x, y in zip(found, expected)
            ]
    worst = torch.tensor([max(ratios, default=0.0)], device=problem.q.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def rounding(x):
    return ((x.bfloat16().float() - x).norm() / x.norm()).item()


def reference(q, k, v, dout, causal):
    """out, dq, dk, dv in f32 of one key head, some query rows at a time."""
    q, k, v, dout = (x.float().transpose(0, 1) for x in (q, k, v, dout))
    scale, rows = q.shape[-1] ** -0.5, q.shape[1]
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, rows, REFERENCE_ROWS):
        part = slice(begin, min(begin + REFERENCE_ROWS, rows))
        for head in range(q.shape[0]):
            scores = scale * q[head, part] @ k[0].T
            if causal:
                row = torch.arange(part.start, part.stop, device=q.device)
                scores.masked_fill_(torch.arange(rows, device=q.device)[None] > row[:, None], float("-inf"))
            p = torch.softmax(scores, dim=-1)
            out[head, part] = p @ v[0]
            delta = (dout[head, part] * out[head, part]).sum(-1, keepdim=True)
            ds = p * (dout[head, part] @ v[0].T - delta) * scale
            dq[head, part] = ds @ k[0]
            dk[0] += ds.T @ q[head, part]
            dv[0] += p.T @ dout[head, part]
    return [x.transpose(0, 1) for x in (out, dq, dk, dv)]


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


def timed(problem, run, causal, iterations):
    """(forward seconds, backward seconds, error over its bound)."""
    out = run(*problem.inputs(), causal)
    gradients = torch.autograd.grad(out, problem.inputs(), problem.dout, retain_graph=True)
    error = error_of(problem, out, gradients, causal)
    with torch.no_grad():
        forward = seconds(lambda: run(*problem.inputs(), causal), iterations)
    backward = seconds(
        lambda: torch.autograd.grad(out, problem.inputs(), problem.dout, retain_graph=True), iterations
    )
    return forward, backward, error


def ring_times(tokens, heads, head_dim, device, iterations):
    """PyTorch's ring attention, causal; it balances load by pairing chunks itself. Its results are in its own order of rows,
    so that what is compared is the norm of out with that of a reference on the gathered rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    generator = torch.Generator(device=device).manual_seed(5)
    shape = (1, heads, tokens * ranks, head_dim)
    buffers = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(3)]
    first = [x[0, 0].float() for x in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers=set(buffers)):
        q, k, v = (x.detach().clone().requires_grad_() for x in buffers)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = run()
            dout = torch.randn_like(out)
            with torch.no_grad():
                forward = seconds(run, iterations)
            backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), iterations)
    q, k, v = (x[:, None] for x in first)
    expected = reference(q, k, v, torch.ones_like(q), True)[0].norm()
    square = out[0, 0].detach().float().square().sum()
    dist.all_reduce(square)
    return forward, backward, abs(square.sqrt() / expected - 1.0).item() / 1e-2


def rank_main(rank, ranks, arguments):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    heads, head_dim = arguments.heads, arguments.head_dim
    for tokens in arguments.tokens:
        for mask in arguments.masks:
            causal = mask == "causal"
            total = tokens * ranks
            area = total * (total + 1) // 2 if causal else total * total
            flops = 4.0 * area * heads[0] * head_dim / ranks
            for peer in arguments.peers:
                if (peer == "all_gather" and causal) or (peer == "ring" and not causal):
                    continue
                if peer == "ulysses" and (heads[0] % ranks or heads[1] % ranks):
                    continue
                try:
                    if peer == "ring":
                        result = ring_times(tokens, heads[0], head_dim, device, arguments.iterations)
                    else:
                        problem = Problem(tokens, heads, head_dim, device, arguments.seed)
                        run = {"ulysses": ulysses, "all_gather": all_gather}[peer]
                        result = timed(problem, run, causal, arguments.iterations)
                        del problem
                except Exception as error:  # A peer that cannot is no reason to lose the others.
                    if rank == 0:
                        print(f"{peer}, {mask}: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)
                    continue
                report(rank, arguments, peer, mask, tokens, flops, result)
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def report(rank, arguments, peer, mask, tokens, flops, result):
    *times, error = result
    if rank != 0:
        return
    if not error <= 1.0:
        print(f"{peer}, {mask}: results are {error:.1f} times their bound off; not timed", file=sys.stderr)
        return
    heads = (arguments.heads[0], arguments.heads[0] if peer == "ring" else arguments.heads[1])
    for direction, work, (median, low, high) in zip(("forward", "backward"), (1.0, 2.5), times):
        rate = work * flops / median / 1e12
        if arguments.json:
            row = {
                "by": peer, "pass": direction, "mask": mask, "ranks": dist.get_world_size(), "tokens_per_rank": tokens,
                "heads_q": heads[0], "heads_kv": heads[1], "head_dim": arguments.head_dim, "dtype": "bf16",
                "device": torch.cuda.get_device_name(), "iterations": arguments.iterations,
                "seconds": {"median": median, "min": low, "max": high}, "tflops_per_gpu": rate,
                "error_over_bound": error,
            }
            print(json.dumps(row), flush=True)
        else:
            shape = f"{tokens} a GPU, {heads[0]}:{heads[1]} x {arguments.head_dim}"
            print(f"{peer:10}  {mask:6}  {direction:8}  {shape:28}  {rate:6.0f} TFLOP/s  {median * 1e3:9.3f} ms", flush=True)


def spawned(rank, arguments, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank_main(rank, arguments.gpus, arguments)


def size(text):
    units = {"k": 1024, "m": 1 << 20}
    return int(text[:-1]) * units[text[-1].lower()] if text[-1].lower() in units else int(text)


def listed(allowed):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
        return names

    return parse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="GPUs to use [default: all; torchrun says it itself]")
    parser.add_argument("--tokens", type=lambda t: [size(x) for x in t.split(",")], default=[8192], help="tokens a GPU")
    parser.add_argument("--masks", type=listed(MASKS), default=MASKS)
    parser.add_argument("--peers", type=listed(PEERS), default=PEERS)
    parser.add_argument("--heads", type=lambda t: tuple(int(x) for x in t.split(":")), default=(64, 8), metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
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
