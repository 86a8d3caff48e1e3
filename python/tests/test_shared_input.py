"""Column-parallel layers that share one input: against dense layers in f64, on ranks that are processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from ranks import RankFailed, Ranks  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, SharedInputLinear  # noqa: E402

SIZE = 4
POLICIES = ("auto", "sequential", "concurrent", "signals")


@dataclass
class Case:
    """Layers of one input. `tokens` are `[s, b]` of all ranks, `outputs` the features of each layer."""

    seed: int
    tokens: tuple[int, int]
    features: int
    outputs: tuple[int, ...]

    @staticmethod
    def drawn(seed: int, sequence_parallel: bool) -> Case:
        """Sizes that are no multiple of anything but, where they must be, of the ranks."""
        draw = random.Random(seed)
        tokens = SIZE * draw.randint(1, 5) if sequence_parallel else draw.choice([1, 3, 7, 13, 18])
        outputs = tuple(SIZE * draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        return Case(seed, (tokens, draw.randint(1, 3)), draw.choice([1, 5, 8, 17]), outputs)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        seed = random.Random(f"{self.seed} {name}").getrandbits(31)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def dense(self, bias: bool, batches: int = 1) -> Dense:
        return Dense(self, bias, batches)


class Dense:
    """The layers on one device."""

    def __init__(self, case: Case, bias: bool, batches: int) -> None:
        every = range(len(case.outputs))
        self.x = [case.tensor(f"x {n}", *case.tokens, case.features).requires_grad_() for n in range(batches)]
        self.weights = [case.tensor(f"weight {i}", case.outputs[i], case.features).requires_grad_() for i in every]
        self.biases = [case.tensor(f"bias {i}", case.outputs[i]).requires_grad_() if bias else None for i in every]
        self.dy = [[case.tensor(f"dy {n} {i}", *case.tokens, case.outputs[i]) for i in every] for n in range(batches)]
        self.y = [[torch.nn.functional.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)] for x in self.x]
        for y, dy in zip(self.y, self.dy, strict=True):
            torch.autograd.backward(y, dy)


def part(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
    whole = whole.detach()
    return whole.clone() if dim is None else whole.chunk(SIZE, dim)[dist.get_rank()].contiguous()


def close(found: torch.Tensor | None, wanted: torch.Tensor, what: str) -> None:
    assert found is not None, what
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def layers_of(case: Case, dense: Dense, **more: Any) -> SharedInputLinear:
    bias = dense.biases[0] is not None
    shared = SharedInputLinear(case.features, case.outputs, bias=bias, dtype=torch.float64, **more)
    with torch.no_grad():
        for layer, weight, whole_bias in zip(shared.layers, dense.weights, dense.biases, strict=True):
            layer.weight.copy_(part(weight, 0))
            if whole_bias is not None:
                layer.bias.copy_(part(whole_bias, 0))
    return shared


def as_dense(rank: int, seed: int, sequence_parallel: bool, bias: bool, overlap: str) -> None:
    case = Case.drawn(seed, sequence_parallel)
    dense, dim, words = case.dense(bias), 0 if sequence_parallel else None, f"{case}, {bias}, {overlap}"
    shared = layers_of(case, dense, sequence_parallel=sequence_parallel, overlap=overlap)
    x = part(dense.x[0], dim).requires_grad_()
    ys, output_biases = shared(x)
    assert output_biases is None
    torch.autograd.backward(ys, [part(dy, -1) for dy in dense.dy[0]])
    for y, wanted in zip(ys, dense.y[0], strict=True):
        close(y, part(wanted, -1), f"y of {words}")
    close(x.grad, part(dense.x[0].grad, dim), f"dx of {words}")
    for layer, weight, whole_bias in zip(shared.layers, dense.weights, dense.biases, strict=True):
        close(layer.weight.grad, part(weight.grad, 0), f"dweight of {words}")
        if whole_bias is not None:
            close(layer.bias.grad, part(whole_bias.grad, 0), f"dbias of {words}")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_are_what_they_are_on_one_device(ranks: Ranks, sequence_parallel: bool) -> None:
    for (seed, bias), overlap in zip(itertools.product(range(12), (False, True)), itertools.cycle(POLICIES), strict=False):
        ranks.run(as_dense, seed, sequence_parallel, bias, overlap)


def calls_of(shared: SharedInputLinear) -> list[str]:
    """The calls of the engine from now on."""
    calls, call = [], shared._layer.call
    shared._layer.call = lambda key, name, tensors: (calls.append(name), call(key, name, tensors))[1]  # type: ignore[method-assign]
    return calls


def in_one_call(rank: int) -> None:
    """A forward and a backward are one call each, also where nothing follows from a layer, and on tensors that are not dense."""
    case = Case(90, (8, 3), 6, (16, 4, 8))
    dense = case.dense(True)
    shared = layers_of(case, dense, sequence_parallel=True)
    calls = calls_of(shared)
    x = part(dense.x[0], 0).requires_grad_()
    (q, _, v), _ = shared(x.transpose(0, 1).contiguous().transpose(0, 1))
    (q * part(dense.dy[0][0], -1)).sum().backward(retain_graph=True)
    assert calls == ["forward", "backward"]
    wanted = dense.dy[0][0] @ dense.weights[0].detach()
    close(x.grad, part(wanted, 0), "dx of the first layer alone")
    assert not shared.layers[1].weight.grad.any() and not shared.layers[2].bias.grad.any()
    v.sum().backward()
    wanted = wanted + dense.weights[2].detach().sum(0)
    close(x.grad, part(wanted, 0), "dx of a gradient that is expanded")


def test_a_pass_is_one_call(ranks: Ranks) -> None:
    ranks.run(in_one_call)


def accumulated(rank: int, sequence_parallel: bool, hooks: bool) -> None:
    """Two micro-batches into each main_grad, then one that replaces them."""
    case = Case(91, (12, 2), 7, (16, 4, 4))
    dense, dim = case.dense(True, 2), 0 if sequence_parallel else None
    shared = layers_of(case, dense, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True)
    weights = [layer.weight for layer in shared.layers]
    before = [case.tensor(f"before {rank} {i}", *weight.shape) for i, weight in enumerate(weights)]
    for weight, start in zip(weights, before, strict=True):
        weight.main_grad = start.clone()
        if hooks:
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True

    def run(n: int) -> None:
        x = part(dense.x[n], dim).requires_grad_()
        torch.autograd.backward(shared(x)[0], [part(dy, -1) for dy in dense.dy[n]])
        close(x.grad, part(dense.x[n].grad, dim), "dx")

    run(0)
    run(1)
    for layer, start, weight, bias in zip(shared.layers, before, dense.weights, dense.biases, strict=True):
        close(layer.weight.main_grad, start + part(weight.grad, 0), "main_grad")
        close(layer.bias.grad, part(bias.grad, 0), "dbias")
        assert (layer.weight.grad is not None and not layer.weight.grad.any()) if hooks else layer.weight.grad is None
        layer.weight.overwrite_main_grad = True
        layer.weight.main_grad.fill_(float("nan"))
    keys, call = [], shared._layer.call
    shared._layer.call = lambda key, name, tensors: (keys.append(key[5]), call(key, name, tensors))[1]  # type: ignore[method-assign]
    run(0)
    assert keys == ["replaced:float64"] * 2
    for i, weight in enumerate(weights):
        wanted = part(dense.dy[0][i], -1).flatten(0, 1).t() @ dense.x[0].detach().flatten(0, 1)
        close(weight.main_grad, wanted, "main_grad that was overwritten")
        weight.overwrite_main_grad = i > 0
    run(0)
    for i, weight in enumerate(weights):
        wanted = part(dense.dy[0][i], -1).flatten(0, 1).t() @ dense.x[0].detach().flatten(0, 1)
        close(weight.main_grad, wanted if i else 2 * wanted, "some that are overwritten and one that is added to")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_added_to_each_main_grad(ranks: Ranks, sequence_parallel: bool) -> None:
    for hooks in (False, True):
        ranks.run(accumulated, sequence_parallel, hooks)


def delayed(rank: int, sequence_parallel: bool, fused: bool) -> None:
    """Two micro-batches whose gradients of weights wait, those of biases do not."""
    case = Case(93, (8, 3), 5, (12, 4, 8))
    dense, dim = case.dense(True, 2), 0 if sequence_parallel else None
    shared = layers_of(
        case,
        dense,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=fused,
        delay_wgrad_compute=True,
    )
    before = [case.tensor(f"before {rank} {i}", *layer.weight.shape) for i, layer in enumerate(shared.layers)]
    for layer, start in zip(shared.layers, before, strict=True):
        layer.weight.main_grad = start.clone()
    for n in range(2):
        x = part(dense.x[n], dim).requires_grad_()
        ys = shared(x)[0]
        for y, wanted in zip(ys, dense.y[n], strict=True):
            close(y, part(wanted, -1), "y")
        torch.autograd.backward(ys, [part(dy, -1) for dy in dense.dy[n]])
        close(x.grad, part(dense.x[n].grad, dim), "dx")
    for layer, start, bias in zip(shared.layers, before, dense.biases, strict=True):
        close(layer.weight.main_grad, start, "main_grad before backward_dw")
        assert layer.weight.grad is None
        close(layer.bias.grad, part(bias.grad, 0), "dbias")
    shared.backward_dw()
    for layer, start, weight in zip(shared.layers, before, dense.weights, strict=True):
        close(layer.weight.main_grad if fused else start + layer.weight.grad, start + part(weight.grad, 0), "dweight")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_all_weights_wait_together(ranks: Ranks, sequence_parallel: bool) -> None:
    for fused in (False, True):
        ranks.run(delayed, sequence_parallel, fused)


def around_layers(rank: int) -> None:
    """Frozen weights, biases that are not added, and gradients of the input that are not summed."""
    case = Case(92, (5, 2), 9, (8, 12))
    dense = case.dense(True)
    frozen = layers_of(case, dense, skip_bias_add=True)
    for layer in frozen.layers:
        layer.weight.requires_grad_(False)
    x = dense.x[0].detach().clone().requires_grad_()
    ys, biases = frozen(x)
    assert biases is not None and all(bias is layer.bias for bias, layer in zip(biases, frozen.layers, strict=True))
    torch.autograd.backward([y + bias for y, bias in zip(ys, biases, strict=True)], [part(dy, -1) for dy in dense.dy[0]])
    close(x.grad, dense.x[0].grad, "dx of frozen weights")
    assert frozen.layers[0].weight.grad is None
    close(frozen.layers[1].bias.grad, part(dense.biases[1].grad, 0), "dbias of frozen weights")

    partial = layers_of(case, dense, disable_grad_reduce=True)
    x = dense.x[0].detach().clone().requires_grad_()
    torch.autograd.backward(partial(x)[0], [part(dy, -1) for dy in dense.dy[0]])
    assert not torch.allclose(x.grad, dense.x[0].grad)
    dist.all_reduce(x.grad)
    close(x.grad, dense.x[0].grad, "dx that the caller sums")
    close(partial.layers[0].weight.grad, part(dense.weights[0].grad, 0), "dweight")

    # The layers are ordinary ones: they have the same results one by one, and the names that checkpoints have.
    named = SharedInputLinear(9, {"q": 8, "k": 12}, dtype=torch.float64)
    assert set(named.state_dict()) == {f"{name}.{what}" for name in "qk" for what in ("weight", "bias", "_extra_state")}
    assert isinstance(named.q, ColumnParallelLinear) and named.layers == [named.q, named.k]
    assert named.k.weight.tensor_model_parallel and named.k.weight.partition_dim == 0
    together = named(x.detach())[0]
    for layer, y in zip(named.layers, together, strict=True):
        close(layer(x.detach())[0], y, "a layer by itself")


def test_what_stands_around_layers(ranks: Ranks) -> None:
    ranks.run(around_layers)


def refused(rank: int, what: str) -> None:
    x, sizes = torch.zeros(6, 8), (8, 4)
    match what:
        case "none":
            SharedInputLinear(8, [])
        case "shares":
            SharedInputLinear(8, {"q": 8, "k": 6})
        case "features":
            SharedInputLinear(8, sizes)(x[:, :3])
        case "tokens":
            SharedInputLinear(8, sizes, sequence_parallel=True)(x[:0])
        case "frozen":
            shared = SharedInputLinear(8, sizes)
            shared.layers[0].weight.requires_grad_(False)
            shared(x)
        case "some" | "types" | "shape":
            shared = SharedInputLinear(8, sizes, gradient_accumulation_fusion=True, dtype=torch.bfloat16)
            first, second = (layer.weight for layer in shared.layers)
            first.main_grad = torch.zeros(first.shape)
            if what != "some":
                second.main_grad = torch.zeros(second.shape, dtype=torch.bfloat16) if what == "types" else first.main_grad
            shared(x.bfloat16())
        case "weight":
            shared = SharedInputLinear(8, sizes)
            shared.layers[1].weight.data = torch.zeros(2, 8)
            shared(x)
        case "scattered":
            SharedInputLinear(8, sizes, sequence_parallel=True, disable_grad_reduce=True)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("none", "output_sizes is empty"),
        ("shares", "output_size is 6, which 4 ranks cannot share equally"),
        ("features", "input_ has 3 features; this rank's part of the layer takes 8"),
        ("tokens", "input_ has no tokens"),
        ("frozen", "1 of the 2 weights that share input_ require a gradient; all must, or none"),
        ("some", "1 of the 2 weights that share input_ have a main_grad; all must, or none"),
        ("types", "main_grad is torch.float32 of one weight and torch.bfloat16 of another"),
        ("shape", "main_grad is [2, 8]; it must be [1, 8]"),
        ("weight", "weight_1 is [2, 8]; this rank's part of the layer has [1, 8]"),
        ("scattered", "disable_grad_reduce is for layers without sequence_parallel"),
    ],
)
def test_what_does_not_fit_is_named(ranks: Ranks, what: str, words: str) -> None:
    with pytest.raises(RankFailed, match=".*" + words.replace("[", r"\[").replace("]", r"\]")):
        ranks.run(refused, what)


def test_one_process_needs_no_group() -> None:
    shared = SharedInputLinear(8, {"gate": 5, "up": 5}, tp_group=cp.LocalGroup(1), dtype=torch.float32)
    x = torch.randn(3, 8, requires_grad=True)
    (gate, up), _ = shared(x)
    torch.testing.assert_close(up, torch.nn.functional.linear(x, shared.up.weight, shared.up.bias))
    (torch.nn.functional.silu(gate) * up).sum().backward()
    assert x.grad is not None and shared.gate.bias.grad is not None
    assert "'gate': 5" in repr(shared)
