#!/usr/bin/env python3
"""Times what a user of PyTorch would pick for attention over a mask, and Counterpoint beside it.

Peers: cuDNN (`scaled_dot_product_attention`), the flash backend (varlen where the mask is packed documents, its
window for the sliding window) and, on request, FlexAttention (compiled, with block masks). Forward and backward apart,
on seven masks of realistic documents, in one run on one GPU. Needs PyTorch and a GPU, nothing of this project.

  python3 attention.py --masks causal,varlen_causal --seqlens 8k,16k
  python3 attention.py --peers cudnn,flash,flex --seqlens 8k
  python3 attention.py --ours ../../target/release/counterpoint
  python3 attention.py --clock wall                       # small sizes, launch included

Rules of measuring: random normal data; every result is checked against an f32 reference before its time counts; CUDA
events around the kernels, the L2 flushed and the GPU kept busy before, so that no launch is timed; peers take turns
within every iteration, and Counterpoint runs between two halves of them; medians with min and max.
`--clock wall` times loops of calls by the host's clock instead, launches and Python included.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"{sys.executable} has no PyTorch ({error}); pip install torch", file=sys.stderr)
    sys.exit(3)

PASSES = ["forward", "backward"]
MASKS = ["full", "causal", "varlen_full", "varlen_causal", "sw_causal", "block_causal", "varlen_block_causal"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Rows of the window and of a block of the masks.
WINDOW = 1024
BLOCK = 2048
# A result may err so many times as much as one rounding of the reference does. Kernels round the probabilities too, and
# a wrong mask errs a hundred times as much.
ERROR_FACTOR = 4.0
# Rows of the reference that are computed at once.
REFERENCE_ROWS = 2048
# Calls of one timed loop under the wall clock.
CALLS = 40


class Data:
    """What lies beside this script: lengths of documents by the length of the sequence, and published figures."""

    documents, published = {}, []

    @classmethod
    def load(cls, text):
        """From one JSON document, or from the files."""
        if text:
            data = json.loads(text)
            cls.documents = {int(seqlen): lengths for seqlen, lengths in data["documents"].items()}
            cls.published = data["published"]["rows"]
            return
        folder = Path(__file__).resolve().parent
        for kilo in (8, 16, 32):
            lines = (folder.parent / "data" / f"documents_{kilo}k.txt").read_text().split()
            cls.documents[kilo * 1024] = [int(line) for line in lines]
        cls.published = json.loads((folder / "published.json").read_text())["rows"]


def documents(seqlen):
    """The list of that length; multiples of the longest repeat it; for others the shortest list scaled, what is left over
    going to the longest document."""
    if seqlen in Data.documents:
        return Data.documents[seqlen]
    longest = max(Data.documents)
    if seqlen > longest and seqlen % longest == 0:
        return Data.documents[longest] * (seqlen // longest)
    listed = min(Data.documents)
    scaled = [max(1, n * seqlen // listed) for n in Data.documents[listed]]
    scaled[scaled.index(max(scaled))] += seqlen - sum(scaled)
    return scaled


class Mask:
    """A mask of the comparison. Every row of these sees one interval of columns, `lo .. hi`."""

    def __init__(self, name, seqlen):
        self.name, self.seqlen = name, seqlen
        self.lengths = documents(seqlen) if name.startswith("varlen") else [seqlen]
        row = torch.arange(seqlen, device="cuda")
        lengths = torch.tensor(self.lengths, device="cuda")
        ends = lengths.cumsum(0)
        self.document = torch.repeat_interleave(torch.arange(len(self.lengths), device="cuda"), lengths)
        self.start = (ends - lengths)[self.document]
        end = ends[self.document]
        self.lo, self.hi = self.start.clone(), end
        if name.endswith("block_causal"):
            self.hi = torch.minimum(end, self.start + ((row - self.start) // BLOCK + 1) * BLOCK)
        elif name.endswith("causal"):
            self.hi = row + 1
        if name == "sw_causal":
            self.lo = (row - (WINDOW - 1)).clamp_min(0)
        self.area = int((self.hi - self.lo).sum())

    def cu_seqlens(self):
        ends = torch.tensor(self.lengths).cumsum(0)
        return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).cuda()

    def flex_mod(self):
        """The mask as one would write it for FlexAttention."""
        document, start = self.document, self.start
        window, block = WINDOW, BLOCK
        return {
            "full": None,
            "causal": lambda b, h, q, k: q >= k,
            "varlen_full": lambda b, h, q, k: document[q] == document[k],
            "varlen_causal": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
            "sw_causal": lambda b, h, q, k: (q >= k) & (q - k < window),
            "block_causal": lambda b, h, q, k: q // block >= k // block,
            "varlen_block_causal": lambda b, h, q, k: (document[q] == document[k])
            & ((q - start[q]) // block >= (k - start[k]) // block),
        }[self.name]


@dataclass(frozen=True)
class Shape:
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str

    def __str__(self):
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}:{self.heads_kv}"
        return f"{self.seqlen} x {heads} x {self.head_dim}"

    def flops(self, area, which):
        return 4 * area * self.heads_q * self.head_dim * (1 if which == "forward" else 2.5)


class Tensors:
    """Random inputs, packed as [rows, heads, dim] and seen as [1, heads, rows, dim]."""

    def __init__(self, shape, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        draw = lambda heads: torch.randn(
            shape.seqlen, heads, shape.head_dim, generator=generator, device="cuda", dtype=torch.float32
        ).to(DTYPES[shape.dtype])
        self.shape = shape
        self.q, self.dout = draw(shape.heads_q), draw(shape.heads_q)
        self.k, self.v = draw(shape.heads_kv), draw(shape.heads_kv)


# ---- peers: each gives `forward()` -> (out,) and `backward()` -> (dq, dk, dv); `rows` turns them to [rows, heads, dim]


class Sdpa:
    """A backend of `scaled_dot_product_attention`, through autograd, as its users call it."""

    def __init__(self, mask, tensors, attend):
        batch = lambda x: x.transpose(0, 1)[None]
        self.leaves = [batch(x).detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        self.dout = batch(tensors.dout)
        self.attend = attend
        self.out = None

    def forward(self):
        with torch.no_grad():
            return (self.attend(*self.leaves),)

    def backward(self):
        if self.out is None:
            self.out = self.attend(*self.leaves)
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    @staticmethod
    def rows(x):
        return x[0].transpose(0, 1)


def cudnn(mask, tensors):
    if mask.name not in ("full", "causal"):
        return None
    shape = tensors.shape
    options = {"is_causal": mask.name == "causal", "enable_gqa": shape.heads_q != shape.heads_kv}
    return Sdpa(mask, tensors, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))


class Flash:
    """PyTorch's flash backend by its own operators, which have the varlen form and the window."""

    def __init__(self, mask, tensors):
        self.t = tensors
        self.scale = tensors.shape.head_dim**-0.5
        varlen = mask.name.startswith("varlen")
        pack = (lambda x: x) if varlen else (lambda x: x[None])
        self.rows = (lambda x: x) if varlen else (lambda x: x[0])
        self.q, self.k, self.v, self.dout = (pack(x) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
        cu_seqlens = mask.cu_seqlens() if varlen else None
        longest = max(mask.lengths)
        window = (WINDOW - 1, 0) if mask.name == "sw_causal" else (None, None)
        self.lengths = (cu_seqlens, cu_seqlens, longest, longest)
        self.causal = mask.name.endswith("causal")
        self.options = {"scale": self.scale, "window_size_left": window[0], "window_size_right": window[1]}
        self.saved = None

    def run(self):
        return torch.ops.aten._flash_attention_forward(
            self.q, self.k, self.v, *self.lengths, 0.0, self.causal, False, **self.options
        )

    def forward(self):
        return self.run()[:1]

    def backward(self):
        if self.saved is None:
            self.saved = self.run()
        out, lse, state, unused, _ = self.saved
        return torch.ops.aten._flash_attention_backward(
            self.dout, self.q, self.k, self.v, out, lse, *self.lengths, 0.0, self.causal, state, unused, **self.options
        )


def flash(mask, tensors):
    return None if mask.name.endswith("block_causal") else Flash(mask, tensors)


_compiled_flex = None


def flex(mask, tensors):
    global _compiled_flex
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _compiled_flex is None:
        torch._dynamo.config.recompile_limit = 1000
        torch._dynamo.config.accumulated_recompile_limit = 1000
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    mod, n = mask.flex_mod(), mask.seqlen
    block_mask = create_block_mask(mod, None, None, n, n, device="cuda") if mod else None
    gqa = tensors.shape.heads_q != tensors.shape.heads_kv
    return Sdpa(mask, tensors, lambda q, k, v: _compiled_flex(q, k, v, block_mask=block_mask, enable_gqa=gqa))


PEERS = {"cudnn": cudnn, "flash": flash, "flex": flex}


def backend(name):
    """The context in which a peer runs."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)


# ---- the reference


class Reference:
    """f32 results of the first and the last key head with their query heads, in chunks of rows."""

    def __init__(self, mask, tensors, passes):
        shape = tensors.shape
        self.group = shape.heads_q // shape.heads_kv
        self.key_heads = sorted({0, shape.heads_kv - 1})
        self.query_heads = sorted({h for kv in self.key_heads for h in (kv * self.group, (kv + 1) * self.group - 1)})
        scale = shape.head_dim**-0.5
        n = shape.seqlen
        self.tensors = {"out": {}, "dq": {}, "dk": {}, "dv": {}}
        # Keys need all query heads of their group; the forward alone needs one or two.
        heads = self.query_heads
        if "backward" in passes:
            heads = [h for kv in self.key_heads for h in range(kv * self.group, (kv + 1) * self.group)]
        for head in heads:
            kv = head // self.group
            q, dout = tensors.q[:, head].float(), tensors.dout[:, head].float()
            k, v = tensors.k[:, kv].float(), tensors.v[:, kv].float()
            out, dq = torch.zeros_like(q), torch.zeros_like(q)
            dk = self.tensors["dk"].setdefault(kv, torch.zeros_like(k))
            dv = self.tensors["dv"].setdefault(kv, torch.zeros_like(v))
            for a in range(0, n, REFERENCE_ROWS):
                b = min(a + REFERENCE_ROWS, n)
                lo, hi = mask.lo[a:b], mask.hi[a:b]
                c, d = int(lo.min()), int(hi.max())
                column = torch.arange(c, d, device="cuda")
                seen = (column >= lo[:, None]) & (column < hi[:, None])
                scores = (q[a:b] @ k[c:d].T).mul_(scale).masked_fill_(~seen, -math.inf)
                p = torch.softmax(scores, 1)
                del scores
                out[a:b] = p @ v[c:d]
                if "backward" in passes:
                    dv[c:d] += p.T @ dout[a:b]
                    delta = (dout[a:b] * out[a:b]).sum(1, keepdim=True)
                    ds = (dout[a:b] @ v[c:d].T).sub_(delta).mul_(p).mul_(scale)
                    dq[a:b] = ds @ k[c:d]
                    dk[c:d] += ds.T @ q[a:b]
            if head in self.query_heads:
                self.tensors["out"][head] = out
                self.tensors["dq"][head] = dq

    def error(self, which, results):
        """(error, bound), relative Frobenius, of the tensor that is nearest to its bound."""
        names = ["out"] if which == "forward" else ["dq", "dk", "dv"]
        worst = (0.0, 1.0)
        for name, result in zip(names, results):
            squares = [0.0, 0.0, 0.0]
            for head, expected in self.tensors[name].items():
                actual = result[:, head]
                rounded = expected.to(actual.dtype).float()
                for at, value in enumerate((actual.float() - expected, rounded - expected, expected)):
                    squares[at] += float(value.double().square().sum())
            error, bound = math.sqrt(squares[0] / squares[2]), ERROR_FACTOR * math.sqrt(squares[1] / squares[2])
            if not error / bound <= worst[0] / worst[1]:
                worst = (error, bound)
        return worst


# ---- timing


class Timer:
    """Seconds of a region, by events or by the host's clock."""

    def __init__(self, clock):
        self.clock = clock
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(self, run):
        if self.clock != "device":
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / CALLS
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # So long that the launches below are queued before it ends.
        torch.cuda._sleep(800_000)
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Case:
    """Every peer that has a mask, on one mask and shape, its results checked."""

    def __init__(self, name, tensors, peers, options):
        self.name, self.shape = name, tensors.shape
        mask = Mask(name, self.shape.seqlen)
        self.area = mask.area
        self.runs, self.seconds, self.verified = {}, {}, {}
        reference = Reference(mask, tensors, options.passes) if options.check else None
        for peer in peers:
            try:
                self.add(peer, PEERS[peer](mask, tensors), reference, options.passes)
            except Exception as error:  # a peer that cannot run a mask is left out, and said so
                text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                note(f"{peer} cannot run {name}, {self.shape}: {text}")

    def add(self, peer, runner, reference, passes):
        for which in passes if runner else ():
            run = getattr(runner, which)
            with backend(peer):
                results = run()
            verified = None
            if reference is not None:
                verified = reference.error(which, [runner.rows(x) for x in results])
                if not verified[0] <= verified[1]:
                    note(f"{peer} {which} of {self.name}, {self.shape} is WRONG: {verified[0]:.2e} > {verified[1]:.2e}")
                    continue
            self.runs[peer, which] = run
            self.seconds[peer, which] = []
            self.verified[peer, which] = verified

    def measure(self, iterations, timer, warm=3):
        """Peers take turns within every iteration."""
        for iteration in range(-warm, iterations):
            for (peer, which), run in self.runs.items():
                with backend(peer):
                    seconds = timer.once(run)
                if iteration >= 0:
                    self.seconds[peer, which].append(seconds)

    def rows(self):
        return [
            row(peer, which, self.name, self.shape, self.area, seconds, self.verified[peer, which])
            for (peer, which), seconds in self.seconds.items()
        ]


# ---- Counterpoint


def ours(options, shape):
    """Rows of `counterpoint bench attention` for one shape."""
    command = [
        str(options.ours.resolve()), "bench", "attention", "--device", "cuda", "--json",
        "--masks", ",".join(options.masks), "--seqlens", str(shape.seqlen),
        "--heads", f"{shape.heads_q}:{shape.heads_kv}", "--head-dim", str(shape.head_dim),
        "--dtype", shape.dtype, "--passes", ",".join(options.passes),
        "--iterations", str(options.iterations), "--clock", options.clock, "--kernels", options.kernels,
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"--ours: {error}") from error
    if ran.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


# ---- rows and tables


def row(peer, which, name, shape, area, seconds, verified):
    median = statistics.median(seconds)
    return {
        "name": f"attention {which}",
        "by": peer,
        "shape": str(shape),
        "dtype": shape.dtype,
        "mask": name,
        "device": torch.cuda.get_device_name(0),
        "ranks": 1,
        "seconds": {
            "count": len(seconds),
            "median": median,
            "min": min(seconds),
            "max": max(seconds),
            "mean": statistics.fmean(seconds),
        },
        "rate": {"tflops": shape.flops(area, which) / median / 1e12},
        "ratio": None,
        "verified": verified and {"error": verified[0], "bound": verified[1]},
        "area": area,
        **key(which, name, shape),
    }


def key(which, name, shape):
    return {
        "mask": name,
        "pass": which,
        "seqlen": shape.seqlen,
        "heads_q": shape.heads_q,
        "heads_kv": shape.heads_kv,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
    }


def of(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def tflops(rows, **wanted):
    found = of(rows, **wanted)
    return found[0]["rate"]["tflops"] if found else None


class Published:
    """FFA's figures of another day, scaled by cuDNN's of today over cuDNN's of that day."""

    def __init__(self, rows):
        self.rows = Data.published
        self.now = of(rows, by="cudnn")

    def ffa(self, which, name, shape):
        if shape.dtype != "bf16":
            return None
        wanted = key(which, name, shape)
        wanted.pop("dtype")
        found = of(self.rows, **wanted)
        if not found:
            return None
        # By the same mask where cuDNN has it, else by those that it has.
        names = [name] if found[0]["cudnn"] else ["full", "causal"]
        scales = []
        for other in names:
            now = tflops(self.now, **(wanted | {"mask": other}))
            then = of(self.rows, **(wanted | {"mask": other}))
            if now and then:
                scales.append(now / then[0]["cudnn"])
        return found[0]["ffa_tuned"] * statistics.geometric_mean(scales) if scales else None


def goals(rows, shapes, masks, passes, clock):
    """Counterpoint over every peer: one record a (mask, shape, pass)."""
    published = Published(rows) if clock == "device" else None
    records = []
    for shape in shapes:
        for which in passes:
            for name in masks:
                wanted = key(which, name, shape)
                figures = {peer: tflops(rows, by=peer, **wanted) for peer in ("counterpoint", *PEERS)}
                figures["ffa"] = published.ffa(which, name, shape) if published else None
                mine = figures["counterpoint"]
                ratios = {
                    peer: mine / figure
                    for peer, figure in figures.items()
                    if mine and figure and peer != "counterpoint"
                }
                records.append({**wanted, "tflops": figures, "ratios": ratios})
    return records


def print_tables(rows, records, shapes, passes, clock):
    columns = ["counterpoint", "cudnn", "flash", "flex", "ffa"]
    seen = lambda peer: any(record["tflops"].get(peer) for record in records)
    columns = [peer for peer in columns if seen(peer)]
    unit = "TFLOP/s by unmasked area" if clock == "device" else "microseconds a call, launch included"
    for shape in shapes:
        for which in passes:
            print(f"\n{which}, {shape}, {shape.dtype}: {unit}; in brackets counterpoint's speed over it")
            print(f"{'':22}" + "".join(f"{peer:>18}" for peer in columns))
            for record in of(records, **{name: x for name, x in key(which, None, shape).items() if name != "mask"}):
                line = f"{record['mask']:22}"
                for peer in columns:
                    figure, ratio = record["tflops"].get(peer), record["ratios"].get(peer)
                    if clock != "device":
                        wanted = {name: value for name, value in record.items() if name not in ("tflops", "ratios")}
                        found = of(rows, by=peer, **wanted)
                        figure = found[0]["seconds"]["median"] * 1e6 if found else None
                    text = "-" if figure is None else f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}"
                    line += f"{text + (f' ({ratio:.2f}x)' if ratio else ''):>18}"
                print(line)
    if any(record["ratios"] for record in records):
        print(f"\n{'counterpoint over':22}{'pass':>10}{'geomean':>10}{'worst':>8}  worst case")
        for peer in columns[1:]:
            for which in passes:
                found = [r for r in of(records, **{"pass": which}) if peer in r["ratios"]]
                if not found:
                    continue
                mean = statistics.geometric_mean(r["ratios"][peer] for r in found)
                worst = min(found, key=lambda r: r["ratios"][peer])
                where = "{mask}, {seqlen} x {heads_q}:{heads_kv} x {head_dim}".format(**worst)
                print(f"{peer:22}{which:>10}{mean:>10.3f}{worst['ratios'][peer]:>8.3f}  {where}")
    if "ffa" in columns:
        print("ffa: tuned figures of published.json, scaled by cuDNN in this run over cuDNN in that one")


def note(text):
    print(text, file=sys.stderr, flush=True)


# ---- the command line


def size(text):
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def names(allowed):
    def parse(text):
        chosen = text.split(",")
        wrong = [name for name in chosen if name not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}; choose from {', '.join(allowed)}")
        return chosen

    return parse


def heads(text):
    pairs = [tuple(int(n) for n in pair.split(":")) for pair in text.split(",")]
    if any(len(pair) != 2 or pair[0] % pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text}; give pairs of query and key heads such as 16:16,64:8")
    return pairs


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=names(MASKS), default=MASKS, help=f"of {','.join(MASKS)}")
    parser.add_argument("--seqlens", type=lambda t: [size(x) for x in t.split(",")], help="such as 8k,16k,32k")
    parser.add_argument("--heads", type=heads, help="query and key heads, such as 16:16,64:8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--passes", type=names(PASSES), default=PASSES)
    parser.add_argument("--peers", type=names(list(PEERS)), default=["cudnn", "flash"])
    parser.add_argument("--iterations", type=int, help="timed runs of each [default: 12; --quick 4]")
    parser.add_argument("--clock", choices=["device", "wall", "graph"], default="device",
                        help="device: kernels alone; wall: launches included; graph: likewise, Counterpoint by CUDA graphs")  # fmt: skip
    parser.add_argument("--no-check", dest="check", action="store_false", help="times only; marked as unchecked")
    parser.add_argument("--ours", type=Path, help="path of the counterpoint binary, to run it in between")
    parser.add_argument("--kernels", choices=["native", "portable"], default="native", help="which kernels it runs")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run of it may take")
    parser.add_argument("--quick", action="store_true", help="8k, 16:16, few repeats")
    parser.add_argument("--data", default="", help="documents and published figures as JSON, instead of the files here")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of tables")
    options = parser.parse_args()
    small = options.clock != "device"
    seqlens = [8192] if options.quick else [1024, 2048, 4096] if small else [8192, 16384, 32768]
    options.seqlens = options.seqlens or seqlens
    options.heads = options.heads or ([(16, 16)] if options.quick else [(16, 16), (64, 8)])
    options.iterations = options.iterations or (4 if options.quick else 12)
    return options


def main():
    options = arguments()
    Data.load(options.data)
    if not torch.cuda.is_available():
        note("PyTorch sees no CUDA device")
        sys.exit(3)
    timer = Timer(options.clock)
    shapes = [
        Shape(seqlen, q, kv, options.head_dim, options.dtype) for q, kv in options.heads for seqlen in options.seqlens
    ]
    rows = []
    for shape in shapes:
        tensors = Tensors(shape, seed=shape.seqlen + shape.heads_q)
        cases = [Case(name, tensors, options.peers, options) for name in options.masks]
        if options.clock == "device" and "cudnn" in options.peers:
            # cuDNN on the masks that it has is what published figures are scaled by.
            scaling = [name for name in ("full", "causal") if name not in options.masks]
            cases += [Case(name, tensors, ["cudnn"], options) for name in scaling]
        torch.cuda.empty_cache()
        first = options.iterations // 2
        for case in cases:
            case.measure(first, timer)
        own = ours(options, shape) if options.ours else []
        for case in cases:
            case.measure(options.iterations - first, timer)
        rows.extend(r for case in cases for r in case.rows())
        rows.extend({**r, "by": "counterpoint"} for r in own)
        note(f"{shape} done")
        del cases, tensors
    records = goals(rows, shapes, options.masks, options.passes, options.clock)
    if options.json:
        for r in rows:
            print(json.dumps(r))
        for record in records:
            if record["ratios"]:
                print(json.dumps({"name": "comparison", **record}))
        return
    print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"median of {options.iterations}, {'checked' if options.check else 'NOT checked'}")  # fmt: skip
    print_tables(rows, records, shapes, options.passes, options.clock)


if __name__ == "__main__":
    main()
