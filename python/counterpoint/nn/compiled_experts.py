"""Layers of experts as operators of `torch.compile`: a layer and a routing are numbers there, so that a new routing each step
compiles nothing again."""

from __future__ import annotations

from typing import Any

import torch

from counterpoint._native import Routing
from counterpoint.collectives import dense
from counterpoint.errors import TensorError
from counterpoint.lookup import kept_by
from counterpoint.nn.experts import backward, forward, of_number
from counterpoint.nn.product import check_itself, make_dummy, say_added

_library = torch.library.Library("counterpoint", "FRAGMENT")
_NUMBERS = "SymInt routing, SymInt layer"
_TAGS = (torch.Tag.needs_fixed_stride_order,)
# The result has `rows` rows; with it comes a tensor that keeps the routing until the backward has run.
_library.define(
    f"expert_product(Tensor x, Tensor weight, Tensor[] into, SymInt rows, str gradient, str dummy, {_NUMBERS})"
    " -> (Tensor, Tensor)",
    tags=_TAGS,
)
_BACKWARD = "Tensor dy, Tensor x, Tensor weight, Tensor kept"
_library.define(f"expert_product_backward({_BACKWARD}, str gradient, {_NUMBERS}) -> Tensor[]", tags=_TAGS)
_library.define(
    f"expert_product_backward_into({_BACKWARD}, Tensor(a!) dx, Tensor(b!) main_grad, str gradient, str dummy, {_NUMBERS}) -> ()",
    tags=_TAGS,
)
_library.define(f"expert_sources(Tensor like, SymInt rows, {_NUMBERS}) -> (Tensor, Tensor)")


def _routing(number: int) -> Routing:
    routing = Routing.of_number(number)
    if routing is None:
        raise TensorError(f"routing {number} is gone; keep a reference to a routing as long as a compiled call may use it")
    return routing


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    into: list[torch.Tensor],
    rows: int,
    gradient: str,
    dummy: str,
    routing: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    own, given = of_number(layer), _routing(routing)
    own._check(x, weight, given)
    return forward(own, x, weight, given, gradient)[0], kept_by(x, given)


def _tensors(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"dy": dense(dy), "weight": dense(weight).view(-1, weight.shape[2]), "dx": dx, "x": dense(x)}


def _product_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, gradient: str, routing: int, layer: int
) -> list[torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = backward(of_number(layer), _routing(routing), gradient, _tensors(dy, x, weight, dx), weight, None)
    return [dx] if dweight is None else [dx, dweight]


def _product_backward_into(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    dx: torch.Tensor,
    main_grad: torch.Tensor,
    gradient: str,
    dummy: str,
    routing: int,
    layer: int,
) -> None:
    check_itself([weight], dummy != "none")
    say_added(weight, dummy)
    backward(of_number(layer), _routing(routing), gradient, _tensors(dy, x, weight, dx), weight, main_grad)


def _sources(like: torch.Tensor, rows: int, routing: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return of_number(layer).sources(_routing(routing))


def _product_shapes(x: torch.Tensor, weight: torch.Tensor, into: Any, rows: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((rows, weight.shape[1])), x.new_empty(0)


def _backward_shapes(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, gradient: str, *_: Any
) -> list[torch.Tensor]:
    return [of.new_empty(of.shape) for of in ((x,) if gradient == "frozen" else (x, weight))]


def _sources_shapes(like: torch.Tensor, rows: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_empty(rows, dtype=torch.int64), like.new_empty(rows, dtype=torch.int64)


for _name, _run, _shapes in (
    ("expert_product", _product, _product_shapes),
    ("expert_product_backward", _product_backward, _backward_shapes),
    ("expert_product_backward_into", _product_backward_into, lambda *_: None),
    ("expert_sources", _sources, _sources_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"counterpoint::{_name}", _shapes, lib=_library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, ctx.into, _, ctx.gradient, ctx.dummy, *ctx.numbers = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    x, weight, kept = ctx.saved_tensors
    rest = [None] * len(ctx.into), None, None, None, None, None
    operators = torch.ops.counterpoint
    if not ctx.into:
        dx, *of_weight = operators.expert_product_backward(dy, x, weight, kept, ctx.gradient, *ctx.numbers)
        return dx, of_weight[0] if of_weight else None, *rest
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    given = dx, ctx.into[0], ctx.gradient, ctx.dummy, *ctx.numbers
    operators.expert_product_backward_into(dy, x, weight, kept, *given)
    return dx, make_dummy(weight, ctx.dummy), *rest


torch.library.register_autograd("counterpoint::expert_product", _differentiate, setup_context=_keep, lib=_library)
