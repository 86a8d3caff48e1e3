"""What ranks of the pool run: functions of a rank, in a module that its processes import."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from random_cases import random_case, reference

import counterpoint as cp

BOUND = 1e-10


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected.masked_fill(expected.isinf(), 0)
    error = float((found.masked_fill(found.isinf(), 0) - finite).norm() / max(float(finite.norm()), 1e-3))
    assert found.shape == expected.shape and torch.equal(found.isinf(), expected.isinf()), name
    assert error < BOUND, f"{name}: {error:.2e}"


def attention_against_f64(rank: int, seed: int, chunk: int) -> int:
    case = random_case(seed, self_attention=seed % 3 != 0)
    group = cp.Group()
    plan = group.plan(case.mask, **case.arguments, chunk=chunk, deterministic=seed % 2 == 0)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.q, case.k, case.v)]
    sink = None if case.sink is None else case.sink.clone().requires_grad_()
    q = plan.dispatch(leaves[0])
    k, v = (plan.dispatch(leaf, role="k") for leaf in leaves[1:])
    out, lse = cp.attention(q, k, v, plan, sink=sink)
    # This rank's part of the loss alone: the sum over ranks is the whole.
    (out * plan.dispatch(case.dout)).sum().backward()
    expected = reference(case)
    _compare("out", plan.undispatch(out.detach()), expected["out"])
    _compare("lse", plan.undispatch(lse), expected["lse"])
    for name, leaf in zip("qkv", leaves, strict=True):
        _compare(f"d{name}", leaf.grad, expected[f"d{name}"])
    if sink is not None:
        dist.all_reduce(sink.grad)
        _compare("dsink", sink.grad, expected["dsink"])
    return plan.q_rows


def rows_there_and_back(rank: int) -> None:
    plan = cp.Group().plan(cp.Mask.causal(130), heads=1, head_dim=8, dtype="float32", chunk=16)
    for x in (
        torch.arange(130),
        torch.arange(260, dtype=torch.int32).reshape(2, 130),
        torch.arange(130) % 3 == 0,
        torch.randn(130, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        torch.randn(130, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)),
    ):
        dim = x.shape.index(130)
        local = plan.dispatch(x, dim)
        assert torch.equal(plan.undispatch(local, dim), x), x.dtype
        assert torch.equal(plan.undispatch(plan.roll(local, -5, dim), dim), x.roll(-5, dim)), x.dtype
    # Gradients: dispatch gathers, undispatch takes rows, or sums what the ranks have.
    x = torch.randn(130, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    weight = torch.randn(130, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    (plan.dispatch(x) * plan.dispatch(weight)).sum().backward()
    assert torch.equal(x.grad, weight)
    local = plan.dispatch(x.detach()).requires_grad_()
    (plan.undispatch(local) * weight).sum().backward()
    assert torch.equal(local.grad, plan.dispatch(weight))
    local.grad = None
    (plan.undispatch(local, grad="sum") * weight * (rank + 1)).sum().backward()
    assert torch.allclose(local.grad, 10 * plan.dispatch(weight))
    local.grad = None
    (plan.roll(local, 3) * plan.dispatch(weight)).sum().backward()
    assert torch.equal(local.grad, plan.dispatch(weight.roll(-3, 0)))
    padded = cp.Group().plan(cp.Mask.causal(130), heads=1, head_dim=8, dtype="float32", even=True)
    assert len(set(padded.sizes)) == 1
    assert torch.equal(padded.undispatch(padded.roll(padded.dispatch(torch.arange(130)), 1)), torch.arange(130).roll(1))


def _pairs() -> list[Any]:
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]


def groups_side_by_side(rank: int) -> list[int]:
    """Rows and columns of a 2 x 2 grid at once, as dp x cp or tp x cp have them."""
    groups = _pairs()
    own = [groups[rank // 2], groups[2 + rank % 2]]
    across = [cp.Group(group) for group in own]
    assert cp.Group(own[0]) is across[0]
    found = []
    for step in range(3):
        for group in across:
            case = random_case(200 + step, self_attention=True)
            plan = group.plan(case.mask, **case.arguments, chunk=8)
            local = [plan.dispatch(tensor) for tensor in (case.q, case.k, case.v)]
            out, _ = cp.attention(*local, plan, sink=case.sink)
            _compare("out", plan.undispatch(out), reference(case)["out"])
            found.append(group.global_rank)
    for group in across:
        group.close()
    return found


def mesh(rank: int) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = cp.Group(both["cp"])
    size = group.size
    group.close()
    return size, group.rank


def a_rank_that_raises(rank: int) -> tuple[str, float]:
    group = cp.Group(dist.new_group([0, 1, 2, 3]))
    plan = group.plan(cp.Mask.causal(256), heads=1, head_dim=8, dtype="float32", chunk=16)
    x = plan.dispatch(torch.randn(256, 1, 8))
    cp.attention(x, x, x, plan)
    began = time.monotonic()
    try:
        with group.failing_together():
            if rank == 2:
                raise KeyError("no such batch")
            cp.attention(x, x, x, plan)
    except (KeyError, cp.Error) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    waited = time.monotonic() - began
    group.close()
    return said, waited


def plans_that_differ(rank: int) -> str:
    group = cp.Group(dist.new_group([0, 1, 2, 3]), limit=20)
    length = 255 if rank == 1 else 256
    plan = group.plan(cp.Mask.causal(length), heads=1, head_dim=8, dtype="float32", chunk=16)
    x = torch.randn(plan.q_rows, 1, 8)
    try:
        cp.attention(x, x, x, plan)
    except cp.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return "nothing"


def errors_name_global_ranks(rank: int) -> tuple[str, int | None]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = cp.Group(groups[rank // 2], limit=20)
    plan = group.plan(cp.Mask.causal(64), heads=1, head_dim=8, dtype="float32", chunk=8)
    x = plan.dispatch(torch.randn(64, 1, 8))
    found: tuple[str, int | None] = ("nothing", None)
    try:
        if rank == 3:
            group.fail("out of data")
        else:
            cp.attention(x, x, x, plan)
            if rank == 2:
                cp.attention(x, x, x, plan)
    except cp.Error as error:
        found = str(error), error.global_rank
    group.close()
    return found


def a_new_mask_every_step(rank: int, steps: int) -> tuple[int, int]:
    """Threads before and after: masks leave nothing behind."""
    import os

    group = cp.Group()
    before = 0
    for step in range(steps):
        mask = cp.Mask.sliding_window(64, step + 1, 0)
        group.prefetch(mask, heads=1, head_dim=8, dtype="float32", chunk=8)
        plan = group.plan(mask, heads=1, head_dim=8, dtype="float32", chunk=8)
        x = plan.dispatch(torch.randn(64, 1, 8)).requires_grad_()
        cp.attention(x, x, x, plan)[0].sum().backward()
        if step == 2:
            before = len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))
    return before, len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))


def bad_groups(rank: int) -> list[str]:
    said = []
    for make in (
        lambda: cp.Group(3),
        lambda: cp.Group(device="cuda:0"),
        lambda: cp.Group(transport="pigeon"),
        lambda: cp.Group(dist.new_group([0, 1, 2]) if rank < 3 else dist.GroupMember.NON_GROUP_MEMBER, nodes=2),
    ):
        try:
            make()
        except (cp.Error, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    if rank == 3:
        dist.new_group([0, 1, 2])
    return said
