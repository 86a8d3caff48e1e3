"""Tuned plans: layers of a group run as a file of `counterpoint tune` says, where it is for them."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import warnings
from contextlib import closing
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from ranks import Ranks  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, ExpertLayer, LayerPass, RowParallelLinear  # noqa: E402

SIZE, TOKENS, WIDE, NARROW = 4, 64, 32, 24
GROUPS = (3, 8, 5)
OTHER = LayerPass("signals", GROUPS)


def device() -> str:
    with closing(cp.LocalGroup(2)) as group:
        return group._native.tuned[0]


def plan(of_device: str, **more: Any) -> dict[str, Any]:
    """Of a row-parallel layer's forward under sequence parallelism."""
    shape = {"ranks": SIZE, "ranks_per_node": SIZE, "pass": "forward", "collective": "reduce-scatter"}
    sizes = {"m": TOKENS, "n": WIDE, "k": NARROW, "dtype": "f32", "bias": False}
    found = {"policy": "signals", "groups": GROUPS, "seconds": 1e-9, "sequential_seconds": 1.0, "search": "predictive"}
    return {"device": of_device, "transport": "tcp", **shape, **sizes, **found, **more}


def written(path: pathlib.Path, *plans: dict[str, Any], version: int = 2) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version, "plans": plans}))
    return str(path)


def passes(rank: int, tuned: Any, folder: str | None = None) -> dict[str, Any]:
    """What layers of a group say of themselves, with the warnings of the group."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if folder is not None:
            patch.setenv("COUNTERPOINT_PROFILE_DIR", folder)
        cp.Group().close()  # which may have been made with other plans
        said.clear()
        group = cp.Group(tuned=tuned)
        try:
            layer = RowParallelLinear(NARROW, WIDE, tp_group=group, sequence_parallel=True, bias=False, dtype=torch.float32)
            x = torch.full((TOKENS, NARROW // SIZE), float(rank + 1))
            with torch.no_grad():
                layer.weight.fill_(0.5)
                y, _ = layer(x)
            assert torch.equal(y, torch.full((TOKENS // SIZE, WIDE), 0.5 * NARROW // SIZE * 10)), y
            other = ColumnParallelLinear(WIDE, NARROW, tp_group=group, sequence_parallel=True, dtype=torch.float32)
            found = {"row": layer.passes(TOKENS).forward, "shorter": layer.passes(TOKENS // 2).forward}
            return {**found, "column": other.passes(TOKENS).forward, "said": [str(one.message) for one in said]}
        finally:
            group.close()


def refused(rank: int, tuned: Any) -> str:
    with pytest.raises(cp.PlanError) as caught:
        cp.Group(tuned=tuned)
    return str(caught.value)


def tuned_on_processes(path: pathlib.Path, arguments: str, size: int) -> None:
    """Runs `counterpoint tune` with CPU ranks that are processes, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The port after the launcher's is the ranks' own.
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    line = [sys.executable, "-m", "counterpoint.command_line", "tune", *arguments.split(), "--plans", str(path)]
    started = []
    for rank in range(size):
        environment = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0] * size, said


def test_layers_run_as_they_were_tuned(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    kept = written(tmp_path / "profiles" / "tuned-plans.json", plan(device()), plan("another device", groups=[16]))
    # The file that is named, and the one in the folder of profiles.
    for found in [*ranks.run(passes, kept), *ranks.run(passes, True, str(tmp_path / "profiles"))]:
        assert found["row"] == OTHER
        assert found["shorter"].groups != GROUPS and found["column"].groups != GROUPS
        assert sum(found["row"].groups) == TOKENS // SIZE and sum(found["shorter"].groups) == TOKENS // SIZE // 2
        assert not found["said"]
    for found in ranks.run(passes, False, str(tmp_path / "profiles")):
        assert found["row"] != OTHER and not found["said"]


def test_ranks_that_are_processes_are_tuned_as_such(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    size = f"--m {TOKENS} --n {WIDE} --k {NARROW} --collective reduce-scatter --overlap signals"
    tuned_on_processes(path, f"gemm {size} --iterations 1 --warmups 0", SIZE)
    plans = json.loads(path.read_text())["plans"]
    assert {one["policy"] for one in plans} == {"sequential", "signals"}
    assert {(one["device"], one["transport"], one["ranks"]) for one in plans} == {(device(), "tcp", SIZE)}
    for chosen in plans:
        # As if that one had been the fastest.
        for one in plans:
            one["seconds"] = 1e-9 if one is chosen else 1.0
        wanted = LayerPass(chosen["policy"], tuple(chosen["groups"]))
        assert all(found["row"] == wanted and not found["said"] for found in ranks.run(passes, written(path, *plans)))


def test_a_file_that_is_not_for_the_group_is_said_and_not_used(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    others = written(tmp_path / "others.json", plan("another device"), plan(device(), transport="nvlink"))
    first, *rest = ranks.run(passes, others)
    assert len(first["said"]) == 1 and "no tuned plan for 4 ranks" in first["said"][0] and others in first["said"][0]
    assert all(found["row"] != OTHER for found in [first, *rest]) and not any(found["said"] for found in rest)
    old = written(tmp_path / "profiles" / "tuned-plans.json", plan(device()), version=1)
    first, *rest = ranks.run(passes, True, str(tmp_path / "profiles"))
    assert len(first["said"]) == 1 and "version 1" in first["said"][0] and "tune again" in first["said"][0]
    assert all(found["row"] != OTHER for found in [first, *rest])
    # A file of one's own is an error, of all ranks.
    assert all("version 1" in said and old in said for said in ranks.run(refused, old))
    assert all("missing.json" in said for said in ranks.run(refused, str(tmp_path / "missing.json")))
    assert all("tuned is 7" in said for said in ranks.run(refused, 7))


def test_experts_run_as_they_were_tuned(tmp_path: pathlib.Path) -> None:
    ids = [torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.tensor([[3, 0], [0, 2], [1, 3]])]
    routing, fewer = cp.Routing.top_k(4, ids), cp.Routing.top_k(4, [ids[0], ids[1][:2]])
    shape = {"device": device(), "transport": "threads", "ranks": 2, "ranks_per_node": 2, "kind": "dispatch", "experts": 4}
    sizes = {"pass": "forward", "tokens": 6, "rows": 12, "in_features": 8, "out_features": 5, "dtype": "f32"}
    groups, times = {"count": 3, "growth": 150}, {"seconds": 1e-9, "sequential_seconds": 1.0}
    found = {"policy": "signals", "groups": groups, "search": "predictive"} | times
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"version": 2, "plans": [], "experts": [shape | sizes | found]}))
    results = []
    for tuned in (path, False):
        with closing(cp.LocalGroup(2, tuned=tuned)) as group:
            torch.manual_seed(1)
            layer = ExpertLayer("dispatch", 8, 5, 4, group=group, dtype=torch.float32)
            assert (layer.passes(routing).forward == ("signals", 3, 150)) == (tuned is path)
            assert layer.passes(routing).backward != ("signals", 3, 150)
            results.append(layer(torch.ones(6, 8), routing).detach())
            other = ExpertLayer("combine", 8, 5, 4, group=group, dtype=torch.float32)
            assert other.passes(fewer).forward != ("signals", 3, 150)
            assert group._native.tuned[2] == (1 if tuned is path else 0)
    assert torch.equal(*results)


def test_ranks_of_one_process_follow_their_own(tmp_path: pathlib.Path) -> None:
    name = written(
        tmp_path / "plans.json",
        plan(device(), transport="threads"),
        plan(device(), transport="threads", ranks=2, ranks_per_node=2, groups=[32]),
    )
    with pytest.warns(UserWarning, match="no tuned plan for 3 ranks"), closing(cp.LocalGroup(3, tuned=name)):
        pass
    with closing(cp.LocalGroup(4, tuned=pathlib.Path(name))) as group:
        assert group._native.tuned[1:] == ("threads", 1)
    with closing(cp.LocalGroup(4, tuned=False)) as group:
        assert group._native.tuned[1:] == ("threads", 0)
