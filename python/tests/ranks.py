"""A pool of rank processes, started once for all tests: a case is a function that they run, each as one rank."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT = 90.0


class Failed(AssertionError):
    """Ranks whose case raised, with what each said."""


def _serve(rank: int, size: int, meeting: str, pipe: Connection, paths: list[str]) -> None:
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    pipe.send(("ready", None))
    while True:
        case = pipe.recv()
        if case is None:
            break
        function, arguments = case
        try:
            pipe.send(("done", function(rank, *arguments)))
        except BaseException as error:
            pipe.send(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


class Pool:
    """`size` processes, which have made gloo's world."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="counterpoint-ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, os.path.join(self._folder.name, "meeting"), theirs, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers("start")

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on every rank; what each returned. The function is a module's."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers(function.__name__)

    def _answers(self, what: str) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, LIMIT)
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in answers]
                raise Failed(f"{what}: ranks {missing} have not answered for {LIMIT} s; others: {answers}")
            for pipe in ready:
                answers[self._pipes.index(pipe)] = pipe.recv()
        failed = {rank: text for rank, (kind, text) in answers.items() if kind == "raised"}
        if failed:
            raise Failed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
