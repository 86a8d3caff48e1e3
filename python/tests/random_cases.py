"""Random problems and the dense answer in f64, for every test that compares attention."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

import counterpoint as cp


@dataclass
class Case:
    """Inputs in global order, and what attention is called with."""

    mask: cp.Mask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None
    dout: torch.Tensor
    scale: float | None
    softcap: float

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "heads": (self.q.shape[1], self.k.shape[1]),
            "head_dim": self.q.shape[2],
            "head_dim_v": self.v.shape[2],
            "dtype": self.q.dtype,
            "scale": self.scale,
            "softcap": self.softcap,
            "sink_rows": 0 if self.sink is None else self.sink.shape[0],
        }


def random_mask(generator: random.Random, *, self_attention: bool = False) -> cp.Mask:
    kind = generator.randrange(6)
    s = generator.randint(5, 150)
    if kind == 0:
        return cp.Mask.causal(s)
    if kind == 1:
        lengths = [generator.randint(0, 60) for _ in range(generator.randint(1, 5))] + [3]
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        return cp.Mask.varlen(starts, causal=generator.random() < 0.5)
    if kind == 2:
        return cp.Mask.sliding_window(s, generator.randint(0, 20), generator.randint(0, 20), generator.randint(0, 3))
    if kind == 3:
        columns = s if self_attention else generator.randint(1, 150)
        dense = torch.rand(s, columns, generator=torch.Generator().manual_seed(generator.randrange(1 << 30))) < 0.2
        dense[s // 2] = False  # a row that sees nothing
        return cp.Mask.from_dense(dense)
    if kind == 4:
        return cp.Mask.from_document_ids([generator.choice([-1, 0, 0, 1, 1, 2]) for _ in range(s)])
    return cp.Mask.full(s, s if self_attention else generator.randint(1, 150))


def random_case(seed: int, dtype: torch.dtype = torch.float64, *, self_attention: bool = False) -> Case:
    generator = random.Random(seed)
    mask = random_mask(generator, self_attention=self_attention)
    heads_k, ratio = generator.choice([1, 2]), generator.choice([1, 2, 3])
    head_dim, head_dim_v = generator.choice([8, 16, 24]), generator.choice([8, 16])
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    sink = normal(generator.choice([1, 3]), heads_k * ratio).to(accumulator) if generator.random() < 0.4 else None
    return Case(
        mask,
        normal(mask.seqlen_q, heads_k * ratio, head_dim),
        normal(mask.seqlen_k, heads_k, head_dim),
        normal(mask.seqlen_k, heads_k, head_dim_v),
        sink,
        normal(mask.seqlen_q, heads_k * ratio, head_dim_v),
        generator.choice([None, 0.3]),
        generator.choice([0.0, 0.0, 2.5]),
    )


def reference(case: Case) -> dict[str, torch.Tensor]:
    """out, lse and gradients in f64, by the definition."""
    leaves = {"q": case.q, "k": case.k, "v": case.v} | ({} if case.sink is None else {"sink": case.sink})
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (case.scale or q.shape[2] ** -0.5)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~case.mask.to_dense(), -torch.inf)
    everything = scores
    if "sink" in leaves:
        extra = leaves["sink"].t()[:, None, :].expand(-1, q.shape[0], -1)
        everything = torch.cat([scores, extra], 2)
    # By hand, because rows that see nothing must give 0 and not NaN, forwards and backwards.
    most = everything.detach().amax(2, keepdim=True).clamp(min=-1e300)
    total = (everything - most).exp().sum(2)
    weights = (scores - most).exp() / total.clamp(min=1e-300)[:, :, None]
    out = torch.einsum("hqk,khd->qhd", weights, v)
    lse = (total.log() + most[:, :, 0]).t()
    gradients = torch.autograd.grad(out, list(leaves.values()), case.dout.double(), allow_unused=True)
    found = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Relative errors by the Frobenius norm; infinities must be in the same places."""
    for name, tensor in found.items():
        a, b = tensor.double(), expected[name]
        assert a.shape == b.shape, name
        assert torch.equal(a.isinf(), b.isinf()), name
        a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
        assert a.isfinite().all(), name
        error = float((a - b).detach().norm() / max(float(b.norm()), 1e-3))
        assert error < BOUNDS[dtype], f"{name}: relative error {error:.2e}"
