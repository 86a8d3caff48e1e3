"""A sample of a pass's results against f32 products."""

from common.pytorch import dist, torch
from common.ranks import worst
from layers.layer import wait

# Rows of a result that are compared, and how many times the rounding of a sum's shares and of itself it may err.
SAMPLED_ROWS = 16
ERROR_FACTOR = 4.0


def whole_rows(layer, part):
    """All tokens of a tensor that is split by tokens."""
    rows, handle = layer.gathered(part)
    wait(handle)
    return rows


def sampled(rows, count=SAMPLED_ROWS):
    return torch.linspace(0, rows - 1, min(count, rows)).long().tolist()


def error_of(layer, direction, results):
    """The largest ratio of a result's error to its bound, over all ranks."""
    x = whole_rows(layer, layer.x) if layer.kind == "column" else layer.x
    dy = layer.dy if layer.kind == "column" else whole_rows(layer, layer.dy)
    ratios = []

    def compare(found, expected, shares):
        bound = ERROR_FACTOR * 2.0**-9 * (expected.norm() + shares)
        ratios.append(((found.float() - expected).norm() / bound).item())

    def products(a, b, sums):
        """Rows of a b, summed over ranks where they are, and the norm of what was rounded before."""
        product = a.float() @ b.float()
        if not sums:
            return product, 0.0
        squares = product.square().sum()
        dist.all_reduce(product)
        dist.all_reduce(squares)
        return product, squares.sqrt()

    def local(sums):
        """Rows of a result that every rank looks at, as tokens and as rows of its own part."""
        split = sums and layer.sequence_parallel
        own = layer.tokens // layer.ranks
        tokens = sampled(layer.tokens)
        mine = [t for t in tokens if not split or t // own == layer.rank]
        return tokens, [tokens.index(t) for t in mine], [t - layer.rank * own if split else t for t in mine]

    if direction == "forward":
        sums = layer.kind == "row"
        tokens, picked, rows = local(sums)
        expected, shares = products(x[tokens], layer.weight.t(), sums)
        compare(results[0][rows], expected[picked], shares)
    else:
        sums = layer.kind == "column"
        tokens, picked, rows = local(sums)
        expected, shares = products(dy[tokens], layer.weight, sums)
        compare(results[0][rows], expected[picked], shares)
        features = sampled(layer.weight.shape[0])
        compare(results[1][features], dy[:, features].t().float() @ x.float(), 0.0)
    return worst(ratios)
