"""Keys of a mask on a group, and the managers behind them, which hold plans."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import counterpoint as cp
from counterpoint.compat.magi import env
from counterpoint.compat.magi.arguments import AttnArg, crossed
from counterpoint.compat.magi.common.enum import (
    AttnMaskType,
    AttnRole,
    AttnType,
    MagiAttentionKernelBackend,
    MagiAttentionPrecision,
)
from counterpoint.compat.magi.common.forward_meta import AttnForwardMeta
from counterpoint.compat.magi.common.ranges import AttnRanges
from counterpoint.compat.magi.config import DistAttnConfig
from counterpoint.compat.magi.functional.flex_flash_attn import mask_of_slices
from counterpoint.compat.magi.groups import engine_group, identity
from counterpoint.compat.magi.hints import hint, refuse
from counterpoint.compat.magi.reference import ScaledGradient, reference_attention
from counterpoint.functional import attention
from counterpoint.plan import Plan


@dataclass(frozen=True)
class DistAttnRuntimeKey:
    """Everything that a plan depends on. Hashable; equal for equal arguments."""

    q_ranges: AttnRanges
    k_ranges: AttnRanges
    attn_mask_type: tuple[AttnMaskType, ...]
    total_seqlen_q: int
    total_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    pad_size: int
    chunk_size: int
    cp_group: dist.ProcessGroup
    cp_mesh: DeviceMesh | None
    dist_attn_config: DistAttnConfig
    uneven_shard: bool
    is_deterministic_mode_enable: bool
    is_hierarchical_comm_enable: bool
    is_qo_comm_enable: bool
    is_native_grpcoll_enable: bool
    is_flatten_head_groups_enable: bool
    kernel_backend: MagiAttentionKernelBackend
    precision: MagiAttentionPrecision | None
    is_auto_range_merge_enable: bool


@dataclass(frozen=True, eq=False)
class DispatchMeta:
    """Who owns which rows, of queries or of keys."""

    attn_role: AttnRole
    plan: Plan
    max_valid_ids: int
    attn_type: AttnType = AttnType.SELF_ATTN

    @property
    def _letter(self) -> Any:
        return "q" if self.attn_role is AttnRole.QUERY else "k"

    @property
    def total_seqlen(self) -> int:
        """Rows of all ranks, padding included."""
        return self.plan._total(self._letter)

    @property
    def shard_seqlen(self) -> int:
        """Rows of this process."""
        return self.plan.q_rows if self._letter == "q" else self.plan.k_rows

    @property
    def chunk_size(self) -> int:
        """Rows of a chunk."""
        return self.plan.chunk

    @property
    def num_chunks(self) -> int:
        """Chunks of all ranks."""
        return -(-self.total_seqlen // self.plan.chunk)

    @property
    def cp_rank(self) -> int:
        """This rank."""
        return self.plan.group.rank

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.plan.group.size

    @property
    def host_ranges_per_rank(self) -> list[AttnRanges]:
        """The rows of every rank."""
        ranks = range(self.cp_size)
        return [AttnRanges.from_ranges(self.plan._ranges(rank, self._letter)) for rank in ranks]

    @property
    def partitions(self) -> list[list[int]]:
        """The chunks of every rank."""
        size = self.chunk_size
        ranks = self.host_ranges_per_rank
        return [[chunk for part in own for chunk in range(part.start // size, -(-part.end // size))] for own in ranks]

    @property
    def position_ids(self) -> torch.Tensor:
        """The global row of every local one; of padding, the last row that is none."""
        rows = self.plan.position_ids if self._letter == "q" else self.plan.k_position_ids
        return rows.to(self.plan.group.device).clamp(max=self.max_valid_ids - 1)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, DispatchMeta) and (
            (self.attn_role, self.max_valid_ids, self.host_ranges_per_rank)
            == (other.attn_role, other.max_valid_ids, other.host_ranges_per_rank)
        )


class DistAttnRuntimeMgr:
    """A plan, and what it does with tensors. Plans for other types, scales, caps and sinks are made at their first call."""

    def __init__(
        self,
        plan: Plan,
        *,
        mask: cp.Mask,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        cp_group: Any,
        dist_attn_config: DistAttnConfig,
        ref_q_ranges: AttnRanges,
        ref_k_ranges: AttnRanges,
        max_valid_ids: int,
        kernel_backend: MagiAttentionKernelBackend,
    ) -> None:
        self.plan, self.mask = plan, mask
        self.num_heads_q, self.num_heads_kv, self.head_dim = num_heads_q, num_heads_kv, head_dim
        self.cp_group, self.dist_attn_config = cp_group, dist_attn_config
        self.ref_q_ranges, self.ref_k_ranges = ref_q_ranges, ref_k_ranges
        self.is_same_source = self.is_q_permutable = self.is_k_permutable = True
        self._backend = kernel_backend
        self._plans: dict[Any, Plan] = {}
        self.dispatch_meta_q = DispatchMeta(AttnRole.QUERY, plan, max_valid_ids)
        self.dispatch_meta_k = DispatchMeta(AttnRole.KEY, plan, max_valid_ids)

    def dispatch_qo(self, q_or_o: torch.Tensor) -> torch.Tensor:
        """This process's rows of all rows of queries."""
        return self.plan.dispatch(q_or_o)

    def dispatch_kv(self, k_or_v: torch.Tensor) -> torch.Tensor:
        """This process's rows of all rows of keys."""
        return self.plan.dispatch(k_or_v, role="k")

    def undispatch_qo(self, q_or_o: torch.Tensor, is_partial_grad: bool = False) -> torch.Tensor:
        """All rows of queries, on every rank; with `is_partial_grad` the backward adds up what ranks have of the gradient."""
        return self.plan.undispatch(q_or_o, grad="sum" if is_partial_grad else "take")

    def undispatch_kv(self, k_or_v: torch.Tensor, is_partial_grad: bool = False) -> torch.Tensor:
        """Likewise of keys."""
        return self.plan.undispatch(k_or_v, role="k", grad="sum" if is_partial_grad else "take")

    def roll(self, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
        """As `torch.roll` of all rows, padding included."""
        return self.plan.roll(x, shift, dim)

    def roll_simple(self, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
        """The same as `roll`."""
        return self.plan.roll(x, shift, dim)

    def calc_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        return_max_logits: bool = False,
    ) -> tuple[torch.Tensor, AttnForwardMeta]:
        """Attention of the local rows."""
        reduce = env.comm.dsink_all_reduce_op()
        heads, sink_rows = (q.shape[-2], k.shape[-2]), 0 if sink is None else sink.shape[0]
        plan = self._plan_of(heads, q.shape[-1], v.shape[-1], q.dtype, softmax_scale, softcap, sink_rows, reduce)
        if sink is not None and reduce == "avg":
            sink = ScaledGradient.apply(sink, 1 / plan.group.size)
        if self._backend is MagiAttentionKernelBackend.SDPA:
            out, lse, max_logits = reference_attention(q, k, v, plan, sink=sink, return_max_logits=True)
            return out, AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)
        if return_max_logits:
            out, lse, max_logits = attention(q, k, v, plan, sink=sink, return_max_logits=True)
            return out, AttnForwardMeta(lse=lse, max_logits=max_logits)
        out, lse = attention(q, k, v, plan, sink=sink)
        return out, AttnForwardMeta(lse=lse, max_logits=None)

    def _plan_of(
        self,
        heads: tuple[int, int],
        head_dim: int,
        head_dim_v: int,
        dtype: torch.dtype,
        scale: float | None,
        softcap: float,
        sink_rows: int,
        reduce: str,
    ) -> Plan:
        """The plan for such tensors, on this dispatch; kept."""
        key = (heads, head_dim, head_dim_v, dtype, scale, softcap, sink_rows, reduce)
        if key not in self._plans:
            self._plans[key] = self.plan.on(
                self.mask,
                heads=heads,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                dtype=dtype,
                scale=scale,
                softcap=softcap,
                sink_rows=sink_rows,
                sink_grad="share" if reduce == "none" else "sum",
            )
        return self._plans[key]

    def get_xattn_args(
        self,
        ref_xattn_q_ranges: AttnRanges,
        ref_xattn_k_ranges: AttnRanges,
        attn_mask_type: AttnMaskType | list[AttnMaskType],
        return_host_only: bool = False,
    ) -> AttnArg:
        """What this dispatch's queries see of other keys, which every rank has whole: arguments for `flex_flash_attn_func`.

        `ref_xattn_q_ranges` are rows before the dispatch, `ref_xattn_k_ranges` rows of the other keys; slices are full. With
        `return_host_only` they are those of this process's rows, counted from 0; else of all ranks', one rank after the other,
        by the numbers that rows have before the dispatch.
        """
        kinds = attn_mask_type if isinstance(attn_mask_type, (list, tuple)) else [attn_mask_type]
        if any(kind is not AttnMaskType.FULL for kind in kinds):
            raise AssertionError(f"attn_mask_type is {attn_mask_type}; slices of cross-attention are full")
        if len(ref_xattn_q_ranges) != len(ref_xattn_k_ranges):
            counts = f"{len(ref_xattn_q_ranges)} ranges of queries and {len(ref_xattn_k_ranges)} of keys"
            raise AssertionError(f"{counts}; a slice has one of each")
        ranks = self.plan._ranks_here() if return_host_only else range(self.plan.group.size)
        own = AttnRanges.from_ranges([part for rank in ranks for part in self.plan._ranges(rank, "q")])
        q_ranges, k_ranges = crossed(own, ref_xattn_q_ranges, ref_xattn_k_ranges, is_local=return_host_only)
        area = sum(q.seqlen * k.seqlen for q, k in zip(q_ranges, k_ranges, strict=True))
        return AttnArg(q_ranges, k_ranges, [0] * len(q_ranges), area, self.plan.group.device)

    def get_position_ids(self, attn_role: AttnRole = AttnRole.QUERY) -> torch.Tensor:
        """The global row of every local row, of padding the last that is none."""
        if attn_role is AttnRole.QUERY:
            return self.dispatch_meta_q.position_ids
        if attn_role in (AttnRole.KEY, AttnRole.VALUE):
            return self.dispatch_meta_k.position_ids
        raise ValueError(f"attn_role is {attn_role!r}; it is an AttnRole")

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, DistAttnRuntimeMgr) and (
            (self.mask, self.dispatch_meta_q, self.dispatch_meta_k, self.dist_attn_config)
            == (other.mask, other.dispatch_meta_q, other.dispatch_meta_k, other.dist_attn_config)
            and identity(self.cp_group) == identity(other.cp_group)
            and (self.num_heads_q, self.num_heads_kv, self.head_dim) == (other.num_heads_q, other.num_heads_kv, other.head_dim)
        )

    __hash__ = None  # type: ignore[assignment]


class DistAttnRuntimeDict(OrderedDict[DistAttnRuntimeKey, DistAttnRuntimeMgr]):
    """Managers by key; the least recently used goes when there are more than `max_size`."""

    def __init__(self, max_size: int, *args: Any, **kwargs: Any) -> None:
        self.max_size = max_size
        super().__init__(*args, **kwargs)

    def __setitem__(self, key: DistAttnRuntimeKey, value: DistAttnRuntimeMgr) -> None:
        if self.max_size <= 0:
            return
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.max_size:
            self.popitem(last=False)

    def get(self, key: DistAttnRuntimeKey, default: Any = None) -> Any:
        """The manager, which becomes the most recently used."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def get_most_recent_key(self) -> DistAttnRuntimeKey | None:
        """The most recently used key."""
        return next(reversed(self), None)


def init_dist_attn_runtime_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: list[AttnMaskType],
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    chunk_size: int,
    cp_group: dist.ProcessGroup,
    cp_mesh: DeviceMesh | None,
    dist_attn_config: DistAttnConfig,
) -> DistAttnRuntimeKey:
    """A key of arguments that are padded already, and of the environment as it is now."""
    return DistAttnRuntimeKey(
        q_ranges=q_ranges,
        k_ranges=k_ranges,
        attn_mask_type=tuple(attn_mask_type),
        total_seqlen_q=total_seqlen_q,
        total_seqlen_k=total_seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        pad_size=pad_size,
        chunk_size=chunk_size,
        cp_group=cp_group,
        cp_mesh=cp_mesh,
        dist_attn_config=dist_attn_config,
        uneven_shard=dist_attn_config.dispatch_config.uneven_shard,
        is_deterministic_mode_enable=env.general.is_deterministic_mode_enable(),
        is_hierarchical_comm_enable=env.comm.is_hierarchical_comm_enable(),
        is_qo_comm_enable=env.comm.is_qo_comm_enable(),
        is_native_grpcoll_enable=env.comm.is_native_grpcoll_enable(),
        is_flatten_head_groups_enable=env.general.is_flatten_head_groups_enable(),
        kernel_backend=env.general.kernel_backend(),
        precision=env.general.precision(),
        is_auto_range_merge_enable=env.general.is_auto_range_merge_enable(),
    )


def init_dist_attn_runtime_mgr(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: list[AttnMaskType],
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    chunk_size: int,
    cp_group: dist.ProcessGroup,
    cp_mesh: DeviceMesh | None = None,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008 - frozen
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    ref_dispatch_meta_q: DispatchMeta | None = None,
    ref_dispatch_meta_k: DispatchMeta | None = None,
) -> DistAttnRuntimeMgr:
    """Plans slices, which are padded already, on the dispatch of `ref_dispatch_meta_q` if that is given."""
    _check_source(is_same_source, is_q_permutable, is_k_permutable)
    if total_seqlen_q != total_seqlen_k:
        raise AssertionError(f"{total_seqlen_q} queries and {total_seqlen_k} keys; self-attention has as many of both")
    _say_environment()
    kinds = [kind.to_int_type() for kind in attn_mask_type]
    queries, keys = q_ranges.to_naive_ranges(), k_ranges.to_naive_ranges()
    mask = mask_of_slices([list(q) for q in queries], [list(k) for k in keys], kinds, total_seqlen_q, total_seqlen_k)
    on = None if ref_dispatch_meta_q is None else ref_dispatch_meta_q.plan
    plan = engine_group(cp_group, cp_mesh).plan(
        mask,
        heads=(num_heads_q, num_heads_kv),
        head_dim=head_dim,
        dtype="bfloat16",
        chunk=chunk_size,
        deterministic=True if env.general.is_deterministic_mode_enable() else None,
        on=on,
        **dist_attn_config.plan_arguments(),
    )
    valid = [q[1] for q, k in zip(queries, keys, strict=True) if q[0] < q[1] and k[0] < k[1]]
    return DistAttnRuntimeMgr(
        plan,
        mask=mask,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        cp_group=cp_group,
        dist_attn_config=dist_attn_config,
        ref_q_ranges=q_ranges,
        ref_k_ranges=k_ranges,
        max_valid_ids=max(valid, default=total_seqlen_q) if on is None else _meta(ref_dispatch_meta_q).max_valid_ids,
        kernel_backend=env.general.kernel_backend(),
    )


def _meta(meta: DispatchMeta | None) -> DispatchMeta:
    assert meta is not None
    return meta


def _check_source(same: bool, q_permutable: bool, k_permutable: bool) -> None:
    if same and q_permutable and k_permutable:
        return
    if same and q_permutable != k_permutable:
        raise ValueError("is_q_permutable and is_k_permutable differ; of one source, both rows or none can be permuted")
    arguments = f"is_same_source={same}, is_q_permutable={q_permutable}, is_k_permutable={k_permutable}"
    refuse(arguments, "keys are for self-attention whose rows may be permuted; Group.plan takes any mask of queries by keys")


def _say_environment() -> None:
    """Says which variables that are set have no effect."""
    set_ = {
        "MAGI_ATTENTION_NATIVE_GRPCOLL": env.comm.is_native_grpcoll_enable(),
        "MAGI_ATTENTION_FLATTEN_HEAD_GROUPS": env.general.is_flatten_head_groups_enable(),
        "MAGI_ATTENTION_AUTO_RANGE_MERGE": env.general.is_auto_range_merge_enable(),
        "MAGI_ATTENTION_FORWARD_HIGH_PRECISION_REDUCE": env.comm.is_fwd_high_precision_reduce_enable(),
        "MAGI_ATTENTION_BACKWARD_HIGH_PRECISION_REDUCE": env.comm.is_bwd_high_precision_reduce_enable(),
    }
    for name, given in set_.items():
        if given:
            hint(name, "the engine chooses this itself")
