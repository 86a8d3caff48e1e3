"""Deep copies of modules, as of layers that are stacked and of averaged weights: each computes by itself."""

from __future__ import annotations

import copy

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
from ranks import Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, ExpertLayer  # noqa: E402

ROUTING = cp.Routing.top_k(2, [[[0], [1], [1]]])


def compiled(module: torch.nn.Module, *given: object) -> torch.Tensor:
    made = torch.compile(lambda *those: module(*those), fullgraph=True, backend="aot_eager")(*given)
    return made[0] if isinstance(made, tuple) else made


def test_gradients_that_wait_are_of_the_copy_that_was_called() -> None:
    layer = ColumnParallelLinear(4, 4, bias=False, delay_wgrad_compute=True)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x * 1)[0].sum().backward()
    copied = copy.deepcopy(layer)
    compiled(copied, x * 1).sum().backward()
    copied.backward_dw()
    wanted = x.detach().sum(0).expand(4, 4)
    torch.testing.assert_close(copied.weight.grad, wanted)
    assert layer.weight.grad is None
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_a_compiled_copy_needs_no_original() -> None:
    layers = [ColumnParallelLinear(4, 4, bias=False), ExpertLayer("dispatch", 4, 4, 2, dtype=torch.float32)]
    for layer, more in zip(layers, ([], [ROUTING]), strict=True):
        copied = copy.deepcopy(layer).to(torch.float64)
        x = torch.randn(3, 4, dtype=torch.float64)
        wanted = copied(x, *more)
        torch.testing.assert_close(compiled(copied, x, *more), wanted[0] if isinstance(wanted, tuple) else wanted)
    copied = [copy.deepcopy(layer) for layer in layers]
    del layers, layer
    compiled(copied[0], x.float())
    compiled(copied[1], x.float(), ROUTING)


def styled(rank: int) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from counterpoint.parallel import ColwiseParallel

    layer = parallelize_module(torch.nn.Linear(4, 8).double(), init_device_mesh("cpu", (4,)), ColwiseParallel())
    copied = copy.deepcopy(layer)
    x = torch.ones(3, 4, dtype=torch.float64)
    with torch.no_grad():
        before = layer(x).clone()
        for parameter in copied.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(layer(x), before)
    torch.testing.assert_close(copied(x), 2 * before)
    copied(x).sum().backward()
    assert layer.weight.grad is None and copied.weight.grad is not None


def test_copies_of_parallelized_modules_have_weights_of_their_own(ranks: Ranks) -> None:
    ranks.run(styled)


class Packed:
    """A saved tensor whose axes lie in another order."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept = tensor.detach().movedim(0, -1).contiguous()

    def unpacked(self) -> torch.Tensor:
        return self.kept.movedim(-1, 0)


def test_hooks_may_lay_out_what_is_saved_as_they_like() -> None:
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(16), heads=2, head_dim=8, dtype="float64")
    layer = ColumnParallelLinear(4, 6, dtype=torch.float64)
    experts = ExpertLayer("dispatch", 4, 6, 2, dtype=torch.float64)
    x, tokens = torch.randn(16, 2, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    calls = (
        (x, lambda x: cp.attention(x, x * 2, x + 1, plan)[0]),
        (tokens, lambda x: layer(x)[0]),
        (tokens, lambda x: experts(x, ROUTING)),
    )
    for given, call in calls:
        leaf = given.clone().requires_grad_()
        wanted = torch.autograd.grad(call(leaf).square().sum(), leaf)
        with torch.autograd.graph.saved_tensors_hooks(Packed, Packed.unpacked):
            made = call(leaf)
        torch.testing.assert_close(torch.autograd.grad(made.square().sum(), leaf), wanted)
