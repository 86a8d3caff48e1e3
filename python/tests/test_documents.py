"""What docs/python.md shows, and the examples, run."""

from __future__ import annotations

import doctest
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from ranks import run_program

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "python" / "examples"


@pytest.mark.parametrize(("page", "least"), [("python.md", 20), ("rows.md", 12)])
def test_pages_show_what_happens(page: str, least: int) -> None:
    results = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, encoding="utf-8")
    assert results.attempted > least and results.failed == 0, results


def start(folder: pathlib.Path, command: list[str]) -> str:
    """What a Python of its own prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder: pathlib.Path, name: str, ranks: int) -> str:
    """What an example prints, rank by rank."""
    return run_program(EXAMPLES / name, folder, ranks)


def test_the_program_of_the_page_runs_on_two_ranks(tmp_path: pathlib.Path) -> None:
    """By torchrun, as the page says."""
    page = (ROOT / "docs" / "python.md").read_text()
    (program,) = re.findall(r"```python\n(# long_context.py.*?)```", page, flags=re.DOTALL)
    (tmp_path / "long_context.py").write_text(program)
    # Ranks that print at the same time may be mixed within a line.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--redirects", "1", "--log-dir", "logs"]
    start(tmp_path, [*launcher, "long_context.py"])
    printed = "".join(log.read_text() for log in sorted((tmp_path / "logs").rglob("stdout.log")))
    found = re.findall(r"rank (\d) has (\d+) rows; the gradient of to_q is (\S+)", printed)
    assert sorted(rank for rank, *_ in found) == ["0", "1"] and sum(int(rows) for _, rows, _ in found) == 4096, found
    assert all(float(norm) > 0 for *_, norm in found), found


def test_a_llama_learns_packed_documents(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(tmp_path, "packed_llama.py", 2))]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3, losses


def test_a_video_is_seen_in_blocks(tmp_path: pathlib.Path) -> None:
    assert "relative error" in start(tmp_path, [str(EXAMPLES / "video_blocks.py")])
    assert (tmp_path / "video_blocks.html").stat().st_size > 10_000


def test_answers_share_a_prompt(tmp_path: pathlib.Path) -> None:
    assert "with 45% of their pairs" in run(tmp_path, "shared_prompt.py", 2)


def test_a_tensor_parallel_mlp_learns(tmp_path: pathlib.Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(tmp_path, "tensor_parallel_mlp.py", 2))]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0], losses


def test_a_mixture_of_experts_learns_the_same_on_one_rank_and_two(tmp_path: pathlib.Path) -> None:
    one, two = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(tmp_path, "mixture_of_experts.py", size))] for size in (1, 2)
    )
    assert len(one) == 12 and one[-1] < 0.4 * one[0], one
    assert two == pytest.approx(one, abs=2e-4)  # printed with four digits


def test_two_tokens_ahead_are_learned(tmp_path: pathlib.Path) -> None:
    found = re.findall(r"next token ([\d.]+), of the one after it ([\d.]+)", run(tmp_path, "multi_token_prediction.py", 2))
    for losses in zip(*found, strict=True):
        assert len(losses) == 12 and float(losses[-1]) < 0.6 * float(losses[0]), found


def test_every_example_is_tested_and_listed() -> None:
    page, tests = (ROOT / "docs" / "python.md").read_text(), pathlib.Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f"python/examples/{example.name}" in page and f'"{example.name}"' in tests, example.name
