"""How long a run takes on one GPU, by its own clock or the host's."""

import math
import statistics
import time

from common.interleaved import Way
from common.pytorch import torch

CLOCKS = ["device", "wall", "graph"]
# Calls of one timed loop by the host's clock.
CALLS = 40
# Bytes that are written before a run, several times the largest level 2 cache, and how often at least: the GPU is busy until the launches
# of the run are queued.
FLUSH = 256 << 20
FLUSHES = 4
# Bytes that a GPU writes in a second, at most.
WRITE_RATE = 4e12


class Clock:
    """`device`: by events around what a run enqueues, behind writes that flush the level 2 cache. `wall` and `graph`: by the host's clock,
    over runs that are enqueued one after the other; as graphs only ours run."""

    def __init__(self, name):
        self.is_device = name == "device"
        self.flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def once(self, run, hold):
        """Seconds of a run, and those in which the host enqueued it. The GPU is busy for `hold` seconds first."""
        if not self.is_device:
            torch.cuda.synchronize()
            since = time.perf_counter()
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()
            return (time.perf_counter() - since) / CALLS, 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(max(FLUSHES, math.ceil(hold * WRITE_RATE / FLUSH))):
            self.flush.zero_()
        begin.record()
        run()
        end.record()
        enqueued = time.perf_counter() - since
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, enqueued


class ClockedWay(Way):
    """A way whose runs a clock of one GPU times."""

    def __init__(self, clock, run, within, **known):
        super().__init__(run, within, **known)
        self.clock = clock

    def once(self, hold):
        with self.within():
            return self.clock.once(self.run, hold)

    def seconds(self, iterations):
        for _ in range(3):
            self.once(hold=1e-3)
        times = [self.once(hold=1e-3)[0] for _ in range(iterations)]
        return statistics.median(times), min(times), max(times)
