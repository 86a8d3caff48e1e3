"""A small Llama: rotary embeddings, grouped queries, gated layers; and packed documents for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import counterpoint as cp

HEADS, KEY_HEADS, HEAD_DIM, WORDS = 4, 2, 16, 97
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None, :].to(x.dtype)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        # Views of one projection: rows with a stride.
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, KEY_HEADS, KEY_HEADS], -2)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, *, seed: int = 0, checkpoints: bool = False) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.checkpoints = checkpoints
        width = HEADS * HEAD_DIM
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            call = partial(checkpoint, layer, use_reentrant=False) if self.checkpoints else layer
            x = call(x, positions, attend)
        return self.head(self.norm(x))


@dataclass
class Documents:
    """Packed documents: words, positions in documents, what follows each word (-100 where nothing does), and who sees whom."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    mask: cp.Mask

    @property
    def items(self) -> int:
        return int((self.labels >= 0).sum())


def documents(lengths: list[int], seed: int) -> Documents:
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (sum(lengths),), generator=noise)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = ids.roll(-1)
    labels[starts[1:] - 1] = -100
    return Documents(ids, positions, labels, cp.Mask.varlen(starts.tolist(), causal=True))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over rows."""
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def dense(mask: cp.Mask) -> Attend:
    """Attention by PyTorch alone."""
    seen = mask.to_dense()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    return attend
