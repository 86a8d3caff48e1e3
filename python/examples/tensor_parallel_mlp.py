"""Trains an MLP whose layers are split over ranks, with sequence parallelism and gradients added to f32.

    torchrun --nproc-per-node 2 python/examples/tensor_parallel_mlp.py

Layers take Megatron-Core's arguments. Each rank has its own tokens outside the MLP; inside it all tokens and a part of the
features. Sums and gathers run under the products: nothing is set for that.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import counterpoint as cp
from counterpoint.nn import ColumnParallelLinear, RowParallelLinear

TOKENS, HIDDEN, STEPS = 64, 32, 6


class MLP(torch.nn.Module):
    """Up, GELU, down."""

    def __init__(self, group: cp.Group) -> None:
        super().__init__()
        settings = {"tp_group": group, "sequence_parallel": True, "gradient_accumulation_fusion": True}
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **settings)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is `[own tokens, HIDDEN]`, and so is what comes out."""
        return self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]


def main() -> None:
    dist.init_process_group("gloo")
    group = cp.Group()
    torch.manual_seed(0)  # each rank keeps its part of the same weights
    mlp = MLP(group)
    for layer in (mlp.up, mlp.down):
        layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32)
    whole = torch.randn(TOKENS, HIDDEN)
    own = slice(group.rank * TOKENS // group.size, (group.rank + 1) * TOKENS // group.size)
    x, target = whole[own], whole.flip(-1)[own]
    with group.failing_together():
        for step in range(STEPS):
            loss = (mlp(x) - target).square().sum() / (TOKENS * HIDDEN)
            loss.backward()
            with torch.no_grad():
                # Of the whole bias behind the sums, each rank has the gradient of its own tokens.
                dist.all_reduce(mlp.down.bias.grad)
                for layer in (mlp.up, mlp.down):
                    layer.weight -= 4 * layer.weight.main_grad
                    layer.weight.main_grad.zero_()
                    layer.bias -= 4 * layer.bias.grad
                    layer.bias.grad = None
            dist.all_reduce(total := loss.detach())
            if group.rank == 0:
                print(f"step {step}: loss {total:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
