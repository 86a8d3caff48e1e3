"""PyTorch's attentions.

Each gives `forward()` -> (out,) and `backward()` -> (dq, dk, dv); `rows` turns them to [rows, heads, dim]."""

from common.pytorch import torch
from one_gpu.masks import WINDOW
from torch.nn.attention import SDPBackend, sdpa_kernel


class Sdpa:
    """A backend of `scaled_dot_product_attention`, through autograd, as its users call it."""

    def __init__(self, mask, tensors, attend):
        batch = lambda x: x.transpose(0, 1)[None]
        self.leaves = [batch(x).detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        self.dout = batch(tensors.dout)
        self.attend = attend
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
        return x[0].transpose(0, 1)


def cudnn(mask, tensors):
    if mask.name not in ("full", "causal"):
        return None
    shape = tensors.shape
    options = {"is_causal": mask.name == "causal", "enable_gqa": shape.heads_q != shape.heads_kv}
    return Sdpa(mask, tensors, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))


class Flash:
    """PyTorch's flash backend by its own operators, which have the varlen form and the window."""

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
    return None if mask.name.endswith("block_causal") else Flash(mask, tensors)


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
    gqa = tensors.shape.heads_q != tensors.shape.heads_kv
    return Sdpa(mask, tensors, lambda q, k, v: _compiled_flex(q, k, v, block_mask=block_mask, enable_gqa=gqa))


# What each makes of a mask and tensors: None where it has no such mask.
PEERS = {"cudnn": cudnn, "flash": flash, "flex": flex}


def backend(name):
    """The context in which a peer runs."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)
