"""Attention in f32, which results are compared with."""

import math

from common.pytorch import torch

# A result may err so many times as much as rounding the reference once does. Kernels round the probabilities too, and a
# wrong mask errs a hundred times as much.
ERROR_FACTOR = 4.0
# Query rows that are computed at once.
ROWS = 2048


def head(q, k, v, lo, hi):
    """`out` of one query head; row i sees the columns `lo[i] .. hi[i]`. All are [rows, dim]."""
    out = torch.zeros_like(q)
    for rows, columns, p in _probabilities(q, k, lo, hi):
        out[rows] = p @ v[columns]
    return out


def head_with_gradients(q, k, v, dout, lo, hi, dk, dv):
    """`out` and `dq` of one query head, whose shares are added to `dk` and `dv`."""
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    scale = q.shape[-1] ** -0.5
    for rows, columns, p in _probabilities(q, k, lo, hi):
        out[rows] = p @ v[columns]
        dv[columns] += p.T @ dout[rows]
        delta = (dout[rows] * out[rows]).sum(1, keepdim=True)
        ds = (dout[rows] @ v[columns].T).sub_(delta).mul_(p).mul_(scale)
        dq[rows] = ds @ k[columns]
        dk[columns] += ds.T @ q[rows]
    return out, dq


def _probabilities(q, k, lo, hi):
    """Some rows, the columns that any of them sees, and their probabilities, until all rows are through."""
    scale = q.shape[-1] ** -0.5
    for begin in range(0, q.shape[0], ROWS):
        rows = slice(begin, min(begin + ROWS, q.shape[0]))
        columns = slice(int(lo[rows].min()), int(hi[rows].max()))
        column = torch.arange(columns.start, columns.stop, device=q.device)
        seen = (column >= lo[rows, None]) & (column < hi[rows, None])
        yield rows, columns, torch.softmax((q[rows] @ k[columns].T).mul_(scale).masked_fill_(~seen, -math.inf), 1)
