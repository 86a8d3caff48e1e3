"""Ranks for tests: processes that are started once for a whole test run, each of which runs the functions that tests send.

`ranks` are four, in one gloo process group. Tests that end processes, or leave a failed group behind, start some of their own
by `Ranks(n)`: they are forked from a server that has imported PyTorch already, in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

import counterpoint as cp
from counterpoint import processes
from counterpoint.group import sentence

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.device_mesh", "torch._dynamo", "counterpoint.processes", "counterpoint.ops"]
)


class RankFailed(AssertionError):
    """A function raised on a rank."""


class Ranks:
    """Processes with ranks in a process group of torch.distributed."""

    def __init__(self, size: int, *, backend: str = "gloo", limit: float = 240.0) -> None:
        self.size, self.limit = size, limit
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            arguments = (rank, size, self._store.port, backend, theirs)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Has every rank call `function(rank, ...)`."""
        for pipe in self._pipes:
            pipe.send((function, arguments, keywords))

    def results(self) -> list[Any]:
        """What each rank's function gave; `Died` for a rank that has."""
        deadline, found = time.monotonic() + self.limit, {}
        while len(found) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(found))
                for rank in missing:
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)  # prints where it is
                time.sleep(1.0)
                self.close()
                raise TimeoutError(f"ranks {missing} did not answer within {self.limit} s; the others: {found}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = (True, Died())
        failures = {rank: value for rank, (good, value) in found.items() if not good}
        if failures:
            rank, text = min(failures.items())
            raise RankFailed(f"ranks {sorted(failures)} failed; rank {rank}:\n{text}")
        return [found[rank][1] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """`function(rank, ...)` of every rank: what each gave, in the order of ranks. It must be one of a module's own."""
        self.start(function, *arguments, **keywords)
        return self.results()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Died:
    """A rank whose process ended before it answered."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Died)

    __hash__ = None  # type: ignore[assignment]


def _serve(rank: int, size: int, port: int, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=240))
    while True:
        try:
            function, arguments, keywords = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, function(rank, *arguments, **keywords))
        except BaseException as error:
            answer = (False, traceback.format_exc())
            # So that the other ranks do not wait for this one; they make their groups anew for the next test.
            for group in processes._groups.values():
                with contextlib.suppress(cp.Error):
                    group.fail(sentence(error))
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
    os._exit(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks, the same for all tests."""
    with Ranks(4) as pool:
        yield pool
