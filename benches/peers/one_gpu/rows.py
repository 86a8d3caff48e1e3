"""Rows of the comparison: one a peer, mask, shape and pass."""

import statistics

from common.pytorch import torch


def row(peer, which, name, shape, area, seconds, verified):
    median = statistics.median(seconds)
    return {
        "name": f"attention {which}",
        "by": peer,
        "shape": str(shape),
        "dtype": shape.dtype,
        "mask": name,
        "device": torch.cuda.get_device_name(0),
        "ranks": 1,
        "seconds": {
            "count": len(seconds),
            "median": median,
            "min": min(seconds),
            "max": max(seconds),
            "mean": statistics.fmean(seconds),
        },
        "rate": {"tflops": shape.flops(area, which) / median / 1e12},
        "ratio": None,
        "verified": verified and {"error": verified[0], "bound": verified[1]},
        "area": area,
        **key(which, name, shape),
    }


def key(which, name, shape):
    return {
        "mask": name,
        "pass": which,
        "seqlen": shape.seqlen,
        "heads_q": shape.heads_q,
        "heads_kv": shape.heads_kv,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
    }


def of(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def tflops(rows, **wanted):
    found = of(rows, **wanted)
    return found[0]["rate"]["tflops"] if found else None
