"""Attention in one process: values and gradients against f64, layouts, compilers, checkpoints, bad input."""

from __future__ import annotations

import gc
import os

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from random_cases import Case, compare, random_case, reference  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def leaves(case: Case) -> list[torch.Tensor]:
    tensors = [case.q, case.k, case.v] + ([] if case.sink is None else [case.sink])
    return [tensor.clone().requires_grad_() for tensor in tensors]


def found(case: Case, call) -> dict[str, torch.Tensor]:
    """What `call(q, k, v, sink)` gives, in global order, with its gradients."""
    inputs = leaves(case)
    out, lse = call(*inputs[:3], inputs[3] if case.sink is not None else None)
    gradients = torch.autograd.grad(out, inputs, case.dout)
    names = ["dq", "dk", "dv", "dsink"]
    return {"out": out.detach(), "lse": lse} | dict(zip(names, gradients, strict=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_one_device_against_f64(seed: int, dtype: torch.dtype) -> None:
    case = random_case(seed, dtype)
    options = {"scale": case.scale, "softcap": case.softcap}
    result = found(case, lambda q, k, v, sink: cp.flex_attention(q, k, v, case.mask, sink=sink, **options))
    compare(result, reference(case), dtype)
    assert result["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(100, 110))
def test_ranks_in_one_process_against_f64(seed: int, size: int) -> None:
    case = random_case(seed, self_attention=seed % 3 != 0)
    group = cp.LocalGroup(size)
    # A chunk so small that all ranks have rows, or so large that some have none.
    plan = group.plan(case.mask, **case.arguments, chunk=[7, 64][seed % 2], deterministic=seed % 4 == 0)

    def call(q, k, v, sink):
        local = plan.dispatch(q), plan.dispatch(k, role="k"), plan.dispatch(v, role="k")
        out, lse = cp.attention(*local, plan, sink=sink)
        return plan.undispatch(out), plan.undispatch(lse)

    expected = reference(case)
    compare(found(case, call), expected, torch.float64)
    with cp.profile():
        compare(found(case, call), expected, torch.float64)
    measured = plan.timeline()
    assert measured.forward.seconds > 0 and measured.backward is not None and measured.backward.ranks == size


def dense(case: Case, q, k, v, sink) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits) by the definition; lse of rows that see nothing is 0, so that gradients are numbers."""
    ratio = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if case.scale is None else case.scale
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(ratio, 1)) * scale
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits.masked_fill(~case.mask.to_dense(), -torch.inf)
    max_logits = logits.detach().amax((1, 2))
    if sink is not None:
        logits = torch.cat([logits, sink.t().unsqueeze(1).expand(-1, logits.shape[1], -1)], 2)
    nothing = (logits == -torch.inf).all(2, keepdim=True)
    safe = logits.masked_fill(nothing, 0.0)
    lse = safe.logsumexp(2, keepdim=True)
    weights = (safe - lse).exp().masked_fill(nothing, 0.0)[:, :, : v.shape[0]]
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(ratio, 1))
    return out, lse.masked_fill(nothing, 0.0).squeeze(2).t(), max_logits


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(200, 208))
def test_max_logits_and_gradients_of_lse(seed: int, size: int) -> None:
    case = random_case(seed, self_attention=seed % 3 != 0)
    plan = cp.LocalGroup(size).plan(case.mask, **case.arguments, chunk=16)
    torch.manual_seed(seed)
    weights = torch.randn(case.q.shape[:2], dtype=torch.float64)

    def losses(out, lse):
        return [(out * case.dout).sum() + (lse * weights).sum(), (lse * weights).sum()]

    def through_plan(q, k, v, sink):
        local = plan.dispatch(q), plan.dispatch(k, role="k"), plan.dispatch(v, role="k")
        out, lse, max_logits = cp.attention(*local, plan, sink=sink, return_max_logits=True)
        lse = plan.undispatch(lse)
        return plan.undispatch(out), lse.masked_fill(lse == -torch.inf, 0.0), max_logits

    results = []
    for call in (through_plan, lambda *tensors: dense(case, *tensors)):
        inputs = leaves(case)
        out, lse, max_logits = call(*inputs[:3], inputs[3] if case.sink is not None else None)
        gradients = [torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True) for loss in losses(out, lse)]
        results.append((max_logits, gradients))
    (largest, found_gradients), (expected, expected_gradients) = results
    assert largest.shape == expected.shape and not largest.requires_grad
    assert torch.allclose(largest, expected, rtol=1e-12, atol=1e-12)
    for of_loss, expected_of_loss in zip(found_gradients, expected_gradients, strict=True):
        for gradient, wanted in zip(of_loss, expected_of_loss, strict=True):
            # Of lse alone v has no gradient.
            wanted = torch.zeros_like(gradient) if wanted is None else wanted
            assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-10)


def test_against_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(90, 4, 16, dtype=torch.float64) for _ in range(3))
    mask = cp.Mask.causal(90)
    out, _ = cp.flex_attention(q, k, v, mask)
    per_head = (tensor.transpose(0, 1) for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*per_head, attn_mask=mask.to_dense()).transpose(0, 1)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(1)
    mask = cp.Mask("varlen-causal:lengths=5,0,4")
    q = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(9, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sink):
        return cp.flex_attention(q, k, v, mask, sink=sink, softcap=3.0)[0]

    assert torch.autograd.gradcheck(call, (q, k, v, sink))


def test_layouts_do_not_matter() -> None:
    torch.manual_seed(2)
    mask = cp.Mask.causal(33)
    packed = torch.randn(1, 33, 3, 4, 8)
    strided = packed.unbind(2)
    dense = [tensor.contiguous() for tensor in strided]
    by_head = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in dense]
    odd = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in dense]
    expected = cp.flex_attention(*dense, mask)
    assert expected[0].shape == (1, 33, 4, 8) and expected[1].shape == (1, 33, 4)
    for layout in (strided, by_head, odd):
        assert not layout[0].is_contiguous()
        inputs = [tensor.detach().requires_grad_() for tensor in layout]
        out, lse = cp.flex_attention(*inputs, mask)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        # The gradient of a sum has stride 0.
        out.sum().backward()
        straight = [tensor.detach().requires_grad_() for tensor in dense]
        cp.flex_attention(*straight, mask)[0].backward(torch.ones_like(out))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, straight, strict=True))


def test_layers_in_flight_retained_graphs_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(3)
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(48), heads=2, head_dim=8, dtype="float64", chunk=8)
    x = torch.randn(48, 2, 8, dtype=torch.float64, requires_grad=True)

    def layers(x, keep):
        for _ in range(3):
            x = keep(lambda x: cp.attention(x, 2 * x, x + 1, plan)[0], x)
        return x

    plain = layers(x, lambda f, x: f(x))
    first = torch.autograd.grad(plain.square().sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(plain.square().sum(), x)[0]
    assert torch.equal(first, again)
    stored = layers(x, lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert torch.equal(torch.autograd.grad(stored.square().sum(), x)[0], first)
    one, two = layers(x, lambda f, x: f(x)), layers(x * 2, lambda f, x: f(x))
    late, early = torch.autograd.grad(two.sum(), x)[0], torch.autograd.grad(one.square().sum(), x)[0]
    assert torch.equal(early, first) and late.isfinite().all()
    with pytest.raises(cp.Error, match="gradients of gradients of attention are not implemented"):
        torch.autograd.grad(layers(x, lambda f, x: f(x)).sum(), x, create_graph=True)


def test_frozen_inputs_get_no_gradient() -> None:
    q, k, v = (torch.randn(20, 2, 8, requires_grad=name == "q") for name in "qkv")
    out, lse = cp.flex_attention(q, k, v, cp.Mask.causal(20))
    assert lse.requires_grad
    out.sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is None
    assert not cp.flex_attention(q.detach(), k, v, cp.Mask.causal(20))[0].requires_grad


def test_rows_that_see_nothing_and_garbage_in_padding() -> None:
    mask = cp.Mask.from_document_ids([0] * 10 + [-1] * 6)
    q, k, v = (torch.randn(16, 2, 8) for _ in range(3))
    clean, lse = cp.flex_attention(q, k, v, mask)
    assert (clean[10:] == 0).all() and (lse[10:] == -torch.inf).all()
    for tensor in (q, k, v):
        tensor[10:] = torch.nan
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, _ = cp.flex_attention(*inputs, mask)
    assert torch.equal(out, clean)
    out[:10].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


def test_ranks_without_rows() -> None:
    plan = cp.LocalGroup(4).plan(cp.Mask.causal(100), heads=2, head_dim=8, dtype="float32", chunk=64)
    assert 0 in plan.sizes
    x = torch.randn(100, 2, 8)
    out = plan.undispatch(cp.attention(*(plan.dispatch(x),) * 3, plan)[0])
    assert torch.allclose(out, cp.flex_attention(x, x, x, cp.Mask.causal(100))[0], atol=1e-5)


def test_operators_pass_opcheck() -> None:
    import counterpoint.compiled  # noqa: F401  (which defines them)

    mask = cp.Mask.causal(12)
    plan = cp.LocalGroup(1).plan(mask, heads=(2, 1), head_dim=8, dtype="float32", sink_rows=1)
    q = torch.randn(12, 2, 8, requires_grad=True)
    k, v = (torch.randn(12, 1, 8, requires_grad=True) for _ in range(2))
    sink = torch.randn(1, 2, requires_grad=True)
    for max_logits in (False, True):
        torch.library.opcheck(torch.ops.counterpoint.attention, (q, k, v, sink, max_logits, plan.handle))
        plain = [tensor.detach() for tensor in (q, k, v, sink)]
        torch.library.opcheck(torch.ops.counterpoint.attention_forward, (*plain, max_logits, plan.handle))
    out, lse = torch.ops.counterpoint.attention(q, k, v, sink, False, plan.handle)
    given = [tensor.detach() for tensor in (out, q, k, v, sink, out, lse)]
    for dlse in (None, torch.randn(12, 2)):
        torch.library.opcheck(torch.ops.counterpoint.attention_backward, (*given, dlse, q.new_empty(0), plan.handle))
    of_mask = mask.number, 0.5, 0.0, True
    for max_logits in (False, True):
        torch.library.opcheck(torch.ops.counterpoint.flex_attention, (q, k, v, sink, max_logits, *of_mask))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_models_take_a_new_mask_each_step(backend: str) -> None:
    torch._dynamo.reset()
    group = cp.LocalGroup(2)
    compiles = []

    def counted(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def step(x, plan):
        return cp.attention(x.sin(), x, 2 * x, plan)[0].cos()

    fast = torch.compile(step, fullgraph=True, backend=counted)
    for length in range(12):
        plan = group.plan(cp.Mask.sliding_window(40, length, 0), heads=2, head_dim=8, dtype="float32", chunk=8)
        x = torch.randn(40, 2, 8, requires_grad=True)
        slow = torch.autograd.grad(step(x, plan).sum(), x)[0]
        assert torch.allclose(torch.autograd.grad(fast(x, plan).sum(), x)[0], slow, atol=1e-5)
    assert len(compiles) <= 3, len(compiles)


@pytest.mark.parametrize("batched", [False, True])
def test_compiled_flex_attention_takes_a_new_mask_each_step(batched: bool) -> None:
    torch._dynamo.reset()
    compiles = []

    def counted(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(x, sink, mask):
        out, lse, largest = cp.flex_attention(x.sin(), x, 2 * x, mask, sink=sink, scale=0.3, softcap=20.0, return_max_logits=True)
        return out.cos().sum() + lse.exp().sum(), largest

    fast = torch.compile(step, fullgraph=True, backend=counted)
    x = torch.randn((1,) * batched + (40, 2, 8), requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    made = []
    for length in range(12):
        mask = cp.Mask.sliding_window(40, length, 0)
        slow, largest = step(x, sink, mask)
        loss, seen = fast(x, sink, mask)
        assert torch.equal(seen, largest)
        made.append((loss, torch.autograd.grad(slow, (x, sink))))
    assert len(compiles) <= 3, len(compiles)
    # Whatever else is forgotten, a backward finds its mask.
    del mask
    cp.functional._plans.clear()
    gc.collect()
    for loss, slow in made:
        for found, wanted in zip(torch.autograd.grad(loss, (x, sink)), slow, strict=True):
            assert torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(fast(x, sink, cp.Mask.causal(40))[0], step(x, sink, cp.Mask.causal(40))[0])
    with pytest.raises(cp.TensorError, match="q has 40 rows, and the mask 48"):
        fast(x, sink, cp.Mask.causal(48))


def test_a_compiled_call_keeps_its_plan_until_its_backward() -> None:
    torch._dynamo.reset()
    fast = torch.compile(lambda x, plan: cp.attention(x, x, x, plan)[0].sum(), fullgraph=True, backend="aot_eager")
    x = torch.randn(40, 2, 8, requires_grad=True)

    group = cp.LocalGroup(1)

    def plan():
        return group.plan(cp.Mask.causal(40), heads=2, head_dim=8, dtype="float32")

    number = plan().handle
    gc.collect()
    with pytest.raises(cp.PlanError, match=f"plan {number} is gone"):
        torch.ops.counterpoint.attention(x, x, x, None, False, number)
    loss = fast(x, plan())
    gc.collect()
    (gradient,) = torch.autograd.grad(loss, x)
    wanted = torch.autograd.grad(cp.attention(x, x, x, plan())[0].sum(), x)[0]
    assert torch.equal(gradient, wanted)


def test_a_fork_is_refused_and_not_waited_for() -> None:
    group = cp.LocalGroup(2)
    plan = group.plan(cp.Mask.causal(32), heads=1, head_dim=8, dtype="float32")
    x = torch.randn(32, 1, 8)
    cp.attention(x, x, x, plan)
    mask = cp.Mask.causal(32)
    cp.flex_attention(x, x, x, mask)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        try:
            assert torch.equal(plan.undispatch(plan.dispatch(x)), x)  # a plan is a value
            for call in (lambda: cp.attention(x, x, x, plan), lambda: cp.flex_attention(x, x, x, mask)):
                try:
                    call()
                    texts.append("no error")
                except cp.Error as error:
                    texts.append(str(error))
        finally:
            os.write(write, "|".join(texts).encode())
        os._exit(0)
    os.close(write)
    texts = os.read(read, 1000).decode()
    os.waitpid(child, 0)
    of_group, of_process = texts.split("|")
    assert of_group.startswith("this group was made in another process"), texts
    assert of_process.startswith("this process was forked from one that has made groups"), texts


def test_closed_groups_are_refused() -> None:
    group = cp.LocalGroup(2)
    plan = group.plan(cp.Mask.causal(32), heads=1, head_dim=8, dtype="float32")
    group.close()
    x = torch.randn(32, 1, 8)
    with pytest.raises(cp.Error, match="this group is closed; make a new one"):
        cp.attention(x, x, x, plan)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": torch.zeros(31, 2, 8)}, r"q is \[31, 2, 8\]; the plan wants \[32, 2, 8\]"),
        ({"k": torch.zeros(32, 2, 8)}, r"k is \[32, 2, 8\]; the plan wants \[32, 1, 8\]"),
        ({"v": torch.zeros(32, 1, 8, dtype=torch.float64)}, "v is torch.float64, and the plan is for torch.float32"),
        ({"q": torch.zeros(2, 32, 2, 8)}, r"q is \[2, 32, 2, 8\]; all three are \[tokens, heads, head_dim\]"),
        ({"q": None}, "q must be a torch.Tensor, not a NoneType"),
        ({"q": torch.empty(32, 2, 8, device="meta")}, "q is on meta, and the plan's group on cpu; move it there"),
        ({"sink": torch.zeros(1, 2)}, "sink is given, and the plan has none"),
        ({"plan": "mask"}, "plan must be a counterpoint.Plan"),
    ],
)
def test_bad_tensors_are_one_sentence(change, sentence) -> None:
    plan = cp.LocalGroup(1).plan(cp.Mask.causal(32), heads=(2, 1), head_dim=8, dtype="float32")
    given = {"q": torch.zeros(32, 2, 8), "k": torch.zeros(32, 1, 8), "v": torch.zeros(32, 1, 8), "plan": plan} | change
    with pytest.raises(cp.TensorError, match=sentence) as raised:
        cp.attention(**given)
    assert "\n" not in str(raised.value)
    assert plan._measured == {}


def test_bad_masks_are_one_sentence() -> None:
    x = torch.zeros(32, 2, 8)
    with pytest.raises(cp.TensorError, match="q has 32 rows, and the mask 33"):
        cp.flex_attention(x, x, x, cp.Mask.causal(33))
    with pytest.raises(cp.MaskError, match=r"mask must be a counterpoint\.Mask, not a Tensor"):
        cp.flex_attention(x, x, x, torch.ones(32, 32))


def test_what_a_plan_is_called_with_first_binds_nothing() -> None:
    """Inference mode, or a default device, of the first call is not that of later ones."""
    plan = cp.LocalGroup(1).plan(cp.Mask.causal(16), heads=2, head_dim=8, dtype=torch.float32)
    with torch.inference_mode(), torch.device("meta"):
        made = torch.randn(3, 16, 2, 8, device="cpu")
        without, _ = cp.attention(*made, plan)
        assert without.is_inference() and without.is_cpu
    q, k, v = (tensor.requires_grad_() for tensor in made.clone().unbind())
    out, _ = cp.attention(q, k, v, plan)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out, without.clone()) and not any(gradient.is_inference() for gradient in gradients)
    # Of another plan of these types too.
    other = cp.LocalGroup(1).plan(cp.Mask.full(16), heads=2, head_dim=8, dtype=torch.float32)
    out, _ = cp.attention(q, k, v, other)
    assert not out.is_inference() and torch.isfinite(torch.autograd.grad(out.sum(), v)[0]).all()
