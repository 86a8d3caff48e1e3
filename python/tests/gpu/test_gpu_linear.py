"""Tensor-parallel linear layers on CUDA tensors: against their formulas in f64, alone and on ranks that are processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from gpu_ranks import run  # noqa: E402

from counterpoint.nn import ColumnParallelLinear, RowParallelLinear  # noqa: E402

TOKENS, NARROW, WIDE = 256, 256, 512
KINDS: dict[str, Any] = {"column": ColumnParallelLinear, "row": RowParallelLinear}
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="linear layers on GPUs are for Hopper"
)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def filled(seed: int) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: tensor.copy_(drawn(*tensor.shape, seed=seed))


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    wanted = wanted.detach().double()
    error = float((found.detach().double().cpu() - wanted).norm() / wanted.norm())
    assert error < 6e-3, f"{what} is off by {error:.1e}"


class Wanted:
    """The layer in f64, of what bf16 holds."""

    def __init__(self, bias: bool, seed: int = 3) -> None:
        self.weight = drawn(WIDE, NARROW, seed=1).double().requires_grad_()
        self.bias = drawn(WIDE, seed=2).double().requires_grad_() if bias else None
        self.x = drawn(TOKENS, NARROW, seed=seed).double().requires_grad_()
        self.dy = drawn(TOKENS, WIDE, seed=seed + 20).double()
        self.y = torch.nn.functional.linear(self.x, self.weight, self.bias)
        self.y.backward(self.dy)


def layer_of(kind: str, bias: bool, **more: Any) -> Any:
    layer = KINDS[kind](NARROW, WIDE, bias=bias, dtype=torch.bfloat16, init_method=filled(1), **more)
    if bias:
        whole = drawn(WIDE, seed=2)
        with torch.no_grad():
            layer.bias.copy_(whole.chunk(layer.group.size)[layer.group.rank] if kind == "column" else whole)
    return layer


@hopper
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_a_layer_alone(kind: str, bias: bool, backend: str | None) -> None:
    wanted = Wanted(bias)
    layer = layer_of(kind, bias, device="cuda")
    assert layer.weight.is_cuda and layer.group.device == torch.device("cuda", torch.cuda.current_device())
    x = wanted.x.detach().bfloat16().cuda().requires_grad_()
    call = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    y, _ = call(x)
    close(y, wanted.y, "y")
    y.backward(wanted.dy.bfloat16().cuda())
    close(x.grad, wanted.x.grad, "dx")
    close(layer.weight.grad, wanted.weight.grad, "dweight")
    if bias:
        close(layer.bias.grad, wanted.bias.grad, "dbias")


@hopper
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_are_added_to_an_f32_main_grad(delayed: bool, backend: str | None) -> None:
    layer = layer_of("column", True, device="cuda", gradient_accumulation_fusion=True, delay_wgrad_compute=delayed)
    layer.weight.main_grad = torch.ones(WIDE, NARROW, device="cuda")
    total = torch.ones(WIDE, NARROW, dtype=torch.float64)
    call = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    for seed in (3, 4, 5):
        wanted = Wanted(True, seed)
        total += wanted.weight.grad
        x = wanted.x.detach().bfloat16().cuda().requires_grad_()
        call(x)[0].backward(wanted.dy.bfloat16().cuda())
        close(x.grad, wanted.x.grad, "dx")
    layer.backward_dw()
    close(layer.weight.main_grad, total, "main_grad")
    assert layer.weight.grad is None


@hopper
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_gradients_replace_what_a_main_grad_has(delayed: bool, into: torch.dtype) -> None:
    layer = layer_of("column", True, device="cuda", gradient_accumulation_fusion=True, delay_wgrad_compute=delayed)
    layer.weight.main_grad = torch.full((WIDE, NARROW), torch.nan, device="cuda", dtype=into)
    layer.weight.overwrite_main_grad = True
    for seed in (3, 4):
        wanted = Wanted(True, seed)
        layer(wanted.x.detach().bfloat16().cuda().requires_grad_())[0].backward(wanted.dy.bfloat16().cuda())
        layer.backward_dw()
        close(layer.weight.main_grad, wanted.weight.grad, "main_grad")


@hopper
def test_frozen_weights_and_tensors_as_they_lie() -> None:
    wanted = Wanted(False)
    layer = layer_of("column", False, device="cuda")
    layer.weight.requires_grad_(False)
    # Not dense, and at an address that is no multiple of 16 bytes.
    apart = torch.empty(TOKENS * NARROW + 1, dtype=torch.bfloat16, device="cuda")[1:].view(TOKENS, NARROW)
    x = apart.copy_(wanted.x.detach()).requires_grad_()
    y, _ = layer(x)
    y.backward(wanted.dy.bfloat16().cuda().t().contiguous().t())
    close(y, wanted.y, "y")
    close(x.grad, wanted.x.grad, "dx")


@hopper
def test_calls_wait_for_nothing_and_are_ordered_with_the_current_stream() -> None:
    wanted, layer = Wanted(False), layer_of("column", False, device="cuda")
    x, dy = wanted.x.detach().bfloat16().cuda().requires_grad_(), wanted.dy.bfloat16().cuda()
    # All that the stream is given has run once: a kernel that is loaded at its first launch may wait for the device.
    (layer((x.detach() * 2).requires_grad_())[0] * 0.5).backward(dy)
    layer(x)[0].backward(dy)
    stream = torch.cuda.Stream()
    layer.weight.grad = x.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = (x.detach() * 2).requires_grad_()
            y = layer(late)[0]
            y.backward(dy)
            busy = not stream.query()
            doubled = y * 0.5
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert busy
    close(doubled, wanted.y, "y of what the stream makes late")
    close(late.grad, wanted.x.grad, "dx")


def test_types_that_gpus_do_not_compute_in_are_named() -> None:
    with pytest.raises(cp.PlanError, match="on GPUs linear layers compute in bfloat16 and float16"):
        ColumnParallelLinear(NARROW, WIDE, dtype=torch.float32, device="cuda")


def on_ranks(rank: int, size: int) -> None:
    """What each of `size` processes does; called by name in them."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    group = cp.Group(device="cuda", limit=60.0)
    for kind, sequence_parallel, bias in itertools.product(("column", "row"), (False, True), (False, True)):
        wanted = Wanted(bias)
        more = {"gradient_accumulation_fusion": bias, "sequence_parallel": sequence_parallel}
        layer = layer_of(kind, bias, tp_group=group, **more)
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        whole, split = (0 if sequence_parallel else None), -1
        of_x, of_y = (whole, split) if kind == "column" else (split, whole)

        def own(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
            tensor = tensor.detach()
            return tensor if dim is None else tensor.chunk(size, dim)[rank].contiguous()

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (layer, compiled):
            x = own(wanted.x, of_x).bfloat16().cuda().requires_grad_()
            y, _ = call(x)
            y.backward(own(wanted.dy, of_y).bfloat16().cuda())
        what = f"of {kind}, sequence parallel {sequence_parallel}, bias {bias}, rank {rank}"
        close(y, own(wanted.y, of_y), f"y {what}")
        close(x.grad, own(wanted.x.grad, of_x), f"dx {what}")
        gradient = layer.weight.main_grad if bias else layer.weight.grad
        close(gradient, 2 * own(wanted.weight.grad, 0 if kind == "column" else 1), f"dweight {what}")
    group.close()
    print("rank", rank, "is right", flush=True)


@hopper
def test_layers_on_ranks_that_are_processes() -> None:
    size = 2
    for rank, output in enumerate(run(size, "import test_gpu_linear; test_gpu_linear.on_ranks(rank, size)")):
        assert f"rank {rank} is right" in output and "ended with 0" in output, output
