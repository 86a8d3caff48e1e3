"""What linear layers, rows and plans refuse in words, before anything is enqueued."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")

from counterpoint.nn import ColumnParallelLinear, ExpertLayer, RowParallelLinear, SharedInputLinear  # noqa: E402

X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        ((0, 6), {}, "input_size is 0; it must be a whole number of at least 1"),
        ((4, -6), {}, "output_size is -6"),
        ((4.0, 6), {}, "input_size is 4.0"),
        ((4, 6), {"stride": 0}, "stride is 0"),
        ((4, 6), {"stride": 4}, "output_size is 6, which 1 ranks cannot share equally in 4 pieces of each"),
        ((4, 6), {"dtype": torch.complex64}, "dtype is torch.complex64; linear layers compute in float64, float32"),
        ((4, 6), {"dtype": torch.int32}, "dtype is torch.int32"),
        ((4, 6), {"overlap": 3}, "overlap is 3; it must be the name of an overlap policy"),
    ],
)
def test_layers_that_make_no_sense(arguments: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(cp.PlanError, match=said):
        ColumnParallelLinear(*arguments, **more)


def test_policies_that_nobody_knows() -> None:
    routing = cp.Routing.top_k(2, [[[0], [1], [1]]])
    for call in (
        lambda: ColumnParallelLinear(4, 6, overlap="nonsense")(X),
        lambda: ExpertLayer("dispatch", 4, 4, 2, dtype=torch.float32, overlap="nonsense")(X, routing),
    ):
        with pytest.raises(cp.PolicyError, match="unknown overlap policy `nonsense`"):
            call()


def test_inputs_that_no_layer_takes() -> None:
    layers = [ColumnParallelLinear(4, 6), RowParallelLinear(4, 6), SharedInputLinear(4, [6, 2])]
    for layer in layers:
        for x, said in ((X[0], r"input_ is \[4\]; it must be \[tokens, features\]"), (None, "not a NoneType")):
            with pytest.raises(cp.TensorError, match=said):
                layer(x)
        with pytest.raises(cp.TensorError, match="input_ and weight are torch.complex64; linear layers compute in"):
            layer.to(torch.complex64)(X.cfloat())
    for tokens in (0, -1, 1.5):
        with pytest.raises(cp.PlanError, match="tokens is"):
            layers[0].passes(tokens)
    with pytest.raises(cp.PlanError, match="has no weight of its own"):
        ColumnParallelLinear(4, 6, skip_weight_param_allocation=True).passes(3)


def test_gradients_of_what_is_no_parameter_do_not_wait() -> None:
    """They would be left on a tensor that nobody reads."""
    layer = ColumnParallelLinear(4, 6, bias=False, delay_wgrad_compute=True)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(cp.TensorError, match="cannot wait for backward_dw: leave delay_wgrad_compute out"):
        layer(X)
    with torch.no_grad():
        assert layer(X)[0].shape == (3, 6)


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_a_cpu_may_have_a_number(device: Any) -> None:
    group = cp.LocalGroup(1, device=device)
    assert ColumnParallelLinear(4, 6, tp_group=group)(X)[0].shape == (3, 6)
    assert ColumnParallelLinear(4, 6, device=device)(X)[0].shape == (3, 6)
    with pytest.raises(cp.DeviceError, match="device is cpu:x"):
        cp.LocalGroup(1, device="cpu:x")


def test_transforms_of_torch_func_are_refused() -> None:
    mask = cp.Mask.causal(8)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return cp.flex_attention(x, x, x, mask)[0]

    x = torch.randn(8, 1, 4)
    for call in (
        lambda: torch.func.vmap(attend)(x.expand(2, 8, 1, 4)),
        lambda: torch.func.grad(lambda x: attend(x).sum())(x),
    ):
        with pytest.raises(NotImplementedError, match="inside of a transform of torch.func"):
            call()
    assert attend(x).isfinite().all()


def test_copies_of_what_holds_a_plan_compute() -> None:
    plan = cp.LocalGroup(2).plan(cp.Mask.causal(8), heads=(2, 1), head_dim=4, dtype="float32")
    assert copy.deepcopy({"plan": plan})["plan"] is plan and copy.copy(plan) is plan
    assert plan.on(cp.Mask.full(8), heads=[2, 1]) is plan.on(cp.Mask.full(8), heads=(2, 1))
    x = torch.randn(8, 2)
    assert torch.equal(plan.roll(x, 10**30 + 3), plan.roll(x, (10**30 + 3) % 8))
    with pytest.raises(cp.TensorError, match="shift is True"):
        plan.roll(x, True)
