"""Unmodified models of transformers: losses and gradients on the ranks of a plan, and alone, against their eager attention."""

from __future__ import annotations

import random
import types

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import counterpoint.transformers as hook  # noqa: E402
from counterpoint.batch import Batch  # noqa: E402
from counterpoint.transformers import _padded  # noqa: E402

hook.register()
SMALL = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 128},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def made(name: str):
    """A small random model, in f32, that trains."""
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**SMALL)
    elif name == "mistral":  # a window in every layer
        config = transformers.MistralConfig(**SMALL, sliding_window=7)
    elif name == "gemma2":  # a window in every other layer, capped logits, a scale of its own
        config = transformers.Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=1.5, query_pre_attn_scalar=20)
    elif name == "gpt_oss":  # sinks, windows, experts
        config = transformers.GptOssConfig(**SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.train()


def packed(lengths=(17, 30, 13)):
    """Ids, positions, and labels whose documents' first tokens are predicted by nobody."""
    torch.manual_seed(1)
    ids = torch.randint(3, 61, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def trained(model, **inputs) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs, **({} if "use_cache" in inputs else {"use_cache": False})).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = float((found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        assert error < 2e-6, f"{name}: {error:.1e}"


def masks_of(name: str, batch) -> dict[str, dict[str, torch.Tensor]]:
    """What eager attention must be given for packed documents: that of gpt_oss does not look at positions."""
    if name != "gpt_oss":
        return {}
    length, masks = batch["input_ids"].shape[1], {}
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), length]
    for kind, left in (("full_attention", -1), ("sliding_attention", 4)):
        seen = cp.Mask.varlen(starts, causal=True, window=(left, 0)).to_dense()
        masks[kind] = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"attention_mask": masks}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_documents_on_ranks_and_alone(name: str) -> None:
    model, batch = made(name), packed()
    model.set_attn_implementation("eager")
    masks = masks_of(name, batch)
    expected = trained(model, **batch, **masks)
    model.set_attn_implementation("counterpoint")
    compare(trained(model, **batch), expected)
    compare(trained(model, **batch, **masks), expected)
    for ranks in (1, 2, 4):
        prepared = Batch.prepare(batch, cp.LocalGroup(ranks), model.config, chunk=4)
        compare(trained(model, **prepared.inputs), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padded_batches(name: str, side: str) -> None:
    model = made(name)
    ids, padding = torch.randint(3, 61, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    for row, missing in enumerate((0, 7, 15)):
        padding[row, slice(20 - missing, 20) if side == "right" else slice(0, missing)] = 0
    labels = ids.masked_fill(padding == 0, -100)
    # The first token of a document is predicted by padding where that is on the left; nobody trains that.
    first = (padding == 1) & (padding.cumsum(1) == 1)
    batch = {"input_ids": ids, "attention_mask": padding, "labels": labels.masked_fill(first, -100)}
    model.set_attn_implementation("eager")
    expected = trained(model, **batch)
    model.set_attn_implementation("counterpoint")
    compare(trained(model, **batch), expected)
    compare(trained(model, **Batch.prepare(batch, cp.LocalGroup(2), model.config, chunk=4).inputs), expected)


def test_a_mask_of_ones_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers give one: no mask of all pairs is built for it."""
    monkeypatch.setattr("counterpoint.transformers._MOST_DENSE", 0)
    model = made("llama")
    model.set_attn_implementation("counterpoint")
    ids = torch.randint(3, 61, (2, 20))
    with torch.inference_mode():
        expected = model(ids).logits
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)
    # Nor for padding.
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    model(ids, attention_mask=padding)


@pytest.mark.parametrize("seed", range(40))
def test_padding_hides_its_keys(seed: int) -> None:
    draw = random.Random(seed)
    sequences, keys = draw.randint(1, 3), draw.randint(1, 14)
    offset, window = draw.choice([0, draw.randrange(keys)]), draw.choice([None, draw.randint(1, keys + 2)])
    seen = torch.tensor([[draw.random() < 0.7 for _ in range(keys)] for _ in range(sequences)])
    position, key = torch.arange(offset, keys)[:, None], torch.arange(keys)[None]
    each = (key <= position) & (key > position - (window or keys))
    expected = torch.block_diag(*(each & seen[row] for row in range(sequences)))
    assert torch.equal(_padded(seen, offset, window).to_dense(), expected.bool())


def test_checkpointing_and_two_plans_at_once() -> None:
    model, one, other = made("mistral"), packed(), packed((40, 9))
    model.set_attn_implementation("eager")
    expected = [trained(model, **batch) for batch in (one, other)]
    model.set_attn_implementation("counterpoint")
    model.gradient_checkpointing_enable()
    group = cp.LocalGroup(2)
    prepared = [Batch.prepare(batch, group, model.config, chunk=4) for batch in (one, other)]
    for batch, wanted in zip(prepared, expected, strict=True):
        compare(trained(model, **batch.inputs), wanted)
    # Both forwards, then both backwards: no plan is "the most recent one".
    model.zero_grad()
    losses = [model(**batch.inputs).loss for batch in prepared]
    for loss in losses:
        loss.backward()
    both = {name: expected[0][1][name] + gradient for name, gradient in expected[1][1].items()}
    compare((losses[0].item(), {name: p.grad for name, p in model.named_parameters()}), (expected[0][0], both))


def test_models_that_do_not_pass_keywords_on() -> None:
    model, batch = made("llama"), packed()
    model.set_attn_implementation("eager")
    expected = trained(model, **batch)
    model.set_attn_implementation("counterpoint")
    prepared = Batch.prepare(batch, cp.LocalGroup(2), model.config, chunk=4)
    inputs = {name: value for name, value in prepared.inputs.items() if name != "counterpoint"}
    model.gradient_checkpointing_enable()
    with prepared.plan.active():
        compare(trained(model, **inputs), expected)
    model.zero_grad()
    with prepared.plan.active():
        loss = model(**inputs).loss
    with pytest.raises(cp.PlanError, match="the backward must be inside too"):
        loss.backward()
    with torch.no_grad():  # without gradients the same layers may run alone
        assert model(**batch, use_cache=False).loss.item() == pytest.approx(expected[0], rel=1e-6)


def test_generating_with_a_cache_is_as_eager() -> None:
    model = made("gemma2").eval()
    ids, padding = torch.randint(3, 61, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    padding[1, :4] = 0
    tokens = {}
    for name in ("eager", "counterpoint"):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(ids, attention_mask=padding, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens["eager"], tokens["counterpoint"])


def test_layers_that_are_not_causal_stay_with_pytorch() -> None:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    tower, pixels = transformers.SiglipVisionModel(config), torch.randn(2, 3, 8, 8)
    expected = tower(pixels).last_hidden_state
    tower.set_attn_implementation("counterpoint")
    torch.testing.assert_close(tower(pixels).last_hidden_state, expected)
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(30), heads=2, head_dim=8, dtype="float32")
    with plan.active():  # the plan of the text that goes with the images
        torch.testing.assert_close(tower(pixels).last_hidden_state, expected)


def test_masks_that_a_model_is_given_whole() -> None:
    model, batch = made("llama"), packed((20,))
    mask = cp.Mask("prefix-lm:20,prefix=6")
    dense = mask.to_dense()[None, None]
    added = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    expected = trained(model, **batch, attention_mask=added)
    model.set_attn_implementation("counterpoint")
    compare(trained(model, **batch, attention_mask=added), expected)
    compare(trained(model, **batch, attention_mask=dense), expected)
    compare(trained(model, **Batch.prepare(batch, cp.LocalGroup(2), model.config, mask=mask, chunk=4).inputs), expected)
    with pytest.raises(NotImplementedError, match="adds biases to logits"):
        model(**batch, attention_mask=added + 0.5)
    with pytest.raises(cp.MaskError, match="the same for all heads"):
        model(**batch, attention_mask=dense.expand(1, 4, 20, 20))


def test_windows_of_other_masks_are_given() -> None:
    model, batch = made("mistral"), packed((20,))
    prefix = cp.Mask("prefix-lm:20,prefix=6")
    group = cp.LocalGroup(2)
    with pytest.raises(cp.PlanError, match="a sliding window of 7, and the plan's mask is not one of causal documents"):
        model.set_attn_implementation("counterpoint")
        model(**Batch.prepare(batch, group, model.config, mask=prefix).inputs)
    near = (torch.arange(20)[:, None] - torch.arange(20)).abs() < 7
    seen = prefix.to_dense() & near
    model.set_attn_implementation("eager")
    expected = trained(
        model, **batch, attention_mask=torch.zeros(1, 1, 20, 20).masked_fill(~seen, torch.finfo(torch.float32).min)
    )
    model.set_attn_implementation("counterpoint")
    windows = {7: cp.Mask.from_dense(seen)}
    prepared = Batch.prepare(batch, group, model.config, mask=prefix, windows=windows, chunk=4)
    compare(trained(model, **prepared.inputs), expected)


def test_windows_of_documents_by_their_definition() -> None:
    for lengths, window in (((9, 1, 20), 4), ((5, 5), 5), ((8,), 1), ((3, 2), 50)):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        plan = cp.LocalGroup(1).plan(cp.Mask.varlen(starts, causal=True), heads=1, head_dim=8, dtype="float32", even=True)
        found = hook.windowed(plan, window)
        assert torch.equal(found.to_dense(), cp.Mask.varlen(starts, causal=True, window=(window - 1, 0)).to_dense())


def layer_call(**changes):
    """One call of the hook as a layer of Llama makes it."""
    module = torch.nn.Module()
    module.is_causal = True
    tensors = [torch.randn(1, heads, 12, 8) for heads in (4, 2, 2)]
    return hook.attention_forward(module, *tensors, **changes)


def plan_of(mask, **changes):
    return cp.LocalGroup(2).plan(mask, **{"heads": (4, 2), "head_dim": 8, "dtype": "float32", **changes})


def described(**arguments):
    usual = {"batch_size": 1, "q_length": 12, "kv_length": 12, "allow_is_causal_skip": False}
    return hook._described(**{**usual, **arguments})


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"dropout": 0.1}, NotImplementedError, "dropout of attention is 0.1"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "hands position_bias=Tensor to its attention"),
        ({"output_attentions": True}, NotImplementedError, "hands output_attentions=True"),
        ({"block_indices": 3}, NotImplementedError, "register\\(ignore=\\('block_indices',\\)\\)"),
        ({"counterpoint": "plan"}, cp.PlanError, "counterpoint='plan' was given to the model"),
        ({"counterpoint": plan_of(cp.Mask.causal(13))}, cp.TensorError, "the layer has 12 rows, and the plan 13"),
        (
            {"counterpoint": plan_of(cp.Mask.causal(12)), "attention_mask": torch.ones(1, 1, 12, 12)},
            cp.MaskError,
            "attention_mask \\(\\[1, 1, 12, 12\\]\\) is given with a plan",
        ),
        (
            {"counterpoint": plan_of(cp.Mask.causal(12)), "attention_mask": described(attention_mask=torch.arange(12)[None])},
            cp.MaskError,
            "whose mask has the padding already",
        ),
        (
            {"counterpoint": plan_of(cp.Mask.causal(12)), "attention_mask": described(local_size=4)},
            NotImplementedError,
            "cut into chunks of 4 tokens",
        ),
        ({"is_causal": False, "s_aux": torch.zeros(4)}, NotImplementedError, "s_aux is given to a layer that is not causal"),
        ({"is_causal": False, "softcap": 2.0}, NotImplementedError, "softcap is given to a layer that is not causal"),
        ({"is_causal": False, "sliding_window": 3}, NotImplementedError, "sliding_window is given to a layer that is not causal"),
        (
            {"is_causal": False, "sliding_window": 3, "cu_seq_lens_q": [0, 12], "cu_seq_lens_k": [0, 12]},
            NotImplementedError,
            "a layer that is not causal has a sliding window",
        ),
        (
            {"attention_mask": described(batch_size=1 << 10, q_length=1 << 12, kv_length=1 << 12)},
            cp.MaskError,
            "prepare the batch with counterpoint.Batch.prepare",
        ),
    ],
)
def test_refusals(changes, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        layer_call(**changes)


def test_more_refusals() -> None:
    plan = plan_of(cp.Mask.causal(12))
    module = torch.nn.Module()
    two = [torch.randn(2, heads, 6, 8) for heads in (4, 2, 2)]
    with pytest.raises(cp.TensorError, match="the layer has 2 sequences"):
        hook.attention_forward(module, *two, counterpoint=plan)
    cached = [torch.randn(1, heads, rows, 8) for heads, rows in ((4, 12), (2, 15), (2, 15))]
    with pytest.raises(NotImplementedError, match="12 queries and 15 keys, as with a cache"):
        hook.attention_forward(module, *cached, counterpoint=plan)
    images = Batch.prepare(
        {"input_ids": torch.zeros(1, 12, dtype=torch.int64)}, cp.LocalGroup(1), heads=(4, 2), head_dim=8, dtype="float32"
    )
    with pytest.raises(NotImplementedError, match="the model adds a rule of its own to the mask"):
        layer_call(counterpoint=images.plan, attention_mask=described(use_vmap=True))
    layer_call(counterpoint=plan, attention_mask=described(use_vmap=True))  # its mask was given whole


def test_keywords_that_a_user_vouches_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_ignored", set())
    hook.register(ignore=("my_flag",))
    out, _ = layer_call(my_flag=3)
    assert out.shape == (1, 12, 4, 8)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", types.SimpleNamespace(__version__="4.40.0"))
    with pytest.raises(cp.MissingLibraryError, match="transformers is 4.40.0"):
        hook.register()


def test_active_plans_of_threads() -> None:
    import threading

    from counterpoint.lookup import active_plan

    one, two = plan_of(cp.Mask.causal(12)), plan_of(cp.Mask.full(12))
    found = []
    with one.active():
        with two.active():
            assert active_plan() is two
        assert active_plan() is one
        worker = threading.Thread(target=lambda: found.append(active_plan()))
        worker.start()
        worker.join()
        assert found == [one]  # as the threads of backwards
        entered, leave = threading.Event(), threading.Event()

        def other() -> None:
            with two.active():
                entered.set()
                leave.wait(10)

        worker = threading.Thread(target=other)
        worker.start()
        entered.wait(10)

        def third() -> None:
            with pytest.raises(cp.PlanError, match="several threads have active plans"):
                active_plan()
            found.append("raised")

        asking = threading.Thread(target=third)
        asking.start()
        asking.join()
        leave.set()
        worker.join()
    assert found == [one, "raised"] and active_plan() is None


def trained_on_ranks(rank: int, *, name: str, cp_size: int, shards: bool, checkpoints: bool) -> float:
    """One step of `name` on dp x cp ranks; the largest relative error of a gradient."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    batches = [packed((17, 30, 13)), packed((5, 41, 9))][: world // cp_size]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model = made(name)
    model.set_attn_implementation("eager")
    losses = [model(**one, **masks_of(name, one), use_cache=False, num_items_in_batch=total).loss for one in batches]
    sum(losses).backward()
    expected = {parameter_name: p.grad for parameter_name, p in model.named_parameters()}

    model = made(name)
    model.set_attn_implementation("counterpoint")
    if checkpoints:
        model.gradient_checkpointing_enable()
    if shards:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh._flatten())
        fully_shard(model, mesh=mesh._flatten())
    prepared = Batch.prepare(batches[rank // cp_size], cp.Group(mesh["cp"]), model.config, chunk=4, num_items=total)
    loss = model(**prepared.inputs).loss
    (loss * (world if shards else 1)).backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    assert whole.item() == pytest.approx(sum(losses).item(), rel=1e-6)
    worst = 0.0
    for parameter_name, p in model.named_parameters():
        gradient = p.grad.full_tensor() if shards else p.grad
        if not shards:
            dist.all_reduce(gradient)
        worst = max(worst, float((gradient - expected[parameter_name]).norm() / expected[parameter_name].norm()))
    return worst


@pytest.mark.parametrize(
    ("name", "cp_size", "shards", "checkpoints"),
    [("mistral", 4, False, True), ("gpt_oss", 2, False, False)],
)
def test_training_on_ranks(ranks, monkeypatch, name: str, cp_size: int, shards: bool, checkpoints: bool) -> None:
    monkeypatch.setattr(ranks, "limit", 240.0)  # every rank imports transformers first
    found = ranks.run(trained_on_ranks, name=name, cp_size=cp_size, shards=shards, checkpoints=checkpoints)
    assert max(found) < 1e-6, found


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_compiled_models_take_a_new_plan_each_step(name: str) -> None:
    model = made(name)
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # its loop over experts is none that compilers take
    model.set_attn_implementation("counterpoint")
    group, compiles = cp.LocalGroup(2), []

    def counted(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend=counted)
    for first in (17, 20, 31, 8, 40):
        batch = packed((first, 60 - first))
        prepared = Batch.prepare(batch, group, model.config, chunk=4)
        expected = trained(model, **prepared.inputs)
        model.zero_grad()
        loss = fast(**prepared.inputs).loss
        loss.backward()
        found = {parameter_name: p.grad.clone() for parameter_name, p in model.named_parameters() if p.grad is not None}
        compare((loss.item(), found), expected)
    assert len(compiles) <= 2, len(compiles)
