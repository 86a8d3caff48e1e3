"""Group-casts and group-reduces by splits of one's own: values, gradients, merges, errors; in one process and in several."""

from __future__ import annotations

import random
from functools import cache

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def random_splits(seed: int, ranks: int) -> list[cp.Splits]:
    """Of all ranks: splits that go to none, some or all of them, and come in an order of the receiver's own."""
    draw = random.Random(seed)
    sent = [
        [(draw.randrange(5), sorted(draw.sample(range(ranks), draw.randrange(ranks + 1)))) for _ in range(4)]
        for _ in range(ranks)
    ]
    found = []
    for rank in range(ranks):
        queues = {source: [size for size, to in sent[source] if rank in to] for source in range(ranks)}
        held = []
        while any(queues.values()):
            source = draw.choice([source for source in queues if queues[source]])
            held.append((queues[source].pop(0), source))
        sizes, sources = [size for size, _ in held], [source for _, source in held]
        found.append(cp.Splits([size for size, _ in sent[rank]], [to for _, to in sent[rank]], sizes, sources))
    return found


def rows_held(splits: list[cp.Splits]) -> list[list[tuple[int, int]]]:
    """Of each rank, which row of which rank each row of its output is."""
    found = []
    for rank in range(len(splits)):
        offered: dict[int, list[list[tuple[int, int]]]] = {}
        for source, of_source in enumerate(splits):
            start, queue = 0, []
            for size, to in zip(of_source.input_split_sizes, of_source.dst_ranks, strict=True):
                if rank in to:
                    queue.append([(source, row) for row in range(start, start + size)])
                start += size
            offered[source] = queue
        found.append([row for source in splits[rank].src_ranks for row in offered[source].pop(0)])
    return found


def inputs_of(splits: list[cp.Splits], side: int, tail: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    maker = torch.Generator().manual_seed(seed)
    wide = [torch.randn((one.rows[side], *tail), generator=maker, dtype=torch.float64) * 8 for one in splits]
    return [x.round().to(dtype) for x in wide]


def cast_by_hand(xs: list[torch.Tensor], splits: list[cp.Splits]) -> list[torch.Tensor]:
    return [
        torch.stack([xs[source][row] for source, row in of_rank]) if of_rank else xs[rank][:0]
        for rank, of_rank in enumerate(rows_held(splits))
    ]


def reduced_by_hand(ys: list[torch.Tensor], splits: list[cp.Splits], *, mean: bool = False) -> list[torch.Tensor]:
    sums = [torch.zeros((one.rows[0], *ys[0].shape[1:]), dtype=torch.float64) for one in splits]
    counts = [torch.zeros(one.rows[0], dtype=torch.float64) for one in splits]
    for y, of_rank in zip(ys, rows_held(splits), strict=True):
        for value, (source, row) in zip(y, of_rank, strict=True):
            sums[source][row] += value
            counts[source][row] += 1
    if mean:
        sums = [one / count.clamp(min=1).view(-1, *[1] * (one.ndim - 1)) for one, count in zip(sums, counts, strict=True)]
    return sums


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_splits_of_one_process(ranks: int, seed: int) -> None:
    group, splits = cp.LocalGroup(ranks), random_splits(seed, ranks)
    for dtype in DTYPES:
        xs = inputs_of(splits, 0, (3, 2), dtype, seed)
        got = cp.group_cast(torch.cat(xs), splits, group)
        assert torch.equal(got, torch.cat(cast_by_hand(xs, splits)))
    ys = inputs_of(splits, 1, (5,), torch.float64, seed)
    for op in ("sum", "avg"):
        got = cp.group_reduce(torch.cat(ys), splits, group, op=op)
        torch.testing.assert_close(got, torch.cat(reduced_by_hand(ys, splits, mean=op == "avg")), rtol=1e-14, atol=0)


# Of each, bits that no other type of its size takes for a number that it keeps.
BITS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
BITS |= {torch.float8_e4m3fn: 8, torch.float8_e5m2: 8, torch.float8_e8m0fnu: 8, torch.complex32: 32}


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_every_bit_of_other_types_arrives(dtype: torch.dtype) -> None:
    splits = random_splits(5, 3)
    maker = torch.Generator().manual_seed(5)
    xs = [torch.randint(256, (one.rows[0], 6, BITS[dtype] // 8), dtype=torch.uint8, generator=maker) for one in splits]
    got = cp.group_cast(torch.cat(xs).view(dtype).squeeze(-1), splits, cp.LocalGroup(3))
    assert got.dtype == dtype
    assert torch.equal(got.contiguous().view(torch.uint8).flatten(1), torch.cat(cast_by_hand(xs, splits)).flatten(1))


def test_quantised_rows_are_refused() -> None:
    group = cp.LocalGroup(1)
    x = torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8)
    with pytest.raises(cp.TensorError, match="give its int_repr"):
        cp.group_cast(x, cp.Splits([4], [[0]], [4], [0]), group)


@pytest.mark.parametrize("op", ["cast", "sum", "avg"])
def test_gradients_mirror(op: str) -> None:
    group, splits = cp.LocalGroup(3), random_splits(11, 3)
    side = 0 if op == "cast" else 1
    x = torch.cat(inputs_of(splits, side, (2,), torch.float64, 1)).requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        return cp.group_cast(x, splits, group) if op == "cast" else cp.group_reduce(x, splits, group, op=op)

    assert torch.autograd.gradcheck(call, (x,))


def test_merges_of_attention_over_other_keys() -> None:
    group = cp.LocalGroup(3)
    # Two rows of rank 0 are attended on ranks 1 and 2, one of rank 1 on none.
    splits = [
        cp.Splits([2], [[1, 2]], [], []),
        cp.Splits([1], [[]], [2], [0]),
        cp.Splits([], [], [2], [0]),
    ]
    maker = torch.Generator().manual_seed(3)
    scores, values = torch.randn(2, 4, 12, generator=maker), torch.randn(12, 4, 8, generator=maker)
    halves = [slice(0, 5), slice(5, 12)]
    outs = [torch.einsum("rhk,khd->rhd", scores[..., part].softmax(-1), values[part]) for part in halves]
    logs = [scores[..., part].logsumexp(-1) for part in halves]
    out, lse = cp.group_reduce(torch.cat(outs), splits, group, op="lse", lse=torch.cat(logs))
    torch.testing.assert_close(out[:2], torch.einsum("rhk,khd->rhd", scores.softmax(-1), values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:2], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[2], torch.zeros(4, 8)) and bool(lse[2].isneginf().all())
    with pytest.raises(cp.TensorError, match="has no gradient"):
        cp.group_reduce(torch.cat(outs).requires_grad_(), splits, group, op="lse", lse=torch.cat(logs))


def test_splits_are_values() -> None:
    counts = [[1, 2], [0, 3]]
    one = cp.Splits.all_to_all(0, torch.tensor(counts))
    assert one == cp.Splits.all_to_all(0, counts) and hash(one) == hash(cp.Splits.all_to_all(0, counts))
    assert one != cp.Splits.all_to_all(1, counts)
    assert (one.input_split_sizes, one.dst_ranks, one.output_split_sizes, one.src_ranks) == ([1, 2], [[0], [1]], [1, 0], [0, 1])
    assert one.rows == (3, 1) and eval(repr(one), {"Splits": cp.Splits}) == one
    gathered = cp.Splits.all_gather(1, [4, 0, 2])
    assert gathered.rows == (0, 6) and gathered.dst_ranks == [[0, 1, 2]] and gathered.src_ranks == [0, 1, 2]
    assert cp.Splits([2], [[2, 0]], [], []).dst_ranks == [[0, 2]]


def test_what_does_not_fit_says_so() -> None:
    group, x = cp.LocalGroup(2), torch.zeros(3, 2)
    splits = [cp.Splits([1], [[1]], [2], [1]), cp.Splits([2], [[0]], [1], [0])]
    beyond = [cp.Splits([1], [[5]], [2], [1]), splits[1]]
    unlike = [cp.Splits([1], [[1]], [1], [1]), splits[1]]
    cases = [
        (cp.PlanError, "input_split_sizes has 1 splits and dst_ranks 2", lambda: cp.Splits([1], [[0], [1]], [], [])),
        (TypeError, "output_split_sizes must be a list of whole numbers", lambda: cp.Splits([1], [[0]], [-1], [0])),
        (TypeError, "dst_ranks must be a list that has, for each split", lambda: cp.Splits([1], 0, [], [])),
        (cp.PlanError, "row 1 has 1 numbers", lambda: cp.Splits.all_to_all(0, [[1, 2], [3]])),
        (cp.PlanError, "rank is 2, and counts is of 2 ranks", lambda: cp.Splits.all_gather(2, [1, 2])),
        (cp.PlanError, "counts add up to more rows", lambda: cp.Splits.all_gather(0, [2**63, 2**63])),
        (cp.PlanError, "counts add up to more rows", lambda: cp.Splits.all_to_all(0, [[2**63, 2**63], [0, 0]])),
        (cp.PlanError, "counts add up to more rows", lambda: cp.Splits.all_to_all(1, [[0, 2**63], [0, 2**63]])),
        (cp.TensorError, "splits are of 1 ranks; the group has 2", lambda: cp.group_cast(x, splits[0], group)),
        (cp.TensorError, "splits must be counterpoint.Splits", lambda: cp.group_cast(x, [1, 2], group)),
        (cp.TensorError, "splits must be counterpoint.Splits", lambda: cp.group_cast(x, None, group)),
        (cp.TensorError, "x must be a torch.Tensor", lambda: cp.group_cast([1], splits, group)),
        (cp.TensorError, r"x is \[4, 2\]; the splits have 3 rows", lambda: cp.group_cast(torch.zeros(4, 2), splits, group)),
        (cp.PlanError, "names rank 5; there are ranks 0 to 1", lambda: cp.group_cast(x, beyond, group)),
        (cp.TensorError, "op is 'max'", lambda: cp.group_reduce(x, splits, group, op="max")),
        (cp.TensorError, "rows are added up in", lambda: cp.group_reduce(x.long(), splits, group)),
        (cp.TensorError, "lse is given with op='sum'", lambda: cp.group_reduce(x, splits, group, lse=x)),
        (cp.TensorError, "lse is not given, and x", lambda: cp.group_reduce(x, splits, group, op="lse")),
    ]
    for kind, sentence, call in cases:
        with pytest.raises(kind, match=sentence):
            call()
    # Nothing has begun, so the group works on.
    assert cp.group_cast(x, splits, group).shape == (3, 2)
    with pytest.raises(cp.MismatchError, match="rank"):
        cp.group_cast(x, unlike, group)


@cache
def everyone() -> cp.Group:
    return cp.Group(dist.group.WORLD)


def across_processes(rank: int, seeds: list[int]) -> None:
    group = everyone()
    for seed in seeds:
        splits = random_splits(seed, 4)
        xs = inputs_of(splits, 0, (3,), torch.float32, seed)
        x = xs[rank].clone().requires_grad_()
        expected = cast_by_hand(xs, splits)
        # What is called again is ready.
        for _ in range(2):
            got = cp.group_cast(x, splits[rank], group)
            assert torch.equal(got.detach(), expected[rank])
        (grad,) = torch.autograd.grad(got, x, got.detach())
        assert torch.equal(grad, reduced_by_hand(expected, splits)[rank].float())
        mean = cp.group_reduce(got.detach(), splits[rank], group, op="avg")
        torch.testing.assert_close(mean, reduced_by_hand(expected, splits, mean=True)[rank].float())


def test_random_splits_of_processes(ranks: Ranks) -> None:
    ranks.run(across_processes, list(range(40, 46)))


def many_kinds(rank: int) -> None:
    """More kinds of collectives than are kept ready come and go."""
    group = everyone()
    for turn in range(2):
        for columns in range(1, 41):
            splits = cp.Splits.all_gather(rank, [1, 2, 0, 3])
            x = torch.full((splits.rows[0], columns), float(rank + turn))
            got = cp.group_cast(x, splits, group)
            assert got.shape == (6, columns) and got[:, 0].tolist() == [turn, *[1 + turn] * 2, *[3 + turn] * 3]


def test_kinds_come_and_go(ranks: Ranks) -> None:
    ranks.run(many_kinds)
