"""Column- and row-parallel linear layers: modules with the arguments, parameters and results of Megatron-Core's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from counterpoint.alone import alone
from counterpoint.errors import PlanError
from counterpoint.group import LocalGroup, _Group
from counterpoint.nn.layout import gather_features, split_features
from counterpoint.nn.product import DTYPES, Kind, Layer, LayerPasses, name_of, product, rows_of
from counterpoint.plan_arguments import whole_number
from counterpoint.processes import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    TensorParallelGroup = Group | LocalGroup | dist.ProcessGroup | DeviceMesh | None

Initializer = Callable[[torch.Tensor], Any]


class _ParallelLinear(torch.nn.Module):
    """What layers of both kinds have in common."""

    kind: Kind
    _parameters_split_along: int

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Initializer | None,
        bias: bool,
        stride: int,
        skip_bias_add: bool,
        skip_weight: bool,
        tp_group: TensorParallelGroup,
        sequence_parallel: bool | None,
        gradient_accumulation_fusion: bool | None,
        delay_wgrad_compute: bool | None,
        reduces_dgrad: bool,
        overlap: str,
        max_tokens: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        refused: dict[str, Any],
    ) -> None:
        super().__init__()
        _refuse(refused, config)
        for name, value in (("input_size", input_size), ("output_size", output_size), ("stride", stride)):
            whole_number(name, value, 1)
        if not isinstance(overlap, str):
            raise PlanError(f"overlap is {overlap!r}; it must be the name of an overlap policy")
        if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
            raise PlanError(f"max_tokens is {max_tokens!r}; it must be a whole number of at least 1, or None")

        def of_config(name: str, given: Any, otherwise: Any) -> Any:
            return given if given is not None else getattr(config, name, otherwise)

        group = group_of(tp_group, device)
        self.tp_group = None if isinstance(tp_group, _Group) else tp_group
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.stride, self.config = skip_bias_add, stride, config
        self.sequence_parallel = bool(of_config("sequence_parallel", sequence_parallel, False)) and group.size > 1
        split = output_size if self.kind == "column" else input_size
        if split % (group.size * stride):
            what = "output_size" if self.kind == "column" else "input_size"
            each = "" if stride == 1 else f" in {stride} pieces of each"
            raise PlanError(f"{what} is {split}, which {group.size} ranks cannot share equally{each}")
        self.group = group
        sizes = (input_size, output_size)
        engine: _Group = group
        if not reduces_dgrad and group.size > 1:
            # A product of this rank alone: nothing travels.
            if self.sequence_parallel:
                raise PlanError(
                    "disable_grad_reduce is for layers without sequence_parallel, whose input gradients are scattered"
                )
            engine = alone(torch.device(group.device))
            sizes = (input_size, output_size // group.size)
        self._layer = Layer(
            group=engine,
            kind=self.kind,
            sequence_parallel=self.sequence_parallel,
            in_features=sizes[0],
            out_features=(sizes[1],),
            overlap=overlap,
            fused=bool(of_config("gradient_accumulation_fusion", gradient_accumulation_fusion, False)),
            delayed=bool(of_config("delay_wgrad_compute", delay_wgrad_compute, False)),
            max_tokens=max_tokens,
        )
        dtype = of_config("params_dtype", dtype, None) or torch.get_default_dtype()
        if dtype not in DTYPES:
            raise PlanError(f"dtype is {dtype}; linear layers compute in {', '.join(map(name_of, DTYPES))}")
        if group._ordinal >= 0 and dtype not in (torch.bfloat16, torch.float16):
            raise PlanError(f"dtype is {dtype}; on GPUs linear layers compute in bfloat16 and float16, on the CPU in all")
        if device is None:
            # With `use_cpu_initialization` Megatron moves its modules later.
            device = "cpu" if getattr(config, "use_cpu_initialization", False) else group.device
        self._make_parameters(init_method, bias, skip_weight, dtype, device)

    def _make_parameters(
        self,
        init_method: Initializer | None,
        bias: bool,
        skip_weight: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        size, dim = self.group.size, self._parameters_split_along
        shape = [self.output_size, self.input_size]
        shape[dim] //= size
        if skip_weight:
            self.register_parameter("weight", None)
        else:
            self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", self.stride)):
                setattr(self.weight, name, value)
            self.weight.allreduce = True  # type: ignore[attr-defined]
            self._initialize(init_method)
        if not bias:
            self.register_parameter("bias", None)
            return
        # Of a row-parallel layer it is whole, and added once, to the tokens of each rank.
        self.bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=dtype, device=device))
        self.bias.allreduce = True  # type: ignore[attr-defined]
        if self.kind == "column":
            for name, value in (("tensor_model_parallel", True), ("partition_dim", 0), ("partition_stride", self.stride)):
                setattr(self.bias, name, value)
        else:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _initialize(self, init_method: Initializer | None) -> None:
        """Every rank draws the whole weight and keeps its part: ranks of one seed have the same layer, however many they are."""
        if not getattr(self.config, "perform_initialization", True) or self.weight.is_meta:
            return
        init = init_method or functools.partial(torch.nn.init.kaiming_uniform_, a=5**0.5)
        whole = torch.empty(self.output_size, self.input_size, dtype=torch.float32)
        init(whole)
        size, dim = self.group.size, self._parameters_split_along
        # With a stride, a rank's part is as many pieces, each from another part of the whole.
        pieces = torch.split(whole, whole.shape[dim] // (size * self.stride), dim)[self.group.rank :: size]
        with torch.no_grad():
            self.weight.copy_(torch.cat(pieces, dim))

    def _product(self, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product with its bias, or the bias apart."""
        weight = self.weight if weight is None else weight
        if weight is None:
            raise RuntimeError("weight was not supplied to forward, and skip_weight_param_allocation is True")
        given = None if self.bias is None or self.skip_bias_add else self.bias
        # A gradient that waits has its bias in PyTorch, so that this one's does not wait.
        in_engine = given if self.kind == "column" and not self._layer.delayed else None
        (y,) = product(rows_of(x), [weight], [] if in_engine is None else [in_engine], self._layer)
        y = y.reshape(-1, *x.shape[1:-1], y.shape[-1])
        if given is not None and in_engine is None:
            y = y + given
        return y, self.bias if self.skip_bias_add else None

    def passes(self, tokens: int) -> LayerPasses:
        """How forward and backward over so many tokens, those of all ranks, are run: as they were tuned, or as is predicted to be
        fastest. Local."""
        in_engine = self.kind == "column" and not (self.bias is None or self.skip_bias_add or self._layer.delayed)
        if self.weight is None:
            raise PlanError("this layer has no weight of its own (skip_weight_param_allocation), whose type passes follow")
        return self._layer.passes(tokens, [self.weight], in_engine)

    def backward_dw(self) -> None:
        """Computes the gradients of the weight that `delay_wgrad_compute` left for later, as Transformer Engine's layers do."""
        self._layer.backward_dw()

    def get_extra_state(self) -> None:
        """None: there is no state besides parameters."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Ignored, as other implementations of the layer have some."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron-Core's: the weight along its split axis, and the bias where it is split."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        axes = {"weight": 0, "bias": 0} if self.kind == "column" else {"weight": 1}
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets)

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, ranks={self.group.size}"


class ColumnParallelLinear(_ParallelLinear):
    """`Y = X A^T + b` whose output features are split over the ranks: Megatron-Core's `ColumnParallelLinear`.

    `input_` is `[s, b, h]` or `[tokens, h]`. Under `sequence_parallel` a rank has its own tokens of it, contiguous along axis 0,
    and the others' are gathered while these are multiplied; in the backward the sums of its gradient travel under the gradient of
    the weight. Returns `(output, output_bias)`, the second only with `skip_bias_add`.

    `tp_group` is a `counterpoint.Group`, a process group or mesh dimension of PyTorch's, or None for all ranks. The layer
    computes where a `Group` is; otherwise on `device`, or on PyTorch's default device if that is a GPU, or on the current GPU
    for a process group of NCCL's. On GPUs (Hopper) it computes in bfloat16 or float16. What is not given is taken from
    `config`, a `TransformerConfig` or anything with its attributes. `overlap` names an overlap policy; "auto" is the one that
    was tuned for this size on this machine (`Group(tuned=)`), or else the one that is predicted to end first.

    With `max_tokens`, the most tokens of all ranks in any call, layers whose number of tokens changes from call to call choose
    once for about four numbers in each octave, and have their memory from the first call on; more tokens are refused, before
    anything is enqueued.
    """

    kind = "column"
    _parameters_split_along = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: TensorParallelGroup = None,
        sequence_parallel: bool | None = None,
        gradient_accumulation_fusion: bool | None = None,
        delay_wgrad_compute: bool | None = None,
        overlap: str = "auto",
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            stride=stride,
            skip_bias_add=skip_bias_add,
            skip_weight=skip_weight_param_allocation,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            delay_wgrad_compute=delay_wgrad_compute,
            reduces_dgrad=not disable_grad_reduce,
            overlap=overlap,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            refused={
                "keep_master_weight_for_test": keep_master_weight_for_test,
                "embedding_activation_buffer": embedding_activation_buffer,
                "grad_output_buffer": grad_output_buffer,
                "is_expert": is_expert,
            },
        )
        self.gather_output = gather_output
        self.output_size_per_partition = output_size // self.group.size

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the bias that was not added. `weight` takes the place of the layer's own."""
        output, output_bias = self._product(input_, weight)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            if self.sequence_parallel:
                raise PlanError("gather_output is for layers without sequence_parallel")
            output = gather_features(output, self.group, self.tp_group)
        return output, output_bias


class RowParallelLinear(_ParallelLinear):
    """`Y = X A^T + b` whose input features are split over the ranks: Megatron-Core's `RowParallelLinear`.

    Each rank has a part of every sum; sums over ranks travel, group by group, while the next group is multiplied. Under
    `sequence_parallel` a rank ends with its own tokens, otherwise all ranks with all. The bias is whole on every rank and added
    once, to a rank's own tokens. For the rest see `ColumnParallelLinear`.
    """

    kind = "row"
    _parameters_split_along = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: TensorParallelGroup = None,
        sequence_parallel: bool | None = None,
        gradient_accumulation_fusion: bool | None = None,
        delay_wgrad_compute: bool | None = None,
        overlap: str = "auto",
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            stride=stride,
            skip_bias_add=skip_bias_add,
            skip_weight=False,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            delay_wgrad_compute=delay_wgrad_compute,
            reduces_dgrad=True,
            overlap=overlap,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            refused={"keep_master_weight_for_test": keep_master_weight_for_test, "is_expert": is_expert},
        )
        if self.sequence_parallel and not input_is_parallel:
            raise PlanError("sequence_parallel needs input_is_parallel, as of Megatron-Core")
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = input_size // self.group.size

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the bias that was not added."""
        if not self.input_is_parallel:
            input_ = split_features(input_, self.group, self.tp_group)
        return self._product(input_, None)


def group_of(given: Any, device: torch.device | str | None) -> Group | LocalGroup:
    """The group that a layer computes in."""
    if isinstance(given, LocalGroup) and given.size > 1:
        raise PlanError(
            f"a LocalGroup of {given.size} ranks is one process, and every rank of a layer has its own parameters: "
            "use counterpoint.Group, or LocalGroup(1)"
        )
    if isinstance(given, (Group, LocalGroup)):
        return given
    place = None if device is None or str(device) == "meta" else str(device)
    if place is None and torch.get_default_device().type == "cuda":
        place = str(torch.get_default_device())
    if given is None and not dist.is_initialized():
        return alone(torch.device(place or "cpu"))
    return Group(given, device=place)


def _refuse(given: dict[str, Any], config: Any) -> None:
    """What this package does not do, said instead of ignored."""
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"{name} is not supported by counterpoint.nn; use Megatron-Core's layer for it")
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise NotImplementedError("defer_embedding_wgrad_compute is not supported by counterpoint.nn; delay_wgrad_compute is")
