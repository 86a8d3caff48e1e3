"""Tensor-parallel modules compared with Megatron's way (torch.mm and NCCL, as its layers start them) and PyTorch's async-TP.

    torchrun --nproc-per-node 2 python/benches/tensor_parallel.py --out results

Ours is `ColumnParallelLinear` and `RowParallelLinear` with their autograd, with `main_grad` in f32. Megatron's way and async-TP
are the plain passes of benches/peers, without autograd: a forward, and a backward that gives dx and adds to `main_grad`. All
run interleaved; results are compared with each other first. A ratio is the peer's time over ours. Async-TP is for sequence
parallelism alone, and runs only where no multicast object can be made for it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
from launched import WITHOUT_MULTICAST, Call, Ranks, first_line, off, parser, table

import counterpoint as cp
from counterpoint.nn import ColumnParallelLinear, RowParallelLinear

# How far results may lie from those of the plain way, in parts of their norm.
CLOSE = 1e-2
# Tokens of all ranks, features of the side that is not split, features that a rank has of the other.
SHAPES = {"cuda": [(8192, 8192, 7168), (2048, 8192, 4096)], "cpu": [(64, 32, 48)]}
KINDS: dict[str, Any] = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def no_async_tp(ranks: Ranks) -> str | None:
    """Why PyTorch's fused operators may not run here."""
    if ranks.device.type == "cpu":
        return "async-TP is for GPUs"
    for name, value in WITHOUT_MULTICAST.items():
        if os.environ.get(name) != value:
            return f"async-TP could make a multicast object: {name} is not {value}"
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            knows = text.find(b"TORCH_SYMM_MEM_DISABLE_MULTICAST") >= 0
    except OSError as error:
        return f"async-TP could make a multicast object: {first_line(error)}"
    if not knows:
        return f"async-TP could make a multicast object: PyTorch {torch.__version__} has no switch for it"
    try:
        import torch.distributed._symmetric_memory as symmetric

        with warnings.catch_warnings():
            # Newer ones need no such call, and say so.
            warnings.simplefilter("ignore")
            symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"async-TP is not to be had: {first_line(error)}"
    return None


class Ours:
    """A module on the tensors of a layer of the peers'."""

    def __init__(self, group: cp.Group, plain: Any, overlap: str) -> None:
        column = plain.kind == "column"
        rows, columns = plain.weight.shape
        sizes = (columns, rows * group.size) if column else (columns * group.size, rows)
        self.module = KINDS[plain.kind](
            *sizes,
            bias=False,
            tp_group=group,
            sequence_parallel=plain.sequence_parallel,
            gradient_accumulation_fusion=True,
            overlap=overlap,
            dtype=plain.weight.dtype,
            init_method=lambda tensor: tensor,
            **({} if column else {"input_is_parallel": True}),
        )
        with torch.no_grad():
            self.module.weight.copy_(plain.weight)
        self.main_grad = self.module.weight.main_grad = torch.zeros_like(plain.main_grad)
        self.x, self.dy = plain.x.clone().requires_grad_(), plain.dy
        self.y = self.module(self.x)[0]

    def forward(self) -> list[torch.Tensor]:
        """(y,)."""
        with torch.no_grad():
            return [self.module(self.x)[0]]

    def backward(self) -> list[torch.Tensor]:
        """(dx, main_grad)."""
        self.x.grad = self.module.weight.grad = None
        self.y.backward(self.dy, retain_graph=True)
        assert self.x.grad is not None
        return [self.x.grad, self.main_grad]


def case(
    ranks: Ranks, group: cp.Group, shape: tuple[int, ...], kind: str, activations: str, given: Any, notes: dict[str, str]
) -> Any:
    """Rows of a layer's forward and backward."""
    from layers.layer import Layer
    from layers.passes import RUNS

    plain = Layer(kind, activations, shape, ranks.device)
    ours = Ours(group, plain, given.overlap)
    rows = []
    for direction in ("forward", "backward"):
        ways: dict[str, Call] = {"ours": getattr(ours, direction)}
        peers = ["megatron"] + (["async_tp"] if plain.sequence_parallel and "async_tp" not in notes else [])
        for tensor in (plain.main_grad, ours.main_grad):
            tensor.zero_()
        found = [tensor.clone() for tensor in ways["ours"]()]
        for name in peers:
            try:
                plain.main_grad.zero_()
                wanted = RUNS[name, direction](plain)
                error = ranks.largest([max(off(a, b) for a, b in zip(found, wanted, strict=True))])[0]
                if error > CLOSE:
                    notes[f"{kind}, {activations}, {direction}, {name}"] = f"its results are {error:.1e} from ours"
                    continue
                ways[name] = lambda name=name, direction=direction: RUNS[name, direction](plain)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                notes[f"{kind}, {activations}, {direction}, {name}"] = first_line(error)
        times = ranks.interleaved(ways, given.rounds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        tokens, hidden, local = shape
        products = 1 if direction == "forward" else 2
        rows.append(
            {
                "shape": list(shape),
                "kind": kind,
                "activations": activations,
                "pass": direction,
                "seconds": {name: sorted(seconds) for name, seconds in times.items()},
                "tflops_per_rank": products * 2.0 * tokens * hidden * local / medians["ours"] / 1e12,
                "over_ours": {name: median / medians["ours"] for name, median in medians.items() if name != "ours"},
                "is_compared": "megatron" in ways,
            }
        )
    return rows


def host(ranks: Ranks, group: cp.Group, dtype: torch.dtype) -> dict[str, Any]:
    """Host time of calls on few tokens."""
    module = ColumnParallelLinear(256, 256 * ranks.size, bias=False, tp_group=group, sequence_parallel=True, dtype=dtype)
    x = torch.randn(32, 256, device=ranks.device).to(dtype).requires_grad_()
    plain = x.detach()
    y = module(x)[0]
    dy = torch.ones_like(y)
    return {
        "host": "column-parallel, sequence-parallel, 32 tokens a rank",
        "forward_microseconds": ranks.host_time(lambda: module(plain)),
        "backward_microseconds": ranks.host_time(lambda: torch.autograd.grad(y, (x, module.weight), dy, retain_graph=True)),
    }


def main() -> None:
    arguments = parser(__doc__ or "", seconds=60)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--overlap", default="auto")
    given = arguments.parse_args()
    ranks = Ranks.join(given.device, given.seconds)
    dtype = torch.bfloat16
    group = cp.Group(device=ranks.device, limit=60.0)
    notes: dict[str, str] = {}
    missing = ranks.agreed(no_async_tp(ranks))
    if missing:
        notes["async_tp"] = missing
    rows: list[dict[str, Any]] = []
    with group.failing_together():
        rows.append(host(ranks, group, dtype))
        kinds = itertools.product(SHAPES[given.device], ("sequence_parallel", "replicated"), KINDS)
        for shape, activations, kind in kinds:
            if not ranks.has_time():
                rows.append({"shape": list(shape), "kind": kind, "activations": activations, "skipped": "no time was left"})
                continue
            rows += case(ranks, group, shape, kind, activations, given, notes)
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            ranks.say(kind, activations, shape)
    ranks.keep(given.out, "tensor_parallel", [*rows, {"notes": notes}])
    if ranks.is_first:
        show(ranks, group, rows, notes)
    group.close()
    ranks.leave()


def show(ranks: Ranks, group: cp.Group, rows: list[dict[str, Any]], notes: dict[str, str]) -> None:
    """The table."""
    print(f"tensor-parallel layers on {ranks.size} ranks: {ranks.device_name}, {group.transport}, torch {torch.__version__}")
    first, *others = rows
    print(
        f"{first['host']}: host {first['forward_microseconds']:.0f} us forward, {first['backward_microseconds']:.0f} us backward"
    )
    lines = []
    for row in others:
        name = f"{row['kind']}, {row['activations'].replace('_', ' ')}, {':'.join(map(str, row['shape']))}"
        if "skipped" in row:
            lines.append((name, row["skipped"], "", "", ""))
            continue
        ratios = (f"{row['over_ours'][peer]:.2f}x" if peer in row["over_ours"] else "-" for peer in ("megatron", "async_tp"))
        lines.append((name, row["pass"], f"{row['tflops_per_rank']:.1f}", *ratios))
    table(("layer, tokens:features:features of a rank", "pass", "TFLOP/s a rank", "Megatron's way", "async-TP"), lines)
    for name, note in notes.items():
        print(f"  {name}: {note}")


if __name__ == "__main__":
    main()
