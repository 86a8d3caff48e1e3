"""Batches: documents, positions, labels and padding in every form that they come in, dispatched and back."""

from __future__ import annotations

import types

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")

from counterpoint.batch import Batch, items_of  # noqa: E402

SHAPE = {"heads": (4, 2), "head_dim": 16, "dtype": torch.float32}


@pytest.fixture(params=[1, 3])
def group(request: pytest.FixtureRequest) -> cp.LocalGroup:
    return cp.LocalGroup(request.param)


def seen_by_hand(documents) -> torch.Tensor:
    documents = torch.as_tensor(documents)
    same = (documents[:, None] == documents) & (documents[:, None] >= 0)
    return same & torch.ones(len(documents), len(documents), dtype=torch.bool).tril()


def test_cumulative_starts_come_first(group) -> None:
    ids = torch.arange(40).reshape(1, 40)
    starts = torch.tensor([0, 7, 7, 30, 40], dtype=torch.int32)
    given = {"input_ids": ids, "labels": ids, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 23}
    batch = Batch.prepare(given, group, chunk=4, **SHAPE)
    assert batch.plan.mask == cp.Mask.varlen(starts, causal=True)
    assert "cu_seq_lens_q" not in batch.inputs and "max_length_q" not in batch.inputs
    rows = batch.plan.position_ids
    assert torch.equal(batch.tensors["input_ids"], rows[None])
    lengths = (7, 23, 10)
    assert torch.equal(batch.position_ids[0], torch.cat([torch.arange(n) for n in lengths])[rows])
    expected = torch.arange(1, 41)
    expected[[6, 29, 39]] = -100
    assert torch.equal(batch.labels[0], expected[rows])
    assert batch.num_items == items_of(given) == 37 and batch.inputs["num_items_in_batch"] == 37
    assert torch.equal(batch.undispatch(batch.tensors["input_ids"]), ids)
    assert torch.equal(batch.undispatch(torch.stack([rows, rows], 1)[None])[..., 1], ids)


def test_restarting_positions(group) -> None:
    positions = torch.cat([torch.arange(9), torch.arange(4), torch.arange(5, 20)])[None]
    given = {"input_ids": torch.zeros(1, 28, dtype=torch.int64), "position_ids": positions}
    batch = Batch.prepare(given, group, chunk=4, **SHAPE)
    assert batch.plan.mask == cp.Mask.varlen([0, 9, 13, 28], causal=True)
    assert torch.equal(batch.undispatch(batch.position_ids), positions)
    assert batch.labels is None and batch.num_items == 0 and "labels" not in batch.inputs
    with pytest.raises(cp.TensorError, match="the batch had no labels"):
        batch.loss(torch.zeros(1, 28, 5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences(group, side: str) -> None:
    lengths = [5, 12, 9]
    padding = torch.zeros(3, 12, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padding[row, slice(0, length) if side == "right" else slice(12 - length, 12)] = 1
    ids = torch.randint(0, 50, (3, 12))
    labels = ids.masked_fill(padding == 0, -100)
    batch = Batch.prepare({"input_ids": ids, "attention_mask": padding, "labels": labels}, group, chunk=4, **SHAPE)
    documents = torch.where(padding == 1, torch.arange(3)[:, None], -1).flatten()
    assert torch.equal(batch.plan.mask.to_dense(), seen_by_hand(documents))
    assert torch.equal(batch.undispatch(batch.position_ids), torch.arange(12).repeat(3, 1))
    targets = torch.full((3, 12), -100)
    targets[:, :-1] = labels[:, 1:]
    targets[padding == 0] = -100
    assert torch.equal(batch.undispatch(batch.labels), targets) and batch.num_items == sum(lengths) - 3


def test_padding_inside_and_packing_together(group) -> None:
    ids = torch.arange(20)[None]
    padding = torch.ones(1, 20, dtype=torch.bool)
    padding[0, [3, 17, 18, 19]] = False
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    batch = Batch.prepare({"input_ids": ids, "attention_mask": padding, "position_ids": positions}, group, chunk=2, **SHAPE)
    documents = [0] * 8 + [1] * 12
    for hole in (3, 17, 18, 19):
        documents[hole] = -1
    assert torch.equal(batch.plan.mask.to_dense(), seen_by_hand(documents))


def test_one_mask_for_all_sequences_and_everything_else_of_the_batch(group) -> None:
    mask = cp.Mask("prefix-lm:24,prefix=6")
    window = cp.Mask.sliding_window(24, 3, 0)
    given = {
        "inputs_embeds": torch.randn(2, 12, 8),
        "shift_labels": torch.randint(0, 9, (2, 12)),
        "token_weights": torch.randn(2, 12),
        "pixel_values": torch.randn(3, 5),
        "missing": None,
        "position_ids": torch.arange(12).expand(3, 1, 12),
    }
    batch = Batch.prepare(given, group, mask=mask, windows={4: window}, num_items=100, chunk=2, **SHAPE)
    assert batch.plan.mask == mask and batch.plan._windows[4] == window and "missing" not in batch.inputs
    assert batch.inputs["pixel_values"] is given["pixel_values"] and batch.inputs["num_items_in_batch"] == 100
    for name in ("inputs_embeds", "token_weights"):
        assert torch.equal(batch.undispatch(batch.tensors[name]), given[name])
    assert torch.equal(batch.undispatch(batch.labels), given["shift_labels"]) and batch.num_items == 24
    assert batch.position_ids.shape == (3, 1, batch.plan.q_rows)
    assert torch.equal(batch.position_ids[2, 0], batch.plan.position_ids % 12)


def test_rows_of_padding_have_no_labels() -> None:
    ids = torch.arange(1, 51)[None]
    batch = Batch.prepare({"input_ids": ids, "labels": ids}, cp.LocalGroup(4), even=True, chunk=4, **SHAPE)
    padding = batch.plan.position_ids >= 50
    assert padding.any() and (batch.labels[0, padding] == -100).all() and batch.num_items == 49
    assert torch.equal(batch.undispatch(batch.tensors["input_ids"]), ids)


def test_losses_add_up_to_the_mean(group) -> None:
    ids = torch.randint(0, 11, (1, 30))
    batch = Batch.prepare({"input_ids": ids, "labels": ids}, group, chunk=4, **SHAPE)
    logits = torch.randn(1, 30, 11, dtype=torch.float64)
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    local = batch.plan.dispatch(logits, dim=1)
    torch.testing.assert_close(batch.loss(local), wanted)
    torch.testing.assert_close(batch.loss(local, averaged_over=6), wanted * 6)
    half = Batch.prepare({"input_ids": ids, "labels": ids}, group, chunk=4, num_items=58, **SHAPE)
    torch.testing.assert_close(half.loss(local), wanted / 2)


def test_plans_are_found_again_where_they_were_prefetched(group) -> None:
    given = {"input_ids": torch.zeros(1, 64, dtype=torch.int64)}
    Batch.prefetch(given, group, **SHAPE)
    assert len(group._prefetched) == 1
    Batch.prepare(given, group, **SHAPE)
    assert not group._prefetched


def test_shapes_come_from_the_configuration(group) -> None:
    text = types.SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, dtype=torch.bfloat16)
    config = types.SimpleNamespace(get_text_config=lambda: text)
    given = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    found = Batch.prepare(given, group, config).plan._arguments
    assert (found["heads"], found["head_dim"], found["dtype"]) == ((6, 2), 8, torch.bfloat16)
    text.head_dim, text.num_key_value_heads, text.dtype = 32, None, None
    found = Batch.prepare(given, group, text, heads=(6, 3)).plan._arguments
    assert (found["heads"], found["head_dim"], found["dtype"]) == ((6, 3), 32, torch.float32)


IDS = torch.zeros(2, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({}, cp.TensorError, "neither input_ids nor inputs_embeds"),
        ({"input_ids": IDS[0]}, cp.TensorError, "input_ids is \\[6\\]; it is \\[sequences, tokens\\]"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, cp.TensorError, "labels is \\[2, 5\\]; input_ids has 2 sequences of 6 tokens"),
        ({"input_ids": IDS, "position_ids": IDS[0]}, cp.TensorError, "position_ids is \\[6\\]"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)}, cp.MaskError, "give mask=counterpoint.Mask.from_dense"),
        ({"input_ids": IDS, "attention_mask": IDS + 2}, cp.MaskError, "values other than 0 and 1"),
        ({"input_ids": IDS, "attention_mask": IDS}, cp.MaskError, "the batch is padding alone"),
        ({"input_ids": IDS, "cu_seq_lens_q": [0, 6]}, cp.MaskError, "ends with the 12 tokens"),
        ({"input_ids": IDS, "cu_seq_lens_q": [0, 9, 6, 12]}, cp.MaskError, "never falls"),
    ],
)
def test_refusals(given, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Batch.prepare(given, cp.LocalGroup(1), **SHAPE)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(cp.MaskError, match="mask is of 6 queries and 6 keys; the batch has 2 sequences of 6 tokens, 12 in all"):
        Batch.prepare({"input_ids": IDS}, cp.LocalGroup(1), mask=cp.Mask.causal(6), **SHAPE)
