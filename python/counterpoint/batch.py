"""Batches: packed or padded sequences as one mask, and this process's rows of ids, positions and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from counterpoint._native import Mask
from counterpoint.errors import MaskError, TensorError

if TYPE_CHECKING:
    from counterpoint.group import _Group
    from counterpoint.plan import Plan

IGNORED = -100
# What describes the mask, or is made anew.
_CONSUMED = (
    *("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("position_ids", "labels", "shift_labels", "num_items_in_batch", "use_cache", "seq_idx"),
)


@dataclass(frozen=True)
class Batch:
    """A batch that is dispatched. `model(**batch.inputs)` runs a model of transformers on it.

    `labels [1, rows]` are shifted already: row i holds the token that row i predicts, -100 at the ends of documents and on
    padding. `num_items` counts the others in the whole batch, of all ranks. `shape` is (sequences, tokens) as they were given.
    """

    plan: Plan
    tensors: dict[str, Any]
    position_ids: torch.Tensor
    labels: torch.Tensor | None
    num_items: int
    shape: tuple[int, int]
    total_items: int | torch.Tensor | None = field(default=None, compare=False)

    @classmethod
    def prepare(
        cls,
        batch: Mapping[str, Any],
        group: _Group,
        config: Any = None,
        *,
        mask: Mask | None = None,
        windows: Mapping[int, Mask] | None = None,
        causal: bool = True,
        num_items: int | torch.Tensor | None = None,
        **plan: Any,
    ) -> Batch:
        """Plans and dispatches a batch, which all ranks of `group` give alike.

        Documents are those of `cu_seq_lens_q`, else they begin where `position_ids` do not go on by 1, else every sequence is
        one; `attention_mask [sequences, tokens]` marks padding, which sees nothing. Or `mask` is given, of all tokens of all
        sequences, one after the other, with `windows` for layers that have a sliding window (by its size), unless `mask` is of
        documents.

        `config` is a model's: it says how many heads there are, of what size and type, as far as `plan`, arguments of
        `Group.plan`, does not. `num_items` is what losses are divided by, if not by `num_items` of this batch: the items of all
        micro-batches and data-parallel ranks.
        """
        given = _Given.of(batch)
        made = group.plan(given.mask(causal) if mask is None else _fitting(mask, given), **_arguments(config, plan))
        made._is_of_documents = mask is None
        made._windows.update(windows or {})
        return given.dispatched(made, num_items)

    @classmethod
    def prefetch(cls, batch: Mapping[str, Any], group: _Group, config: Any = None, *, causal: bool = True, **plan: Any) -> None:
        """Plans a batch in a thread; `prepare` of the same batch, with the same arguments, takes the plan from there."""
        group.prefetch(_Given.of(batch).mask(causal), **_arguments(config, plan))

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is called with: the tensors, the plan, and what makes its loss this process's share of the whole."""
        inputs = {**self.tensors, "position_ids": self.position_ids, "use_cache": False, "counterpoint": self.plan}
        if self.labels is not None:
            items = self.num_items if self.total_items is None else self.total_items
            inputs |= {"labels": self.labels, "shift_labels": self.labels, "num_items_in_batch": items}
        return inputs

    def loss(self, logits: torch.Tensor, *, averaged_over: int = 1) -> torch.Tensor:
        """The cross-entropy of this process's rows, by the items of all: added up over ranks it is the mean of the whole batch.

        `averaged_over` is how many ranks a framework averages gradients over, as FSDP2 and DDP do over data-parallel x
        context-parallel ranks; the loss is multiplied by it.
        """
        if self.labels is None:
            raise TensorError("the batch had no labels, so it has no loss; give labels to Batch.prepare")
        items = self.num_items if self.total_items is None else self.total_items
        flat = logits.reshape(-1, logits.shape[-1]).float() if logits.dtype != torch.float64 else logits.flatten(0, -2)
        total = torch.nn.functional.cross_entropy(flat, self.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / items * averaged_over

    def undispatch(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, rows, ...]` of this process as `[sequences, tokens, ...]` of the whole batch, on every rank. Collective."""
        whole = self.plan.undispatch(x, dim=1)
        return whole.reshape(*self.shape, *whole.shape[2:])


@dataclass(frozen=True)
class _Given:
    """A batch as it was given, in one row."""

    batch: Mapping[str, Any]
    shape: tuple[int, int]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> _Given:
        tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor):
            raise TensorError("the batch has neither input_ids nor inputs_embeds; give one of them")
        if tokens.ndim < 2:
            raise TensorError(f"input_ids is {list(tokens.shape)}; it is [sequences, tokens]")
        made = cls(batch, (tokens.shape[0], tokens.shape[1]))
        for name, rows in (("attention_mask", 2), ("labels", 2), ("shift_labels", 2)):
            made._check(name, rows)
        made._check("position_ids", None)
        return made

    def _check(self, name: str, axes: int | None) -> None:
        tensor = self.batch.get(name)
        if tensor is None:
            return
        right = tuple(tensor.shape[-2:]) in (self.shape, (1, self.shape[1])) and (axes is None or tensor.ndim == axes)
        if name == "attention_mask" and tensor.ndim == 4:
            raise MaskError(
                f"attention_mask is {list(tensor.shape)}, queries by keys: give mask=counterpoint.Mask.from_dense(...), "
                "of all tokens of all sequences one after the other"
            )
        if not right:
            raise TensorError(
                f"{name} is {list(tensor.shape)}; input_ids has {self.shape[0]} sequences of {self.shape[1]} tokens"
            )

    def documents(self) -> torch.Tensor:
        """The number of its document for every token, -1 for padding; `[sequences * tokens]` on the CPU."""
        sequences, length = self.shape
        starts = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        starts[:, 0] = True
        cumulative, positions = self.batch.get("cu_seq_lens_q"), self.batch.get("position_ids")
        if cumulative is not None:
            begin = _starts(cumulative, sequences * length)
            starts.view(-1)[begin] = True
        elif positions is not None and positions.ndim == 2:
            positions = positions.to("cpu").expand(self.shape)
            starts[:, 1:] |= positions.diff(dim=1) != 1
        documents = starts.view(-1).cumsum(0) - 1
        padding = self.batch.get("attention_mask")
        if padding is not None:
            padding = padding.to("cpu").expand(self.shape).reshape(-1)
            if padding.dtype != torch.bool and not ((padding == 0) | (padding == 1)).all():
                raise MaskError(
                    "attention_mask has values other than 0 and 1; documents are known by position_ids or cu_seq_lens_q"
                )
            documents = documents.masked_fill(padding == 0, -1)
        return documents

    def mask(self, causal: bool) -> Mask:
        documents = self.documents()
        if not (documents >= 0).any():
            raise MaskError("attention_mask is 0 everywhere: the batch is padding alone; leave it out")
        return Mask.from_document_ids(documents, causal=causal)

    def positions(self) -> torch.Tensor:
        """`[..., 1, sequences * tokens]`."""
        given: torch.Tensor | None = self.batch.get("position_ids")
        device = self._tokens().device
        if given is not None:
            return given.expand(*given.shape[:-2], *self.shape).flatten(-2).unsqueeze(-2).to(device)
        if self.batch.get("cu_seq_lens_q") is None:
            return torch.arange(self.shape[1], device=device).repeat(1, self.shape[0])
        rows = self.shape[0] * self.shape[1]
        begin = torch.zeros(rows, dtype=torch.int64, device="cpu")
        starts = _starts(self.batch["cu_seq_lens_q"], rows)
        begin[starts] = starts
        return (torch.arange(rows, device="cpu") - begin.cummax(0).values).unsqueeze(0).to(device)

    def _tokens(self) -> torch.Tensor:
        tokens: torch.Tensor = self.batch["input_ids"] if self.batch.get("input_ids") is not None else self.batch["inputs_embeds"]
        return tokens

    def targets(self) -> torch.Tensor | None:
        """Labels of what each token predicts, `[1, sequences * tokens]`."""
        shifted: torch.Tensor | None = self.batch.get("shift_labels")
        labels: torch.Tensor | None = self.batch.get("labels")
        if shifted is not None:
            return shifted.expand(self.shape).reshape(1, -1)
        if labels is None:
            return None
        documents = self.documents().to(labels.device)
        flat = labels.expand(self.shape).reshape(-1)
        targets = torch.full_like(flat, IGNORED)
        goes_on = (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
        targets[:-1] = flat[1:].masked_fill(~goes_on, IGNORED)
        return targets.unsqueeze(0)

    def dispatched(self, plan: Plan, total_items: int | torch.Tensor | None) -> Batch:
        tensors = {}
        for name, value in self.batch.items():
            if name in _CONSUMED or value is None:
                continue
            of_tokens = isinstance(value, torch.Tensor) and value.ndim >= 2 and tuple(value.shape[:2]) == self.shape
            tensors[name] = plan.dispatch(value.reshape(1, -1, *value.shape[2:]), dim=1) if of_tokens else value
        positions, targets = self.positions(), self.targets()
        return Batch(
            plan=plan,
            tensors=tensors,
            position_ids=plan.dispatch(positions, dim=-1),
            labels=None if targets is None else plan.dispatch(targets, dim=1, pad_value=IGNORED),
            num_items=0 if targets is None else int((targets != IGNORED).sum()),
            shape=self.shape,
            total_items=total_items,
        )


def items_of(batch: Mapping[str, Any]) -> int:
    """What `Batch.num_items` will be."""
    targets = _Given.of(batch).targets()
    return 0 if targets is None else int((targets != IGNORED).sum())


def _starts(cumulative: Any, rows: int) -> torch.Tensor:
    """The first tokens of documents by their cumulative starts."""
    starts = torch.as_tensor(cumulative, dtype=torch.int64, device="cpu").flatten()
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != rows or (starts.diff() < 0).any():
        raise MaskError(
            f"cu_seq_lens_q is {starts.tolist()[:8]}…; it begins with 0, never falls, and ends with the {rows} tokens"
        )
    return starts[:-1][starts.diff() > 0]


def _fitting(mask: Mask, given: _Given) -> Mask:
    rows = given.shape[0] * given.shape[1]
    if (mask.seqlen_q, mask.seqlen_k) != (rows, rows):
        found = f"{mask.seqlen_q} queries and {mask.seqlen_k} keys"
        raise MaskError(f"mask is of {found}; the batch has {given.shape[0]} sequences of {given.shape[1]} tokens, {rows} in all")
    return mask


def _arguments(config: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Group.plan` of a model's configuration and of what is given with it."""
    if config is None:
        return dict(plan)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    dtype = getattr(text, "dtype", None) or torch.get_default_dtype()
    return {"heads": (heads, keys), "head_dim": head_dim, "dtype": dtype, **plan}
