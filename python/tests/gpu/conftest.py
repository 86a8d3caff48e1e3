"""Tests that need a GPU: skipped with the reason where there is none. `python/tests/gpu/run.sh` runs them on a GPU machine."""

from __future__ import annotations

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
# What the tests on the CPU compare with.
sys.path.insert(0, str(HERE.parent))


def reason() -> str | None:
    """Why no GPU can be used."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}"
    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = reason()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
