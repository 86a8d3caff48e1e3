"""GPUs as PyTorch knows them: its streams, its memory, its packages. Loaded when a group on a GPU is made."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from counterpoint._arrays import torch_module
from counterpoint._native import Attempt, Ranks, _search_packages
from counterpoint.errors import DeviceError


def device(asked: Any) -> Any:
    """`asked` ("cuda", "cuda:1" or a `torch.device`) with its number."""
    torch = torch_module("a group on a GPU")
    try:
        found = torch.device(asked)
    except RuntimeError as error:
        raise DeviceError(f"device is {asked!r}: {str(error).splitlines()[0]}") from None
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device is {found}, and PyTorch {torch.__version__} finds no GPU: torch.cuda.is_available() is False; see whether "
            'nvidia-smi finds its driver, or take device="cpu"'
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise DeviceError(f"device is {found}; this process sees {count} GPUs, numbered from 0: check CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", index)


def current_stream(place: Any) -> Callable[[], int]:
    """A function that gives the handle of PyTorch's current stream on a device: 0 is the legacy default stream."""
    torch = torch_module("a group on a GPU")
    # What Triton asks, and 20 times as fast as making a torch.cuda.Stream.
    handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle is not None:
        return functools.partial(handle, place.index)
    return lambda: int(torch.cuda.current_stream(place).cuda_stream)


def local(size: int, place: Any, limit: float, tuned: str | None) -> Ranks:
    """`size` ranks that share a GPU, whose memory is that of PyTorch's caching allocator."""
    torch = torch_module("a group on a GPU")
    _search_packages(package_folders())
    torch.cuda.init()
    return Ranks.cuda(size, place.index, limit=limit, tuned=tuned, allocator=_memory(place))


def join(attempt: Attempt, place: Any, **how: Any) -> Ranks:
    """A rank of an attempt to join, `how` as in `Ranks.join_cuda`. Ranks that share a GPU open each other's memory."""
    torch = torch_module("a group on a GPU")
    _search_packages(package_folders())
    torch.cuda.init()
    return Ranks.join_cuda(attempt, place.index, **how, allocator=_memory(place))


def _memory(place: Any) -> tuple[Callable[[int, int], int | None], Callable[[int], None], Callable[[], int]]:
    """What the engine calls for memory, on any thread."""
    torch = torch_module("a group on a GPU")

    # It may have the stream wait until others have left the memory.
    is_ordered = torch.cuda.get_allocator_backend() == "cudaMallocAsync"

    def allocate(count: int, stream: int) -> int | None:
        # Of a stream that the engine keeps empty: nothing enqueued can use what the allocator has for it.
        try:
            address = int(torch.cuda.caching_allocator_alloc(count, place, stream))
            if is_ordered:
                torch.cuda.ExternalStream(stream, device=place).synchronize()
            return address
        except torch.OutOfMemoryError:
            pass
        # What is cached for a stream that computes may be in parts that cannot go back to the driver. It is idle once that is.
        for busy in dict.fromkeys((torch.cuda.current_stream(place), torch.cuda.default_stream(place))):
            try:
                address = int(torch.cuda.caching_allocator_alloc(count, place, busy))
            except torch.OutOfMemoryError:
                continue
            busy.synchronize()
            return address
        return None

    def cached() -> int:
        return int(torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place))

    return allocate, torch.cuda.caching_allocator_delete, cached


def package_folders() -> list[str]:
    """Where this interpreter's packages lie, in the order in which it imports: absolute, and never the current folder."""
    torch = torch_module("a group on a GPU")
    next_to_torch = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
    found = [next_to_torch, *sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    # Some interpreters have no such function.
    found += getattr(site, "getsitepackages", list)()
    user = getattr(site, "getusersitepackages", lambda: "")()
    found.append(user if site.ENABLE_USER_SITE else "")
    return list(dict.fromkeys(path for path in found if os.path.isabs(path) and path.endswith("-packages")))
