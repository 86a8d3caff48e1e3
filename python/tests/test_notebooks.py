"""What notebooks show: pictures that are whole, small, and say what they are of."""

from __future__ import annotations

import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")


def svgs(html: str) -> list[ElementTree.Element]:
    """The pictures of an output, each read as XML."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def bars(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """What is drawn of a kind, besides the legend."""
    return [bar for bar in svg.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == kind and len(bar)]


@pytest.fixture(scope="module")
def plan() -> cp.Plan:
    group = cp.LocalGroup(3)
    return group.plan(cp.Mask("varlen-causal:lengths=60,200,40"), heads=(4, 2), head_dim=16, dtype=torch.float32, chunk=16)


def run(plan: cp.Plan, *, backward: bool) -> None:
    q, k, v = (torch.randn(rows, heads, 16, requires_grad=True) for rows, heads in ((300, 4), (300, 2), (300, 2)))
    out, _ = cp.attention(q, k, v, plan)
    if backward:
        out.sum().backward()


def test_masks_and_plans(plan) -> None:
    (mask,) = svgs(plan.mask._repr_html_())
    assert "300 query rows by 300 key columns" in mask.get("aria-label")
    html = plan._repr_html_()
    (picture,) = svgs(html)
    assert "Attention mask by rank" in picture.get("aria-label")
    figures = re.findall(r"<td[^>]*>([\d,]+)</td>", html)
    first = plan.summary().ranks[0]
    wanted = (0, first.tokens, first.area, first.recv_tokens, first.send_tokens, len(first.stages))
    assert figures[:6] == [f"{figure:,}" for figure in wanted]
    assert len(figures) == 18


def test_timelines(plan) -> None:
    forward, backward = svgs(plan.predict()._repr_html_())
    assert forward.get("aria-label").startswith("attention forward. ") and backward.get("aria-label").startswith(
        "attention backward. "
    )
    labels = [text.text for text in forward.iter("{http://www.w3.org/2000/svg}text")]
    assert [f"rank {rank}" for rank in range(3)] == [label for label in labels if label.startswith("rank ")]
    assert {"compute", "communication", "wait"} <= set(labels) and len(bars(forward, "compute")) >= 3
    with pytest.raises(cp.Error, match="call attention with this plan inside counterpoint.profile"):
        plan.timeline()
    run(plan, backward=True)
    with pytest.raises(cp.Error, match="nothing is measured yet"):
        plan.timeline()
    with cp.profile():
        run(plan, backward=False)
    (measured,) = svgs(plan.timeline()._repr_html_())
    assert len(bars(measured, "compute")) >= 3
    with cp.profile():
        run(plan, backward=True)
    assert len(svgs(plan.timeline()._repr_html_())) == 2 and svgs(plan.timeline().forward._repr_html_())
    spans = plan.timeline().forward.spans
    titles = [
        bar[0].text for kind in ("compute", "communication", "wait") for bar in bars(svgs(plan.timeline().forward.svg())[0], kind)
    ]
    assert all(any(label in title for title in titles) or "operations" in " ".join(titles) for _, _, label, *_ in spans)


def test_reports_are_frames_of_their_own(plan, tmp_path) -> None:
    report = plan.report(tmp_path / "report.html")
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in shown and "<script" not in shown
    assert (tmp_path / "report.html").read_text() == report.html


def test_a_report_gives_a_trace_of_what_was_measured_and_else_predicted() -> None:
    plan = cp.LocalGroup(3).plan(cp.Mask.causal(300), heads=(4, 2), head_dim=16, dtype=torch.float32)
    assert plan.report().chrome_trace() == plan.predict().forward.chrome_trace()
    with cp.profile():
        run(plan, backward=False)
    trace = plan.report().chrome_trace()
    assert trace == plan.timeline().forward.chrome_trace() != plan.predict().forward.chrome_trace()
    assert json.loads(trace)


def test_reports_go_into_pipes_and_through_links(plan, tmp_path) -> None:
    """What is no file is not replaced by one."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.html", tmp_path / "target.html"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(pipe.read_text)
        page = plan.report(pipe).html
        assert read.result(10) == page and stat.S_ISFIFO(pipe.stat().st_mode)
    target.write_text("before")
    link.symlink_to(target)
    plan.report(link)
    assert link.is_symlink() and target.read_text() == page
