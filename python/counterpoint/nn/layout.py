"""Features of all ranks from those of each, and back, with gradients: by collectives of PyTorch's around the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from counterpoint.errors import PlanError, TensorError

if TYPE_CHECKING:
    from counterpoint.group import _Group


def gather_features(x: torch.Tensor, group: _Group, process_group: Any) -> torch.Tensor:
    """All ranks' features, one rank's after the other's, on each. The gradient is the rank's own part."""
    if group.size == 1:
        return x
    gathered: torch.Tensor = _Gather.apply(x, group.rank, group.size, _collectives(group, process_group))
    return gathered


def split_features(x: torch.Tensor, group: _Group, process_group: Any) -> torch.Tensor:
    """The rank's part of features that all ranks have. The gradient is that of all ranks."""
    if group.size == 1:
        return x
    if x.shape[-1] % group.size:
        raise TensorError(f"input_ has {x.shape[-1]} features, which {group.size} ranks cannot share equally")
    part: torch.Tensor = _Split.apply(x, group.rank, group.size, _collectives(group, process_group))
    return part


def _collectives(group: _Group, given: Any) -> dist.ProcessGroup | None:
    """The process group whose collectives are called."""
    if isinstance(given, dist.ProcessGroup):
        return given
    if given is not None:
        made: dist.ProcessGroup = given.get_group()
        return made
    if tuple(group._global_ranks) == tuple(range(dist.get_world_size())):
        return None
    raise PlanError("gathering or splitting features needs PyTorch's collectives; give tp_group as a process group or mesh")


def _all_features(x: torch.Tensor, size: int, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=process_group)
    return torch.cat(parts, -1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int, size: int, process_group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.rank, ctx.size = rank, size
        return _all_features(x, size, process_group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient.chunk(ctx.size, -1)[ctx.rank].contiguous(), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int, size: int, process_group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.size, ctx.process_group = size, process_group
        return x.chunk(size, -1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_features(gradient, ctx.size, ctx.process_group), None, None, None
