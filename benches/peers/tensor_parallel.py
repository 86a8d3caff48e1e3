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

import itertools
import json
import os

from common.command_line import described, first_line, names, note, shapes
from common.pytorch import dist, torch
from common.ranks import forbid_multicast, join, run, seconds, symmetric_memory
from layers.check import error_of
from layers.layer import Layer
from layers.passes import PASSES, PEERS, RUNS, has_wide_addmm

KINDS = ["column", "row"]
ACTIVATIONS = ["replicated", "sequence_parallel"]


def rank_main(rank, ranks, arguments):
    forbid_multicast()
    device = join(rank, ranks)
    peers = arguments.peers
    if "async_tp" in peers and symmetric_memory(rank) is None:
        peers = [peer for peer in peers if peer != "async_tp"]
    for shape, kind, activations in itertools.product(arguments.shapes, arguments.kinds, arguments.activations):
        layer = Layer(kind, activations, shape, device)
        for direction, peer in itertools.product(arguments.passes, peers):
            if peer == "async_tp" and not layer.sequence_parallel:
                continue
            try:
                times, error = times_and_error(layer, direction, RUNS[peer, direction], arguments.iterations)
            except Exception as error:  # A peer that cannot is no reason to lose the others.
                if rank == 0:
                    note(f"{peer}, {kind} {direction}: {first_line(error)}")
                continue
            if rank == 0:
                report(arguments, peer, kind, direction, activations, shape, times, error)
        # Before the next one takes its memory.
        del layer
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def times_and_error(layer, direction, run_pass, iterations):
    layer.main_grad.zero_()
    error = error_of(layer, direction, run_pass(layer))
    return seconds(lambda: run_pass(layer), iterations), error


def report(arguments, peer, kind, direction, activations, shape, times, error):
    if not error <= 1.0:
        note(f"{peer}, {kind} {direction}: results are {error:.1f} times their bound off; not timed")
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
            "tflops": tflops, "error_over_bound": error, "wide_addmm": has_wide_addmm(torch.device("cuda", 0)),
        }
        print(json.dumps(row), flush=True)
    else:
        text = f"{tokens}:{hidden}:{local}"
        print(
            f"{peer:8}  {kind:6}  {direction:8}  {activations:17}  {text:18}  connections {connections:5}  "
            f"{tflops:6.0f} TFLOP/s  {median * 1e6:8.1f} us",
            flush=True,
        )


def main():
    parser = described(__doc__)
    parser.add_argument("--gpus", type=int, help="GPUs to use [default: all; torchrun says it itself]")
    default = [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]]
    parser.add_argument("--shapes", type=shapes, default=default, metavar="T:HIDDEN:LOCAL")
    parser.add_argument("--kinds", type=names(KINDS), default=KINDS)
    parser.add_argument("--passes", type=names(PASSES), default=PASSES)
    parser.add_argument("--activations", type=names(ACTIVATIONS), default=ACTIVATIONS)
    parser.add_argument("--peers", type=names(PEERS), default=PEERS)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    run(rank_main, parser.parse_args())


if __name__ == "__main__":
    main()
