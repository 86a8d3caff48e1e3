#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for the products of a layer of experts on one GPU, each expert with rows and a weight of its own.

Peers: `torch`, torch.nn.functional.grouped_mm (torch._grouped_mm before it was public), and `deepgemm`, DeepGEMM's contiguous
grouped kernels, whose rows are filled up to its alignment; how they came there is not timed, its rate counts the experts' rows alone.
DeepGEMM is not part of PyTorch: it is imported from --folder, or from where Python finds it. Nothing of this project is needed.

  python3 grouped_gemm.py --experts 8 --shapes 8192:1024:2048 --layouts nt,nn,tn
  python3 grouped_gemm.py --peers torch,deepgemm --folder /opt/peers --experts 16 --shapes 16384:2048:4096

A shape is m:n:k of all experts together, their rows within a fifth of the mean: m of nt (x W^T) and nn (dy W), k of tn (dy^T x).
DeepGEMM adds gradients of weights (tn) to f32 ones, PyTorch stores bf16.

Rules of measuring: random normal data; every element is checked against an f32 reference before its time counts; CUDA events
around the kernels, the L2 flushed and the GPU kept busy before, so that no launch is timed; medians with min and max.
`counterpoint bench gemm --experts --peers` interleaves all of them with its own runs.
"""

import gc
import itertools
import json
import sys
from pathlib import Path

from common.command_line import add_folder, described, names, note, shapes, sizes
from common.interleaved import serve
from common.pytorch import torch
from experts.peers import PEERS, ways_of
from experts.problem import LAYOUTS, Shape
from one_gpu.clock import Clock


def arguments():
    parser = described(__doc__)
    parser.add_argument("--shapes", type=shapes, default=[[8192, 1024, 2048]], help="such as 8192:1024:2048")
    parser.add_argument("--experts", type=sizes, default=[8], help="such as 8,32")
    parser.add_argument("--layouts", type=names(LAYOUTS), default=["nt"])
    parser.add_argument("--peers", type=names(list(PEERS)), default=["torch"])
    parser.add_argument("--folder", type=Path, help="where packages of peers lie; its prepare.py, if it has one, runs first")
    parser.add_argument("--iterations", type=int, default=12, help="timed runs of each")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--turns", action="store_true", help="run what standard input says, when it says so")
    return parser.parse_args()


def uneven(total, experts):
    """Rows of each expert, within a fifth of the mean, which add up to all."""
    weights = [80 + 40 * ((expert * 7919 + 13) % 101) // 100 for expert in range(experts)]
    ends = [total * sum(weights[: expert + 1]) // sum(weights) for expert in range(experts)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def report(options, shape, known, times):
    median, low, high = times
    rate = shape.flops / median / 1e12
    if options.json:
        row = {
            **known, **shape.described(), "device": torch.cuda.get_device_name(), "iterations": options.iterations,
            "seconds": {"median": median, "min": low, "max": high}, "tflops": rate,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        by = " ".join(filter(None, (known["by"], known["variant"])))
        print(f"{by:24}  {shape!s:32}  {rate:6.0f} TFLOP/s  {median * 1e6:9.1f} us", flush=True)


def main():
    options = arguments()
    if not torch.cuda.is_available():
        note("PyTorch sees no CUDA device")
        sys.exit(3)
    if options.folder:
        add_folder(options.folder)
    clock = Clock("device")

    def ways(**case):
        # What the case before has left in circles would hold its tensors.
        gc.collect()
        return ways_of(Shape(**case), options.peers, clock)

    if options.turns:
        serve(ways)
        return
    for (m, n, k), experts, layout in itertools.product(options.shapes, options.experts, options.layouts):
        case = {"layout": layout, "m": m, "n": n, "k": k, "rows": uneven(k if layout == "tn" else m, experts)}
        for way in ways(**case):
            report(options, Shape(**case), way.known, way.seconds(options.iterations))


if __name__ == "__main__":
    main()
