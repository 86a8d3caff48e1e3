"""Groups of ranks that are processes: from any process group of PyTorch's, through its store and nothing else of it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from counterpoint._native import Attempt, Ranks
from counterpoint.errors import DeviceError, Error, PlanError
from counterpoint.group import _Group, _with_global_ranks, begin_in_this_process, sentence
from counterpoint.plan_arguments import planning_threads_of
from counterpoint.tuned import TunedPlans, checked, read_tuned, warn_of_others

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

_TRANSPORTS = {"cpu": ("auto", "tcp"), "cuda": ("auto", "nvlink", "copy-engine", "nccl", "hierarchical")}
_DEFAULTS = {
    "transport": "auto",
    "nodes": None,
    "limit": 600.0,
    "profile": None,
    "planning_threads": 1,
    "tuned": True,
    "concurrent_collectives": None,
}
_groups: dict[tuple[tuple[int, ...], str], Group] = {}
_making = threading.Lock()


class Group(_Group):
    """Ranks that are processes, one each, from a process group of PyTorch's or a dimension of a device mesh.

    Making a group is collective among its ranks. The same ranks and device give the same group again, until it is closed. If that
    one has failed, its error is raised first, unless a call has raised it already; then a new group is made. A group reads and
    writes a few keys of the process group's store, and never calls a collective of `torch.distributed`: any backend will do, and
    none is disturbed. A mesh of two dimensions, (nodes, ranks of a node), gives one group of all ranks.

    `device` is "cpu", or this rank's GPU: "cuda" (PyTorch's current one), "cuda:1"; several ranks may share one. Where it is not
    given, it is the current GPU for a process group of NCCL's, the CPU for others. `transport` moves rows between ranks; "auto"
    takes the fastest that these GPUs have; others are "tcp" on the CPU, "nvlink", "copy-engine", "nccl" and "hierarchical" on
    GPUs. Settings of NCCL may follow the last two, as in "nccl+cluster-size=0+max-ctas=8"; others are `min-ctas` and `cta-policy`
    (default, efficiency or zero). NCCL's own variables override them. With "nccl+library-sums" NCCL computes reduce-scatters, in
    its own order and type; otherwise sums are in f32 and in the order of ranks.

    `limit` is how many seconds a rank waits for another that does nothing. `nodes` is how many machines the ranks are on,
    equally many on each; left out, the ranks find it out. `profile` is the path of a machine profile of
    `counterpoint doctor --calibrate`, which plans then follow. `planning_threads` threads make each plan; plans are the same
    for any number.

    `tuned` says whether linear layers run as `counterpoint tune gemm` measured them to be fastest, where it has tuned their size
    for this device, transport and number of ranks. True takes what it kept for this user, a path is a file that it wrote by
    `--plans`, False takes nothing. The first rank reads it for all.

    `concurrent_collectives` says whether collectives of other libraries (FSDP2's, DDP's) run at the same time as this group's
    calls, on streams that are not ordered with them (`order_with`). If so, no linear layer is chosen to be one kernel with its
    collective: two such kernels and two of NCCL's may each hold multiprocessors that another needs, and wait until the limit.
    `overlap="fused"` still asks for it. None means True where the default process group has ranks that this group has not."""

    concurrent_collectives: bool
    _wishes: dict[str, Any]
    _process: int

    def __new__(
        cls,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        transport: str = "auto",
        nodes: int | None = None,
        limit: float = 600.0,
        profile: str | os.PathLike[str] | None = None,
        planning_threads: int = 1,
        tuned: TunedPlans = True,
        concurrent_collectives: bool | None = None,
    ) -> Group:
        process_group, nodes_of_mesh = _process_group(group_or_mesh)
        place = _device_of_all(device, process_group, limit)
        name, settings, _ = transport.partition("+")
        if name not in _TRANSPORTS[place.type] or (settings and place.type == "cpu"):
            *most, last = (f'"{name}"' for name in _TRANSPORTS[place.type])
            raise Error(f"transport is {transport!r}; on {place.type} it must be {', '.join(most)} or {last}")
        ranks = tuple(dist.get_process_group_ranks(process_group))
        nodes = nodes_of_mesh if nodes is None else nodes
        if nodes is not None and (nodes < 1 or len(ranks) % nodes):
            raise PlanError(f"nodes is {nodes}; {len(ranks)} ranks cannot be equally many on each")
        wishes: dict[str, Any] = {
            "transport": transport,
            "nodes": nodes,
            "limit": limit,
            "profile": None if profile is None else os.fspath(profile),
            "planning_threads": planning_threads_of(planning_threads),
            "tuned": checked(tuned),
            "concurrent_collectives": _yes_or_no("concurrent_collectives", concurrent_collectives),
        }
        with _making:
            known = _groups.get((ranks, str(place)))
            if known is not None and known._is_of_this_process() and not known._is_failure_known:
                # A failure that nobody here has seen yet is raised: a new group would wait for ranks that do something else now.
                known.check()
                known._refuse_others(wishes)
                return known
            made = super().__new__(cls)
            made._join(process_group, ranks, place, nodes, wishes)
            made._plan_with(wishes["planning_threads"])
            made._wishes = {**wishes, "nodes": made._nodes, "concurrent_collectives": made.concurrent_collectives}
            _groups[ranks, str(place)] = made
            _at_exit()
            return made

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        transport: str = "auto",
        nodes: int | None = None,
        limit: float = 600.0,
        profile: str | os.PathLike[str] | None = None,
        planning_threads: int = 1,
        tuned: TunedPlans = True,
        concurrent_collectives: bool | None = None,
    ) -> None:
        """Nothing: `__new__` gives groups that are ready."""

    def _join(
        self,
        process_group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        place: torch.device,
        nodes: int | None,
        wishes: dict[str, Any],
    ) -> None:
        rank = dist.get_rank(process_group)
        self.device, self._global_ranks, self._process = "cpu" if place.type == "cpu" else place, ranks, os.getpid()
        begin_in_this_process()
        super().__init__()
        with _naming_ranks(rank, ranks):
            store = _store(process_group)
            attempt = Attempt(store, rank, len(ranks), limit=wishes["limit"])
            with _failing_together(attempt):
                own = _Place(_host(), _address(store), *_tuned(wishes["tuned"], rank, len(ranks)))
                self._join_in(attempt, own, place, nodes, wishes)
        if rank == 0:
            warn_of_others(wishes["tuned"], self._native)

    def _join_in(self, attempt: Attempt, own: _Place, place: torch.device, nodes: int | None, wishes: dict[str, Any]) -> None:
        profile = None if wishes["profile"] is None else _read_profile(wishes["profile"])
        limit, ranks = wishes["limit"], self._global_ranks
        places = _exchange_places(attempt, own, limit)
        self._nodes = nodes or _nodes([place.host for place in places])
        address = "127.0.0.1" if len({place.host for place in places}) == 1 else places[0].address
        if places[0].refused:
            raise PlanError(places[0].refused)
        tuned = places[0].tuned
        asked = wishes["concurrent_collectives"]
        self.concurrent_collectives = len(ranks) < dist.get_world_size() if asked is None else asked
        how: dict[str, Any] = {"address": address, "limit": limit, "nodes": self._nodes, "profile": profile, "tuned": tuned}
        how["concurrent_collectives"] = self.concurrent_collectives
        if place.type == "cpu":
            self._native = Ranks.join(attempt, **how)
        else:
            from counterpoint import _cuda

            self._ordinal, self._stream = place.index, _cuda.current_stream(place)
            self._native = _cuda.join(attempt, place, transport=wishes["transport"], **how)

    def _refuse_others(self, wishes: dict[str, Any]) -> None:
        """Refuses settings that this group was not made with; those that were left out are no wish."""
        for name, wish in wishes.items():
            if wish != _DEFAULTS[name] and wish != self._wishes[name]:
                made_with = self._wishes[name]
                raise Error(
                    f"{name} is {wish!r}, and the group of these ranks was made with {made_with!r}; close that one before"
                )

    def _is_of_this_process(self) -> bool:
        """Whether it is open, and not a copy in a forked process."""
        return self._process == os.getpid() and not self._native.closed


def _read_profile(path: str | os.PathLike[str]) -> str:
    """The text of a machine profile."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"profile {os.fspath(path)!r} cannot be read: {error}") from None


def _yes_or_no(name: str, value: bool | None) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise PlanError(f"{name} is {value!r}; it must be True, False or None")
    return value


def _device(asked: torch.device | str | None, process_group: dist.ProcessGroup) -> torch.device:
    """The device that was meant: a GPU where it is not said and the process group is of NCCL."""
    if asked is None:
        asked = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
    kind = str(asked).split(":")[0]
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise DeviceError(f'device is {asked}; it must be "cpu", "cuda" or a GPU with its number, such as "cuda:1"')
    from counterpoint import _cuda

    place: torch.device = _cuda.device(asked)
    return place


def _device_of_all(asked: torch.device | str | None, process_group: dist.ProcessGroup, limit: float) -> torch.device:
    """The device that was meant. Where it is no device of this rank's, the others, which join by theirs, hear so."""
    try:
        return _device(asked, process_group)
    except DeviceError as error:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        # Otherwise theirs may be at hand, and they join nothing now.
        if not any(known == ranks and group._is_of_this_process() for (known, _), group in _groups.items()):
            with contextlib.suppress(Error):
                attempt = Attempt(_store(process_group), dist.get_rank(process_group), len(ranks), limit=limit)
                attempt.fail(sentence(error))
        raise


def _process_group(given: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The process group that was meant, and on how many nodes a mesh says it is."""
    if not dist.is_initialized():
        raise Error(
            "counterpoint.Group needs a process group: call torch.distributed.init_process_group before; ranks inside this "
            "process are a counterpoint.LocalGroup"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if given is None:
        world = dist.group.WORLD
        assert world is not None
        return world, None
    if isinstance(given, DeviceMesh):
        if given.ndim == 1:
            return given.get_group(), None
        if given.ndim != 2:
            raise Error(
                f"group_or_mesh is a mesh of {given.ndim} dimensions; take one of them, such as mesh['cp'], or (nodes, ranks)"
            )
        if given.mesh_dim_names is None:
            raise Error("group_or_mesh is a mesh whose dimensions have no names, and cannot be made one; give it mesh_dim_names")
        return given._flatten().get_group(), given.shape[0]
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise Error(f"global rank {dist.get_rank()} is no rank of this process group; only its ranks make a group of it")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"group_or_mesh must be a torch.distributed.ProcessGroup or a DeviceMesh, not {type(given).__name__} {given!r:.80}"
        )
    if dist.get_rank(given) < 0:
        raise Error(f"global rank {dist.get_rank()} is no rank of this process group; only its ranks make a group of it")
    return given, None


def _store(process_group: dist.ProcessGroup) -> Store:
    """The store of a process group, whose keys are its own."""
    store: Store | None = None
    with contextlib.suppress(AttributeError, RuntimeError):
        store = process_group.get_group_store()
    if store is None:
        store = dist.distributed_c10d._get_process_group_store(process_group)
    probe = f"counterpoint/probe/{dist.get_rank(process_group)}"
    try:
        store.set(probe, "kept")
        is_kept = store.check([probe]) and bytes(store.get(probe)) == b"kept"
    except RuntimeError as error:
        raise Error(
            f"the store of this process group cannot be used, so its ranks cannot find each other through it: {error}"
        ) from error
    if not is_kept:
        raise Error(
            "the store of this process group keeps nothing, so its ranks cannot find each other through it; initialise it with a "
            "TCPStore or FileStore, or use counterpoint.LocalGroup"
        )
    return store


class _Place(NamedTuple):
    """A rank's host, the address by which others reach it, and of the first rank the tuned plans, or what is wrong with them."""

    host: str
    address: str
    tuned: str | None
    refused: str | None


def _tuned(asked: bool | str, rank: int, size: int) -> tuple[str | None, str | None]:
    """The text of tuned plans, or what is wrong with them, which all ranks are to hear; of the first rank alone."""
    if rank > 0:
        return None, None
    try:
        return read_tuned(asked, size), None
    except PlanError as error:
        return None, str(error)


def _exchange_places(attempt: Attempt, own: _Place, limit: float) -> list[_Place]:
    """Where every rank is."""
    return [_Place(*json.loads(one)) for one in attempt.exchange(json.dumps(own), limit=limit)]


@contextlib.contextmanager
def _failing_together(attempt: Attempt) -> Iterator[None]:
    """Inside it, whatever this rank raises ends the attempt for all ranks, which need not wait for it until the limit."""
    try:
        yield
    except BaseException as error:
        attempt.fail(sentence(error))
        raise


@contextlib.contextmanager
def _naming_ranks(rank: int, ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside it, errors of the engine, which counts ranks of the group, are given the ranks among all processes as well."""
    try:
        yield
    except Error as error:
        error.rank = rank if error.rank is None else error.rank
        error.global_rank = ranks[error.rank]
        if error.peer is not None:
            error.global_peer = ranks[error.peer]
        error.args = (_with_global_ranks(str(error), ranks),)
        raise


def _host() -> str:
    """A name that only this machine has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _address(store: Store) -> str:
    """This machine's address on the way to the one where the job's store is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "localhost"
    for family, kind, protocol, _, where in _resolved(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of datagrams: nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _resolved(host: str) -> Iterable[Any]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ()


def _nodes(hosts: list[str]) -> int:
    """How many machines these are, where each has equally many neighbouring ranks; otherwise as many as if they were one."""
    count = len(set(hosts))
    each = len(hosts) // count
    is_even = all(len(set(hosts[start : start + each])) == 1 for start in range(0, len(hosts), each))
    return count if count * each == len(hosts) and is_even else 1


_is_prepared = False


def _at_exit() -> None:
    """Has the end of the process be known to other ranks: its groups are closed, or hear of the exception that ends it."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    atexit.register(_close_all)
    before = sys.excepthook

    def fail_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for group in _groups.values():
            with contextlib.suppress(Error):
                group.fail(sentence(error))
        before(kind, error, trace)

    sys.excepthook = fail_all


def _close_all() -> None:
    for group in _groups.values():
        # Of a group that has failed, whoever made a call has heard.
        with contextlib.suppress(Error):
            group.close()
    _groups.clear()
