"""Groups: the ranks that work together, made from a process group of PyTorch, or all in this process."""

from __future__ import annotations

import atexit
import math
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from counterpoint._native import Mask, Ranks
from counterpoint.errors import DeviceError, Error, PeerError, PlanError
from counterpoint.plan import Plan, Settings

if TYPE_CHECKING:
    import torch

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_PREFETCHED = 16


def dtype_name(dtype: Any) -> str:
    """`torch.float32`, its name, or the like as the engine's name."""
    name = str(dtype).removeprefix("torch.")
    name = {"bf16": "bfloat16", "f16": "float16", "half": "float16", "f32": "float32", "float": "float32", "f64": "float64"}.get(
        name, name
    )
    if name not in _DTYPES:
        raise PlanError(f"dtype is {dtype}; attention computes in {', '.join(_DTYPES)}")
    return name


class _Group:
    """What groups of all kinds have in common: plans."""

    _native: Ranks
    _global_ranks: tuple[int, ...]
    device: Any

    def __init__(self, *, nodes: int) -> None:
        self._nodes = nodes
        self._prefetched: dict[Any, Future[Plan]] = {}
        self._lock = threading.Lock()
        self._planner: ThreadPoolExecutor | None = None

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
        """What moves rows between ranks: "memory" inside a process, "tcp" between processes."""
        return "memory" if self._native.rank is None else "tcp"

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
        dispatch: Literal["affinity", "min-heap", "sequential", "zigzag"] = "affinity",
        stages: Literal["auto"] | int = "auto",
        queries: Literal["never", "auto", "fewest_bytes"] = "never",
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
        with self._lock:
            future = self._prefetched.pop(_key(mask, arguments), None)
        if future is not None:
            return future.result()
        return self._solve(mask, arguments)

    def prefetch(self, mask: Mask, **arguments: Any) -> None:
        """Plans in a thread; `plan` with the same arguments takes it from there. At most 16 wait to be taken."""
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
            if key not in self._prefetched:
                self._prefetched[key] = self._planner.submit(self._solve, mask, complete)
            while len(self._prefetched) > _PREFETCHED:
                self._prefetched.pop(next(iter(self._prefetched))).cancel()

    def _solve(self, mask: Mask, arguments: dict[str, Any]) -> Plan:
        from counterpoint._native import Solution

        given = dict(arguments)
        on: Plan | None = given.pop("on")
        if not isinstance(mask, Mask):
            raise PlanError(f"mask must be a counterpoint.Mask, not a {type(mask).__name__}")
        if on is not None and on._solution.ranks != self.size:
            raise PlanError(f"on is a plan of {on._solution.ranks} ranks, and this group has {self.size}")
        heads_q, heads_k = _heads(given["heads"])
        head_dim, head_dim_v = given["head_dim"], given["head_dim_v"] or given["head_dim"]
        for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            if value < 1:
                raise PlanError(f"{name} is {value}; it must be at least 1")
        if given["softcap"] < 0:
            raise PlanError(f"softcap is {given['softcap']}; it must be positive, or 0 for none")
        scale = head_dim**-0.5 if given["scale"] is None else float(given["scale"])
        if not math.isfinite(scale):
            raise PlanError(f"scale is {scale}; it must be a finite number")
        if given["sink_grad"] not in ("share", "sum"):
            raise PlanError(f'sink_grad is {given["sink_grad"]!r}; it must be "share" or "sum"')
        tokens, chunk = (mask.seqlen_q, mask.seqlen_k), given["chunk"]
        if on is not None:
            mask = _padded(mask, on.mask.seqlen_q, on.mask.seqlen_k) if tokens == on._tokens else mask
        elif given["even"]:
            mask, chunk = _evened(mask, chunk, self.size)
        solution = Solution(
            mask,
            ranks=self.size,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype_name(given["dtype"]),
            scale=scale,
            softcap=float(given["softcap"]),
            sink_rows=given["sink_rows"],
            chunk=chunk,
            dispatch=given["dispatch"],
            stages=given["stages"],
            queries=given["queries"],
            ranks_per_node=self.size // self._nodes,
            on=None if on is None else on._solution,
        )
        settings = Settings(given["overlap"], _deterministic(given["deterministic"]), given["sink_grad"])
        return Plan(solution, given, settings, tokens)._bound_to(self)

    def close(self) -> None:
        """Leaves the group; calls from now on are errors. At the end of the process it happens by itself."""
        if self._planner is not None:
            self._planner.shutdown(wait=False, cancel_futures=True)
        self._native.close()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Inside it, an exception of this rank ends the group for all ranks, which hear its text from whatever they wait for."""
        try:
            yield
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def fail(self, reason: str) -> None:
        """Ends the group for all ranks, which hear `reason`. A failed group is of no use; all ranks make a new one."""
        self._native.fail(reason)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Gives errors of the engine, which counts ranks of the group, the ranks among all processes as well."""
        try:
            yield
        except Error as error:
            named = error.rank if error.rank is not None else (self.rank if self._native.rank is not None else None)
            if named is not None and named < len(self._global_ranks) and error.global_rank is None:
                error.rank, error.global_rank = named, self._global_ranks[named]
                if self._global_ranks != tuple(range(len(self._global_ranks))):
                    ranks = ", ".join(f"rank {rank} is {known}" for rank, known in enumerate(self._global_ranks[:16]))
                    error.args = (f"{error} (ranks of the group; among all processes {ranks})",)
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, transport={self.transport!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a group cannot be pickled: it is connections of this process; make one in each process")


_DEFAULTS: dict[str, Any] = {
    name: default for name, default in (_Group.plan.__kwdefaults__ or {}).items() if name not in ("heads", "head_dim", "dtype")
}


def _key(mask: Mask, arguments: dict[str, Any]) -> Any:
    values = {**arguments, "dtype": dtype_name(arguments["dtype"])}
    if values["on"] is not None:
        values["on"] = values["on"].handle
    return (mask, tuple(sorted((name, repr(value)) for name, value in values.items())))


def _heads(heads: int | tuple[int, int]) -> tuple[int, int]:
    queries, keys = (heads, heads) if isinstance(heads, int) else (heads[0], heads[1])
    if queries < 1 or keys < 1 or queries % keys:
        raise PlanError(
            f"heads are {queries} of queries and {keys} of keys; those of queries must be a multiple of those of keys"
        )
    return queries, keys


def _deterministic(asked: bool | None) -> bool:
    if asked is not None:
        return asked
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


def _padded(mask: Mask, seqlen_q: int, seqlen_k: int) -> Mask:
    """The same pairs in longer sequences; what is added sees nothing."""
    if (seqlen_q, seqlen_k) == (mask.seqlen_q, mask.seqlen_k):
        return mask
    q, k, types = zip(*mask.slices, strict=True) if mask.slices else ((), (), ())
    return Mask.from_slices(list(q), list(k), list(types), seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def _evened(mask: Mask, chunk: int | None, ranks: int) -> tuple[Mask, int]:
    """A mask whose rows are a multiple of chunk x ranks, and the chunk."""
    longest = max(mask.seqlen_q, mask.seqlen_k)
    if chunk is None:
        balanced = longest // (16 * ranks)
        chunk = min(max(1 << max(balanced.bit_length() - 1, 0), 64), 2048)
        # A short sequence would be padding for the most part.
        chunk = min(chunk, max(1, -(-min(mask.seqlen_q, mask.seqlen_k) // ranks)))
    step = chunk * ranks
    return _padded(mask, -(-mask.seqlen_q // step) * step, -(-mask.seqlen_k // step) * step), chunk


class LocalGroup(_Group):
    """`size` ranks inside this process, for laptops, notebooks and tests. Tensors hold the rows of all, one rank after the other.

    `slow_link` imitates a link between the ranks: (seconds of a collective, bytes a second).
    """

    def __init__(
        self, size: int, *, device: str = "cpu", slow_link: tuple[float, float] | None = None, limit: float = 600.0
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"size is {size!r}; a group has at least one rank")
        _refuse_cuda(device)
        super().__init__(nodes=1)
        self.device = device
        self._native = Ranks.local(size, slow_link=slow_link, limit=limit)
        self._global_ranks = tuple(range(size))


class Group(_Group):
    """The ranks of a process group of PyTorch, or of a dimension of a `DeviceMesh`: one process each. Collective to make.

    Of torch.distributed only the group's store is used, and only here: calls of this group and collectives of that one do not
    disturb each other. `limit` is the longest that a wait may take, in seconds. Groups of equal ranks are one.
    """

    _made: ClassVar[weakref.WeakValueDictionary[Any, Group]] = weakref.WeakValueDictionary()

    def __new__(cls, group_or_mesh: Any = None, **_: Any) -> Group:
        group, _nodes = _process_group(group_or_mesh, None)
        known = cls._made.get((os.getpid(), _global_ranks(group)))
        return known if known is not None and not known._native.closed else super().__new__(cls)

    def __init__(
        self,
        group_or_mesh: Any = None,
        *,
        device: Any = None,
        transport: Literal["auto", "tcp"] = "auto",
        nodes: int | None = None,
        limit: float = 600.0,
        profile: None = None,
    ) -> None:
        if hasattr(self, "_native") and not self._native.closed:
            return
        _refuse_cuda(device)
        if transport not in ("auto", "tcp"):
            raise PlanError(f'transport is {transport!r}; between CPU ranks it is "tcp", or "auto"')
        if profile is not None:
            raise PlanError("profile: measured profiles are for GPUs; leave it out")
        group, nodes = _process_group(group_or_mesh, nodes)
        super().__init__(nodes=nodes)
        self.device = "cpu"
        self._global_ranks = _global_ranks(group)
        if len(self._global_ranks) % nodes:
            raise PlanError(f"nodes is {nodes}, which does not divide the {len(self._global_ranks)} ranks of the group")
        self._native = _join(group, limit, self._global_ranks)
        self._made[(os.getpid(), self._global_ranks)] = self
        _open.add(self)

    @property
    def global_rank(self) -> int:
        """This process's rank among all processes."""
        return self._global_ranks[self.rank]


_open: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for group in list(_open):
        group.close()


def _refuse_cuda(device: Any) -> None:
    name = str(device) if device is not None else "cpu"
    if name.split(":")[0] != "cpu":
        raise DeviceError(
            f"device is {name}: this build of the package computes on the CPU alone; move tensors there with .cpu()"
        )


def _process_group(group_or_mesh: Any, nodes: int | None) -> tuple[Any, int]:
    """The process group that is meant, and on how many nodes its ranks are."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Error(
            "torch.distributed is not initialised; call torch.distributed.init_process_group, or use counterpoint.LocalGroup"
        )
    if group_or_mesh is None:
        return dist.group.WORLD, nodes or 1
    if hasattr(group_or_mesh, "get_all_groups"):
        mesh = group_or_mesh
        if mesh.ndim == 1:
            return mesh.get_group(), nodes or 1
        if mesh.ndim == 2:
            return mesh._flatten().get_group(), nodes or mesh.size(0)
        raise Error(
            f"the mesh has {mesh.ndim} dimensions; give one of them, such as mesh['cp'], or two: nodes and ranks of a node"
        )
    if not isinstance(group_or_mesh, dist.ProcessGroup):
        if group_or_mesh == dist.GroupMember.NON_GROUP_MEMBER:
            raise Error("this process is no member of the group")
        raise Error(f"group_or_mesh must be a ProcessGroup or a DeviceMesh, not a {type(group_or_mesh).__name__}")
    return group_or_mesh, nodes or 1


def _global_ranks(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


_joined: dict[tuple[int, ...], int] = {}


def _join(group: Any, limit: float, ranks: tuple[int, ...]) -> Ranks:
    """Meets the other ranks at an address that the first one leaves in the group's store."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_process_group_store(group)
    # Every rank joins the n-th time when the others do.
    number = _joined[ranks] = _joined.get(ranks, -1) + 1
    key = f"counterpoint/{'.'.join(map(str, ranks))}/{number}"
    rank, size = group.rank(), group.size()
    if rank == 0:
        ports = [20_000 + secrets.randbelow(12_000) for _ in range(8)]
        store.set(key, "\n".join([_own_address(), ",".join(map(str, ports)), secrets.token_hex(16)]))
    try:
        host, ports_text, token = store.get(key).decode().split("\n")
    except Exception as error:
        raise PeerError(
            f"rank {rank} of the group (global rank {ranks[rank]}) waited for rank 0 to make the group: {error}"
        ) from error
    return Ranks.join(host, [int(port) for port in ports_text.split(",")], token, rank=rank, size=size, limit=limit)


def _own_address() -> str:
    """The address by which this machine reaches the master, so that others reach it there."""
    master = os.environ.get("MASTER_ADDR")
    if master:
        try:
            with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))
                return str(probe.getsockname()[0])
        except OSError:
            return master
    return "127.0.0.1"
