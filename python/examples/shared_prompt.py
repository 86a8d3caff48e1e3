"""A batch of reinforcement learning: answers to one prompt, which is computed once for all of them.

    torchrun --nproc-per-node 2 python/examples/shared_prompt.py

The prompt and its answers lie in one sequence. Each answer sees the prompt and itself, as a tree in which the answers are
branches; its positions go on where the prompt ends. Compared here with what is done without such a mask: one sequence an answer,
each with a prompt of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import counterpoint as cp

PROMPT, ANSWERS, HEADS, HEAD_DIM = 700, [120, 64, 180, 96], 4, 16


def main() -> None:
    dist.init_process_group("gloo")
    group = cp.Group()
    # Segment 0 is the prompt, and the parent of all others.
    mask = cp.Mask.prefix_tree([-1] + [0] * len(ANSWERS), [PROMPT, *ANSWERS])
    positions = torch.cat([torch.arange(PROMPT), *(torch.arange(PROMPT, PROMPT + length) for length in ANSWERS)])
    torch.manual_seed(0)
    q, k, v = (torch.randn(mask.seqlen_q, HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(3))

    plan = group.plan(mask, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float64)
    local_positions = plan.dispatch(positions)  # what rotary embeddings of the local rows take
    assert len(local_positions) == plan.q_rows
    out, _ = cp.attention(*(plan.dispatch(x) for x in (q, k, v)), plan)
    together = plan.undispatch(out)

    start, pairs = PROMPT, 0
    for length in ANSWERS:
        rows = torch.cat([torch.arange(PROMPT), torch.arange(start, start + length)])
        causal = cp.Mask.causal(len(rows))
        alone, _ = cp.flex_attention(q[rows], k[rows], v[rows], causal)
        torch.testing.assert_close(together[start : start + length], alone[PROMPT:], rtol=1e-10, atol=1e-12)
        start, pairs = start + length, pairs + causal.area
    if group.rank == 0:
        print(f"{plan}\nthe same as {len(ANSWERS)} sequences, with {mask.area / pairs:.0%} of their pairs")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
