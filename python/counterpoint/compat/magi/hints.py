"""What to say about options that have no effect here, once each, and about those that cannot be had."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

_said: set[str] = set()


def hint(name: str, why: str) -> None:
    """Says, once in a process, that an option that only tunes has no effect."""
    if name not in _said:
        _said.add(name)
        warnings.warn(f"{name} has no effect on counterpoint, and none on results: {why}", UserWarning, stacklevel=4)


def hints(given: dict[str, tuple[Any, Any]], why: str) -> None:
    """`hint` for each of {name: (value, default)} that is not its default."""
    for name, (value, default) in given.items():
        if value != default:
            hint(name, why)


def refuse(name: str, why: str) -> NoReturn:
    """Raises for what would change results, and cannot be had."""
    raise NotImplementedError(f"{name} is not offered by counterpoint: {why}")
