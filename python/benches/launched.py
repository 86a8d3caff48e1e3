"""What benchmarks under torchrun share: ranks with a device each, a limit on everything, interleaved runs, tables and files.

No multicast object is ever made, which a host may not allow: NCCL and PyTorch's symmetric memory are set so before they begin.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import counterpoint as cp

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
os.environ.update(WITHOUT_MULTICAST)
# What users of PyTorch do without us, which the command line measures too.
PEERS = pathlib.Path(__file__).resolve().parents[2] / "benches" / "peers"
sys.path.append(str(PEERS))

Call = Callable[[], Any]
# Of a GPU in a second, about.
CYCLES = 1.9e9


def parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """The arguments that all have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: everything, on tiny sizes, over gloo")
    made.add_argument("--out", type=pathlib.Path, help="a folder for results as JSON")
    made.add_argument("--seconds", type=float, default=seconds, help="no case begins later than this")
    return made


@dataclass(frozen=True)
class Ranks:
    """The processes that torchrun started, this one's device, and since when it runs."""

    rank: int
    size: int
    device: torch.device
    # Of gloo: whoever waits in it keeps no GPU busy.
    hosts: dist.ProcessGroup
    seconds: float
    began: float

    @classmethod
    def join(cls, device: str, seconds: float) -> Ranks:
        """Connects the processes. Each ends by itself, and says where it is, a minute and a half after its time is over."""
        began = time.monotonic()
        faulthandler.dump_traceback_later(seconds + 90.0, exit=True)
        torch.manual_seed(0)
        limit = datetime.timedelta(seconds=seconds + 60.0)
        place = torch.device("cpu")
        if device == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if place.index >= torch.cuda.device_count():
                sys.exit(
                    f"{os.environ['WORLD_SIZE']} ranks, and {torch.cuda.device_count()} GPUs here; each rank has one of its own"
                )
            torch.cuda.set_device(place)
            dist.init_process_group("nccl", device_id=place, timeout=limit)
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", timeout=limit)
        hosts = dist.new_group(backend="gloo", timeout=limit)
        return cls(dist.get_rank(), dist.get_world_size(), place, hosts, seconds, began)

    @property
    def is_first(self) -> bool:
        """Whether this process prints."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The kind of device, as its vendor calls it."""
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    def say(self, *text: object) -> None:
        """A line of progress."""
        if self.is_first:
            print(f"# {time.monotonic() - self.began:5.1f} s:", *text, file=sys.stderr, flush=True)

    def barrier(self) -> None:
        """Waits for the hosts of all ranks, whose GPUs do nothing then."""
        self.synchronize()
        dist.barrier(group=self.hosts)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def agreed(self, value: Any) -> Any:
        """The first rank's value, on all."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.hosts)
        return box[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, of each. What is no number is larger than all others."""
        found = torch.tensor([math.inf if math.isnan(value) else value for value in values], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.hosts)
        numbers: list[float] = found.tolist()
        return numbers

    def has_time(self, needed: float = 0.0) -> bool:
        """Whether another case may begin that takes so many seconds; the same on all ranks."""
        return bool(self.agreed(time.monotonic() - self.began + needed < self.seconds))

    def once(self, work: Call, hold: float = 3e-3) -> float:
        """Seconds of a run on this rank's device. All begin together, and each host is ahead of its GPU, as in training."""
        if self.device.type == "cpu":
            dist.barrier()
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.barrier()
        torch.cuda._sleep(int(hold * CYCLES))
        # Hosts go on some microseconds apart; GPUs that have added up a number together do not.
        dist.all_reduce(_number(self.device))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def interleaved(self, ways: dict[str, Call], rounds: int, warm_ups: int = 2) -> dict[str, list[float]]:
        """Seconds of the slowest rank in every run of every way. Each round runs all of them, in another order: a GPU at its
        power limit is some per cent slower at one time than at another."""
        names = list(ways)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(warm_ups + rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                seconds = self.once(ways[name])
                if number >= warm_ups:
                    times[name].append(seconds)
        return {name: self.largest(seconds) for name, seconds in times.items()}

    def host_time(self, work: Call, calls: int = 30, rounds: int = 9) -> float:
        """Microseconds that a host spends in a call while it never waits for its device: the slowest rank's median."""
        for _ in range(3):
            work()
        times = []
        for _ in range(rounds):
            self.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - began) / calls * 1e6)
        self.barrier()
        return self.largest([statistics.median(times)])[0]

    def leave(self) -> None:
        """The end: of groups first, then of the process group."""
        self.barrier()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()

    def keep(self, folder: pathlib.Path | None, name: str, rows: list[dict[str, Any]]) -> None:
        """Writes rows, with what they were measured on, as one JSON document."""
        if folder is None or not self.is_first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "device": self.device_name,
            "ranks": self.size,
            "torch": torch.__version__,
            "counterpoint": cp.__version__,
            "took_seconds": time.monotonic() - self.began,
            "rows": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


_numbers: dict[torch.device, torch.Tensor] = {}


def _number(device: torch.device) -> torch.Tensor:
    """A number that ranks add up together."""
    if device not in _numbers:
        _numbers[device] = torch.zeros(1, device=device)
    return _numbers[device]


def first_line(error: BaseException) -> str:
    """What fits a line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far a tensor is from another, in parts of its norm."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column at the left, the others at the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip(), flush=True)
