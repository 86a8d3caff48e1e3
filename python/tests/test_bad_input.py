"""Bad input: a sentence that names the argument, what it is and what is wanted; nothing is lost, and the next call computes."""

from __future__ import annotations

import copy

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")

from counterpoint.alone import alone  # noqa: E402

ROWS, SHAPE = 32, {"heads": (2, 1), "head_dim": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def group() -> cp.LocalGroup:
    return cp.LocalGroup(2)


@pytest.fixture(scope="module")
def plan(group: cp.LocalGroup) -> cp.Plan:
    return group.plan(cp.Mask.causal(ROWS), **SHAPE, chunk=8)


def tensors(**changes: object) -> dict[str, object]:
    torch.manual_seed(0)
    return {"q": torch.randn(ROWS, 2, 8), "k": torch.randn(ROWS, 1, 8), "v": torch.randn(ROWS, 1, 8), **changes}


def refused(kind: type[Exception], sentence: str, call) -> None:
    """It raises one line, which has these words."""
    with pytest.raises(kind) as raised:
        call()
    assert sentence in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


def sparse() -> torch.Tensor:
    return torch.zeros(ROWS, 2, 8).to_sparse()


BAD_TENSORS = [
    ({"q": torch.zeros(31, 2, 8)}, "q is [31, 2, 8]; the plan wants [32, 2, 8]"),
    ({"k": torch.zeros(32, 2, 8)}, "k is [32, 2, 8]; the plan wants [32, 1, 8]"),
    ({"v": torch.zeros(32, 1, 4)}, "v is [32, 1, 4]; the plan wants [32, 1, 8]"),
    ({"v": torch.zeros(32, 1, 8, dtype=torch.float64)}, "v is torch.float64, and the plan is for torch.float32"),
    ({"q": torch.zeros(32, 2, 8, dtype=torch.int64)}, "q is torch.int64, and the plan is for torch.float32"),
    ({"q": torch.zeros(32, 2, 8, dtype=torch.complex64)}, "q is torch.complex64, and the plan is for torch.float32"),
    ({"q": torch.zeros(2, 32, 2, 8)}, "q is [2, 32, 2, 8]; all three are [tokens, heads, head_dim]"),
    ({"k": torch.zeros(1, 32, 1, 8)}, "k is [1, 32, 1, 8]; all three are [tokens, heads, head_dim]"),
    ({"q": torch.zeros(32, 16)}, "q is [32, 16]; all three are [tokens, heads, head_dim]"),
    ({"q": None}, "q must be a torch.Tensor, not a NoneType"),
    ({"v": [[0.0]]}, "v must be a torch.Tensor, not a list"),
    ({"q": torch.empty(32, 2, 8, device="meta")}, "q is on meta, and the plan's group on cpu; move it there"),
    ({"q": sparse()}, "q is torch.sparse_coo; attention takes dense tensors: give q.to_dense()"),
    ({"sink": torch.zeros(1, 2)}, "sink is given, and the plan has none; plan with sink_rows=1"),
    ({"sink": 0.5}, "sink must be a torch.Tensor, not a float"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_TENSORS, ids=[sentence for _, sentence in BAD_TENSORS])
@pytest.mark.parametrize("largest", [False, True], ids=["", "max_logits"])
def test_tensors(plan: cp.Plan, change: dict[str, object], sentence: str, largest: bool) -> None:
    refused(cp.TensorError, sentence, lambda: cp.attention(**tensors(**change), plan=plan, return_max_logits=largest))
    # Nothing has been enqueued, and nothing is lost.
    plan.group.check()
    assert cp.attention(**tensors(), plan=plan)[0].isfinite().all()


def test_sinks(group: cp.LocalGroup) -> None:
    plan = group.plan(cp.Mask.causal(ROWS), **SHAPE, chunk=8, sink_rows=1)
    refused(cp.TensorError, "sink is missing, and the plan has sink_rows=1", lambda: cp.attention(**tensors(), plan=plan))
    for sink, sentence in (
        (torch.zeros(3), "sink is [1, 3]; the plan wants [1, 2]"),
        (torch.zeros(2, 2), "sink is [2, 2]; the plan wants [1, 2]"),
        (torch.zeros(2, dtype=torch.float64), "sink is torch.float64; with tensors of torch.float32 it must be torch.float32"),
    ):
        refused(cp.TensorError, sentence, lambda sink=sink: cp.attention(**tensors(), plan=plan, sink=sink))
    mask = cp.Mask.causal(ROWS)
    refused(cp.TensorError, "sink must be a torch.Tensor", lambda: cp.flex_attention(**tensors(), mask=mask, sink=1.0))


def test_distributed_tensors_are_not_taken_for_their_parts(plan: cp.Plan) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.zeros(ROWS, 2, 8), torch.zeros(ROWS, 2, 8))
    refused(
        cp.TensorError,
        "q is a TwoTensor, and attention takes the dense rows of this process",
        lambda: cp.attention(**tensors(q=two), plan=plan),
    )


def distributed(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    plan = cp.Group().plan(cp.Mask.causal(ROWS), **SHAPE, chunk=8)
    q = DTensor.from_local(torch.zeros(8, 2, 8), init_device_mesh("cpu", (4,)), [Shard(0)])
    k = torch.zeros(8, 1, 8)
    try:
        cp.attention(q, k, k, plan)
    except cp.TensorError as error:
        cp.attention(q.to_local(), k, k, plan)
        return str(error)
    return "nothing raised"


def test_distributed_tensors_on_ranks(ranks) -> None:
    words = "q is a DTensor, and attention takes the dense rows of this process: give q.to_local()"
    assert ranks.run(distributed) == [words] * 4


def test_plans_that_are_none(group: cp.LocalGroup, plan: cp.Plan) -> None:
    for given, kind in ((None, "NoneType"), (cp.Mask.causal(ROWS), "Mask"), (plan.handle, "int")):
        words = f"plan must be a counterpoint.Plan, as Group.plan makes it, not a {kind}"
        refused(cp.TensorError, words, lambda given=given: cp.attention(**tensors(), plan=given))
    other = cp.LocalGroup(2).plan(cp.Mask.causal(ROWS), **SHAPE)
    refused(cp.PlanError, "on is a plan of another group", lambda: group.plan(cp.Mask.causal(ROWS), **SHAPE, on=other))
    refused(
        cp.PlanError,
        "on must be a counterpoint.Plan, not a Mask",
        lambda: group.plan(cp.Mask.causal(ROWS), **SHAPE, on=plan.mask),
    )


BAD_PLANS = [
    ({"heads": (2, 0)}, "heads are 2 of queries and 0 of keys"),
    ({"heads": "2"}, "heads is '2'; it must be a number, or (of queries, of keys)"),
    ({"heads": (4, 2, 1)}, "heads is (4, 2, 1); it must be a number, or (of queries, of keys)"),
    ({"heads": 2.0}, "heads is 2.0; it must be a number, or (of queries, of keys)"),
    ({"heads": 2**62}, "the tensors of 2 ranks together may have more than"),
    ({"sink_rows": 2**62}, "the tensors of 2 ranks together may have more than"),
    ({"head_dim": "8"}, "head_dim is '8'; it must be a whole number of at least 1"),
    ({"head_dim": -8}, "head_dim is -8; it must be a whole number of at least 1"),
    ({"head_dim_v": 0}, "head_dim_v is 0; it must be a whole number of at least 1"),
    ({"dtype": "int8"}, "dtype is int8; attention computes in float64, float32, bfloat16, float16"),
    ({"dtype": None}, "dtype is None; attention computes in"),
    ({"scale": "small"}, "scale is 'small'; it must be a number, 0 or from"),
    ({"scale": float("inf")}, "scale is inf; it must be a number, 0 or from"),
    ({"softcap": float("nan")}, "softcap is nan; it must be a number from"),
    ({"softcap": None}, "softcap is None; it must be a number from"),
    ({"sink_rows": -1}, "sink_rows is -1; it must be a whole number of at least 0"),
    ({"sink_rows": 1.5}, "sink_rows is 1.5; it must be a whole number of at least 0"),
    ({"chunk": 0}, "chunk is 0; it must be a whole number of at least 1"),
    ({"chunk": -8}, "chunk is -8; it must be a whole number of at least 1"),
    ({"chunk": 8.5}, "chunk is 8.5; it must be a whole number of at least 1"),
    ({"even": "yes"}, "even is 'yes'; it must be True or False"),
    ({"deterministic": 2}, "deterministic is 2; it must be True, False or None"),
    ({"dispatch": "random"}, 'dispatch is "random"; it must be "auto", "predicted"'),
    ({"stages": 1000}, "the number of stages is 1000"),
    ({"queries": "sometimes"}, 'queries is "sometimes"; it must be "never"'),
    ({"sink_grad": "all"}, 'sink_grad is \'all\'; it must be "share" or "sum"'),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_PLANS, ids=[sentence for _, sentence in BAD_PLANS])
def test_plans(group: cp.LocalGroup, change: dict[str, object], sentence: str) -> None:
    mask = cp.Mask.causal(ROWS)
    refused(cp.PlanError, sentence, lambda: group.plan(mask, **{**SHAPE, **change}))


@pytest.mark.parametrize("name", ["dispatch", "queries", "overlap", "stages"])
def test_names_that_are_no_text(group: cp.LocalGroup, name: str) -> None:
    # In the sentence itself: notes, in which a `TypeError` of the module has the name, are of Python 3.11.
    with pytest.raises((TypeError, cp.PlanError)) as raised:
        group.plan(cp.Mask.causal(ROWS), **{**SHAPE, name: 1.5})
    assert name in str(raised.value)


def test_unknown_arguments(group: cp.LocalGroup, plan: cp.Plan) -> None:
    mask = cp.Mask.causal(ROWS)
    for call in (
        lambda: cp.attention(**tensors(), plan=plan, dropout=0.1),
        lambda: cp.flex_attention(**tensors(), mask=mask, dropout=0.1),
        lambda: group.plan(mask, **SHAPE, dropout=0.1),
        lambda: group.prefetch(mask, **SHAPE, dropout=0.1),
        lambda: cp.LocalGroup(1, dropout=0.1),
        lambda: plan.on(mask, dropout=0.1),
    ):
        refused(TypeError, "dropout", call)


def test_masks_that_do_not_fit(group: cp.LocalGroup, plan: cp.Plan) -> None:
    other = cp.Mask.causal(ROWS + 1)
    refused(cp.TensorError, "q has 32 rows, and the mask 33", lambda: cp.flex_attention(**tensors(), mask=other))
    cross = cp.Mask.full(ROWS, 40)
    refused(cp.TensorError, "k has 32 rows, and the mask 40", lambda: cp.flex_attention(**tensors(), mask=cross))
    refused(
        cp.MaskError,
        "mask must be a counterpoint.Mask, not a Tensor",
        lambda: cp.flex_attention(**tensors(), mask=torch.ones(32, 32)),
    )
    refused(cp.PlanError, "mask must be a counterpoint.Mask, not a list", lambda: group.plan([[True]], **SHAPE))
    for make, words in (
        (lambda: cp.Mask.varlen(3), "cu_seqlens must be a list or a tensor of one axis of whole numbers, not 3 (int)"),
        (lambda: cp.Mask.varlen([0, "x"]), "cu_seqlens must be a list or a tensor of one axis of whole numbers"),
        (lambda: cp.Mask.from_slices(1, [], [], seqlen_q=1, seqlen_k=1), "q_ranges must be a list of (start, end)"),
        (lambda: cp.Mask.from_document_ids(None), "ids must be whole numbers, one for each token of one sequence"),
    ):
        refused(TypeError, words, make)
    refused(cp.PlanError, "plan this mask on its own", lambda: plan.on(other))
    for scale, words in ((float("nan"), "scale is nan"), ("wide", "scale is 'wide'")):
        refused(cp.PlanError, words, lambda scale=scale: cp.flex_attention(**tensors(), mask=cp.Mask.causal(ROWS), scale=scale))


def test_rows(plan: cp.Plan) -> None:
    x = torch.zeros(ROWS, 2)
    for kind, words, call in (
        (cp.TensorError, "x has 31 rows along dim 0; the plan has 32 for all rows of queries", lambda: plan.dispatch(x[1:])),
        (cp.TensorError, "the plan has 32 for this process's rows of keys", lambda: plan.undispatch(x[1:], role="k")),
        (cp.TensorError, "x has 2 rows along dim 1; the plan has 32", lambda: plan.roll(x, 1, dim=1)),
        (cp.TensorError, "dim is 2, and x has 2 axes", lambda: plan.dispatch(x, dim=2)),
        (cp.TensorError, "dim is '0'; it must be a whole number", lambda: plan.dispatch(x, dim="0")),
        (cp.TensorError, "dim is 0.0; it must be a whole number", lambda: plan.undispatch(x, dim=0.0)),
        (cp.TensorError, 'role is \'v\'; it must be "q" or "k"', lambda: plan.dispatch(x, role="v")),
        (cp.TensorError, 'grad is \'mean\'; it must be "take" or "sum"', lambda: plan.undispatch(x, grad="mean")),
        (cp.TensorError, "shift is 0.5; it must be a whole number", lambda: plan.roll(x, 0.5)),
        (cp.TensorError, "x must be a torch.Tensor, not a list", lambda: plan.dispatch([1.0] * ROWS)),
    ):
        refused(kind, words, call)


def aliasing() -> dict[str, torch.Tensor]:
    """Queries whose rows, heads or elements share memory, and one that lies backwards in the memory of another sign."""
    torch.manual_seed(1)
    return {
        "rows": torch.randn(1, 2, 8).expand(ROWS, 2, 8),
        "heads": torch.randn(ROWS, 1, 8).expand(ROWS, 2, 8),
        "elements": torch.randn(ROWS, 2, 1).expand(ROWS, 2, 8),
        "windows": torch.randn(ROWS + 40).as_strided((ROWS, 2, 8), (1, 3, 1)),
        "all": torch.randn(1).expand(ROWS, 2, 8),
        "sign": torch.randn(ROWS, 2, 8, dtype=torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("name", sorted(aliasing()))
def test_strides_that_alias_are_read_right(plan: cp.Plan, name: str) -> None:
    q = aliasing()[name]
    # A new tensor with the same elements.
    dense = torch.empty(q.shape).copy_(q)
    assert name != "sign" or q.is_neg()
    results = []
    for given in (q, dense):
        x = tensors(q=given)
        leaves = [tensor.detach().requires_grad_() for tensor in x.values()]
        if name == "sign":
            leaves[0] = given
        out, lse = cp.attention(*leaves, plan)
        # The gradient shares its elements too.
        gradients = torch.autograd.grad(out, leaves[1:], torch.ones(1).expand(out.shape))
        results.append((out.detach(), lse.detach(), *gradients))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    rows = [plan.undispatch(given.flatten(1)) for given in (q, dense)]
    assert torch.equal(*rows)


def test_gradients_of_another_sign_are_read_right(plan: cp.Plan) -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors().values()]
    dout = torch.randn(ROWS, 2, 8, dtype=torch.complex64).conj().imag
    assert dout.is_neg()
    out, _ = cp.attention(*leaves, plan)
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    wanted = torch.autograd.grad(out, leaves, dout.resolve_neg())
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_padding_may_hold_anything() -> None:
    """NaN in rows that `even=True` adds, on ranks some of which have nothing else."""
    mask = cp.Mask.varlen([0, 5, 21], causal=True)
    group = cp.LocalGroup(4)
    plan, dense = group.plan(mask, **SHAPE, even=True, chunk=8), group.plan(mask, **SHAPE)
    torch.manual_seed(2)
    whole = [torch.randn(21, heads, 8, requires_grad=True) for heads in (2, 1, 1)]
    results = []
    for one, padding in ((plan, torch.nan), (plan, torch.inf), (dense, 0.0)):
        local = [one.dispatch(x, pad_value=padding) for x in whole]
        out, lse = cp.attention(*local, one)
        loss = one.undispatch(out).square().sum()
        results.append((one.undispatch(out).detach(), one.undispatch(lse).detach(), *torch.autograd.grad(loss, whole)))
    for found in results[:2]:
        for one, wanted in zip(found, results[2], strict=True):
            assert torch.allclose(one, wanted, rtol=1e-5, atol=1e-6)


def test_scales_that_are_tensors_are_refused() -> None:
    """A plan is kept for a number: a tensor may hold another one later, and its gradient would be lost."""
    x, mask = torch.ones(8, 1, 4), cp.Mask.causal(8)
    for given, sentence in (
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "scale is .*; it must be a number.* multiply q by it instead"),
        ({"softcap": torch.tensor(2.0)}, "softcap is .*; it must be a number"),
        ({"scale": 10**400}, "scale is 10"),
        ({"scale": 1e39}, "scale is 1e.39; it must be a number, 0 or from"),
        ({"scale": 1e-46}, "scale is 1e-46"),
        ({"softcap": 1e-46}, "softcap is 1e-46"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"scale": True}, "scale is True"),
    ):
        with pytest.raises(cp.PlanError, match=sentence):
            cp.flex_attention(x, x, x, mask, **given)
    for scale in (0, 1, 0.25, torch.tensor(0.25).numpy()[()]):
        cp.flex_attention(x, x, x, mask, scale=scale)
    for shape in ((), (0, 1), (1, 1, 1)):
        with pytest.raises(cp.TensorError, match=r"sink is \[.*\]; it must be \[heads\] or"):
            cp.flex_attention(x, x, x, mask, sink=torch.zeros(shape))
    half = x.bfloat16()
    with pytest.raises(cp.TensorError, match="sink is torch.bfloat16; with tensors of torch.bfloat16 it must be torch.float32"):
        cp.flex_attention(half, half, half, mask, sink=torch.zeros(1, dtype=torch.bfloat16))


def test_derivatives_of_forward_mode_are_refused() -> None:
    x = torch.ones(8, 1, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no derivatives of forward mode"):
            cp.flex_attention(dual, x, x, cp.Mask.causal(8))
        cp.flex_attention(x, x, x, cp.Mask.causal(8))


def test_numbers_that_no_machine_has() -> None:
    with pytest.raises(cp.PlanError, match="size is 1099511627776; a process holds at most 4096 ranks"):
        cp.LocalGroup(2**40)
    with pytest.raises(cp.PlanError, match="planning_threads is 100000; it must be at most 1024"):
        cp.LocalGroup(1, planning_threads=100_000)
    with pytest.raises(cp.PlanError, match="stages must be"):
        cp.LocalGroup(1).plan(cp.Mask.causal(8), heads=1, head_dim=4, dtype="float32", stages=-1)


def test_after_an_interrupt_calls_without_ranks_go_on() -> None:
    """One call fails with the group of this process alone, and later ones take another group."""
    x, mask = torch.ones(8, 1, 4), cp.Mask.causal(8)
    expected = cp.flex_attention(x, x, x, mask)[0]
    layer = cp.nn.ColumnParallelLinear(4, 4, bias=False)
    experts = cp.nn.ExpertLayer("dispatch", 4, 4, 2, dtype=torch.float32)
    routing = cp.Routing.top_k(2, [[[0], [1]]])
    before = layer(x[:, 0])[0], experts(x[:2, 0], routing)
    alone(torch.device("cpu")).fail("KeyboardInterrupt")
    assert torch.equal(cp.flex_attention(x, x, x, mask)[0], expected)
    assert torch.equal(layer(x[:, 0])[0], before[0]) and torch.equal(experts(x[:2, 0], routing), before[1])
    assert layer.passes(8) and experts.passes(routing)


def test_copies_of_modules_are_on_the_same_ranks() -> None:
    group = cp.LocalGroup(1)
    layer = cp.nn.ColumnParallelLinear(4, 4, bias=False, tp_group=group)
    copied = copy.deepcopy(layer)
    assert copied.group is group and torch.equal(copied(torch.ones(2, 4))[0], layer(torch.ones(2, 4))[0])


def test_closed_and_failed_groups() -> None:
    def closed(group: cp.LocalGroup) -> str:
        group.close()
        return "this group is closed; make a new one"

    def failed(group: cp.LocalGroup) -> str:
        group.fail("the loss is NaN")
        return "the loss is NaN"

    for end in (closed, failed):
        group = cp.LocalGroup(2)
        plan = group.plan(cp.Mask.causal(ROWS), **SHAPE, chunk=8)
        leaves = [tensor.requires_grad_() for tensor in tensors().values()]
        out, _ = cp.attention(*leaves, plan)
        sentence = end(group)
        # What waits for its backward too; and a plan that is made now.
        for call in (
            lambda: cp.attention(*leaves, plan),  # noqa: B023
            lambda: cp.attention(*leaves, plan, return_max_logits=True),  # noqa: B023
            lambda: out.sum().backward(),  # noqa: B023
            lambda: cp.attention(*leaves, group.plan(cp.Mask.full(ROWS), **SHAPE)),  # noqa: B023
            group.check,
        ):
            refused(cp.Error, sentence, call)
        # A plan is a value: it still dispatches.
        assert torch.equal(plan.undispatch(plan.dispatch(leaves[0])), leaves[0])


def test_no_rows_at_all() -> None:
    plan = cp.LocalGroup(4).plan(cp.Mask.causal(3), heads=2, head_dim=8, dtype="float32", chunk=2)
    assert plan.sizes.count(0) == 2
    x = torch.randn(3, 2, 8, requires_grad=True)
    out, lse = cp.attention(*(plan.dispatch(x) for _ in range(3)), plan)
    out.sum().backward()
    assert out.isfinite().all() and lse.isfinite().all() and x.grad.isfinite().all()
    refused(cp.MaskError, "seqlen_q is 0", lambda: cp.Mask.causal(0))
