"""The product of a tensor-parallel linear layer as an operator of `torch.compile`, forward and backward.

Gradients of weights are results of its backward, or there are none, or another operator adds them to `main_grad`, which it says
that it writes, or leaves them for later.
"""

from __future__ import annotations

from typing import Any

import torch

from counterpoint.collectives import dense
from counterpoint.nn.product import accumulate, check_itself, forward, leave, make_dummy, of_number, say_added, written

_library = torch.library.Library("counterpoint", "FRAGMENT")
_library.define(
    "product(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] into, SymInt rows, str gradient, str dummies, SymInt layer)"
    " -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
# An operator that writes what it is given has no results of its own: PyTorch would take them for views of that.
_library.define(
    "product_backward_into(Tensor[] dys, Tensor x, Tensor[] weights, Tensor(a!)[] made, Tensor(b!)[] into, bool bias,"
    " str gradient, str dummies, SymInt layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "product_backward(Tensor[] dys, Tensor x, Tensor[] weights, bool bias, str gradient, SymInt layer) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _product(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    into: list[torch.Tensor],
    rows: int,
    gradient: str,
    dummies: str,
    layer: int,
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


def _product_backward_into(
    dys: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    made: list[torch.Tensor],
    into: list[torch.Tensor],
    bias: bool,
    gradient: str,
    dummies: str,
    layer: int,
) -> None:
    own, x, read, dys = of_number(layer), dense(x), [dense(weight) for weight in weights], [dense(dy) for dy in dys]
    key = own.key(own.rows(x)[0], bias, x.dtype, gradient)
    tensors = {"dx": made[0]} | own.named("dy", dys) | own.named("weight", read) | {"x": x}
    check_itself(weights, not gradient.startswith("added") or not {*dummies.split(",")} <= {"none"})
    if gradient.startswith("deferred"):
        # Copies wait: a compiled step uses the memory of its tensors again.
        dys = [dy.clone() for dy in dys]
        leave(own, key, tensors | own.named("dy", dys) | {"x": x.clone()}, dys, weights)
        return
    for weight, kind in zip(weights, dummies.split(","), strict=True):
        say_added(weight, kind)
    for dbias, total in zip(made[1:], accumulate(own, key, tensors, weights, into), strict=True):
        dbias.copy_(total)


_library.impl("product", _product, "CompositeExplicitAutograd")
_library.impl("product_backward_into", _product_backward_into, "CompositeExplicitAutograd")
torch.library.register_fake("counterpoint::product_backward_into", lambda *_: None, lib=_library)
_library.impl("product_backward", _product_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("counterpoint::product", lib=_library)  # type: ignore[untyped-decorator]
def _product_shapes(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], into: list[torch.Tensor], rows: int, *_: Any
) -> list[torch.Tensor]:
    return [x.new_empty((rows, weight.shape[0])) for weight in weights]


@torch.library.register_fake("counterpoint::product_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_shapes(
    dys: list[torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], bias: bool, gradient: str, layer: int
) -> list[torch.Tensor]:
    of_weights = [weight.new_empty(weight.shape) for weight in weights if gradient == "written"]
    return [x.new_empty(x.shape), *of_weights, *(weight.new_empty(weight.shape[0]) for weight in weights if bias)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, ctx.into, _, ctx.gradient, ctx.dummies, ctx.layer = inputs
    ctx.save_for_backward(x, *weights)
    ctx.biases = len(biases)


def _differentiate(ctx: Any, dys: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    rest = [None] * len(ctx.into), None, None, None, None
    operators = torch.ops.counterpoint
    if not ctx.into:
        made = operators.product_backward(dys, x, weights, ctx.biases > 0, ctx.gradient, ctx.layer)
        dx, of_weights, of_biases = made[0], made[1 : len(made) - ctx.biases], made[len(made) - ctx.biases :]
        return dx, of_weights or [None] * len(weights), of_biases, *rest
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dbiases = [weight.new_empty(weight.shape[0]) for weight in weights if ctx.biases]
    given = ctx.biases > 0, ctx.gradient, ctx.dummies, ctx.layer
    operators.product_backward_into(dys, x, weights, [dx, *dbiases], ctx.into, *given)
    kinds = ctx.dummies.split(",") if ctx.dummies else ["none"] * len(weights)
    return dx, [make_dummy(weight, kind) for weight, kind in zip(weights, kinds, strict=True)], dbiases, *rest


torch.library.register_autograd("counterpoint::product", _differentiate, setup_context=_keep, lib=_library)
