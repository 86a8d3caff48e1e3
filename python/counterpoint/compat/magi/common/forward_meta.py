"""What a forward returns besides its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class AttnForwardMeta:
    """`lse [rows, heads]`, and the largest logit of every head where it was asked for."""

    lse: torch.Tensor | None
    max_logits: torch.Tensor | None
