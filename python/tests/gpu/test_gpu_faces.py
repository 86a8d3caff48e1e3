"""The faces of other libraries on a GPU: MagiAttention's functions, and models of transformers."""

from __future__ import annotations

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from gpu_cases import DEVICE, found, gpu_case, packed  # noqa: E402
from random_cases import compare, reference  # noqa: E402

from counterpoint.compat.magi import api  # noqa: E402
from counterpoint.compat.magi.functional import flex_flash_attn  # noqa: E402


def ranges_of(mask: cp.Mask) -> list[torch.Tensor]:
    q, k, types = zip(*mask.slices, strict=True) if mask.slices else ((), (), ())
    numbers = [("full", "causal", "inv_causal", "bi_causal").index(kind) for kind in types]
    pairs = [torch.tensor(part, dtype=torch.int32).reshape(-1, 2) for part in (list(q), list(k))]
    return [tensor.to(DEVICE) for tensor in (*pairs, torch.tensor(numbers, dtype=torch.int32))]


@pytest.mark.parametrize("seed", range(400, 406))
def test_attention_over_slices(seed: int) -> None:
    case = gpu_case(seed)
    ranges = ranges_of(case.mask)

    def call(q, k, v, sink):
        out, meta = api.flex_flash_attn_func(q, k, v, *ranges, sink=sink, softmax_scale=case.scale)
        return out, meta.lse

    compare(found(case, call), reference(case), torch.bfloat16)


def test_ranges_on_a_gpu_are_read_once_and_again_when_they_change() -> None:
    q = torch.randn(256, 4, 64, device=DEVICE).bfloat16()
    one = torch.tensor([[0, 256]], dtype=torch.int32, device=DEVICE)
    types = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    full, _ = api.flex_flash_attn_func(q, q, q, one, one, types)
    flex_flash_attn._masks.clear()
    api.flex_flash_attn_func(q, q, q, one, one, types)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again, _ = api.flex_flash_attn_func(q, q, q, one, one, types)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(full, again) and len(flex_flash_attn._masks) == 1
    types.fill_(1)
    causal, _ = api.flex_flash_attn_func(q, q, q, one, one, types)
    expected, _ = cp.flex_attention(q, q, q, cp.Mask.causal(256))
    assert torch.equal(causal, expected) and not torch.equal(causal, full)


@pytest.mark.parametrize("size", [1, 2])
def test_the_chain(size: int) -> None:
    group = cp.LocalGroup(size, device=DEVICE)
    case = next(case for seed in range(500, 600) if (case := gpu_case(seed, self_attention=True)).mask.slices)
    q, k, types = ranges_of(case.mask)
    key = api.magi_attn_flex_key(
        api.AttnRanges.from_ranges(q.tolist()),
        api.AttnRanges.from_ranges(k.tolist()),
        [api.AttnMaskType.from_int_type(kind) for kind in types.tolist()],
        case.mask.seqlen_q,
        case.mask.seqlen_k,
        case.q.shape[1],
        case.k.shape[1],
        case.q.shape[2],
        0,
        group,
    )

    def call(q, k, v, sink):
        local = [api.dispatch(tensor, key) for tensor in (q, k, v)]
        out, meta = api.calc_attn(*local, key, sink, case.scale)
        return api.undispatch(out, key), api.undispatch(meta.lse, key)

    compare(found(case, call), reference(case), torch.bfloat16)
    assert api.get_position_ids(key).is_cuda


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_of_transformers(size: int) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from counterpoint.transformers import register

    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    ids = torch.randint(3, 97, (1, 300), device=DEVICE)
    positions = torch.cat([torch.arange(length) for length in (90, 47, 163)])[None].to(DEVICE)
    labels = ids.masked_fill(positions == 0, -100)
    results = {}
    for name in ("eager", "counterpoint"):
        model.set_attn_implementation(name)
        inputs = {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
        if name == "counterpoint":
            batch = cp.Batch.prepare(inputs, cp.LocalGroup(size, device=DEVICE), config, chunk=32)
            assert batch.plan.mask == packed([90, 47, 163])
            inputs = batch.inputs
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        results[name] = loss.item(), {name: p.grad.float().clone() for name, p in model.named_parameters()}
    assert results["counterpoint"][0] == pytest.approx(results["eager"][0], rel=2e-3)
    for name, gradient in results["eager"][1].items():
        error = float((results["counterpoint"][1][name] - gradient).norm() / gradient.norm())
        assert error < 5e-2, (name, error)
