"""From a process group, or a mesh of them, to the engine's group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import counterpoint as cp
from counterpoint.group import _Group


def split(cp_group_or_mesh: Any) -> tuple[Any, DeviceMesh | None]:
    """(group, mesh) of what a key is made with. Groups of counterpoint are taken too, so that one process can be all ranks."""
    if isinstance(cp_group_or_mesh, (dist.ProcessGroup, _Group)):
        return cp_group_or_mesh, None
    if isinstance(cp_group_or_mesh, DeviceMesh):
        if cp_group_or_mesh.ndim > 2:
            raise AssertionError(f"the mesh has {cp_group_or_mesh.ndim} dimensions; it has one, or (nodes, ranks of a node)")
        mesh = cp_group_or_mesh if cp_group_or_mesh.ndim == 1 else cp_group_or_mesh._flatten()
        return mesh.get_group(), cp_group_or_mesh
    found = type(cp_group_or_mesh).__name__
    raise ValueError(f"cp_group_or_mesh is a {found}; it is a torch.distributed.ProcessGroup or a DeviceMesh")


def size_of(group: Any) -> int:
    """Number of ranks."""
    return group.size if isinstance(group, _Group) else dist.get_world_size(group)


def identity(group: Any) -> tuple[Any, ...]:
    """Equal for groups of equal ranks."""
    if group is None:
        return (0,)
    if isinstance(group, _Group):
        return ("counterpoint", id(group))
    return tuple(sorted(dist.get_process_group_ranks(group)))


def engine_group(group: Any, mesh: DeviceMesh | None) -> _Group:
    """The group that computes: on GPUs where the process group is of NCCL."""
    if isinstance(group, _Group):
        return group
    return cp.Group(mesh if mesh is not None else group)
