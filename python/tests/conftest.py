"""What tests share."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def ranks():
    """Four rank processes."""
    pytest.importorskip("torch")
    from ranks import Pool

    pool = Pool(4)
    yield pool
    pool.close()
