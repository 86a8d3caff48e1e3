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

from common.command_line import described, names, shapes
from common.interleaved import Way, ready, serve
from common.pytorch import dist, torch
from common.ranks import forbid_multicast, join, run, symmetric_memory
from layers.check import error_of
from layers.layer import Layer
from layers.passes import PASSES, PEERS, RUNS, has_wide_addmm

KINDS = ["column", "row"]
ACTIVATIONS = ["replicated", "sequence_parallel"]
# Read when CUDA starts.
CONNECTIONS = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")


def rank_main(rank, ranks, arguments):
    forbid_multicast()
    device = join(rank, ranks)
    peers = arguments.peers
    if "async_tp" in peers and symmetric_memory(rank) is None:
        peers = [peer for peer in peers if peer != "async_tp"]

    def ways_of(shape, kind, activations):
        layer = Layer(kind, activations, shape, device)
        for direction, peer in itertools.product(arguments.passes, peers):
            if layer.sequence_parallel or peer != "async_tp":
                yield from ready(lambda: way_of(layer, peer, direction), peer=peer, kind=kind, direction=direction)

    if arguments.turns:
        serve(ways_of)
    else:
        for case in itertools.product(arguments.shapes, arguments.kinds, arguments.activations):
            for way in ways_of(*case):
                times = way.seconds(arguments.iterations)
                if rank == 0:
                    report(arguments, *case, way.known, times)
                # Before the next layer takes its memory.
                del way
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def way_of(layer, peer, direction):
    run_pass = RUNS[peer, direction]
    layer.main_grad.zero_()
    error = error_of(layer, direction, run_pass(layer))
    wide = has_wide_addmm(layer.dy.device)
    known = {"by": peer, "pass": direction, "error_over_bound": error, "wide_addmm": wide, "connections": CONNECTIONS}
    yield Way(lambda: run_pass(layer), **known)


def report(arguments, shape, kind, activations, known, times):
    median, low, high = times
    tokens, hidden, local = shape
    peer, direction = known["by"], known["pass"]
    products = 1 if direction == "forward" else 2
    tflops = products * 2.0 * tokens * hidden * local / median / 1e12
    if arguments.json:
        row = {
            **known, "kind": kind, "activations": activations, "shape": shape,
            "ranks": dist.get_world_size(), "device": torch.cuda.get_device_name(),
            "iterations": arguments.iterations, "seconds": {"median": median, "min": low, "max": high}, "tflops": tflops,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        text = f"{tokens}:{hidden}:{local}"
        print(
            f"{peer:8}  {kind:6}  {direction:8}  {activations:17}  {text:18}  connections {CONNECTIONS:5}  "
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
    parser.add_argument("--turns", action="store_true", help="run what standard input says, when it says so")
    run(rank_main, parser.parse_args())


if __name__ == "__main__":
    main()
