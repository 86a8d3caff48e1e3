"""`flex_flash_attn_func` of MagiAttention's face compared with MagiAttention's own, interleaved on one GPU.

    python python/benches/magi_face.py [--magi FOLDER] [--clock wall] [--out results.json]

Both are the functions that users call, from Python and through autograd, with the same slices of the masks of `bench attention`.
Theirs is called as it is by default, and with the options that tune it for these slices, which are hints to ours; the faster one
is `best`. A ratio is its time over ours. Results of both are compared with each other before a time counts; the exit status is 1
where they differ or time was over, and 3 where MagiAttention is missing.

By the clock `device` a time is that between events around a call, on a GPU that is busy until all of it is enqueued; by `wall` it
is the host's, of many calls one after the other.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import launched
import torch
from common.command_line import add_folder, described, heads, names, note, sizes
from one_gpu.clock import CALLS, Clock
from one_gpu.ffa import variants
from one_gpu.masks import MASKS, Mask
from one_gpu.tensors import Shape, Tensors

import counterpoint as cp
from counterpoint.compat.magi.functional import flex_flash_attn_func

Function = Callable[..., tuple[torch.Tensor, Any]]
Results = dict[str, torch.Tensor]

# How far results of both may lie apart, in parts of their norm: a few roundings of bf16.
CLOSE = 2e-2
# Runs of a turn that do not count, and those that do, as `bench attention` has them.
WARM_UP, TIMED = 3, 2
# A forward without gradients; a forward and its backward, as a step has them; a backward by itself.
PASSES = ["forward", "both", "backward"]
# Multiplications and additions of a pair that is not masked, over those of a forward.
WORK = {"forward": 1.0, "both": 3.5, "backward": 2.5}
VARIANTS = ["default", "tuned"]


class Way:
    """A function with its slices and options, on tensors that all ways share."""

    def __init__(self, function: Function, tensors: Tensors, slices: Sequence[tuple[int, ...]], **options: Any) -> None:
        def columns(first: int, end: int) -> torch.Tensor:
            return torch.tensor([one[first:end] for one in slices], dtype=torch.int32, device=tensors.q.device)

        self.function, self.options, self.dout = function, options, tensors.dout
        self.slices = columns(0, 2), columns(2, 4), columns(4, 5).flatten()
        self.leaves = [x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        self.out: torch.Tensor | None = None

    def call(self) -> tuple[torch.Tensor, Any]:
        return self.function(*self.leaves, *self.slices, **self.options)

    def forward(self) -> None:
        with torch.no_grad():
            self.call()

    def both(self) -> None:
        torch.autograd.grad(self.call()[0], self.leaves, self.dout)

    def backward(self) -> None:
        if self.out is None:
            self.out = self.call()[0]
        torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def results(self) -> Results:
        """All that a user gets."""
        out, meta = self.call()
        gradients = torch.autograd.grad(out, self.leaves, self.dout)
        return {"out": out.detach(), "lse": meta.lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def apart(found: Results, wanted: Results) -> tuple[float, str]:
    """How far the results lie apart that do most, and their name. What is no number is further than all others."""
    away = {name: launched.off(tensor, wanted[name]) for name, tensor in found.items()}
    name = max(away, key=lambda name: float("inf") if away[name] != away[name] else away[name])
    return away[name], name


def ways_of(theirs: Function, mask: Mask, tensors: Tensors, asked: Sequence[str]) -> dict[str, Way]:
    """Ours, and theirs by the names of its variants."""
    known = {name: (slices, options) for name, slices, options, _ in variants(mask, tensors.shape.is_grouped)}
    ways = {"ours": Way(flex_flash_attn_func, tensors, known["default"][0])}
    return ways | {name: Way(theirs, tensors, known[name][0], **known[name][1]) for name in asked}


def agreeing(ways: dict[str, Way], wrong: list[str], case: str) -> tuple[dict[str, Way], dict[str, float]]:
    """The ways whose results are ours, and how far they are from ours. A way that errs is no reason to lose the others."""
    good, away = {"ours": ways["ours"]}, {}
    wanted = ways["ours"].results()
    for name, way in ways.items():
        if name == "ours":
            continue
        try:
            away[name], what = apart(way.results(), wanted)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            wrong.append(f"{case}, {name}: {launched.first_line(error)}")
            continue
        if away[name] <= CLOSE:
            good[name] = way
        else:
            wrong.append(f"{case}, {name}: {what} is {away[name]:.1e} from ours; not timed")
    return good, away


def interleaved(ways: dict[str, Way], which: str, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each run that counts. A round has a turn of every way, each round in another order: a GPU at its power limit is
    some per cent slower at one time than at another."""
    order = list(ways)
    times: dict[str, list[float]] = {name: [] for name in order}
    hold = dict.fromkeys(order, 1e-3)
    for number in range(rounds):
        shift = number % len(order)
        turn = order[shift:] + order[:shift]
        for name in turn if number % 2 == 0 else turn[::-1]:
            for run in range(WARM_UP + TIMED if clock.is_device else 1):
                seconds, enqueued = clock.once(getattr(ways[name], which), hold[name])
                # The first run may compile; later ones show how long the host takes.
                if run:
                    hold[name] = max(hold[name], min(1.5 * enqueued, 5e-3))
                if run >= WARM_UP or not clock.is_device:
                    times[name].append(seconds)
    return times


def row_of(
    case: dict[str, Any], which: str, times: dict[str, list[float]], away: dict[str, float], operations: float
) -> dict[str, Any]:
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    over_ours = {name: median / medians["ours"] for name, median in medians.items() if name != "ours"}
    if over_ours:
        over_ours["best"] = min(over_ours.values())
    tflops = {name: WORK[which] * operations / median / 1e12 for name, median in medians.items()}
    return {**case, "pass": which, "tflops": tflops, "over_ours": over_ours, "seconds": times, "apart": away}


def measure(theirs: Function, given: Any, wrong: list[str]) -> list[dict[str, Any]]:
    """The rows of all cases, as far as time allows."""
    began, clock, rows = time.monotonic(), Clock(given.clock), list[dict[str, Any]]()
    for (queries, keys), tokens, name in itertools.product(given.heads, given.seqlens, given.masks):
        title = f"{name}, {tokens} x {queries}:{keys}"
        if time.monotonic() - began > given.seconds:
            wrong.append(f"{title}: left out, {given.seconds:.0f} s are over")
            continue
        shape, mask = Shape(tokens, queries, keys, given.head_dim, "bf16"), Mask(name, tokens)
        tensors = Tensors(shape, seed=tokens + queries)
        ways, away = agreeing(ways_of(theirs, mask, tensors, given.variants), wrong, title)
        case = {"mask": name, "tokens": tokens, "heads": f"{queries}:{keys}", "head_dim": given.head_dim}
        for which in given.passes:
            times = interleaved(ways, which, given.rounds, clock)
            rows.append(row_of(case, which, times, away, shape.flops(mask.area, "forward")))
        note(f"# {time.monotonic() - began:5.1f} s: {title}")
        del ways, tensors
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def report(rows: list[dict[str, Any]], given: Any) -> None:
    """TFLOP/s of ours and its ratios, a line a row, and what to read from them."""
    others = [*given.variants, "best"]
    cells = []
    for row in rows:
        known = (f"{row['over_ours'][name]:.3f}" if name in row["over_ours"] else "-" for name in others)
        cells.append([f"{row['mask']}, {row['tokens']} x {row['heads']}", row["pass"], f"{row['tflops']['ours']:.0f}", *known])
    launched.table(["time over ours", "pass", "ours, TFLOP/s", *others], cells)
    for which, name in itertools.product(given.passes, others):
        found = [(row["over_ours"][name], row) for row in rows if row["pass"] == which and name in row["over_ours"]]
        if found:
            worst, row = min(found, key=lambda pair: pair[0])
            mean = statistics.geometric_mean(ratio for ratio, _ in found)
            where = f"{row['mask']}, {row['tokens']} x {row['heads']}"
            print(f"{which:8} over {name:8} geometric mean {mean:.3f} of {len(found)}, worst {worst:.3f} ({where})", flush=True)


def keep(rows: list[dict[str, Any]], given: Any, wrong: list[str], version: str) -> None:
    document = {
        "what": "flex_flash_attn_func of counterpoint.compat.magi compared with MagiAttention's own, interleaved",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "counterpoint": cp.__version__,
        "magi_attention": version,
        "clock": given.clock if given.clock == "device" else f"{given.clock}, {CALLS} calls",
        "wrong": wrong,
        "rows": rows,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")


def arguments() -> Any:
    parser = described(__doc__)
    parser.add_argument("--magi", type=Path, help="the folder of the package; its prepare.py, if it has one, runs first")
    parser.add_argument("--masks", type=names(MASKS), default=MASKS, help=f"of {','.join(MASKS)}")
    parser.add_argument("--seqlens", type=sizes, default=[8192, 16384], help="such as 8k,16k")
    parser.add_argument("--heads", type=lambda text: [heads(pair) for pair in text.split(",")], default=[(16, 16), (64, 8)])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--passes", type=names(PASSES), default=PASSES[:2], help=f"of {','.join(PASSES)}")
    parser.add_argument(
        "--variants", type=names(VARIANTS), default=VARIANTS, help=f"of {','.join(VARIANTS)}; default is one of them"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, with two runs that count")
    parser.add_argument("--clock", choices=["device", "wall"], default="device")
    parser.add_argument("--seconds", type=float, default=300.0, help="no case begins later than this")
    parser.add_argument("--out", type=Path, help="a file for results as JSON")
    return parser.parse_args()


def main() -> None:
    """Runs, prints and keeps."""
    given = arguments()
    if given.magi:
        add_folder(given.magi)
    try:
        import magi_attention
        from magi_attention.functional import flex_flash_attn_func as theirs
    except ImportError as error:
        note(f"MagiAttention is missing ({error}); install it, or name the folder that has it by --magi")
        sys.exit(3)
    wrong: list[str] = []
    rows = measure(theirs, given, wrong)
    report(rows, given)
    for text in wrong:
        print(text, flush=True)
    if given.out:
        keep(rows, given, wrong, str(magi_attention.__version__))
    sys.exit(1 if wrong or not rows else 0)


if __name__ == "__main__":
    main()
