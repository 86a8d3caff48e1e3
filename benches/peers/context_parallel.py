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

import itertools
import json
from contextlib import nullcontext

from common.command_line import described, heads, names, sizes
from common.interleaved import Way, ready, serve
from common.pytorch import dist, torch
from common.ranks import join, run
from sharded.problem import Problem, problem_passes
from sharded.ring import ring_passes
from sharded.ways import WAYS

MASKS = ["full", "causal"]
PEERS = [*WAYS, "ring"]


def takes(peer, mask, heads, ranks):
    """Whether the peer has that mask, and that many heads for so many ranks."""
    return mask in MASKS and {
        "ulysses": heads[0] % ranks == 0 and heads[1] % ranks == 0,
        "all_gather": mask == "full",
        "ring": mask == "causal",
    }[peer]


def rank_main(rank, ranks, arguments):
    device = join(rank, ranks)

    def ways_of(tokens, mask):
        for peer in arguments.peers:
            if takes(peer, mask, arguments.heads, ranks):
                yield from ready(lambda: ways_by(peer, mask, tokens, device, arguments), peer=peer, mask=mask)

    if arguments.turns:
        serve(ways_of)
    else:
        for tokens, mask in itertools.product(arguments.tokens, arguments.masks):
            for way in ways_of(tokens, mask):
                times = way.seconds(arguments.iterations)
                if rank == 0:
                    report(arguments, tokens, mask, ranks, way.known, times)
                # Before the next one takes its memory.
                del way
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def ways_by(peer, mask, tokens, device, arguments):
    """A forward and a backward."""
    heads_q, heads_kv = arguments.heads
    if peer == "ring":
        within, *passes, error = ring_passes(tokens, heads_q, arguments.head_dim, device)
        heads_kv = heads_q
    else:
        problem = Problem(tokens, arguments.heads, arguments.head_dim, device, arguments.seed)
        *passes, error = problem_passes(problem, WAYS[peer], mask == "causal")
        within = nullcontext
    for direction, run_pass in zip(("forward", "backward"), passes):
        known = {"by": peer, "pass": direction, "heads_q": heads_q, "heads_kv": heads_kv, "error_over_bound": error}
        yield Way(run_pass, within, **known)


def report(arguments, tokens, mask, ranks, known, times):
    median, low, high = times
    peer, direction, heads_q, heads_kv = (known[key] for key in ("by", "pass", "heads_q", "heads_kv"))
    total = tokens * ranks
    area = total * (total + 1) // 2 if mask == "causal" else total * total
    work = 1.0 if direction == "forward" else 2.5
    rate = work * 4.0 * area * heads_q * arguments.head_dim / ranks / median / 1e12
    if arguments.json:
        row = {
            **known, "mask": mask, "ranks": ranks, "tokens_per_rank": tokens, "head_dim": arguments.head_dim, "dtype": "bf16",
            "device": torch.cuda.get_device_name(), "iterations": arguments.iterations,
            "seconds": {"median": median, "min": low, "max": high}, "tflops_per_gpu": rate,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        shape = f"{tokens} a GPU, {heads_q}:{heads_kv} x {arguments.head_dim}"
        print(f"{peer:10}  {mask:6}  {direction:8}  {shape:28}  {rate:6.0f} TFLOP/s  {median * 1e3:9.3f} ms", flush=True)


def main():
    parser = described(__doc__)
    parser.add_argument("--gpus", type=int, help="GPUs to use [default: all; torchrun says it itself]")
    parser.add_argument("--tokens", type=sizes, default=[8192], help="tokens a GPU")
    parser.add_argument("--masks", type=names(MASKS), default=MASKS)
    parser.add_argument("--peers", type=names(PEERS), default=PEERS)
    parser.add_argument("--heads", type=heads, default=(64, 8), metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--turns", action="store_true", help="run what standard input says, when it says so")
    run(rank_main, parser.parse_args())


if __name__ == "__main__":
    main()
