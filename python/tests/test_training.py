"""The training benchmark, on two ranks: its curves agree with one device without us."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
SCRIPT = pathlib.Path(__file__).parents[1] / "benches" / "training.py"


def test_curves_of_two_ranks_are_those_of_one(tmp_path: pathlib.Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPT), "--device", "cpu", "--steps", "4", "--no-compile", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    exact, *others = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert len(others) == 9 and all(row["agrees"] for row in others), done.stdout
    assert all(len(row["losses"]) == 4 for row in others) and exact["losses"][-1] < exact["losses"][0]
