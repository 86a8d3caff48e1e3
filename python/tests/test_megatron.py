"""Megatron-Core's attention by this package: against dense attention in f64, alone and on context-parallel ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402

from counterpoint.megatron import CoreAttention, SpecProvider  # noqa: E402

HEADS, GROUPS, DIM = 4, 2, 8
CAUSAL, WHOLE, ARBITRARY = (SimpleNamespace(name=name) for name in ("causal", "no_mask", "arbitrary"))


@dataclass
class Packed:
    """As Megatron-Core's `PackedSeqParams`."""

    cu_seqlens_q: Any
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    cp_group: Any = None
    qkv_format: str = "thd"


def config(**more: Any) -> SimpleNamespace:
    usual = {"num_attention_heads": HEADS, "attention_dropout": 0.0, "context_parallel_size": 1, "softmax_type": "vanilla"}
    return SimpleNamespace(
        **{**usual, "window_size": None, "params_dtype": torch.float64, "use_cpu_initialization": True, **more}
    )


def drawn(rows: int, heads: int, seed: int) -> Any:
    return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors(rows: int, batch: int | None = None, seed: int = 0) -> list[Any]:
    """q, k, v, `[s, b, heads, dim]` or `[t, heads, dim]`, and the gradient of the result."""
    shapes = [(HEADS, seed), (GROUPS, seed + 1), (GROUPS, seed + 2), (HEADS, seed + 3)]
    made = [drawn(rows * (batch or 1), heads, number) for heads, number in shapes]
    if batch is not None:
        made = [tensor.view(rows, batch, -1, DIM) for tensor in made]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3].flatten(-2)]


def dense(q: Any, k: Any, v: Any, seen: Any, sink: Any = None) -> Any:
    """Of `[rows, heads, dim]`: `[rows, heads x dim]`."""
    k, v = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def causal(rows: int, left: int | None = None) -> Any:
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    return seen if left is None else seen.triu(-left)


def agree(out: Any, wanted: Any, dout: Any, inputs: list[Any]) -> None:
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(out, inputs, dout)
    for one, other in zip(found, torch.autograd.grad(wanted, inputs, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def batched(inputs: list[Any], seen: Any, sink: Any = None) -> Any:
    parts = zip(*(tensor.unbind(1) for tensor in inputs), strict=True)
    return torch.stack([dense(*part, seen, sink) for part in parts], 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("kind", "window"), [(CAUSAL, None), (WHOLE, None), (CAUSAL, (5, 0))])
def test_sequences_of_a_batch(batch: int, kind: Any, window: Any) -> None:
    q, k, v, dout = tensors(20, batch)
    layer = CoreAttention(config(window_size=window), 1, kind)
    seen = torch.ones(20, 20, dtype=torch.bool) if kind is WHOLE else causal(20, window and window[0])
    agree(layer(q, k, v, None), batched([q, k, v], seen), dout, [q, k, v])


def test_windows_are_of_some_layers() -> None:
    q, k, v, dout = tensors(20, 1)
    for layer_number, is_window in ((1, True), (2, False), (3, True)):
        for skip in (2, [1, 0, 1]):
            layer = CoreAttention(config(window_size=(4, 0), window_attn_skip_freq=skip), layer_number, CAUSAL)
            seen = causal(20, 4 if is_window else None)
            agree(layer(q, k, v, None), batched([q, k, v], seen), dout, [q, k, v])


@pytest.mark.parametrize("packed", [False, True])
def test_largest_logits_for_qk_clip(packed: bool) -> None:
    layer = CoreAttention(config(qk_clip=True), 1, CAUSAL)
    largest = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    assert layer.current_max_attn_logits is None
    # Of all micro-batches since they were read.
    for seed in (0, 10, 20):
        q, k, v, dout = tensors(20, None if packed else 2, seed=seed)
        params = Packed(torch.tensor([0, 20])) if packed else None
        out = layer(q, k, v, None, packed_seq_params=params)
        for part in zip(*(tensor.unsqueeze(1).unbind(1) if packed else tensor.unbind(1) for tensor in (q, k, v)), strict=True):
            scores = torch.einsum("qhd,khd->hqk", part[0], part[1].repeat_interleave(HEADS // GROUPS, 1)) * DIM**-0.5
            largest = largest.maximum(scores.masked_fill(~causal(20), -torch.inf).amax((1, 2)).detach())
        torch.testing.assert_close(layer.current_max_attn_logits, largest, rtol=1e-12, atol=1e-12)
        wanted = dense(q, k, v, causal(20)) if packed else batched([q, k, v], causal(20))
        agree(out, wanted, dout, [q, k, v])


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks(softmax_type: str) -> None:
    q, k, v, dout = tensors(20, 2)
    layer = CoreAttention(config(softmax_type=softmax_type), 1, CAUSAL)
    inputs, sink = [q, k, v], torch.zeros(HEADS, dtype=torch.float64)
    if softmax_type == "learnable":
        sink = layer.softmax_offset
        with torch.no_grad():
            sink.copy_(torch.linspace(-1, 1, HEADS))
        inputs.append(sink)
        assert dict(layer.named_parameters()).keys() == {"softmax_offset"}
    agree(layer(q, k, v, None), batched([q, k, v], causal(20), sink), dout, inputs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [CAUSAL, WHOLE])
def test_packed_sequences(padded: bool, kind: Any) -> None:
    starts = torch.tensor([0, 7, 20, 21], dtype=torch.int32)
    room = torch.tensor([0, 8, 24, 32], dtype=torch.int32) if padded else None
    rows = 32 if padded else 21
    q, k, v, dout = tensors(rows)
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    begins = (room if padded else starts)[:-1].tolist()
    for begin, length in zip(begins, starts.diff().tolist(), strict=True):
        part = torch.ones(length, length, dtype=torch.bool)
        seen[begin : begin + length, begin : begin + length] = part if kind is WHOLE else part.tril()
    layer, packed = CoreAttention(config(), 1, kind), Packed(starts, None, room)
    out = layer(q, k, v, None, packed_seq_params=packed)
    agree(out, dense(q, k, v, seen), dout, [q, k, v])
    # Read once for all layers of a micro-batch, and forgotten with it.
    packed.cu_seqlens_q = None
    assert torch.equal(layer(q, k, v, None, packed_seq_params=packed), out)
    from counterpoint import sequences

    assert len(sequences._packed) == 1
    del packed
    assert not sequences._packed


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v, _ = tensors(8, 1)
    with pytest.raises(NotImplementedError, match="attention_dropout is 0.1"):
        CoreAttention(config(attention_dropout=0.1), 1, CAUSAL)
    layer = CoreAttention(config(), 1, CAUSAL)
    with pytest.raises(NotImplementedError, match="attn_mask_type is arbitrary"):
        layer(q, k, v, None, attn_mask_type=ARBITRARY)
    with pytest.raises(NotImplementedError, match="attention_bias is not supported"):
        layer(q, k, v, None, attention_bias=q)
    with pytest.raises(cp.TensorError, match=r"query is \[8, 1, 4, 8\]; it must be \[t, heads, head_dim\]"):
        layer(q, k, v, None, packed_seq_params=Packed(torch.tensor([0, 8])))


def on_ranks(rank: int) -> None:
    size, rows = dist.get_world_size(), 32
    groups = SimpleNamespace(cp=dist.group.WORLD)
    q, k, v, dout = tensors(rows, 2)
    wanted = batched([q, k, v], causal(rows))
    gradients = torch.autograd.grad(wanted, [q, k, v], dout)

    def own(tensor: Any) -> Any:
        """As Megatron's get_batch_on_this_cp_rank."""
        pieces = tensor.detach().chunk(2 * size)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])

    layer = CoreAttention(config(context_parallel_size=size), 1, CAUSAL, pg_collection=groups)
    local = [own(tensor).requires_grad_() for tensor in (q, k, v)]
    out = layer(*local, None)
    torch.testing.assert_close(out, own(wanted), rtol=1e-10, atol=1e-10)
    for found, gradient in zip(torch.autograd.grad(out, local, own(dout)), gradients, strict=True):
        torch.testing.assert_close(found, own(gradient), rtol=1e-9, atol=1e-9)

    packed = Packed(torch.tensor([0, 9, 32]))
    q, k, v, dout = tensors(rows)
    with pytest.raises(cp.TensorError, match="a sequence of 9 rows, padding included; over 4 .* must be a multiple of 8"):
        layer(q[:8], k[:8], v[:8], None, packed_seq_params=packed)
    with pytest.raises(cp.TensorError, match="query has 36 rows on 4 ranks together, and packed_seq_params 32"):
        layer(q[:9], k[:9], v[:9], None, packed_seq_params=packed)
    group = cp.Group(groups.cp)
    plan = group.plan(cp.Mask.varlen([0, 9, 32], causal=True), heads=(HEADS, GROUPS), head_dim=DIM, dtype=torch.float64)
    seen = torch.block_diag(causal(9).double(), causal(23).double()).bool()
    wanted = dense(q, k, v, seen)
    gradients = torch.autograd.grad(wanted, [q, k, v], dout)
    local = [plan.dispatch(tensor.detach()).requires_grad_() for tensor in (q, k, v)]
    with plan.active():
        out = layer(*local, None, packed_seq_params=packed)
        windowed = CoreAttention(config(context_parallel_size=size, window_size=(6, 0)), 1, CAUSAL, pg_collection=groups)
        narrow = windowed(*local, None, packed_seq_params=packed)
    torch.testing.assert_close(narrow, plan.dispatch(dense(q, k, v, seen.triu(-6)).detach()), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out, plan.dispatch(wanted.detach()), rtol=1e-10, atol=1e-10)
    for found, gradient in zip(torch.autograd.grad(out, local, plan.dispatch(dout)), gradients, strict=True):
        torch.testing.assert_close(found, plan.dispatch(gradient), rtol=1e-9, atol=1e-9)


def test_context_parallel_ranks(ranks: Ranks) -> None:
    ranks.run(on_ranks)


def packed_on_ranks(rank: int) -> None:
    """Packed sequences as Megatron's data loader cuts each of them over ranks, against dense attention of the whole."""
    size = dist.get_world_size()
    groups = SimpleNamespace(cp=dist.group.WORLD)
    lengths, rooms = [13, 16, 3, 30, 8], [16, 16, 8, 32, 8]
    begins = [sum(rooms[:number]) for number in range(len(rooms) + 1)]
    rows = begins[-1]

    def own(tensor: Any) -> Any:
        """As Transformer Engine's `thd_get_partitioned_indices`: two pieces of every sequence."""
        cut = [tensor.detach()[start:end].chunk(2 * size) for start, end in itertools.pairwise(begins)]
        return torch.cat([piece for pieces in cut for piece in (pieces[rank], pieces[2 * size - 1 - rank])])

    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = Packed(starts, None, torch.tensor(begins, dtype=torch.int32))
    for kind, window, sink_type in ((CAUSAL, None, "vanilla"), (WHOLE, None, "off-by-one"), (CAUSAL, (5, 0), "vanilla")):
        q, k, v, dout = tensors(rows)
        seen = torch.zeros(rows, rows, dtype=torch.bool)
        for begin, length in zip(begins, lengths, strict=False):
            part = torch.ones(length, length, dtype=torch.bool)
            part = part if kind is WHOLE else causal(length, window and window[0])
            seen[begin : begin + length, begin : begin + length] = part
        made = config(context_parallel_size=size, window_size=window, softmax_type=sink_type, qk_clip=True)
        layer = CoreAttention(made, 1, kind, pg_collection=groups)
        wanted = dense(q, k, v, seen, torch.zeros(HEADS, dtype=torch.float64) if sink_type == "off-by-one" else None)
        gradients = torch.autograd.grad(wanted, [q, k, v], dout)
        local = [own(tensor).requires_grad_() for tensor in (q, k, v)]
        out = layer(*local, None, packed_seq_params=packed)
        torch.testing.assert_close(out, own(wanted), rtol=1e-10, atol=1e-10)
        for found, gradient in zip(torch.autograd.grad(out, local, own(dout)), gradients, strict=True):
            torch.testing.assert_close(found, own(gradient), rtol=1e-9, atol=1e-9)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // GROUPS, 1)) * DIM**-0.5
        largest = scores.masked_fill(~seen, -torch.inf).amax((1, 2)).detach()
        torch.testing.assert_close(layer.current_max_attn_logits, largest, rtol=1e-12, atol=1e-12)


def test_packed_sequences_over_context_parallel_ranks(ranks: Ranks) -> None:
    ranks.run(packed_on_ranks)


def test_the_provider_gives_it() -> None:
    assert SpecProvider(object()).core_attention() is CoreAttention


def in_megatron(rank: int) -> None:
    """Megatron-Core's own SelfAttention of our spec, over 2 tensor-parallel and 2 context-parallel ranks, against one rank."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    provider = SpecProvider()
    rows, hidden = 32, 32
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())][rank]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    try:

        def layer(tp: int, groups: Any) -> Any:
            torch.manual_seed(3)
            shape = {"num_layers": 1, "hidden_size": hidden, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
            options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False, "use_cpu_initialization": True}
            made = TransformerConfig(
                **shape, **options, params_dtype=torch.float64, tensor_model_parallel_size=tp, context_parallel_size=tp
            )
            parts = SelfAttentionSubmodules(
                linear_qkv=provider.column_parallel_linear(),
                core_attention=provider.core_attention(),
                linear_proj=provider.row_parallel_linear(),
            )
            return SelfAttention(made, parts, layer_number=1, attn_mask_type=AttnMaskType.causal, pg_collection=groups)

        whole = layer(1, ProcessGroupCollection(tp=alone, cp=alone))
        parallel = layer(2, ProcessGroupCollection.use_mpu_process_groups())
        x = drawn(rows, hidden // DIM, seed=5).reshape(rows, 1, hidden).requires_grad_()
        dout = drawn(rows, hidden // DIM, seed=6).reshape(rows, 1, hidden)
        wanted, _ = whole(x, None)
        wanted.backward(dout)
        place = parallel_state.get_context_parallel_rank()

        def own(tensor: Any) -> Any:
            pieces = tensor.detach().chunk(4)
            return torch.cat([pieces[place], pieces[3 - place]])

        local = own(x).requires_grad_()
        found, _ = parallel(local, None)
        found.backward(own(dout))
        torch.testing.assert_close(found, own(wanted), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(local.grad, own(x.grad), rtol=1e-9, atol=1e-9)
    finally:
        parallel_state.destroy_model_parallel()


def test_megatrons_attention_of_our_spec(ranks: Ranks) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    ranks.run(in_megatron)
