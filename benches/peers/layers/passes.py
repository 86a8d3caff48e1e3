"""A layer's passes as users of PyTorch run them: a forward gives (y,), a backward (dx, dweight)."""

import functools

from common.pytorch import dist, torch
from layers.layer import wait

PEERS = ["megatron", "async_tp"]
PASSES = ["forward", "backward"]


def accumulate(layer, dy, x):
    """main_grad += dy^T x"""
    if has_wide_addmm(dy.device):
        torch.addmm(layer.main_grad, dy.t(), x, out_dtype=torch.float32, out=layer.main_grad)
    else:
        layer.main_grad.add_(torch.mm(dy.t(), x))
    return layer.main_grad


@functools.cache
def has_wide_addmm(device):
    """Whether torch.addmm adds products of bf16 to f32 in place."""
    ones, sums = torch.ones((16, 16), dtype=torch.bfloat16, device=device), torch.ones((16, 16), device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=torch.float32, out=sums)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return bool((sums == 17.0).all())


def megatron_forward(layer):
    if layer.kind == "column":
        x, handle = layer.gathered(layer.x)
        wait(handle)
        return (torch.mm(x, layer.weight.t()),)
    y, handle = layer.summed(torch.mm(layer.x, layer.weight.t()))
    wait(handle)
    return (y,)


def megatron_backward(layer):
    if layer.kind == "column":
        x, gathered = layer.gathered(layer.x)
        shares = torch.mm(layer.dy, layer.weight)
        wait(gathered)
        dx, reduced = layer.summed(shares)
        dweight = accumulate(layer, layer.dy, x)
        wait(reduced)
        return dx, dweight
    dy, gathered = layer.gathered(layer.dy)
    wait(gathered)
    return torch.mm(dy, layer.weight), accumulate(layer, dy, layer.x)


def async_tp_forward(layer):
    group = dist.group.WORLD.group_name
    if layer.kind == "column":
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(layer.x, [layer.weight.t()], 0, group)
        return (y,)
    return (torch.ops.symm_mem.fused_matmul_reduce_scatter(layer.x, layer.weight.t(), "sum", 0, group),)


def async_tp_backward(layer):
    group = dist.group.WORLD.group_name
    if layer.kind == "column":
        x, gathered = layer.gathered(layer.x)
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(layer.dy, layer.weight, "sum", 0, group)
        wait(gathered)
        return dx, accumulate(layer, layer.dy, x)
    dy, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(layer.dy, [layer.weight], 0, group)
    return dx, accumulate(layer, dy, layer.x)


RUNS = {
    ("megatron", "forward"): megatron_forward,
    ("megatron", "backward"): megatron_backward,
    ("async_tp", "forward"): async_tp_forward,
    ("async_tp", "backward"): async_tp_backward,
}
