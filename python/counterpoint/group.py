"""Groups: the ranks that work together, all in this process."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from counterpoint._native import Cancellation, Mask, Ranks, Routing, StepTables, _ask_experts, _make_experts
from counterpoint.described import GroupDescription
from counterpoint.errors import DeviceError, Error, PlanError
from counterpoint.lookup import numbered_group
from counterpoint.plan import Plan
from counterpoint.plan_arguments import check_mask, is_deterministic, planning_threads_of
from counterpoint.planner import DEFAULTS, _Planner, key_of
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


class _Group(_Planner):
    """What groups of all kinds have in common: plans, and threads that make them."""

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
    def _on_gpu(self) -> bool:
        return self._ordinal >= 0

    @property
    def description(self) -> GroupDescription:
        """The group as a value: it can be pickled, and makes plans and step tables for this process's ranks in another one."""
        return GroupDescription(self._native.described, deterministic=is_deterministic(None))

    def _planned(self, mask: Mask, arguments: dict[str, Any]) -> Plan:
        with self._lock:
            ahead = self._prefetched.pop(key_of(mask, arguments), None) if self._prefetched else None
        if ahead is not None and not ahead.cancelled():
            with suppress(CancelledError):  # by another thread, just now
                return ahead.result()
        return self._solve(mask, arguments)

    def _own(self, plan: Plan) -> Plan:
        return plan._bound_to(self)

    def _is_other(self, group: _Group) -> bool:
        return group is not self

    def plan_cache_info(self) -> PlanCacheInfo:
        """How often `plan` and `prefetch` found a plan that the group had made from an equal mask and equal arguments. The last
        few are kept, in host memory alone: what calls need on a device is made ready for each `Plan` by itself."""
        return PlanCacheInfo(*self._native.plan_cache_info())

    def prefetch(self, mask: Mask | Plan, *, tables: StepTables | None = None, **arguments: Any) -> PrefetchedPlan:
        """Plans in a thread, and makes the plan ready there; `plan` with the same arguments takes it from there. What it returns
        can be cancelled. At most 16 wait to be taken; of more the oldest is cancelled.

        Given a plan that another process has made by `description`, and no arguments, it is made ready alone: it becomes this
        group's. With `tables`, its step tables by `description.tables`, nothing is searched for that."""
        if isinstance(mask, Plan):
            return self._prefetch_plan(mask, tables, arguments)
        check_mask(mask)
        if tables is not None:
            raise PlanError("tables are those of a plan: give prefetch the plan that they were made of, and no mask")
        complete = {**DEFAULTS, **arguments}
        unknown = set(arguments) - set(DEFAULTS) - {"heads", "head_dim", "dtype"}
        missing = {"heads", "head_dim", "dtype"} - set(arguments)
        if unknown or missing:
            what = f"no argument {sorted(unknown)[0]!r}" if unknown else f"{sorted(missing)[0]!r} is missing"
            raise TypeError(f"Group.prefetch takes the arguments of Group.plan: {what}")
        key = key_of(mask, complete)
        try:
            hash(key)
        except TypeError as error:
            raise PlanError(f"an argument of Group.prefetch is no value that a plan could have: {error}") from None
        with self._lock:
            ahead = self._prefetched.get(key)
            if ahead is not None and not ahead.cancelled():
                return ahead
            make = functools.partial(self._solve_ahead, mask, complete)
            return self._wait_to_be_taken(key, PrefetchedPlan(make, self._planning_thread()))

    def _prefetch_plan(self, plan: Plan, tables: StepTables | None, arguments: dict[str, Any]) -> PrefetchedPlan:
        if arguments:
            raise TypeError(f"Group.prefetch of a plan takes its tables alone: it has its {sorted(arguments)[0]!r} already")
        if tables is not None and not isinstance(tables, StepTables):
            raise PlanError(f"tables must be those of GroupDescription.tables, not a {type(tables).__name__}")
        if plan._solution.ranks != self.size:
            raise PlanError(
                f"the plan is of {plan._solution.ranks} ranks, and this group has {self.size}; plan by its description"
            )
        if plan._group is not None and plan._group is not self:
            raise PlanError(f"the plan is of another group, {plan._group!r}; this is {self!r}, whose ranks have other rows")
        make = functools.partial(_made_ready, self._own(plan), tables)
        with self._lock:
            if plan._keeps_dispatch:  # its arguments do not say of which plan
                return PrefetchedPlan(make, self._planning_thread())
            key = key_of(plan._given_mask, {**plan._arguments, "deterministic": plan.deterministic, "on": None})
            return self._wait_to_be_taken(
                key, PrefetchedPlan(make, self._planning_thread(), functools.partial(self._forget, key))
            )

    def _planning_thread(self) -> ThreadPoolExecutor:
        if self._planner is None:
            self._planner = ThreadPoolExecutor(1, thread_name_prefix="counterpoint-plan")
        return self._planner

    def _wait_to_be_taken(self, key: Any, ahead: PrefetchedPlan) -> PrefetchedPlan:
        self._prefetched.pop(key, None)
        self._prefetched[key] = ahead
        while len(self._prefetched) > _PREFETCHED:
            self._prefetched.pop(next(iter(self._prefetched))).cancel()
        return ahead

    def _forget(self, key: Any, ahead: PrefetchedPlan) -> None:
        with self._lock:
            if self._prefetched.get(key) is ahead:
                del self._prefetched[key]

    def _make_ahead(self, layer: Any, routing: Routing, call: str) -> None:
        """Has a thread make a pass of a layer of experts ready, unless it was asked for. What fails fails again in the call."""
        if not _ask_experts(self._native, layer, routing, call):
            return
        with self._lock:
            if self._maker is None:
                self._maker = ThreadPoolExecutor(1, thread_name_prefix="counterpoint-ready")
            self._maker.submit(_make_experts, self._native, layer, routing, call)

    def _solve_ahead(self, mask: Mask, arguments: dict[str, Any], cancellation: Cancellation) -> Plan:
        return _made_ready(self._solve(mask, arguments, cancellation), None, cancellation)

    def _plan_with(self, threads: int) -> None:
        if threads > 1:
            self._native.plan_with(threads)

    def close(self) -> None:
        """Leaves the group, once all its ranks do. Calls from now on are errors. Happens by itself at the end of the process."""
        try:
            with self._named_errors():
                self._native.close()
        finally:
            if self._native.closed:  # a call from within another call of the group is refused
                with self._lock:
                    for ahead in self._prefetched.values():
                        ahead.cancel()
                for threads in (self._planner, self._maker):
                    if threads is not None:
                        threads.shutdown(wait=False, cancel_futures=True)

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
        on all of them. Where a library does not show its streams, such layers must not be fused: see `concurrent_collectives` of
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


def _made_ready(plan: Plan, tables: StepTables | None, _cancellation: Cancellation) -> Plan:
    plan._ready(None, tables)
    return plan


def sentence(error: BaseException) -> str:
    """An exception in words for other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
    PyTorch's current stream and return at once; scratch memory comes from PyTorch's caching allocator. `slow_link` imitates a
    link between CPU ranks: (seconds of a collective, bytes a second). No wait is longer than `limit` seconds.
    `planning_threads` threads make each plan; plans are the same for any number. `tuned` is as in `Group`.
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
        kind, _, number = str(device).partition(":")
        if number and not number.isdecimal():
            kind = ""
        if kind == "cpu":
            self.device = "cpu"
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
