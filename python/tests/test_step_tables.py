"""Plans and step tables that data loaders' processes make by a group's description: results, pickles, and what is refused."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch

import counterpoint as cp
from counterpoint._native import Described

SHAPE = {"heads": (4, 2), "head_dim": 16, "dtype": torch.float32}
H200 = {"name": "NVIDIA H200", "arch": {"capability": {"major": 9, "minor": 0}, "specific": True}, "sm_count": 132}


class Packed(torch.utils.data.Dataset):
    """Documents of other lengths for every number, planned where they are packed."""

    def __init__(self, description: cp.GroupDescription) -> None:
        self.description = description

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int):
        # A worker makes neither a group nor a context on a GPU.
        assert torch.utils.data.get_worker_info() is not None and not torch.cuda.is_initialized()
        plan = self.description.plan(documents(number), **SHAPE)
        window = self.description.plan(window_of(number), **SHAPE, on=plan)
        return number, *((each, self.description.tables(each)) for each in (plan, window))


def documents(number: int) -> cp.Mask:
    return cp.Mask(f"varlen-causal:lengths={100 + 32 * number},{200 - 32 * number},77")


def window_of(number: int) -> cp.Mask:
    return cp.Mask.varlen([0, 100 + 32 * number, 300, 377], causal=True, window=(31, 0))


@pytest.fixture(scope="module")
def group() -> cp.LocalGroup:
    return cp.LocalGroup(3)


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_a_loader_s_workers_make_plans_and_tables(group, context: str) -> None:
    description = group.description
    loader = torch.utils.data.DataLoader(Packed(description), batch_size=None, num_workers=2, multiprocessing_context=context)
    seen = []
    for number, *made in loader:
        seen.append(number)
        plan, window = (group.prefetch(plan, tables=tables).result() for plan, tables in made)
        own = group.plan(documents(number), **SHAPE, chunk=plan.chunk)
        assert plan.group is group and plan.mask == documents(number)
        assert_same_bits(plan, own)
        assert torch.equal(window.position_ids, plan.position_ids)
        assert_same_bits(window, own.on(window_of(number)))
    assert seen == list(range(4)) and not group._prefetched


def assert_same_bits(plan: cp.Plan, own: cp.Plan) -> None:
    assert plan.fingerprint == own.fingerprint
    torch.manual_seed(0)
    tensors = [torch.randn(377, heads, 16) for heads in (4, 2, 2)]
    results = []
    for each in (plan, own):
        local = [each.dispatch(x).requires_grad_() for x in tensors]
        out, lse = cp.attention(*local, each)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), local)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_description_is_a_value(group) -> None:
    description = group.description
    again = pickle.loads(pickle.dumps(description))
    assert again == description and hash(again) == hash(description) and again != cp.LocalGroup(2).description
    assert repr(again) == "GroupDescription(rank=0, size=3, transport='memory', device='a CPU')"
    mask = documents(0)
    plan, own = again.plan(mask, **SHAPE, even=True), group.plan(mask, **SHAPE, even=True)
    assert (plan.fingerprint, plan.sizes, plan.choices) == (own.fingerprint, own.sizes, own.choices)
    assert torch.equal(plan.dispatch(torch.arange(377)), own.dispatch(torch.arange(377)))
    with pytest.raises(cp.PlanError, match="has no group"):
        plan.group  # noqa: B018
    tables = again.tables(plan)
    assert pickle.loads(pickle.dumps(tables)) == tables == again.tables(own)
    assert tables.nbytes == len(b"".join(tables.__reduce__()[1][0])) and "ranks=3" in repr(tables)


def test_deterministic_is_as_where_the_description_was_made(group) -> None:
    assert not group.description.plan(documents(0), **SHAPE).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        description = group.description
    finally:
        torch.use_deterministic_algorithms(False)
    assert description != group.description
    again = pickle.loads(pickle.dumps(description))
    assert again.plan(documents(0), **SHAPE).deterministic
    assert not again.plan(documents(0), **SHAPE, deterministic=False).deterministic
    with pytest.raises(cp.PlanError, match="must be True, False or None"):
        again.plan(documents(0), **SHAPE, deterministic=1)


def test_pickled_plans_say_what_is_wrong_with_them(group) -> None:
    rest, (native, *others) = group.plan(documents(0), **SHAPE).__reduce__()
    assert rest(native, *others).mask == documents(0)
    for wrong, sentence in ((native[:-1], "are not those that were made"), (b"{}", "these 2 bytes are no plan")):
        with pytest.raises(cp.PlanError, match=f"a pickled plan cannot be read: .*{sentence}"):
            rest(wrong, *others)


def test_plans_given_ahead_are_found_by_their_arguments(group) -> None:
    description, mask = group.description, documents(1)
    made = description.plan(mask, **SHAPE, even=True)
    ahead = group.prefetch(made, tables=description.tables(made))
    assert group.plan(mask, **SHAPE, even=True) is ahead.result() is made
    assert not group._prefetched
    # Not one that keeps the dispatch of another: the arguments do not say of which.
    kept = description.plan(mask, **SHAPE, on=made)
    ahead = group.prefetch(pickle.loads(pickle.dumps(kept)))
    assert group.plan(mask, **SHAPE) is not ahead.result()
    group._prefetched.clear()


def test_tables_of_something_else_are_refused(group) -> None:
    description = group.description
    plans = [description.plan(documents(number), **SHAPE) for number in range(2)]
    tables = [description.tables(plan) for plan in plans]

    def refused(tables: cp.StepTables, sentence: str) -> None:
        plan = pickle.loads(pickle.dumps(plans[0]))
        with pytest.raises(cp.PlanError, match=sentence):
            group.prefetch(plan, tables=tables).result()
        # It is the group's all the same, which makes tables for it.
        assert_same_bits(plan, group.plan(documents(0), **SHAPE, chunk=plan.chunk))
        group._prefetched.clear()

    bytes_of = tables[0].__reduce__()[1][0]
    refused(tables[1], "rank 0 does not take these step tables: they are of another plan: the plan's fingerprint")
    other = description.plan(documents(0), **SHAPE, softcap=20.0)
    refused(description.tables(other), "they are of another plan: softcap is 20 there and 0 here")
    refused(cp.StepTables(bytes_of[::-1]), "rank 0 does not take these step tables: they are of rank 2; give each rank its own")
    refused(cp.StepTables(bytes_of[:1]), "they are of 1 rank, and 3 are in this process")
    refused(cp.StepTables([b"", *bytes_of[1:]]), "these 0 bytes are no step tables")
    version = bytes_of[1].replace(b"CPST", b"CPST", 1)
    version = version[:5] + b"9" + version[6:]
    refused(cp.StepTables([bytes_of[0], version, bytes_of[2]]), "rank 1 does not take .* made by counterpoint 9.*, and this is 0")
    damaged = bytes_of[2][:-1] + bytes([bytes_of[2][-1] ^ 1])
    refused(cp.StepTables([*bytes_of[:2], damaged]), "rank 2 does not take .* are not those that were made")
    refused(
        gpu_of(description).tables(plans_on_gpu(description, plans[0])), "they are for NVIDIA H200 .*, and this rank is on a CPU"
    )
    with pytest.raises(cp.PlanError, match="is of 3 ranks, and this group has 2"):
        cp.LocalGroup(2).prefetch(plans[0])
    with pytest.raises(cp.PlanError, match="is of 3 ranks, and this describes a group of 2"):
        cp.LocalGroup(2).description.tables(plans[0])
    with pytest.raises(cp.PlanError, match="of another group"):
        cp.LocalGroup(3).prefetch(group.plan(documents(0), **SHAPE))
    with pytest.raises(cp.PlanError, match="and no mask"):
        group.prefetch(documents(0), tables=tables[0], **SHAPE)
    with pytest.raises(TypeError, match="has its 'heads' already"):
        group.prefetch(plans[0], heads=4)
    with pytest.raises(cp.PlanError, match="not a bytes"):
        group.prefetch(plans[0], tables=b"")
    with pytest.raises(cp.PlanError, match=r"must be a counterpoint\.Plan, not a Mask"):
        description.tables(documents(0))


def gpu_of(description: cp.GroupDescription) -> cp.GroupDescription:
    """The same ranks on an H200, as a machine without one knows it."""
    facts = json.loads(description._native.to_json())
    gpu = {**H200, "shared_bytes_per_block": 227 << 10}
    return cp.GroupDescription(Described.from_json(json.dumps({**facts, "device": {"Gpu": gpu}})), deterministic=False)


def plans_on_gpu(description: cp.GroupDescription, plan: cp.Plan) -> cp.Plan:
    return gpu_of(description).plan(plan.mask, **{**SHAPE, "dtype": torch.bfloat16})


def test_tables_for_a_gpu_are_made_without_one(group) -> None:
    described = pickle.loads(pickle.dumps(gpu_of(group.description)))
    assert described.device == "NVIDIA H200 (sm_90a, 132 multiprocessors, 227 KB of shared memory a block)"
    with pytest.raises(cp.PlanError, match="on GPUs attention computes in bfloat16 and float16"):
        described.plan(documents(0), **SHAPE)
    mask = cp.Mask.varlen([0, 1000, 5000, 8192], causal=True)
    plan = described.plan(mask, heads=(16, 4), head_dim=128, dtype="bfloat16")
    tables = described.tables(plan)
    assert tables == described.tables(plan) and 10_000 < tables.nbytes < 1_000_000
    assert "torch.cuda" not in sys.modules or not torch.cuda.is_initialized()
