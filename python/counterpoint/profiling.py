"""Whether calls take times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_profilers = 0


@contextlib.contextmanager
def profile() -> Iterator[None]:
    """Calls inside it are timed: `Plan.timeline()` and `Plan.report()` show those of the last one. All ranks enter it."""
    global _profilers
    # Not a context variable: the thread of backwards has a context of its own.
    _profilers += 1
    try:
        yield
    finally:
        _profilers -= 1


def profiling() -> bool:
    """Whether calls take times."""
    return _profilers > 0
