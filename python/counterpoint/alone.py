"""This process by itself as a group, one a device, for calls without ranks. After a failure, as by Ctrl-C, there is another."""

from __future__ import annotations

import os
from threading import Lock
from typing import TypeVar

import torch

from counterpoint.group import LocalGroup, _Group

_groups: dict[torch.device, LocalGroup] = {}
_lock = Lock()

OneGroup = TypeVar("OneGroup", bound=_Group)


def _forget() -> None:
    """A fork has no threads of its parent's groups, nor of who held the lock."""
    global _lock
    _lock = Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_forget)


def alone(device: torch.device) -> LocalGroup:
    """The group of this process by itself on a device."""
    if device.type == "cuda" and device.index is None:
        from counterpoint import _cuda

        device = _cuda.device(device)
    with _lock:
        known = _groups.get(device)
        if known is None or known._is_failure_known:
            known = _groups[device] = LocalGroup(1, device=device)
            known._is_alone = True
        return known


def working(group: OneGroup) -> OneGroup | LocalGroup:
    """The group, or another like it where it is one of these and has failed: no other rank is in it."""
    return alone(torch.device(group.device)) if group._is_alone and group._is_failure_known else group
