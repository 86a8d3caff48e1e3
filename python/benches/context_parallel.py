"""Attention of ranks from Python against the command line's in the same engine, and what users of PyTorch do without us.

    torchrun --nproc-per-node 2 python/benches/context_parallel.py --counterpoint PATH --out results

Parts: `host` (host time of calls, and whether a prepared step waits for its device) and `rates`. All of a case are interleaved:
ours, the command line's between two halves of ours, Ulysses, and PyTorch's `context_parallel` by all-gather and by ring, each
with cuDNN. Ulysses has FlashAttention on packed documents, of which PyTorch's cuDNN and `context_parallel` know nothing. A
ratio to a peer is its time over ours; that to the command line is its time over ours too, goal 0.98. Results of all are
compared with each other before a time counts. The exit status is 1 where a prepared step waits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from launched import CYCLES, Call, Ranks, first_line, off, parser, table

import counterpoint as cp

# How far results of two ways may lie apart, in parts of their norm: a few roundings of bf16.
CLOSE = 2e-2
WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Case:
    """One shape."""

    mask: str
    tokens: int  # of a rank
    heads: int
    key_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """For the table."""
        count = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"{self.mask}, {count}, {self.heads}:{self.key_heads} x {self.head_dim}"


MASKS = {"causal": "causal", "packed": "varlen_causal"}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": (8192, 16384, 32768), "heads": ((64, 8), (16, 16)), "head_dim": 128, "dtype": torch.bfloat16},
    "cpu": {"tokens": (128,), "heads": ((4, 2), (4, 4)), "head_dim": 32, "dtype": torch.float32},
}


class Problem:
    """All rows on every rank, from one seed; ours and the neighbouring rows that others take."""

    def __init__(self, ranks: Ranks, case: Case, dtype: torch.dtype) -> None:
        self.ranks, self.case, self.dtype = ranks, case, dtype
        total = case.tokens * ranks.size
        self.mask = cp.Mask(f"preset:{MASKS[case.mask]},{total}")
        noise = torch.Generator(ranks.device).manual_seed(5)

        def rows(heads: int) -> torch.Tensor:
            return torch.randn(total, heads, case.head_dim, device=ranks.device, generator=noise).to(dtype)

        self.whole = [rows(case.heads), rows(case.key_heads), rows(case.key_heads), rows(case.heads)]

    @property
    def area(self) -> int:
        """Pairs that are not masked."""
        return self.mask.area

    def neighbours(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """This rank's rows as they lie in the sequence: q, k, v (leaves) and dout."""
        own = slice(self.ranks.rank * self.case.tokens, (self.ranks.rank + 1) * self.case.tokens)
        q, k, v, dout = (tensor[own].clone() for tensor in self.whole)
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], dout


@dataclass
class Way:
    """A forward and a backward that can run again and again, and this rank's results in the order of the sequence."""

    forward: Call
    backward: Call
    # out, dq, dk, dv of this rank's neighbouring rows.
    results: list[torch.Tensor]
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def passes(
    call: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor
) -> tuple[Call, Call, list[torch.Tensor]]:
    """A forward without gradients, a backward of a forward before, and out with the gradients."""
    plain = [leaf.detach() for leaf in leaves]
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    backward = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    return lambda: call(*plain), backward, [out.detach(), *gradients]


def ours(problem: Problem, group: cp.Group, choices: str) -> tuple[Way, cp.Plan]:
    case, ranks = problem.case, problem.ranks
    plan = group.plan(
        problem.mask,
        heads=(case.heads, case.key_heads),
        head_dim=case.head_dim,
        dtype=problem.dtype,
        dispatch=choices,  # type: ignore[arg-type]
        overlap=choices,
    )
    *inputs, dout = (plan.dispatch(tensor) for tensor in problem.whole)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    forward, backward, results = passes(lambda q, k, v: cp.attention(q, k, v, plan)[0], leaves, dout)
    own = slice(ranks.rank * case.tokens, (ranks.rank + 1) * case.tokens)
    return Way(forward, backward, [plan.undispatch(tensor)[own].clone() for tensor in results]), plan


def ulysses(problem: Problem) -> Way:
    from sharded.ways import Gather, Scatter, attention

    case = problem.case
    if case.key_heads % problem.ranks.size:
        raise NotImplementedError(f"{case.key_heads} key heads are not to be had by {problem.ranks.size} ranks")
    inside: Callable[..., torch.Tensor] = functools.partial(attention, causal=True)
    if case.mask == "packed":
        inside = packed_attention(problem)
    leaves, dout = problem.neighbours()
    return Way(*passes(lambda q, k, v: Gather.apply(inside(Scatter.apply(q), Scatter.apply(k), Scatter.apply(v))), leaves, dout))


def packed_attention(problem: Problem) -> Callable[..., torch.Tensor]:
    """Documents of whole sequences: PyTorch's `varlen_attn`; SDPA of each where that does not run."""
    starts = sorted({start for (start, _), _, _ in problem.mask.slices} | {problem.mask.seqlen_q})
    longest = max(end - start for start, end in itertools.pairwise(starts))
    if problem.ranks.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        cumulative = torch.tensor(starts, dtype=torch.int32, device=problem.ranks.device)
        # Its kernel takes fewer key heads; whether the function does is for it to say.
        return lambda q, k, v: varlen_attn(q, k, v, cumulative, cumulative, longest, longest, window_size=(-1, 0))
    from sharded.ways import attention

    return lambda q, k, v: torch.cat([attention(q[a:b], k[a:b], v[a:b], True) for a, b in itertools.pairwise(starts)])


def of_pytorch(problem: Problem, rotation: str) -> Way:
    """`context_parallel`, whose load balancer deals out pieces; keys and values have a head for every head of queries."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case, ranks = problem.case, problem.ranks
    if case.mask != "causal":
        raise NotImplementedError("context_parallel with SDPA has causal and full masks alone")
    if ranks.device.type == "cpu":
        raise NotImplementedError("context_parallel has rings of CUDA's kernels alone")
    mesh = init_device_mesh("cuda", (ranks.size,))
    times = case.heads // case.key_heads
    buffers = [x.repeat_interleave(case.heads // x.shape[1], 1).transpose(0, 1)[None].contiguous() for x in problem.whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        *inputs, dout = (x.detach().clone() for x in buffers)
    leaves = [x.requires_grad_() for x in inputs]

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        """Where `scaled_dot_product_attention` is theirs. Rows to shard are wanted each time."""
        set_rotate_method(rotation)
        rows = torch.zeros((1, 1, case.tokens * ranks.size, 1), device=ranks.device)
        with (
            context_parallel(mesh, buffers=[rows], buffer_seq_dims=[2], no_restore_buffers={rows}),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            yield

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # By its module, in which some versions put their own.
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    own = slice(ranks.rank * case.tokens, (ranks.rank + 1) * case.tokens)
    with within():
        forward, backward, results = passes(attention, leaves, dout)
        whole = [x[0].transpose(0, 1)[own] for x in context_parallel_unshard(mesh, results, [2] * 4)]
    summed = [whole[0], whole[1], *(x.float().unflatten(1, (-1, times)).sum(2) for x in whole[2:])]
    return Way(forward, backward, summed, within)


PEERS: dict[str, Callable[[Problem], Way]] = {
    "Ulysses": ulysses,
    "PyTorch all-gather": functools.partial(of_pytorch, rotation="allgather"),
    "PyTorch ring": functools.partial(of_pytorch, rotation="alltoall"),
}


def of_command_line(ranks: Ranks, counterpoint: str, case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    """Rows of `bench cp` by pass, run by the first rank while the others' hosts wait; all know what it said."""
    found: dict[str, Any] = {}
    ranks.barrier()
    if ranks.is_first:
        command = [counterpoint, "bench", "cp", "--device", ranks.device.type, "--cp-size", str(ranks.size), "--json"]
        command += ["--masks", MASKS[case.mask], "--tokens", str(case.tokens), "--heads", f"{case.heads}:{case.key_heads}"]
        command += ["--head-dim", str(case.head_dim), "--iterations", str(max(3, rounds))]
        try:
            run = subprocess.run(command, env=_unlaunched(), capture_output=True, text=True, timeout=180)
            rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            found = {row["pass"]: row for row in rows if row.get("asked") == "auto" and row["ranks"] == ranks.size}
            if not found:
                print(f"# bench cp: {(run.stderr.strip().splitlines() or ['no rows'])[-1]}", file=sys.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"# bench cp: {first_line(error)}", file=sys.stderr)
    found = ranks.agreed(found)
    return found


def _unlaunched() -> dict[str, str]:
    """The environment without what torchrun added: the command line would be one rank of this job."""
    added = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    parts = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if name not in added and not name.startswith(parts)}


def rates(ranks: Ranks, group: cp.Group, case: Case, dtype: torch.dtype, given: Any) -> list[dict[str, Any]]:
    """The rows of one case: its forward and its backward."""
    problem = Problem(ranks, case, dtype)
    way, plan = ours(problem, group, given.choices)
    made, notes = {"ours": way}, {}
    for name, prepare in PEERS.items():
        if name not in given.peers:
            continue
        try:
            other = prepare(problem)
            error = max(off(found, wanted) for found, wanted in zip(other.results, way.results, strict=True))
            error = ranks.largest([error])[0]
            if error > CLOSE:
                notes[name] = f"its results are {error:.1e} from ours"
            else:
                made[name] = other
            other.results = []
        except (NotImplementedError, RuntimeError, ImportError, TypeError, ValueError) as reason:
            notes[name] = first_line(reason).removeprefix("NotImplementedError: ")
    way.results = []
    ranks.synchronize()
    half = max(2, given.rounds // 2)
    times: dict[str, dict[str, list[float]]] = {"forward": {}, "backward": {}}

    def measure() -> None:
        for direction, seconds in times.items():
            calls: dict[str, Call] = {name: getattr(one, direction) for name, one in made.items()}
            plain = {name: call for name, call in calls.items() if made[name].within is contextlib.nullcontext}
            found = ranks.interleaved(plain, half)
            for name in sorted(calls.keys() - plain.keys()):
                # PyTorch's attention is replaced for this peer's calls alone.
                with made[name].within():
                    both = ranks.interleaved({"ours": calls["ours"], name: calls[name]}, half)
                found["ours"] += both["ours"]
                found[name] = both[name]
            for name, each in found.items():
                seconds.setdefault(name, []).extend(each)

    measure()
    said = {} if given.counterpoint is None else of_command_line(ranks, given.counterpoint, case, given.rounds)
    if said:
        measure()
    rows = []
    for direction, products in (("forward", 4), ("backward", 10)):
        medians = {name: statistics.median(seconds) for name, seconds in times[direction].items()}
        mine = medians["ours"]
        row = {
            "case": case.name,
            "pass": direction,
            "seconds": {name: sorted(seconds) for name, seconds in times[direction].items()},
            "tflops_per_rank": products * problem.area * case.head_dim * case.heads / ranks.size / mine / 1e12,
            "over_ours": {name: median / mine for name, median in medians.items() if name != "ours"},
            "notes": notes,
            "choices": {name: str(value) for name, value in vars(plan.choices).items()},
        }
        if direction in said:
            row["bench_cp"] = said[direction]
            row["bench_cp_over_ours"] = said[direction]["seconds"]["median"] / mine
        rows.append(row)
    return rows


def host(ranks: Ranks, group: cp.Group, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Calls on so few tokens that devices are as fast as hosts, and waits in steps of four layers."""
    tokens, heads, head_dim = 128 * ranks.size, 2, 64
    plan = group.plan(cp.Mask.causal(tokens), heads=heads, head_dim=head_dim, dtype=dtype)
    rows = [torch.randn(plan.q_rows, heads, head_dim, device=ranks.device).to(dtype) for _ in range(4)]
    plain, dout = rows[:3], rows[3]
    leaves = [row.clone().requires_grad_() for row in plain]
    out, _ = cp.attention(*leaves, plan)

    def chain() -> list[torch.Tensor]:
        x = leaves[0]
        for _ in range(4):
            x, _ = cp.attention(x, leaves[1], leaves[2], plan)
        return list(torch.autograd.grad(x, leaves, dout))

    def alone() -> list[torch.Tensor]:
        with torch.autograd.set_multithreading_enabled(False):
            return list(torch.autograd.grad(out, leaves, dout, retain_graph=True))

    found = [
        ("forward, no gradients", ranks.host_time(lambda: cp.attention(*plain, plan))),
        ("forward, gradients asked for", ranks.host_time(lambda: cp.attention(*leaves, plan))),
        ("backward of one layer", ranks.host_time(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))),
        ("backward of one layer in the caller's thread", ranks.host_time(alone)),
        ("forward and backward of four layers", ranks.host_time(chain, calls=20)),
    ]
    return [*({"host": name, "microseconds": value} for name, value in found), *waits(ranks, chain)]


def waits(ranks: Ranks, step: Call) -> list[dict[str, Any]]:
    """Waits in 10 prepared steps that PyTorch's profiler sees; and whether hosts get ahead of devices that are held."""
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = ranks.device.type == "cuda"
    ranks.barrier()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        with record_function("prepared steps"):
            for _ in range(10):
                step()
        ranks.synchronize()
    events = list(profiler.events() or ())
    spans = [event.time_range for event in events if event.name == "prepared steps" and "CPU" in str(event.device_type)]
    inside = [event.name for event in events if any(span.start <= event.time_range.start < span.end for span in spans)]
    names = sorted({name for name in inside if any(wait in name for wait in WAITS) and "Async" not in name})
    (count,) = ranks.largest([sum(inside.count(name) for name in names)])
    made: list[dict[str, Any]] = [
        {"host": "waits in 10 prepared steps that the profiler sees", "count": count, "names": names, "seen": len(inside)}
    ]
    if not on_gpu:
        return made
    # PyTorch's own waits raise in it.
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    ranks.barrier()
    torch.cuda._sleep(int(0.2 * CYCLES))
    began = time.perf_counter()
    for _ in range(10):
        step()
    took, is_ahead = time.perf_counter() - began, not torch.cuda.current_stream().query()
    ranks.barrier()
    behind, took = ranks.largest([float(not is_ahead), took])
    return [*made, {"host": "steps enqueued while devices are held", "ahead": behind == 0.0, "microseconds": took / 10 * 1e6}]


def main() -> None:
    arguments = parser(__doc__ or "", seconds=110)
    arguments.add_argument("--counterpoint", help="the command line of the same build; left out, nothing is compared with it")
    arguments.add_argument("--only", default="host,rates")
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--masks", default="causal,packed")
    arguments.add_argument("--tokens", help="of a rank, such as 8192,32768")
    arguments.add_argument("--heads", help="such as 64:8,16:16")
    arguments.add_argument("--peers", default=",".join(PEERS))
    arguments.add_argument("--choices", default="predicted", help="dispatch and overlap: predicted is what the command line does")
    given = arguments.parse_args()
    given.peers = given.peers.split(",")
    ranks = Ranks.join(given.device, given.seconds)
    group = cp.Group(device=ranks.device, limit=60.0)
    sizes = SIZES[given.device]
    tokens = [int(size) for size in given.tokens.split(",")] if given.tokens else sizes["tokens"]
    heads = [tuple(map(int, pair.split(":"))) for pair in given.heads.split(",")] if given.heads else sizes["heads"]
    rows: list[dict[str, Any]] = []
    with group.failing_together():
        if "host" in given.only:
            rows += host(ranks, group, sizes["dtype"])
            ranks.say("host")
        cases = itertools.product(tokens, heads, given.masks.split(",")) if "rates" in given.only else ()
        for count, pair, mask in cases:
            case = Case(mask, count, *pair, sizes["head_dim"])
            if not ranks.has_time():
                rows.append({"case": case.name, "skipped": "no time was left"})
                continue
            rows += rates(ranks, group, case, sizes["dtype"], given)
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            ranks.keep(given.out, "context_parallel", rows)
            ranks.say(case.name)
    ranks.keep(given.out, "context_parallel", rows)
    if ranks.is_first:
        show(ranks, group, rows)
    waited = any(row.get("count") or row.get("ahead") is False for row in rows)
    group.close()
    ranks.leave()
    sys.exit(1 if waited else 0)


def show(ranks: Ranks, group: cp.Group, rows: list[dict[str, Any]]) -> None:
    """The tables."""
    print(f"attention on {ranks.size} ranks: {ranks.device_name}, transport {group.transport}, torch {torch.__version__}")
    hosts = []
    for row in rows:
        if "host" in row:
            value = f"{row['microseconds']:.1f} us" if "microseconds" in row else ""
            note = f"{row['count']:.0f} {' '.join(row['names'])} (of {row['seen']} events)" if "count" in row else ""
            note = note if "ahead" not in row else ("ahead" if row["ahead"] else "NOT AHEAD")
            hosts.append((row["host"], value, note))
    if hosts:
        table(("host", "", ""), hosts)
    columns = list(PEERS)
    lines: list[tuple[str, ...]] = []
    notes: dict[tuple[str, str], str] = {}
    for row in rows:
        if "skipped" in row:
            lines.append((row["case"], row["skipped"], *[""] * (2 + len(columns))))
        elif "pass" in row:
            ratio = f"{row['bench_cp_over_ours']:.3f}" if "bench_cp_over_ours" in row else "-"
            others = (f"{row['over_ours'][name]:.2f}x" if name in row["over_ours"] else "-" for name in columns)
            lines.append((row["case"], row["pass"], f"{row['tflops_per_rank']:.1f}", ratio, *others))
            for name, note in row["notes"].items():
                notes.setdefault((name, note), row["case"])
    if lines:
        table(("tokens of a rank, heads", "pass", "TFLOP/s a rank", "of bench cp (0.98)", *columns), lines)
    for (name, note), case in notes.items():
        print(f"  {name}, first at {case}: {note}")


if __name__ == "__main__":
    main()
