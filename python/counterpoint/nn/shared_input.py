"""Column-parallel linear layers that share one input: one gather of it, and one sum of its gradient."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from counterpoint.errors import PlanError
from counterpoint.nn.linear import ColumnParallelLinear, Initializer, group_of
from counterpoint.nn.product import LayerPasses, product, rows_of

if TYPE_CHECKING:
    from counterpoint.nn.linear import TensorParallelGroup

    Outputs = tuple[torch.Tensor, ...]


class SharedInputLinear(torch.nn.Module):
    """`ColumnParallelLinear` layers of one input, such as q, k and v of an attention, or gate and up of an MLP.

    `input_` is gathered once for all of them (under `sequence_parallel`), and what they give to its gradient is added on each
    rank and summed over ranks once; both travel under the products. `output_sizes` has the output features of each, those of all
    ranks: a mapping names the layers, which are this module's children by these names (`{"q": 4096, "k": 1024, "v": 1024}` has
    parameters `q.weight`, `q.bias` and so on); those of a sequence are "0", "1" and so on.

    Returns `(outputs, output_biases)`, tuples in the order of the layers, the second only with `skip_bias_add`, else None. For
    the rest see `ColumnParallelLinear`, whose arguments these are, of every layer. Weights require gradients all or none, and
    have a `main_grad` of one type all or none.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Mapping[str, int] | Sequence[int],
        *,
        config: Any = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        stride: int = 1,
        skip_bias_add: bool = False,
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
        super().__init__()
        if not isinstance(output_sizes, Mapping):
            output_sizes = {str(at): size for at, size in enumerate(output_sizes)}
        if not output_sizes:
            raise PlanError("output_sizes is empty; there must be at least one layer")
        group = group_of(tp_group, device)
        self.group, self.input_size, self.output_sizes = group, input_size, dict(output_sizes)
        self.skip_bias_add, self.config = skip_bias_add, config
        for name, output_size in output_sizes.items():
            layer = ColumnParallelLinear(
                input_size,
                output_size,
                config=config,
                init_method=init_method,
                bias=bias,
                stride=stride,
                skip_bias_add=skip_bias_add,
                disable_grad_reduce=disable_grad_reduce,
                tp_group=group,
                sequence_parallel=sequence_parallel,
                gradient_accumulation_fusion=gradient_accumulation_fusion,
                delay_wgrad_compute=delay_wgrad_compute,
                overlap=overlap,
                max_tokens=max_tokens,
                dtype=dtype,
                device=device,
            )
            self.add_module(name, layer)
        first = self.layers[0]
        self.sequence_parallel = first.sequence_parallel
        sizes = tuple(size for layer in self.layers for size in layer._layer.out_features)
        self._layer = dataclasses.replace(first._layer, kind="shared input", out_features=sizes, waiting=deque())

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        """The layers, in the order of the outputs."""
        return [layer for layer in self.children() if isinstance(layer, ColumnParallelLinear)]

    def forward(self, input_: torch.Tensor) -> tuple[Outputs, Outputs | None]:
        """Each layer's output, and each layer's bias where they were not added."""
        layers = self.layers
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        rows = rows_of(input_)
        # Gradients that wait have their biases in PyTorch, so that these ones do not wait.
        in_engine = not self.skip_bias_add and not self._layer.delayed
        made = product(rows, weights, biases if in_engine else [], self._layer)
        if biases and not in_engine and not self.skip_bias_add:
            made = tuple(y + bias for y, bias in zip(made, biases, strict=True))
        outputs = tuple(y.reshape(-1, *input_.shape[1:-1], y.shape[-1]) for y in made)
        return outputs, tuple(biases) if self.skip_bias_add and biases else None

    def passes(self, tokens: int) -> LayerPasses:
        """How the passes of all layers together are run; as `ColumnParallelLinear.passes`."""
        in_engine = self.layers[0].bias is not None and not self.skip_bias_add and not self._layer.delayed
        return self._layer.passes(tokens, [layer.weight for layer in self.layers], in_engine)

    def backward_dw(self) -> None:
        """Computes the gradients of all weights that `delay_wgrad_compute` left for later."""
        self._layer.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron-Core's: those of the layers."""
        states: dict[str, Any] = {}
        for name, layer in self.named_children():
            states |= layer.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)  # type: ignore[operator]
        return states

    def extra_repr(self) -> str:
        """For `print`."""
        return f"{self.input_size}, {self.output_sizes}, ranks={self.group.size}"
