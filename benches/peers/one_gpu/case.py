"""One mask and shape: the ways of every peer that has it, their results checked."""

from functools import partial

from common.interleaved import ready
from one_gpu.backends import BACKENDS
from one_gpu.clock import ClockedWay
from one_gpu.cudnn_flex import cudnn_flex
from one_gpu.ffa import ffa
from one_gpu.masks import Mask
from one_gpu.reference import Reference

# What each makes of a mask and tensors: names of variants, what makes each, and the passes that it is for. None are those of a peer that
# has no such mask. A variant has `forward()` -> (out,) and `backward()` -> (dq, dk, dv), `rows`, which turns them to [rows, heads, dim],
# and `within`, the context in which it runs.
PEERS = {**BACKENDS, "cudnn_flex": cudnn_flex, "ffa": ffa}


def ways_of(mask, tensors, options, clock):
    """The ways of all peers, one after the other."""
    mask = Mask(mask, tensors.shape.seqlen)
    reference = Reference(mask, tensors, options.passes)
    for peer in options.peers:
        for variant, make, passes in ready(partial(PEERS[peer], mask, tensors), peer=peer, mask=mask.name, shape=tensors.shape):
            wanted = [which for which in options.passes if which in passes]
            prepare = partial(ways_by, peer, variant, make, wanted, reference, clock)
            yield from ready(prepare, peer=peer, variant=variant, mask=mask.name, shape=tensors.shape)


def ways_by(peer, variant, make, passes, reference, clock):
    """The passes of one variant."""
    runner = make() if passes else None
    for which in passes:
        run = getattr(runner, which)
        with runner.within():
            results = [runner.rows(x) for x in run()]
        error, bound = reference.error(which, results)
        known = {"by": peer, "variant": variant, "pass": which, "error_over_bound": error / bound}
        yield ClockedWay(clock, run, runner.within, **known)
