"""Styles for `torch.distributed.tensor.parallel.parallelize_module`: linear layers whose communication runs under their products.

Weights are `DTensor`s as those of PyTorch's own styles, so checkpoints and optimizers see nothing unusual; the forward of each
`nn.Linear` is the engine's.
"""

from __future__ import annotations

import types

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from counterpoint.errors import PlanError
from counterpoint.nn.product import Kind, Layer, product, rows_of
from counterpoint.processes import Group

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _Style(ParallelStyle):
    kind: Kind

    def __init__(
        self, input_layouts: Placement | None, output_layouts: Placement | None, use_local_output: bool, overlap: str
    ) -> None:
        super().__init__()
        column = self.kind == "column"
        whole, split = (input_layouts, output_layouts) if column else (output_layouts, input_layouts)
        self.whole = Replicate() if whole is None else whole
        self.split = Shard(-1) if split is None else split
        if self.whole not in (Replicate(), Shard(0)):
            which = "input_layouts" if column else "output_layouts"
            raise PlanError(f"{which} is {self.whole}; this style takes Replicate(), or Shard(0) for sequence parallelism")
        if not isinstance(self.split, Shard) or self.split.dim == 0:
            which = "output_layouts" if column else "input_layouts"
            raise PlanError(f"{which} is {self.split}; features of this side are split: Shard(-1)")
        self.use_local_output, self.overlap = use_local_output, overlap

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, torch.nn.Linear):
            raise PlanError(f"{type(self).__name__} is for nn.Linear, not {type(module).__name__}")
        group = Group(device_mesh, device=device_mesh.device_type)
        split = module.out_features if self.kind == "column" else module.in_features
        if split % group.size:
            raise PlanError(f"{split} features of {module} cannot be shared equally by {group.size} ranks")
        layer = Layer(
            group=group,
            kind=self.kind,
            sequence_parallel=self.whole == Shard(0) and group.size > 1,
            in_features=module.in_features,
            out_features=(module.out_features,),
            overlap=self.overlap,
            fused=False,
            delayed=False,
        )
        axis = 0 if self.kind == "column" else 1
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(axis)])
        module.weight = torch.nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        if module.bias is not None:
            placement = Shard(0) if self.kind == "column" else Replicate()
            bias = distribute_tensor(module.bias.detach(), device_mesh, [placement])
            module.bias = torch.nn.Parameter(bias, requires_grad=module.bias.requires_grad)
        given, made = (self.whole, self.split) if self.kind == "column" else (self.split, self.whole)

        def forward(own: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return self._forward(own, layer, device_mesh, x, given, made)

        # A method, which copies of the module have as their own: a function would go on with the weights of the first one.
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        return module

    def _forward(
        self, module: torch.nn.Linear, layer: Layer, mesh: DeviceMesh, x: torch.Tensor, given: Placement, made: Placement
    ) -> torch.Tensor:
        given, made = (_counted_from_0(placement, x.ndim) for placement in (given, made))
        if isinstance(x, DTensor):
            # Of a column-parallel layer's input the gradient is summed by the layer itself.
            x = x.redistribute(mesh, [given]).to_local(grad_placements=[given])
        weight: torch.Tensor = module.weight
        bias: torch.Tensor | None = module.bias
        local = weight.to_local(grad_placements=weight.placements) if isinstance(weight, DTensor) else weight
        in_engine: torch.Tensor | None = None
        if isinstance(bias, DTensor):
            # Each rank's gradient of a row-parallel layer's bias is that of its own tokens.
            partial = layer.kind == "row" and layer.sequence_parallel
            bias = bias.to_local(grad_placements=[_partial()] if partial else bias.placements)
        if layer.kind == "column":
            in_engine, bias = bias, None
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # As `nn.Linear` does.
            to = torch.get_autocast_dtype(x.device.type)
            x, local = x.to(to), local.to(to)
            in_engine, bias = (None if one is None else one.to(to) for one in (in_engine, bias))
        (y,) = product(rows_of(x), [local], [] if in_engine is None else [in_engine], layer)
        y = y.reshape(-1, *x.shape[1:-1], y.shape[-1])
        y = y if bias is None else y + bias
        return y if self.use_local_output else DTensor.from_local(y, mesh, [made], run_check=False)


def _counted_from_0(placement: Placement, axes: int) -> Placement:
    """The axis of tokens, which is the first, or of features, the last, as backwards of `DTensor`s want it."""
    if not isinstance(placement, Shard):
        return placement
    axis = placement.dim % axes
    if axis not in (0, axes - 1):
        raise PlanError(f"{placement} is neither tokens nor features of {axes} axes; features are Shard(-1)")
    return Shard(axis)


def _partial() -> Placement:
    from torch.distributed.tensor import Partial

    return Partial()


class ColwiseParallel(_Style):
    """An `nn.Linear` whose output features are split over the ranks of a mesh.

    `input_layouts` is `Replicate()`, or `Shard(0)` where each rank has its own tokens (sequence parallelism). The output is
    `Shard(-1)`: the rank's features, a plain tensor unless `use_local_output` is False. `overlap` as of
    `counterpoint.nn.ColumnParallelLinear`.
    """

    kind = "column"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: str = "auto",
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, overlap)


class RowwiseParallel(_Style):
    """An `nn.Linear` whose input features are split over the ranks of a mesh.

    The input is `Shard(-1)`; `output_layouts` is `Replicate()`, or `Shard(0)` where each rank ends with its own tokens. For the
    rest see `ColwiseParallel`.
    """

    kind = "row"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: str = "auto",
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output, overlap)
