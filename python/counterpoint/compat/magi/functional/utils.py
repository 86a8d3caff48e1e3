"""Merging partial attention: log-sum-exps and outputs of two sets of keys, or of keys and sinks.

`lse` is `[rows, heads]`, `out` `[rows, heads, head_dim]`; a row that has seen nothing has `lse` -inf and weighs nothing.
"""

from __future__ import annotations

import torch

from counterpoint.compat.magi.common.enum import AttnSinkLayout
from counterpoint.compat.magi.hints import refuse


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _weight(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """exp(part - whole), 0 where `part` has seen nothing."""
    # Chosen before the exponential, whose derivative where both are -inf would be NaN.
    return torch.exp(torch.where(part == -torch.inf, -torch.inf, part - whole))


def _of_both(lse1: torch.Tensor, lse2: torch.Tensor) -> torch.Tensor:
    """log(exp(lse1) + exp(lse2)), with derivatives also where neither has seen anything."""
    is_nothing = (lse1 == -torch.inf) & (lse2 == -torch.inf)
    return torch.where(is_nothing, -torch.inf, torch.logaddexp(lse1.masked_fill(is_nothing, 0.0), lse2))


def _given(tensor: torch.Tensor, result: torch.Tensor, inplace: bool) -> torch.Tensor:
    return tensor.copy_(result) if inplace else result.to(tensor.dtype)


def correct_attn_lse(lse1: torch.Tensor, lse2: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The log-sum-exp of both sets of keys."""
    if lse1.dtype != lse2.dtype:
        raise AssertionError(f"lse1 is {lse1.dtype}, and lse2 {lse2.dtype}")
    return _given(lse1, _of_both(_wide(lse1), _wide(lse2)), inplace)


def correct_attn_out(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    lse: torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
    """The output over both sets of keys, whose log-sum-exp is `lse`."""
    if out1.dtype != out2.dtype or not lse1.dtype == lse2.dtype == lse.dtype:
        raise AssertionError("out1 and out2 are of one type, and lse1, lse2 and lse of one")
    merged = out1 * _weight(lse1, lse).unsqueeze(-1) + out2 * _weight(lse2, lse).unsqueeze(-1)
    return _given(out1, merged, inplace)


def correct_attn_out_lse(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over both sets of keys."""
    first, second = _wide(lse1), _wide(lse2)
    lse = _of_both(first, second)
    out = out1 * _weight(first, lse).unsqueeze(-1) + out2 * _weight(second, lse).unsqueeze(-1)
    return _given(out1, out, inplace), _given(lse1, lse, inplace)


def _lse_of_sink(sink: torch.Tensor, rows: int, sink_layout: AttnSinkLayout) -> torch.Tensor:
    if sink_layout == "sh":
        if sink.ndim != 2:
            raise AssertionError(f"sink is {list(sink.shape)}; the layout sh is [sink tokens, heads]")
        return sink.logsumexp(0, keepdim=True).expand(rows, -1)
    if sink_layout == "ssh":
        if sink.ndim != 3 or sink.shape[0] != rows:
            raise AssertionError(f"sink is {list(sink.shape)}; the layout ssh is [{rows} rows, sink tokens, heads]")
        return sink.logsumexp(1)
    if sink_layout == "shd":
        refuse("sink_layout='shd'", "sinks are logits here, without values")
    raise ValueError(f"sink_layout is {sink_layout!r}; it is 'sh' or 'ssh'")


def correct_attn_lse_with_sink(
    lse: torch.Tensor, sink: torch.Tensor, sink_layout: AttnSinkLayout = "sh", inplace: bool = False
) -> torch.Tensor:
    """The log-sum-exp of keys and sinks."""
    return correct_attn_lse(lse, _lse_of_sink(sink, lse.shape[0], sink_layout).to(lse.dtype), inplace)


def correct_attn_out_with_sink(
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    sink_layout: AttnSinkLayout = "sh",
    inplace: bool = False,
) -> torch.Tensor:
    """The output over keys and sinks, of that over keys and its log-sum-exp without sinks."""
    return correct_attn_out_lse_with_sink(out, lse.clone(), sink, sink_layout, inplace)[0]


def correct_attn_out_lse_with_sink(
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    sink_layout: AttnSinkLayout = "sh",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over keys and sinks, of those over keys."""
    wide = _wide(lse)
    whole = _of_both(wide, _lse_of_sink(sink, lse.shape[0], sink_layout).to(wide.dtype))
    return _given(out, out * _weight(wide, whole).unsqueeze(-1), inplace), _given(lse, whole, inplace)
