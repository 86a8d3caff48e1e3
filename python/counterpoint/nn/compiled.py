"""The product of a tensor-parallel linear layer as an operator of `torch.compile`, forward and backward.

Gradients of weights are results of it, or there are none: layers that add them to `main_grad`, or leave them for later, do so
outside of what is compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from counterpoint.nn.product import dense, forward, of_number, written

_library = torch.library.Library("counterpoint", "FRAGMENT")
_library.define(
    "product(Tensor x, Tensor[] weights, Tensor[] biases, SymInt rows, str gradient, SymInt layer) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "product_backward(Tensor[] dys, Tensor x, Tensor[] weights, bool bias, str gradient, SymInt layer) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _product(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], rows: int, gradient: str, layer: int
) -> list[torch.Tensor]:
    ys, *_ = forward(of_number(layer), x, weights, biases, gradient)
    return [*ys]


def _product_backward(
    dys: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], bias: bool, gradient: str, layer: int
) -> list[torch.Tensor]:
    own, x, read, dys = of_number(layer), dense(x), [dense(weight) for weight in weights], [dense(dy) for dy in dys]
    key = own.key(own.rows(x)[0], bias, x.dtype, gradient)
    dx = torch.empty_like(x)
    tensors = {"dx": dx} | own.named("dy", dys) | own.named("weight", read)
    if gradient == "written":
        dweights, dbiases = written(own, key, tensors | {"x": x}, read)
        return [dx, *dweights, *dbiases]
    own.call(key, "backward", tensors)
    # The engine sums a bias together with the gradient of its weight.
    return [dx, *(dy.sum(0) for dy in dys if bias)]


_library.impl("product", _product, "CompositeExplicitAutograd")
_library.impl("product_backward", _product_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("counterpoint::product", lib=_library)  # type: ignore[untyped-decorator]
def _product_shapes(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], rows: int, gradient: str, layer: int
) -> list[torch.Tensor]:
    return [x.new_empty((rows, weight.shape[0])) for weight in weights]


@torch.library.register_fake("counterpoint::product_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_shapes(
    dys: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], bias: bool, gradient: str, layer: int
) -> list[torch.Tensor]:
    of_weights = [weight.new_empty(weight.shape) for weight in weights if gradient == "written"]
    return [x.new_empty(x.shape), *of_weights, *(weight.new_empty(weight.shape[0]) for weight in weights if bias)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, _, ctx.gradient, ctx.layer = inputs
    ctx.save_for_backward(x, *weights)
    ctx.biases = len(biases)


def _differentiate(ctx: Any, dys: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    made = torch.ops.counterpoint.product_backward(dys, x, weights, ctx.biases > 0, ctx.gradient, ctx.layer)
    dx, of_weights, of_biases = made[0], made[1 : len(made) - ctx.biases], made[len(made) - ctx.biases :]
    return dx, of_weights or [None] * len(weights), of_biases, None, None, None


torch.library.register_autograd("counterpoint::product", _differentiate, setup_context=_keep, lib=_library)
