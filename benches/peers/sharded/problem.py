"""One rank's rows of attention, what a way takes on them, and whether it is right."""

from common.exact_attention import ERROR_FACTOR, head_with_gradients
from common.pytorch import dist, torch
from common.ranks import worst


class Problem:
    """One rank's rows: q, k, v and dout, with gradients asked for."""

    def __init__(self, tokens, heads, head_dim, device, seed):
        generator = torch.Generator(device=device).manual_seed(seed + dist.get_rank())

        def rows(count):
            shape = (tokens, count, head_dim)
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.q, self.k, self.v = (rows(n).requires_grad_() for n in (heads[0], heads[1], heads[1]))
        self.dout = rows(heads[0])

    def inputs(self):
        return self.q, self.k, self.v


def whole(x):
    """All ranks' rows."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return torch.cat(gathered)


def error_of(problem, out, gradients, causal):
    """The largest ratio of a tensor's error to its bound, over one key head of each rank and all ranks."""
    group = problem.q.shape[1] // problem.k.shape[1]
    ratios = []
    for kv in range(min(dist.get_world_size(), problem.k.shape[1])):
        heads = slice(kv * group, (kv + 1) * group)
        pieces = [problem.q[:, heads], problem.k[:, kv : kv + 1], problem.v[:, kv : kv + 1], problem.dout[:, heads]]
        found = [out[:, heads], gradients[0][:, heads], gradients[1][:, kv : kv + 1], gradients[2][:, kv : kv + 1]]
        pieces = [whole(x.detach()) for x in pieces]
        found = [whole(x.detach()) for x in found]
        if kv == dist.get_rank():
            expected = reference(*pieces, causal)
            ratios += [
                ((x.float() - y).norm() / y.norm()).item() / (ERROR_FACTOR * rounding(y))
                for x, y in zip(found, expected)
            ]
    return worst(ratios)


def rounding(x):
    return ((x.bfloat16().float() - x).norm() / x.norm()).item()


def reference(q, k, v, dout, causal):
    """out, dq, dk and dv of one key head with its query heads, in f32."""
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    rows = torch.arange(q.shape[0], device=q.device)
    lo, hi = torch.zeros_like(rows), rows + 1 if causal else torch.full_like(rows, q.shape[0])
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    heads = [
        head_with_gradients(q[:, h], k[:, 0], v[:, 0], dout[:, h], lo, hi, dk[:, 0], dv[:, 0]) for h in range(q.shape[1])
    ]
    out, dq = (torch.stack(x, 1) for x in zip(*heads))
    return out, dq, dk, dv


def problem_passes(problem, run, causal):
    """A forward and a backward that can run again and again, and the error over its bound."""
    out = run(*problem.inputs(), causal)

    def forward():
        with torch.no_grad():
            return run(*problem.inputs(), causal)

    def backward():
        return torch.autograd.grad(out, problem.inputs(), problem.dout, retain_graph=True)

    return forward, backward, error_of(problem, out, backward(), causal)
