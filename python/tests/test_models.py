"""A small Llama trained on ranks: the loss and every gradient of one rank without this package."""

from __future__ import annotations

from functools import cache

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from llama import HEAD_DIM, HEADS, KEY_HEADS, Llama, dense, documents, loss_of  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

# Two micro-batches of each of two replicas. The last is so short that of four ranks some have no rows.
BATCHES = [[[37, 80, 11], [64, 64]], [[100, 3, 29], [20, 30]]]


def batch(replica: int, step: int):
    return documents(BATCHES[replica][step], seed=10 * replica + step)


@cache
def expected(replicas: int, steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one rank without this package."""
    model, total = Llama(), 0.0
    batches = [batch(replica, step) for replica in range(replicas) for step in range(steps)]
    items = sum(one.items for one in batches)
    for one in batches:
        loss = loss_of(model(one.ids, one.positions, dense(one.mask)), one.labels) / items
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(rank: int, *, cp_size: int, shards: bool, checkpoints: bool, steps: int) -> tuple[float, float] | None:
    """A step on `cp_size` ranks for each of as many replicas as there is room for, at most two.

    Gives the loss, and the largest relative error of a parameter's gradient.
    """
    replicas = min(2, dist.get_world_size() // cp_size)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    replica = rank // cp_size
    idle = replica >= replicas  # a replica more than there is data for: it has a batch, which counts for nothing
    group, model = cp.Group(mesh["cp"]), Llama(checkpoints=checkpoints)
    if shards:
        from torch.distributed.fsdp import fully_shard

        flat = mesh._flatten()
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
    items = sum(batch(other, step).items for other in range(replicas) for step in range(steps))
    total = torch.zeros(())
    for step in range(steps):
        given = batch(replica % replicas, step)
        plan = group.plan(given.mask, heads=(HEADS, KEY_HEADS), head_dim=HEAD_DIM, dtype="float32", chunk=8)

        def attend(q, k, v, plan=plan):
            return cp.attention(q, k, v, plan)[0]

        ids, positions, labels = (plan.dispatch(x) for x in (given.ids, given.positions, given.labels))
        logits = model(ids, positions, attend)
        loss = loss_of(logits, labels) * (0 if idle else 1) / items
        # FSDP2 gives the mean over its ranks.
        (loss * (dist.get_world_size() if shards else 1)).backward()
        total += loss.detach()
    dist.all_reduce(total)
    worst = 0.0
    loss, gradients = expected(replicas, steps)
    for name, parameter in model.named_parameters():
        if shards:
            gradient = parameter.grad.full_tensor()
        else:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
        worst = max(worst, float((gradient - gradients[name]).norm() / gradients[name].norm()))
    assert abs(float(total) - loss) < 5e-7 * loss, (float(total), loss)
    return float(total), worst


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("shards", [False, True], ids=["whole", "fsdp2"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["stored", "checkpointed"])
def test_training_on_ranks_is_training_on_one(ranks: Ranks, cp_size: int, shards: bool, checkpoints: bool) -> None:
    found = ranks.run(trained, cp_size=cp_size, shards=shards, checkpoints=checkpoints, steps=2)
    assert len({loss for loss, _ in found}) == 1
    assert max(worst for _, worst in found) < 1e-6, found


def compiled(rank: int) -> tuple[int, float]:
    group, model = cp.Group(), Llama(layers=1)
    compiles = []

    def counted(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    layer, worst = model.layers[0], 0.0

    def step(x, positions, plan):
        return layer(x, positions, lambda q, k, v: cp.attention(q, k, v, plan)[0])

    fast = torch.compile(step, fullgraph=True, backend=counted)
    settings = {"heads": (HEADS, KEY_HEADS), "head_dim": HEAD_DIM, "dtype": "float32"}
    for window in range(8):
        plan = group.plan(cp.Mask.sliding_window(128, window, 0), **settings, chunk=8, even=True)
        x = torch.randn(plan.q_rows, HEADS * HEAD_DIM, requires_grad=True)
        gradients = [torch.autograd.grad(call(x, plan.position_ids, plan).square().sum(), x)[0] for call in (step, fast)]
        worst = max(worst, float((gradients[0] - gradients[1]).norm() / gradients[0].norm()))
    return len(compiles), worst


def test_compiled_layers_take_a_new_plan_each_step_on_ranks(ranks: Ranks) -> None:
    for compiles, worst in ranks.run(compiled):
        # The first plan, and the first that is another.
        assert compiles <= 2 and worst < 1e-6, (compiles, worst)


def of_transformers(rank: int, name: str, shards: bool) -> tuple[float, float]:
    """An unmodified model of transformers on four ranks: relative errors of the loss, and the largest of a gradient."""
    from test_transformers import made, packed
    from test_transformers import trained as alone

    from counterpoint import transformers

    transformers.register()
    model, batch = made(name), packed((90, 3, 60, 47))
    model.set_attn_implementation("eager")
    loss, gradients = alone(model, **batch)
    model.zero_grad()
    model.set_attn_implementation("counterpoint")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    if shards:
        from torch.distributed.fsdp import fully_shard

        flat = mesh["dp", "cp"]._flatten()
        for layer in model.model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
        model.gradient_checkpointing_enable()
    group = cp.Group(mesh["cp"]) if shards else cp.Group()
    prepared = cp.Batch.prepare(batch, group, model.config, chunk=8)
    inputs = {key: value for key, value in prepared.inputs.items() if "labels" not in key and key != "num_items_in_batch"}
    ours = prepared.loss(model(**inputs).logits, averaged_over=2 if shards else 1)
    # Both replicas have this batch, so that the mean over replicas is one's; FSDP2 gives the mean over all ranks.
    ours.backward()
    dist.all_reduce(total := ours.detach().clone())
    worst = 0.0
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        if shards:
            gradient = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        worst = max(worst, float((gradient - gradients[key]).norm() / gradients[key].norm().clamp(min=1e-6)))
    return abs(float(total) / (4 if shards else 1) - loss) / loss, worst


@pytest.mark.parametrize(("name", "shards"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_models_of_transformers_on_ranks(ranks: Ranks, name: str, shards: bool) -> None:
    pytest.importorskip("transformers")
    for loss, gradient in ranks.run(of_transformers, name, shards):
        # Its capped logits cost gemma2 a bit.
        assert loss < 5e-7 and gradient < (2e-6 if name == "gemma2" else 1e-6), (loss, gradient)
