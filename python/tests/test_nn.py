"""Tensor-parallel linear layers: against Megatron's formulas in f64, on ranks that are processes."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import RankFailed, Ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, RowParallelLinear  # noqa: E402

SIZE, BATCH, TOKENS, WIDE, NARROW = 4, 2, 12, 16, 8


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(seed: int) -> Any:
    return lambda tensor: tensor.copy_(drawn(*tensor.shape, seed=seed))


def part(whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    return whole.chunk(SIZE, dim)[rank].contiguous()


class Wanted:
    """The layer on one device, by its formulas. The weight is rounded to f32, in which modules draw it."""

    def __init__(self, bias: bool, micro_batches: int = 1) -> None:
        self.weight = drawn(WIDE, NARROW, seed=1).float().double().requires_grad_()
        self.bias = drawn(WIDE, seed=2).requires_grad_() if bias else None
        self.x = [drawn(TOKENS, BATCH, NARROW, seed=3 + n).requires_grad_() for n in range(micro_batches)]
        self.y = [torch.nn.functional.linear(x, self.weight, self.bias) for x in self.x]
        self.dy = [drawn(TOKENS, BATCH, WIDE, seed=13 + n) for n in range(micro_batches)]
        for y, dy in zip(self.y, self.dy, strict=True):
            y.backward(dy)


def close(found: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    if wanted is None or found is None:
        assert found is wanted, what
        return
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def layer_of(kind: str, **more: Any) -> torch.nn.Module:
    make = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = make(NARROW, WIDE, dtype=torch.float64, init_method=filled(1), **more)
    if layer.bias is not None:
        bias = drawn(WIDE, seed=2)
        with torch.no_grad():
            layer.bias.copy_(part(bias, dist.get_rank(), 0) if kind == "column" else bias)
    return layer


class Parts:
    """What one rank has of the tensors of a layer of a kind."""

    def __init__(self, kind: str, sequence_parallel: bool, rank: int) -> None:
        self.rank, whole = rank, 0 if sequence_parallel else None
        self.x_dim, self.y_dim = (whole, -1) if kind == "column" else (-1, whole)
        self.weight_dim, self.bias_dim = (0, 0) if kind == "column" else (1, None)

    def of(self, whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        return whole.detach().clone() if dim is None else part(whole.detach(), self.rank, dim)


def as_defined(rank: int, kind: str, sequence_parallel: bool, bias: bool, overlap: str) -> None:
    wanted, parts = Wanted(bias), Parts(kind, sequence_parallel, rank)
    layer = layer_of(kind, bias=bias, sequence_parallel=sequence_parallel, overlap=overlap)
    x = parts.of(wanted.x[0], parts.x_dim).requires_grad_()
    y, output_bias = layer(x)
    assert output_bias is None
    close(y, parts.of(wanted.y[0], parts.y_dim), "y")
    y.backward(parts.of(wanted.dy[0], parts.y_dim))
    close(x.grad, parts.of(wanted.x[0].grad, parts.x_dim), "dx")
    close(layer.weight.grad, parts.of(wanted.weight.grad, parts.weight_dim), "dweight")
    if bias:
        gradient = layer.bias.grad
        assert layer.bias.allreduce
        if kind == "row":
            assert layer.bias.sequence_parallel is sequence_parallel
            # What Megatron's finalize_model_grads does with parameters that are marked so.
            if sequence_parallel:
                dist.all_reduce(gradient)
        close(gradient, parts.of(wanted.bias.grad, parts.bias_dim), "dbias")
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, parts.weight_dim)


POLICIES = ("auto", "sequential", "concurrent", "signals")


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_are_what_their_formulas_say(ranks: Ranks, kind: str, sequence_parallel: bool) -> None:
    for bias, overlap in itertools.product((False, True), POLICIES):
        ranks.run(as_defined, kind, sequence_parallel, bias, overlap)


def accumulated(rank: int, kind: str, sequence_parallel: bool, delayed: bool, hooks: bool) -> None:
    """Three micro-batches into one main_grad, at once or by backward_dw."""
    wanted, parts = Wanted(True, 3), Parts(kind, sequence_parallel, rank)
    layer = layer_of(kind, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True, delay_wgrad_compute=delayed)
    before = drawn(*layer.weight.shape, seed=50 + rank)
    layer.weight.main_grad = before.clone()
    if hooks:
        layer.weight.grad_added_to_main_grad = False
        layer.weight.zero_out_wgrad = True
    for x_whole, dy_whole in zip(wanted.x, wanted.dy, strict=True):
        x = parts.of(x_whole, parts.x_dim).requires_grad_()
        layer(x)[0].backward(parts.of(dy_whole, parts.y_dim))
        close(x.grad, parts.of(x_whole.grad, parts.x_dim), "dx")
    if delayed:
        close(layer.weight.main_grad, before, "main_grad before backward_dw")
        layer.backward_dw()
    close(layer.weight.main_grad, before + parts.of(wanted.weight.grad, parts.weight_dim), "main_grad")
    if hooks and not delayed:
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad is not None and not layer.weight.grad.any()
    elif not hooks:
        assert layer.weight.grad is None
    gradient = layer.bias.grad
    if kind == "row" and sequence_parallel:
        dist.all_reduce(gradient)
    close(gradient, parts.of(wanted.bias.grad, parts.bias_dim), "dbias")
    replaces(layer, wanted, parts, delayed)


def replaces(layer: torch.nn.Module, wanted: Wanted, parts: Parts, delayed: bool) -> None:
    """Under `overwrite_main_grad` a gradient takes the place of what was there, also where that is asked behind the forward."""
    weight, keys, call = layer.weight, [], layer._layer.call
    layer._layer.call = lambda key, name, tensors: (keys.append((name, key[5])), call(key, name, tensors))[1]
    for before in (True, False):
        weight.overwrite_main_grad = before
        weight.main_grad.fill_(float("nan"))
        x = parts.of(wanted.x[0], parts.x_dim).requires_grad_()
        y = layer(x)[0]
        weight.overwrite_main_grad = True
        y.backward(parts.of(wanted.dy[0], parts.y_dim))
        layer.backward_dw()
        dweight = wanted.dy[0].flatten(0, 1).t() @ wanted.x[0].detach().flatten(0, 1)
        close(weight.main_grad, parts.of(dweight, parts.weight_dim), "main_grad that was overwritten")
    # In the epilogue of the product, without a pass of zeros.
    assert delayed or [gradient for name, gradient in keys if name == "backward"] == ["replaced:float64"] * 2
    weight.overwrite_main_grad = False
    layer(x)[0].backward(parts.of(wanted.dy[0], parts.y_dim))
    layer.backward_dw()
    close(weight.main_grad, parts.of(2 * dweight, parts.weight_dim), "main_grad that is added to again")


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_are_added_to_main_grad(ranks: Ranks, kind: str, sequence_parallel: bool, delayed: bool) -> None:
    for hooks in (False, True):
        ranks.run(accumulated, kind, sequence_parallel, delayed, hooks)


def delayed_into_grad(rank: int, kind: str) -> None:
    wanted, parts = Wanted(False, 2), Parts(kind, True, rank)
    layer = layer_of(kind, bias=False, sequence_parallel=True, delay_wgrad_compute=True)
    for x_whole, dy_whole in zip(wanted.x, wanted.dy, strict=True):
        layer(parts.of(x_whole, parts.x_dim).requires_grad_())[0].backward(parts.of(dy_whole, parts.y_dim))
    assert layer.weight.grad is None
    layer.backward_dw()
    close(layer.weight.grad, parts.of(wanted.weight.grad, parts.weight_dim), "dweight")


def test_gradients_that_wait_need_no_main_grad(ranks: Ranks) -> None:
    for kind in ("column", "row"):
        ranks.run(delayed_into_grad, kind)


def around_layers(rank: int) -> None:
    """Outputs gathered and inputs split around the layers, a frozen weight, a weight of the call, a bias that is not added."""
    wanted = Wanted(True)
    gathers = layer_of("column", gather_output=True)
    x = wanted.x[0].detach().clone().requires_grad_()
    y = gathers(x)[0]
    close(y, wanted.y[0], "gathered y")
    y.backward(wanted.dy[0])
    close(x.grad, wanted.x[0].grad, "dx behind a gather")
    close(gathers(x, runtime_gather_output=False)[0], part(wanted.y[0], rank, -1), "y")

    splits = layer_of("row", input_is_parallel=False, skip_bias_add=True)
    x = wanted.x[0].detach().clone().requires_grad_()
    y, output_bias = splits(x)
    assert output_bias is splits.bias
    close(y + output_bias, wanted.y[0], "y of split inputs")
    y.backward(wanted.dy[0])
    close(x.grad, wanted.x[0].grad, "dx before a split")

    given = layer_of("column", bias=False, skip_weight_param_allocation=True)
    weight = part(wanted.weight.detach(), rank, 0).requires_grad_()
    x = wanted.x[0].detach().clone().requires_grad_()
    y = given(x, weight)[0]
    y.backward(part(wanted.dy[0], rank, -1))
    close(weight.grad, part(wanted.weight.grad, rank, 0), "gradient of a weight that was given")

    frozen = layer_of("column", bias=False)
    frozen.weight.requires_grad_(False)
    x = wanted.x[0].detach().clone().requires_grad_()
    frozen(x)[0].backward(part(wanted.dy[0], rank, -1))
    close(x.grad, wanted.x[0].grad, "dx of a frozen weight")
    assert frozen.weight.grad is None


def test_what_stands_around_layers(ranks: Ranks) -> None:
    ranks.run(around_layers)


def sharing_one_input(rank: int) -> None:
    """q, k and v of one input: each gradient is the rank's own, and one all-reduce sums all of them."""
    layers = [layer_of("column", disable_grad_reduce=True) for _ in range(3)]
    wanted = Wanted(True)
    x = wanted.x[0].detach().clone().requires_grad_()
    sum(layer(x)[0] for layer in layers).backward(part(wanted.dy[0], rank, -1))
    assert not torch.allclose(x.grad, 3 * wanted.x[0].grad)
    dist.all_reduce(x.grad)
    close(x.grad, 3 * wanted.x[0].grad, "dx of three layers")
    close(layers[1].weight.grad, part(wanted.weight.grad, rank, 0), "dweight")


def test_layers_that_share_one_input_need_one_sum(ranks: Ranks) -> None:
    ranks.run(sharing_one_input)


def state_dicts(rank: int) -> None:
    config = SimpleNamespace(sequence_parallel=True, params_dtype=torch.float64, gradient_accumulation_fusion=False)
    layer = RowParallelLinear(NARROW, WIDE, config=config, init_method=filled(1))
    assert layer.sequence_parallel and layer.weight.dtype == torch.float64
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "_extra_state"}
    other = RowParallelLinear(NARROW, WIDE, config=config, init_method=filled(7))
    other.load_state_dict({**state, "_extra_state": {"of": "another implementation"}})
    torch.testing.assert_close(other.weight, layer.weight)
    del state["_extra_state"]
    other.load_state_dict(state)


def test_state_dicts(ranks: Ranks) -> None:
    ranks.run(state_dicts)


def in_mesh(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = ColumnParallelLinear(NARROW, WIDE, tp_group=mesh["tp"], dtype=torch.float64, init_method=filled(1), bias=False)
    x = drawn(TOKENS, NARROW, seed=9)
    weight = drawn(WIDE, NARROW, seed=1).float().double()
    close(layer(x)[0], (x @ weight.t()).chunk(2, -1)[rank % 2], "y")
    return [layer.group.size, layer.output_size_per_partition]


def test_tensor_parallel_with_data_parallel(ranks: Ranks) -> None:
    assert ranks.run(in_mesh) == [[2, WIDE // 2]] * 4


def styled(rank: int, sequence_parallel: bool) -> None:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from counterpoint.parallel import ColwiseParallel, RowwiseParallel

    mesh = init_device_mesh("cpu", (SIZE,))

    def mlp() -> torch.nn.Sequential:
        torch.manual_seed(5)
        up, down = torch.nn.Linear(NARROW, WIDE), torch.nn.Linear(WIDE, NARROW)
        return torch.nn.Sequential(up, torch.nn.GELU(), down).double()

    single, whole = mlp(), mlp()
    layout = Shard(0) if sequence_parallel else None
    plan = {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel(output_layouts=layout)}
    parallelize_module(whole, mesh, plan)
    assert isinstance(whole[0].weight, DTensor) and list(whole.state_dict()) == list(single.state_dict())
    x = drawn(TOKENS, NARROW, seed=20)
    dy = drawn(TOKENS, NARROW, seed=21)
    x_single = x.clone().requires_grad_()
    y_single = single(x_single)
    y_single.backward(dy)
    own = (lambda t: part(t, rank, 0)) if sequence_parallel else (lambda t: t)
    x_own = own(x).clone().requires_grad_()
    y = whole(x_own)
    close(y, own(y_single.detach()), "y")
    y.backward(own(dy))
    close(x_own.grad, own(x_single.grad), "dx")
    for name, parameter in whole.named_parameters():
        close(parameter.grad.full_tensor(), dict(single.named_parameters())[name].grad, name)


def styled_as_dtensors(rank: int) -> None:
    """Between layers of PyTorch's styles, and with results that are `DTensor`s."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel as TheirColwise
    from torch.distributed.tensor.parallel import RowwiseParallel as TheirRowwise
    from torch.distributed.tensor.parallel import parallelize_module

    from counterpoint.parallel import ColwiseParallel, RowwiseParallel

    mesh, x = init_device_mesh("cpu", (SIZE,)), drawn(TOKENS, NARROW, seed=20)
    whole = {"use_local_output": False}
    theirs, between = {"0": TheirColwise(), "1": TheirRowwise()}, {"2": ColwiseParallel(), "3": RowwiseParallel()}
    ours = {"0": ColwiseParallel(**whole), "1": RowwiseParallel(**whole), "2": ColwiseParallel(**whole), "3": RowwiseParallel()}
    for plan in (theirs | between, ours):
        torch.manual_seed(5)
        mlp = torch.nn.Sequential(*(torch.nn.Linear(*size).double() for size in [(NARROW, WIDE), (WIDE, NARROW)] * 2))
        single, parallel = x.clone().requires_grad_(), x.clone().requires_grad_()
        wanted = mlp(single)
        wanted.square().sum().backward()
        found = parallelize_module(mlp, mesh, plan)(parallel)
        found.square().sum().backward()
        close(found, wanted.detach(), "y")
        close(parallel.grad, single.grad, "dx")
    with pytest.raises(cp.PlanError, match="features of this side are split"):
        ColwiseParallel(output_layouts=Shard(0))
    layer = parallelize_module(torch.nn.Linear(NARROW, WIDE).double(), mesh, ColwiseParallel(output_layouts=Shard(1)))
    with pytest.raises(cp.PlanError, match="neither tokens nor features of 3 axes"):
        layer(x[None])
    with pytest.raises(cp.TensorError, match="input_ is a DTensor, and layers take"):
        layer_of("column")(torch.distributed.tensor.distribute_tensor(x, mesh))


def test_styles_of_parallelize_module_among_others(ranks: Ranks) -> None:
    ranks.run(styled_as_dtensors)


def styled_under_autocast(rank: int) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from counterpoint.parallel import ColwiseParallel, RowwiseParallel

    torch.manual_seed(5)
    mlp = torch.nn.Sequential(torch.nn.Linear(NARROW, WIDE), torch.nn.Linear(WIDE, NARROW))
    x = drawn(TOKENS, NARROW, seed=20).float()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = mlp(x)
        parallelize_module(mlp, init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        found = mlp(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in mlp.parameters()} == {torch.float32}


def test_styles_of_parallelize_module_follow_autocast(ranks: Ranks) -> None:
    ranks.run(styled_under_autocast)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_styles_of_parallelize_module(ranks: Ranks, sequence_parallel: bool) -> None:
    ranks.run(styled, sequence_parallel)


def refused(rank: int, what: str) -> None:
    x = torch.zeros(TOKENS, NARROW, dtype=torch.float64)
    match what:
        case "features":
            layer_of("column")(x[:, :3])
        case "type":
            layer_of("column")(x.float())
        case "tokens":
            layer_of("row", sequence_parallel=True)(x[:6, :2].clone())
        case "shares":
            ColumnParallelLinear(NARROW, 6)
        case "expert":
            ColumnParallelLinear(NARROW, WIDE, is_expert=True)
        case "main_grad":
            layer = layer_of("column", gradient_accumulation_fusion=True)
            layer.weight.main_grad = torch.zeros(3, dtype=torch.float64)
            layer(x)
        case "policy":
            layer_of("column", overlap="concurrent+fast")(x)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("features", "input_ has 3 features; this rank's part of the layer takes 8"),
        ("type", "weight is torch.float64 and input_ is torch.float32"),
        ("tokens", "6 tokens, which 4 ranks cannot share equally"),
        ("shares", "output_size is 6, which 4 ranks cannot share equally"),
        ("expert", "is_expert is not supported"),
        ("main_grad", "main_grad is [3]; it must be [4, 8]"),
        ("policy", "unknown overlap policy `fast`"),
    ],
)
def test_what_does_not_fit_is_named(ranks: Ranks, what: str, words: str) -> None:
    with pytest.raises(RankFailed, match=".*" + words.replace("[", r"\[").replace("]", r"\]")):
        ranks.run(refused, what)


def test_one_process_needs_no_group() -> None:
    layer = ColumnParallelLinear(NARROW, WIDE, dtype=torch.float32, tp_group=cp.LocalGroup(1))
    x = torch.randn(5, NARROW, requires_grad=True)
    y, _ = layer(x)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    y.sum().backward()
    assert x.grad is not None and layer.bias.grad is not None
    with pytest.raises(cp.PlanError, match="a LocalGroup of 2 ranks is one process"):
        RowParallelLinear(NARROW, WIDE, tp_group=cp.LocalGroup(2))


def test_a_provider_of_specs_gives_these_layers_and_the_rest_of_another(monkeypatch) -> None:
    from counterpoint.megatron import SpecProvider

    class Rest:
        def layer_norm(self) -> str:
            return "norm of another"

        def column_parallel_linear(self) -> str:
            return "never asked for"

    provider = SpecProvider(Rest())
    assert (provider.column_parallel_linear(), provider.row_parallel_linear()) == (ColumnParallelLinear, RowParallelLinear)
    assert provider.layer_norm() == "norm of another"
    assert provider.fuse_layernorm_and_linear() is False and provider.column_parallel_layer_norm_linear() is None
    with pytest.raises(AttributeError):
        provider.no_such_slot()
    monkeypatch.setitem(sys.modules, "megatron.core.models.backends", None)
    with pytest.raises(cp.MissingLibraryError, match="pip install megatron-core"):
        SpecProvider()


def of_changing_tokens(rank: int, kind: str, sequence_parallel: bool) -> None:
    """Numbers of tokens that nobody has seen, few and many, within a capacity and without one: the same bits."""
    most = 4 * 96
    make = ColumnParallelLinear if kind == "column" else RowParallelLinear

    def layer(max_tokens: int | None) -> torch.nn.Module:
        more = {"sequence_parallel": sequence_parallel, "max_tokens": max_tokens, "overlap": "concurrent"}
        return make(NARROW, WIDE, dtype=torch.float32, init_method=filled(1), bias=False, **more)

    within, alone = layer(most), layer(None)
    for tokens in (most, 4, 200, 212, 380, 12):
        rows = tokens // SIZE if sequence_parallel and kind == "column" else tokens
        x = drawn(rows, NARROW if kind == "column" else NARROW // SIZE, seed=tokens + rank).float()
        found = []
        for one in (within, alone):
            given = x.clone().requires_grad_()
            one.weight.grad = None
            y = one(given)[0]
            y.backward(drawn(*y.shape, seed=7).float())
            found.append((y.detach(), given.grad, one.weight.grad))
        assert all(map(torch.equal, *found)), tokens
    assert within.passes(380).forward.overlap == "concurrent"
    with pytest.raises(cp.TensorError, match="at most max_tokens, 384"):
        within(torch.zeros((most + SIZE) // (SIZE if sequence_parallel and kind == "column" else 1), x.shape[1]))
    # Nothing was enqueued: all goes on.
    assert torch.equal(within(x)[0], found[1][0])


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_numbers_of_tokens_change_within_a_capacity(ranks: Ranks, kind: str, sequence_parallel: bool) -> None:
    ranks.run(of_changing_tokens, kind, sequence_parallel)


def test_a_capacity_is_a_whole_number() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(cp.PlanError, match="max_tokens is"):
            ColumnParallelLinear(NARROW, WIDE, max_tokens=wrong)
