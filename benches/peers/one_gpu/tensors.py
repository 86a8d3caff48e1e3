"""Shapes of attention, and random tensors of them."""

from dataclasses import asdict, dataclass

from common.pytorch import torch

PASSES = ["forward", "backward"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Shape:
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str

    def __str__(self):
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}:{self.heads_kv}"
        return f"{self.seqlen} x {heads} x {self.head_dim}"

    @property
    def is_grouped(self):
        return self.heads_q != self.heads_kv

    def described(self):
        return asdict(self)

    def flops(self, area, which):
        return 4 * area * self.heads_q * self.head_dim * (1 if which == "forward" else 2.5)


class Tensors:
    """Random inputs, packed as [rows, heads, dim] and seen as [1, heads, rows, dim]."""

    def __init__(self, shape, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        draw = lambda heads: torch.randn(
            shape.seqlen, heads, shape.head_dim, generator=generator, device="cuda", dtype=torch.float32
        ).to(DTYPES[shape.dtype])
        self.shape = shape
        self.q, self.dout = draw(shape.heads_q), draw(shape.heads_q)
        self.k, self.v = draw(shape.heads_kv), draw(shape.heads_kv)
