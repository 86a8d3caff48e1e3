#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for attention over a mask, and Counterpoint beside it.

Peers: cuDNN (`scaled_dot_product_attention`), the flash backend (varlen where the mask is packed documents, its
window for the sliding window) and, on request, FlexAttention (compiled, with block masks). Forward and backward apart,
on seven masks of realistic documents, in one run on one GPU. Needs PyTorch and a GPU, nothing of this project.

  python3 attention.py --masks causal,varlen_causal --seqlens 8k,16k
  python3 attention.py --peers cudnn,flash,flex --seqlens 8k
  python3 attention.py --ours ../../target/release/counterpoint
  python3 attention.py --clock wall                       # small sizes, launch included

Rules of measuring: random normal data; every result is checked against an f32 reference before its time counts; CUDA
events around the kernels, the L2 flushed and the GPU kept busy before, so that no launch is timed; peers take turns
within every iteration, and Counterpoint runs between two halves of them; medians with min and max.
`--clock wall` times loops of calls by the host's clock instead, launches and Python included.
"""

import json
import sys
from pathlib import Path

from common.command_line import described, heads, names, note, sizes
from common.pytorch import torch
from one_gpu import counterpoint
from one_gpu.backends import PEERS
from one_gpu.case import Case, Timer
from one_gpu.masks import MASKS
from one_gpu.ratios import goals
from one_gpu.tables import print_tables
from one_gpu.tensors import DTYPES, PASSES, Shape, Tensors


def arguments():
    parser = described(__doc__)
    parser.add_argument("--masks", type=names(MASKS), default=MASKS, help=f"of {','.join(MASKS)}")
    parser.add_argument("--seqlens", type=sizes, help="such as 8k,16k,32k")
    parser.add_argument("--heads", type=lambda text: [heads(pair) for pair in text.split(",")], help="query and key heads, such as 16:16,64:8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--passes", type=names(PASSES), default=PASSES)
    parser.add_argument("--peers", type=names(list(PEERS)), default=["cudnn", "flash"])
    parser.add_argument("--iterations", type=int, help="timed runs of each [default: 12; --quick 4]")
    parser.add_argument("--clock", choices=["device", "wall", "graph"], default="device",
                        help="device: kernels alone; wall: launches included; graph: likewise, Counterpoint by CUDA graphs")  # fmt: skip
    parser.add_argument("--no-check", dest="check", action="store_false", help="times only; marked as unchecked")
    parser.add_argument("--ours", type=Path, help="path of the counterpoint binary, to run it in between")
    parser.add_argument("--kernels", choices=["native", "portable"], default="native", help="which kernels it runs")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run of it may take")
    parser.add_argument("--quick", action="store_true", help="8k, 16:16, few repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of tables")
    options = parser.parse_args()
    small = options.clock != "device"
    seqlens = [8192] if options.quick else [1024, 2048, 4096] if small else [8192, 16384, 32768]
    options.seqlens = options.seqlens or seqlens
    options.heads = options.heads or ([(16, 16)] if options.quick else [(16, 16), (64, 8)])
    options.iterations = options.iterations or (4 if options.quick else 12)
    return options


def main():
    options = arguments()
    if not torch.cuda.is_available():
        note("PyTorch sees no CUDA device")
        sys.exit(3)
    timer = Timer(options.clock)
    shapes = [
        Shape(seqlen, q, kv, options.head_dim, options.dtype) for q, kv in options.heads for seqlen in options.seqlens
    ]
    rows = []
    for shape in shapes:
        tensors = Tensors(shape, seed=shape.seqlen + shape.heads_q)
        cases = [Case(name, tensors, options.peers, options) for name in options.masks]
        if options.clock == "device" and "cudnn" in options.peers:
            # cuDNN on the masks that it has is what published figures are scaled by.
            scaling = [name for name in ("full", "causal") if name not in options.masks]
            cases += [Case(name, tensors, ["cudnn"], options) for name in scaling]
        torch.cuda.empty_cache()
        first = options.iterations // 2
        for case in cases:
            case.measure(first, timer)
        own = counterpoint.ours(options, shape) if options.ours else []
        for case in cases:
            case.measure(options.iterations - first, timer)
        rows.extend(r for case in cases for r in case.rows())
        rows.extend({**r, "by": "counterpoint"} for r in own)
        note(f"{shape} done")
        del cases, tensors
    records = goals(rows, shapes, options.masks, options.passes, options.clock)
    if options.json:
        for r in rows:
            print(json.dumps(r))
        for record in records:
            if record["ratios"]:
                print(json.dumps({"name": "comparison", **record}))
        return
    print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"median of {options.iterations}, {'checked' if options.check else 'NOT checked'}")  # fmt: skip
    print_tables(rows, records, shapes, options.passes, options.clock)


if __name__ == "__main__":
    main()
