"""MagiAttention's face on ranks that are processes, with the process groups and meshes that its users have."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from random_cases import compare, random_case, reference  # noqa: E402
from ranks import Ranks  # noqa: E402
from test_magi_attention import CONFIGS, documents_key, key_of, through_the_chain  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from counterpoint.compat.magi import api, utils  # noqa: E402


def group_of(cp_size: int):
    """This rank's group of `cp_size` ranks, side by side with others."""
    return init_device_mesh("cpu", (dist.get_world_size() // cp_size, cp_size), mesh_dim_names=("dp", "cp"))["cp"].get_group()


def chain(rank: int, *, cp_size: int, config: int, seeds: list[int]) -> int:
    group, done = group_of(cp_size), 0
    for seed in seeds:
        case = random_case(1000 * (rank // cp_size) + seed, self_attention=True)
        if not case.mask.slices or -(-case.mask.seqlen_q // 8) < cp_size:
            continue
        key = key_of(case, group, **CONFIGS[config])
        found = through_the_chain(case, key)
        if case.sink is not None:  # shares, which frameworks add up
            dist.all_reduce(found["dsink"], group=group)
        compare(found, reference(case), torch.float64)
        assert api.get_most_recent_key(group) == key
        done += 1
    api.clear_cache(group)
    return done


@pytest.mark.parametrize(("cp_size", "config"), [(1, 0), (2, 0), (4, 1), (2, 2), (4, 3)])
def test_the_chain_on_ranks(ranks: Ranks, cp_size: int, config: int) -> None:
    assert min(ranks.run(chain, cp_size=cp_size, config=config, seeds=list(range(6)))) >= 3


def partial(rank: int) -> None:
    group = group_of(4)
    key = documents_key(group, [0, 50, 130], causal=True)
    x = torch.arange(130.0).reshape(130, 1).requires_grad_()
    weights = [torch.full((130, 1), float(10**other)) for other in range(4)]
    for is_partial, wanted in ((True, 1111.0), (False, None)):
        local = api.dispatch(x.detach(), key).requires_grad_()
        (api.undispatch(local, key, is_partial) * weights[rank]).sum().backward()
        assert (local.grad[api.get_position_ids(key) < 129] == (wanted or 10.0**rank)).all()
    rolled = api.undispatch(api.roll(api.dispatch(x, key), -1, 0, key), key)
    padded = torch.cat([x.detach(), torch.zeros(key.pad_size, 1)])
    assert torch.equal(rolled.detach(), padded.roll(-1, 0)[:130])
    rolled.square().sum().backward()
    # The dispatch's backward gathers: every rank has all of the gradient.
    kept = torch.ones(130, 1)
    kept[0] = 0 if key.pad_size else 1
    assert torch.equal(x.grad, 2 * x.detach() * kept)
    assert utils.is_same_process_group(group, dist.group.WORLD) and not utils.is_same_process_group(group, None)


def test_gradients_of_parts_and_rolling_on_ranks(ranks: Ranks) -> None:
    ranks.run(partial)


def nodes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    case = random_case(7, self_attention=True)
    key = key_of(case, mesh)
    assert key.cp_mesh is mesh and len(dist.get_process_group_ranks(key.cp_group)) == 4
    found = through_the_chain(case, key)
    if case.sink is not None:
        dist.all_reduce(found["dsink"])
    compare(found, reference(case), torch.float64)
    with pytest.raises(AssertionError, match="the mesh has 3 dimensions"):
        documents_key(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")), [0, 64])


def test_a_mesh_of_nodes() -> None:
    # Of their own: a group of the same ranks, all on one node, is open on the others.
    with Ranks(4) as ranks:
        ranks.run(nodes)


def reference_backend(rank: int, reduce: str) -> None:
    os.environ["MAGI_ATTENTION_KERNEL_BACKEND"] = "sdpa"
    os.environ["MAGI_ATTENTION_DSINK_ALL_REDUCE_OP"] = reduce
    try:
        case = next(case for seed in range(50) if (case := random_case(seed, self_attention=True)).sink is not None)
        found = {}
        for backend in ("sdpa", "ffa"):
            os.environ["MAGI_ATTENTION_KERNEL_BACKEND"] = backend
            found[backend] = through_the_chain(case, key_of(case, dist.group.WORLD))
            expected = reference(case)
            if reduce == "none":
                dist.all_reduce(found[backend]["dsink"])
            if reduce == "avg":
                expected["dsink"] = expected["dsink"] / 4
            compare(found[backend], expected, torch.float64)
    finally:
        del os.environ["MAGI_ATTENTION_KERNEL_BACKEND"], os.environ["MAGI_ATTENTION_DSINK_ALL_REDUCE_OP"]


@pytest.mark.parametrize("reduce", ["none", "sum", "avg"])
def test_the_reference_and_gradients_of_sinks_on_ranks(ranks: Ranks, reduce: str) -> None:
    ranks.run(reference_backend, reduce)


def quick_start(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    found = utils.setup_dist_env(backend="gloo", base_seed=3, seed_bias=lambda rank: rank)
    assert found[:5] == (rank, rank, size, 1, 1) and found[5] is dist.group.WORLD and found[6:] == ("cpu", 3 + rank)
    key = documents_key(found[5], [0, 40], causal=True)
    x = torch.arange(40.0)[:, None]
    assert torch.equal(api.undispatch(api.dispatch(x, key), key), x)
    utils.clearup_dist_env()
    assert not dist.is_initialized()


def test_setting_up_as_the_quick_start_does() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(quick_start, (2, port), nprocs=2)
