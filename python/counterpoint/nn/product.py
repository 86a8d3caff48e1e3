"""The product of a tensor-parallel linear layer, with gradients: one call of the engine a pass, on tensors in place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from counterpoint.errors import TensorError
from counterpoint.fitting import accumulator
from counterpoint.rows import borrowed

if TYPE_CHECKING:
    from counterpoint.group import _Group

Kind = Literal["column", "row"]
Key = tuple[str, bool, tuple[int, int, int], bool, str, str, str]


@dataclass
class Layer:
    """A layer on the ranks of a group, as modules share it. Sizes are those of all ranks."""

    group: _Group
    kind: Kind
    sequence_parallel: bool
    in_features: int
    out_features: int
    overlap: str
    fused: bool
    """Gradients of the weight are added to its `main_grad`, where it has one."""
    delayed: bool
    """They wait for `backward_dw`."""
    waiting: deque[tuple[torch.nn.Parameter, Key, dict[str, torch.Tensor]]] = field(default_factory=deque)

    def key(self, tokens: int, bias: bool, dtype: torch.dtype, gradient: str) -> Key:
        sizes = (tokens, self.in_features, self.out_features)
        return (self.kind, self.sequence_parallel, sizes, bias, _name(dtype), gradient, self.overlap)

    def call(self, key: Key, name: str, tensors: dict[str, torch.Tensor]) -> None:
        with self.group._named_errors():
            given = [(name, borrowed(tensor)) for name, tensor in tensors.items()]
            self.group._native.linear(key, name, self.group._stream(), given)

    def rows(self, x: torch.Tensor) -> tuple[int, int]:
        """Tokens of all ranks, and rows of the result, of an `x` of so many rows."""
        size, rows = self.group.size, x.shape[0]
        if not self.sequence_parallel:
            return rows, rows
        if self.kind == "column":
            return rows * size, rows * size
        if rows % size:
            raise TensorError(f"input_ has {rows} tokens, which {size} ranks cannot share equally under sequence parallelism")
        return rows, rows // size

    def backward_dw(self) -> None:
        """Computes the gradients of the weight that wait, the oldest first."""
        while self.waiting:
            weight, key, tensors = self.waiting.popleft()
            main_grad = _main_grad(self, weight)
            if main_grad is not None:
                self.call(key, "weight_gradient", {**tensors, "main_grad": main_grad})
                continue
            dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.call(key, "weight_gradient", {**tensors, "dweight": dweight})
            weight.grad = dweight if weight.grad is None else weight.grad.add_(dweight)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and on GPUs where the engine reads it: at a multiple of 16 bytes."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() & 15 else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _main_grad(layer: Layer, weight: torch.Tensor) -> torch.Tensor | None:
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None) if layer.fused else None
    if main_grad is None:
        return None
    if tuple(main_grad.shape) != tuple(weight.shape) or not main_grad.is_contiguous():
        raise TensorError(f"main_grad is {list(main_grad.shape)}; it must be {list(weight.shape)} and contiguous, as its weight")
    return main_grad


def _gradient(layer: Layer, weight: torch.Tensor) -> str:
    """What becomes of the gradient of a weight, in the engine's words."""
    if not weight.requires_grad:
        return "frozen"
    main_grad = _main_grad(layer, weight)
    if main_grad is None:
        return "deferred" if layer.delayed else "written"
    into = main_grad.dtype
    if into not in (weight.dtype, accumulator(weight.dtype)):
        raise TensorError(f"main_grad is {into}; gradients of {weight.dtype} are added to that or to {accumulator(weight.dtype)}")
    return f"{'deferred' if layer.delayed else 'added'}:{_name(into)}"


class Product(torch.autograd.Function):
    """`x W^T + bias` of a rank's part of a layer. `x` is `[rows, features]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Layer) -> torch.Tensor:
        check(layer, x, weight, bias)
        x, weight_data = _dense(x), _dense(weight)
        tokens, rows = layer.rows(x)
        key = layer.key(tokens, bias is not None, x.dtype, _gradient(layer, weight))
        y = x.new_empty((rows, weight.shape[0]))
        tensors = {"x": x, "weight": weight_data, "y": y} | ({} if bias is None else {"bias": _dense(bias)})
        layer.call(key, "forward", tensors)
        ctx.save_for_backward(x, weight_data)
        ctx.layer, ctx.key, ctx.parameter = layer, key, weight
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, parameter = ctx.layer, ctx.parameter
        x, weight = ctx.saved_tensors
        has_bias, gradient = ctx.key[3], ctx.key[5]
        dx, dy = torch.empty_like(x), _dense(dy)
        tensors = {"dy": dy, "weight": weight, "dx": dx}
        dweight = dbias = None
        if gradient == "frozen":
            layer.call(ctx.key, "backward", tensors)
            # The engine sums a bias beside the gradient of its weight.
            return dx, None, dy.sum(0) if has_bias and ctx.needs_input_grad[2] else None, None
        tensors["x"] = x
        if gradient.startswith("deferred"):
            kept = _kept(layer, ctx.key, x)
            layer.call(ctx.key, "backward", tensors | kept)
            layer.waiting.append((parameter, ctx.key, {"x": x, "dy": dy, **kept}))
            return dx, None, None, None
        if gradient == "written":
            dweight = torch.empty_like(weight)
            tensors["dweight"] = dweight
            if has_bias:
                dbias = weight.new_empty(weight.shape[0])
                tensors["dbias"] = dbias
            layer.call(ctx.key, "backward", tensors)
            return dx, dweight, dbias, None
        main_grad = _main_grad(layer, parameter)
        if main_grad is None:
            raise TensorError("main_grad was taken from the weight between its forward and its backward")
        if getattr(parameter, "overwrite_main_grad", False):
            main_grad.zero_()
        tensors["main_grad"] = main_grad
        if has_bias:
            dbias = main_grad.new_zeros(weight.shape[0])
            tensors["main_grad_bias"] = dbias
        layer.call(ctx.key, "backward", tensors)
        return dx, _dummy(parameter), None if dbias is None else dbias.to(weight.dtype), None


def _kept(layer: Layer, key: Key, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Room for what a backward leaves for the gradient of the weight."""
    with layer.group._named_errors():
        wanted = layer.group._native.linear_tensors(key, "backward")
    return {name: x.new_empty(shape) for name, _, shape, _ in wanted if name.startswith("kept")}


def _dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd is given for a gradient in `main_grad`, as by Megatron-Core, whose data parallelism has hooks on it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def check(layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuses tensors that the layer is not for, before anything is enqueued."""
    size = layer.group.size
    columns = layer.in_features if layer.kind == "column" else layer.in_features // size
    rows = layer.out_features // size if layer.kind == "column" else layer.out_features
    if x.shape[-1] != columns:
        raise TensorError(f"input_ has {x.shape[-1]} features; this rank's part of the layer takes {columns}")
    if tuple(weight.shape) != (rows, columns):
        raise TensorError(f"weight is {list(weight.shape)}; this rank's part of the layer has {[rows, columns]}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise TensorError(f"bias is {list(bias.shape)}; this rank's part of the layer has {[rows]}")
    place = torch.device(layer.group.device)
    for name, tensor in (("input_", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != place:
            raise TensorError(f"{name} is on {tensor.device}, and the layer's group computes on {place}; move it there")
        if tensor.dtype != x.dtype:
            raise TensorError(f"{name} is {tensor.dtype} and input_ is {x.dtype}; they must be of one type")
    if x.shape[0] == 0:
        raise TensorError("input_ has no tokens")
