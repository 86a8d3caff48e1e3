"""transformers' Trainer with context parallelism: `class MyTrainer(TrainerMixin, transformers.Trainer)`.

Only methods that Trainer documents for subclassing are overridden.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from counterpoint.batch import Batch, items_of
from counterpoint.errors import PlanError
from counterpoint.group import LocalGroup, _Group
from counterpoint.transformers import NAME, register

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class TrainerMixin(_Base):  # type: ignore[misc]
    """Trains on the ranks of `cp_group` as on one: to be put before Trainer, or TRL's SFTTrainer, among the base classes.

    `cp_group` is a process group, a dimension of a device mesh, or a group of counterpoint. The ranks of a group read the same
    batches; groups are replicas, each with its own. `plan` are further arguments of `Group.plan`. The model's attention is
    "counterpoint". Losses are by all tokens of a step of all replicas (`average_tokens_across_devices`), or else of a replica.
    """

    def __init__(self, *arguments: Any, cp_group: Any = None, plan: dict[str, Any] | None = None, **keywords: Any) -> None:
        register()
        super().__init__(*arguments, **keywords)
        self.cp_group = cp_group if isinstance(cp_group, _Group) else _made(cp_group, self.args.device)
        self._plan_arguments = plan or {}
        world = self.args.world_size
        if isinstance(self.cp_group, LocalGroup):
            self._replicas, self._replica = world, self.args.process_index
        else:
            size = self.cp_group.size
            self._replicas, self._replica = world // size, _replica(self.cp_group._global_ranks, size, world)
        # The last epoch whose first batches were found to be the same on all ranks of a group.
        self._checked_epoch: int | None = None
        self._refuse_what_is_not_offered()

    def _refuse_what_is_not_offered(self) -> None:
        config = getattr(self.accelerator, "parallelism_config", None)
        model = self.accelerator.unwrap_model(self.model)
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        refused = {
            f'the model\'s attention is {attention!r}: load it with attn_implementation="{NAME}"': attention != NAME,
            "accelerate's cp_size is above 1, whose context parallelism takes SDPA and causal masks alone: leave it at 1, and "
            "give cp_group": config is not None and config.cp_enabled,
            "compute_metrics wants all logits on a rank, which has its own rows: evaluate losses, or on one rank": (
                self.compute_metrics is not None
            ),
            "compute_loss_func is given, which would see the logits of some rows alone": self.compute_loss_func is not None,
            "label_smoothing_factor is not 0, which the loss of rows does not have": self.args.label_smoothing_factor != 0,
            "the process has several GPUs (DataParallel): start one process for each, by torchrun": self.args.n_gpu > 1,
            "the model's forward takes no num_items_in_batch, so its loss cannot be one of all ranks": (
                not self.model_accepts_loss_kwargs
            ),
        }
        for sentence, holds in refused.items():
            if holds:
                raise NotImplementedError(f"counterpoint's TrainerMixin: {sentence}")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The same batches for the ranks of a group, others for other groups."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        return self._loader(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Likewise for evaluation."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[given] if isinstance(given, str) else given
        return self._loader(dataset, self.args.eval_batch_size, shuffle=False)

    def _loader(self, dataset: Any, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
        collate = self.data_collator
        if self.args.remove_unused_columns:
            dataset, collate = self._without_unused_columns(dataset)
        drop_last = shuffle and self.args.dataloader_drop_last
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler: DistributedSampler[Any] | None = None
        if isinstance(dataset, IterableDataset):
            dataset = _share_of(dataset, batch_size, drop_last, self._replicas, self._replica, seed)
        else:
            sampler = DistributedSampler(dataset, self._replicas, self._replica, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return _Loader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            drop_last=drop_last,
        )

    def _without_unused_columns(self, dataset: Any) -> tuple[Any, Any]:
        """A dataset and a collator by which a model is given what its forward takes."""
        taken = {*inspect.signature(self.accelerator.unwrap_model(self.model).forward).parameters, "label", "label_ids"}
        # What a subclass of Trainer, such as TRL's, has its collator take: the lengths of packed documents.
        self._set_signature_columns_if_needed()
        taken |= {*(self._signature_columns or ())}
        columns = getattr(dataset, "column_names", None)
        if columns is None or not hasattr(dataset, "remove_columns"):
            return dataset, _Taking(self.data_collator, taken)
        return dataset.remove_columns([name for name in columns if name not in taken]), self.data_collator

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and what their losses are divided by: the tokens that are predicted."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        epoch = int(self.state.epoch or 0)
        if epoch != self._checked_epoch and not isinstance(self.cp_group, LocalGroup):
            self._checked_epoch = epoch
            self._check_same(batches, device)
        items = torch.tensor(sum(items_of(batch) for batch in batches), dtype=torch.int64, device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            dist.all_reduce(items)
            items = items // (self.args.world_size // self._replicas)
        return batches, items.clamp(min=1)

    def _check_same(self, batches: list[Any], device: torch.device) -> None:
        """Refuses batches that are not the same on all ranks of a group, whose attention would be over tokens of several."""
        digests = torch.zeros(self.args.world_size, dtype=torch.int64, device=device)
        digests[self.args.process_index] = _digest(batches)
        dist.all_reduce(digests)
        found, ranks = digests.tolist(), self.cp_group._global_ranks
        others = [rank for rank in ranks if found[rank] != found[ranks[0]]]
        if others:
            raise PlanError(
                f"ranks {[ranks[0], *others]} are of one cp_group and have read different batches; have the dataset and the "
                "collator draw the same on all of them, by one seed"
            )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of this rank's rows, so scaled that the average of gradients over all ranks is the gradient of the whole."""
        config = self.accelerator.unwrap_model(model).config
        batch = Batch.prepare(inputs, self.cp_group, config, num_items=num_items_in_batch, **self._plan_arguments)
        outputs = model(**batch.inputs)
        ranks = self.args.world_size
        counts_all = self.args.average_tokens_across_devices and num_items_in_batch is not None
        loss = outputs["loss"] * (ranks if counts_all else ranks // self._replicas)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of a batch alone."""
        placed = {name: x.to(self.args.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, placed)
        return loss.detach().mean(), None, None


class _Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        """Another order."""
        for part in (self.sampler, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


class _Taking:
    """A collator that is given some columns of each example alone."""

    def __init__(self, collate: Callable[[list[Any]], Any], columns: set[str]) -> None:
        self._collate, self._columns = collate, columns

    def __call__(self, examples: list[Any]) -> Any:
        return self._collate([self._taken(example) for example in examples])

    def _taken(self, example: Any) -> Any:
        if not isinstance(example, Mapping):
            return example
        return {name: value for name, value in example.items() if name in self._columns}


def _share_of(
    dataset: IterableDataset[Any], batch_size: int, drop_last: bool, replicas: int, replica: int, seed: int
) -> IterableDataset[Any]:
    """A replica's batches of an iterable dataset: in turns, as many for each."""
    from transformers.trainer_pt_utils import IterableDatasetShard

    return IterableDatasetShard(dataset, batch_size, drop_last, replicas, replica, seed)


def _digest(batches: list[Any]) -> int:
    """Of all tensors of some batches."""
    digest = 0
    for batch in batches:
        for name in sorted(batch):
            value = batch[name]
            if isinstance(value, torch.Tensor):
                elements = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
                digest = zlib.crc32(elements.numpy().tobytes(), zlib.crc32(f"{name} {list(value.shape)}".encode(), digest))
    return digest


def _made(group: Any, device: torch.device) -> _Group:
    from counterpoint.processes import Group

    if group is None and not dist.is_initialized():
        return LocalGroup(1, device=device)
    return Group(group)


def _replica(ranks: tuple[int, ...], size: int, world: int) -> int:
    """Which replica a group is, of groups of neighbouring ranks or of ranks equally far apart."""
    first = ranks[0]
    if size == 1 or ranks == tuple(range(first, first + size)):
        return first // size
    replicas = world // size
    if ranks == tuple(range(first, world, replicas)):
        return first
    raise PlanError(
        f"the ranks of cp_group are {list(ranks)} of {world}: they must be neighbours, or equally far apart, so that all groups "
        "are replicas of each other"
    )
