"""Slices as `flex_flash_attn_func` takes them: what a rank's queries see of keys that are not theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from counterpoint.compat.magi.common.range import AttnRange
from counterpoint.compat.magi.common.ranges import AttnRanges


@dataclass
class AttnArg:
    """Slices: `q_ranges` of queries, `k_ranges` of keys, and a type for each. `total_area` is -1 where nobody has counted."""

    q_ranges: AttnRanges
    k_ranges: AttnRanges
    attn_type_map: list[int]
    total_area: int = -1
    device: Any = "cpu"

    def __post_init__(self) -> None:
        counts = len(self.q_ranges), len(self.k_ranges), len(self.attn_type_map)
        if len(set(counts)) != 1:
            raise AssertionError("{} q_ranges, {} k_ranges and {} types; a slice has one of each".format(*counts))
        self._tensors = {
            "q_ranges": self.q_ranges.to_tensor(self.device),
            "k_ranges": self.k_ranges.to_tensor(self.device),
            "attn_type_map": torch.tensor(self.attn_type_map, dtype=torch.int32, device=self.device),
        }

    def to_ffa_args(self, is_bwd: bool = False) -> dict[str, torch.Tensor]:
        """The slices by the names of `flex_flash_attn_func`, the same for both passes."""
        return self._tensors

    def can_skip(self, is_bwd: bool = False) -> bool:
        """Whether there is no slice."""
        return not self.attn_type_map


def crossed(
    own: AttnRanges, xattn_q_ranges: AttnRanges, xattn_k_ranges: AttnRanges, *, is_local: bool
) -> tuple[AttnRanges, AttnRanges]:
    """The slices, all full, of some rows of queries: `own`, in the order in which they lie. `is_local` counts them from 0."""
    q_ranges, k_ranges, before = AttnRanges(), AttnRanges(), 0
    for rows in own:
        for queries, keys in zip(xattn_q_ranges, xattn_k_ranges, strict=True):
            start, end = max(rows.start, queries.start), min(rows.end, queries.end)
            if start < end:
                shift = before - rows.start if is_local else 0
                q_ranges.append(AttnRange(start + shift, end + shift))
                k_ranges.append(keys.clone())
        before += rows.seqlen
    return q_ranges, k_ranges
