"""Keys, and what is done with them: dispatch, attention, undispatch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from counterpoint.compat.magi import env
from counterpoint.compat.magi.api.functools import (
    apply_padding,
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    pad_at_dim,
    unpad_at_dim,
)
from counterpoint.compat.magi.common.enum import AttnMaskType
from counterpoint.compat.magi.common.forward_meta import AttnForwardMeta
from counterpoint.compat.magi.common.ranges import AttnRanges
from counterpoint.compat.magi.config import DistAttnConfig
from counterpoint.compat.magi.dist_attn_runtime_mgr import (
    DistAttnRuntimeDict,
    DistAttnRuntimeKey,
    DistAttnRuntimeMgr,
    init_dist_attn_runtime_key,
    init_dist_attn_runtime_mgr,
)
from counterpoint.compat.magi.groups import identity, size_of, split

GeneralAttnMaskType: TypeAlias = str | AttnMaskType | Sequence[str | AttnMaskType]


class DistAttnRuntimeDictManager:
    """Managers by key, in one cache for each group: all ranks of a group keep and drop the same keys."""

    def __init__(self, max_size_per_group: int) -> None:
        self.max_size_per_group = max_size_per_group
        self._caches: dict[tuple[Any, ...], DistAttnRuntimeDict] = {}

    def _of(self, cp_group: Any) -> DistAttnRuntimeDict:
        return self._caches.setdefault(identity(cp_group), DistAttnRuntimeDict(self.max_size_per_group))

    def get(self, key: DistAttnRuntimeKey, default: DistAttnRuntimeMgr | None = None) -> DistAttnRuntimeMgr | None:
        """The manager of a key, which becomes the most recently used."""
        found: DistAttnRuntimeMgr | None = self._of(key.cp_group).get(key, default)
        return found

    def __contains__(self, key: DistAttnRuntimeKey) -> bool:
        return key in self._of(key.cp_group)

    def __setitem__(self, key: DistAttnRuntimeKey, value: DistAttnRuntimeMgr) -> None:
        self._of(key.cp_group)[key] = value

    def __getitem__(self, key: DistAttnRuntimeKey) -> DistAttnRuntimeMgr:
        return self._of(key.cp_group)[key]

    def keys(self, cp_group: dist.ProcessGroup | None = None) -> list[DistAttnRuntimeKey]:
        """The keys of a group, or of all."""
        caches = self._caches.values() if cp_group is None else [self._of(cp_group)]
        return [key for cache in caches for key in cache]

    def get_most_recent_key(self, cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey | None:
        """The key of a group that was used last."""
        if cp_group is None:
            raise ValueError("cp_group is None; the most recent key is one of a group")
        return self._of(cp_group).get_most_recent_key()

    def clear(self, cp_group: dist.ProcessGroup | None = None) -> None:
        """Drops the keys of a group, or of all."""
        if cp_group is None:
            self._caches.clear()
        else:
            self._caches.pop(identity(cp_group), None)


dist_attn_runtime_dict_mgr = DistAttnRuntimeDictManager(env.general.dist_attn_runtime_dict_size())


def _manager(key: DistAttnRuntimeKey) -> DistAttnRuntimeMgr:
    found = dist_attn_runtime_dict_mgr.get(key)
    if found is None:
        kept = dist_attn_runtime_dict_mgr.max_size_per_group
        raise ValueError(
            f"there is no plan for this key: it was dropped by clear_cache, or by more than {kept} later keys of its group "
            "(MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE); make the key again"
        )
    return found


def _is_ready(key: DistAttnRuntimeKey) -> bool:
    """Whether there is a plan for this key, of a group that has not failed."""
    return key in dist_attn_runtime_dict_mgr and not dist_attn_runtime_dict_mgr[key].plan.group._is_failure_known


def magi_attn_varlen_key(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: dist.ProcessGroup | DeviceMesh,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008 - frozen
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """The key of packed documents, by their cumulative starts. `pad_size` and `chunk_size` are deprecated."""
    q_ranges, k_ranges, kinds, total_q, total_k = infer_attn_mask_from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return _key(
        q_ranges,
        k_ranges,
        kinds,
        (total_q, total_k),
        (num_heads_q, num_heads_kv, head_dim),
        pad_size,
        cp_group_or_mesh,
        dist_attn_config,
        chunk_size,
        (True, True, True),
    )


def magi_attn_flex_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: dist.ProcessGroup | DeviceMesh,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008 - frozen
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """The key of slices. `pad_size` and `chunk_size` are deprecated.

    Chunks have `DispatchConfig.chunk_size` rows, or fewer so that every rank has MAGI_ATTENTION_MIN_CHUNKS_PER_RANK; rows are
    padded to a multiple of chunk x ranks unless `DispatchConfig.uneven_shard`.
    """
    return _key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        (total_seqlen_q, total_seqlen_k),
        (num_heads_q, num_heads_kv, head_dim),
        pad_size,
        cp_group_or_mesh,
        dist_attn_config,
        chunk_size,
        (is_same_source, is_q_permutable, is_k_permutable),
    )


def _key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    totals: tuple[int, int],
    shape: tuple[int, int, int],
    pad_size: int,
    cp_group_or_mesh: Any,
    config: DistAttnConfig,
    chunk_size: int | None,
    source: tuple[bool, bool, bool],
) -> DistAttnRuntimeKey:
    total_q, total_k = totals
    if q_ranges.end > total_q or k_ranges.end > total_k:
        raise AssertionError(f"ranges end at {q_ranges.end} and {k_ranges.end}, beyond {total_q} queries and {total_k} keys")
    kinds = _kinds(attn_mask_type, len(q_ranges))
    group, mesh = split(cp_group_or_mesh)
    ranks = size_of(group)
    chunk = _chunk(config, chunk_size, total_q, ranks)
    if pad_size != 0:
        warnings.warn("pad_size is deprecated, and follows from the chunk size", DeprecationWarning, stacklevel=3)
    pad = 0 if config.dispatch_config.uneven_shard else compute_pad_size(total_q, ranks, chunk)
    if pad:
        q_ranges, k_ranges, kinds = apply_padding(q_ranges, k_ranges, kinds, total_q, pad)
    total_q, total_k = total_q + pad, total_k + pad
    slices = (q_ranges, k_ranges, kinds, total_q, total_k, *shape)
    key = init_dist_attn_runtime_key(*slices, pad, chunk, group, mesh, config)
    if not _is_ready(key):
        dist_attn_runtime_dict_mgr[key] = init_dist_attn_runtime_mgr(*slices, chunk, group, mesh, config, *source)
    return key


def _kinds(attn_mask_type: GeneralAttnMaskType, slices: int) -> list[AttnMaskType]:
    """One type for each slice; a name that is none is a `ValueError`."""
    if isinstance(attn_mask_type, (str, AttnMaskType)):
        attn_mask_type = [attn_mask_type] * slices
    given = list(attn_mask_type)
    for kind in given:
        if not isinstance(kind, (str, AttnMaskType)):
            raise AssertionError(f"attn_mask_type has a {type(kind).__name__}; it has AttnMaskType or their names")
    if len(given) != slices:
        raise AssertionError(f"attn_mask_type has {len(given)} types for {slices} slices")
    return [AttnMaskType(kind) for kind in given]


def _chunk(config: DistAttnConfig, chunk_size: int | None, total: int, ranks: int) -> int:
    """Rows of a chunk."""
    configured = config.dispatch_config.chunk_size
    if chunk_size is not None:
        warnings.warn("chunk_size is deprecated; give DispatchConfig(chunk_size=...)", DeprecationWarning, stacklevel=4)
        if configured is not None and configured != chunk_size:
            raise ValueError(f"chunk_size is {chunk_size}, and that of the DispatchConfig {configured}; give one")
        configured = chunk_size
    most = -(-total // (env.general.min_chunks_per_rank() * ranks))
    chunk = most if configured is None else min(most, configured)
    if -(-total // chunk) < ranks:
        raise AssertionError(f"{total} rows in chunks of {chunk} are fewer chunks than {ranks} ranks")
    return chunk


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _deprecated(function: _Function) -> _Function:
    # Not typing_extensions.deprecated: PyTorch does not need that package from Python 3.13 on.
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        message = f"{function.__name__} is deprecated; make a key, and call dispatch with it"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


@_deprecated
def magi_attn_varlen_dispatch(
    x: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: dist.ProcessGroup | DeviceMesh,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008 - frozen
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """`magi_attn_varlen_key` and `dispatch`. Deprecated."""
    key = magi_attn_varlen_key(
        cu_seqlens_q,
        cu_seqlens_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        causal,
        window_size,
        dist_attn_config,
        chunk_size,
    )
    return dispatch(x, key), key


@_deprecated
def magi_attn_flex_dispatch(
    x: torch.Tensor,
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: dist.ProcessGroup | DeviceMesh,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008 - frozen
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """`magi_attn_flex_key` and `dispatch`. Deprecated."""
    key = magi_attn_flex_key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        total_seqlen_q,
        total_seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        dist_attn_config,
        is_same_source,
        is_q_permutable,
        is_k_permutable,
        chunk_size,
    )
    return dispatch(x, key), key


def dispatch(x: torch.Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0) -> torch.Tensor:
    """This process's rows of `x`, which has all rows along its first axis; rows of padding are `pad_value`."""
    return _manager(key).dispatch_qo(pad_at_dim(x, 0, key.pad_size, pad_value))


def undispatch(x: torch.Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False) -> torch.Tensor:
    """All rows, without padding, on every rank. Collective.

    The backward takes this rank's rows of the gradient; with `is_partial_grad`, of the sum of all ranks' gradients.
    """
    return unpad_at_dim(_manager(key).undispatch_qo(x, is_partial_grad), 0, key.pad_size)


def roll(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """As `torch.roll` of all rows, padding included, of dispatched rows along `dim`. Collective."""
    return _manager(key).roll(x, shift, dim)


def roll_simple(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """The same as `roll`."""
    return _manager(key).roll_simple(x, shift, dim)


def calc_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key: DistAttnRuntimeKey,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of local rows over the keys of all ranks: `(out, AttnForwardMeta(lse, None))`. Collective.

    `sink [sink tokens, heads]` is f32, and the same on all ranks; MAGI_ATTENTION_DSINK_ALL_REDUCE_OP says what they get of its
    gradient.
    """
    return _manager(key).calc_attn(q, k, v, sink, softmax_scale, softcap, return_max_logits)


def get_position_ids(key: DistAttnRuntimeKey) -> torch.Tensor:
    """The global row of every local row; of padding, the last row that is none."""
    return _manager(key).get_position_ids()


def get_most_recent_key(cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey:
    """The key of a group that was made or used last."""
    key = dist_attn_runtime_dict_mgr.get_most_recent_key(cp_group)
    if key is None:
        raise ValueError("no key of this group is kept; make one by magi_attn_varlen_key or magi_attn_flex_key")
    return key


def clear_cache(cp_group: dist.ProcessGroup | None = None) -> None:
    """Drops the keys of a group, or of all."""
    dist_attn_runtime_dict_mgr.clear(cp_group)


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """Another mask, of packed documents, on the dispatch of a key."""
    q_ranges, k_ranges, kinds, _, _ = infer_attn_mask_from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return make_flex_key_for_new_mask_after_dispatch(
        q_ranges, k_ranges, kinds, key_for_dispatch, dist_attn_config=dist_attn_config
    )


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """Another mask on the dispatch of a key. Of `dist_attn_config` only the overlap is taken."""
    first = key_for_dispatch
    kinds = _kinds(attn_mask_type, len(q_ranges))
    manager = _manager(first)
    if first.pad_size:
        q_ranges, k_ranges, kinds = apply_padding(
            q_ranges, k_ranges, kinds, first.total_seqlen_q - first.pad_size, first.pad_size
        )
    config = DistAttnConfig(
        dispatch_config=first.dist_attn_config.dispatch_config,
        overlap_config=(dist_attn_config or first.dist_attn_config).overlap_config,
    )
    shape = (
        manager.num_heads_q if num_heads_q is None else num_heads_q,
        manager.num_heads_kv if num_heads_kv is None else num_heads_kv,
        manager.head_dim if head_dim is None else head_dim,
    )
    slices = (q_ranges, k_ranges, kinds, first.total_seqlen_q, first.total_seqlen_k, *shape)
    group, mesh = first.cp_group, first.cp_mesh
    key = init_dist_attn_runtime_key(*slices, first.pad_size, first.chunk_size, group, mesh, config)
    if not _is_ready(key):
        dist_attn_runtime_dict_mgr[key] = init_dist_attn_runtime_mgr(
            *slices,
            first.chunk_size,
            group,
            mesh,
            config,
            ref_dispatch_meta_q=manager.dispatch_meta_q,
            ref_dispatch_meta_k=manager.dispatch_meta_k,
        )
    return key
