"""Processes that are ranks, each with its number in RANK and their count in WORLD_SIZE, as torchrun starts them."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
BEGIN = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def run(size: int, program: str, *arguments: str, segments: str = "False", limit: float = 120.0) -> list[str]:
    """What each of `size` processes says that run `program`, and how it ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        common[name] = f"expandable_segments:{segments}"
    made = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + program, *arguments],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [f"{process.communicate(timeout=limit)[0]}\nended with {process.returncode}" for process in made]
    finally:
        for process in made:
            process.kill()
