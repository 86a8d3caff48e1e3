"""Who plans: a group, or its description in a process that has not joined it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from counterpoint._native import Cancellation, Mask, Solution
from counterpoint.errors import PlanError
from counterpoint.plan import Plan
from counterpoint.plan_arguments import (
    check_mask,
    dtype_name,
    evened,
    heads_of,
    is_deterministic,
    padded,
    scale_of,
    softcap_of,
    whole_number,
)

if TYPE_CHECKING:
    import torch

    from counterpoint.group import _Group


class _Planner:
    """What a group and its description have in common: ranks, and plans for them."""

    _native: Any

    @property
    def _on_gpu(self) -> bool:
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        rank: int | None = self._native.rank
        return rank or 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        size: int = self._native.size
        return size

    @property
    def transport(self) -> str:
        """What moves rows between ranks: "memory" inside a process; "tcp" between processes on the CPU, on GPUs "nvlink",
        "copy-engine", "nccl" or "hierarchical"."""
        transport: str = self._native.transport
        return transport

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
        return self._planned(mask, arguments)

    def _planned(self, mask: Mask, arguments: dict[str, Any]) -> Plan:
        return self._solve(mask, arguments)

    def _solve(self, mask: Mask, arguments: dict[str, Any], cancellation: Cancellation | None = None) -> Plan:
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
        if self._on_gpu and dtype not in ("bfloat16", "float16"):
            raise PlanError(f"dtype is {given['dtype']}; on GPUs attention computes in bfloat16 and float16, on the CPU in all")
        tokens = (mask.seqlen_q, mask.seqlen_k)
        if on is not None:
            mask = padded(mask, on.mask.seqlen_q, on.mask.seqlen_k) if tokens == on._tokens else mask
        elif given["even"]:
            mask, chunk = evened(mask, chunk, self.size)
        deterministic = self._is_deterministic(given["deterministic"])
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
        return self._own(Plan(solution, given, given["sink_grad"], tokens, keeps_dispatch=on is not None))

    def _is_deterministic(self, asked: bool | None) -> bool:
        return is_deterministic(asked)

    def _own(self, plan: Plan) -> Plan:
        """A plan that was made just now, as one of this planner's."""
        raise NotImplementedError

    def _check_dispatch_of(self, on: Any) -> None:
        if not isinstance(on, Plan):
            raise PlanError(f"on must be a counterpoint.Plan, not a {type(on).__name__}")
        if on._solution.ranks != self.size:
            raise PlanError(
                f"on is a plan of {on._solution.ranks} ranks, and this group has {self.size}; plan with the group that made it"
            )
        # One without a group is a value, as after pickling.
        if on._group is not None and self._is_other(on._group):
            raise PlanError(f"on is a plan of another group, {on._group!r}; this is {self!r}, whose ranks have other rows")

    def _is_other(self, group: _Group) -> bool:
        """Whether plans of that group are not for the ranks that this plans for."""
        raise NotImplementedError


DEFAULTS: dict[str, Any] = {
    name: default for name, default in (_Planner.plan.__kwdefaults__ or {}).items() if name not in ("heads", "head_dim", "dtype")
}


def key_of(mask: Mask, arguments: dict[str, Any]) -> Any:
    """What plans are found by that were made ahead: the mask, and all arguments of `plan`."""
    heads, on = arguments["heads"], arguments["on"]
    # What PyTorch asks for now, where it is left open.
    arguments = {**arguments, "deterministic": is_deterministic(arguments["deterministic"])}
    named = tuple(heads) if isinstance(heads, list) else heads, dtype_name(arguments["dtype"]), None if on is None else on.handle
    return (mask, arguments["head_dim"], *named, *(arguments[name] for name in DEFAULTS if name != "on"))
