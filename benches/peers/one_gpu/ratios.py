"""Counterpoint's speed over that of every peer, and published figures of one that is not part of PyTorch."""

import json
import statistics
from pathlib import Path

from one_gpu.backends import PEERS
from one_gpu.rows import key, of, tflops


class Published:
    """FFA's figures of another day, scaled by cuDNN's of today over cuDNN's of that day."""

    def __init__(self, rows):
        figures = Path(__file__).resolve().parents[1] / "published.json"
        self.rows = json.loads(figures.read_text())["rows"]
        self.now = of(rows, by="cudnn")

    def ffa(self, which, name, shape):
        if shape.dtype != "bf16":
            return None
        wanted = key(which, name, shape)
        wanted.pop("dtype")
        found = of(self.rows, **wanted)
        if not found:
            return None
        # By the same mask where cuDNN has it, else by those that it has.
        names = [name] if found[0]["cudnn"] else ["full", "causal"]
        scales = []
        for other in names:
            now = tflops(self.now, **(wanted | {"mask": other}))
            then = of(self.rows, **(wanted | {"mask": other}))
            if now and then:
                scales.append(now / then[0]["cudnn"])
        return found[0]["ffa_tuned"] * statistics.geometric_mean(scales) if scales else None


def goals(rows, shapes, masks, passes, clock):
    """Counterpoint over every peer: one record a (mask, shape, pass)."""
    published = Published(rows) if clock == "device" else None
    records = []
    for shape in shapes:
        for which in passes:
            for name in masks:
                wanted = key(which, name, shape)
                figures = {peer: tflops(rows, by=peer, **wanted) for peer in ("counterpoint", *PEERS)}
                figures["ffa"] = published.ffa(which, name, shape) if published else None
                mine = figures["counterpoint"]
                ratios = {
                    peer: mine / figure
                    for peer, figure in figures.items()
                    if mine and figure and peer != "counterpoint"
                }
                records.append({**wanted, "tflops": figures, "ratios": ratios})
    return records
