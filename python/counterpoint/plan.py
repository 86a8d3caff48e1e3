"""Plans: who owns which rows, what each rank computes and receives, and how tensors get from one order into the other."""

from __future__ import annotations

import contextlib
import html
import itertools
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from counterpoint._native import Calls, Mask, Solution, StepTables, Timeline
from counterpoint.errors import Error, PlanError, TensorError
from counterpoint.figures import Choices, PlanSummary, Timelines
from counterpoint.fitting import Fitting, accumulator, maker
from counterpoint.lookup import activated, numbered
from counterpoint.plan_arguments import dtype_name
from counterpoint.recent import Recent
from counterpoint.report import Report

if TYPE_CHECKING:
    import torch

    from counterpoint.group import _Group

Role = Literal["q", "k"]


# Plans that are derived from one.
_KEPT = 64


class Plan:
    """A mask planned for the ranks of a group; made by `Group.plan`.

    Local rows are those of this process's ranks, one rank after the other: of one rank under `Group`, of all under `LocalGroup`.
    A plan without its group (after pickling) can still dispatch, and show itself.
    """

    def __init__(
        self,
        solution: Solution,
        arguments: dict[str, Any],
        sink_grad: str,
        tokens: tuple[int, int],
        *,
        keeps_dispatch: bool,
        rank: int | None = None,
    ) -> None:
        self._solution = solution
        self._arguments = arguments
        self._sink_grad = sink_grad
        self._tokens = tokens
        self._group: _Group | None = None
        self._rank = rank
        # Whether it was made on another plan's.
        self._keeps_dispatch = keeps_dispatch
        self._measured: dict[bool, Timeline] = {}
        self._indices: dict[tuple[Role, bool, str], Any] = {}
        self._on: Recent[Any, Plan] = Recent(_KEPT)
        # What the transformers hook keeps: masks of sliding windows, and whether the mask is that of a batch's documents.
        self._windows: dict[int, Mask] = {}
        self._layers: Recent[Any, Plan] = Recent(_KEPT)
        self._is_of_documents = False
        self._calls: Calls | None = None
        # Of those that give max logits, or take a gradient of lse.
        self._asking_calls: dict[tuple[bool, bool], Calls] = {}
        self._fitting: Fitting | None = None
        # Whether a graph of PyTorch's replays collectives of its rows.
        self._moves_rows_in_graphs = False
        self._handle = numbered(self)

    def _ready(self, stream: int | None, tables: StepTables | None = None) -> Calls:
        """What its calls are made with: made ready once, for as long as the plan lives."""
        calls = self._calls
        if calls is None:
            with self.group._named_errors():
                calls = self.group._native.prepare(self._solution, stream=stream, tables=tables)
            self._calls = calls
        return calls

    def _asking(self, stream: int | None, *, max_logits: bool = False, dlse: bool = False) -> Calls:
        """The same for calls that give max logits, or take a gradient of lse: made ready when the first of them comes."""
        if not (max_logits or dlse):
            return self._ready(stream)
        calls = self._asking_calls.get((max_logits, dlse))
        if calls is None:
            solution = self._solution.asking(max_logits=max_logits, dlse=dlse)
            with self.group._named_errors():
                calls = self._asking_calls[max_logits, dlse] = self.group._native.prepare(solution, stream=stream)
        return calls

    def _measured_calls(self, *, max_logits: bool = False, dlse: bool = False) -> Calls:
        solution = self._solution.asking(max_logits=max_logits, dlse=dlse)
        with self.group._named_errors():
            return self.group._native.prepare_measured(solution)

    def _fits(self) -> Fitting:
        """What tensors it takes."""
        fitting = self._fitting
        if fitting is None:
            import torch

            given, dtype, group = self._arguments, self._dtype, self.group
            heads = given["heads"]
            heads_q, heads_k = (heads, heads) if isinstance(heads, int) else heads
            head_dim, head_dim_v = given["head_dim"], given["head_dim_v"] or given["head_dim"]
            q, k, v = (self.q_rows, heads_q, head_dim), (self.k_rows, heads_k, head_dim), (self.k_rows, heads_k, head_dim_v)
            out, lse = (self.q_rows, heads_q, head_dim_v), (self.q_rows, heads_q)
            statistic = accumulator(dtype)
            place = torch.device(group.device)
            fitting = self._fitting = Fitting(
                q=q,
                k=k,
                v=v,
                sink=(given["sink_rows"], heads_q) if given["sink_rows"] else None,
                out=out,
                lse=lse,
                dtype=dtype,
                statistic=statistic,
                ordinal=group._ordinal,
                stream=group._stream,
                new_q=maker(q, dtype, place),
                new_k=maker(k, dtype, place),
                new_v=maker(v, dtype, place),
                new_out=maker(out, dtype, place),
                new_lse=maker(lse, statistic, place),
            )
        return fitting

    def _bound_to(self, group: _Group) -> Plan:
        self._group, self._rank = group, group._native.rank
        # Counted here: `torch.compile` looks into neither the engine nor the lock of `cached_property` before Python 3.12.
        _ = self.q_rows, self.k_rows
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._solution.to_bytes(), self._arguments, self._sink_grad, self._tokens, self._keeps_dispatch, self._rank)
        return _restored, state

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A copy of what holds a plan has the same one, on the same ranks."""
        return self

    def __copy__(self) -> Plan:
        return self

    @property
    def handle(self) -> int:
        """The number by which compiled operators know the plan."""
        return self._handle

    @property
    def group(self) -> _Group:
        """The group that it was made by."""
        if self._group is None:
            raise PlanError(
                "this plan has no group, as after pickling; give it to Group.prefetch, or make it by Group.plan, to compute"
            )
        return self._group

    @property
    def mask(self) -> Mask:
        """The mask, with the rows of padding that `even=True` adds."""
        return self._solution.mask

    @property
    def _given_mask(self) -> Mask:
        """The mask without the rows of padding that `even=True` adds."""
        mask = self.mask
        if (mask.seqlen_q, mask.seqlen_k) == self._tokens:
            return mask
        q, k, types = zip(*mask.slices, strict=True) if mask.slices else ((), (), ())
        return Mask.from_slices(list(q), list(k), list(types), seqlen_q=self._tokens[0], seqlen_k=self._tokens[1])

    @property
    def deterministic(self) -> bool:
        """Whether gradients have the same bits every time."""
        return self._solution.deterministic

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return self._solution.chunk

    @cached_property
    def _dtype(self) -> torch.dtype:
        import torch

        made: torch.dtype = getattr(torch, dtype_name(self._arguments["dtype"]))
        return made

    @property
    def fingerprint(self) -> str:
        """Equal for equal plans, in every process."""
        return self._solution.fingerprint

    def _ranks_here(self) -> range:
        return range(self._solution.ranks) if self._rank is None else range(self._rank, self._rank + 1)

    def _ranges(self, rank: int, role: Role) -> list[tuple[int, int]]:
        return self._solution.ranges(rank, role)

    def rows_of(self, rank: int, role: Role = "q") -> int:
        """Rows of a rank."""
        return sum(end - start for start, end in self._ranges(rank, role))

    @property
    def sizes(self) -> list[int]:
        """Query rows of every rank, in the order of ranks."""
        return [self.rows_of(rank) for rank in range(self._solution.ranks)]

    @cached_property
    def q_rows(self) -> int:
        """Local query rows."""
        return sum(self.rows_of(rank) for rank in self._ranks_here())

    @cached_property
    def k_rows(self) -> int:
        """Local key rows."""
        return sum(self.rows_of(rank, "k") for rank in self._ranks_here())

    def _local_ranges(self, role: Role) -> list[tuple[int, int]]:
        return [pair for rank in self._ranks_here() for pair in self._ranges(rank, role)]

    @property
    def position_ids(self) -> torch.Tensor:
        """The global row of every local query row, [q_rows], int64: what rotary embeddings take."""
        return self._index("q").clone()

    @property
    def k_position_ids(self) -> torch.Tensor:
        """Likewise of local key rows."""
        return self._index("k").clone()

    @property
    def cu_seqlens_local(self) -> list[int]:
        """Cumulative starts of the runs of neighbouring global rows among the local query rows."""
        return [0, *itertools.accumulate(end - start for start, end in self._local_ranges("q"))]

    def _index(self, role: Role, *, inverse: bool = False, device: Any = "cpu") -> torch.Tensor:
        import torch

        key = (role, inverse, str(device))
        if key not in self._indices:
            parts = [torch.arange(start, end) for start, end in self._local_ranges(role)]
            index = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            self._indices[key] = (index.argsort() if inverse else index).to(device)
        made: torch.Tensor = self._indices[key]
        return made

    def _total(self, role: Role) -> int:
        return self.mask.seqlen_q if role == "q" else self.mask.seqlen_k

    def _given(self, role: Role) -> int:
        return self._tokens[0 if role == "q" else 1]

    def dispatch(self, x: torch.Tensor, dim: int = 0, role: Role = "q", pad_value: float = 0) -> torch.Tensor:
        """The local rows of a tensor that has all rows along `dim`. The backward gathers: every rank gets all of the gradient."""
        from counterpoint import rows

        return rows.dispatch(self, x, dim, _role(role), pad_value)

    def undispatch(self, x: torch.Tensor, dim: int = 0, role: Role = "q", grad: Literal["take", "sum"] = "take") -> torch.Tensor:
        """All rows from the local ones, on every rank; the inverse of `dispatch`. Collective.

        The backward takes this rank's rows of the gradient; with `grad="sum"`, of the gradients of all ranks added up, for a loss
        of which every rank computes another part.
        """
        from counterpoint import rows

        return rows.undispatch(self, x, dim, _role(role), grad)

    def roll(self, x: torch.Tensor, shift: int, dim: int = 0) -> torch.Tensor:
        """As `torch.roll` of the whole sequence by `shift` rows, of dispatched rows. Collective."""
        from counterpoint import rows

        return rows.roll(self, x, shift, dim)

    def on(self, mask: Mask, **changes: Any) -> Plan:
        """Another mask on this plan's dispatch. The last 64 are kept: a layer with a window asks for one at every step."""
        if isinstance(changes.get("heads"), list):
            changes["heads"] = tuple(changes["heads"])
        key = (mask, tuple(sorted(changes.items())))
        known = self._on.get(key)
        if known is None:
            arguments = {**self._arguments, "deterministic": self.deterministic, **changes, "on": self}
            known = self._on.put(key, self.group.plan(mask, **arguments))
        return known

    def active(self) -> contextlib.AbstractContextManager[Plan]:
        """Inside it, attention layers that were given no plan take this one: for models that do not pass keywords on.

        Backwards that recompute layers must lie inside of it too; `counterpoint=plan` as a keyword has no such rule.
        """
        return activated(self)

    def update_graph(self, graph: torch.cuda.CUDAGraph, new: Plan) -> None:
        """Has a captured graph compute `new` wherever it computed this plan: captured once, a step is replayed with other masks.

        `graph` was made with `keep_graph=True` and captured calls of this plan, or was updated to it; `new` is of the same
        group, for tensors of the same shapes. Replays that are on their way are not changed. Call it on the stream that
        replays, while no other thread does; `graph.instantiate()` brings the plan back that was captured. On several ranks
        every rank updates its own graph, and `new` has been called once, forward and backward. Plans with `stages=0`, on ranks
        with multiples of 128 rows, have the same operations for all masks, as an update needs.
        """
        from counterpoint.graphs import update_graph

        update_graph(graph, self, new)

    def summary(self) -> PlanSummary:
        """The plan in figures."""
        return PlanSummary.from_json(self._solution.summary_json())

    @cached_property
    def choices(self) -> Choices:
        """What was chosen where `dispatch` and `overlap` left it open, and from what."""
        return Choices.from_json(self._solution.choices_json())

    def predict(self) -> Timelines:
        """What the simulator expects on the group's GPUs; for CPU ranks, on as many H200s."""
        return Timelines(*self._solution.predict())

    def timeline(self) -> Timelines:
        """Measured by the last calls inside `counterpoint.profile()`."""
        if False not in self._measured:
            raise Error("nothing is measured yet: call attention with this plan inside counterpoint.profile()")
        return Timelines(self._measured[False], self._measured.get(True))

    def report(self, path: str | os.PathLike[str] | None = None, *, title: str = "Plan of distributed attention") -> Report:
        """The report as one HTML page: mask, balance, who sends to whom, timelines. Written to `path` if that is given."""
        chosen = self.choices.rows()
        given = ((name, value) for name, value in self._arguments.items() if name not in dict(chosen))
        setup = [*((name, str(value)) for name, value in given if value is not None), *chosen]
        page = self._solution.html(
            title, [("ranks", str(self._solution.ranks)), *setup], self._measured.get(False), self._measured.get(True)
        )
        measured = self._measured.get(False)
        report = Report(page, title, lambda: measured or self._solution.predict()[0])
        if path is not None:
            report.save(path)
        return report

    def __repr__(self) -> str:
        q, k = self.mask.seqlen_q, self.mask.seqlen_k
        ranks, chunk = self._solution.ranks, self.chunk
        return f"Plan({q} queries x {k} keys, ranks={ranks}, chunk={chunk}, balance={self.summary().balance:.3f})"

    def _repr_html_(self) -> str:
        summary = self.summary()
        right = 'style="text-align:right;padding:2px 10px"'
        names = ("rank", "tokens", "pairs", "receives", "sends", "stages")
        head = "".join(f"<th {right}>{name}</th>" for name in names)
        rows = (
            (rank.rank, rank.tokens, rank.area, rank.recv_tokens, rank.send_tokens, len(rank.stages))
            for rank in summary.ranks[:64]
        )
        body = "".join("<tr>" + "".join(f"<td {right}>{figure:,}</td>" for figure in row) + "</tr>" for row in rows)
        more = f"<p>… and {len(summary.ranks) - 64} more ranks</p>" if len(summary.ranks) > 64 else ""
        caption = html.escape(repr(self))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{caption}</p>{table}{more}{self._solution.svg(small=True)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": f"{self!r}\n{self._solution.table()}"}


def _role(role: str) -> Role:
    if role not in ("q", "k"):
        raise TensorError(f'role is {role!r}; it must be "q" or "k"')
    return "q" if role == "q" else "k"


def _restored(
    solution: bytes,
    arguments: dict[str, Any],
    sink_grad: str,
    tokens: tuple[int, int],
    keeps_dispatch: bool,
    rank: int | None,
) -> Plan:
    return Plan(Solution.from_bytes(solution), arguments, sink_grad, tokens, keeps_dispatch=keeps_dispatch, rank=rank)
