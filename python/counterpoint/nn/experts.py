"""Layers of a mixture of experts: one product of every expert, with the way of its tokens there or back under it."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from counterpoint._native import Routing
from counterpoint.alone import working
from counterpoint.collectives import borrowed, dense
from counterpoint.errors import PlanError, TensorError
from counterpoint.fitting import accumulator
from counterpoint.group import LocalGroup
from counterpoint.nn.linear import Initializer, group_of
from counterpoint.nn.product import DTYPES, clear_overwritten, dummy, dummy_of, name_of

if TYPE_CHECKING:
    from counterpoint.nn.linear import TensorParallelGroup

Kind = Literal["dispatch", "combine"]
Key = tuple[str, tuple[int, int, int], str, str, str, tuple[int | None, int | None]]


class ExpertPass(NamedTuple):
    """How a pass of a layer is run: its overlap policy, its groups, and the tokens of each in percent of the one before."""

    overlap: str
    groups: int
    growth: int


class ExpertPasses(NamedTuple):
    """How the passes of a layer are run."""

    forward: ExpertPass
    backward: ExpertPass


class ExpertLayer(torch.nn.Module):
    """One product of every expert, `y = x W^T` with the expert's own `W`, on the ranks of a group.

    `kind="dispatch"` brings tokens to their experts and multiplies them there: the first product of an expert. `x` is
    `[tokens, in_features]`, this rank's tokens, and the result `[rows, out_features]`, the rows of this rank's experts: expert
    after expert, of each the tokens of rank 0, then those of rank 1, and so on, in their order. `kind="combine"` multiplies such
    rows and takes them back: the last product. Its result is `[tokens, out_features]`, for each token the sum of what its experts
    gave, zeros where it has none. Activations between the two, biases and gates are the caller's: `sources(routing)` says
    which token and which expert each row is.

    `experts` counts those of all ranks, of which each rank has an equal range; `weight` is `[experts here, out_features,
    in_features]`. `routing` is a `counterpoint.Routing`, given for every call and the same on all ranks. Communication runs under
    the products in groups of tokens; `overlap` names an overlap policy, and "auto" is the one that `counterpoint tune moe` has
    found fastest for as many tokens and rows on this machine (`Group(tuned=)`), or else is predicted to end first, with the first
    routing that layers of these sizes are given. Results have the same bits under all of them.

    `group` is a `counterpoint.Group`, a process group or mesh dimension of PyTorch's, or None for all ranks. In a `LocalGroup`,
    whose ranks are all here, tensors have the rows of all of them, one rank's after the other's. With
    `gradient_accumulation_fusion` gradients are added to `weight.main_grad`, where it has one.

    `max_tokens` and `max_rows` are what a rank has of tokens, and its experts of rows, in any call at most: a routing with more
    is refused. With `max_rows` the group has scratch memory for as many from a pass's first call on; later ones allocate none.
    """

    def __init__(
        self,
        kind: Kind,
        in_features: int,
        out_features: int,
        experts: int,
        *,
        group: TensorParallelGroup = None,
        init_method: Initializer | None = None,
        gradient_accumulation_fusion: bool = False,
        overlap: str = "auto",
        max_tokens: int | None = None,
        max_rows: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("dispatch", "combine"):
            raise PlanError(f'kind is {kind!r}; it must be "dispatch" or "combine"')
        for name, size in (("in_features", in_features), ("out_features", out_features), ("experts", experts)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlanError(f"{name} is {size!r}; it must be a whole number of at least 1")
        if not isinstance(overlap, str):
            raise PlanError(f"overlap is {overlap!r}; it must be the name of an overlap policy")
        for name, most in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
                raise PlanError(f"{name} is {most!r}; it must be a whole number of at least 1, or None")
        self.group = group if isinstance(group, LocalGroup) else group_of(group, device)
        if experts % self.group.size:
            raise PlanError(f"experts is {experts}, which {self.group.size} ranks cannot share equally")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in DTYPES:
            raise PlanError(f"dtype is {dtype}; layers of experts compute in float64, float32, bfloat16 and float16")
        if self.group._ordinal >= 0 and dtype not in (torch.bfloat16, torch.float16):
            raise PlanError(f"dtype is {dtype}; on GPUs layers of experts compute in bfloat16 and float16, on the CPU in all")
        self.kind, self.in_features, self.out_features, self.experts = kind, in_features, out_features, experts
        self.gradient_accumulation_fusion, self.overlap = gradient_accumulation_fusion, overlap
        self.max_tokens, self.max_rows = max_tokens, max_rows
        # Of this process; `None` where all ranks are here.
        self._rank = None if isinstance(self.group, LocalGroup) else self.group.rank
        self._numbered = Numbered(self)
        here = experts if isinstance(self.group, LocalGroup) else experts // self.group.size
        place = self.group.device if device is None else device
        self.weight = torch.nn.Parameter(torch.empty(here, out_features, in_features, dtype=dtype, device=place))
        # Experts are not what data parallelism over all ranks sums, as Megatron's gradient reduction reads it.
        self.weight.allreduce = self.group.size == 1  # type: ignore[attr-defined]
        self._initialize(init_method)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer, which compiled operators know by a number of its own."""
        super().__setstate__(state)
        self._numbered = Numbered(self)

    def _initialize(self, init_method: Initializer | None) -> None:
        """Every rank draws all experts and keeps its own: ranks of one seed have the same layer, however many they are."""
        if self.weight.is_meta:
            return
        init = init_method or functools.partial(torch.nn.init.kaiming_uniform_, a=5**0.5)
        here = self.weight.shape[0]
        first = 0 if here == self.experts else self.group.rank * here
        with torch.no_grad():
            for expert in range(self.experts):
                drawn = torch.empty(self.out_features, self.in_features, dtype=torch.float32)
                init(drawn)
                if first <= expert < first + here:
                    self.weight[expert - first].copy_(drawn)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The rows of the experts here, or of a combine the tokens. Collective, as its backward."""
        if torch.compiler.is_compiling():
            return self._compiled(x, routing)
        self._check(x, self.weight, routing)
        made: torch.Tensor = _ExpertProduct.apply(x, self.weight, self, routing)
        if made.requires_grad:
            self.group._make_ahead(self._key(self._gradient()), routing, "backward")
        return made

    def prefetch(self, routing: Routing) -> None:
        """Has a thread make the forward of a routing ready, which takes a millisecond or more of the host: as soon as the routing
        is known, while gates are computed or another layer runs. The call waits for the rest of it. Backwards are made ready so
        without asking, by every forward that will have one. All ranks do it, and their calls, in one order."""
        self._check_routing(routing)
        with self.group._named_errors():
            self.group._make_ahead(self._key(self._gradient()), routing, "forward")

    def _compiled(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        self._check_routing(routing)
        main_grad, gradient = self._main_grad(), self._gradient()
        into = [main_grad] if main_grad is not None and self.weight.requires_grad else []
        dummy = dummy_of(self.weight) if into else "none"
        rows, number = self.rows(routing)[1], self._numbered.number
        made = torch.ops.counterpoint.expert_product(x, self.weight, into, rows, gradient, dummy, routing.number, number)
        y: torch.Tensor = made[0]
        return y

    def rows(self, routing: Routing) -> tuple[int, int]:
        """Rows of `x` and of the result here, under a routing."""
        tokens, rows = self._count(routing.tokens), self._count(routing.rows)
        return (tokens, rows) if self.kind == "dispatch" else (rows, tokens)

    def _count(self, of_ranks: list[int]) -> int:
        """Those of the ranks here."""
        return sum(of_ranks) if self._rank is None else of_ranks[self._rank]

    def sources(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """Which token, counted through those of all ranks, and which expert each row here is; on the layer's device."""
        self._check_routing(routing)
        if torch.compiler.is_compiling():
            rows, number = self._count(routing.rows), self._numbered.number
            of_rows: tuple[torch.Tensor, torch.Tensor]
            of_rows = torch.ops.counterpoint.expert_sources(self.weight, rows, routing.number, number)
            return of_rows
        ranks = range(self.group.size) if isinstance(self.group, LocalGroup) else [self.group.rank]
        tokens, experts = (bytearray().join(of) for of in zip(*map(routing.source_bytes, ranks), strict=True))
        if not tokens:
            none = torch.empty(0, dtype=torch.int64, device=self.group.device)
            return none, none.clone()
        on_host = (torch.frombuffer(of, dtype=torch.int64) for of in (tokens, experts))
        of_tokens, of_experts = (of.to(self.group.device) for of in on_host)
        return of_tokens, of_experts

    def passes(self, routing: Routing) -> ExpertPasses:
        """How forward and backward are run: as is best for the first routing that layers of these sizes were called with, and
        before any call for this one. Local."""
        self._check_routing(routing)
        with self.group._named_errors():
            forward, backward = self.group._native.expert_passes(self._key(self._gradient()), routing)
        return ExpertPasses(ExpertPass(*forward), ExpertPass(*backward))

    def _check_routing(self, routing: Routing) -> None:
        """Refuses a routing of other experts or ranks."""
        if not isinstance(routing, Routing):
            raise TensorError(f"routing must be a counterpoint.Routing, not a {type(routing).__name__}")
        self.group = working(self.group)
        if (routing.experts, routing.ranks) != (self.experts, self.group.size):
            raise TensorError(
                f"routing is for {routing.experts} experts on {routing.ranks} ranks; the layer has {self.experts} on "
                f"{self.group.size}"
            )

    def _check(self, x: torch.Tensor, weight: torch.Tensor, routing: Routing) -> None:
        """Refuses what the layer is not for, before anything is enqueued."""
        self._check_routing(routing)
        if not isinstance(x, torch.Tensor):
            raise TensorError(f"x must be a torch.Tensor, not a {type(x).__name__}")
        wanted, what = (self.rows(routing)[0], self.in_features), "tokens" if self.kind == "dispatch" else "rows"
        if tuple(x.shape) != wanted:
            raise TensorError(
                f"x is {list(x.shape)}; this routing has {wanted[0]} {what} here, and the layer {wanted[1]} features"
            )
        if tuple(weight.shape[1:]) != (self.out_features, self.in_features):
            raise TensorError(f"weight is {list(weight.shape)}; it must be as the layer was made")
        place = torch.device(self.group.device)
        for name, tensor in (("x", x), ("weight", weight)):
            if tensor.device != place:
                raise TensorError(f"{name} is on {tensor.device}, and the layer's group computes on {place}; move it there")
        if x.dtype != weight.dtype:
            raise TensorError(f"x is {x.dtype} and weight is {weight.dtype}; they must be of one type")
        if x.dtype not in DTYPES:
            raise TensorError(f"x and weight are {x.dtype}; layers of experts compute in {', '.join(map(name_of, DTYPES))}")

    def _call(self, key: Key, routing: Routing, name: str, tensors: dict[str, torch.Tensor]) -> None:
        with self.group._named_errors():
            given = [(of, borrowed(tensor)) for of, tensor in tensors.items()]
            self.group._native.experts(key, routing, name, self.group._stream(), given)

    def _main_grad(self) -> torch.Tensor | None:
        main_grad: torch.Tensor | None = getattr(self.weight, "main_grad", None) if self.gradient_accumulation_fusion else None
        if main_grad is None:
            return None
        if main_grad.shape != self.weight.shape or not main_grad.is_contiguous():
            wanted = list(self.weight.shape)
            raise TensorError(f"main_grad is {list(main_grad.shape)}; it must be {wanted} and contiguous, as its weight")
        if main_grad.dtype not in (self.weight.dtype, accumulator(self.weight.dtype)):
            raise TensorError(
                f"main_grad is {main_grad.dtype}; gradients of {self.weight.dtype} are added to that or to "
                f"{accumulator(self.weight.dtype)}"
            )
        return main_grad

    def _gradient(self) -> str:
        """What becomes of the gradient of the weight, in the engine's words."""
        main_grad = self._main_grad()
        if not self.weight.requires_grad:
            return "frozen"
        return "written" if main_grad is None else f"added:{name_of(main_grad.dtype)}"

    def _key(self, gradient: str) -> Key:
        """The layer as the engine knows it."""
        sizes, most = (self.in_features, self.out_features, self.experts), (self.max_tokens, self.max_rows)
        return (self.kind, sizes, name_of(self.weight.dtype), gradient, self.overlap, most)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.kind!r}, {self.in_features}, {self.out_features}, experts={self.experts}, ranks={self.group.size}"


class Numbered:
    """By which compiled operators know a layer. Numbers that are attributes of modules `torch.compile` takes for constants."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.number = next(_numbers)
        _layers[self.number] = layer


_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, ExpertLayer] = weakref.WeakValueDictionary()


def of_number(number: int) -> ExpertLayer:
    """The layer that a compiled operator was given as a number."""
    layer = _layers.get(int(number))
    if layer is None:
        raise TensorError(f"layer {number} of experts is gone; keep its module as long as a compiled call may use it")
    return layer


def forward(
    layer: ExpertLayer, x: torch.Tensor, weight: torch.Tensor, routing: Routing, gradient: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, with input and weight as they were read."""
    x, flat = dense(x), dense(weight).view(-1, layer.in_features)
    y = x.new_empty((layer.rows(routing)[1], layer.out_features))
    layer._call(layer._key(gradient), routing, "forward", {"x": x, "weight": flat, "y": y})
    return y, x, flat


def backward(
    layer: ExpertLayer,
    routing: Routing,
    gradient: str,
    tensors: dict[str, torch.Tensor],
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
) -> torch.Tensor | None:
    """Runs a backward on x, dy, weight and dx: the gradient of the weight, where it is a tensor of its own."""
    key, flat = layer._key(gradient), tensors["weight"]
    if gradient == "frozen":
        layer._call(key, routing, "backward", {name: tensor for name, tensor in tensors.items() if name != "x"})
        return None
    if main_grad is None:
        dweight = torch.empty_like(flat)
        layer._call(key, routing, "backward", tensors | {"dweight": dweight})
        return dweight.view_as(weight)
    clear_overwritten([weight], [main_grad])
    layer._call(key, routing, "backward", tensors | {"main_grad": main_grad.view(flat.shape)})
    return None


class _ExpertProduct(torch.autograd.Function):
    """The product of a layer, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: ExpertLayer, routing: Routing) -> torch.Tensor:
        ctx.layer, ctx.routing, ctx.gradient, ctx.weight = layer, routing, layer._gradient(), weight
        y, x, flat = forward(layer, x, weight, routing, ctx.gradient)
        ctx.save_for_backward(x, flat)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, gradient = ctx.layer, ctx.gradient
        x, flat = map(dense, ctx.saved_tensors)
        main_grad = layer._main_grad() if gradient.startswith("added") else None
        if gradient.startswith("added") and main_grad is None:
            raise TensorError("main_grad was taken from the weight between its forward and its backward")
        tensors = {"dy": dense(dy), "weight": flat, "dx": torch.empty_like(x), "x": x}
        dweight = backward(layer, ctx.routing, gradient, tensors, ctx.weight, main_grad)
        return tensors["dx"], dweight if main_grad is None else dummy(ctx.weight), None, None
