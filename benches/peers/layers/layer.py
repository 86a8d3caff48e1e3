"""One rank's tensors of a tensor-parallel linear layer, and its collectives."""

from common.pytorch import dist, torch


class Layer:
    """One rank's tensors of a layer: x, weight [out, in], dy."""

    def __init__(self, kind, activations, shape, device):
        tokens, hidden, local = shape
        self.kind, self.sequence_parallel = kind, activations == "sequence_parallel"
        self.tokens, self.ranks, self.rank = tokens, dist.get_world_size(), dist.get_rank()
        own = tokens // self.ranks if self.sequence_parallel else tokens
        x, weight, dy = {
            "column": ((own, hidden), (local, hidden), (tokens, local)),
            "row": ((tokens, local), (hidden, local), (own, hidden)),
        }[kind]
        # What all ranks have is drawn from one seed.
        common = torch.Generator(device=device).manual_seed(1)
        of_rank = torch.Generator(device=device).manual_seed(100 + self.rank)
        shared = of_rank if self.sequence_parallel else common
        generators = (shared, of_rank, of_rank) if kind == "column" else (of_rank, of_rank, shared)

        def normal(shape, generator):
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.x, self.weight, self.dy = (normal(s, g) for s, g in zip((x, weight, dy), generators))
        self.main_grad = torch.zeros(weight, dtype=torch.float32, device=device)

    def gathered(self, part):
        """All tokens, and what waits for them."""
        if not self.sequence_parallel:
            return part, None
        whole = part.new_empty((self.tokens, part.shape[1]))
        return whole, dist.all_gather_into_tensor(whole, part, async_op=True)

    def summed(self, shares):
        """A rank's sums, and what waits for them."""
        if not self.sequence_parallel:
            return shares, dist.all_reduce(shares, async_op=True)
        sums = shares.new_empty((self.tokens // self.ranks, shares.shape[1]))
        return sums, dist.reduce_scatter_tensor(sums, shares, async_op=True)


def wait(handle):
    if handle is not None:
        handle.wait()
