#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for attention over a mask on one GPU.

Peers: cuDNN (`scaled_dot_product_attention`), the flash backend (varlen where the mask is packed documents, its
window for the sliding window), FlexAttention (compiled, with block masks), cudnn.flex_attention and MagiAttention's
FFA, each in its variants. The last two are not part of PyTorch: they are imported from --folder, or from where Python
finds them. Forward and backward apart, on seven masks. Nothing of this project is needed.

  python3 attention.py --masks causal,varlen_causal --seqlens 8k,16k
  python3 attention.py --peers cudnn,flash,flex --seqlens 8k
  python3 attention.py --peers cudnn_flex,ffa --folder /opt/peers
  python3 attention.py --clock wall --seqlens 1k          # small sizes, launch included

Rules of measuring: random normal data; every result is checked against an f32 reference before its time counts; CUDA
events around the kernels, the L2 flushed and the GPU kept busy before, so that no launch is timed; medians with min
and max. `--clock wall` times loops of calls by the host's clock instead, launches and Python included.
`counterpoint bench attention --peers` interleaves all of them with its own runs.
"""

import gc
import itertools
import json
import sys
from pathlib import Path

from common.command_line import add_folder, described, heads, names, note, sizes
from common.interleaved import serve
from common.pytorch import torch
from one_gpu.case import PEERS, ways_of
from one_gpu.clock import CLOCKS, Clock
from one_gpu.masks import MASKS, Mask
from one_gpu.tensors import DTYPES, PASSES, Shape, Tensors


def arguments():
    parser = described(__doc__)
    parser.add_argument("--masks", type=names(MASKS), default=MASKS, help=f"of {','.join(MASKS)}")
    parser.add_argument("--seqlens", type=sizes, default=[8192, 16384, 32768], help="such as 8k,16k,32k")
    parser.add_argument("--heads", type=lambda text: [heads(pair) for pair in text.split(",")], default=[(16, 16), (64, 8)],
                        help="query and key heads, such as 16:16,64:8")  # fmt: skip
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--passes", type=names(PASSES), default=PASSES)
    parser.add_argument("--peers", type=names(list(PEERS)), default=["cudnn", "flash"])
    parser.add_argument("--folder", type=Path, help="where packages of peers lie; its prepare.py, if it has one, runs first")
    parser.add_argument("--iterations", type=int, default=12, help="timed runs of each")
    parser.add_argument("--clock", choices=CLOCKS, default="device",
                        help="device: kernels alone; wall, graph: launches included")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--turns", action="store_true", help="run what standard input says, when it says so")
    return parser.parse_args()


def report(options, mask, shape, known, times):
    median, low, high = times
    rate = shape.flops(Mask(mask, shape.seqlen).area, known["pass"]) / median / 1e12
    if options.json:
        row = {
            **known, "mask": mask, **shape.described(), "device": torch.cuda.get_device_name(), "iterations": options.iterations,
            "clock": options.clock, "seconds": {"median": median, "min": low, "max": high}, "tflops": rate,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        by = " ".join(filter(None, (known["by"], known["variant"])))
        print(f"{by:24}  {mask:20}  {known['pass']:8}  {shape!s:20}  {rate:6.0f} TFLOP/s  {median * 1e3:9.3f} ms", flush=True)


def main():
    options = arguments()
    if not torch.cuda.is_available():
        note("PyTorch sees no CUDA device")
        sys.exit(3)
    if options.folder:
        add_folder(options.folder)
    clock = Clock(options.clock)

    def ways(mask, seqlen, heads_q, heads_kv):
        # What the case before has left in circles would hold its tensors.
        gc.collect()
        shape = Shape(seqlen, heads_q, heads_kv, options.head_dim, options.dtype)
        return ways_of(mask, Tensors(shape, seed=seqlen + heads_q), options, clock)

    if options.turns:
        serve(ways)
        return
    for (q, kv), seqlen, mask in itertools.product(options.heads, options.seqlens, options.masks):
        for way in ways(mask, seqlen, q, kv):
            shape = Shape(seqlen, q, kv, options.head_dim, options.dtype)
            report(options, mask, shape, way.known, way.seconds(options.iterations))


if __name__ == "__main__":
    main()
