"""Ways to compute attention on rows that are sharded over ranks: q, k, v [tokens of a rank, heads, dim] to out."""

from contextlib import nullcontext

from common.pytorch import dist, torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Scatter(torch.autograd.Function):
    """[tokens / ranks, heads, dim] to [tokens, heads / ranks, dim], and back in the backward."""

    @staticmethod
    def forward(ctx, x):
        return scatter_heads(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_heads(grad)


class Gather(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx, x):
        return gather_heads(x)

    @staticmethod
    def backward(ctx, grad):
        return scatter_heads(grad)


class AllGatherRows(torch.autograd.Function):
    """[tokens / ranks, ...] to [tokens, ...]; the backward sums over ranks."""

    @staticmethod
    def forward(ctx, x):
        whole = x.new_empty((x.shape[0] * dist.get_world_size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty((grad.shape[0] // dist.get_world_size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous())
        return part


def scatter_heads(x):
    ranks, (rows, heads, dim) = dist.get_world_size(), x.shape
    send = x.view(rows, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received.view(ranks * rows, heads // ranks, dim)


def gather_heads(x):
    ranks, (tokens, heads, dim) = dist.get_world_size(), x.shape
    received = torch.empty((ranks, tokens // ranks, heads, dim), dtype=x.dtype, device=x.device)
    dist.all_to_all_single(received, x.contiguous())
    return received.transpose(0, 1).reshape(tokens // ranks, ranks * heads, dim)


def attention(q, k, v, causal):
    """cuDNN on [rows, heads, dim]; on the CPU what there is."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def ulysses(q, k, v, causal):
    return Gather.apply(attention(Scatter.apply(q), Scatter.apply(k), Scatter.apply(v), causal))


def all_gather(q, k, v, causal):
    return attention(q, AllGatherRows.apply(k), AllGatherRows.apply(v), causal)


WAYS = {"ulysses": ulysses, "all_gather": all_gather}
