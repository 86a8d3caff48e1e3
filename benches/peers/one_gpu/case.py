"""One mask and shape: what every peer that has it takes, its results checked."""

import time

from common.command_line import first_line, note
from common.pytorch import torch
from one_gpu.backends import PEERS, backend
from one_gpu.masks import Mask
from one_gpu.reference import Reference
from one_gpu.rows import row

# Calls of one timed loop under the wall clock.
CALLS = 40


class Timer:
    """Seconds of a region, by events or by the host's clock."""

    def __init__(self, clock):
        self.clock = clock
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(self, run):
        if self.clock != "device":
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / CALLS
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # So long that the launches below are queued before it ends.
        torch.cuda._sleep(800_000)
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Case:
    """Every peer that has a mask, on one mask and shape, its results checked."""

    def __init__(self, name, tensors, peers, options):
        self.name, self.shape = name, tensors.shape
        mask = Mask(name, self.shape.seqlen)
        self.area = mask.area
        self.runs, self.seconds, self.verified = {}, {}, {}
        reference = Reference(mask, tensors, options.passes) if options.check else None
        for peer in peers:
            try:
                self.add(peer, PEERS[peer](mask, tensors), reference, options.passes)
            except Exception as error:  # a peer that cannot run a mask is left out, and said so
                note(f"{peer} cannot run {name}, {self.shape}: {first_line(error)}")

    def add(self, peer, runner, reference, passes):
        for which in passes if runner else ():
            run = getattr(runner, which)
            with backend(peer):
                results = run()
            verified = None
            if reference is not None:
                verified = reference.error(which, [runner.rows(x) for x in results])
                if not verified[0] <= verified[1]:
                    note(f"{peer} {which} of {self.name}, {self.shape} is WRONG: {verified[0]:.2e} > {verified[1]:.2e}")
                    continue
            self.runs[peer, which] = run
            self.seconds[peer, which] = []
            self.verified[peer, which] = verified

    def measure(self, iterations, timer, warm=3):
        """Peers take turns within every iteration."""
        for iteration in range(-warm, iterations):
            for (peer, which), run in self.runs.items():
                with backend(peer):
                    seconds = timer.once(run)
                if iteration >= 0:
                    self.seconds[peer, which].append(seconds)

    def rows(self):
        return [
            row(peer, which, self.name, self.shape, self.area, seconds, self.verified[peer, which])
            for (peer, which), seconds in self.seconds.items()
        ]
