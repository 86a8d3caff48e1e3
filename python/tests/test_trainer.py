"""transformers' Trainer with `TrainerMixin`: the same parameters after some steps as those of plain eager steps on one rank."""

from __future__ import annotations

import os

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402
from test_transformers import made  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from counterpoint.trainer import _replica  # noqa: E402
from counterpoint.transformers import TrainerMixin  # noqa: E402


class Data(torch.utils.data.Dataset):
    """Documents of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        noise = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 61, (5 + (7 * index) % 19,), generator=noise).tolist()
        return {"input_ids": ids, "labels": ids}


class Stream(torch.utils.data.IterableDataset):
    """The same documents, from one on, with a column that no model takes."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self):
        return ({**Data()[index], "text": "words"} for index in range(self.first, 24))


class Trainer(TrainerMixin, transformers.Trainer):
    """What a user writes."""


def packing(examples) -> dict[str, torch.Tensor]:
    """Documents one after the other, known by positions."""
    assert all(set(example) == {"input_ids", "labels"} for example in examples)
    ids = [token for example in examples for token in example["input_ids"]]
    positions = [position for example in examples for position in range(len(example["input_ids"]))]
    return {name: torch.tensor([value]) for name, value in (("input_ids", ids), ("labels", ids), ("position_ids", positions))}


def arguments(folder: str, **changes):
    return transformers.TrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **changes,
    )


def expected(replicas: int, *, streamed: bool = False) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Two steps by hand of all replicas' micro-batches, and the loss of evaluation."""
    model = made("llama")
    model.set_attn_implementation("eager")
    data, losses = Data(), []
    order = [iter(torch.utils.data.distributed.DistributedSampler(data, replicas, rank, seed=42)) for rank in range(replicas)]
    if streamed:  # whole batches in turns
        order = [iter([i for i in range(24) if i // 2 % replicas == rank]) for rank in range(replicas)]
    for _ in range(2):
        batches = [packing([data[next(one)] for _ in range(2)]) for one in order for _ in range(2)]
        for batch in batches:  # the first token of a document is predicted by nobody
            batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
        items = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        model.zero_grad()
        loss = sum(model(**batch, use_cache=False, num_items_in_batch=items).loss for batch in batches)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    model.eval()
    evaluated = []
    with torch.no_grad():
        for first in range(0, 24, 2):
            chosen = [first, first + 1]
            if replicas == 2 and not streamed:  # one has the even examples and the other the odd ones
                chosen = [first // 4 * 4 + first // 2 % 2 + step for step in (0, 2)]
            batch = packing([data[index] for index in chosen])
            batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
            evaluated.append(model(**batch, use_cache=False).loss.item())
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses, sum(evaluated) / len(evaluated)


def trained(folder: str, group, data, wanted: dict[str, torch.Tensor], losses: list[float], evaluated: float) -> None:
    model = made("llama")
    model.set_attn_implementation("counterpoint")
    trainer = Trainer(
        model=model,
        args=arguments(folder),
        train_dataset=data,
        eval_dataset=data,
        data_collator=packing,
        cp_group=group,
        plan={"chunk": 4},
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=6e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-5)
    for name, parameter in model.named_parameters():
        error = float((parameter - wanted[name]).norm() / wanted[name].norm())
        assert error < 1e-6, (name, error)


def test_a_trainer_of_one_process(tmp_path) -> None:
    trained(str(tmp_path), cp.LocalGroup(2), Data(), *expected(1))


def test_a_trainer_of_an_iterable_dataset(tmp_path) -> None:
    trained(str(tmp_path), cp.LocalGroup(2), Stream(), *expected(1, streamed=True))


def on_ranks(rank: int, folder: str, cp_size: int, data, answer) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    trained(folder, mesh["cp"], data, *answer)


@pytest.mark.parametrize(("world", "cp_size", "data"), [(4, 2, Data()), (2, 2, Data()), (4, 2, Stream())])
def test_a_trainer_on_ranks(tmp_path, world: int, cp_size: int, data) -> None:
    answer = expected(world // cp_size, streamed=isinstance(data, Stream))
    # Of their own: accelerate keeps state in a process.
    with Ranks(world) as ranks:
        ranks.run(on_ranks, str(tmp_path), cp_size, data, answer)


def on_ranks_that_read_differently(rank: int, folder: str) -> str:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    model = made("llama")
    model.set_attn_implementation("counterpoint")
    given = {"model": model, "args": arguments(folder), "data_collator": packing, "cp_group": dist.group.WORLD}
    with pytest.raises(cp.PlanError) as refused:
        Trainer(**given, train_dataset=Stream(rank)).train()
    return str(refused.value)


def test_ranks_of_a_group_that_read_different_batches_are_named(tmp_path) -> None:
    with Ranks(2) as ranks:
        for sentence in ranks.run(on_ranks_that_read_differently, str(tmp_path)):
            assert "ranks [0, 1] are of one cp_group and have read different batches" in sentence


@pytest.mark.parametrize(
    ("changes", "attention", "sentence"),
    [
        ({}, "eager", "the model's attention is 'eager'"),
        ({"compute_metrics": lambda _: {}}, "counterpoint", "compute_metrics wants all logits on a rank"),
        ({"compute_loss_func": lambda *_: 0}, "counterpoint", "compute_loss_func is given"),
        ({"label_smoothing_factor": 0.1}, "counterpoint", "label_smoothing_factor is not 0"),
    ],
)
def test_refusals(tmp_path, changes, attention: str, sentence: str) -> None:
    model = made("llama")
    model.set_attn_implementation(attention)
    smoothing = {name: changes.pop(name) for name in ("label_smoothing_factor",) if name in changes}
    with pytest.raises(NotImplementedError, match=sentence):
        Trainer(
            model=model, args=arguments(str(tmp_path), **smoothing), data_collator=packing, cp_group=cp.LocalGroup(1), **changes
        )


def test_training_needs_a_dataset(tmp_path) -> None:
    model = made("llama")
    model.set_attn_implementation("counterpoint")
    trainer = Trainer(model=model, args=arguments(str(tmp_path)), data_collator=packing)
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        trainer.get_train_dataloader()


def test_which_replica_a_group_is() -> None:
    assert [_replica(ranks, 2, 8) for ranks in ((0, 1), (6, 7), (1, 5))] == [0, 3, 1] and _replica((5,), 1, 8) == 5
    with pytest.raises(cp.PlanError, match="the ranks of cp_group are \\[0, 3\\] of 8"):
        _replica((0, 3), 2, 8)


def test_processes_without_ranks_each_have_data_of_their_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    model.set_attn_implementation("counterpoint")
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 4)
    monkeypatch.setattr(transformers.TrainingArguments, "process_index", 3)
    trainer = Trainer(model=model, args=arguments(str(tmp_path)), cp_group=cp.LocalGroup(1))
    assert (trainer._replica, trainer._replicas) == (3, 4)
