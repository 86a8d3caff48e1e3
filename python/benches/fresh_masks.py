"""What a mask that nobody has seen costs ranks that are processes, under torchrun, when `prefetch` has made it ready.

    torchrun --nproc-per-node 4 python/benches/fresh_masks.py

Each step has another mask of packed documents, and calls of four layers, forward and backward; then the same plan again. Times
are of the host, from when the last rank begins until the last one has enqueued all layers: a rank that is late is not what a mask
costs. Devices are idle when a time begins, for a host that is far ahead of its device waits for it, and nobody waits for a device
after that.
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


def begin(ranks: launched.Ranks) -> float:
    """When this rank begins: all are here, and their devices have nothing to do."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()
    return time.monotonic()


def ended(began: float, ranks: launched.Ranks) -> float:
    """Microseconds from when the last rank began until now, on the last rank. The ranks share a host, and its clock."""
    now = time.monotonic()
    last_began, last_ended = ranks.largest([began, now])
    return (last_ended - last_began) * 1e6


def measure(ranks: launched.Ranks, tokens: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    group = cp.Group()
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    arguments: dict[str, Any] = {"heads": HEADS, "head_dim": 128 if ranks.device.type == "cuda" else 16, "dtype": dtype}
    times: dict[str, list[float]] = {}
    for number in range(STEPS):
        mask = documents(tokens * ranks.size, number)
        group.prefetch(mask, **arguments).result()
        began = begin(ranks)
        plan = group.plan(mask, **arguments)
        here = {"plan": ended(began, ranks)}
        # The same plan again: a later call of a mask, as a step's next layers make it.
        for mask_is in ("fresh", "known"):
            rows = plan.sizes[ranks.rank]
            shapes = [(rows, heads, arguments["head_dim"]) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
            q, k, v, dout = (torch.randn(shape, device=ranks.device, dtype=dtype) for shape in shapes)
            inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
            began = begin(ranks)
            outs = [cp.attention(*inputs, plan)[0] for _ in range(LAYERS)]
            here[f"forwards, {mask_is}"] = ended(began, ranks)
            began = begin(ranks)
            for out in reversed(outs):
                torch.autograd.grad(out, inputs, dout)
            here[f"backwards, {mask_is}"] = ended(began, ranks)
            ranks.barrier()
        if number >= WARM_UPS:
            for what, microseconds in here.items():
                times.setdefault(what, []).append(microseconds)
    group.close()
    for what in ("forwards", "backwards"):
        pairs = zip(times[f"{what}, fresh"], times[f"{what}, known"], strict=True)
        times[f"{what}, a fresh mask more"] = [fresh - known for fresh, known in pairs]
    return [
        {"what": what, "tokens": tokens, "median_us": statistics.median(of), "least_us": min(of), "most_us": max(of)}
        for what, of in times.items()
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
