"""Groups: the ranks that work together, all in this process."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from counterpoint._native import Cancellation, Mask, Ranks, Routing, _ask_experts, _make_experts
from counterpoint.errors import DeviceError, Error, PlanError
from counterpoint.lookup import numbered_group
from counterpoint.plan import Plan
from counterpoint.plan_arguments import (
    check_mask,
    dtype_name,
    evened,
    heads_of,
    is_deterministic,
    padded,
    planning_threads_of,
    scale_of,
    softcap_of,
    whole_number,
)
from counterpoint.prefetched import PrefetchedPlan
from counterpoint.tuned import TunedPlans, checked, read_tuned, warn_of_others

if TYPE_CHECKING:
    import torch

_PREFETCHED = 16
# Of a group in one process.
_MOST_RANKS = 4096


_engine_process: int | None = None


def begin_in_this_process() -> None:
    """Refuses a group in a fork of a process that has made one: the engine's threads are those of that process alone."""
    global _engine_process
    if _engine_process is None:
        _engine_process = os.getpid()
    elif _engine_process != os.getpid():
        raise Error(
            "this process was forked from one that has made groups, and a fork does not copy their threads; start workers with "
            "spawn, or make the first group in them"
        )


class PlanCacheInfo(NamedTuple):
    """What a group's cache of plans has done, as `functools.lru_cache` says it."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class _Group:
    """What groups of all kinds have in common: plans."""

    _native: Ranks
    _global_ranks: tuple[int, ...]
    device: Any
    # Of `device`, -1 for the CPU, as `Tensor.get_device` counts.
    _ordinal = -1
    # The handle of PyTorch's current stream there.
    _stream: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self) -> None:
        self._prefetched: dict[Any, PrefetchedPlan] = {}
        self._lock = threading.Lock()
        self._planner: ThreadPoolExecutor | None = None
        # Makes passes of layers of experts ready, which must not wait for plans.
        self._maker: ThreadPoolExecutor | None = None
        # Whether this process's caller has seen the error by which the group has failed.
        self._is_failure_known = False
        # Whether it is one of `counterpoint.alone`.
        self._is_alone = False
        self._ordered: tuple[torch.cuda.Stream, ...] = ()  # streams of other libraries, see `order_with`
        self._number = numbered_group(self)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._native.rank or 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._native.size

    @property
    def transport(self) -> str:
        """What moves rows between ranks: "memory" inside a process; "tcp" between processes on the CPU, on GPUs "nvlink",
        "copy-engine", "nccl" or "hierarchical"."""
        return self._native.transport

    def plan(
        self,
        mask: Mask,
        *,
        heads: int | tuple[int, int],
        head_dim: int,
        dtype: torch.dtype | str,
        head_dim_v: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_rows: int = 0,
        chunk: int | None = None,
        even: bool = False,
        dispatch: Literal["auto", "predicted", "affinity", "min-heap", "sequential", "zigzag"] = "auto",
        stages: str | int = "auto",
        queries: Literal["never", "auto", "fewest_bytes"] | None = None,
        overlap: str = "auto",
        deterministic: bool | None = None,
        sink_grad: Literal["share", "sum"] = "share",
        on: Plan | None = None,
    ) -> Plan:
        """Plans `mask` for the ranks of this group. Local: no rank is asked.

        `heads` is a number, or (of queries, of keys). `scale` is 1 / sqrt(head_dim) if it is not given. `even=True` adds rows of
        padding that see nothing, so that all ranks have equally many. `on` is another plan of this group, whose dispatch is kept.
        `sink_grad="share"` gives every rank a part of the gradient of `sink`, whose sum over ranks is the gradient (what
        frameworks that add up gradients of parameters expect); `"sum"` gives every rank all of it.

        `stages` says how many stages the work on keys of others is cut into, `"auto"` what is predicted to end first; one for
        both passes, or one for each: "forward=2,backward=4".

        `dispatch` says how chunks are given to ranks, `overlap` how communication runs under computation: a policy of the command
        line such as "kernel-barrier+sm-margin=8", or one for each pass, "forward=...,backward=...". `"predicted"` simulates all
        that there are and takes what ends first: 2 to 60 ms of one core for each mask, which `prefetch` spends in its thread.
        `"auto"` does so where a rank's forward and backward take 10 ms or longer on such GPUs, and else, as on one rank, takes
        "affinity" and "concurrent". `Plan.choices` and the report say what was chosen, and from what; either can be given to
        later plans: `dispatch=plan.choices.dispatch`.

        `queries` says whether rows of q that see many keys of other ranks travel to these: `"auto"` where that is predicted to be
        faster, the default with `dispatch="predicted"` on CPU ranks and by NVLink, else `"never"`: else calls wait for hosts.
        Ctrl-C, or whatever else a handler of a signal raises, ends the planning at once.
        """
        arguments: dict[str, Any] = {
            "heads": heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "head_dim_v": head_dim_v,
            "scale": scale,
            "softcap": softcap,
            "sink_rows": sink_rows,
            "chunk": chunk,
            "even": even,
            "dispatch": dispatch,
            "stages": stages,
            "queries": queries,
            "overlap": overlap,
            "deterministic": deterministic,
            "sink_grad": sink_grad,
            "on": on,
        }
        check_mask(mask)
        with self._lock:
            ahead = self._prefetched.pop(_key(mask, arguments), None) if self._prefetched else None
        if ahead is not None and not ahead.cancelled():
            with suppress(CancelledError):  # by another thread, just now
                return ahead.result()
        return self._solve(mask, arguments)

    def plan_cache_info(self) -> PlanCacheInfo:
        """How often `plan` and `prefetch` found a plan that the group had made from an equal mask and equal arguments. The last
        few are kept, in host memory alone: what calls need on a device is made ready for each `Plan` by itself."""
        return PlanCacheInfo(*self._native.plan_cache_info())

    def prefetch(self, mask: Mask, **arguments: Any) -> PrefetchedPlan:
        """Plans in a thread, and makes the plan ready there; `plan` with the same arguments takes it from there. What it returns
        can be cancelled. At most 16 wait to be taken; of more the oldest is cancelled."""
        check_mask(mask)
        complete = {**_DEFAULTS, **arguments}
        unknown = set(arguments) - set(_DEFAULTS) - {"heads", "head_dim", "dtype"}
        missing = {"heads", "head_dim", "dtype"} - set(arguments)
        if unknown or missing:
            what = f"no argument {sorted(unknown)[0]!r}" if unknown else f"{sorted(missing)[0]!r} is missing"
            raise TypeError(f"Group.prefetch takes the arguments of Group.plan: {what}")
        key = _key(mask, complete)
        with self._lock:
            if self._planner is None:
                self._planner = ThreadPoolExecutor(1, thread_name_prefix="counterpoint-plan")
            ahead = self._prefetched.get(key)
            if ahead is None or ahead.cancelled():
                ahead = PrefetchedPlan(functools.partial(self._solve_ahead, mask, complete), self._planner)
                self._prefetched[key] = ahead
            while len(self._prefetched) > _PREFETCHED:
                self._prefetched.pop(next(iter(self._prefetched))).cancel()
            return ahead

    def _make_ahead(self, layer: Any, routing: Routing, call: str) -> None:
        """Has a thread make a pass of a layer of experts ready, unless it was asked for. What fails fails again in the call."""
        if not _ask_experts(self._native, layer, routing, call):
            return
        with self._lock:
            if self._maker is None:
                self._maker = ThreadPoolExecutor(1, thread_name_prefix="counterpoint-ready")
            self._maker.submit(_make_experts, self._native, layer, routing, call)

    def _solve_ahead(self, mask: Mask, arguments: dict[str, Any], cancellation: Cancellation) -> Plan:
        plan = self._solve(mask, arguments, cancellation)
        plan._ready(None)
        return plan

    def _solve(self, mask: Mask, arguments: dict[str, Any], cancellation: Cancellation | None = None) -> Plan:
        from counterpoint._native import Solution

        given = dict(arguments)
        on: Plan | None = given.pop("on")
        if on is not None:
            self._check_dispatch_of(on)
        heads_q, heads_k = heads_of(given["heads"])
        head_dim = whole_number("head_dim", given["head_dim"], 1)
        head_dim_v = head_dim if given["head_dim_v"] is None else whole_number("head_dim_v", given["head_dim_v"], 1)
        sink_rows = whole_number("sink_rows", given["sink_rows"], 0)
        chunk = None if given["chunk"] is None else whole_number("chunk", given["chunk"], 1)
        softcap = softcap_of(given["softcap"])
        scale = head_dim**-0.5 if given["scale"] is None else scale_of(given["scale"])
        if not isinstance(given["even"], bool):
            raise PlanError(f"even is {given['even']!r}; it must be True or False")
        if given["sink_grad"] not in ("share", "sum"):
            raise PlanError(f'sink_grad is {given["sink_grad"]!r}; it must be "share" or "sum"')
        for name in ("dispatch", "queries", "overlap"):
            if not isinstance(given[name], str) and (name, given[name]) != ("queries", None):
                raise PlanError(f"{name} is {given[name]!r}; it must be a string")
        dtype = dtype_name(given["dtype"])
        if self._ordinal >= 0 and dtype not in ("bfloat16", "float16"):
            raise PlanError(f"dtype is {given['dtype']}; on GPUs attention computes in bfloat16 and float16, on the CPU in all")
        tokens = (mask.seqlen_q, mask.seqlen_k)
        if on is not None:
            mask = padded(mask, on.mask.seqlen_q, on.mask.seqlen_k) if tokens == on._tokens else mask
        elif given["even"]:
            mask, chunk = evened(mask, chunk, self.size)
        deterministic = is_deterministic(given["deterministic"])
        solution = Solution(
            mask,
            self._native,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            scale=scale,
            softcap=softcap,
            sink_rows=sink_rows,
            chunk=chunk,
            dispatch=given["dispatch"],
            stages=given["stages"],
            queries=given["queries"],
            overlap=given["overlap"],
            deterministic=deterministic,
            on=None if on is None else on._solution,
            cancellation=cancellation,
        )
        return Plan(solution, given, given["sink_grad"], tokens)._bound_to(self)

    def _plan_with(self, threads: int) -> None:
        if threads > 1:
            self._native.plan_with(threads)

    def _check_dispatch_of(self, on: Any) -> None:
        if not isinstance(on, Plan):
            raise PlanError(f"on must be a counterpoint.Plan, not a {type(on).__name__}")
        if on._solution.ranks != self.size:
            raise PlanError(
                f"on is a plan of {on._solution.ranks} ranks, and this group has {self.size}; plan with the group that made it"
            )
        # One without a group is a value, as after pickling.
        if on._group is not None and on._group is not self:
            raise PlanError(f"on is a plan of another group, {on._group!r}; this is {self!r}, whose ranks have other rows")

    def close(self) -> None:
        """Leaves the group, once all its ranks do. Calls from now on are errors. Happens by itself at the end of the process."""
        with self._lock:
            for ahead in self._prefetched.values():
                ahead.cancel()
        for threads in (self._planner, self._maker):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        with self._named_errors():
            self._native.close()

    def overlap_calls(self) -> None:
        """Has calls on different CUDA streams overlap, as micro-batches do: exchanges of one run while the other computes.
        For plans that are made ready from now on; the same on all ranks. Calls on one stream follow each other, and whoever
        uses one stream's results on another orders the two, as always with streams. Takes scratch memory twice."""
        with self._named_errors():
            self._native.overlap_calls()

    def order_with(self, stream: torch.cuda.Stream) -> None:
        """Has calls of this rank, and what another library enqueues on `stream`, follow each other from now on: a call begins
        once all that the stream was given before has ended, and what it is given later begins once the call has ended.

        For collectives under linear layers that compute and communicate in one kernel (`overlap="fused"`, or chosen). Such a
        kernel may hold all multiprocessors until those of other ranks run, and so may another library's collective: one first
        here, the other first there, and both wait until the limit. Name the stream on every rank, and enqueue both in one order
        on all of them. Where a library does not show its streams, such layers must not be fused: see `beside_collectives` of
        `Group`. Attention needs neither."""
        place = getattr(stream, "device", None)
        if not isinstance(getattr(stream, "cuda_stream", None), int) or place != self.device or self._ordinal < 0:
            on_cpu = "a CUDA stream, and this group is on the CPU"
            wanted = on_cpu if self._ordinal < 0 else f"a torch.cuda.Stream on {self.device}"
            raise DeviceError(f"stream is {stream!r}; order_with takes {wanted}")
        with self._named_errors():
            self._native.order_with(stream.cuda_stream)
        # PyTorch's own live as long as the process; an ExternalStream is its owner's.
        self._ordered = (*(one for one in self._ordered if one != stream), stream)

    def check(self) -> None:
        """Raises the group's first error, as far as it is known here; never waits. Calls on a GPU return before they have run:
        what goes wrong in one is raised by the next, or here."""
        with self._named_errors():
            self._native.check()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Inside it, an exception of this rank ends the group for all ranks, which hear its text from whatever they wait for."""
        try:
            yield
        except BaseException as error:
            self.fail(sentence(error))
            raise

    def fail(self, reason: str) -> None:
        """Ends the group for all ranks, which hear `reason`. A failed group is of no use; all ranks make a new one."""
        self._native.fail(reason)
        self._is_failure_known = True

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Inside it, errors of the engine are noted."""
        try:
            yield
        except BaseException as error:
            self._note(error)
            raise

    def _has_failed(self) -> bool:
        try:
            self._native.check()
        except Error:
            return True
        return False

    def _note(self, error: BaseException) -> None:
        """Gives an error of the engine, which counts ranks of the group, the ranks among all processes as well."""
        self._is_failure_known = self._is_failure_known or self._has_failed()
        own = self._native.rank
        if isinstance(error, Error) and error.global_rank is None and own is not None:
            error.rank = own if error.rank is None else error.rank
            error.global_rank = self._global_ranks[error.rank]
            if error.peer is not None:
                error.global_peer = self._global_ranks[error.peer]
            error.args = (_with_global_ranks(str(error), self._global_ranks),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, transport={self.transport!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        """A copy of a module is on the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a group cannot be pickled: it is connections of this process; make one in each process")


def sentence(error: BaseException) -> str:
    """An exception in words for other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_DEFAULTS: dict[str, Any] = {
    name: default for name, default in (_Group.plan.__kwdefaults__ or {}).items() if name not in ("heads", "head_dim", "dtype")
}


def _key(mask: Mask, arguments: dict[str, Any]) -> Any:
    heads, on = arguments["heads"], arguments["on"]
    named = tuple(heads) if isinstance(heads, list) else heads, dtype_name(arguments["dtype"]), None if on is None else on.handle
    return (mask, arguments["head_dim"], *named, *(arguments[name] for name in _DEFAULTS if name != "on"))


_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*(?: and \d+)?)")


def _with_global_ranks(message: str, global_ranks: tuple[int, ...]) -> str:
    """A sentence about ranks of a group, with their numbers among all processes where those are others."""
    if global_ranks == tuple(range(len(global_ranks))):
        return message
    found = {int(number) for ranks in _RANKS.findall(message) for number in re.findall(r"\d+", ranks)}
    named = [
        f"rank {rank} of the group is global rank {global_ranks[rank]}" for rank in sorted(found) if rank < len(global_ranks)
    ]
    return f"{message} ({', '.join(named)})" if named else message


class LocalGroup(_Group):
    """`size` ranks inside this process, for one GPU, laptops, notebooks and tests. Tensors hold the rows of all, one rank after
    the other.

    `device` is "cpu", or a GPU that all ranks share: "cuda" (PyTorch's current one), "cuda:1". Calls there are enqueued on
    PyTorch's current stream and waited for by nobody; scratch memory comes from PyTorch's caching allocator. `slow_link`
    imitates a link between CPU ranks: (seconds of a collective, bytes a second). No wait is longer than `limit` seconds.
    `planning_threads` make each plan side by side; plans are the same for any number. `tuned` as of `Group`.
    """

    def __init__(
        self,
        size: int,
        *,
        device: Any = "cpu",
        slow_link: tuple[float, float] | None = None,
        limit: float = 600.0,
        planning_threads: int = 1,
        tuned: TunedPlans = True,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"size is {size!r}; a group has at least one rank")
        if size > _MOST_RANKS:
            raise PlanError(f"size is {size}; a process holds at most {_MOST_RANKS} ranks")
        threads = planning_threads_of(planning_threads)
        asked = checked(tuned)
        begin_in_this_process()
        super().__init__()
        plans = read_tuned(asked, size)
        kind = str(device).split(":")[0]
        if kind == "cpu":
            self.device = device
            self._native = Ranks.local(size, slow_link=slow_link, limit=limit, tuned=plans)
        elif kind == "cuda":
            from counterpoint import _cuda

            if slow_link is not None:
                raise DeviceError("slow_link imitates a link between CPU ranks; leave it out with a GPU")
            self.device = _cuda.device(device)
            self._ordinal, self._stream = self.device.index, _cuda.current_stream(self.device)
            self._native = _cuda.local(size, self.device, limit, plans)
        else:
            raise DeviceError(f'device is {device}; it must be "cpu", "cuda" or a GPU with its number, such as "cuda:1"')
        warn_of_others(asked, self._native)
        self._global_ranks = tuple(range(size))
        self._plan_with(threads)
