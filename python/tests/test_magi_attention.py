"""MagiAttention's face computes: slices, and key, dispatch, attention, undispatch, against the dense answer."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from random_cases import Case, compare, random_case, reference  # noqa: E402

import counterpoint as cp  # noqa: E402
from counterpoint.compat.magi import api, functional, hints  # noqa: E402
from counterpoint.compat.magi.api import AttnMaskType, AttnRanges, DispatchConfig, DistAttnConfig, OverlapConfig  # noqa: E402
from counterpoint.compat.magi.common.enum import AttnRole  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    hints._said.clear()
    api.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        yield


def slices_of(mask: cp.Mask):
    names = ["full", "causal", "inv_causal", "bi_causal"]
    q, k, types = zip(*mask.slices, strict=True) if mask.slices else ((), (), ())
    return list(q), list(k), [names.index(kind) for kind in types]


def ranges_of(mask: cp.Mask):
    q, k, types = slices_of(mask)
    return torch.tensor(q).reshape(-1, 2), torch.tensor(k).reshape(-1, 2), torch.tensor(types)


def leaves_of(case: Case) -> dict[str, torch.Tensor]:
    given = {"q": case.q, "k": case.k, "v": case.v} | ({} if case.sink is None else {"sink": case.sink})
    return {name: tensor.clone().requires_grad_() for name, tensor in given.items()}


@pytest.mark.parametrize("seed", range(12))
def test_attention_over_slices(seed: int) -> None:
    case = random_case(seed)
    leaves = leaves_of(case)
    arguments = {"softmax_scale": case.scale, "softcap": case.softcap}
    out, meta = api.flex_flash_attn_func(
        leaves["q"], leaves["k"], leaves["v"], *ranges_of(case.mask), sink=leaves.get("sink"), **arguments
    )
    out.backward(case.dout)
    assert meta.max_logits is None
    found = {"out": out, "lse": meta.lse} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    compare(found, reference(case), torch.float64)
    if case.sink is None:
        again, lse = functional.ffa_fa4_func(case.q, case.k, case.v, *ranges_of(case.mask), **arguments)
        assert torch.equal(again, out) and torch.equal(lse, meta.lse)
        empty = torch.zeros(0, 2, dtype=torch.int32)
        reused, _ = functional.ffa_fa4_func(case.q, case.k, case.v, empty, empty, **arguments, reuse_attn_arg=True)
        assert torch.equal(reused, out)


@pytest.mark.parametrize("seed", range(3))
def test_max_logits_are_of_each_head(seed: int) -> None:
    case = random_case(seed)
    arguments = {"softmax_scale": case.scale, "softcap": case.softcap, "return_max_logits": True}
    _, meta = api.flex_flash_attn_func(case.q, case.k, case.v, *ranges_of(case.mask), sink=case.sink, **arguments)
    options = {"sink": case.sink, "scale": case.scale, "softcap": case.softcap, "return_max_logits": True}
    _, _, expected = cp.flex_attention(case.q, case.k, case.v, case.mask, **options)
    assert meta.max_logits.shape == (case.q.shape[1],) and torch.equal(meta.max_logits, expected)


def test_sinks_of_each_query() -> None:
    case = random_case(0)
    rows, heads = case.q.shape[:2]
    sink = torch.randn(rows, 3, heads, dtype=torch.float64)
    sink[rows // 2] = sink[0]
    leaves = [tensor.clone().requires_grad_() for tensor in (case.q, case.k, case.v, sink)]
    out, meta = api.flex_flash_attn_func(*leaves[:3], *ranges_of(case.mask), sink=leaves[3], sink_layout="ssh")
    found = [out, meta.lse, *torch.autograd.grad(out, leaves, case.dout)]
    # By the definition: a sink is a column of logits without a value.
    again = [tensor.clone().requires_grad_() for tensor in (case.q, case.k, case.v, sink)]
    q, k, v, s = again
    group = heads // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~torch.as_tensor(case.mask.to_dense()), -torch.inf)
    every = torch.cat([logits, s.permute(2, 0, 1)], -1)
    weights = torch.softmax(every, -1)[..., : k.shape[0]]
    right = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    wanted = [right, every.logsumexp(-1).T, *torch.autograd.grad(right, again, case.dout)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-6, atol=1e-6)


def test_slices_without_types_are_full_and_empty_ones_see_nothing() -> None:
    q = torch.randn(6, 2, 8)
    ranges = torch.tensor([[0, 4], [4, 6]])
    out, meta = api.flex_flash_attn_func(q, q, q, ranges, torch.tensor([[0, 6], [3, 3]]))
    expected, lse = cp.flex_attention(q, q, q, cp.Mask.from_slices([(0, 4)], [(0, 6)], [0], seqlen_q=6, seqlen_k=6))
    assert torch.equal(out, expected) and torch.equal(meta.lse, lse) and (out[4:] == 0).all()


def test_options_that_tune_are_said_once() -> None:
    q, ranges = torch.randn(6, 2, 8), torch.tensor([[0, 6]])
    plain, _ = api.flex_flash_attn_func(q, q, q, ranges, ranges)
    with pytest.warns(UserWarning) as said:
        tuned, _ = api.flex_flash_attn_func(q, q, q, ranges, ranges, sm_margin=4, pack_gqa=True, max_seqlen_q=6)
    assert torch.equal(plain, tuned)
    assert sorted(str(entry.message).split()[0] for entry in said) == ["max_seqlen_q", "pack_gqa", "sm_margin"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.flex_flash_attn_func(q, q, q, ranges, ranges, sm_margin=4, pack_gqa=True, max_seqlen_q=6)


R = torch.tensor([[0, 6]])


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"index_attn_indices": torch.zeros(6, 2, 128)}, NotImplementedError, "index_attn_indices is not offered"),
        ({"index_attn": True}, NotImplementedError, "use q_ranges and k_ranges"),
        ({"q_block_size": 2}, NotImplementedError, "index_attn_indices is not offered"),
        (
            {"sink": torch.zeros(5, 1, 2), "sink_layout": "ssh"},
            AssertionError,
            "the layout ssh is \\[6 rows, sink tokens, 2 heads\\]",
        ),
        ({"sink": torch.zeros(1, 2, 8), "sink_layout": "shd"}, NotImplementedError, "sink_layout='shd' is not offered"),
        ({"k_ranges": None}, AssertionError, "q_ranges and k_ranges are missing"),
        ({"q_ranges": torch.cat([R, R]), "k_ranges": torch.cat([R, R])}, cp.MaskError, "overlap"),
        ({"attn_type_map": torch.tensor([0, 1])}, cp.MaskError, "1 q_ranges, 1 k_ranges and 2 types"),
        ({"attn_type_map": torch.tensor([7])}, cp.MaskError, "types\\[0\\] is 7"),
        ({"k_ranges": R + 1}, cp.MaskError, "7"),
    ],
)
def test_refusals(arguments, error, sentence: str) -> None:
    q = torch.randn(6, 2, 8)
    with pytest.raises(error, match=sentence):
        api.flex_flash_attn_func(q, q, q, **{"q_ranges": R, "k_ranges": R, **arguments})


def key_of(case: Case, group, **config):
    q, k, types = slices_of(case.mask)
    return api.magi_attn_flex_key(
        AttnRanges.from_ranges(q),
        AttnRanges.from_ranges(k),
        [AttnMaskType.from_int_type(kind) for kind in types],
        case.mask.seqlen_q,
        case.mask.seqlen_k,
        case.q.shape[1],
        case.k.shape[1],
        case.q.shape[2],
        0,
        group,
        dist_attn_config=DistAttnConfig(**config),
    )


def through_the_chain(case: Case, key) -> dict[str, torch.Tensor]:
    leaves = leaves_of(case)
    q, k, v = (api.dispatch(leaves[name], key) for name in "qkv")
    out, meta = api.calc_attn(q, k, v, key, leaves.get("sink"), case.scale, case.softcap)
    whole = api.undispatch(out, key)
    whole.backward(case.dout)
    lse = api.undispatch(meta.lse, key)
    return {"out": whole, "lse": lse} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


CONFIGS = [
    {},
    {"dispatch_config": DispatchConfig(chunk_size=4, alg=api.ToppHeapDispatchAlg()), "overlap_config": OverlapConfig(degree=3)},
    {"dispatch_config": DispatchConfig(alg=api.SequentialDispatchAlg()), "overlap_config": OverlapConfig(degree=0)},
    {
        "dispatch_config": DispatchConfig(chunk_size=8, uneven_shard=True),
        "overlap_config": OverlapConfig(degree=None, mode=api.AttnOverlapMode.DYNAMIC),
    },
]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "affinity", "sequential", "uneven"])
@pytest.mark.parametrize(("seed", "ranks"), [(seed, 1 + seed % 3) for seed in range(6)])
def test_the_chain(seed: int, ranks: int, config) -> None:
    case = random_case(100 + seed, self_attention=True)
    if not case.mask.slices:
        pytest.skip("no pair is seen")
    group = cp.LocalGroup(ranks)
    key = key_of(case, group, **config)
    compare(through_the_chain(case, key), reference(case), torch.float64)
    assert api.get_most_recent_key(group) == key
    positions = api.get_position_ids(key)
    last = max(q_end for (_, q_end), _, _ in case.mask.slices) - 1
    rows = torch.arange(case.mask.seqlen_q)
    dispatched = api.dispatch(rows, key, pad_value=last)
    assert torch.equal(positions, dispatched.clamp(max=last))
    assert torch.equal(api.undispatch(dispatched, key), rows)
    if not key.uneven_shard:
        manager = api.dist_attn_runtime_dict_mgr[key]
        assert (
            len({len(part.to_naive_ranges()) and part.total_seqlen for part in manager.dispatch_meta_q.host_ranges_per_rank}) == 1
        )
        assert key.total_seqlen_q % (key.chunk_size * ranks) == 0 and key.pad_size == key.total_seqlen_q - case.mask.seqlen_q


def test_the_reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
    for seed in range(4):
        case = random_case(seed, self_attention=True)
        key = key_of(case, cp.LocalGroup(2))
        compare(through_the_chain(case, key), reference(case), torch.float64)


def documents_key(group, starts, **arguments):
    starts = torch.tensor(starts, dtype=torch.int32)
    return api.magi_attn_varlen_key(starts, starts, 4, 2, 16, 0, group, **arguments)


def test_documents_and_another_mask_on_their_dispatch() -> None:
    group = cp.LocalGroup(2)
    starts = [0, 30, 77, 130]
    key = documents_key(group, starts, causal=True)
    tensors = [torch.randn(130, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    local = [api.dispatch(tensor, key) for tensor in tensors]
    cu = torch.tensor(starts, dtype=torch.int32)
    masks = {
        key: cp.Mask.varlen(starts, causal=True),
        api.make_varlen_key_for_new_mask_after_dispatch(cu, cu, key, window_size=(9, 0)): cp.Mask.varlen(
            starts, causal=True, window=(9, 0)
        ),
        api.make_flex_key_for_new_mask_after_dispatch(
            AttnRanges.from_ranges([(0, 130)]), AttnRanges.from_ranges([(0, 130)]), "full", key
        ): cp.Mask.full(130),
    }
    assert len(masks) == 3
    for one, mask in masks.items():
        assert torch.equal(api.get_position_ids(one), api.get_position_ids(key))
        out, meta = api.calc_attn(*local, one)
        expected, lse = cp.flex_attention(*tensors, mask)
        torch.testing.assert_close(api.undispatch(out, one), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(api.undispatch(meta.lse, one), lse, rtol=1e-12, atol=1e-12)


def test_rolling_is_of_all_rows_with_padding() -> None:
    key = documents_key(cp.LocalGroup(3), [0, 40, 100], causal=True)
    assert key.pad_size > 0
    x = torch.randn(100, 3)
    padded = torch.cat([x, torch.zeros(key.pad_size, 3)])
    manager = api.dist_attn_runtime_dict_mgr[key]
    for shift in (-1, 1, 17, -130):
        for function in (api.roll, api.roll_simple):
            rolled = function(api.dispatch(x, key), shift, 0, key)
            assert torch.equal(manager.undispatch_qo(rolled), padded.roll(shift, 0))
    assert manager.get_position_ids(AttnRole.KEY).equal(manager.get_position_ids()) and manager.dispatch_kv(padded).shape == (
        len(padded),
        3,
    )
    with pytest.raises(ValueError, match="attn_role is 'query'"):
        manager.get_position_ids("query")


def test_queries_of_a_dispatch_see_keys_of_another_sequence() -> None:
    group = cp.LocalGroup(2)
    key = documents_key(group, [0, 40, 100], causal=True)
    manager = api.dist_attn_runtime_dict_mgr[key]
    of_queries, of_keys = AttnRanges.from_ranges([(0, 40), (40, 100)]), AttnRanges.from_ranges([(0, 7), (7, 30)])
    q = torch.randn(100, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 30, 2, 16, dtype=torch.float64).unbind()
    expected, _ = cp.flex_attention(
        q, k, v, cp.Mask.from_slices([(0, 40), (40, 100)], [(0, 7), (7, 30)], [0, 0], seqlen_q=100, seqlen_k=30)
    )
    own = manager.get_xattn_args(of_queries, of_keys, AttnMaskType.FULL, return_host_only=True)
    assert not own.can_skip() and own.total_area == 40 * 7 + 60 * 23
    out, _ = api.flex_flash_attn_func(api.dispatch(q, key), k, v, **own.to_ffa_args())
    torch.testing.assert_close(api.undispatch(out, key), expected, rtol=1e-12, atol=1e-12)
    every = manager.get_xattn_args(of_queries, of_keys, [AttnMaskType.FULL] * 2)
    alone, _ = api.flex_flash_attn_func(q, k, v, **every.to_ffa_args())
    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="slices of cross-attention are full"):
        manager.get_xattn_args(of_queries, of_keys, AttnMaskType.CAUSAL)
    with pytest.raises(AssertionError, match="2 ranges of queries and 1 of keys"):
        manager.get_xattn_args(of_queries, of_keys[:1], AttnMaskType.FULL)


def test_keys_are_values_and_are_kept_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = cp.LocalGroup(1), cp.LocalGroup(2)
    key = documents_key(one, [0, 8, 20], causal=True)
    assert documents_key(one, [0, 8, 20], causal=True) == key and hash(documents_key(one, [0, 8, 20], causal=True)) == hash(key)
    manager = api.dist_attn_runtime_dict_mgr.get(key)
    assert manager is not None and api.dist_attn_runtime_dict_mgr[key] is manager and manager == manager
    second = documents_key(one, [0, 20], causal=True)
    assert api.get_most_recent_key(one) == second and api.dist_attn_runtime_dict_mgr[second] != manager
    documents_key(other, [0, 20])
    assert api.dist_attn_runtime_dict_mgr.keys(one) == [key, second] and len(api.dist_attn_runtime_dict_mgr.keys()) == 3
    api.get_position_ids(key)
    assert api.get_most_recent_key(one) == key
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    careful = documents_key(one, [0, 8, 20], causal=True)
    assert careful != key and careful.is_deterministic_mode_enable
    assert api.dist_attn_runtime_dict_mgr[careful].plan.deterministic
    api.clear_cache(one)
    assert key not in api.dist_attn_runtime_dict_mgr and len(api.dist_attn_runtime_dict_mgr.keys()) == 1
    for call in (
        lambda: api.calc_attn(None, None, None, key),
        lambda: api.dispatch(None, key),
        lambda: api.get_position_ids(key),
    ):
        with pytest.raises(ValueError, match="there is no plan for this key: it was dropped by clear_cache"):
            call()
    with pytest.raises(ValueError, match="no key of this group is kept"):
        api.get_most_recent_key(one)
    with pytest.raises(ValueError, match="cp_group is None"):
        api.get_most_recent_key(None)
    small = api.DistAttnRuntimeDictManager(2)
    for name, kept in (("a", 1), ("b", 2), ("c", 2)):
        entry = documents_key(other, [0, 20 + ord(name)])
        small[entry] = api.dist_attn_runtime_dict_mgr[entry]
        assert len(small.keys()) == kept and small.get_most_recent_key(other) == entry


def test_deprecated_ways() -> None:
    group = cp.LocalGroup(2)
    starts = torch.tensor([0, 50], dtype=torch.int32)
    x = torch.randn(50, 3)
    with pytest.warns(DeprecationWarning, match="magi_attn_varlen_dispatch is deprecated"):
        local, key = api.magi_attn_varlen_dispatch(x, starts, starts, 4, 2, 16, 0, group, causal=True)
    assert torch.equal(api.undispatch(local, key), x)
    one = AttnRanges.from_ranges([(0, 50)])
    with pytest.warns(DeprecationWarning, match="magi_attn_flex_dispatch is deprecated"):
        local, same = api.magi_attn_flex_dispatch(x, one, one, "causal", 50, 50, 4, 2, 16, 0, group)
    assert same == key
    with pytest.warns(DeprecationWarning, match="pad_size is deprecated"):
        api.magi_attn_varlen_key(starts, starts, 4, 2, 16, 14, group)
    with pytest.warns(DeprecationWarning, match="chunk_size is deprecated"):
        assert api.magi_attn_varlen_key(starts, starts, 4, 2, 16, 0, group, chunk_size=3).chunk_size == 3
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="chunk_size is 3, and that of the DispatchConfig 4"):
        config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=4))
        api.magi_attn_varlen_key(starts, starts, 4, 2, 16, 0, group, chunk_size=3, dist_attn_config=config)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"cp_group_or_mesh": 3}, ValueError, "cp_group_or_mesh is a int"),
        ({"attn_mask_type": "causl"}, ValueError, "causl"),
        ({"attn_mask_type": [1]}, AssertionError, "attn_mask_type has a int"),
        ({"attn_mask_type": ["full", "full"]}, AssertionError, "2 types for 1 slices"),
        ({"total_seqlen_q": 40}, AssertionError, "beyond 40 queries"),
        ({"total_seqlen_k": 60}, AssertionError, "self-attention has as many of both"),
        ({"is_q_permutable": False}, ValueError, "is_q_permutable and is_k_permutable differ"),
        ({"is_same_source": False}, NotImplementedError, "is_same_source=False"),
        (
            {"is_same_source": False, "is_k_permutable": False},
            NotImplementedError,
            "Group.plan takes any mask of queries by keys",
        ),
        ({"is_same_source": False, "is_q_permutable": False}, NotImplementedError, "is_q_permutable=False"),
        ({"is_q_permutable": False, "is_k_permutable": False}, NotImplementedError, "is_k_permutable=False"),
    ],
)
def test_keys_that_are_refused(changes, error, sentence: str) -> None:
    one = AttnRanges.from_ranges([(0, 50)])
    arguments = {
        **{"q_ranges": one, "k_ranges": one, "attn_mask_type": "causal", "total_seqlen_q": 50, "total_seqlen_k": 50},
        **{"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16, "pad_size": 0, "cp_group_or_mesh": cp.LocalGroup(2)},
    }
    with pytest.raises(error, match=sentence):
        api.magi_attn_flex_key(**{**arguments, **changes})


def test_configs() -> None:
    assert OverlapConfig().plan_arguments() == {"stages": 1} and OverlapConfig(degree=4).plan_arguments() == {"stages": 4}
    nothing = OverlapConfig(degree=0)
    assert nothing.no_overlap and not nothing.enable and (nothing.degree, nothing.max_num_chunks) == (1, 1)
    assert nothing.plan_arguments() == {"stages": 1, "overlap": "sequential"}
    dynamic = OverlapConfig(degree=None, mode=api.AttnOverlapMode.DYNAMIC)
    assert dynamic.enable and dynamic.plan_arguments() == {"stages": "auto"}
    for arguments, sentence in (
        ({"degree": None}, "the static mode wants a number"),
        ({"degree": 65}, "above max_num_chunks=64"),
        ({"mode": api.AttnOverlapMode.DYNAMIC, "degree": 2}, "the dynamic mode finds it"),
        ({"mode": api.AttnOverlapMode.DYNAMIC, "degree": None, "dynamic_max_degree": 0}, "dynamic_max_degree is 0"),
        ({"min_chunk_size": 0}, "min_chunk_size is 0"),
        ({"comm_cost_factor": 0.0}, "comm_cost_factor is 0.0"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            OverlapConfig(**arguments)
    with pytest.warns(UserWarning, match="LBDispatchAlg has no effect"):
        assert DispatchConfig(alg=api.LBDispatchAlg()).dispatch() == "affinity"
    assert [DispatchConfig(alg=alg()).dispatch() for alg in (api.MinHeapDispatchAlg, api.SequentialDispatchAlg)] == [
        "min-heap",
        "sequential",
    ]
    with pytest.warns(UserWarning, match="top_p has no effect"):
        assert DispatchConfig(alg=api.ToppHeapDispatchAlg(0.5)).dispatch() == "affinity"
    with pytest.warns(UserWarning, match="min_chunk_size has no effect"):
        OverlapConfig(min_chunk_size=64).plan_arguments()
    with pytest.warns(UserWarning, match="grpcoll_config has no effect"):
        DistAttnConfig(grpcoll_config=api.GrpCollConfig(num_sms=8)).plan_arguments()
    assert (
        api.BSDispatchAlg().is_optimal
        and api.ToppHeapDispatchAlg().is_affinity_considered
        and not api.LBDispatchAlg().is_partitions_returned
    )


def test_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from counterpoint.compat.magi import env

    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", "1")
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=4))
    assert config.overlap_config.degree == 1 and config.plan_arguments()["queries"] == "auto"
    monkeypatch.setenv("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK", "2")
    assert documents_key(cp.LocalGroup(2), [0, 64]).chunk_size == 16
    monkeypatch.setenv("MAGI_ATTENTION_NATIVE_GRPCOLL", "1")
    with pytest.warns(UserWarning, match="MAGI_ATTENTION_NATIVE_GRPCOLL has no effect"):
        documents_key(cp.LocalGroup(2), [0, 66])
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "max")
    with pytest.raises(AssertionError, match="is 'max'; it is none, sum or avg"):
        env.comm.dsink_all_reduce_op()
    monkeypatch.setenv("MAGI_ATTENTION_SDPA_BACKEND", "1")
    assert env.general.kernel_backend().value == "sdpa"
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "FFA")
    with pytest.raises(AssertionError, match="more than one is set"):
        env.general.kernel_backend()


@pytest.mark.parametrize(("reduce", "factor"), [("none", 1.0), ("sum", 1.0), ("avg", 0.5)])
def test_the_gradient_of_sinks(monkeypatch: pytest.MonkeyPatch, reduce: str, factor: float) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", reduce)
    seed = next(
        seed for seed in range(100) if (case := random_case(seed, self_attention=True)).sink is not None and case.mask.slices
    )
    case = random_case(seed, self_attention=True)
    expected = reference(case)
    expected["dsink"] = expected["dsink"] * factor
    compare(through_the_chain(case, key_of(case, cp.LocalGroup(2))), expected, torch.float64)


def test_partial_attention_merges() -> None:
    for seed in range(6):
        case = random_case(seed)
        half = case.mask.seqlen_k // 2
        dense = case.mask.to_dense()
        parts = []
        for keys in (slice(0, half), slice(half, None)):
            columns = torch.zeros_like(dense)
            columns[:, keys] = True
            part = cp.Mask.from_dense(dense & columns)
            parts.append(cp.flex_attention(case.q, case.k, case.v, part, scale=case.scale, softcap=case.softcap))
        (out1, lse1), (out2, lse2) = parts
        lse = functional.correct_attn_lse(lse1, lse2)
        out = functional.correct_attn_out(out1, lse1, out2, lse2, lse)
        both = functional.correct_attn_out_lse(out1, lse1, out2, lse2)
        torch.testing.assert_close(both, (out, lse))
        if case.sink is not None:
            with_sink = functional.correct_attn_out_lse_with_sink(out, lse, case.sink)
            torch.testing.assert_close(functional.correct_attn_out_with_sink(out, lse, case.sink), with_sink[0])
            torch.testing.assert_close(functional.correct_attn_lse_with_sink(lse, case.sink), with_sink[1])
            each = case.sink.expand(len(lse), *case.sink.shape)
            torch.testing.assert_close(functional.correct_attn_out_lse_with_sink(out, lse, each, "ssh"), with_sink)
            out, lse = functional.correct_attn_out_lse_with_sink(out, lse, case.sink, inplace=True)
        compare({"out": out, "lse": lse}, reference(case), torch.float64)
        kept = out1.clone(), lse1.clone()
        functional.correct_attn_out_lse(*kept, out2, lse2, inplace=True)
        torch.testing.assert_close(kept, both)
    with pytest.raises(NotImplementedError, match="sink_layout='shd' is not offered"):
        functional.correct_attn_lse_with_sink(lse1, torch.zeros(1, lse1.shape[1]), "shd")
    with pytest.raises(AssertionError, match="the layout sh is"):
        functional.correct_attn_lse_with_sink(lse1, torch.zeros(lse1.shape[1]))


def test_gradients_of_merged_rows_that_see_nothing_are_zeros() -> None:
    nothing, something = torch.tensor([[-torch.inf]]), torch.tensor([[0.5]])
    out = torch.ones(1, 1, 2)
    for first, second in ((nothing, nothing), (nothing, something), (something, nothing)):
        leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        merged, lse = functional.correct_attn_out_lse(out, leaves[0], out, leaves[1])
        torch.where(lse.isfinite(), lse, 0.0).sum().add(merged.sum()).backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)
