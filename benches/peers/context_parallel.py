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

import json

from common.command_line import described, first_line, heads, names, note, sizes
from common.pytorch import dist, torch
from common.ranks import join, run
from sharded.problem import Problem, timed
from sharded.ring import ring_times
from sharded.ways import WAYS

MASKS = ["full", "causal"]
PEERS = [*WAYS, "ring"]


def takes(peer, mask, heads, ranks):
    """Whether the peer has that mask, and that many heads for so many ranks."""
    return {
        "ulysses": heads[0] % ranks == 0 and heads[1] % ranks == 0,
        "all_gather": mask == "full",
        "ring": mask == "causal",
    }[peer]


def rank_main(rank, ranks, arguments):
    device = join(rank, ranks)
    for tokens in arguments.tokens:
        for mask in arguments.masks:
            for peer in arguments.peers:
                if not takes(peer, mask, arguments.heads, ranks):
                    continue
                try:
                    result = times_and_error(peer, mask, tokens, device, arguments)
                except Exception as error:  # A peer that cannot is no reason to lose the others.
                    if rank == 0:
                        note(f"{peer}, {mask}: {first_line(error)}")
                    continue
                if rank == 0:
                    report(arguments, peer, mask, tokens, ranks, *result)
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def times_and_error(peer, mask, tokens, device, arguments):
    """Seconds of a forward, of a backward, and the error over its bound."""
    if peer == "ring":
        return ring_times(tokens, arguments.heads[0], arguments.head_dim, device, arguments.iterations)
    problem = Problem(tokens, arguments.heads, arguments.head_dim, device, arguments.seed)
    return timed(problem, WAYS[peer], mask == "causal", arguments.iterations)


def report(arguments, peer, mask, tokens, ranks, forward, backward, error):
    if not error <= 1.0:
        note(f"{peer}, {mask}: results are {error:.1f} times their bound off; not timed")
        return
    heads_q, heads_kv = arguments.heads
    if peer == "ring":
        heads_kv = heads_q
    total = tokens * ranks
    area = total * (total + 1) // 2 if mask == "causal" else total * total
    flops = 4.0 * area * heads_q * arguments.head_dim / ranks
    for direction, work, (median, low, high) in zip(("forward", "backward"), (1.0, 2.5), (forward, backward)):
        rate = work * flops / median / 1e12
        if arguments.json:
            row = {
                "by": peer, "pass": direction, "mask": mask, "ranks": ranks, "tokens_per_rank": tokens,
                "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": arguments.head_dim, "dtype": "bf16",
                "device": torch.cuda.get_device_name(), "iterations": arguments.iterations,
                "seconds": {"median": median, "min": low, "max": high}, "tflops_per_gpu": rate,
                "error_over_bound": error,
            }
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
    run(rank_main, parser.parse_args())


if __name__ == "__main__":
    main()
