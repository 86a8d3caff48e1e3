"""PyTorch's own attentions."""

from contextlib import nullcontext
from functools import partial

from common.pytorch import torch
from one_gpu.masks import WINDOW
from one_gpu.tensors import PASSES
from torch.nn.attention import SDPBackend, sdpa_kernel


class Autograd:
    """A function of q, k and v through autograd, as its users call it."""

    def __init__(self, leaves, dout, attend, within=nullcontext):
        self.leaves = [x.detach().requires_grad_() for x in leaves]
        self.dout, self.attend, self.within = dout, attend, within
        self.out = None

    def forward(self):
        with torch.no_grad():
            return (self.attend(*self.leaves),)

    def backward(self):
        if self.out is None:
            self.out = self.attend(*self.leaves)
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    @staticmethod
    def rows(x):
        return x


class Sdpa(Autograd):
    """A function of tensors that are [batch, heads, rows, dim]."""

    def __init__(self, tensors, attend, within=nullcontext):
        batch = lambda x: x.transpose(0, 1)[None]
        super().__init__(map(batch, (tensors.q, tensors.k, tensors.v)), batch(tensors.dout), attend, within)

    @staticmethod
    def rows(x):
        return x[0].transpose(0, 1)


def cudnn(mask, tensors):
    if mask.name in ("full", "causal"):
        options = {"is_causal": mask.name == "causal", "enable_gqa": tensors.shape.is_grouped}
        attend = partial(torch.nn.functional.scaled_dot_product_attention, **options)
        yield "", lambda: Sdpa(tensors, attend, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)), PASSES


class Flash:
    """PyTorch's flash backend by its own operators, which have the varlen form and the window."""

    within = staticmethod(nullcontext)

    def __init__(self, mask, tensors):
        self.t = tensors
        self.scale = tensors.shape.head_dim**-0.5
        varlen = mask.name.startswith("varlen")
        pack = (lambda x: x) if varlen else (lambda x: x[None])
        self.rows = (lambda x: x) if varlen else (lambda x: x[0])
        self.q, self.k, self.v, self.dout = (pack(x) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
        cu_seqlens = mask.cu_seqlens() if varlen else None
        longest = max(mask.lengths)
        window = (WINDOW - 1, 0) if mask.name == "sw_causal" else (None, None)
        self.lengths = (cu_seqlens, cu_seqlens, longest, longest)
        self.causal = mask.name.endswith("causal")
        self.options = {"scale": self.scale, "window_size_left": window[0], "window_size_right": window[1]}
        self.saved = None

    def run(self):
        return torch.ops.aten._flash_attention_forward(
            self.q, self.k, self.v, *self.lengths, 0.0, self.causal, False, **self.options
        )

    def forward(self):
        return self.run()[:1]

    def backward(self):
        if self.saved is None:
            self.saved = self.run()
        out, lse, state, unused, _ = self.saved
        return torch.ops.aten._flash_attention_backward(
            self.dout, self.q, self.k, self.v, out, lse, *self.lengths, 0.0, self.causal, state, unused, **self.options
        )


def flash(mask, tensors):
    if not mask.name.endswith("block_causal"):
        yield "", lambda: Flash(mask, tensors), PASSES


_compiled_flex = None


def flex(mask, tensors):
    global _compiled_flex
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _compiled_flex is None:
        torch._dynamo.config.recompile_limit = 1000
        torch._dynamo.config.accumulated_recompile_limit = 1000
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    mod, n = mask.flex_mod(), mask.seqlen
    block_mask = create_block_mask(mod, None, None, n, n, device="cuda") if mod else None
    attend = partial(_compiled_flex, block_mask=block_mask, enable_gqa=tensors.shape.is_grouped)
    yield "", lambda: Sdpa(tensors, attend), PASSES


BACKENDS = {"cudnn": cudnn, "flash": flash, "flex": flex}
