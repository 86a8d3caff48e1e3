"""What a fresh routing costs the host in a layer of experts, call by call, compared with one that is known.

    python python/benches/fresh_routings.py --ranks 1            # ranks in this process, all on one device
    torchrun --nproc-per-node 2 python/benches/fresh_routings.py # a process and a device each

Each step has a routing of its own: `Routing.top_k` of a router's choices, then the forwards of a dispatch and a combine, then
their backwards, which threads have begun to make ready in the forwards; then the same again; then all of it of another routing,
whose passes threads have made ready (`ExpertLayer.prefetch`), as they have where other work comes between. Times are of the
host, from call to return, on the first rank; the device is idle when one begins. On CPU ranks a call returns when its results
are there, so features are few.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import launched
import torch

import counterpoint as cp

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 16
WARM_UPS = 4


def measure(group: Any, device: torch.device, arguments: Any, barrier: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows of the table."""
    is_local, dtype = isinstance(group, cp.LocalGroup), torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (arguments.hidden, arguments.inner)
    shared: dict[str, Any] = {"group": group, "dtype": dtype, "overlap": arguments.overlap}
    up = cp.ExpertLayer("dispatch", *sizes, arguments.experts, **shared)
    down = cp.ExpertLayer("combine", *reversed(sizes), arguments.experts, **shared)
    times: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], Any], is_kept: bool) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize()
        barrier()
        began = time.perf_counter()
        made = call()
        if is_kept:
            times.setdefault(what, []).append((time.perf_counter() - began) * 1e6)
        return made

    draw = torch.Generator().manual_seed(0)
    for step in range(WARM_UPS + STEPS):
        ids, others = (
            list(torch.rand(group.size, arguments.tokens, arguments.experts, generator=draw).topk(arguments.choices, -1).indices)
            for _ in range(2)
        )
        kept = step >= WARM_UPS
        # PyTorch's threads spin for some milliseconds behind an operator, on cores that ranks need.
        time.sleep(0.02)
        routing = timed("Routing.top_k", lambda ids=ids: cp.Routing.top_k(arguments.experts, ids), kept)
        timed("sources", lambda routing=routing: up.sources(routing), kept)
        tokens = arguments.tokens * (group.size if is_local else 1)
        x = torch.randn(tokens, arguments.hidden, device=device, dtype=dtype).requires_grad_()
        for is_known in ("fresh", "known", "ready ahead"):
            is_ahead = is_known == "ready ahead"
            if is_ahead:
                routing = cp.Routing.top_k(arguments.experts, others)
                timed("prefetch of both", lambda routing=routing: [layer.prefetch(routing) for layer in (up, down)], kept)
                time.sleep(0.02)
            hidden = timed(f"dispatch forward, {is_known}", lambda x=x, routing=routing: up(x, routing), kept)
            given = hidden.detach().requires_grad_()
            y = timed(f"combine forward, {is_known}", lambda given=given, routing=routing: down(given, routing), kept)
            time.sleep(0.02 if is_ahead else 0.0)
            dy, dhidden = torch.randn_like(y), torch.randn_like(hidden)
            timed(f"combine backward, {is_known}", lambda y=y, g=given, dy=dy: torch.autograd.grad(y, (g, down.weight), dy), kept)
            timed(
                f"dispatch backward, {is_known}",
                lambda h=hidden, x=x, dh=dhidden: torch.autograd.grad(h, (x, up.weight), dh),
                kept,
            )
    return [
        {"what": what, "median_us": statistics.median(of), "least_us": min(of), "most_us": max(of)} for what, of in times.items()
    ]


def main() -> None:
    """Runs, prints and keeps."""
    parser = launched.parser(__doc__, 60.0)
    parser.add_argument("--ranks", type=int, default=1, help="ranks in one process, where torchrun started none")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--experts", type=int, default=64, help="of all ranks")
    parser.add_argument("--choices", type=int, default=8, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=None, help="features of a token (2048; on the CPU 2)")
    parser.add_argument("--inner", type=int, default=None, help="features between the products (1024; on the CPU 2)")
    parser.add_argument("--overlap", default="auto", help="the overlap policy")
    given = parser.parse_args()
    given.hidden = given.hidden or (2048 if given.device == "cuda" else 2)
    given.inner = given.inner or (1024 if given.device == "cuda" else 2)
    if "WORLD_SIZE" in os.environ:
        ranks = launched.Ranks.join(given.device, given.seconds)
        group = cp.Group()
        rows = measure(group, ranks.device, given, ranks.barrier)
        count = ranks.size
    else:
        device = torch.device(given.device)
        group = cp.LocalGroup(given.ranks, device=device.type) if device.type == "cuda" else cp.LocalGroup(given.ranks)
        ranks, rows, count = None, measure(group, device, given, lambda: None), given.ranks
    if ranks is None or ranks.is_first:
        cells = [[row["what"], *(f"{row[key]:.0f}" for key in ("median_us", "least_us", "most_us"))] for row in rows]
        launched.table([f"us of the host, {count} ranks", "median", "least", "most"], cells)
    group.close()
    if ranks is not None:
        ranks.keep(given.out, "fresh_routings", rows)
        ranks.leave()


if __name__ == "__main__":
    main()
