"""Problems for GPUs, on the shapes that models have: few head sizes, so that few kernels are compiled."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from random_cases import Case, random_mask

import counterpoint as cp

DEVICE = "cuda"
Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def gpu_case(
    seed: int, dtype: torch.dtype = torch.bfloat16, *, heads: tuple[int, int] = (4, 2), self_attention: bool = False
) -> Case:
    """Tensors on the CPU; `found` moves them."""
    generator = random.Random(seed)
    mask = random_mask(generator, self_attention=self_attention)
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    head_dim = generator.choice([64, 128])
    sink = normal(1, heads[0]).float() if generator.random() < 0.3 else None
    return Case(
        mask,
        normal(mask.seqlen_q, heads[0], head_dim),
        normal(mask.seqlen_k, heads[1], head_dim),
        normal(mask.seqlen_k, heads[1], head_dim),
        sink,
        normal(mask.seqlen_q, heads[0], head_dim),
        generator.choice([None, 0.3]),
        0.0,
    )


def leaves(case: Case) -> list[torch.Tensor]:
    tensors = [case.q, case.k, case.v] + ([] if case.sink is None else [case.sink])
    return [tensor.to(DEVICE).requires_grad_() for tensor in tensors]


def found(case: Case, call: Call) -> dict[str, torch.Tensor]:
    """What `call(q, k, v, sink)` gives on the GPU, with its gradients; on the CPU, to be compared."""
    inputs = leaves(case)
    out, lse = call(*inputs[:3], inputs[3] if case.sink is not None else None)
    gradients = torch.autograd.grad(out, inputs, case.dout.to(DEVICE))
    results = {"out": out.detach(), "lse": lse} | dict(zip(["dq", "dk", "dv", "dsink"], gradients, strict=False))
    return {name: tensor.cpu() for name, tensor in results.items()}


def packed(lengths: list[int]) -> cp.Mask:
    """Documents one after the other, each causal."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return cp.Mask.varlen(starts, causal=True)


def tensors(tokens: int, heads: int = 4, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v (leaves) and dout, bf16 heads of 64."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (tokens, heads, 64)
    made = [torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in range(4)]
    return (*(tensor.requires_grad_() for tensor in made[:3]), made[3])


def plan_of(group: cp.LocalGroup, mask: cp.Mask, **more: object) -> cp.Plan:
    return group.plan(mask, **{"heads": 4, "head_dim": 64, "dtype": torch.bfloat16, **more})  # type: ignore[arg-type]
