"""The helpers of `magi_attention.utils` that its quick start and adopters use. Profiling and plotting are left out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.compat.magi.common.ranges import AttnRanges
from counterpoint.compat.magi.groups import identity

__all__ = [
    "ceil_div",
    "clearup_dist_env",
    "cu_seqlens2seqlens",
    "get_a2a_corr_factor",
    "get_calc_cost_factor",
    "get_comm_cost_factor",
    "is_list_type_all",
    "is_list_value_all",
    "is_same_process_group",
    "make_attn_mask_from_ffa_args",
    "seqlens2cu_seqlens",
    "set_random_seed",
    "setup_dist_env",
    "wrap_to_list",
]


def setup_dist_env(
    backend: str = "nccl", base_seed: int | None = None, seed_bias: Callable[[int], int] = lambda rank: 0
) -> tuple[int, int, int, int, int, Any, int | str, int | None]:
    """Joins the job of `torchrun`, and takes the rank's GPU where there is one.

    (rank, local rank, ranks, nodes, ranks of a node, world group, device, seed)
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NNODES", "NPROC_PER_NODE")
    defaults = ("0", "0", "1", "1", "1")
    rank, local_rank, world, nodes, local = (int(os.environ.get(*pair)) for pair in zip(names, defaults, strict=True))
    device: int | str = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.cuda.current_device()
    dist.init_process_group(backend=backend, rank=rank, world_size=world)
    seed = None
    if base_seed is not None:
        seed = base_seed + seed_bias(rank)
        set_random_seed(seed)
    return rank, local_rank, world, nodes, local, dist.group.WORLD, device, seed


def clearup_dist_env() -> None:
    """Leaves the job."""
    dist.destroy_process_group()


def set_random_seed(seed: int) -> None:
    """Seeds Python, PyTorch, and NumPy where that is loaded."""
    import sys

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def seqlens2cu_seqlens(seqlens: list[int]) -> list[int]:
    """Lengths to cumulative starts."""
    return list(accumulate(seqlens, initial=0))


def cu_seqlens2seqlens(cu_seqlens: list[int]) -> list[int]:
    """Cumulative starts to lengths."""
    return [end - start for start, end in pairwise(cu_seqlens)]


def wrap_to_list(x: Any, broadcast_to_length: int = 1) -> list[Any]:
    """A list or tuple as a list, anything else so many times."""
    return list(x) if isinstance(x, (list, tuple)) else [x] * broadcast_to_length


def is_list_value_all(_list: list[Any], val: Any = None, just_same: bool = False, allow_empty: bool = False) -> bool:
    """Whether all elements are `val`, or (`just_same`) the same."""
    if not _list:
        return allow_empty
    wanted = _list[0] if just_same else val
    return all(element == wanted for element in _list)


def is_list_type_all(_list: list[Any], _type: Any = None, just_same: bool = False, allow_empty: bool = False) -> bool:
    """Whether all elements are of a type, or (`just_same`) of one."""
    if not _list:
        return allow_empty
    return all(isinstance(element, type(_list[0]) if just_same else _type) for element in _list)


def get_calc_cost_factor(
    num_heads_q: int, head_dim: int, tflops: float, mfu: float, sec_ratio: float = 1e6, is_fwd: bool = True
) -> float:
    """Time of one pair of tokens, of which a second has `sec_ratio`; a backward takes 2.5 times as long."""
    flops = 4 * num_heads_q * head_dim * (1 if is_fwd else 2.5)
    return flops / (tflops * mfu) * sec_ratio


def get_comm_cost_factor(
    num_heads_kv: int, head_dim: int, bandwidth: float, bwu: float, corr_factor: float, sec_ratio: float = 1e6
) -> float:
    """Time of one row of keys and values on a link, of which a second has `sec_ratio`."""
    return 2 * num_heads_kv * head_dim / (bandwidth * corr_factor * bwu) * sec_ratio


def get_a2a_corr_factor(world_size: int) -> float:
    """The part of the rows of an all-to-all that leaves a rank; 1 for one rank."""
    return (world_size - 1) / world_size if world_size > 1 else 1.0


def is_same_process_group(group1: Any, group2: Any) -> bool:
    """Whether two process groups have the same ranks."""
    if group1 is None or group2 is None:
        return group1 is group2
    return identity(group1) == identity(group2)


def make_attn_mask_from_ffa_args(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_type_map: list[int],
    total_seqlen_q: int,
    total_seqlen_k: int,
    device: str | int = "cuda",
) -> torch.Tensor:
    """Slices as a dense mask of booleans."""
    from counterpoint.compat.magi.functional.flex_flash_attn import mask_of_slices

    queries, keys = ([list(part) for part in ranges.to_naive_ranges()] for ranges in (q_ranges, k_ranges))
    dense: torch.Tensor = mask_of_slices(queries, keys, attn_type_map, total_seqlen_q, total_seqlen_k).to_dense()
    return dense.to(device)
