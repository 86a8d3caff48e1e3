"""Who computes the products of experts in one launch: PyTorch and DeepGEMM, results checked."""

from contextlib import nullcontext
from functools import partial

from common.interleaved import ready
from common.pytorch import torch
from experts.problem import Tensors
from one_gpu.clock import ClockedWay


class GroupedMm:
    """PyTorch's: one launch behind a small one that reads where each expert's rows end. Gradients of weights are stored in bf16."""

    adds = False

    def __init__(self, tensors):
        shape = tensors.shape
        grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        ends = torch.tensor([end for _, end in shape.ranges()], dtype=torch.int32, device=tensors.a.device)
        a = tensors.a.T if shape.layout == "tn" else tensors.a
        b = tensors.b.transpose(1, 2) if shape.layout == "nt" else tensors.b
        self.shape, self.run = shape, partial(grouped, a, b, offs=ends)

    def results(self):
        found = self.run()
        return list(found) if self.shape.layout == "tn" else [found[begin:end] for begin, end in self.shape.ranges()]


class DeepGemm:
    """DeepGEMM's: every expert's rows are filled up to its alignment with zeros."""

    def __init__(self, tensors, by_ends):
        import deep_gemm

        shape, device = tensors.shape, tensors.a.device
        self.shape, self.adds = shape, shape.layout == "tn"
        alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
        self.filled = [-(-count // alignment) * alignment for count in shape.rows]
        integers = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        a = self.spread(tensors.a)
        if self.adds:
            self.d = tensors.held.clone()
            arguments = (a, self.spread(tensors.b), self.d, self.filled, integers(self.filled), self.d)
            self.run = partial(deep_gemm.k_grouped_bf16_gemm_tn_contiguous, *arguments)
            return
        self.d = torch.empty(sum(self.filled), shape.n, dtype=torch.bfloat16, device=device)
        if by_ends:
            layout = integers([first + count for first, count in zip(self.firsts(), shape.rows)])
        else:
            owners = [[expert] * count + [-1] * (filled - count) for expert, (count, filled) in enumerate(zip(shape.rows, self.filled))]
            layout = integers(sum(owners, []))
        grouped = getattr(deep_gemm, f"m_grouped_bf16_gemm_{shape.layout}_contiguous")
        self.run = partial(grouped, a, tensors.b, self.d, layout, use_psum_layout=by_ends)

    def firsts(self):
        """The first row of each expert where they are filled up."""
        return [sum(self.filled[:expert]) for expert in range(len(self.filled))]

    def spread(self, rows):
        """Rows of experts, each filled up."""
        out = rows.new_zeros(sum(self.filled), rows.shape[1])
        for first, (begin, end) in zip(self.firsts(), self.shape.ranges()):
            out[first : first + end - begin] = rows[begin:end]
        return out

    def results(self):
        self.run()
        if self.adds:
            return list(self.d)
        return [self.d[first : first + count] for first, count in zip(self.firsts(), self.shape.rows)]


def torch_ways(tensors):
    yield "", partial(GroupedMm, tensors)


def deepgemm_ways(tensors):
    if tensors.shape.layout == "tn":
        yield "", partial(DeepGemm, tensors, by_ends=False)
        return
    # An expert's number at each row, or where each expert's rows end.
    yield "rows", partial(DeepGemm, tensors, by_ends=False)
    yield "ends", partial(DeepGemm, tensors, by_ends=True)


# Of each the names of its variants, and what makes one: it has `run()`, `results()` of a first run, a product of each expert, and `adds`.
PEERS = {"torch": torch_ways, "deepgemm": deepgemm_ways}


def ways_of(shape, peers, clock):
    """The ways of all peers, one after the other."""
    tensors = Tensors(shape)
    for peer in peers:
        for variant, make in PEERS[peer](tensors):
            prepare = partial(ways_by, peer, variant, make, tensors, clock)
            yield from ready(prepare, peer=peer, variant=variant, shape=shape)


def ways_by(peer, variant, make, tensors, clock):
    """One variant."""
    runner = make()
    error = tensors.error_over_bound(runner.results(), runner.adds)
    yield ClockedWay(clock, runner.run, nullcontext, by=peer, variant=variant, adds=runner.adds, error_over_bound=error)
