"""The product of a tensor-parallel linear layer, with gradients: one call of the engine a pass, on tensors in place."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from counterpoint.alone import working
from counterpoint.collectives import borrowed, dense
from counterpoint.errors import TensorError
from counterpoint.fitting import accumulator
from counterpoint.plan_arguments import whole_number

if TYPE_CHECKING:
    from counterpoint.group import _Group

Kind = Literal["column", "row", "shared input"]
Key = tuple[str, bool, tuple[int, ...], bool, str, str, str, int | None]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


def of_number(number: int) -> Layer:
    """The layer that a compiled operator was given as a number."""
    layer = _layers.get(int(number))
    if layer is None:
        raise TensorError(f"layer {number} is gone; keep its module as long as a compiled call may use it")
    return layer


class LayerPass(NamedTuple):
    """How a pass of a layer is run: its overlap policy, and the tokens of each of its groups, of those of the first rank."""

    overlap: str
    groups: tuple[int, ...]


class LayerPasses(NamedTuple):
    """How the passes of a layer are run."""

    forward: LayerPass
    backward: LayerPass


@dataclass(eq=False)
class Layer:
    """A layer, or layers that share an input, on the ranks of a group, as modules have it. Sizes are those of all ranks."""

    group: _Group
    kind: Kind
    sequence_parallel: bool
    in_features: int
    out_features: tuple[int, ...]
    """One, but for layers that share an input."""
    overlap: str
    fused: bool
    """Gradients of the weight are added to its `main_grad`, where it has one."""
    delayed: bool
    """They wait for `backward_dw`."""
    max_tokens: int | None = None
    """Of all ranks, where their number changes from call to call."""
    waiting: deque[tuple[tuple[torch.nn.Parameter, ...], Key, dict[str, torch.Tensor]]] = field(default_factory=deque)
    ranks: int = field(init=False)
    number: int = field(init=False)
    """By which compiled operators know it."""
    turn: torch.Tensor | None = field(init=False)
    """What compiled backwards that leave gradients for later are said to write: it keeps them, and in their order."""

    def __post_init__(self) -> None:
        self.ranks, self.number = self.group.size, next(_numbers)
        self.turn = torch.zeros((), device=torch.device(self.group.device)) if self.delayed else None
        _layers[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A copy of a module is a layer of its own. What waits is the gradient of the module that was copied."""
        return dataclasses.replace(self, waiting=deque())

    def key(self, tokens: int, bias: bool, dtype: torch.dtype, gradient: str) -> Key:
        sizes = (tokens, self.in_features, *self.out_features)
        return (self.kind, self.sequence_parallel, sizes, bias, name_of(dtype), gradient, self.overlap, self.max_tokens)

    def names(self, name: str) -> list[str]:
        """Of a tensor of each layer, as the engine calls it."""
        return [f"{name}_{at}" for at in range(len(self.out_features))] if self.kind == "shared input" else [name]

    def named(self, name: str, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.names(name), tensors, strict=True))

    def call(self, key: Key, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.group = working(self.group)
        with self.group._named_errors():
            given = [(name, borrowed(tensor)) for name, tensor in tensors.items()]
            self.group._native.linear(key, name, self.group._stream(), given)

    def rows(self, x: torch.Tensor) -> tuple[int, int]:
        """Tokens of all ranks, and rows of the result, of an `x` of so many rows."""
        size, rows = self.ranks, x.shape[0]
        if not self.sequence_parallel:
            return rows, rows
        if self.kind != "row":
            return rows * size, rows * size
        if rows % size:
            raise TensorError(f"input_ has {rows} tokens, which {size} ranks cannot share equally under sequence parallelism")
        return rows, rows // size

    def passes(self, tokens: int, weights: Sequence[torch.Tensor], bias: bool) -> LayerPasses:
        """How passes over so many tokens, those of all ranks, are run."""
        key = self.key(whole_number("tokens", tokens, 1), bias, weights[0].dtype, _gradient(self, weights))
        self.group = working(self.group)
        with self.group._named_errors():
            forward, backward = self.group._native.linear_passes(key)
        return LayerPasses(*(LayerPass(overlap, tuple(groups)) for overlap, groups in (forward, backward)))

    def backward_dw(self) -> None:
        """Computes the gradients of the weight that wait, the oldest first."""
        while self.waiting:
            weights, key, tensors = self.waiting.popleft()
            main_grads = _main_grads(self, weights)
            if main_grads is not None:
                clear_overwritten(weights, main_grads)
                self.call(key, "weight_gradient", tensors | self.named("main_grad", main_grads))
                continue
            dweights = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
            self.call(key, "weight_gradient", tensors | self.named("dweight", dweights))
            for weight, dweight in zip(weights, dweights, strict=True):
                weight.grad = dweight if weight.grad is None else weight.grad.add_(dweight)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _main_grad(layer: Layer, weight: torch.Tensor) -> torch.Tensor | None:
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None) if layer.fused else None
    if main_grad is None:
        return None
    if tuple(main_grad.shape) != tuple(weight.shape) or not main_grad.is_contiguous():
        raise TensorError(f"main_grad is {list(main_grad.shape)}; it must be {list(weight.shape)} and contiguous, as its weight")
    return main_grad


def _main_grads(layer: Layer, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Of all weights, or None where none has one."""
    found = [_main_grad(layer, weight) for weight in weights]
    given = [main_grad for main_grad in found if main_grad is not None]
    if given and len(given) < len(found):
        raise TensorError(f"{len(given)} of the {len(found)} weights that share input_ have a main_grad; all must, or none")
    return given or None


def _gradient(layer: Layer, weights: Sequence[torch.Tensor]) -> str:
    """What becomes of the gradients of the weights, in the engine's words."""
    trained = sum(weight.requires_grad for weight in weights)
    if trained == 0:
        return "frozen"
    if trained < len(weights):
        raise TensorError(f"{trained} of the {len(weights)} weights that share input_ require a gradient; all must, or none")
    if layer.delayed and not all(weight.is_leaf for weight in weights):
        raise TensorError(
            "weight is the result of other operations (a parametrization, an adapter, an expression), whose gradient cannot wait "
            "for backward_dw: leave delay_wgrad_compute out"
        )
    main_grads = _main_grads(layer, weights)
    if main_grads is None:
        return "deferred" if layer.delayed else "written"
    into, dtype = main_grads[0].dtype, weights[0].dtype
    for main_grad in main_grads:
        if main_grad.dtype not in (dtype, accumulator(dtype)):
            raise TensorError(
                f"main_grad is {main_grad.dtype}; gradients of {dtype} are added to that or to {accumulator(dtype)}"
            )
        if main_grad.dtype != into:
            raise TensorError(f"main_grad is {into} of one weight and {main_grad.dtype} of another; layers of one input have one")
    return f"deferred:{name_of(into)}" if layer.delayed else _into_main_grad(weights, into)


def _into_main_grad(weights: Sequence[torch.Tensor], into: torch.dtype) -> str:
    """How gradients go into a `main_grad`. Where some replace what is there and others do not, they are added to zeros."""
    replaces = all(map(_overwrites, weights))
    return f"{'replaced' if replaces else 'added'}:{name_of(into)}"


def _overwrites(weight: torch.Tensor) -> bool:
    """Whether a gradient takes the place of what is in `main_grad`, as Megatron's FSDP asks for."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def rows_of(input_: torch.Tensor) -> torch.Tensor:
    """`[s, b, h]`, or more axes in front, as `[rows, h]`."""
    if not isinstance(input_, torch.Tensor):
        raise TensorError(f"input_ must be a torch.Tensor, not a {type(input_).__name__}")
    if input_.ndim < 2:
        raise TensorError(f"input_ is {list(input_.shape)}; it must be [tokens, features], or have more axes in front")
    if not torch.compiler.is_compiling() and is_traceable_wrapper_subclass(input_):
        if not hasattr(input_, "trigger_wait"):
            way = ": give input_.to_local()" if hasattr(input_, "to_local") else ""
            raise TensorError(f"input_ is a {type(input_).__name__}, and layers take the dense rows of this process{way}")
        # The result of a collective of PyTorch's, which may be under way.
        input_ = input_.clone()
    return input_.flatten(0, -2)


def product(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], layer: Layer
) -> tuple[torch.Tensor, ...]:
    """`x W^T + bias` of a rank's part of each layer. `x` is `[rows, features]`; there are no biases, or as many as weights."""
    if torch.compiler.is_compiling():
        gradient = _gradient(layer, weights)
        rows = layer.rows(x)[1]
        into = written_into(layer, weights, gradient)
        dummies = [dummy_of(weight) for weight in weights] if gradient.startswith(("added", "replaced")) else []
        compiled = torch.ops.counterpoint.product(
            x, list(weights), list(biases), into, rows, gradient, ",".join(dummies), layer.number
        )
        return tuple(compiled)
    made: tuple[torch.Tensor, ...] = Product.apply(x, layer, *weights, *biases)
    return made


def written_into(layer: Layer, weights: Sequence[torch.Tensor], gradient: str) -> list[torch.Tensor]:
    """What a compiled backward writes in addition to its results."""
    if gradient.startswith(("added", "replaced")):
        return _main_grads(layer, weights) or []
    return [layer.turn] if gradient.startswith("deferred") and layer.turn is not None else []


def forward(
    layer: Layer, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gradient: str
) -> tuple[tuple[torch.Tensor, ...], Key, torch.Tensor, list[torch.Tensor]]:
    """The results, what the engine calls the layer, and input and weights as they were read."""
    check(layer, x, weights, biases)
    x, read = dense(x), [dense(weight) for weight in weights]
    tokens, rows = layer.rows(x)
    key = layer.key(tokens, bool(biases), x.dtype, gradient)
    ys = tuple(x.new_empty((rows, weight.shape[0])) for weight in weights)
    tensors = {"x": x} | layer.named("weight", read) | layer.named("y", ys)
    if biases:
        tensors |= layer.named("bias", map(dense, biases))
    layer.call(key, "forward", tensors)
    return ys, key, x, read


def written(
    layer: Layer, key: Key, tensors: dict[str, torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs a backward of which gradients of weights, and of biases where there are any, are tensors of their own."""
    dweights, dbiases = [torch.empty_like(weight) for weight in weights], []
    tensors |= layer.named("dweight", dweights)
    if key[3]:
        dbiases = [weight.new_empty(weight.shape[0]) for weight in weights]
        tensors |= layer.named("dbias", dbiases)
    layer.call(key, "backward", tensors)
    return dweights, dbiases


class Product(torch.autograd.Function):
    """`product`, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(layer.out_features)
        weights, biases = parameters[:count], parameters[count:]
        ys, key, x, read = forward(layer, x, weights, biases, _gradient(layer, weights))
        ctx.save_for_backward(x, *read)
        ctx.layer, ctx.key, ctx.parameters = layer, key, weights
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, parameters = ctx.layer, ctx.parameters
        # Hooks on what is saved may lay it out as they like.
        x, *weights = map(dense, ctx.saved_tensors)
        has_bias, gradient = ctx.key[3], ctx.key[5]
        dx, dys = torch.empty_like(x), tuple(dense(dy) for dy in dys)
        tensors = {"dx": dx} | layer.named("dy", dys) | layer.named("weight", weights)
        dweights: list[torch.Tensor | None] = [None] * len(weights)
        dbiases: list[torch.Tensor | None] = [None] * len(weights) if has_bias else []
        if gradient == "frozen":
            layer.call(ctx.key, "backward", tensors)
            if has_bias:
                # The engine sums a bias together with the gradient of its weight.
                needed = ctx.needs_input_grad[2 + len(weights) :]
                dbiases = [dy.sum(0) if needs else None for dy, needs in zip(dys, needed, strict=True)]
            return dx, None, *dweights, *dbiases
        tensors["x"] = x
        if gradient.startswith("deferred"):
            leave(layer, ctx.key, tensors, dys, parameters)
            return dx, None, *dweights, *dbiases
        if gradient == "written":
            made, sums = written(layer, ctx.key, tensors, weights)
            return dx, None, *made, *sums
        main_grads = _main_grads(layer, parameters)
        if main_grads is None:
            raise TensorError("main_grad was taken from the weight between its forward and its backward")
        sums = accumulate(layer, ctx.key, tensors, parameters, main_grads)
        dbiases = [dbias.to(weight.dtype) for dbias, weight in zip(sums, weights, strict=True)] if has_bias else []
        return dx, None, *map(dummy, parameters), *dbiases


def leave(
    layer: Layer, key: Key, tensors: dict[str, torch.Tensor], dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> None:
    """Runs a backward that leaves the gradients of weights for `backward_dw`; `tensors` are those of it, with x."""
    kept = _kept(layer, key, tensors["x"])
    layer.call(key, "backward", tensors | kept)
    layer.waiting.append(
        (cast("tuple[torch.nn.Parameter, ...]", tuple(weights)), key, {"x": tensors["x"], **layer.named("dy", dys), **kept})
    )


def accumulate(
    layer: Layer,
    key: Key,
    tensors: dict[str, torch.Tensor],
    weights: Sequence[torch.Tensor],
    main_grads: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Runs a backward whose gradients of weights go into `main_grads`: those of biases, where there are any, of that type."""
    # Whether it is overwritten may have changed since the forward.
    key = (*key[:5], _into_main_grad(weights, main_grads[0].dtype), *key[6:])
    if key[5].startswith("added"):
        clear_overwritten(weights, main_grads)
    sums = [main_grad.new_zeros(main_grad.shape[0]) for main_grad in main_grads] if key[3] else []
    of_biases = layer.named("main_grad_bias", sums) if sums else {}
    layer.call(key, "backward", tensors | layer.named("main_grad", main_grads) | of_biases)
    return sums


def clear_overwritten(weights: Sequence[torch.Tensor], main_grads: Sequence[torch.Tensor]) -> None:
    """Has what is added to those that a gradient is to replace be nothing."""
    for weight, main_grad in zip(weights, main_grads, strict=True):
        if _overwrites(weight):
            main_grad.zero_()


def _kept(layer: Layer, key: Key, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Room for what a backward leaves for the gradient of the weight."""
    layer.group = working(layer.group)
    with layer.group._named_errors():
        wanted = layer.group._native.linear_tensors(key, "backward")
    return {name: x.new_empty(shape) for name, _, shape, _ in wanted if name.startswith("kept")}


def dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd is given for a gradient in `main_grad`, as by Megatron-Core, whose data parallelism has hooks on it."""
    kind = dummy_of(weight)
    say_added(weight, kind)
    return make_dummy(weight, kind)


def dummy_of(weight: torch.Tensor) -> str:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return "none"
    return "zeros" if getattr(weight, "zero_out_wgrad", False) else "empty"


def make_dummy(weight: torch.Tensor, kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    make = torch.zeros if kind == "zeros" else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def say_added(weight: torch.Tensor, kind: str) -> None:
    """Has Megatron-Core's data parallelism leave the dummy out of `main_grad`."""
    if kind != "none":
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def check_itself(weights: Sequence[torch.Tensor], marked: bool) -> None:
    """Refuses copies of weights where a compiled backward reads or sets what is marked on them."""
    if marked and not all(isinstance(weight, torch.nn.Parameter) for weight in weights):
        raise TensorError(
            "a compiled backward was given a copy of a weight, on which nothing can be said of its gradient: leave the layer out "
            "of torch.compile"
        )


def check(layer: Layer, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """Refuses tensors that the layer is not for, before anything is enqueued."""
    size, is_row = layer.group.size, layer.kind == "row"
    columns = layer.in_features // size if is_row else layer.in_features
    if x.shape[-1] != columns:
        raise TensorError(f"input_ has {x.shape[-1]} features; this rank's part of the layer takes {columns}")
    rows = [features if is_row else features // size for features in layer.out_features]
    for name, weight, wanted in zip(layer.names("weight"), weights, rows, strict=True):
        if tuple(weight.shape) != (wanted, columns):
            raise TensorError(f"{name} is {list(weight.shape)}; this rank's part of the layer has {[wanted, columns]}")
    given = {"input_": x} | layer.named("weight", weights)
    if biases:
        for name, bias, wanted in zip(layer.names("bias"), biases, rows, strict=True):
            if tuple(bias.shape) != (wanted,):
                raise TensorError(f"{name} is {list(bias.shape)}; this rank's part of the layer has {[wanted]}")
        given |= layer.named("bias", biases)
    place = torch.device(layer.group.device)
    for name, tensor in given.items():
        if tensor.device != place:
            raise TensorError(f"{name} is on {tensor.device}, and the layer's group computes on {place}; move it there")
        if tensor.dtype != x.dtype:
            raise TensorError(f"{name} is {tensor.dtype} and input_ is {x.dtype}; they must be of one type")
    if x.dtype not in DTYPES:
        raise TensorError(f"input_ and weight are {x.dtype}; linear layers compute in {', '.join(map(name_of, DTYPES))}")
    if x.shape[0] == 0:
        raise TensorError("input_ has no tokens")
