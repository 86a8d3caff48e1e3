"""Products of experts: sizes, random tensors, and what their results are compared with."""

from dataclasses import asdict, dataclass

from common.pytorch import torch

LAYOUTS = ["nt", "nn", "tn"]
# Half a unit in the last place.
HALF_UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Shape:
    """The sizes of all experts together, m:n:k, and the rows of each: of m, in tn of k."""

    layout: str
    m: int
    n: int
    k: int
    rows: list

    def __str__(self):
        return f"{self.layout} {self.m} x {self.n} x {self.k}, {len(self.rows)} experts"

    @property
    def flops(self):
        return 2 * self.m * self.n * self.k

    def described(self):
        return {**asdict(self), "experts": len(self.rows)}

    def ranges(self):
        """First row and end of each expert."""
        first = 0
        for count in self.rows:
            yield first, first + count
            first += count


class Tensors:
    """Random operands. nt: a [rows, k], b [experts, n, k]; nn: b [experts, k, n]; tn: a [rows, m], b [rows, n], and `held`, the f32
    gradients [experts, m, n] that some add to."""

    def __init__(self, shape, seed=7):
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(seed)
        normal = lambda *size: torch.randn(*size, generator=generator, device="cuda", dtype=torch.float32)
        draw = lambda *size: normal(*size).to(torch.bfloat16)
        rows, experts = sum(shape.rows), len(shape.rows)
        self.held = None
        if shape.layout == "tn":
            self.a, self.b = draw(rows, shape.m), draw(rows, shape.n)
            self.held = normal(experts, shape.m, shape.n)
        else:
            self.a = draw(rows, shape.k)
            self.b = draw(experts, *((shape.n, shape.k) if shape.layout == "nt" else (shape.k, shape.n)))

    def expected(self, expert, begin, end):
        """An expert's product in f32, without what it is added to, and the length of its sums."""
        with exact():
            if self.shape.layout == "tn":
                return self.a[begin:end].float().T @ self.b[begin:end].float(), end - begin
            weight = self.b[expert].float()
            return self.a[begin:end].float() @ (weight.T if self.shape.layout == "nt" else weight), self.shape.k

    def error_over_bound(self, results, adds):
        """The largest share of an element's bound by which `results` err: an expert's product each, which `adds` to `held` or not. The
        bound is a rounding, and what two sums in f32 lose whose every step of 16 terms may cut off a unit of a partial sum, which is
        taken to be within 4 standard deviations."""
        worst = 0.0
        for expert, ((begin, end), found) in enumerate(zip(self.shape.ranges(), results, strict=True)):
            product, terms = self.expected(expert, begin, end)
            right = product + self.held[expert] if adds else product
            size = torch.maximum(product.abs(), right.abs())
            lost = 2 * (terms / 16 + 2) * 2.0**-23 * (4 * (1.2 * terms) ** 0.5 + size)
            bound = 1.01 * HALF_UNITS[found.dtype] * size + lost
            share = ((found.float() - right).abs() / bound).max().item()
            # Not `max`, which would overlook a NaN.
            worst = worst if share <= worst else share
        return worst


class exact:
    """Within it, f32 products are not rounded to TF32."""

    def __enter__(self):
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_):
        torch.backends.cuda.matmul.allow_tf32 = self.before
