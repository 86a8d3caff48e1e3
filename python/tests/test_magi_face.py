"""MagiAttention's face: names, signatures and defaults against `magi_face.json`, ranges and masks by their definition."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pathlib
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import counterpoint.compat.magi as magi  # noqa: E402
from counterpoint.compat.magi.api import functools as helpers  # noqa: E402
from counterpoint.compat.magi.common import AttnMask, AttnMaskType, AttnRange, AttnRanges, RangeError  # noqa: E402

NOT_OFFERED = {
    *("AttnRectangle", "AttnRectangles", "jit", "range_op"),
    *("dist_attn_func", "dispatch_func", "undispatch_func", "roll_func", "roll_simple_func"),
}
TABLE = json.loads(pathlib.Path(__file__).with_name("magi_face.json").read_text())


def module_and_rest(path: str):
    """The module that has the longest beginning of a path, and the rest."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        ours = magi._PATHS.get(".".join(parts[:cut]))
        if ours is not None:
            name = ours or ".".join(parts[:cut])
            return importlib.import_module(f"counterpoint.compat.magi.{name}"), parts[cut:]
    raise AssertionError(path)


def signature_of(text: str) -> list[tuple[str, str, str | None]]:
    """(name, kind, default's source) of the parameters of "(a, b=1, *, c=2)"."""
    arguments = ast.parse(f"def f{text}: pass").body[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [(a.arg, "any", None if d is None else ast.unparse(d)) for a, d in zip(positional, defaults, strict=True)]
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(a.arg, "keyword", None if d is None else ast.unparse(d)) for a, d in keyword]
    return found + [(name.arg, kind, None) for name, kind in ((arguments.vararg, "*"), (arguments.kwarg, "**")) if name]


@pytest.mark.parametrize("path", TABLE)
def test_names_signatures_and_defaults(path: str) -> None:
    module, rest = module_and_rest(path)
    wanted = TABLE[path]
    if rest == ["__all__"]:
        for name in wanted:
            if name in NOT_OFFERED:
                with pytest.raises(NotImplementedError, match=f"{name} (is a part of|takes) their"):
                    getattr(module, name)
            else:
                assert hasattr(module, name), name
        return
    value = owner = module
    for name in rest:
        owner, value = value, inspect.getattr_static(value, name)
    if isinstance(wanted, dict):
        assert {member.name: member.value for member in value} == wanted
        return
    if wanted.startswith("property"):
        assert isinstance(value, property) and (value.fset is not None) == wanted.endswith("setter")
        return
    function = getattr(owner, rest[-1])
    if inspect.isclass(function):
        function = function.__init__ if wanted != "()" else lambda: None
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    kinds = {
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    expected = signature_of(wanted)
    assert [(p.name, kinds.get(p.kind, "any")) for p in parameters] == [entry[:2] for entry in expected]
    namespace = {**vars(importlib.import_module("counterpoint.compat.magi.config")), **vars(module), "torch": torch}
    for parameter, (_, _, default) in zip(parameters, expected, strict=True):
        if default is None:
            assert parameter.default is inspect.Parameter.empty, parameter
        elif default.startswith("lambda"):
            assert parameter.default(3) == eval(default)(3)
        else:
            assert parameter.default == eval(default, namespace), parameter


def tokens(ranges) -> list[int]:
    """How often every one of 24 tokens is in the ranges."""
    return [sum(part.start <= token < part.end for part in ranges) for token in range(24)]


def test_one_range() -> None:
    part = AttnRange(2, 9)
    assert (part.start, part.end, part.seqlen, len(part), repr(part)) == (2, 9, 7, 7, "[2, 9)")
    part.start, part.end = 12, 15
    assert part == AttnRange(12, 15) == AttnRange.from_range([12, 15]) == part.clone() and part != (12, 15)
    assert part.offset(3).to_naive_range() == (15, 18) and hash(part) == hash(AttnRange(12, 15))
    assert part.truncate(13) == AttnRange(13, 15) and part.truncate(0, 5).is_empty() and part.truncate(20).is_empty()
    assert part.is_valid_close() and not part.is_valid_open(15) and AttnRange(3, 3).is_empty()
    with pytest.raises(RangeError, match="a range from 3 to 1 ends before it starts"):
        AttnRange(3, 1)
    with pytest.raises(RangeError, match="from 20 to 15"):
        part.check_valid(start=20)
    with pytest.raises(AttributeError):
        part.seqlen = 3


def test_two_ranges_by_their_tokens() -> None:
    generator = random.Random(11)
    for _ in range(3000):
        a, b = (
            AttnRange(start, start + generator.randint(0, 7)) for start in (generator.randint(0, 15), generator.randint(0, 15))
        )
        both = [min(x, y) for x, y in zip(tokens([a]), tokens([b]), strict=True)]
        either = [max(x, y) for x, y in zip(tokens([a]), tokens([b]), strict=True)]
        assert tokens([a.intersect(b)]) == both and a.intersect_size(b) == sum(both)
        assert tokens(a.union(b)) == either and a.union_size(b) == sum(either)
        assert tokens(a.diff_by(b)) == [x - y for x, y in zip(tokens([b]), both, strict=True)]
        assert a.is_overlap_with(b) == (sum(both) > 0) or a.is_empty() or b.is_empty()
        assert a.is_subrange_of(b) == (b.start <= a.start and a.end <= b.end)


def random_ranges(generator: random.Random) -> AttnRanges:
    starts = [generator.randint(0, 15) for _ in range(generator.randint(0, 5))]
    return AttnRanges.from_ranges([(start, start + generator.randint(1, 7)) for start in starts])


def test_lists_of_ranges_by_their_tokens() -> None:
    generator = random.Random(12)
    for _ in range(3000):
        a, b = random_ranges(generator), random_ranges(generator)
        once = [min(count, 1) for count in tokens(a)]
        shared = [x * min(y, 1) for x, y in zip(once, tokens(b), strict=True)]
        merged = a.merge()
        assert tokens(merged) == once and merged.is_merged() and tokens(a.sort()) == tokens(a) and a.sort().is_sorted()
        assert a.total_seqlen == a.union_size() == sum(tokens(a)) and a.intersect_size() == sum(tokens(a)) - sum(once)
        assert a.is_non_overlap() == (tokens(a) == once) and a.size == len(a) == len(list(a))
        assert tokens(a.find_overlap_ranges(b)) == shared
        assert tokens(a.find_hole_ranges(b)) == [x - y for x, y in zip(once, shared, strict=True)]
        occurrences = sum(x + y for x, y, s in zip(tokens(a), tokens(b), shared, strict=True) if s)
        assert a.intersect_size_with(b) == occurrences - sum(shared) and a.union_size_with(b) == a.total_seqlen + b.total_seqlen
        aligned = a.merge_with_split_alignment(4)
        assert all(part.start % 4 == part.end % 4 == 0 for part in aligned) and a.truncate(3, 9).total_seqlen == sum(
            tokens(a)[3:9]
        )
        size = generator.randint(1, 5)
        chunks = merged.chunk(size)
        assert [token for chunk in chunks for part in chunk for token in range(part.start, part.end)] == [
            token for token, count in enumerate(once) if count
        ]
        assert all(chunk.total_seqlen == size for chunk in chunks[:-1])
        where = {token: position for position, token in enumerate(t for t, count in enumerate(once) if count)}
        for part in merged:
            inner = AttnRange(part.start + (part.seqlen > 1), part.end)
            local, found = a.make_range_local(inner)
            assert (local.start, local.seqlen, found) == (where[inner.start], inner.seqlen, part)
        assert a.make_ranges_local(merged).total_seqlen == merged.total_seqlen


def test_lists_of_ranges_as_containers() -> None:
    ranges = AttnRanges.from_cu_seqlens([0, 4, 9], 9)
    assert ranges.to_naive_ranges() == [(0, 4), (4, 9)] and ranges.to_cu_seqlens(9) == [0, 4, 9] and ranges.is_cu_seqlens(9)
    assert repr(ranges) == "[[0, 4), [4, 9)]" and repr(AttnRanges()) == "[[,)]" and AttnRanges().to_cu_seqlens(0) == [0]
    assert (ranges.start, ranges.end, ranges.max_seqlen, ranges.points) == (0, 9, 5, [0, 4, 9])
    assert ranges.to_tensor().tolist() == [[0, 4], [4, 9]] and ranges.to_tensor().dtype == torch.int32
    assert AttnRanges().to_tensor().shape == (0, 2)
    copy = ranges.clone()
    copy.append(AttnRange(20, 21), check=True)
    copy.insert(0, AttnRange(7, 7))
    copy.extend(AttnRanges.from_ranges([(1, 2)]), check=True)
    assert len(copy) == 5 and copy.clear_empty().size == 4 and copy.pop() == AttnRange(1, 2) and copy.pop(0).is_empty()
    copy[0] = AttnRange(5, 6)
    copy[1:3] = AttnRanges.from_ranges([(6, 7), (7, 8)])
    assert copy == AttnRanges.from_ranges([(5, 6), (6, 7), (7, 8)]) and copy[-1] == AttnRange(7, 8) and copy[1:].size == 2
    assert hash(copy) == hash(copy.clone()) and copy != "ranges" and copy.is_valid()


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: AttnRanges().pop(), IndexError, "pop from empty ranges"),
        (lambda: AttnRanges().start, ValueError, "no ranges have no start"),
        (lambda: AttnRanges().end, ValueError, "no ranges have no end"),
        (lambda: AttnRanges.from_ranges([(0, 3)]).make_range_local(AttnRange(2, 5)), ValueError, "is not in the"),
        (lambda: AttnRanges.from_ranges([(0, 3), (2, 5)]).chunk(2), AssertionError, "only non-overlapping ranges can be cut"),
        (lambda: AttnRanges.from_ranges([(0, 3)]).to_cu_seqlens(4), AssertionError, "do not cover 4 tokens"),
        (lambda: AttnRanges.from_cu_seqlens([0, 3, 2], 2), ValueError, "they must begin at 0, grow, and end at 2"),
        (lambda: AttnRanges.from_ranges([(0, 3)]).__setitem__(0, 3), AssertionError, "an element is an AttnRange, not a int"),
        (lambda: AttnRanges().__setitem__(slice(0, 2), AttnRanges()), AssertionError, "takes as many ranges as it names"),
        (lambda: AttnMask(None), RuntimeError, "made by AttnMask.from_ranges or AttnMask.from_mask"),
        (lambda: AttnMask.from_mask([[1, 0, 1]]), AssertionError, "row 0 of the mask is not one run of ones"),
        (lambda: AttnMask.from_mask([1, 0]), AssertionError, "the mask has 1 axes"),
        (lambda: AttnMask.make_causal_mask(2, 2, "top"), ValueError, "Invalid alignment 'top'"),
        (lambda: AttnMaskType("causl"), ValueError, "causl"),
        (lambda: AttnMaskType.from_int_type(4), KeyError, "4"),
    ],
)
def test_refusals_of_ranges_and_masks(call, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_dense_masks_and_their_slices() -> None:
    q, k = AttnRanges.from_ranges([(0, 3), (3, 5), (5, 8), (8, 9)]), AttnRanges.from_ranges([(0, 4), (2, 4), (3, 7), (4, 9)])
    types = [AttnMaskType.CAUSAL, AttnMaskType.CAUSAL, AttnMaskType.FULL, AttnMaskType.FULL]
    mask = AttnMask.from_ranges(q, k, types)
    dense = magi.utils.make_attn_mask_from_ffa_args(q, k, [1, 1, 0, 0], 9, 9, device="cpu")
    assert torch.equal(mask.mask_tensor[..., 0].bool(), dense) and mask.area == int(dense.sum())
    assert AttnMask.from_mask(dense.int()) == mask and [entry[2] for entry in mask.tuples()] == types
    assert mask.calc_sub_area(AttnRange(0, 3), AttnRange(0, 2)) == 6 and mask.is_square() and not mask.is_empty()
    assert mask.make_sub_mask(AttnRange(5, 8), AttnRange(3, 7)).is_pure_full() and "area" in repr(mask)
    documents = AttnRanges.from_ranges([(0, 4), (4, 6)])
    assert AttnMask.from_ranges(documents, documents, [AttnMaskType.CAUSAL] * 2).is_varlen_causal()
    assert AttnMask.from_ranges(documents, documents, [AttnMaskType.FULL] * 2).is_varlen_full()
    assert AttnMask.from_ranges(documents[:1], documents[:1], [AttnMaskType.CAUSAL]).is_pure_causal()
    with pytest.raises(ValueError, match="slices of types full and causal"):
        AttnMask.from_ranges(documents, documents, [AttnMaskType.BICAUSAL] * 2)
    with pytest.raises(AssertionError, match="1 types; a slice has one of each"):
        AttnMask.from_ranges(documents, documents, [AttnMaskType.FULL])


def dense_of(slices, rows: int, columns: int):
    q, k, types = slices
    numbers = [kind.to_int_type() for kind in types]
    return magi.utils.make_attn_mask_from_ffa_args(q, k, numbers, rows, columns, device="cpu")


def window(rows: int, columns: int, left: int, right: int, front: int = 0):
    """By the definition, for documents of as many queries as keys."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    seen = (left == -1) | (row - column <= left)
    return (seen | (column < front)) & ((right == -1) | (column - row <= right))


def test_windows_by_their_definition() -> None:
    generator = random.Random(13)
    for _ in range(400):
        length = generator.randint(1, 14)
        left, right, front = generator.randint(-1, 9), generator.randint(-1, 9), generator.choice([0, 0, 1, 4, 20])
        found = dense_of(
            helpers.infer_attn_mask_from_sliding_window(AttnRange(0, length), AttnRange(0, length), (left, right)), length, length
        )
        assert torch.equal(found, window(length, length, left, right)), (length, left, right)
        if (left, right) == (-1, -1):
            continue
        lengths = [length, generator.randint(1, 14)]
        starts = torch.tensor([0, length, sum(lengths)], dtype=torch.int32)
        *slices, total_q, total_k = helpers.infer_attn_mask_from_cu_seqlens(starts, starts, False, (left, right), front)
        wanted = torch.block_diag(*(window(n, n, left, right, front).int() for n in lengths)).bool()
        assert (total_q, total_k) == (sum(lengths),) * 2
        assert torch.equal(dense_of(slices, total_q, total_k), wanted), (lengths, left, right, front)


def test_windows_are_cut_as_callers_expect() -> None:
    q, k, types = helpers.infer_attn_mask_from_sliding_window(AttnRange(5, 15), AttnRange(5, 15), (2, 3))
    assert q.to_naive_ranges() == [(5, 7), (7, 12), (12, 15)] and k.to_naive_ranges() == [(5, 10), (5, 15), (10, 15)]
    assert types == [AttnMaskType.CAUSAL, AttnMaskType.BICAUSAL, AttnMaskType.INVCAUSAL]
    q, k, types = helpers.infer_attn_mask_from_sliding_window(AttnRange(0, 8), AttnRange(0, 5), (-1, -1))
    assert (q.to_naive_ranges(), k.to_naive_ranges(), types) == ([(3, 8)], [(0, 5)], [AttnMaskType.FULL])


def test_helpers() -> None:
    assert helpers.compute_pad_size(100, 4, 8) == 28 and helpers.compute_pad_size(64, 4, 8) == 0
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(helpers.squash_batch_dim(x), x.reshape(6, 2))
    assert [starts.tolist() for starts in helpers.infer_varlen_mask_from_batch(3, 5, "cpu")] == [[0, 5, 10, 15]] * 2
    padded = helpers.pad_at_dim(x, 1, 2, 7.0)
    assert padded.shape == (2, 5, 2) and (padded[:, 3:] == 7).all() and torch.equal(helpers.unpad_at_dim(padded, 1, 2), x)
    assert (helpers.pad_at_dim(x, -1, 1, 3.0, "left")[..., 0] == 3).all()
    one = AttnRanges.from_ranges([(0, 5)])
    q, k, types = helpers.apply_padding(one, one, [AttnMaskType.CAUSAL], 5, 3)
    assert q.to_naive_ranges() == [(0, 5), (5, 8)] and k.to_naive_ranges() == [(0, 5), (0, 0)] and types[1] is AttnMaskType.FULL
    assert one.size == 1
    starts = torch.tensor([0, 4])
    for arguments, sentence in (((True, (3, 0)), "a causal window is causal=False"), ((False, (3,)), "it is \\(left, right\\)")):
        with pytest.raises(AssertionError, match=sentence):
            helpers.infer_attn_mask_from_cu_seqlens(starts, starts, *arguments)
    with pytest.raises(AssertionError, match="global_window_size is -1"):
        helpers.infer_attn_mask_from_cu_seqlens(starts, starts, False, (1, 1), -1)


INSTALLED = """
import counterpoint.compat.magi as ours
ours.install(); ours.install()
import magi_attention, magi_attention.api
from magi_attention.api import calc_attn, flex_flash_attn_func
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.ranges import AttnRanges
from magi_attention.config import DistAttnConfig
from magi_attention.meta.solver.dispatch_solver import ToppHeapDispatchAlg
from magi_attention.utils import setup_dist_env, clearup_dist_env
assert magi_attention is ours and AttnRanges is ours.common.AttnRanges
"""


def test_installing_under_their_name() -> None:
    subprocess.run([sys.executable, "-c", INSTALLED], check=True)
    other = "import sys, types; sys.modules['magi_attention'] = types.ModuleType('magi_attention')\n"
    found = subprocess.run([sys.executable, "-c", other + INSTALLED], capture_output=True, text=True, check=False)
    assert "magi_attention is loaded already" in found.stderr


def test_helpers_of_utils() -> None:
    utils = magi.utils
    assert (
        utils.ceil_div(7, 2) == 4
        and utils.seqlens2cu_seqlens([2, 3]) == [0, 2, 5]
        and utils.cu_seqlens2seqlens([0, 2, 5]) == [2, 3]
    )
    assert utils.wrap_to_list(3, 2) == [3, 3] and utils.wrap_to_list((1, 2)) == [1, 2]
    assert (
        utils.is_list_value_all([1, 1], 1) and utils.is_list_value_all([2, 2], just_same=True) and not utils.is_list_value_all([])
    )
    assert utils.is_list_type_all([1, 2], int) and not utils.is_list_type_all([1, "2"], just_same=True)
    assert utils.get_a2a_corr_factor(1) == 1 and utils.get_a2a_corr_factor(4) == 0.75
    assert utils.get_calc_cost_factor(2, 8, 1e3, 0.5, 1.0, False) == pytest.approx(4 * 16 * 2.5 / 500)
    assert utils.get_comm_cost_factor(2, 8, 100.0, 0.5, 0.75, 1.0) == pytest.approx(32 / 37.5)
    utils.set_random_seed(5)
    first = torch.randn(2), random.random()
    utils.set_random_seed(5)
    assert torch.equal(first[0], torch.randn(2)) and first[1] == random.random()


@pytest.mark.parametrize("name", ["calc_dsa", "MagiDSAConfig"])
def test_keys_that_are_chosen_by_index_are_refused(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"{name} chooses keys for each query by index, which counterpoint does not offer"
    ):
        getattr(magi.api, name)
