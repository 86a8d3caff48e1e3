"""Exact results of some heads, and how far others are from them."""

import math

from common.exact_attention import ERROR_FACTOR, head, head_with_gradients
from common.pytorch import torch


class Reference:
    """f32 results of the first and the last key head with their query heads, in chunks of rows."""

    def __init__(self, mask, tensors, passes):
        shape = tensors.shape
        self.group = shape.heads_q // shape.heads_kv
        self.key_heads = sorted({0, shape.heads_kv - 1})
        self.query_heads = sorted({h for kv in self.key_heads for h in (kv * self.group, (kv + 1) * self.group - 1)})
        self.tensors = {"out": {}, "dq": {}, "dk": {}, "dv": {}}
        if "backward" not in passes:
            for at in self.query_heads:
                self.tensors["out"][at] = head(*self.inputs(tensors, at), mask.lo, mask.hi)
            return
        # Keys need all query heads of their group.
        for kv in self.key_heads:
            for at in range(kv * self.group, (kv + 1) * self.group):
                q, k, v = self.inputs(tensors, at)
                dk = self.tensors["dk"].setdefault(kv, torch.zeros_like(k))
                dv = self.tensors["dv"].setdefault(kv, torch.zeros_like(v))
                dout = tensors.dout[:, at].float()
                out, dq = head_with_gradients(q, k, v, dout, mask.lo, mask.hi, dk, dv)
                if at in self.query_heads:
                    self.tensors["out"][at], self.tensors["dq"][at] = out, dq

    def inputs(self, tensors, at):
        """q, k and v of one query head."""
        kv = at // self.group
        return tensors.q[:, at].float(), tensors.k[:, kv].float(), tensors.v[:, kv].float()

    def error(self, which, results):
        """(error, bound), relative Frobenius, of the tensor that is nearest to its bound."""
        names = ["out"] if which == "forward" else ["dq", "dk", "dv"]
        found = []
        for name, result in zip(names, results):
            squares = [0.0, 0.0, 0.0]
            for at, expected in self.tensors[name].items():
                actual = result[:, at]
                rounded = expected.to(actual.dtype).float()
                for i, value in enumerate((actual.float() - expected, rounded - expected, expected)):
                    squares[i] += float(value.double().square().sum())
            found.append((math.sqrt(squares[0] / squares[2]), ERROR_FACTOR * math.sqrt(squares[1] / squares[2])))
        # What is no number is further off than all others.
        return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])
