"""Ranks for tests: processes that are started once for a whole test run, each of which runs the functions that tests send.

`ranks` are four, in one gloo process group. Tests that end processes, or leave a failed group behind, start some of their own
by `Ranks(n)`: they are forked from a server that has imported PyTorch already, in a tenth of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
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


def run_program(script: pathlib.Path, folder: pathlib.Path, size: int) -> str:
    """What a program prints that runs in `folder` on `size` ranks, rank by rank. They are given what torchrun gives them, and are
    forked from the server that has imported PyTorch: importing it takes longer than what most programs do.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = [folder / f"rank_{rank}_of_{size}" for rank in range(size)]
    arguments = [(script, folder, rank, size, store.port, name) for rank, name in enumerate(names)]
    processes = [_context.Process(target=_program, args=of_rank, daemon=True) for of_rank in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240.0
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    errors = "".join(name.with_suffix(".err").read_text() for name in names)
    assert [process.exitcode for process in processes] == [0] * size, errors
    return "".join(name.with_suffix(".out").read_text() for name in names)


def _program(script: pathlib.Path, folder: pathlib.Path, rank: int, size: int, port: int, name: pathlib.Path) -> None:
    os.chdir(folder)
    for suffix, descriptor in ((".out", 1), (".err", 2)):
        file = os.open(name.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update(
        {variable: str(number) for variable, number in numbers.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"
    )
    # As torchrun does, which has the store.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    # What the end of a program does; that of a process of multiprocessing does not.
    atexit._run_exitfuncs()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks, the same for all tests."""
    with Ranks(4) as pool:
        yield pool
