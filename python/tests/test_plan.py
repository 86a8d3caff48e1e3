"""Plans of a group in this process: figures, rows there and back, pictures, prefetching, bad input."""

from __future__ import annotations

import json
import pickle
import signal
import threading
from concurrent.futures import CancelledError

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")

SHAPE = {"heads": (4, 2), "head_dim": 16, "dtype": torch.float32}


@pytest.fixture(scope="module")
def group() -> cp.LocalGroup:
    return cp.LocalGroup(3)


def test_figures(group) -> None:
    mask = cp.Mask("varlen-causal:lengths=300,200,77")
    plan = group.plan(mask, **SHAPE, chunk=32)
    assert plan.mask == mask and plan.chunk == 32 and plan.group is group
    assert sum(plan.sizes) == plan.q_rows == plan.k_rows == 577
    summary = plan.summary()
    assert summary.area == mask.area == sum(rank.area for rank in summary.ranks)
    assert [rank.tokens for rank in summary.ranks] == plan.sizes
    assert summary.comm.recv_tokens == sum(rank.recv_tokens for rank in summary.ranks)
    assert sorted(plan.position_ids.tolist()) == list(range(577))
    assert plan.cu_seqlens_local[0] == 0 and plan.cu_seqlens_local[-1] == 577
    predicted = plan.predict()
    assert predicted.forward.seconds > 0 and predicted.backward.seconds > predicted.forward.seconds
    assert len(predicted.forward.spans) > 0 and "efficiency" in predicted.forward.overlap


def test_rows_there_and_back(group) -> None:
    plan = group.plan(cp.Mask.causal(130), **SHAPE, chunk=16)
    for x in (torch.randn(130, 5), torch.arange(130), torch.randn(2, 130, 3)):
        dim = 1 if x.ndim == 3 else 0
        local = plan.dispatch(x, dim)
        assert torch.equal(local, x.index_select(dim, plan.position_ids))
        assert torch.equal(plan.undispatch(local, dim), x)
        assert torch.equal(plan.undispatch(plan.roll(local, 7, dim), dim), x.roll(7, dim))
    x = torch.randn(130, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: plan.dispatch(x), (x,))
    assert torch.autograd.gradcheck(lambda x: plan.undispatch(plan.roll(x, -3)), (x,))


def test_even_plans_pad(group) -> None:
    mask = cp.Mask.causal(100)
    plan = group.plan(mask, **SHAPE, even=True)
    assert len(set(plan.sizes)) == 1 and sum(plan.sizes) >= 100
    assert plan.mask.area == mask.area
    x = torch.arange(100)
    local = plan.dispatch(x, pad_value=-100)
    assert (local == -100).sum() == sum(plan.sizes) - 100
    assert torch.equal(plan.undispatch(local), x)
    assert torch.equal(plan.undispatch(plan.roll(local, -1)), x.roll(-1))


def test_another_mask_on_the_same_dispatch(group) -> None:
    plan = group.plan(cp.Mask.causal(256), **SHAPE, chunk=16)
    window = plan.on(cp.Mask.sliding_window(256, 31, 0))
    assert torch.equal(window.position_ids, plan.position_ids)
    assert plan.on(cp.Mask.sliding_window(256, 31, 0)) is window
    with pytest.raises(cp.PlanError, match="plan this mask on its own"):
        plan.on(cp.Mask.causal(255))


def test_plans_on_a_dispatch_are_kept_within_bounds(group) -> None:
    base = group.plan(cp.Mask.causal(64), heads=1, head_dim=8, dtype="float32", chunk=8)
    masks = [cp.Mask.varlen([0, cut, 64], causal=True) for cut in range(1, 64)]
    first = base.on(masks[0])
    assert base.on(masks[0]) is first
    for mask in masks:
        for scale in (0.5, 1.0):
            base.on(mask, scale=scale)
    assert len(base._on) == 64


def test_even_plans_have_the_chunks_of_others() -> None:
    group = cp.LocalGroup(2)
    for rows in (2**12, 2**20, 2**30):
        plans = [group.plan(cp.Mask.full(rows), heads=1, head_dim=8, dtype="float32", even=even) for even in (False, True)]
        assert plans[0].summary().chunk_size == plans[1].summary().chunk_size


def test_what_is_open_is_chosen_by_prediction_where_that_pays(group) -> None:
    small = group.plan(cp.Mask.causal(512), **SHAPE)
    assert (small.choices.dispatch, small.choices.overlap, small.choices.dispatches) == ("affinity", "concurrent", {})
    assert "comparing pays from 10 ms on" in small.choices.reason
    asked = group.plan(cp.Mask.causal(512), **SHAPE, dispatch="predicted", overlap="predicted")
    choices = asked.choices
    assert set(choices.dispatches) == {"affinity", "zigzag", "min-heap", "sequential"} and choices.reason is None
    best = min(seconds for seconds in choices.dispatches.values() if seconds is not None)
    # Of those within 0.8 % of the first to end, the one that moves the fewest bytes.
    assert choices.dispatches[choices.dispatch] <= best * 1.008
    # Threads of CPU ranks have no workers to share.
    assert set(choices.forward) == set(choices.backward) == {"concurrent", "sequential"}
    # Long enough that it pays: 96k tokens, 16 heads of 128.
    large = {"heads": 16, "head_dim": 128, "dtype": torch.bfloat16}
    mask = cp.Mask.causal(98304)
    found, other = (group.plan(mask, **large) for _ in range(2))
    assert found.choices.dispatches and found.choices.forward and found.fingerprint == other.fingerprint
    assert found.choices == other.choices == pickle.loads(pickle.dumps(found)).choices
    named = group.plan(mask, **large, dispatch=found.choices.dispatch, overlap=found.choices.overlap)
    assert named.fingerprint == found.fingerprint and not named.choices.dispatches and named.choices.reason is None
    kept = found.on(cp.Mask.sliding_window(98304, 4095, 0), overlap="sequential")
    assert (kept.choices.dispatch, kept.choices.overlap) == (found.choices.dispatch, "sequential")
    for plan in (small, asked):
        page = plan.report().html
        assert plan.choices.dispatch in page and plan.choices.overlap in page
    assert "comparing pays from 10 ms on" in small.report().html and f"{best * 1e3:.3f} ms" in asked.report().html


def test_policies_run_and_are_of_both_passes(group) -> None:
    mask, tensors = cp.Mask.causal(96), [torch.randn(96, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    outs = []
    for overlap in ("auto", "sequential", "forward=concurrent,backward=sequential", "kernel-barrier"):
        plan = group.plan(mask, **SHAPE, chunk=16, overlap=overlap)
        assert overlap in ("auto", plan.choices.overlap)
        out, _ = cp.attention(*tensors, plan)
        outs.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for out in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], out, strict=True))
    with pytest.raises(cp.PolicyError, match="unknown overlap policy `fast`"):
        group.plan(mask, **SHAPE, overlap="fast")


def test_prefetch(group) -> None:
    mask = cp.Mask.causal(1000)
    group.prefetch(mask, **SHAPE)
    assert group.plan(mask, **SHAPE).mask == mask
    assert group._prefetched == {}
    group.prefetch(mask, **SHAPE, chunk=0)
    with pytest.raises(cp.PlanError, match="chunk is 0; it must be a whole number of at least 1"):
        group.plan(mask, **SHAPE, chunk=0)
    for length in range(40, 80):
        group.prefetch(cp.Mask.causal(length), **SHAPE)
    assert len(group._prefetched) <= 16
    with pytest.raises(TypeError, match="no argument 'head'"):
        group.prefetch(mask, head=3, head_dim=8, dtype="float32", heads=1)
    with pytest.raises(cp.PlanError, match="no value that a plan could have: unhashable type: 'list'"):
        group.prefetch(mask, **SHAPE, stages=[1])


LONG = {**SHAPE, "dispatch": "predicted", "overlap": "predicted"}


def long_mask(seed: int) -> cp.Mask:
    """One whose planning takes seconds."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(100, 3000, (60_000,), generator=draw)
    return cp.Mask.varlen([0, *lengths.cumsum(0).tolist()], causal=True)


def test_a_plan_that_is_made_ahead_can_be_called_off() -> None:
    group = cp.LocalGroup(16)
    running, waiting = (group.prefetch(long_mask(seed), **LONG) for seed in range(2))
    assert group.prefetch(long_mask(1), **LONG) is waiting
    threading.Timer(0.2, running.cancel).start()
    with pytest.raises(CancelledError):
        running.result()
    assert running.cancelled() and running.done()
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    # Nothing was made, and what was called off is forgotten.
    assert group.plan_cache_info().currsize == 0
    mask = cp.Mask.causal(500)
    called_off = group.prefetch(mask, **SHAPE)
    made = called_off.result()
    called_off.cancel()
    assert not called_off.cancelled() and group.plan(mask, **SHAPE) is made
    again = group.prefetch(mask, **SHAPE)
    again.cancel()
    assert group.plan(mask, **SHAPE).fingerprint == made.fingerprint
    # So does a group that is closed.
    left = group.prefetch(long_mask(2), **LONG)
    group.close()
    with pytest.raises(CancelledError):
        left.result()


def test_a_signal_ends_planning() -> None:
    group = cp.LocalGroup(16)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for call in (group.plan, lambda mask, **shape: group.prefetch(mask, **shape).result()):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                call(long_mask(3), **LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert group.plan_cache_info().currsize == 0
    assert group.plan(cp.Mask.causal(64), **SHAPE).q_rows == 64


def test_threads_change_no_plan() -> None:
    mask = cp.Mask.varlen(range(0, 40_001, 500), causal=True)
    alone, helped = cp.LocalGroup(4), cp.LocalGroup(4, planning_threads=3)
    for more in ({}, {"dispatch": "predicted", "overlap": "predicted"}, {"stages": 3, "queries": "auto"}):
        plans = [group.plan(mask, **SHAPE, **more) for group in (alone, helped)]
        assert plans[0].fingerprint == plans[1].fingerprint and plans[0].choices == plans[1].choices
    ahead = helped.prefetch(mask, **SHAPE, chunk=100)
    assert ahead.result().fingerprint == alone.plan(mask, **SHAPE, chunk=100).fingerprint
    for threads in (0, -1, 1.5, True, "two"):
        with pytest.raises(cp.PlanError, match="planning_threads is .*; it must be a whole number of at least 1"):
            cp.LocalGroup(2, planning_threads=threads)


def test_equal_masks_are_planned_once() -> None:
    group = cp.LocalGroup(2)
    plan = group.plan(cp.Mask.causal(1000), **SHAPE)
    assert group.plan_cache_info() == (0, 1, 16, 1)
    # Content counts, not which object has it.
    again = group.plan(cp.Mask.causal(1000), **SHAPE)
    assert group.plan_cache_info() == (1, 1, 16, 1)
    assert again is not plan and again.fingerprint == plan.fingerprint
    group.prefetch(cp.Mask.causal(1000), **SHAPE)
    group.plan(cp.Mask.causal(1000), **SHAPE)
    assert group.plan_cache_info() == (2, 1, 16, 1)
    # Whatever may change a plan is another one.
    others = [{"dispatch": "zigzag"}, {"dispatch": "affinity"}, {"stages": 2}, {"overlap": "sequential"}, {"chunk": 64}]
    for number, other in enumerate([*others, {"deterministic": True}, {"on": plan}]):
        group.plan(cp.Mask.causal(1000), **{**SHAPE, **other})
        assert group.plan_cache_info() == (2, 2 + number, 16, 2 + number), other
    for length in range(40, 80):
        group.plan(cp.Mask.causal(length), **SHAPE)
    assert group.plan_cache_info() == (2, 48, 16, 16)
    group.close()


def test_pickled_plans_dispatch_but_do_not_compute(group) -> None:
    plan = group.plan(cp.Mask.causal(64), **SHAPE)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.fingerprint == plan.fingerprint and torch.equal(copy.position_ids, plan.position_ids)
    x = torch.randn(64, 4, 16)
    with pytest.raises(cp.PlanError, match="this plan has no group"):
        cp.attention(x, x[:, :2], x[:, :2], copy)
    with pytest.raises(TypeError, match="a group cannot be pickled"):
        pickle.dumps(group)


def test_reports(group, tmp_path) -> None:
    plan = group.plan(cp.Mask("varlen-causal:lengths=300,200,77"), **SHAPE, chunk=32)
    report = plan.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == report.html and report.html.startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert report._repr_html_().startswith("<iframe srcdoc=")
    assert plan._repr_html_().count("<svg") == 1 and "<table>" in plan._repr_html_()
    assert "text/plain" in plan._repr_mimebundle_()
    trace = json.loads(plan.predict().forward.chrome_trace())
    assert trace


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": (4, 3)}, "heads are 4 of queries and 3 of keys"),
        ({"dtype": torch.int8}, "dtype is torch.int8; attention computes in"),
        ({"dispatch": "random"}, 'dispatch is "random"; it must be "auto", "predicted", "affinity"'),
        ({"stages": 1000}, "the number of stages is 1000"),
        ({"queries": "sometimes"}, 'queries is "sometimes"'),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"sink_grad": "all"}, "sink_grad is 'all'"),
    ],
)
def test_bad_plans_are_one_sentence(group, change, sentence) -> None:
    with pytest.raises(cp.PlanError, match=sentence.replace("(", r"\(")) as raised:
        group.plan(cp.Mask.causal(64), **{**SHAPE, **change})
    assert "\n" not in str(raised.value)


def test_bad_rows_are_one_sentence(group) -> None:
    plan = group.plan(cp.Mask.causal(64), **SHAPE)
    with pytest.raises(cp.TensorError, match="x has 63 rows along dim 0; the plan has 64 for all rows of queries"):
        plan.dispatch(torch.zeros(63))
    with pytest.raises(cp.TensorError, match='role is \'x\'; it must be "q" or "k"'):
        plan.dispatch(torch.zeros(64), role="x")
    with pytest.raises(cp.PlanError, match="size is 0"):
        cp.LocalGroup(0)
    with pytest.raises(cp.DeviceError, match='device is tpu; it must be "cpu", "cuda" or a GPU with its number'):
        cp.LocalGroup(1, device="tpu")


def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(cp.DeviceError, match=f"device is cuda:0, and PyTorch {torch.__version__.split('+')[0]}.* finds no GPU"):
        cp.LocalGroup(1, device="cuda:0")


def test_rows_are_counted_before_a_compiler_sees_the_plan(group) -> None:
    """`torch.compile` looks into neither the engine nor the lock that `cached_property` had before Python 3.12."""
    plan = group.plan(cp.Mask.causal(64), heads=1, head_dim=8, dtype="float32")
    assert {"q_rows", "k_rows"} <= vars(plan).keys()


def test_queries_travel_where_everything_is_predicted_or_they_are_asked_to() -> None:
    """Few queries over many keys: looking for hosts takes longer than the rest of a plan, so that it has to be asked for."""
    group, mask, shape = cp.LocalGroup(4), cp.Mask.full(64, 32768), {"heads": 8, "head_dim": 64, "dtype": torch.bfloat16}

    def moved(**how) -> int:
        return group.plan(mask, **shape, **how).summary().comm.query_tokens

    for dispatch in ("auto", "affinity", "min-heap", "sequential"):
        assert moved(dispatch=dispatch) == 0, dispatch
    assert moved(dispatch="predicted") > 0 and moved(queries="fewest_bytes") > 0
    assert moved(dispatch="predicted", queries="never") == 0
    assert group.prefetch(mask, **shape, dispatch="predicted").result().summary().comm.query_tokens > 0
    group.close()


def test_plans_made_ahead_are_as_deterministic_as_is_asked_when_they_are_taken() -> None:
    torch = pytest.importorskip("torch")
    group, arguments = cp.LocalGroup(2), {"heads": 2, "head_dim": 8, "dtype": "float32"}
    before = group.plan(cp.Mask.full(64), **arguments)
    group.prefetch(cp.Mask.causal(64), **arguments).result()
    torch.use_deterministic_algorithms(True)
    try:
        assert group.plan(cp.Mask.causal(64), **arguments).deterministic
        ahead = group.prefetch(cp.Mask.full(32), **arguments).result()
        assert not before.on(cp.Mask.causal(64)).deterministic  # as the plan whose dispatch it has
    finally:
        torch.use_deterministic_algorithms(False)
    assert group.plan(cp.Mask.full(32), **arguments) is not ahead
