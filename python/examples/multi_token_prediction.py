"""Trains a small model that predicts the next token and the one after it, on a sequence that is sharded over ranks.

    torchrun --nproc-per-node 2 python/examples/multi_token_prediction.py

The rows of a rank are chunks from all over the sequence. `plan.roll` brings to each what is next in the sequence, wherever it
lies: labels, and for the second head the embeddings of the next tokens, through which gradients flow back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import counterpoint as cp

LENGTHS, WORDS, WIDTH, HEADS, STEPS = [190, 66, 256], 29, 64, 4, 12


class Model(torch.nn.Module):
    """One layer of attention, a head for the next token, and a module with a head for the token after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.join = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WORDS) for _ in range(2))

    def forward(self, tokens: torch.Tensor, plan: cp.Plan) -> list[torch.Tensor]:
        """Logits of the local rows, for one and for two tokens ahead."""
        embedded = self.embedding(tokens)
        q, k, v = self.qkv(embedded).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        trunk = embedded + self.out(cp.attention(q, k, v, plan)[0].flatten(1))
        second = torch.nn.functional.gelu(self.join(torch.cat([trunk, plan.roll(embedded, -1)], -1)))
        return [head(hidden) for head, hidden in zip(self.heads, (trunk, second), strict=True)]


def labels(tokens: torch.Tensor, positions: torch.Tensor, plan: cp.Plan, ahead: int) -> torch.Tensor:
    """The tokens that many places on, -100 where the document ends before."""
    goes_on = plan.roll(positions, -ahead) == positions + ahead
    return torch.where(goes_on, plan.roll(tokens, -ahead), -100)


def main() -> None:
    dist.init_process_group("gloo")
    group = cp.Group()
    torch.manual_seed(0)
    mask = cp.Mask.varlen([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], causal=True)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = (3 * positions + torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))) % WORDS
    model = Model()
    plan = group.plan(mask, heads=HEADS, head_dim=WIDTH // HEADS, dtype=torch.float32)
    own, at = plan.dispatch(tokens), plan.dispatch(positions)
    wanted = [labels(own, at, plan, ahead) for ahead in (1, 2)]
    for ahead, of_rows in zip((1, 2), wanted, strict=True):
        whole = plan.undispatch(of_rows)
        assert torch.equal(whole[: LENGTHS[0] - ahead], tokens[ahead : LENGTHS[0]]) and (whole == -100).sum() == ahead * len(
            LENGTHS
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with group.failing_together():
        for step in range(STEPS):
            losses = [
                torch.nn.functional.cross_entropy(logits, of_rows, ignore_index=-100, reduction="sum") / sum(LENGTHS)
                for logits, of_rows in zip(model(own, plan), wanted, strict=True)
            ]
            optimizer.zero_grad()
            sum(losses).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            dist.all_reduce(total := torch.stack(losses).detach())
            if group.rank == 0:
                print(f"step {step}: loss of the next token {total[0]:.4f}, of the one after it {total[1]:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
