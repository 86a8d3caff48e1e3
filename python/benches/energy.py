"""What a pass of attention takes of the GPU's energy, ours and peers': joules, watts and clock of loops of some seconds.

    python python/benches/energy.py [--folder FOLDER] [--peers cudnn,cudnn_flex] [--masks full,causal] [--json results.jsonl]

Long passes run at the GPU's power limit, where whoever takes less energy is faster. Each way runs in a loop of its own, one after
the other and again in the opposite order; energy is the difference of the GPU's own counter (NVML), the clock the median of
samples while kernels run. `pJ/FLOP` is by unmasked pairs. Results are checked as those of `benches/peers/attention.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import launched  # noqa: F401
import torch
from common.command_line import add_folder, described, heads, names, note, sizes
from one_gpu.case import PEERS
from one_gpu.ffa import slices as slices_of
from one_gpu.masks import MASKS, Mask
from one_gpu.reference import Reference
from one_gpu.tensors import PASSES, Shape, Tensors

import counterpoint as cp

SECONDS = 3.0
# NVML's name of the clock of multiprocessors.
CLOCK_SM = 1


class Meter:
    """The GPU's counter of energy and its clock, of NVML."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.asked("nvmlInit_v2")
        self.asked("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.device))

    def asked(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")

    def joules(self) -> float:
        energy = ctypes.c_ulonglong()
        self.asked("nvmlDeviceGetTotalEnergyConsumption", self.device, ctypes.byref(energy))
        return energy.value / 1e3

    def megahertz(self) -> int:
        clock = ctypes.c_uint()
        self.asked("nvmlDeviceGetClockInfo", self.device, CLOCK_SM, ctypes.byref(clock))
        return clock.value


class Ours:
    """Attention of this package, through autograd as its users call it."""

    within = staticmethod(nullcontext)

    def __init__(self, mask: Mask, tensors: Tensors) -> None:
        slices = slices_of(mask)
        rows, columns, types = ([one[:2] for one in slices], [one[2:4] for one in slices], [one[4] for one in slices])
        self.mask = cp.Mask.from_slices(rows, columns, types, seqlen_q=mask.seqlen, seqlen_k=mask.seqlen)
        self.leaves = [x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        self.dout = tensors.dout
        self.out: torch.Tensor | None = None

    def forward(self) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (cp.flex_attention(*self.leaves, self.mask)[0],)

    def backward(self) -> tuple[torch.Tensor, ...]:
        if self.out is None:
            self.out = cp.flex_attention(*self.leaves, self.mask)[0]
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    @staticmethod
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x


Way = tuple[str, Callable[[], Any], Callable[[], AbstractContextManager[Any]]]


def ways_of(mask: Mask, tensors: Tensors, peers: list[str], which: str) -> Iterator[Way]:
    """Ours and the first variant of each peer that has the mask, their results checked."""
    reference = Reference(mask, tensors, [which])
    made: list[tuple[str, Callable[[], Any]]] = [("counterpoint", lambda: Ours(mask, tensors))]
    for peer in peers:
        made += [(peer, make) for _, make, passes in itertools.islice(PEERS[peer](mask, tensors), 1) if which in passes]
    for name, make in made:
        runner = make()
        run = getattr(runner, which)
        with runner.within():
            error, bound = reference.error(which, [runner.rows(x) for x in run()])
        if error > bound:
            note(f"{name}: error {error:.1e} is beyond its bound {bound:.1e}; not measured")
            continue
        yield name, run, runner.within


def looped(meter: Meter, run: Callable[[], Any], seconds: float) -> tuple[int, float, float, list[int]]:
    """Runs for so long: how many, their seconds, their joules, samples of the clock."""
    runs, clocks = 0, []
    began, joules = time.perf_counter(), meter.joules()
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            run()
        clocks.append(meter.megahertz())
        torch.cuda.synchronize()
        runs += 4
    return runs, time.perf_counter() - began, meter.joules() - joules, clocks


def measured(meter: Meter, ways: list[Way], seconds: float) -> dict[str, dict[str, float]]:
    """Of each way, over a loop in each order."""
    found: dict[str, list[tuple[int, float, float, list[int]]]] = {}
    for name, run, within in [*ways, *reversed(ways)]:
        with within():
            # The clock is another one a second later.
            looped(meter, run, seconds / 3)
            found.setdefault(name, []).append(looped(meter, run, seconds))
    rows = {}
    for name, loops in found.items():
        runs, took, joules = (sum(float(loop[part]) for loop in loops) for part in range(3))  # type: ignore[arg-type]
        megahertz = statistics.median(itertools.chain.from_iterable(loop[3] for loop in loops))
        rows[name] = {"ms": 1e3 * took / runs, "joules": joules / runs, "watts": joules / took, "megahertz": megahertz}
    return rows


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--folder", type=Path, help="where packages of peers lie; its prepare.py, if it has one, runs first")
    parser.add_argument("--peers", type=names(list(PEERS)), default=["cudnn"])
    parser.add_argument("--masks", type=names(MASKS), default=["full", "causal"])
    parser.add_argument("--seqlens", type=sizes, default=[32768])
    parser.add_argument("--heads", type=lambda text: [heads(pair) for pair in text.split(",")], default=[(16, 16)])
    parser.add_argument("--passes", type=names(PASSES), default=["backward"])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a loop; each way has two")
    parser.add_argument("--json", type=Path, help="writes the rows there too, one JSON object a line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        note("PyTorch sees no CUDA device")
        sys.exit(3)
    if options.folder:
        add_folder(options.folder)
    meter, lines = Meter(), []
    print(f"{'pass':8} {'mask':14} {'shape':18} {'by':14} {'ms':>8} {'J':>7} {'W':>5} {'MHz':>5} {'pJ/FLOP':>8} {'TFLOP/s':>8}")
    for seqlen, (query, key), which, name in itertools.product(options.seqlens, options.heads, options.passes, options.masks):
        shape, mask = Shape(seqlen, query, key, 128, "bf16"), Mask(name, seqlen)
        work = shape.flops(mask.area, which)
        ways = list(ways_of(mask, Tensors(shape, 1), options.peers, which))
        for by, row in measured(meter, ways, options.seconds).items():
            known = {"by": by, "pass": which, "mask": name, **shape.described(), "device": torch.cuda.get_device_name()}
            lines.append(json.dumps({**known, **row, "flops": work}))
            figures = f"{row['ms']:8.3f} {row['joules']:7.2f} {row['watts']:5.0f} {row['megahertz']:5.0f}"
            figures += f" {1e12 * row['joules'] / work:8.3f} {work / row['ms'] / 1e9:8.0f}"
            print(f"{which:8} {name:14} {shape!s:18} {by:14} {figures}", flush=True)
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
