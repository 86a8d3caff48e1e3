"""Attention, and rows between orders, on ranks that are processes: values and gradients against f64 of one process."""

from __future__ import annotations

import threading
from functools import cache

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from random_cases import compare, random_case, reference  # noqa: E402
from ranks import Ranks  # noqa: E402


@cache
def neighbours(size: int) -> dist.ProcessGroup:
    """Made once, because making it is collective among all four."""
    return dist.new_subgroups(size)[0]


def of_size(size: int) -> cp.Group:
    """This process's group of `size` neighbours."""
    return cp.Group(neighbours(size))


def random_cases(rank: int, size: int, seeds: list[int], dtype: torch.dtype) -> None:
    group = of_size(size)
    for seed in seeds:
        case = random_case(seed, dtype, self_attention=seed % 3 != 0)
        arguments = {**case.arguments, "chunk": [7, 64][seed % 2], "deterministic": seed % 4 == 0}
        # Of a sink every rank has a share of the gradient, or all of it.
        plan = group.plan(case.mask, **arguments, sink_grad="sum" if seed % 2 else "share")
        inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, *([] if case.sink is None else [case.sink]))]
        roles = ["q", "k", "k"]
        local = [plan.dispatch(x, role=role) for x, role in zip(inputs, roles, strict=False)]
        out, lse = cp.attention(*local, plan, sink=inputs[3] if case.sink is not None else None)
        whole = plan.undispatch(out)
        gradients = torch.autograd.grad(whole, inputs, case.dout)
        found = {"out": whole.detach(), "lse": plan.undispatch(lse)} | dict(
            zip(["dq", "dk", "dv", "dsink"], gradients, strict=False)
        )
        if case.sink is not None and seed % 2 == 0:
            shares = [torch.empty_like(found["dsink"]) for _ in range(dist.get_world_size())]
            dist.all_gather(shares, found["dsink"])
            first = rank // size * size
            found["dsink"] = sum(shares[first : first + size])
        compare(found, reference(case), dtype)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_problems_against_f64(ranks: Ranks, size: int) -> None:
    ranks.run(random_cases, size, list(range(200 + 10 * size, 210 + 10 * size)), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_problems_in_other_types(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(random_cases, 2, [300, 301, 302, 303], dtype)


def checked(rank: int) -> bool:
    torch.manual_seed(1)
    plan = of_size(2).plan(
        cp.Mask("varlen-causal:lengths=5,0,4"), heads=(2, 1), head_dim=4, dtype="float64", chunk=2, softcap=3.0
    )
    q = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(9, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(*whole):
        return plan.undispatch(cp.attention(*(plan.dispatch(x) for x in whole), plan)[0])

    return torch.autograd.gradcheck(call, (q, k, v))


def test_gradients_are_those_of_differences(ranks: Ranks) -> None:
    assert ranks.run(checked) == [True] * 4


def in_flight(rank: int) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(3)
    plan = of_size(4).plan(cp.Mask.causal(96), heads=2, head_dim=8, dtype="float64", chunk=8)
    whole = torch.randn(96, 2, 8, dtype=torch.float64)
    x = plan.dispatch(whole).requires_grad_()

    def layers(x, keep):
        for _ in range(3):
            x = keep(lambda x: cp.attention(x, 2 * x, x + 1, plan)[0], x)
        return x

    def plain(f, x):
        return f(x)

    stored = layers(x, plain)
    first = torch.autograd.grad(stored.square().sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(stored.square().sum(), x)[0], first)
    again = layers(x, lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], first)
    # Two graphs, and the later one's backward first.
    one, two = layers(x, plain), layers(3 * x, plain)
    torch.autograd.grad(two.sum(), x)
    assert torch.equal(torch.autograd.grad(one.square().sum(), x)[0], first)
    # As one process does it.
    alone = whole.clone().requires_grad_()
    plan = cp.LocalGroup(1).plan(cp.Mask.causal(96), heads=2, head_dim=8, dtype="float64")
    expected = torch.autograd.grad(layers(alone, plain).square().sum(), alone)[0]
    own = of_size(4).plan(cp.Mask.causal(96), heads=2, head_dim=8, dtype="float64", chunk=8).dispatch(expected)
    assert float((own - first).norm() / first.norm()) < 1e-12


def test_layers_in_flight_retained_graphs_checkpoints_and_any_order(ranks: Ranks) -> None:
    ranks.run(in_flight)


def frozen(rank: int) -> None:
    plan = of_size(2).plan(cp.Mask.causal(40), heads=2, head_dim=8, dtype="float32", chunk=8)
    torch.manual_seed(rank % 2)
    tensors = [torch.randn(plan.q_rows, 2, 8) for _ in range(3)]

    def gradients(wanted: str) -> dict[str, torch.Tensor | None]:
        q, k, v = (x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", tensors, strict=True))
        cp.attention(q, k, v, plan)[0].square().sum().backward()
        return {"q": q.grad, "k": k.grad, "v": v.grad}

    every = gradients("qkv")
    for wanted in ("q", "k", "v", "qk", "kv"):
        for name, gradient in gradients(wanted).items():
            assert (gradient is None) == (name not in wanted)
            assert gradient is None or torch.equal(gradient, every[name])


def test_frozen_inputs_get_no_gradient(ranks: Ranks) -> None:
    ranks.run(frozen)


def rows(rank: int) -> None:
    group = of_size(4)
    plan = group.plan(cp.Mask.causal(150), heads=1, head_dim=8, dtype="float32", chunk=16)
    for dtype in (torch.int64, torch.int32, torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64):
        whole = (torch.arange(300).view(2, 150) * 7 % 251 % (2 if dtype == torch.bool else 999)).to(dtype)
        local = plan.dispatch(whole, dim=1)
        assert local.shape == (2, plan.q_rows) and torch.equal(plan.undispatch(local, dim=1), whole), dtype
        for shift in (-1, 1, 40, -200, 0):
            assert torch.equal(plan.roll(local, shift, dim=1), plan.dispatch(whole.roll(shift, 1), dim=1)), (dtype, shift)
    # A loss of which every rank computes another part: the gradients of all are added up.
    x = torch.ones(plan.q_rows, 3, requires_grad=True)
    (plan.undispatch(x, grad="sum") * (group.rank + 1)).sum().backward()
    assert (x.grad == 1 + 2 + 3 + 4).all()
    x.grad = None
    (plan.undispatch(x) * (group.rank + 1)).sum().backward()
    assert (x.grad == group.rank + 1).all()
    whole = torch.ones(150, 3, requires_grad=True)
    (plan.dispatch(whole) * (group.rank + 1)).sum().backward()
    owners = torch.cat([torch.full((size,), owner + 1.0) for owner, size in enumerate(plan.sizes)])
    order = torch.cat(
        [torch.tensor([row for start, end in plan._ranges(owner, "q") for row in range(start, end)]) for owner in range(4)]
    )
    assert torch.equal(whole.grad[order, 0], owners)


def test_rows_go_between_orders_in_every_type(ranks: Ranks) -> None:
    ranks.run(rows)


def without_rows(rank: int) -> tuple[list[int], bool]:
    plan = of_size(4).plan(cp.Mask.causal(100), heads=2, head_dim=8, dtype="float32", chunk=64)
    torch.manual_seed(0)
    whole = torch.randn(100, 2, 8)
    x = plan.dispatch(whole).requires_grad_()
    out = cp.attention(x, x, x, plan)[0]
    out.square().sum().backward()
    assert x.grad.shape == x.shape
    same = torch.allclose(plan.undispatch(out), cp.flex_attention(whole, whole, whole, cp.Mask.causal(100))[0], atol=1e-5)
    return plan.sizes, same


def test_ranks_without_rows_take_part(ranks: Ranks) -> None:
    for sizes, same in ranks.run(without_rows):
        assert sizes.count(0) == 2 and same


def many_plans(rank: int) -> tuple[int, int]:
    group = of_size(4)

    def step(seed: int) -> None:
        plan = group.plan(cp.Mask.sliding_window(64, seed % 60, 0), heads=1, head_dim=8, dtype="float32", chunk=8)
        x = torch.zeros(plan.q_rows, 1, 8, requires_grad=True)
        cp.attention(x, x, x, plan)[0].sum().backward()

    def threads() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))

    for seed in range(5):
        step(seed)
    before = threads()
    for seed in range(150):
        step(seed)
    return before, threads()


def test_plans_share_one_connection_and_its_threads(ranks: Ranks) -> None:
    assert all(before == after for before, after in ranks.run(many_plans))


def measured(rank: int) -> tuple[int, float]:
    plan = of_size(4).plan(cp.Mask.causal(64), heads=1, head_dim=8, dtype="float32", chunk=8)
    x = torch.zeros(plan.q_rows, 1, 8, requires_grad=True)
    with cp.profile():
        cp.attention(x, x, x, plan)[0].sum().backward()
    return plan.timeline().forward.ranks, plan.timeline().backward.seconds


def test_calls_are_measured(ranks: Ranks) -> None:
    for size, seconds in ranks.run(measured):
        assert size == 4 and seconds > 0


def in_threads(rank: int) -> list[float]:
    """Two groups of this process, each called from a thread of its own."""
    found = [0.0, 0.0]

    def work(index: int, group: cp.Group) -> None:
        plan = group.plan(cp.Mask.full(32), heads=1, head_dim=8, dtype="float64", chunk=8)
        q = torch.zeros(plan.q_rows, 1, 8, dtype=torch.float64)
        for _ in range(50):
            found[index] = float(cp.attention(q, q, torch.full_like(q, group.rank), plan)[0].mean())

    threads = [threading.Thread(target=work, args=(index, of_size(size))) for index, size in enumerate((2, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_groups_are_called_from_threads_at_the_same_time(ranks: Ranks) -> None:
    ranks.run(in_turn)
    assert ranks.run(in_threads) == [[0.5, 1.5]] * 4


def in_turn(rank: int) -> None:
    """Makes the groups, in one order on all ranks."""
    for size in (2, 4):
        of_size(size)
