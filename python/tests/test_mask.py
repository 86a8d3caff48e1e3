"""Masks: every constructor against its definition, value semantics, pictures, and sentences for bad input."""

from __future__ import annotations

import pickle
import random

import pytest

import counterpoint as cp


def pairs(mask: cp.Mask) -> set[tuple[int, int]]:
    return {(q, k) for q in range(mask.seqlen_q) for k in range(mask.seqlen_k) if (q, k) in mask}


def test_expressions_paths_and_json(tmp_path) -> None:
    mask = cp.Mask("varlen-causal:lengths=3,5")
    assert (mask.seqlen_q, mask.seqlen_k, mask.area) == (8, 8, 21)
    assert mask.slices == [((0, 3), (0, 3), "causal"), ((3, 8), (3, 8), "causal")]
    path = tmp_path / "mask.json"
    path.write_text(mask.to_json())
    assert cp.Mask(path) == cp.Mask(str(path)) == cp.Mask(mask.to_json()) == mask


def test_values() -> None:
    a, b = cp.Mask.causal(16), cp.Mask("causal:16")
    assert a == b and hash(a) == hash(b) and a != cp.Mask.full(16)
    assert pickle.loads(pickle.dumps(a)) == a
    assert len({a, b, cp.Mask.full(16)}) == 2
    assert repr(a) == "Mask(seqlen_q=16, seqlen_k=16, slices=1, area=136)"
    with pytest.raises(AttributeError):
        a.area = 3  # type: ignore[misc]


def test_builders() -> None:
    assert cp.Mask.full(4, 6).area == 24
    assert pairs(cp.Mask.causal(2, 4)) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)}
    assert cp.Mask.varlen([0, 3, 8], causal=True) == cp.Mask("varlen-causal:0,3,8")
    assert cp.Mask.varlen([0, 3, 8]) == cp.Mask("varlen-full:0,3,8")
    assert cp.Mask.varlen([0, 3, 8], [0, 1, 4]).area == 3 + 15
    assert cp.Mask.sliding_window(32, 5, 0, 2) == cp.Mask("sliding-window:32,left=5,right=0,global=2")
    assert cp.Mask.sliding_window(32, -1, 3) == cp.Mask.sliding_window(32, None, 3)
    window = cp.Mask.varlen([0, 10, 24], causal=True, window=(3, -1))
    assert window == cp.Mask("varlen-sliding-window:0,10,24,left=3,right=0")
    cross = cp.Mask.varlen([0, 2], [0, 5], window=(1, 0))
    assert pairs(cross) == {(0, 2), (0, 3), (1, 3), (1, 4)}


def test_prefix_tree() -> None:
    mask = cp.Mask.prefix_tree([-1, 0, 0, 2], [2, 1, 2, 1])
    tree = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 2, 3]}
    piece = [0, 0, 1, 2, 2, 3]
    assert pairs(mask) == {(q, k) for q in range(6) for k in range(q + 1) if piece[k] in tree[piece[q]]}
    with pytest.raises(cp.MaskError, match=r"parents\[1\] is 1; a piece continues an earlier one"):
        cp.Mask.prefix_tree([-1, 1], [2, 2])


def test_block_sparse() -> None:
    mask = cp.Mask.block_sparse([[True, False], [True, True]], block=(2, 3))
    assert (mask.seqlen_q, mask.seqlen_k, mask.area) == (4, 6, 18)
    assert pairs(mask) == {(q, k) for q in range(4) for k in range(6) if q >= 2 or k < 3}
    assert cp.Mask.block_sparse([[1, 1]], block=4, seqlen_q=3, seqlen_k=7).area == 21


def test_slices_that_overlap() -> None:
    arguments = ([(0, 4), (2, 6)], [(0, 4), (0, 6)], ["full", 1])
    with pytest.raises(cp.MaskError, match=r"slices\[0\] and slices\[1\] overlap"):
        cp.Mask.from_slices(*arguments, seqlen_q=6, seqlen_k=6)
    union = cp.Mask.from_slices(*arguments, seqlen_q=6, seqlen_k=6, overlapping="union")
    causal = {(q, k) for q in range(2, 6) for k in range(q + 1)}
    assert pairs(union) == {(q, k) for q in range(4) for k in range(4)} | causal
    assert union.area == len(pairs(union))
    one_type = cp.Mask.from_slices([[0, 4]], [[0, 4]], "causal", seqlen_q=4, seqlen_k=4)
    assert one_type == cp.Mask.causal(4)
    with pytest.raises(cp.MaskError, match="types is 7"):
        cp.Mask.from_slices([[0, 4]], [[0, 4]], 7, seqlen_q=4, seqlen_k=4)


def test_marks_of_tokens() -> None:
    packed = cp.Mask.from_position_ids([0, 1, 2, 0, 1, 0])
    assert packed == cp.Mask("varlen-causal:lengths=3,2,1") == cp.Mask.from_position_ids([[0, 1, 2, 0, 1, 0]])
    assert cp.Mask.from_position_ids([0, 1, 0], causal=False) == cp.Mask("varlen-full:lengths=2,1")
    ids = [0, 0, 1, -1, 0, 1]
    expected = {(q, k) for q in range(6) for k in range(q + 1) if ids[q] == ids[k] >= 0}
    assert pairs(cp.Mask.from_document_ids(ids)) == expected
    with pytest.raises(cp.MaskError, match=r"position_ids\[2\] is 3; it must be 2, or 0"):
        cp.Mask.from_position_ids([0, 1, 3])


@pytest.mark.parametrize("seed", range(20))
def test_dense_and_back(seed: int) -> None:
    torch = pytest.importorskip("torch")
    generator = random.Random(seed)
    rows, columns = generator.randint(1, 20), generator.randint(1, 20)
    dense = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < generator.random()
    mask = cp.Mask.from_dense(dense)
    assert torch.equal(mask.to_dense(), dense) and mask.to_dense().dtype == torch.bool
    for rows in (list(dense.numpy()), list(dense.int().numpy()), list(dense), dense.tolist(), dense.int().tolist()):
        assert cp.Mask.from_dense(rows) == mask
    assert mask.area == int(dense.sum())
    assert cp.Mask.from_dense(dense.tolist()) == cp.Mask.from_dense(dense.numpy()) == mask
    assert cp.Mask.from_dense(dense.t()).area == mask.area
    causal = torch.ones(40, 40).tril() > 0
    assert len(cp.Mask.from_dense(causal).slices) <= 2


def test_tensors_as_arguments() -> None:
    torch = pytest.importorskip("torch")
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert cp.Mask.varlen(starts, causal=True) == cp.Mask("varlen-causal:0,3,8")
    assert cp.Mask.varlen(starts.numpy()) == cp.Mask("varlen-full:0,3,8")
    ranges = torch.tensor([[0, 4]])
    assert cp.Mask.from_slices(ranges, ranges, torch.tensor([1]), seqlen_q=4, seqlen_k=4) == cp.Mask.causal(4)
    assert cp.Mask.from_position_ids(torch.tensor([[0, 1, 0]])) == cp.Mask("varlen-causal:lengths=2,1")


def _torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: cp.Mask("nonsense:5"), cp.MaskError, "unknown mask builder"),
        (lambda: cp.Mask(5), TypeError, "expression must be text"),
        (lambda: cp.Mask.full(-1), cp.MaskError, "s is -1; it must not be negative"),
        (lambda: cp.Mask.full(0), cp.MaskError, "seqlen_q is 0"),
        (lambda: cp.Mask.varlen([1, 2]), cp.MaskError, "cumulative starts begin with 0, not with 1"),
        (lambda: cp.Mask.varlen([0, 3, 2]), cp.MaskError, "must not decrease"),
        (lambda: cp.Mask.varlen("abc"), TypeError, "cu_seqlens must be a list"),
        (lambda: cp.Mask.varlen([0, 2], window=(-3, 0)), cp.MaskError, r"window\[0\] is -3"),
        (lambda: cp.Mask.varlen([0, 2], [0, 1, 2]), cp.MaskError, "1 documents of queries cannot be paired"),
        (lambda: cp.Mask.from_dense([[1], [1, 0]]), cp.MaskError, "rows of different lengths"),
        (lambda: cp.Mask.from_dense(3), cp.MaskError, "array must be an array of two axes"),
        (lambda: cp.Mask.from_document_ids([[0], [1]]), cp.MaskError, "ids has 2 sequences; pack them"),
        (
            lambda: cp.Mask.from_dense(pytest.importorskip("torch").zeros(2, 2)),
            cp.MaskError,
            "array is a tensor of torch.float32; give booleans",
        ),
        (
            lambda: cp.Mask.from_dense(pytest.importorskip("torch").eye(2).bool().to_sparse()),
            cp.MaskError,
            "array is torch.sparse_coo; give a dense tensor of booleans",
        ),
        (
            lambda: cp.Mask.from_dense(pytest.importorskip("torch").eye(2).bool().to("meta")),
            cp.MaskError,
            "array is on the meta device, without elements",
        ),
        (
            lambda: cp.Mask.from_dense(pytest.importorskip("numpy").ma.masked_array([[True]], mask=[[True]])),
            cp.MaskError,
            "array is a masked array of NumPy's",
        ),
        (
            lambda: cp.Mask.from_dense(pytest.importorskip("torch").zeros(2, 2).numpy()),
            cp.MaskError,
            "array is an array of float32; give booleans",
        ),
        (lambda: cp.Mask.from_dense([[0.0, float("-inf")]]), cp.MaskError, "array is a list with 0.0; give booleans"),
        (lambda: cp.Mask.from_dense(["01"]), cp.MaskError, "array is a list with '0'; give booleans"),
        (lambda: cp.Mask("/dev/zero"), cp.MaskError, "it is a device, which may have no end"),
        (lambda: cp.Mask("varlen-causal:lengths=@/dev/zero"), cp.MaskError, "it is a device, which may have no end"),
        (lambda: cp.Mask("causal:1M").to_dense(), cp.MaskError, "would take"),
        (lambda: cp.Mask.block_sparse([[1]], block="x"), TypeError, "block must be a number"),
        (lambda: 3 in cp.Mask.full(2), TypeError, "ask for a pair"),
    ],
)
def test_bad_input_is_one_sentence(make, kind, sentence) -> None:
    with pytest.raises(kind, match=sentence) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_errors_are_what_callers_expect() -> None:
    assert issubclass(cp.MaskError, ValueError) and issubclass(cp.MaskError, cp.Error)
    assert issubclass(cp.Error, RuntimeError) and issubclass(cp.StalledError, TimeoutError)
    from counterpoint import _native

    with pytest.raises(cp.InternalError, match="a bug in counterpoint, please report it: over"):
        _native._panic("over")


def test_out_of_memory_is_also_torchs() -> None:
    torch = pytest.importorskip("torch")
    from counterpoint import errors

    error = errors.of("OutOfMemoryError", "no room", needed=5, available=3)
    assert isinstance(error, cp.OutOfMemoryError) and isinstance(error, torch.OutOfMemoryError)
    assert (error.needed, error.available) == (5, 3)


def test_pictures() -> None:
    mask = cp.Mask.sliding_window(1 << 20, 4095, 0)
    html = mask._repr_html_()
    assert html.startswith("<svg") and len(html) < 150_000
    assert set(mask._repr_mimebundle_()) == {"text/html", "text/plain"}
    assert "<title>a &lt;b&gt;</title>" in mask.svg(title="a <b>")
    assert len(cp.Mask.full(2, 3).picture(1 << 60, 1 << 60)) == 2 * (3 + 1)
    with pytest.raises(cp.MaskError, match="a picture of 1048576 x 1048576 characters is too large"):
        mask.picture(1 << 60, 1 << 60)


def test_rows_in_another_order() -> None:
    mask = cp.Mask.varlen([0, 3, 8], causal=True)
    order = [(5, 8), (0, 2), (2, 5)]
    rows = [row for start, end in order for row in range(start, end)]
    moved = mask.rearranged(order)
    assert moved.area == mask.area
    for q, row in enumerate(rows):
        for k, column in enumerate(rows):
            assert ((q, k) in moved) == ((row, column) in mask)
    assert cp.Mask.full(2, 3).rearranged([(1, 2), (0, 1)], [(0, 3)]) == cp.Mask.full(2, 3)
    with pytest.raises(cp.MaskError, match=r"q_order must hold each of the mask's 8 rows once; row 5 is in no range"):
        mask.rearranged([(0, 5), (6, 8)])
    with pytest.raises(TypeError, match=r"q_order must be a list of \(start, end\)"):
        mask.rearranged(3)
