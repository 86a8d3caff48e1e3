"""Trains a mixture of experts whose experts are split over ranks.

    torchrun --nproc-per-node 2 python/examples/mixture_of_experts.py

Each rank has its own tokens and an equal part of the experts. A router chooses two experts for each token; tokens travel to the
ranks of their experts under the first product, and the results travel back under the second. Ranks have a GPU each where there
are as many, and are on the CPU where there are not.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

import counterpoint as cp

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES, STEPS = 128, 32, 64, 8, 2, 12  # tokens of all ranks, each of which has as many


class MixtureOfExperts(torch.nn.Module):
    """A router, and experts of two layers."""

    def __init__(self, group: cp.Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=group.device)
        self.up = cp.ExpertLayer("dispatch", HIDDEN, INNER, EXPERTS, group=group, dtype=dtype)
        self.down = cp.ExpertLayer("combine", INNER, HIDDEN, EXPERTS, group=group, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is `[own tokens, HIDDEN]`, and so is what comes out."""
        scores = torch.cat(all_gather(self.router(x.float()).softmax(-1)))  # of the tokens of all ranks, with gradients
        chosen = scores.topk(CHOICES).indices.split(len(x))
        routing = cp.Routing.top_k(EXPERTS, chosen)  # read on the host; the same on all ranks
        self.down.prefetch(routing)  # a thread makes its call ready while this one makes that of `up`
        rows = torch.nn.functional.gelu(self.up(x, routing))  # of this rank's experts, one expert after the other
        tokens, experts = routing.sources(self.group.rank)
        return self.down(rows * scores[tokens, experts].to(rows.dtype).unsqueeze(1), routing)


def main() -> None:
    local_rank, local_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))  # set by torchrun
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_ranks else torch.device("cpu")
    if on_gpu := device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = cp.Group(device=device)
    torch.manual_seed(0)  # ranks of one seed have the same router, and each its part of the same experts
    mixture = MixtureOfExperts(group, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = torch.optim.AdamW(mixture.parameters(), lr=1e-2)
    whole = torch.randn(TOKENS, HIDDEN).to(device)
    x = whole.chunk(group.size)[group.rank].to(mixture.up.weight.dtype)
    target = whole.flip(-1).chunk(group.size)[group.rank]
    # Where this rank fails, the others hear why.
    with group.failing_together():
        for step in range(STEPS):
            loss = (mixture(x).float() - target).square().sum() / whole.numel()
            optimizer.zero_grad()
            loss.backward()
            # The experts here have seen the tokens of all ranks; of the router every rank has the gradient of its own tokens.
            dist.all_reduce(mixture.router.weight.grad)
            optimizer.step()
            dist.all_reduce(total := loss.detach())
            if group.rank == 0:
                print(f"step {step}: loss {total:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
