"""cudnn.flex_attention (nvidia-cudnn-frontend with its `cutedsl` extra): masks as functions of a row that give intervals of columns."""

from contextlib import nullcontext

from common.pytorch import torch
from one_gpu.tensors import PASSES


class CudnnFlex:
    """`flat`: documents are intervals of one sequence. `thd`: packed documents are sequences of their own."""

    within = staticmethod(nullcontext)

    def __init__(self, mask, tensors, form):
        from cudnn.flex_attention import create_mask_plan, execution

        self.execution = execution
        is_flat = form == "flat"
        shaped = (lambda x: x[None]) if is_flat else (lambda x: x)
        self.rows = (lambda x: x[0]) if is_flat else (lambda x: x)
        self.q, self.k, self.v, self.dout = (shaped(x) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
        options = {}
        if not is_flat:
            cu_seqlens, longest = mask.cu_seqlens(), max(mask.lengths)
            options = {f"{what}_{x}": value for what, value in (("cu_seqlens", cu_seqlens), ("max_seqlen", longest)) for x in "qk"}
        self.plan = create_mask_plan(intervals(mask, is_flat), self.q, self.k, self.v, build_backward=True, **options)
        self.saved = None

    def attend(self):
        out, lse, _ = self.execution._flex_attention_forward(self.q, self.k, self.v, mask_plan=self.plan, return_lse=True)
        return out, lse

    def forward(self):
        return self.attend()[:1]

    def backward(self):
        if self.saved is None:
            self.saved = self.attend()
        out, lse = self.saved
        return self.execution._flex_attention_backward(self.q, self.k, self.v, out, self.dout, lse, mask_plan=self.plan)


def intervals(mask, is_flat):
    """Columns [0, f0) and [f1, f2) of each row, those of its document where that is a sequence."""
    lo, hi = (bound.to(torch.int32) for bound in (mask.lo, mask.hi))
    if not is_flat:
        start = mask.start.to(torch.int32)
        lo, hi = lo - start, hi - start
    functions = [torch.zeros_like(lo), lo, hi] if bool(lo.any()) else [hi]
    return torch.stack(functions)[None].contiguous()


def cudnn_flex(mask, tensors):
    for form in ("flat", "thd") if mask.name.startswith("varlen") else ("flat",):
        yield form, lambda form=form: CudnnFlex(mask, tensors, form), PASSES
