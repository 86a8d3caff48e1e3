"""A process for each GPU, and what all of them do together."""

import datetime
import math
import os
import socket
import statistics
import sys
import time
import warnings

from common.command_line import note
from common.pytorch import dist, torch


# Of every wait for the other ranks: with PyTorch's ten minutes whoever waits for one that has failed seems to hang.
LIMIT = datetime.timedelta(minutes=2)


def run(work, options):
    """Runs `work(rank, ranks, options)` in a process for each of `options.gpus` GPUs, all where that is None.

    Under torchrun this process is one of them."""
    here = torch.cuda.device_count()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Its ranks are those of one host: a rank's number is its GPU's.
        if here < ranks:
            lacks(ranks, here)
        work(rank, ranks, options)
        return
    ranks = options.gpus or here
    if not 2 <= ranks <= here:
        lacks(ranks, here)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(spawned, args=(work, ranks, options, port), nprocs=ranks)
    except torch.multiprocessing.ProcessExitedException as error:
        # It has said why.
        sys.exit(error.exit_code)


def lacks(ranks, here):
    note(f"{ranks} GPUs asked for, {here} here; at least 2 are needed")
    sys.exit(3)


def spawned(rank, work, ranks, options, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    work(rank, ranks, options)


def forbid_multicast():
    """Nobody may need multicast objects, which a host may not allow. Before `join`."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def join(rank, ranks):
    """Connects this rank to the others, and gives its GPU."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device, timeout=LIMIT)
    return device


def symmetric_memory(rank):
    """PyTorch's symmetric memory, or None and a note of why; importing it registers the fused operators."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        with warnings.catch_warnings():
            # Newer ones need no such call, and say so.
            warnings.simplefilter("ignore")
            symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    except (ImportError, AttributeError) as error:
        if rank == 0:
            note(f"symmetric memory: {error}")
        return None
    return symmetric


# Of a GPU in a second, about.
CYCLES = 1.9e9


def seconds(work, iterations):
    """The slowest rank's median, with its smallest and largest. All ranks start each run together."""
    for _ in range(3):
        work()
    times = [once(work, hold=1e-3)[0] for _ in range(iterations)]
    figures = torch.tensor([statistics.median(times), min(times), max(times)], device="cuda")
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return figures.tolist()


def once(work, hold):
    """Seconds of this rank in a run that all ranks start together, and those in which its host enqueued it.

    A GPU does nothing for `hold` seconds first, so that its host is ahead, as in training. All ranks must hold as long, or those
    that begin first wait for the others; and no longer than they need, for a GPU that was idle begins with a higher clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    since = time.perf_counter()
    torch.cuda._sleep(int(hold * CYCLES))
    begin.record()
    work()
    end.record()
    enqueued = time.perf_counter() - since
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, enqueued


def worst(ratios):
    """The largest ratio of all ranks. What is no number is larger than all others."""
    here = max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=0.0)
    largest = torch.tensor([here], device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
