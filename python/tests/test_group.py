"""Groups of ranks that are processes: from any process group, side by side, and how they end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import cache

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import Died, Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402


def total(group: cp.Group) -> list[float]:
    """What attention that sees everything gives to one row, whose value is the global rank: a number of all ranks."""
    plan = group.plan(cp.Mask.full(8 * group.size), heads=1, head_dim=8, dtype="float64", chunk=8)
    q = torch.zeros(plan.q_rows, 1, 8, dtype=torch.float64)
    v = torch.full_like(q, float(dist.get_rank()))
    return [round(float(cp.attention(q, q, v, plan)[0].mean()), 9), group.rank, group.size]


def of_everyone(rank: int) -> tuple[list[float], bool, str, str]:
    group = cp.Group()
    return total(group), cp.Group(dist.group.WORLD) is group, group.transport, repr(group)


def test_a_group_of_the_default_process_group_is_made_once(ranks: Ranks) -> None:
    for rank, (found, same, transport, text) in enumerate(ranks.run(of_everyone)):
        assert found == [1.5, rank, 4] and same and transport == "tcp"
        assert text == f"Group(rank={rank}, size=4, transport='tcp')"


def of_a_mesh(rank: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inner, outer = cp.Group(mesh["cp"]), cp.Group(mesh["dp"])
    cp.Group().close()  # which was made for one node
    both = cp.Group(mesh)
    assert cp.Group() is both
    assert (both._nodes, inner._nodes) == (2, 1)
    return [total(group) for group in (inner, outer, both, inner)]


def who_runs_with_others(rank: int) -> list[bool | str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: list[bool | str] = []
    for ranks, asked in ((mesh["tp"], None), (mesh["tp"], False), (None, None), (None, True)):
        group = cp.Group(ranks, concurrent_collectives=asked)
        found.append(group.concurrent_collectives)
        if asked is None:
            try:
                cp.Group(ranks, concurrent_collectives=not group.concurrent_collectives)
            except cp.Error as error:
                found.append(str(error))
        group.close()
    return found


def test_a_part_of_the_ranks_has_concurrent_collectives_of_the_others(ranks: Ranks) -> None:
    refusal = "concurrent_collectives is {}, and the group of these ranks was made with {}; close that one before"
    for found in ranks.run(who_runs_with_others):
        assert found == [True, refusal.format(False, True), False, False, refusal.format(True, False), True]


def test_groups_of_a_mesh_work_side_by_side(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(of_a_mesh)):
        row, column = divmod(rank, 2)
        inner = [2 * row + 0.5, column, 2]
        assert found == [inner, [column + 1.0, row, 2], [1.5, rank, 4], inner]


def of_a_fake_backend(rank: int) -> list[float]:
    return total(cp.Group())


def test_no_collective_of_the_process_group_is_called() -> None:
    # Those of the fake backend do nothing.
    with Ranks(2, backend="fake") as pool:
        assert pool.run(of_a_fake_backend) == [[0.5, 0, 2], [0.5, 1, 2]]


def refusals(rank: int) -> dict[str, str]:
    single = [dist.new_group([one]) for one in range(4)]
    cp.Group(single[rank]).close()
    tries = {
        "no rank": lambda: cp.Group(single[rank - 1]),
        "type": lambda: cp.Group([0, 1]),
        "device": lambda: cp.Group(device="cuda"),
        "transport": lambda: cp.Group(transport="pigeons"),
        "blocks of NCCL": lambda: cp.Group(transport="auto+max-ctas=8"),
        "nodes": lambda: cp.Group(nodes=3),
        "profile": lambda: cp.Group(single[rank], profile="/no"),
        "dimensions": lambda: cp.Group(init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))),
        "names": lambda: cp.Group(init_device_mesh("cpu", (2, 2))),
        "settings": lambda: cp.Group() and cp.Group(limit=5.0),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "nothing raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_is_no_group_is_refused_in_a_sentence(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(refusals)):
        assert found["no rank"] == (
            f"Error: global rank {rank} is no rank of this process group; only its ranks make a group of it"
        )
        assert found["type"] == (
            "TypeError: group_or_mesh must be a torch.distributed.ProcessGroup or a DeviceMesh, not list [0, 1]"
        )
        assert found["device"].startswith("DeviceError: device is cuda")
        assert found["transport"] == 'Error: transport is \'pigeons\'; on cpu it must be "auto" or "tcp"'
        assert found["blocks of NCCL"].startswith("Error: transport is 'auto+max-ctas=8'; on cpu it must be")
        assert found["nodes"] == "PlanError: nodes is 3; 4 ranks cannot be equally many on each"
        assert found["profile"].startswith("PlanError: profile '/no' cannot be read")
        assert found["dimensions"].startswith("Error: group_or_mesh is a mesh of 3 dimensions")
        assert found["names"].startswith("Error: group_or_mesh is a mesh whose dimensions have no names")
        assert found["settings"] == (
            "Error: limit is 5.0, and the group of these ranks was made with 600.0; close that one before"
        )


def test_without_a_process_group() -> None:
    with pytest.raises(cp.Error, match=r"call torch\.distributed\.init_process_group before"):
        cp.Group()


def keeps_nothing(rank: int) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        cp.Group()
    except cp.Error as error:
        return str(error)
    return "nothing raised"


def test_a_store_that_keeps_nothing_is_refused() -> None:
    with Ranks(1) as pool:
        assert "so its ranks cannot find each other through it" in pool.run(keeps_nothing)[0]


@cache
def rows_of_a_mesh():
    """Made once, because making it is collective among all four."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]


def cp_group(rank: int, **settings: object) -> cp.Group:
    """One of two groups of two: in the second, ranks of the group are others among all processes."""
    return cp.Group(rows_of_a_mesh(), **settings)


def call(group: cp.Group, rows: int = 64) -> torch.Tensor:
    plan = group.plan(cp.Mask.causal(rows), heads=1, head_dim=8, dtype="float32", chunk=rows // 4)
    x = torch.zeros(plan.q_rows, 1, 8)
    return cp.attention(x, x, x, plan)[0]


def described(error: BaseException) -> dict[str, object]:
    names = ("rank", "global_rank", "peer", "global_peer")
    return {name: getattr(error, name, None) for name in names} | {"type": type(error).__name__, "text": str(error)}


def raises_alone(rank: int) -> dict[str, object]:
    group = cp_group(rank)
    call(group)
    # Otherwise another rank's first call may still be on its way when this one gives up.
    dist.barrier()
    try:
        with group.failing_together():
            if rank == 3:
                time.sleep(0.5)  # so that the other waits already, or begins to wait afterwards: it hears the same
                raise ValueError("the loss is NaN at step 17")
            call(group)
    except cp.Error as error:
        found = described(error)
        try:
            call(group)
        except cp.Error as second:
            found["again"] = str(second)
        return found
    except ValueError as error:
        return {"text": str(error)}
    again = cp_group(rank)
    return {"text": "fine", "same": again is group, "value": float(call(again).sum())}


def makes_anew(rank: int) -> tuple[float, int]:
    group = cp_group(rank)
    return float(call(group).sum()), group.size


def test_a_rank_that_raises_sends_the_others_its_sentence() -> None:
    with Ranks(4) as pool:
        found = pool.run(raises_alone)
        assert found[0] == found[1] == {"text": "fine", "same": True, "value": 0.0}
        assert found[3] == {"text": "the loss is NaN at step 17"}
        raised = found[2]
        assert raised["text"] == ("rank 1 gave up: ValueError: the loss is NaN at step 17 (rank 1 of the group is global rank 3)")
        assert (raised["type"], raised["rank"], raised["global_rank"]) == ("PeerError", 0, 2)
        assert (raised["peer"], raised["global_peer"]) == (1, 3)
        # Long before the group's limit, which is longer than the pool's.
        assert raised["again"] == raised["text"]
        # All its ranks have failed, and make a new one.
        assert pool.run(makes_anew) == [(0.0, 2)] * 4


def dies(rank: int) -> dict[str, object]:
    group = cp_group(rank)
    call(group)
    if rank == 2:
        # Not while rank 3 is in its first call, which would hear of it too.
        store().wait(["rank 3 has called"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        store().set("rank 3 has called", "")
    try:
        for _ in range(1000 if rank == 3 else 1):
            call(group)
    except cp.Error as error:
        return described(error)
    return {"text": "fine"}


def test_a_rank_that_dies_is_named() -> None:
    with Ranks(4) as pool:
        found = pool.run(dies)
        assert found[2] == Died() and found[0] == found[1] == {"text": "fine"}
        assert found[3]["type"] == "PeerError" and (found[3]["peer"], found[3]["global_peer"]) == (0, 2), found[3]
        assert "rank 0" in found[3]["text"] and "rank 0 of the group is global rank 2" in found[3]["text"]


def store() -> dist.Store:
    """Of the process group of all: keys that one rank sets and another waits for."""
    return dist.distributed_c10d._get_default_store()


LATE = 4.0


def is_late(rank: int) -> dict[str, object]:
    # Long enough for the first call, by which ranks join, on a machine that does much else.
    group = cp_group(rank, limit=LATE)
    call(group)
    if rank == 1:
        store().wait(["gave up"])
        return {"text": "was waited for"}
    began = time.monotonic()
    try:
        call(group)
    except cp.Error as error:
        store().set("gave up", "")
        return described(error) | {"seconds": time.monotonic() - began}
    return {"text": "fine"}


def test_a_rank_that_does_not_come_is_named_within_the_limit() -> None:
    with Ranks(4) as pool:
        found = pool.run(is_late)
        assert found[2] == found[3] == {"text": "fine"}
        assert found[0]["type"] == "StalledError" and found[0]["peer"] == 1, found[0]
        assert found[0]["seconds"] > 0.9 * LATE


def differs(rank: int) -> dict[str, object]:
    group = cp_group(rank)
    try:
        call(group, rows=64 if rank < 3 else 68)
    except cp.Error as error:
        return described(error)
    return {"text": "fine"}


def test_plans_that_differ_are_named() -> None:
    with Ranks(4) as pool:
        found = pool.run(differs)
        assert found[0] == found[1] == {"text": "fine"}
        assert {found[2]["type"], found[3]["type"]} == {"MismatchError"}
        assert "run different plans: " in found[2]["text"] and "64" in found[2]["text"] and "68" in found[2]["text"]


def heeds_interrupts() -> None:
    """As a terminal's programs do: what a shell runs in the background ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted_in(name: str) -> None:
    """Has this thread be interrupted, as by Ctrl-C, once it has been in a function of this name for a while."""
    waiting = threading.get_ident()

    def watch() -> None:
        seen = 0
        while seen < 5:
            time.sleep(0.1)
            seen = seen + 1 if sys._current_frames()[waiting].f_code.co_name == name else 0
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def is_interrupted(rank: int) -> dict[str, object]:
    heeds_interrupts()
    group = cp_group(rank)
    call(group)
    try:
        if rank == 2:
            store().wait(["interrupted"])
            call(group)
        if rank == 3:
            interrupted_in("run_forward")
            call(group)
    except cp.Error as error:
        return described(error)
    except KeyboardInterrupt:
        store().set("interrupted", "")
        return {"text": "KeyboardInterrupt"}
    return {"text": "fine"}


def is_interrupted_in_a_profile(rank: int) -> dict[str, object]:
    with cp.profile():
        return is_interrupted(rank)


@pytest.mark.parametrize("what", [is_interrupted, is_interrupted_in_a_profile])
def test_a_wait_can_be_interrupted(what) -> None:
    with Ranks(4) as pool:
        found = pool.run(what)
        assert found[0] == found[1] == {"text": "fine"}
        assert found[3]["text"] == "KeyboardInterrupt"
        assert found[2]["text"].startswith("rank 1 gave up: KeyboardInterrupt") and found[2]["type"] == "PeerError"


def joins_interrupted(rank: int) -> str:
    heeds_interrupts()
    if rank == 1:
        return "elsewhere"
    interrupted_in("_exchange_places")
    try:
        cp.Group()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "fine"


def test_joining_can_be_interrupted() -> None:
    with Ranks(2) as pool:
        assert pool.run(joins_interrupted) == ["KeyboardInterrupt", "elsewhere"]


def closes(rank: int) -> tuple[str, float]:
    group = cp.Group()
    call(group)
    group.close()
    group.close()
    try:
        call(group)
    except cp.Error as error:
        text = str(error)
    return text, float(call(cp.Group()).sum())


def test_closed_groups_refuse_and_are_made_anew(ranks: Ranks) -> None:
    assert ranks.run(closes) == [("this group is closed; make a new one", 0.0)] * 4


def forks(rank: int) -> str:
    group = cp.Group()
    call(group)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call(group)
            raised = "no error"
        except cp.Error as error:
            raised = str(error)
        os.write(write, raised.encode())
        os._exit(0)
    os.close(write)
    raised = os.read(read, 1000).decode()
    os.waitpid(child, 0)
    call(group)
    return raised


def test_a_fork_is_refused_and_its_parent_goes_on(ranks: Ranks) -> None:
    for raised in ranks.run(forks):
        assert raised.startswith("this group was made in another process, and a fork does not copy its threads")


def program(folder: pathlib.Path, text: str, ranks: int = 2) -> list[tuple[int, str]]:
    """Runs a program on ranks: the return code and what each wrote to stderr."""
    path = folder / "program.py"
    head = f"""
        import sys, time
        import torch, torch.distributed as dist
        import counterpoint as cp
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://{folder}/store", rank=rank, world_size={ranks})
        group = cp.Group(limit=60.0)
        plan = group.plan(cp.Mask.causal(64), heads=1, head_dim=8, dtype="float32", chunk=16)
        x = torch.zeros(plan.q_rows, 1, 8)
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    command = [sys.executable, str(path)]
    running = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
    return [(process.returncode, stderr) for process in running for stderr in [process.communicate(timeout=240)[1]]]


def test_programs_end_at_different_times_in_silence(tmp_path: pathlib.Path) -> None:
    text = """
        cp.attention(x, x, x, plan)
        time.sleep(1.0 * rank)
    """
    assert program(tmp_path, text) == [(0, ""), (0, "")]


def test_an_exception_that_ends_a_program_is_sent_to_the_others(tmp_path: pathlib.Path) -> None:
    text = """
        cp.attention(x, x, x, plan)
        if rank == 1:
            raise KeyError("weights")
        cp.attention(x, x, x, plan)
    """
    (first, raised), (second, own) = program(tmp_path, text)
    assert first == second == 1
    assert "KeyError: 'weights'" in own and "PeerError: rank 1 gave up: KeyError: 'weights'" in raised, raised


def calls_in_a_handler(rank: int) -> dict[str, object]:
    """A rank that waits for another is interrupted by a signal whose handler calls the same group."""
    group, said = cp.Group(), []
    call(group)

    def handler(*_: object) -> None:
        for within in (lambda: call(group), group.close):
            try:
                within()
            except cp.Error as error:
                said.append(f"{type(error).__name__}: {error}")
        store().set("handled", "")

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 2)  # by when it waits
    else:
        store().wait(["handled"])
    call(group)
    # The call that was interrupted has ended as if nothing had been, and so does the group.
    group.close()
    return {"said": said}


def test_a_handler_of_a_signal_does_not_wait_for_the_call_that_it_interrupts() -> None:
    with Ranks(2) as pool:
        found = pool.run(calls_in_a_handler)
    words = "Error: a handler of a signal cannot call the group whose call it interrupts"
    assert [one.startswith(words) for one in found[0]["said"]] == [True, True], found
    assert found[1]["said"] == []
