"""Step tables that a spawned process without a context made, on a GPU: the same bits, and what is refused."""

from __future__ import annotations

import json

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE  # noqa: E402

from counterpoint._native import Described  # noqa: E402

SHAPE = {"heads": (8, 2), "head_dim": 128, "dtype": torch.bfloat16}
TOKENS = 4096


def documents(number: int) -> cp.Mask:
    return cp.Mask.varlen([0, 700 + 64 * number, 3000 - 64 * number, TOKENS], causal=True)


class Packed(torch.utils.data.Dataset):
    """A plan and its tables, for every number with and without deterministic gradients."""

    def __init__(self, description: cp.GroupDescription) -> None:
        self.description = description

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int):
        plan = self.description.plan(documents(number), **SHAPE, deterministic=number % 2 == 0)
        tables = self.description.tables(plan)
        assert not torch.cuda.is_initialized()
        return number, plan, tables


def results(plan: cp.Plan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(TOKENS, heads, 128, device=DEVICE).bfloat16() for heads in (8, 2, 2)]
    local = [plan.dispatch(x).requires_grad_() for x in tensors]
    out, lse = cp.attention(*local, plan)
    return [out, lse, *torch.autograd.grad(out.float().sin().sum(), local)]


@pytest.mark.parametrize("size", [1, 2])
def test_tables_of_a_worker_give_the_same_bits(size: int) -> None:
    group = cp.LocalGroup(size, device=DEVICE)
    loader = torch.utils.data.DataLoader(
        Packed(group.description), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for number, plan, tables in loader:
        plan = group.prefetch(plan, tables=tables).result()
        own = group.plan(documents(number), **SHAPE, deterministic=number % 2 == 0)
        assert plan.fingerprint == own.fingerprint
        ahead, made = results(plan), results(own)
        # dq is summed in no order, unless deterministic gradients are asked for.
        same = len(made) if number % 2 == 0 else 2
        assert all(torch.equal(x, y) for x, y in zip(ahead[:same], made[:same], strict=True)), number
        for x, y in zip(ahead[same:], made[same:], strict=True):
            assert float((x.double() - y.double()).norm() / y.double().norm()) < 1e-2, number
    group.check()


def test_tables_for_another_gpu_are_refused() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    facts = json.loads(group.description._native.to_json())
    gpu = facts["device"]["Gpu"]
    other = {**facts, "device": {"Gpu": {**gpu, "sm_count": gpu["sm_count"] - 2}}}
    description = cp.GroupDescription(Described.from_json(json.dumps(other)), deterministic=False)
    plan = description.plan(documents(0), **SHAPE)
    with pytest.raises(cp.PlanError, match=f"{gpu['sm_count'] - 2} multiprocessors.*and this rank is on"):
        group.prefetch(plan, tables=description.tables(plan)).result()
    # The plan is the group's all the same.
    assert results(plan)[0].shape == (TOKENS, 8, 128)
    group.check()
