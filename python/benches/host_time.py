"""Host time of calls on so few rows that computing them is nothing: what Python, PyTorch and the engine's enqueueing cost.

    python python/benches/host_time.py [--ranks 2]

Each figure is the fastest of many calls, in microseconds, and the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import counterpoint as cp
from counterpoint import ops
from counterpoint.rows import borrowed


def measured(name: str, call: Callable[[], object], calls: int = 2000) -> None:
    for _ in range(50):
        call()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    print(f"{name:44} {1e6 * min(times):8.1f} {1e6 * statistics.median(times):8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="ranks inside this process")
    parser.add_argument("--rows", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group, rows = cp.LocalGroup(arguments.ranks), arguments.rows
    mask = cp.Mask.causal(rows)
    settings = {"heads": 2, "head_dim": 8, "dtype": "float32"}
    plan = group.plan(mask, **settings)
    q, k, v = (torch.randn(rows, 2, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(rows, 2, 8)
    out, lse = cp.attention(q, k, v, plan)
    print(f"{'us, ' + str(rows) + ' rows, ' + str(arguments.ranks) + ' ranks here':44} {'fastest':>8} {'median':>8}")
    measured("tensors as the engine takes them, three", lambda: [borrowed(x) for x in (q, k, v)])
    measured("shapes and types are checked", lambda: ops.check(plan, q, k, v, None))
    measured("forward, the operator's own code", lambda: ops.run_forward(plan, q, k, v, None))
    measured("backward, the operator's own code", lambda: ops.run_backward(plan, dout, q, k, v, None, out, lse))
    measured("attention(), no gradient", lambda: cp.attention(q, k, v, plan))
    measured("attention(), with gradient", lambda: cp.attention(*leaves, plan))
    measured("attention() and backward", lambda: torch.autograd.grad(cp.attention(*leaves, plan)[0], leaves, dout))
    measured("flex_attention(), a mask that is known", lambda: cp.flex_attention(q, k, v, mask))
    windows = iter(range(10**9))
    measured("a plan for a mask never seen", lambda: group.plan(cp.Mask.sliding_window(rows, next(windows), 0), **settings), 500)


if __name__ == "__main__":
    main()
