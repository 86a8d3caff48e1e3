"""What a mask that nobody has seen costs ranks that are processes, under torchrun, when `prefetch` has made it ready.

    torchrun --nproc-per-node 4 python/benches/fresh_masks.py

Each step has another mask of packed documents, and calls of four layers, forward and backward. Times are the host's, of the
slowest rank: of the first call of a mask, and of later ones. Nobody waits for a device within a step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import launched
import torch

import counterpoint as cp

TOKENS = 8192  # of each rank
HEADS = (16, 4)
LAYERS = 4
STEPS = 24
WARM_UPS = 4


def documents(tokens: int, number: int) -> cp.Mask:
    """Packed documents, others for every number."""
    starts, state = [0], 12345 + number
    while starts[-1] < tokens:
        state = (state * 1103515245 + 12345) % (1 << 31)
        starts.append(min(tokens, starts[-1] + 64 + state % 4096))
    return cp.Mask.varlen(starts, causal=True)


def timed(times: list[float], work: launched.Call) -> Any:
    """What `work` returns, whose microseconds of the host are kept."""
    began = time.perf_counter()
    result = work()
    times.append((time.perf_counter() - began) * 1e6)
    return result


def measure(ranks: launched.Ranks, tokens: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    group = cp.Group()
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    arguments: dict[str, Any] = {"heads": HEADS, "head_dim": 128 if ranks.device.type == "cuda" else 16, "dtype": dtype}
    parts = ("plan", "first forward", "later forwards", "first backward", "later backwards")
    times: dict[str, list[float]] = {part: [] for part in parts}
    for number in range(STEPS):
        mask = documents(tokens * ranks.size, number)
        ahead = group.prefetch(mask, **arguments)
        ahead.result()
        here: dict[str, list[float]] = {part: [] for part in parts}
        plan = timed(here["plan"], lambda mask=mask: group.plan(mask, **arguments))
        rows = plan.sizes[ranks.rank]
        shapes = [(rows, heads, arguments["head_dim"]) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
        q, k, v, dout = (torch.randn(shape, device=ranks.device, dtype=dtype) for shape in shapes)
        inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
        ranks.meet()
        outs = []
        for layer in range(LAYERS):
            name = "later forwards" if layer else "first forward"
            outs.append(timed(here[name], lambda inputs=inputs, plan=plan: cp.attention(*inputs, plan)[0]))
        for layer, out in enumerate(reversed(outs)):
            name = "later backwards" if layer else "first backward"
            timed(here[name], lambda out=out, inputs=inputs, dout=dout: torch.autograd.grad(out, inputs, dout))
        ranks.meet()
        slowest = dict(zip(parts, ranks.largest([statistics.mean(here[part]) for part in parts]), strict=True))
        if number >= WARM_UPS:
            for part in parts:
                times[part].append(slowest[part])
    group.close()
    return [
        {"what": part, "tokens": tokens, "median_us": statistics.median(of), "least_us": min(of), "most_us": max(of)}
        for part, of in times.items()
    ]


def main() -> None:
    """Runs, prints and keeps."""
    parser = launched.parser(__doc__, 60.0)
    parser.add_argument("--tokens", type=int, default=None, help="of each rank (8192; on the CPU 128)")
    given = parser.parse_args()
    ranks = launched.Ranks.join(given.device, given.seconds)
    rows = measure(ranks, given.tokens or (TOKENS if given.device == "cuda" else 128))
    if ranks.is_first:
        cells = [[row["what"], *(f"{row[key]:.0f}" for key in ("median_us", "least_us", "most_us"))] for row in rows]
        launched.table([f"us of the host, {ranks.size} ranks", "median", "least", "most"], cells)
    ranks.keep(given.out, "fresh_masks", rows)
    ranks.leave()


if __name__ == "__main__":
    main()
