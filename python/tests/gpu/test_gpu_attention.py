"""Attention on a GPU: values and gradients against f64, layouts, several ranks on one GPU, compilers, bad input."""

from __future__ import annotations

import os

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, found, gpu_case, packed, plan_of, tensors  # noqa: E402
from random_cases import compare, reference  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_one_gpu_against_f64(seed: int, dtype: torch.dtype) -> None:
    case = gpu_case(seed, dtype)
    result = found(case, lambda q, k, v, sink: cp.flex_attention(q, k, v, case.mask, sink=sink, scale=case.scale))
    compare(result, reference(case), dtype)
    assert result["lse"].dtype == torch.float32


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(200, 205))
def test_ranks_that_share_a_gpu_against_f64(seed: int, size: int) -> None:
    case = gpu_case(seed, self_attention=True)
    group = cp.LocalGroup(size, device=DEVICE)
    plan = group.plan(case.mask, **case.arguments, chunk=[8, 64][seed % 2], deterministic=seed % 2 == 0)

    def call(q, k, v, sink):
        local = plan.dispatch(q), plan.dispatch(k, role="k"), plan.dispatch(v, role="k")
        out, lse = cp.attention(*local, plan, sink=sink)
        return plan.undispatch(out), plan.undispatch(lse)

    compare(found(case, call), reference(case), torch.bfloat16)
    group.check()


def test_queries_travel_where_everything_is_predicted_or_they_are_asked_to() -> None:
    """Few queries over many keys. Results are those of one rank either way."""
    torch.manual_seed(1)
    group, mask, shape = cp.LocalGroup(4, device=DEVICE), cp.Mask.full(64, 32768), {"heads": 8, "head_dim": 64}
    q, k, v = (torch.randn(rows, 8, 64, device=DEVICE).bfloat16() for rows in (64, 32768, 32768))
    alone, _ = cp.flex_attention(q, k, v, mask)
    stay, travel = ({}, {"dispatch": "affinity"}), ({"dispatch": "predicted"}, {"queries": "fewest_bytes"})
    for how in (*stay, *travel):
        plan = group.plan(mask, **shape, dtype=torch.bfloat16, **how)
        assert (plan.summary().comm.query_tokens > 0) == (how in travel), how
        local = plan.dispatch(q), plan.dispatch(k, role="k"), plan.dispatch(v, role="k")
        found = plan.undispatch(cp.attention(*local, plan)[0])
        assert float((found.double() - alone.double()).norm() / alone.double().norm()) < 1e-2, how
    group.check()


def test_layouts_give_the_bits_of_dense_tensors() -> None:
    torch.manual_seed(0)
    mask = packed([100, 57, 99])
    qkv = torch.randn(256, 3, 4, 64, device=DEVICE).bfloat16()
    strided = qkv.unbind(1)
    dense = [tensor.contiguous() for tensor in strided]
    by_head = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in dense]
    every_other = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in dense]
    # Not at a multiple of 16 bytes.
    shifted = [torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape) for tensor in dense]
    assert shifted[0].data_ptr() % 16 and not strided[0].is_contiguous() and not by_head[0].is_contiguous()

    def gradients(tensors):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        out, lse = cp.flex_attention(*inputs, mask, deterministic=True)
        # The gradient of a sum has stride 0.
        return [out.detach(), lse, *torch.autograd.grad(out.sum(), inputs)]

    expected = gradients(dense)
    for layout in (strided, by_head, every_other, shifted):
        assert all(torch.equal(a, b) for a, b in zip(gradients(layout), expected, strict=True))


def test_frozen_inputs_no_grad_and_empty_rows() -> None:
    mask = cp.Mask.from_document_ids([0] * 100 + [-1] * 28)
    q, k, v, _ = tensors(128)
    k, v = k.detach(), v.detach()
    out, lse = cp.flex_attention(q, k, v, mask)
    out.sum().backward()
    assert q.grad is not None and k.grad is None and lse.requires_grad
    assert (out[100:] == 0).all() and (lse[100:] == -torch.inf).all()
    with torch.no_grad():
        assert torch.equal(cp.flex_attention(q, k, v, mask)[0], out)
    with torch.inference_mode():
        assert torch.equal(cp.flex_attention(q, k, v, mask)[0], out)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_takes_a_new_mask_each_step(backend: str) -> None:
    torch._dynamo.reset()
    group = cp.LocalGroup(1, device=DEVICE)
    compiles = []

    def counted(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def model(x, plan):
        return cp.attention(x.sin(), x, 2 * x, plan)[0].cos()

    fast = torch.compile(model, fullgraph=True, backend=counted)
    for length in range(5):
        plan = plan_of(group, packed([100 + 20 * length, 156 - 20 * length]))
        x = torch.randn(256, 4, 64, device=DEVICE).bfloat16().requires_grad_()
        slow = torch.autograd.grad(model(x, plan).float().sum(), x)[0]
        quick = torch.autograd.grad(fast(x, plan).float().sum(), x)[0]
        assert float((quick - slow).norm() / slow.norm()) < 3e-2
    assert len(compiles) <= 3, len(compiles)


def test_layers_in_flight_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    plan = plan_of(cp.LocalGroup(1, device=DEVICE), packed([300, 212]), deterministic=True)
    x = torch.randn(512, 4, 64, device=DEVICE).bfloat16().requires_grad_()

    def layers(keep):
        y = x
        for _ in range(3):
            y = keep(lambda y: cp.attention(y, 2 * y, y + 1, plan)[0], y)
        return torch.autograd.grad(y.float().square().sum(), x)[0]

    plain = layers(lambda f, y: f(y))
    assert torch.equal(plain, layers(lambda f, y: checkpoint(f, y, use_reentrant=False)))
    assert torch.equal(plain, layers(lambda f, y: f(y)))


def test_measured_timelines() -> None:
    plan = plan_of(cp.LocalGroup(2, device=DEVICE), packed([512]))
    x = plan.dispatch(torch.randn(512, 4, 64, device=DEVICE).bfloat16()).requires_grad_()
    with cp.profile():
        cp.attention(x, x, x, plan)[0].float().sum().backward()
    timeline = plan.timeline()
    assert timeline.forward.seconds > 0 and timeline.backward is not None and timeline.backward.ranks == 2


def test_bad_tensors_are_one_sentence() -> None:
    group = cp.LocalGroup(1, device=DEVICE)
    plan = plan_of(group, packed([32]))
    good = torch.zeros(32, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    for change, sentence in (
        ({"q": good.cpu()}, "q is on cpu, and the plan's group on cuda:0; move it there"),
        ({"k": good[:31]}, r"k is \[31, 4, 64\]; the plan wants \[32, 4, 64\]"),
        ({"v": good.half()}, "v is torch.float16, and the plan is for torch.bfloat16"),
    ):
        with pytest.raises(cp.TensorError, match=sentence):
            cp.attention(**({"q": good, "k": good, "v": good, "plan": plan} | change))
    with pytest.raises(cp.PlanError, match=r"dtype is torch.float32; on GPUs attention computes in bfloat16 and float16"):
        plan_of(group, packed([32]), dtype=torch.float32)
    with pytest.raises(cp.DeviceError, match=r"device is cuda:99; this process sees \d+ GPUs"):
        cp.LocalGroup(1, device="cuda:99")
    with pytest.raises(cp.DeviceError, match="slow_link imitates a link between CPU ranks"):
        cp.LocalGroup(2, device=DEVICE, slow_link=(1.0, 1.0))
    # Nothing of it harmed the group.
    cp.attention(good, good, good, plan)
    group.check()
    group.close()
    with pytest.raises(cp.Error, match="this group is closed; make a new one"):
        cp.attention(good, good, good, plan)
    with pytest.raises(cp.Error, match="this group is closed; make a new one"):
        group.check()


def test_a_fork_is_refused() -> None:
    plan = plan_of(cp.LocalGroup(1, device=DEVICE), packed([32]))
    x = torch.zeros(32, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    cp.attention(x, x, x, plan)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            plan.group.check()
            text = "no error"
        except cp.Error as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 1000).decode()
    os.waitpid(child, 0)
    assert text.startswith("this group was made in another process"), text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_current_device_stays() -> None:
    torch.cuda.set_device(0)
    x = torch.randn(128, 4, 64, device="cuda:1").bfloat16().requires_grad_()
    case_of_other = cp.flex_attention(x, x, x, cp.Mask.causal(128))[0]
    case_of_other.float().sum().backward()
    assert torch.cuda.current_device() == 0 and x.grad is not None and x.grad.device.index == 1
    y = x.detach().to("cuda:0")
    assert torch.allclose(cp.flex_attention(y, y, y, cp.Mask.causal(128))[0].cpu(), case_of_other.detach().cpu(), atol=1e-2)


def test_the_face_of_magiattention() -> None:
    from counterpoint.compat.magi.functional import flex_flash_attn_func

    q, k, v, dout = tensors(256)
    q_ranges = torch.tensor([[0, 100], [100, 256]], dtype=torch.int32, device=DEVICE)
    types = torch.ones(2, dtype=torch.int32, device=DEVICE)
    expected = cp.flex_attention(q, k, v, packed([100, 156]), deterministic=True)
    right = torch.autograd.grad(expected[0], (q, k, v), dout)
    for _ in range(2):
        out, meta = flex_flash_attn_func(q, k, v, q_ranges, q_ranges, types, deterministic=True)
        assert torch.equal(out, expected[0]) and torch.equal(meta.lse, expected[1])
        found = torch.autograd.grad(out, (q, k, v), dout)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from counterpoint.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    ids = torch.randint(97, (1, 300), device=DEVICE)
    positions = torch.cat([torch.arange(100), torch.arange(200)])[None].to(DEVICE)
    found = {}
    for implementation in ("counterpoint", "sdpa"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
        model.train()
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad
        found[implementation] = (float(loss.detach()), gradient.double())
    (loss, gradient), (right, expected) = found["counterpoint"], found["sdpa"]
    assert abs(loss - right) < 1e-2 * right
    assert float((gradient - expected).norm() / expected.norm()) < 5e-2
