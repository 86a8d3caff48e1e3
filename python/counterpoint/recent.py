"""Values by key, of which those are kept that were used last: plans by their masks, masks by their tensors."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `most` values. Threads may share it: two that ask for what is not there both make it, and the later is kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        found = self._values.get(key)
        if found is not None:
            with suppress(KeyError):  # another thread's value may have displaced it
                self._values.move_to_end(key)
        return found

    def put(self, key: Key, value: Value) -> Value:
        """The value, which is kept."""
        self._values[key] = value
        with suppress(KeyError):
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        self._values.clear()
