"""Models of Hugging Face's transformers: `register()`, then `attn_implementation="counterpoint"`.

With ranks, prepare a batch and call `model(**batch.inputs)`, which hands the plan to every layer as `counterpoint=plan`; models
that do not pass keywords on run inside `plan.active()`. Without a plan the same layers compute on this device alone.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from counterpoint._native import Mask
from counterpoint.batch import Batch
from counterpoint.errors import MaskError, MissingLibraryError, PlanError, TensorError
from counterpoint.fitting import accumulator
from counterpoint.functional import flex_attention
from counterpoint.layers import layer_attention, windowed
from counterpoint.lookup import active_plan
from counterpoint.plan import Plan

if TYPE_CHECKING:
    from counterpoint.trainer import TrainerMixin

__all__ = ["Batch", "TrainerMixin", "attention_forward", "prepare_batch", "register", "windowed"]

NAME = "counterpoint"
# Keywords that models hand to attention and that change nothing in it.
_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "layer_idx", "seq_idx"),
    *("max_length_q", "max_length_k", "num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "return_dict"),
    *("output_hidden_states", "output_router_logits", "token_type_ids", "mm_token_type_ids", "deterministic"),
}
_MOST_DENSE = 1 << 28
_ignored: set[str] = set()
# Plans by which modules ran inside `Plan.active`.
_ran_under: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Plan]] = weakref.WeakKeyDictionary()

prepare_batch = Batch.prepare


def register(*, ignore: tuple[str, ...] = ()) -> None:
    """Makes `attn_implementation="counterpoint"` known to transformers. May be called again.

    `ignore` names further keywords that a model hands to its attention and that change nothing in it.
    """
    library = _library()
    _ignored.update(ignore)
    library.AttentionInterface.register(NAME, attention_forward)
    library.AttentionMaskInterface.register(NAME, _described)


def _library() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingLibraryError(f"counterpoint.transformers needs transformers ({error}); pip install transformers") from error
    if not hasattr(library, "AttentionMaskInterface"):
        raise MissingLibraryError(
            f"transformers is {library.__version__}; counterpoint needs 5 or newer, whose attention is pluggable"
        )
    return library


@dataclass(frozen=True, eq=False)
class _Described:
    """A mask as a model asks transformers for it, not built: a plan has its own."""

    arguments: dict[str, Any]
    made: dict[str, Any] = field(default_factory=dict)
    # As a mask that is built has them: `generate` makes one for a static cache, which the model looks at.
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """`[sequences, 1, queries, keys]`."""
        return torch.Size([self.arguments["batch_size"], 1, self.arguments["q_length"], self.arguments["kv_length"]])

    @property
    def padding(self) -> torch.Tensor | None:
        """`attention_mask [sequences, tokens]` of the batch."""
        found: torch.Tensor | None = self.arguments.get("attention_mask")
        return found

    @property
    def window(self) -> int | None:
        """Tokens of the sliding window or chunk."""
        found: int | None = self.arguments.get("local_size")
        return found

    @property
    def has_rules_of_its_own(self) -> bool:
        """Whether the model adds a function to the mask, such as images whose tokens see each other."""
        return bool(self.arguments.get("use_vmap"))

    def tensor(self) -> torch.Tensor | None:
        """The mask as SDPA takes it."""
        if "sdpa" not in self.made:
            self.made["sdpa"] = _library().masking_utils.sdpa_mask(**self.arguments)
        found: torch.Tensor | None = self.made["sdpa"]
        return found

    def is_causal_and_padded(self, window: int | None) -> bool:
        """Whether a query sees the tokens up to its own that are no padding, of a window at most, and nothing else hides any."""
        if self.padding is None or self.has_rules_of_its_own or self.window not in (None, window):
            return False
        given = self.arguments
        first, keys = given["q_offset"], given["kv_length"]
        whole = isinstance(first, int) and first + given["q_length"] == keys and given["kv_offset"] == 0
        return whole and tuple(self.padding.shape) == (given["batch_size"], keys)

    def causal_mask(self, window: int | None) -> Mask:
        """The same, of all sequences, one after the other."""
        name = f"causal {window}"
        if name not in self.made:
            self.made[name] = _padded(self.arguments["attention_mask"], self.arguments["q_offset"], window)
        found: Mask = self.made[name]
        return found

    def mask(self) -> Mask:
        """The mask of all sequences, one after the other."""
        if "mask" not in self.made:
            pairs = self.arguments["batch_size"] * self.arguments["q_length"] * self.arguments["kv_length"]
            if pairs > _MOST_DENSE:
                raise MaskError(
                    f"the model's mask has {pairs:,} pairs, too many to build here: prepare the batch with "
                    "counterpoint.Batch.prepare, which needs documents alone"
                )
            never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            dense = _library().masking_utils.sdpa_mask(**{**self.arguments, **never})
            self.made["mask"] = _of_tensor(dense)
        found: Mask = self.made["mask"]
        return found


def _described(*given: Any, **arguments: Any) -> _Described | None:
    """What transformers calls to build a mask. None where it is causal and nothing more."""
    names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")
    # `torch.compile` of PyTorch 2.8 takes no other lists than of one length.
    arguments = {**dict(zip(names[: len(given)], given, strict=True)), **arguments}
    if not torch.compiler.is_compiling():
        kind: Any = type(arguments.get("config"))
        _refuse_attention_of_its_own(kind)
    padding = arguments.get("attention_mask")
    if isinstance(padding, _Described):
        # What `generate` asked for, before it called the model.
        return padding
    for offset in ("q_offset", "kv_offset"):
        if isinstance(arguments.get(offset), torch.Tensor):
            # A cache's own counter, which goes on before the mask is made.
            arguments[offset] = int(arguments[offset])
    if isinstance(padding, torch.Tensor) and padding.ndim == 2 and bool(padding.all()):
        # Tokenizers give one of ones. One look at it a forward, as flash_attention_2 has.
        arguments["attention_mask"] = None
    described = _Described(arguments)
    plain = described.padding is None and described.window is None and arguments.get("allow_is_causal_skip", False)
    return None if plain and arguments["q_length"] == arguments["kv_length"] else described


@functools.cache
def _refuse_attention_of_its_own(config: Any) -> None:
    """Refuses a model of transformers that asks for masks and calls no attention but its own, such as Bloom: masks are not built
    here, so it would see all keys."""
    package, _, name = config.__module__.rpartition(".configuration_")
    modelling = sys.modules.get(f"{package}.modeling_{name}") if package.startswith("transformers.models.") else None
    if modelling is None or hasattr(modelling, "ALL_ATTENTION_FUNCTIONS"):
        return
    if not any(getattr(found, "_supports_attention_backend", False) is True for found in vars(modelling).values()):
        raise NotImplementedError(
            f"models of {config.__name__} compute attention by themselves, whatever attn_implementation says: load them with "
            '"eager"'
        )


def _padded(seen: torch.Tensor, offset: int, window: int | None) -> Mask:
    """Causal, of `[sequences, keys]` the keys that are not 0. Queries are those from `offset` on, and see a window at most."""
    sequences, keys = seen.shape
    queries = keys - offset
    edges = torch.nn.functional.pad((seen != 0).to("cpu", torch.int8), (1, 1)).diff(dim=1)
    runs = zip((edges > 0).nonzero().tolist(), (edges < 0).nonzero().tolist(), strict=True)
    q_ranges, k_ranges, types = [], [], []
    for (sequence, begin), (_, end) in runs:
        for (first, last), (low, high), kind in _bands(begin, end, keys, window or 2 * keys):
            # Without the rows before the first query. A lower diagonal begins at the first row's first key.
            cut = max(offset - first, 0)
            low += cut if kind in ("inv_causal", "bi_causal") else 0
            if first + cut < last and low < high:
                q_ranges.append([row - offset + sequence * queries for row in (first + cut, last)])
                k_ranges.append([low + sequence * keys, high + sequence * keys])
                types.append(kind)
    return Mask.from_slices(q_ranges, k_ranges, types, seqlen_q=sequences * queries, seqlen_k=sequences * keys)


def _bands(begin: int, end: int, rows: int, window: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Rows, keys and type of the slices in which rows from `begin` to `rows` see keys from `begin` to `end`: up to their own, of
    the last `window`."""
    # The first row that does not see all of the run any more, and the first that sees nothing.
    full, last = begin + window - 1, min(end + window - 1, rows)
    if full < end:
        yield (begin, full), (begin, full), "causal"
        yield (full, end), (begin, end), "bi_causal"
        yield (end, last), (end - window + 1, end), "inv_causal"
    else:
        yield (begin, end), (begin, end), "causal"
        yield (end, min(full, rows)), (begin, end), "full"
        yield (full, last), (begin, end), "inv_causal"


def _of_tensor(mask: torch.Tensor) -> Mask:
    """From `[sequences, 1, queries, keys]`: booleans, or numbers that are added, of which the lowest hide."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise MaskError(f"attention_mask is {list(mask.shape)}; it must be the same for all heads: [sequences, 1, queries, keys]")
    seen = mask[:, 0]
    if seen.dtype != torch.bool:
        hidden = seen <= torch.finfo(seen.dtype).min / 2
        if not ((seen == 0) | hidden).all():
            raise NotImplementedError("attention_mask adds biases to logits, which counterpoint does not compute; only masks")
        seen = ~hidden
    return Mask.from_dense(torch.block_diag(*seen.int().unbind()).bool())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    counterpoint: Plan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: `[sequences, heads, tokens, elements]` in, `[sequences, tokens, heads, elements]` out."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plan = _plan_of(module, counterpoint)
    if plan is not None and not causal and not (plan.q_rows == query.shape[2] and _sees_ahead(plan)):
        plan = None  # another tower, of images for example
    starts = others.pop("cu_seq_lens_q", None), others.pop("cu_seq_lens_k", None)
    positions = others.get("position_ids")
    _refuse_what_is_unknown(others, dropout)
    if plan is None and not causal and starts[0] is None:
        return _without_us(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux)
    layer = _Layer(query, key, value, scaling, softcap or 0.0, sliding_window, s_aux)
    if plan is None:
        return layer.alone(layer.mask(attention_mask, causal, starts, positions)), None
    return layer.planned(plan, attention_mask), None


def _plan_of(module: torch.nn.Module, given: Any) -> Plan | None:
    if given is not None:
        if not isinstance(given, Plan):
            raise PlanError(
                f"counterpoint={given!r} was given to the model; it is a plan, as Group.plan or Batch.prepare makes it"
            )
        return given
    plan = active_plan()
    if plan is not None:
        _ran_under[module] = weakref.ref(plan)
    elif torch.is_grad_enabled() and module.training and (before := _ran_under.get(module)) is not None and before() is not None:
        raise PlanError(
            "this layer ran inside plan.active() before, and runs without a plan now: where layers are recomputed (activation "
            "checkpointing), the backward must be inside too; or pass the plan to the model as counterpoint=plan"
        )
    return plan


def _refuse_what_is_unknown(others: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise NotImplementedError(
            f"dropout of attention is {dropout}, which counterpoint does not compute; set attention_dropout=0"
        )
    for name, value in others.items():
        harmless = name in _WITHOUT_EFFECT or name in _ignored or value is None or value is False
        if not harmless:
            raise NotImplementedError(
                f"the model hands {name}={value if isinstance(value, (int, float, str)) else type(value).__name__} to its "
                f"attention, which counterpoint does not know; if it changes nothing there, register(ignore=({name!r},))"
            )


_last_starts: tuple[weakref.ref[torch.Tensor], int, int, list[int]] | None = None


def _starts_of(positions: torch.Tensor, sequences: int) -> list[int]:
    """Cumulative starts of documents, which begin where positions do not go on by 1. Kept for the layers of a model, but under
    `torch.inference_mode`, where tensors do not count their changes."""
    global _last_starts
    is_counted = not positions.is_inference()
    if _last_starts is not None and is_counted:
        tensor, version, count, starts = _last_starts
        if tensor() is positions and version == positions._version and count == sequences:
            return starts
    rows = positions.to("cpu").expand(sequences, -1)
    begins = torch.ones(rows.shape, dtype=torch.bool)
    begins[:, 1:] = rows.diff(dim=1) != 1
    starts = [*begins.flatten().nonzero().flatten().tolist(), rows.numel()]
    if is_counted:
        _last_starts = (weakref.ref(positions), positions._version, sequences, starts)
    return starts


def _without_us(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Modules that are not causal, as of images: by SDPA."""
    for name, value_of in (("softcap", softcap), ("s_aux", sink)):
        if value_of is not None:
            raise NotImplementedError(f"{name} is given to a layer that is not causal, which PyTorch's attention cannot compute")
    if isinstance(attention_mask, _Described):
        attention_mask = attention_mask.tensor()
    elif attention_mask is None and sliding_window is not None:
        raise NotImplementedError("sliding_window is given to a layer that is not causal, without a mask that has it")
    sdpa = _library().AttentionInterface()["sdpa"]
    found = sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False)
    return found[0], None


@dataclass(frozen=True, eq=False)
class _Layer:
    """The tensors of one layer, and how they are computed."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    softcap: float
    window: int | None
    s_aux: torch.Tensor | None

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[sequences * tokens, heads, elements]`; of one sequence, views."""
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (self.query, self.key, self.value))
        return q, k, v

    def _sink(self) -> torch.Tensor | None:
        if self.s_aux is None:
            return None
        return self.s_aux.reshape(1, -1).to(accumulator(self.query.dtype))

    def mask(self, given: Any, causal: bool, starts: tuple[Any, Any], positions: Any) -> Mask:
        """What this device alone computes. Documents, where there is nothing else, are those of `starts` or `positions`."""
        sequences, queries, keys = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if isinstance(given, torch.Tensor):
            return _of_tensor(given.expand(sequences, *given.shape[1:])[..., :keys])
        simple = given is None or (
            given.padding is None and not given.has_rules_of_its_own and given.window in (None, self.window)
        )
        if simple and starts[0] is not None:
            if self.window is not None and not causal:
                raise NotImplementedError(
                    "a layer that is not causal has a sliding window, whose ends no two libraries count alike"
                )
            return Mask.varlen(starts[0], starts[1], causal=causal, window=((self.window or 0) - 1, 0 if causal else -1))
        if simple and queries == keys and isinstance(positions, torch.Tensor) and positions.ndim == 2:
            documents = _starts_of(positions, sequences)
            return Mask.varlen(documents, causal=True, window=((self.window or 0) - 1, 0))
        if given is not None:
            described: _Described = given
            padded = causal and described.is_causal_and_padded(self.window)
            return described.causal_mask(self.window) if padded else described.mask()
        each_q, each_k = (torch.arange(sequences + 1) * length for length in (queries, keys))
        return Mask.varlen(each_q, each_k, causal=True, window=((self.window or 0) - 1, 0))

    def alone(self, mask: Mask) -> torch.Tensor:
        """On this device."""
        q, k, v = self._rows()
        out, _ = flex_attention(q, k, v, mask, sink=self._sink(), scale=self.scale, softcap=self.softcap)
        rows: torch.Tensor = out.unflatten(0, (self.query.shape[0], self.query.shape[2]))
        return rows

    def planned(self, plan: Plan, given: Any) -> torch.Tensor:
        """On the ranks of a plan."""
        _check_with_a_plan(plan, given, self.window)
        sequences, _, rows, _ = self.query.shape
        if sequences != 1:
            raise TensorError(
                f"the layer has {sequences} sequences; with a plan all are one: counterpoint.Batch.prepare packs them"
            )
        if self.key.shape[2] != rows:
            raise NotImplementedError(
                f"the layer has {rows} queries and {self.key.shape[2]} keys, as with a cache; a plan trains and prefills: "
                "use_cache=False"
            )
        if rows != plan.q_rows:
            raise TensorError(f"the layer has {rows} rows, and the plan {plan.q_rows}: dispatch the inputs by this plan")
        q, k, v = self._rows()
        out = layer_attention(q, k, v, plan, scale=self.scale, softcap=self.softcap, window=self.window, sink=self._sink())
        return out.unsqueeze(0)


def _check_with_a_plan(plan: Plan, given: Any, window: int | None) -> None:
    """A plan has the whole mask; what else comes with it must say nothing more."""
    if given is None:
        return
    if isinstance(given, _Described):
        if given.padding is not None:
            raise MaskError("attention_mask is given with a plan, whose mask has the padding already: leave it out")
        if given.has_rules_of_its_own and plan._is_of_documents:
            raise NotImplementedError(
                "the model adds a rule of its own to the mask, as for the tokens of images, which a plan of documents does not "
                "have: give the whole mask to Batch.prepare(mask=...)"
            )
        if given.window is None or given.window == window:
            return
        raise NotImplementedError(
            f"the layer's mask is cut into chunks of {given.window} tokens, which counterpoint's hook does not know"
        )
    shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
    raise MaskError(f"attention_mask ({shape}) is given with a plan, which has a mask of its own: leave it out")


def _sees_ahead(plan: Plan) -> bool:
    """Whether a query sees a key behind it."""
    bounded = ("causal", "bi_causal")
    return any(k[1] - (q[1] if kind in bounded else q[0] + 1) > 0 for q, k, kind in plan.mask.slices)


def __getattr__(name: str) -> Any:
    if name == "TrainerMixin":
        return importlib.import_module("counterpoint.trainer").TrainerMixin
    raise AttributeError(f"module 'counterpoint.transformers' has no attribute {name!r}")
