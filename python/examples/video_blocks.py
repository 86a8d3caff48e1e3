"""Attention of a video model that generates frame by frame: a frame sees all of itself and of the frames before it.

    python python/examples/video_blocks.py

On one device it takes the place of FlexAttention with a mask function. On several ranks the same mask is planned: here four, all
inside this process, which is how a notebook shows who would own and send what.
"""

from __future__ import annotations

import torch

import counterpoint as cp

FRAMES, TOKENS_OF_A_FRAME, HEADS, HEAD_DIM = 12, 60, 4, 32


def block_causal(frames: int, tokens: int, window: int) -> cp.Mask:
    """Frames see themselves and the `window` frames before, and all of them the first, which anchors the scene."""
    slices = [(frame, max(0, frame - window)) for frame in range(frames)]
    queries = [(frame * tokens, (frame + 1) * tokens) for frame, _ in slices]
    keys = [(first * tokens, (frame + 1) * tokens) for frame, first in slices]
    anchored = [query for query, (_, first) in zip(queries, slices, strict=True) if first > 0]
    return cp.Mask.from_slices(
        queries + anchored,
        keys + [(0, tokens)] * len(anchored),
        ["full"] * (len(queries) + len(anchored)),
        seqlen_q=frames * tokens,
        seqlen_k=frames * tokens,
    )


def main() -> None:
    mask = block_causal(FRAMES, TOKENS_OF_A_FRAME, window=4)
    print(mask.picture(width=48, height=24))
    torch.manual_seed(0)
    q, k, v = (torch.randn(mask.seqlen_q, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))

    out, _ = cp.flex_attention(q, k, v, mask)
    alone = torch.autograd.grad(out.square().sum(), (q, k, v))

    group = cp.LocalGroup(4)
    plan = group.plan(mask, heads=HEADS, head_dim=HEAD_DIM, dtype=q.dtype, chunk=TOKENS_OF_A_FRAME)
    local, _ = cp.attention(plan.dispatch(q), plan.dispatch(k, role="k"), plan.dispatch(v, role="k"), plan)
    on_ranks = torch.autograd.grad(plan.undispatch(local).square().sum(), (q, k, v))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(on_ranks, alone, strict=True))
    print(f"{plan}\ngradients on 4 ranks against 1: relative error {error:.1e}")
    assert error < 1e-5
    plan.report("video_blocks.html")
    print("the mask in the colours of the ranks, and predicted timelines: video_blocks.html")


if __name__ == "__main__":
    main()
