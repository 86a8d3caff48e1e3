"""Megatron-Core: a provider of module specs whose tensor-parallel layers and attention are this package's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from counterpoint._native import Mask
from counterpoint.errors import MissingLibraryError, TensorError
from counterpoint.functional import attention, flex_attention
from counterpoint.layers import layer_attention, layer_plan
from counterpoint.lookup import active_plan
from counterpoint.nn import ColumnParallelLinear, RowParallelLinear
from counterpoint.plan import Plan
from counterpoint.plan_arguments import is_deterministic
from counterpoint.processes import Group
from counterpoint.recent import Recent
from counterpoint.sequences import documents, packed_mask

__all__ = ["CoreAttention", "SpecProvider"]


class SpecProvider:
    """Gives this package's `ColumnParallelLinear`, `RowParallelLinear` and `CoreAttention`, and the rest of another provider.

    That is `rest`, or Megatron-Core's `LocalSpecProvider`. Layer norms are modules of their own: Transformer Engine's provider
    would put them and linear layers into one. Experts keep the other provider's layers.
    """

    def __init__(self, rest: Any = None) -> None:
        if rest is None:
            try:
                from megatron.core.models.backends import LocalSpecProvider
            except ImportError as error:
                raise MissingLibraryError(
                    f"counterpoint.megatron.SpecProvider needs Megatron-Core, which cannot be imported ({error}); "
                    "pip install megatron-core, or give another provider as rest"
                ) from error
            rest = LocalSpecProvider()
        self._rest = rest

    def column_parallel_linear(self) -> type:
        """This package's."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """This package's."""
        return RowParallelLinear

    def core_attention(self) -> type:
        """This package's."""
        return CoreAttention

    def fuse_layernorm_and_linear(self) -> bool:
        """They are modules of their own."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """There is no such module."""
        return None

    def __getattr__(self, name: str) -> Any:
        # Not for what is looked for before there is another provider, as when one is copied.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rest, name)


class CoreAttention(torch.nn.Module):
    """Megatron-Core's core attention, with packed sequences and context parallelism: what `TEDotProductAttention` is given.

    Tensors are `[s, b, heads, head_dim]`, or `[t, heads, head_dim]` with `packed_seq_params` of `thd`, whose `cu_seqlens_q` (and
    `cu_seqlens_q_padded`) are read once a micro-batch. Over a context-parallel group of n ranks a sequence lies as Megatron cuts
    it, pieces i and 2n - 1 - i of 2n on rank i; so does each of packed sequences, whose padded lengths are multiples of 2n then.
    Rows that were dispatched by a plan of another kind need `with plan.active():` around forward and backward; a plan that is
    active is taken whatever else is given.

    With `qk_clip` or `log_max_attention_logit`, `current_max_attn_logits` has the largest logit of each head since it was read.
    Dropout, biases and masks as tensors are refused. `softmax_type` "off-by-one" and "learnable" are sinks; the gradient of
    `softmax_offset` is the rank's share, as of any parameter.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: Any = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = getattr(config, "attention_dropout", 0.0) if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(f"attention_dropout is {dropout}; this package's attention has none: set it to 0")
        self.gives_max_logits = any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))
        # [heads], until Megatron has read it.
        self.current_max_attn_logits: torch.Tensor | None = None
        self.config, self.layer_number, self.attn_mask_type = config, max(1, layer_number), attn_mask_type
        self.attention_type, self.softmax_scale = attention_type, softmax_scale
        self.pg_collection = pg_collection
        self.context_parallel_size = getattr(config, "context_parallel_size", 1)
        self.window = _window(config, self.layer_number)
        self.softmax_type = getattr(config, "softmax_type", "vanilla")
        self.softmax_offset: torch.Tensor | None = None
        if self.softmax_type == "learnable":
            tp = getattr(config, "tensor_model_parallel_size", 1)
            on_cpu = getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available()
            device = "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
            offset = torch.zeros(config.num_attention_heads // tp, dtype=getattr(config, "params_dtype", None), device=device)
            self.softmax_offset = torch.nn.Parameter(offset)
            if getattr(config, "perform_initialization", True) and getattr(config, "init_method", None) is not None:
                config.init_method(self.softmax_offset.data)
        elif self.softmax_type not in ("vanilla", "off-by-one"):
            raise ValueError(f'softmax_type is {self.softmax_type!r}; it must be "vanilla", "off-by-one" or "learnable"')

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """The attended values, `[s, b, heads x head_dim]`, or `[t, heads x head_dim]` of packed sequences."""
        if attention_bias is not None:
            raise NotImplementedError("attention_bias is not supported by counterpoint.megatron.CoreAttention")
        causal, sink = self._is_causal(attn_mask_type, attention_mask), self._sink(query)
        plan, tensors = active_plan(), (query, key, value)
        ranks = self._ranks(packed_seq_params)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if query.ndim != (3 if packed else 4):
            wanted = "[t, heads, head_dim]" if packed else "[s, b, heads, head_dim]"
            raise TensorError(f"query is {list(query.shape)}; it must be {wanted}")
        if packed:
            if plan is not None:
                return self._dispatched(tensors, plan, sink).flatten(1)
            if ranks > 1:
                return self._over_ranks(tensors, self._packed(tensors, packed_seq_params, causal, sink), sink).flatten(1)
            mask = packed_mask(packed_seq_params, causal, self.window, query.shape[0], key.shape[0])
            return self._alone(tensors, mask, sink).flatten(1)
        by_sequence = [tensor.transpose(0, 1) for tensor in tensors]
        if plan is None and ranks == 1:
            out = self._batch(by_sequence, causal, sink)
        elif plan is None:
            parts = list(zip(*by_sequence, strict=True))
            own = self._zigzag(parts[0], packed_seq_params, causal, sink)
            out = torch.stack([self._over_ranks(part, own, sink) for part in parts])
        else:
            out = torch.stack([self._dispatched(part, plan, sink) for part in zip(*by_sequence, strict=True)])
        return out.flatten(2).transpose(0, 1)

    def _is_causal(self, given: Any, attention_mask: torch.Tensor | None) -> bool:
        kind = self.attn_mask_type if given is None else given
        name = getattr(kind, "name", str(kind))
        if name in ("causal", "padding_causal", "no_mask") or (name == "padding" and attention_mask is None):
            return "causal" in name
        raise NotImplementedError(
            f"attn_mask_type is {name}; this attention takes causal, no_mask and packed sequences. Other masks go in as a plan: "
            "with plan.active(), the plan of counterpoint.Group.plan, around forward and backward"
        )

    def _sink(self, query: torch.Tensor) -> torch.Tensor | None:
        if self.softmax_type == "vanilla":
            return None
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        if self.softmax_offset is None:
            return torch.zeros(1, query.shape[-2], dtype=dtype, device=query.device)
        return self.softmax_offset.to(dtype).unsqueeze(0)

    def _cp_group(self, packed_seq_params: Any) -> Any:
        given = getattr(packed_seq_params, "cp_group", None)
        return given if given is not None else getattr(self.pg_collection, "cp", None)

    def _ranks(self, packed_seq_params: Any) -> int:
        given = getattr(packed_seq_params, "cp_group", None)
        return given.size() if given is not None else self.context_parallel_size

    def _settings(self) -> dict[str, Any]:
        asked = getattr(self.config, "deterministic_mode", False) or None
        return {"scale": self.softmax_scale, "deterministic": is_deterministic(asked)}

    def _dispatched(self, tensors: Sequence[torch.Tensor], plan: Plan, sink: torch.Tensor | None) -> torch.Tensor:
        """Of rows that were dispatched by a plan, with this layer's window and scale."""
        q, k, v = tensors
        if self.window is not None and self.window[1] > 0:
            raise NotImplementedError(f"window_size is {self.window}; with a plan windows are causal: (tokens to the left, 0)")
        window = None if self.window is None or self.window[0] < 0 else self.window[0] + 1
        if not self.gives_max_logits:
            return layer_attention(q, k, v, plan, scale=self.softmax_scale, softcap=0.0, window=window, sink=sink)
        return self._over_ranks(
            tensors, layer_plan(plan, q, k, v, self.softmax_scale, 0.0, window, 0 if sink is None else 1), sink
        )

    def _over_ranks(self, tensors: Sequence[torch.Tensor], plan: Plan, sink: torch.Tensor | None) -> torch.Tensor:
        """Of rows that lie as a plan of this layer's has them."""
        q, k, v = tensors
        if not self.gives_max_logits:
            return attention(q, k, v, plan, sink=sink)[0]
        out, _, largest = attention(q, k, v, plan, sink=sink, return_max_logits=True)
        return self._noted(out, largest)

    def _alone(self, tensors: Sequence[torch.Tensor], mask: Mask, sink: torch.Tensor | None) -> torch.Tensor:
        q, k, v = tensors
        out, _, *largest = flex_attention(q, k, v, mask, sink=sink, return_max_logits=self.gives_max_logits, **self._settings())
        return self._noted(out, largest[0]) if largest else out

    def _noted(self, out: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """`out`, once the largest logits of the call are among those of `current_max_attn_logits`."""
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
        return out

    def _batch(self, tensors: Sequence[torch.Tensor], causal: bool, sink: torch.Tensor | None) -> torch.Tensor:
        """Of `[b, s, heads, head_dim]`: sequences of a batch are documents of one."""
        batch, seqlen_q = tensors[0].shape[:2]
        mask = documents([seqlen_q] * batch, [tensors[1].shape[1]] * batch, causal, self.window)
        rows = [tensor.flatten(0, 1) if batch > 1 else tensor[0] for tensor in tensors]
        return self._alone(rows, mask, sink).reshape(batch, seqlen_q, tensors[0].shape[2], tensors[2].shape[3])

    def _zigzag(self, part: tuple[torch.Tensor, ...], packed_seq_params: Any, causal: bool, sink: torch.Tensor | None) -> Plan:
        """The plan of a sequence that lies as Megatron's `get_batch_on_this_cp_rank` cuts it."""
        q, k, _ = part
        group = self._cp_ranks(q, packed_seq_params)
        if q.shape[0] != k.shape[0] or q.shape[0] % 2:
            raise TensorError(f"query has {q.shape[0]} rows and key {k.shape[0]}; over ranks they must be alike, and even")
        rows = q.shape[0] * group.size
        mask = documents([rows], [rows], causal, self.window)
        return _plan_of(group, mask, {**self._arguments(part, sink), "chunk": q.shape[0] // 2, "dispatch": "zigzag"})

    def _packed(self, tensors: Sequence[torch.Tensor], packed_seq_params: Any, causal: bool, sink: torch.Tensor | None) -> Plan:
        """The plan of packed sequences, each of which is cut as one is."""
        q, k, _ = tensors
        group = self._cp_ranks(q, packed_seq_params)
        if q.shape[0] != k.shape[0]:
            raise TensorError(f"query has {q.shape[0]} rows and key {k.shape[0]}; over ranks they must be alike")
        rows = q.shape[0] * group.size
        mask = packed_mask(packed_seq_params, causal, self.window, rows, rows, group.size)
        return _plan_of(group, mask, {**self._arguments(tensors, sink), "chunk": q.shape[0], "dispatch": "sequential"})

    def _cp_ranks(self, query: torch.Tensor, packed_seq_params: Any) -> Group:
        process_group = self._cp_group(packed_seq_params)
        if process_group is None:
            raise ValueError("context_parallel_size is more than 1, and pg_collection has no cp group")
        return _group_of(process_group, query.device)

    def _arguments(self, tensors: Sequence[torch.Tensor], sink: torch.Tensor | None) -> dict[str, Any]:
        q, k, v = tensors
        return {
            "heads": (q.shape[1], k.shape[1]),
            "head_dim": q.shape[2],
            "head_dim_v": v.shape[2],
            "dtype": q.dtype,
            "sink_rows": 0 if sink is None else 1,
            **self._settings(),
        }

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron-Core's: a learnable `softmax_offset` along its heads."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    """The sliding window of a layer, (rows to the left, to the right), as Megatron's `is_layer_window_attention` says."""
    window, skip = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if not window:
        return None
    if isinstance(skip, int):
        return window if layer_number % skip else None
    return window if skip is None or skip[layer_number - 1] else None


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def _group_of(process_group: Any, device: torch.device) -> Group:
    """The group of a context-parallel process group; the first call is collective."""
    known = _groups.get(process_group)
    if known is None or known._has_failed():
        known = _groups[process_group] = Group(process_group, device=device)
    return known


_plans: Recent[Any, Plan] = Recent(64)


def _plan_of(group: Group, mask: Mask, arguments: dict[str, Any]) -> Plan:
    key = (id(group), mask, *arguments.values())
    return _plans.get(key) or _plans.put(key, group.plan(mask, **arguments))
