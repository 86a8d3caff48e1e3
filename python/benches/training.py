"""Trains a small Llama on packed documents in every way that ranks allow, and compares the curves with one device without us.

    torchrun --nproc-per-node 2 python/benches/training.py --out results

The references are transformers' own Llama on one device, in f32, and in bf16 by each of its implementations of attention: how far
these are from the first is what bf16 does by itself. Optimizers amplify rounding from step to step, so one of them says little. A
way agrees where its losses, and its gradients of the first step, are at most twice as far from f32 as the furthest of these
(losses also within 2^-12, an eighth of a bf16's rounding). Parameters and their sums are f32 everywhere, products bf16.
The exit status is 1 where a way disagrees or fails. A new mask each step, planned by `Batch.prefetch` while the step before
runs.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from launched import Ranks, first_line, off, parser, table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import counterpoint as cp
import counterpoint.transformers

MICRO_BATCHES = 2
# Batches that come again.
BATCHES = 16
# Of a loss: the mean of many words' roundings to bf16, one of which is up to 2^-9.
ROUNDING = 2.0**-12
FACTOR = 2.0
# Implementations of attention in bf16, none of ours.
ROUNDED = ("sdpa", "math", "eager")


@dataclass(frozen=True)
class Size:
    """A model and its sequences."""

    tokens: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    words: int

    def config(self) -> transformers.LlamaConfig:
        """For transformers."""
        return transformers.LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 5 // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=self.tokens,
        )


SIZES = {"cuda": Size(8192, 512, 4, 8, 2, 4096), "cpu": Size(192, 64, 2, 4, 2, 97)}


@dataclass(frozen=True)
class Way:
    """How ranks share the work."""

    name: str
    cp_size: int
    shards: bool = False
    checkpoints: bool = False
    compiled: bool = False


def ways(size: int, compiles: bool) -> list[Way]:
    """All that so many ranks allow."""
    made = [
        Way(f"cp {size}", size),
        Way(f"cp {size}, checkpointed", size, checkpoints=True),
        Way(f"FSDP2, cp {size}", size, shards=True),
    ]
    if size % 2 == 0 and size > 2:
        half = size // 2
        made += [Way(f"dp 2 x cp {half}", half), Way(f"FSDP2, dp 2 x cp {half}, checkpointed", half, True, True)]
    else:
        made += [Way(f"FSDP2, cp {size}, checkpointed", size, True, True), Way(f"FSDP2, dp {size} x cp 1", 1, True)]
    if compiles:
        made += [Way(f"cp {size}, compiled", size, compiled=True), Way(f"FSDP2, cp {size}, compiled", size, True, compiled=True)]
    return made


@cache
def documents(size: Size, step: int, micro: int) -> dict[str, torch.Tensor]:
    """A packed sequence: positions begin again with every document. Documents are others at every step.

    A word is followed by one that goes by it, three times of four. That is learnt in a curve that is smooth; words that are
    learnt by heart are not: there curves of one device part too, and roundings grow into hundredths of the loss.
    """
    noise = torch.Generator().manual_seed(1000 * (step % BATCHES) + micro)
    follows = torch.randperm(size.words, generator=torch.Generator().manual_seed(3)).tolist()
    words = torch.randint(size.words, (size.tokens,), generator=noise).tolist()
    keeps = torch.rand(size.tokens, generator=noise) < 0.75
    for place in keeps[1:].nonzero().flatten().tolist():
        words[place + 1] = follows[words[place]]
    ids = torch.tensor([words])
    noise.manual_seed(7000 + 10 * (step % (3 * BATCHES)) + micro)
    positions, left = [], size.tokens
    while left:
        wanted = int(torch.empty(1).log_normal_(4.6, 1.0, generator=noise).item() * size.tokens / 1024) + 1
        positions.append(torch.arange(min(left, wanted)))
        left -= len(positions[-1])
    return {"input_ids": ids, "position_ids": torch.cat(positions)[None], "labels": ids}


def targets_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What each word is followed by, -100 at the ends of documents: said here once more, without us."""
    labels = batch["input_ids"].roll(-1, 1)
    labels[:, -1] = -100
    labels[:, :-1][batch["position_ids"][:, 1:] == 0] = -100
    return labels


@cache
def items(size: Size, step: int) -> int:
    """Words that are predicted in a step, by all ranks."""
    return sum(int((targets_of(documents(size, step, micro)) >= 0).sum()) for micro in range(MICRO_BATCHES))


class Trained:
    """A model, its f32 parameters and their optimizer. Sharded by FSDP2, or whole on every rank."""

    def __init__(self, ranks: Ranks, size: Size, attention: str, dtype: torch.dtype, way: Way, flat: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        whole = transformers.AutoModelForCausalLM.from_config(size.config(), dtype=torch.float32)
        self.shards = way.shards
        kept = torch.float32 if way.shards else dtype
        self.model = transformers.AutoModelForCausalLM.from_config(size.config(), attn_implementation=attention, dtype=kept)
        self.model.load_state_dict(whole.state_dict())
        self.model.to(ranks.device).train()
        if way.checkpoints:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        layers = self.model.model.layers
        if way.compiled:
            torch._dynamo.reset()
            for layer in layers:
                layer.compile(fullgraph=True, backend="inductor" if ranks.device.type == "cuda" else "aot_eager")
        if way.shards:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for module in (*layers, self.model):
                fully_shard(module, mesh=flat, mp_policy=policy)
            self.kept = list(self.model.parameters())
        else:
            self.kept = [parameter.detach().to(ranks.device) for parameter in whole.parameters()]
        self.optimizer = torch.optim.AdamW(self.kept, lr=1e-3, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=10)

    def gather_gradients(self) -> None:
        """After each micro-batch: what FSDP2 does by itself, into f32."""
        if not self.shards:
            for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                kept.grad = parameter.grad.float() if kept.grad is None else kept.grad + parameter.grad
                parameter.grad = None

    def sum_gradients(self) -> None:
        """Over all ranks."""
        if not self.shards:
            for kept in self.kept:
                dist.all_reduce(kept.grad)

    def gradients(self) -> torch.Tensor:
        """All of them, in one row. Collective."""
        parts = [kept.grad.full_tensor() if self.shards else kept.grad for kept in self.kept]  # type: ignore[union-attr,attr-defined]
        return torch.cat([part.flatten().float().cpu() for part in parts])

    def step(self) -> None:
        """Changes the parameters."""
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if not self.shards:
            with torch.no_grad():
                for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
                    parameter.copy_(kept)


@dataclass
class Found:
    """Losses of all steps, gradients of the first, and the median seconds of a step."""

    losses: list[float]
    gradients: torch.Tensor
    seconds: float


def loop(ranks: Ranks, trained: Trained, steps: int, micros: range, loss_of: Callable[[int, int], Any], alone: bool) -> Found:
    """`loss_of(step, micro)` is this rank's part of the loss, and what it is multiplied by for the backward."""
    losses, times, gradients = [], [], torch.empty(0)
    for step in range(steps):
        began = time.perf_counter()
        total = torch.zeros((), device=ranks.device)
        for micro in micros:
            loss, factor = loss_of(step, micro)
            (loss * factor).backward()
            trained.gather_gradients()
            total += loss.detach()
        if not alone:
            trained.sum_gradients()
            dist.all_reduce(total)
        if step == 0:
            gradients = trained.gradients()
        trained.step()
        losses.append(total.item())
        times.append(time.perf_counter() - began)
    return Found(losses, gradients, statistics.median(times[steps // 2 :]))


def reference(ranks: Ranks, size: Size, steps: int, attention: str, dtype: torch.dtype) -> Found:
    """One device, nothing of ours: attention by "sdpa" as PyTorch chooses, by its "math", or "eager"."""
    implementation = "eager" if attention == "eager" else "sdpa"
    trained = Trained(ranks, size, implementation, dtype, Way("one device", 1), None)
    backends = contextlib.nullcontext if attention != "math" else lambda: sdpa_kernel(SDPBackend.MATH)

    def loss_of(step: int, micro: int) -> tuple[torch.Tensor, float]:
        batch = documents(size, step, micro)
        given = {name: batch[name].to(ranks.device) for name in ("input_ids", "position_ids")}
        with backends():
            logits = trained.model(**given, use_cache=False).logits.float().flatten(0, 1)
        targets = targets_of(batch).to(ranks.device).flatten()
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / items(size, step), 1.0

    return loop(ranks, trained, steps, range(MICRO_BATCHES), loss_of, alone=True)


def ours(ranks: Ranks, size: Size, steps: int, way: Way, mesh: DeviceMesh | None) -> Found:
    """By this package: on ranks, or on one device where there is no mesh."""
    alone = mesh is None
    group = cp.LocalGroup(1, device=ranks.device) if mesh is None else cp.Group(mesh["cp"], device=ranks.device, limit=60.0)
    trained = Trained(ranks, size, "counterpoint", torch.bfloat16, way, None if mesh is None else mesh["dp", "cp"]._flatten())
    replicas = ranks.size // way.cp_size
    if alone or MICRO_BATCHES % replicas:
        micros = range(MICRO_BATCHES)
        assert alone or replicas == 1
    else:
        micros = range(ranks.rank // way.cp_size, MICRO_BATCHES, replicas)
    config, more = trained.model.config, {"dtype": torch.bfloat16}
    alive: dict[int, cp.Batch] = {}

    def given(step: int, micro: int) -> dict[str, torch.Tensor]:
        return {name: tensor.to(ranks.device) for name, tensor in documents(size, step, micro).items()}

    def loss_of(step: int, micro: int) -> tuple[torch.Tensor, float]:
        batch = cp.Batch.prepare(given(step, micro), group, config, num_items=items(size, step), **more)
        following = next(((step, other) for other in micros if other > micro), (step + 1, micros[0]))
        cp.Batch.prefetch(given(*following), group, config, **more)
        inputs = {
            name: value for name, value in batch.inputs.items() if name not in ("labels", "shift_labels", "num_items_in_batch")
        }
        # Its plan must live until the backward: a compiled call knows only its number.
        alive[micro] = batch
        loss = batch.loss(trained.model(**inputs).logits)
        # FSDP2 gives the mean over its ranks.
        return loss, ranks.size if way.shards else 1.0

    if alone:
        return loop(ranks, trained, steps, micros, loss_of, alone)
    with group.failing_together():
        return loop(ranks, trained, steps, micros, loss_of, alone)


class Judge:
    """By one device without us, in f32 and in bf16."""

    def __init__(self, exact: Found, rounded: list[Found]) -> None:
        self.exact = exact
        losses, of_gradients = zip(*map(self.distances, rounded), strict=True)
        loss, gradients = max(losses), max(of_gradients)
        self.loss_bound, self.gradient_bound = max(FACTOR * loss, ROUNDING * max(exact.losses)), FACTOR * gradients

    def distances(self, found: Found) -> tuple[float, float]:
        """The largest of losses; that of all gradients of the first step, in parts of their norm."""
        loss = max(abs(a - b) for a, b in zip(found.losses, self.exact.losses, strict=True))
        return loss, off(found.gradients, self.exact.gradients)

    def of(self, found: Found) -> dict[str, Any]:
        """What a row says of it."""
        loss, gradients = self.distances(found)
        return {
            "loss_distance": loss,
            "loss_bound": self.loss_bound,
            "gradient_distance": gradients,
            "gradient_bound": self.gradient_bound,
            # What is no number agrees with nothing.
            "agrees": bool(loss <= self.loss_bound and gradients <= self.gradient_bound),
        }


def main() -> None:
    arguments = parser(__doc__ or "", seconds=100)
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    given = arguments.parse_args()
    ranks = Ranks.join(given.device, given.seconds)
    size, steps = SIZES[given.device], given.steps
    counterpoint.transformers.register()
    torch.backends.cuda.matmul.allow_tf32 = False
    judge: Judge | None = None
    rows: list[dict[str, Any]] = []

    def kept(name: str, found: Found, **more: Any) -> None:
        judged = judge.of(found) if judge is not None else {}
        rows.append({"name": name, "losses": found.losses, "step_seconds": found.seconds, **judged, **more})

    if ranks.is_first:
        exact = reference(ranks, size, steps, "sdpa", torch.float32)
        rounded = {name: reference(ranks, size, steps, name, torch.bfloat16) for name in ROUNDED}
        kept("one device without us, f32", exact)
        judge = Judge(exact, list(rounded.values()))
        for name, found in rounded.items():
            kept(f"one device without us, bf16, {name}", found)
        ranks.say("references")
        alone = Way("one device, ours", 1)
        try:
            kept(alone.name, ours(ranks, size, steps, alone, None), way=asdict(alone))
        except Exception as error:
            rows.append({"name": alone.name, "failed": first_line(error), "agrees": False})
        ranks.say(alone.name)
    ranks.barrier()
    meshes: dict[int, DeviceMesh] = {}
    for way in ways(ranks.size, not given.no_compile):
        if not ranks.has_time():
            rows.append({"name": way.name, "skipped": "no time was left"})
            continue
        if way.cp_size not in meshes:
            shape = (ranks.size // way.cp_size, way.cp_size)
            meshes[way.cp_size] = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("dp", "cp"))
        try:
            kept(way.name, ours(ranks, size, steps, way, meshes[way.cp_size]), way=asdict(way))
        except Exception as error:
            # All ranks have heard of it, and none goes on where others may wait for it.
            rows.append({"name": way.name, "failed": first_line(error), "agrees": False})
            print(f"# rank {ranks.rank}, {way.name}: {first_line(error)}", file=sys.stderr, flush=True)
            if ranks.is_first:
                traceback.print_exc()
            break
        ranks.say(way.name)
    ranks.keep(given.out, "training", rows)
    failed = not all(row.get("agrees", True) for row in rows)
    if ranks.is_first:
        print(f"training: {ranks.size} ranks, {ranks.device_name}, {steps} steps, {asdict(size)}")
        head = ("", "first loss", "last loss", "loss off f32 by", "bound", "gradients off f32 by", "bound", "ms a step", "")
        table(head, [line(row) for row in rows])
    if "failed" in rows[-1]:
        # Some ranks may be inside a collective of PyTorch's. The first process that ends has torchrun end the others.
        sys.stdout.flush()
        time.sleep(0.0 if ranks.is_first else 5.0)
        sys.exit(1)
    failed = bool(ranks.agreed(failed))
    ranks.leave()
    sys.exit(1 if failed else 0)


def line(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    if "losses" not in row:
        return [row["name"], *[""] * 7, row.get("skipped") or f"FAILED: {row['failed']}"]
    losses = row["losses"]
    verdict = {None: "", True: "agrees", False: "DISAGREES"}[row.get("agrees")]
    figures = [
        f"{row[name]:.2e}" if name in row else ""
        for name in ("loss_distance", "loss_bound", "gradient_distance", "gradient_bound")
    ]
    return [row["name"], f"{losses[0]:.4f}", f"{losses[-1]:.4f}", *figures, f"{1e3 * row['step_seconds']:.1f}", verdict]


if __name__ == "__main__":
    main()
