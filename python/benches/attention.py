"""What attention costs through Python on one GPU: host time, rates against the command line's, a new mask each step, memory.

python3 python/benches/attention.py [--only PART] [--counterpoint PATH] [--json PATH]

Parts: host, rates, fresh, masks. The whole takes about 90 s on an H100 once its kernels are in the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import counterpoint as cp
from counterpoint import ops

DEVICE = "cuda"
sdpa = torch.nn.functional.scaled_dot_product_attention
Row = tuple[str, str, str]


def tensors(tokens: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    made = [torch.randn(tokens, heads, head_dim, device=DEVICE).bfloat16() for _ in range(4)]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def host_time(call: Callable[[], Any], calls: int = 60, rounds: int = 15) -> float:
    """Microseconds that the host spends in a call when the device is never waited for: the median of rounds."""
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


class Nothing(torch.autograd.Function):
    """What PyTorch takes for a function in Python, whatever that does. Its backward keeps its thread busy for `busy` seconds."""

    busy = 0.0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        end = time.perf_counter() + Nothing.busy
        while time.perf_counter() < end:
            pass
        return tuple(ctx.saved_tensors)


class Timed(torch.autograd.Function):
    """Attention whose backward says how long it keeps the thread that PyTorch runs it on."""

    seconds: list[float]

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: cp.Plan) -> torch.Tensor:
        out, lse = ops.run_forward(plan, q, k, v, None)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        began = time.perf_counter()
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, _ = ops.run_backward(ctx.plan, dout, q, k, v, None, out, lse)
        Timed.seconds.append(time.perf_counter() - began)
        return dq, dk, dv, None


class Idle:
    """In the place of a plan's calls: what a call costs in Python and PyTorch."""

    def forward(self, *_: Any) -> None:
        """Does nothing."""

    backward = forward


def chain(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor], dout: torch.Tensor, layers: int = 20) -> float:
    """Microseconds of a layer's backward, when one backward goes through many layers."""
    times = []
    for _ in range(8):
        x = tensors[0]
        for _ in range(layers):
            x = call(x, tensors[1], tensors[2])
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(x, tensors, dout)
        times.append((time.perf_counter() - began) / layers * 1e6)
    return statistics.median(times)


def floors(plan: cp.Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[tuple[str, float, str]]:
    """What PyTorch takes for a backward whoever computes it, and what is left where no other thread is woken."""
    idle = plan.group.plan(plan.mask, heads=q.shape[1], head_dim=q.shape[2], dtype=q.dtype)
    idle._calls = Idle()  # type: ignore[assignment]
    leaves, plain = [q, k, v], [tensor.detach() for tensor in (q, k, v)]
    by_head = [tensor.transpose(0, 1)[None].clone().requires_grad_() for tensor in plain]
    graphs = {
        "ours": (cp.attention(q, k, v, plan)[0], leaves, dout),
        "ours without the compiled module": (cp.attention(q, k, v, idle)[0], leaves, dout),
        "scaled_dot_product_attention": (sdpa(*by_head, is_causal=True), by_head, dout.transpose(0, 1)[None]),
        "an autograd.Function that does nothing": (Nothing.apply(q, k, v), leaves, dout),
        "a node of PyTorch's own in C++ that does nothing (of q + k)": (q + k, [q, k], dout),
    }

    def backward(name: str) -> float:
        out, inputs, gradient = graphs[name]
        return host_time(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))

    rows = [
        ("forward, no gradients, without the compiled module", host_time(lambda: cp.attention(*plain, idle)), ""),
        ("forward, with gradients, without the compiled module", host_time(lambda: cp.attention(q, k, v, idle)), ""),
    ]
    rows += [(f"backward: {name}", backward(name), "") for name in graphs]
    rows.append(("backward of 20 in one: an autograd.Function that does nothing", chain(Nothing.apply, leaves, dout), "a layer"))
    without = chain(lambda q, k, v: cp.attention(q, k, v, idle)[0], leaves, dout)
    rows.append(("backward of 20 in one: ours without the compiled module", without, "a layer"))
    with torch.autograd.set_multithreading_enabled(False):
        rows += [(f"backward in the caller's thread: {name}", backward(name), "") for name in graphs]
        alone = chain(lambda q, k, v: cp.attention(q, k, v, plan)[0], leaves, dout)
    rows.append(("backward of 20 in one, in the caller's thread: ours", alone, "a layer"))
    return rows


# Long: every variant of one call, over the same tensors.
def host() -> list[Row]:
    """Calls on so few tokens that the device is as fast as the host."""
    torch._dynamo.reset()
    tokens, heads, head_dim = 256, 2, 64
    mask = cp.Mask.causal(tokens)
    plan = cp.LocalGroup(1, device=DEVICE).plan(mask, heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    q, k, v, dout = tensors(tokens, heads, head_dim)
    plain = [tensor.detach() for tensor in (q, k, v)]
    out, lse = cp.attention(q, k, v, plan)
    calls, stream = plan._ready(None), plan.group._stream()
    out_plain, lse_plain = torch.empty_like(plain[0]), torch.empty_like(lse)
    places = [ops.place(tensor, True)[0] for tensor in plain]
    kept = (*plain, None, out_plain, lse_plain)
    addresses = out_plain.data_ptr(), lse_plain.data_ptr()
    gradients = [torch.empty_like(tensor) for tensor in plain]
    written = [gradient.data_ptr() for gradient in gradients]
    at_dout, read = ops.place(dout, True)[0], (out.data_ptr(), lse.data_ptr())

    def native_backward() -> None:
        calls.backward(stream, at_dout, *places, None, *read, None, *written, None, (kept, gradients, dout, out, lse))

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def step(call: Callable[..., Any]) -> None:
        result = call(q, k, v)
        torch.autograd.grad(result, (q, k, v), dout)

    compiled = torch.compile(lambda q, k, v: cp.attention(q, k, v, plan)[0], fullgraph=True)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(10):
        step(lambda q, k, v: cp.attention(q, k, v, plan)[0])
    torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations

    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    began = time.perf_counter()
    for _ in range(20):
        step(lambda q, k, v: cp.attention(q, k, v, plan)[0])
    ahead = not torch.cuda.current_stream().query()
    took = time.perf_counter() - began
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cp.attention(*plain, plan)
    # PyTorch's own, on the same machine: what a call costs that does nothing of ours.
    by_head = [tensor.transpose(0, 1)[None] for tensor in plain]
    leaves = [tensor.clone().requires_grad_() for tensor in by_head]
    sdpa_out, dout_by_head = sdpa(*leaves, is_causal=True), dout.transpose(0, 1)[None]
    nothing_out, timed_out = Nothing.apply(q, k, v), Timed.apply(q, k, v, plan)
    compiled_sdpa = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), fullgraph=True)

    def busy_backward(seconds: float) -> float:
        """A backward that does nothing but keep its thread: what waking threads costs."""
        Nothing.busy = seconds
        try:
            return host_time(lambda: torch.autograd.grad(nothing_out, (q, k, v), q, retain_graph=True))
        finally:
            Nothing.busy = 0.0

    def in_its_thread() -> float:
        Timed.seconds = []
        host_time(lambda: torch.autograd.grad(timed_out, (q, k, v), dout, retain_graph=True))
        return statistics.median(Timed.seconds) * 1e6

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cp.attention(q, k, v, plan)[0]

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, is_causal=True)

    rows = [
        ("attention(q, k, v, plan), forward, no gradients", host_time(lambda: cp.attention(*plain, plan)), ""),
        ("  with gradients asked for", host_time(lambda: cp.attention(q, k, v, plan)), "goal 30"),
        ("  of it the compiled module", host_time(lambda: calls.forward(stream, *places, None, *addresses, None, kept)), ""),
        ("  of it an autograd.Function that does nothing", host_time(lambda: Nothing.apply(q, k, v)), ""),
        ("  of it two allocations", host_time(lambda: (torch.empty_like(plain[0]), torch.empty_like(lse))), ""),
        ("  beside: scaled_dot_product_attention, no gradients", host_time(lambda: theirs(*by_head)), ""),
        ("  beside: scaled_dot_product_attention, with gradients", host_time(lambda: theirs(*leaves)), ""),
        ("backward of one layer by torch.autograd.grad", host_time(backward), "goal 40"),
        ("  of it the compiled module", host_time(native_backward), ""),
        (
            "  of it the operator alone",
            host_time(lambda: ops.run_backward(plan, dout, *plain, None, out.detach(), lse)),
            "",
        ),
        ("  of it the operator in PyTorch's thread of backwards", in_its_thread(), ""),
        ("  beside: an autograd.Function that does nothing", busy_backward(0.0), ""),
        ("  beside: one that keeps its thread for 45 us", busy_backward(45e-6), ""),
        ("  beside: one that keeps its thread for 100 us", busy_backward(100e-6), ""),
        (
            "  beside: scaled_dot_product_attention",
            host_time(lambda: torch.autograd.grad(sdpa_out, leaves, dout_by_head, retain_graph=True)),
            "",
        ),
        ("backward of a layer, of 20 in one backward", chain(ours, [q, k, v], dout), "goal 40"),
        ("  beside: scaled_dot_product_attention", chain(theirs, leaves, dout_by_head), ""),
        ("forward and backward, eager", host_time(lambda: step(ours)), ""),
        ("forward and backward, torch.compile(fullgraph=True)", host_time(lambda: step(compiled)), ""),
        (
            "  beside: scaled_dot_product_attention, eager",
            host_time(lambda: torch.autograd.grad(theirs(*leaves), leaves, dout_by_head)),
            "",
        ),
        (
            "  beside: scaled_dot_product_attention, torch.compile",
            host_time(lambda: torch.autograd.grad(compiled_sdpa(*leaves), leaves, dout_by_head)),
            "",
        ),
        ("flex_attention, forward, a mask seen before", host_time(lambda: cp.flex_attention(*plain, mask)), ""),
        ("a forward replayed as a CUDA graph", host_time(graph.replay), ""),
        *floors(plan, q, k, v, dout),
    ]
    return [
        *((name, f"{value:.1f} us", note) for name, value, note in rows),
        ('waits for the device in 10 steps (sync debug mode "error")', "0", "goal 0"),
        ("allocations of PyTorch's in 10 steps: results", str(allocations), "goal 50"),
        ("20 steps enqueued while the device is held", f"{took / 20 * 1e6:.0f} us each", "ahead" if ahead else "NOT AHEAD"),
    ]


def wall(call: Callable[[], Any], calls: int = 40, rounds: int = 12) -> float:
    """Seconds of a call, enqueued one after the other and awaited together: what `bench attention --clock wall` takes."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def rates(counterpoint: str) -> list[Row]:
    """TFLOP/s of this package over those of the command line, interleaved, each after a pause: GPUs that are hot are slower."""
    heads, head_dim, sizes = 16, 128, [8192, 16384, 32768]
    group = cp.LocalGroup(1, device=DEVICE)

    def rested(call: Callable[[], Any], rounds: int) -> float:
        torch.cuda.synchronize()
        time.sleep(1.5)
        return wall(call, rounds=rounds)

    def theirs(tokens: int) -> dict[str, float]:
        command = [counterpoint, "bench", "attention", "--device", "cuda", "--masks", "causal", "--seqlens", f"{tokens // 1024}k"]
        command += [
            "--heads",
            f"{heads}:{heads}",
            "--passes",
            "forward,backward",
            "--clock",
            "wall",
            "--iterations",
            "6",
            "--json",
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        found = {}
        for line in run.stdout.splitlines():
            row = json.loads(line)
            if "pass" in row:
                found[row["pass"]] = row["seconds"]["median"]
        if not found:
            print(run.stderr[-2000:], file=sys.stderr)
        return found

    rows = []
    for tokens in sizes:
        plan = group.plan(cp.Mask.causal(tokens), heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
        q, k, v, dout = tensors(tokens, heads, head_dim)
        plain = [tensor.detach() for tensor in (q, k, v)]
        out, _ = cp.attention(q, k, v, plan)
        passes: dict[str, Callable[[], Any]] = {
            "forward": lambda plain=plain, plan=plan: cp.attention(*plain, plan),
            "backward": lambda out=out, q=q, k=k, v=v, dout=dout: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        }
        first = {name: rested(call, 6) for name, call in passes.items()}
        rates = theirs(tokens)
        second = {name: rested(call, 6) for name, call in passes.items()}
        area = tokens * (tokens + 1) / 2
        for direction, products in (("forward", 4), ("backward", 10)):
            seconds = (first[direction] + second[direction]) / 2
            rate = products * area * head_dim * heads / seconds / 1e12
            reference = rates.get(direction)
            ratio = (
                "no figure of the command line"
                if reference is None
                else f"{reference / seconds:.3f} of bench attention, goal 0.99"
            )
            spread = abs(first[direction] - second[direction]) / seconds
            name = f"{direction}, causal, {tokens // 1024}k tokens, 16 heads of 128"
            rows.append((name, f"{rate:.0f} TFLOP/s", f"{ratio} (±{spread:.1%})"))
    return rows


def documents(tokens: int, number: int) -> cp.Mask:
    """Packed documents, others for every number."""
    starts, state = [0], 12345 + number
    while starts[-1] < tokens:
        state = (state * 1103515245 + 12345) % (1 << 31)
        starts.append(min(tokens, starts[-1] + 64 + state % 2048))
    return cp.Mask.varlen(starts, causal=True)


def fresh() -> list[Row]:
    """A step of four layers, forward and backward: with one plan for all steps, and with another mask each step, prefetched."""
    heads, head_dim, layers, steps = 16, 128, 4, 60
    arguments: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "dtype": torch.bfloat16}
    rows = []
    for tokens in (8192, 16384, 32768):
        group = cp.LocalGroup(1, device=DEVICE)
        q, k, v, dout = tensors(tokens, heads, head_dim)
        masks = [documents(tokens, number) for number in range(steps)]

        def work(plan: cp.Plan, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, dout: torch.Tensor = dout) -> None:
            outs = [cp.attention(q, k, v, plan)[0] for _ in range(layers)]
            for out in reversed(outs):
                torch.autograd.grad(out, (q, k, v), dout)

        def known(plans: list[cp.Plan]) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for plan in plans:
                work(plan)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / len(plans)

        def new(masks: list[cp.Mask], host: list[float], group: cp.LocalGroup = group) -> float:
            group.prefetch(masks[0], **arguments)
            # Of a loop that goes on; else the first plan, under which nothing computes, would be shared out over the steps.
            for prefetched in [*group._prefetched.values()]:
                prefetched.result()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for mask, following in zip(masks, [*masks[1:], None], strict=True):
                before = time.perf_counter()
                plan = group.plan(mask, **arguments)
                if following is not None:
                    group.prefetch(following, **arguments)
                host.append(time.perf_counter() - before)
                work(plan)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / len(masks)

        plans = [group.plan(mask, **arguments) for mask in masks[:steps]]
        for plan in plans:
            plan._ready(None)
        host: list[float] = []
        known(plans[:10]), new(masks[:10], [])
        differences, base = [], []
        blocks = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(5):
            # The same masks, known and new, interleaved.
            base.append(known(plans))
            differences.append(new(masks[:steps], host) - base[-1])
        rows.append(
            (
                f"a new mask each step, {tokens // 1024}k tokens, {layers} layers",
                f"{statistics.median(differences) * 1e6:+.0f} us",
                f"of a step of {statistics.median(base) * 1e3:.2f} ms; host {statistics.median(host) * 1e6:.0f} us; "
                f"{torch.cuda.memory_stats()['num_device_alloc'] - blocks} allocations of the driver's; goal 100",
            )
        )
        del plans
        group.close()
    return rows


def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def masks(count: int) -> list[Row]:
    """Masks without end: planned, called and dropped."""
    tokens, heads, head_dim = 2048, 2, 64
    group = cp.LocalGroup(1, device=DEVICE)
    q, k, v, dout = tensors(tokens, heads, head_dim)
    arguments: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "dtype": torch.bfloat16}

    def state() -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "gpu": -free,
            "resident": resident(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def some(first: int, last: int) -> None:
        for number in range(first, last):
            plan = group.plan(documents(tokens, number), **arguments)
            out, _ = cp.attention(q, k, v, plan)
            torch.autograd.grad(out, (q, k, v), dout)

    some(0, count // 10)
    before, began = state(), time.perf_counter()
    some(count // 10, count)
    took, after = time.perf_counter() - began, state()
    grown = {name: after[name] - before[name] for name in before}
    mib = lambda name: f"{grown[name] / 2**20:+.1f} MiB"  # noqa: E731
    return [
        (
            f"{count - count // 10} masks of 2k tokens, planned, called and dropped",
            f"{took / (0.9 * count) * 1e3:.2f} ms each",
            "",
        ),
        ("  PyTorch's memory: allocated, reserved", f"{mib('allocated')}, {mib('reserved')}", "goal flat"),
        ("  the GPU's and the host's memory", f"{mib('gpu')}, {mib('resident')}", "goal flat"),
        ("  descriptors, threads", f"{grown['descriptors']:+d}, {grown['threads']:+d}", "goal +0, +0"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="host,rates,fresh,masks")
    parser.add_argument("--counterpoint", default="counterpoint", help="the command line of the same build")
    parser.add_argument("--masks", type=int, default=10_000, help="how many masks are dropped")
    parser.add_argument("--json", type=pathlib.Path, help="writes the rows there too")
    given = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "host": host,
        "rates": lambda: rates(given.counterpoint),
        "fresh": fresh,
        "masks": lambda: masks(given.masks),
    }
    rows: list[Row] = []
    for name in given.only.split(","):
        began = time.perf_counter()
        try:
            rows += parts[name]()
        except Exception as error:  # the other parts are worth knowing
            rows.append((f"{name} FAILED", type(error).__name__, str(error)))
        print(f"# {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, counterpoint {cp.__version__}")
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, note in rows:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {note}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
