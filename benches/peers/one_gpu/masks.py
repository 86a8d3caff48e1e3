"""The masks of the comparison, over documents of realistic lengths."""

import functools
from pathlib import Path

from common.pytorch import torch

MASKS = ["full", "causal", "varlen_full", "varlen_causal", "sw_causal", "block_causal", "varlen_block_causal"]
# Rows of the window and of a block.
WINDOW = 1024
BLOCK = 2048


@functools.cache
def listed():
    """Lengths of packed documents, by the length of the sequence."""
    folder = Path(__file__).resolve().parents[2] / "data"
    read = lambda kilo: [int(line) for line in (folder / f"documents_{kilo}k.txt").read_text().split()]
    return {kilo * 1024: read(kilo) for kilo in (8, 16, 32)}


def documents(seqlen):
    """The list of that length; multiples of the longest repeat it; for others the shortest list scaled, what is left over
    going to the longest document."""
    if seqlen in listed():
        return listed()[seqlen]
    longest = max(listed())
    if seqlen > longest and seqlen % longest == 0:
        return listed()[longest] * (seqlen // longest)
    shortest = min(listed())
    scaled = [max(1, n * seqlen // shortest) for n in listed()[shortest]]
    scaled[scaled.index(max(scaled))] += seqlen - sum(scaled)
    return scaled


class Mask:
    """A mask of the comparison. Every row of these sees one interval of columns, `lo .. hi`."""

    def __init__(self, name, seqlen):
        if name not in MASKS:
            raise ValueError(f"{name} is no mask in which every row sees one interval of columns")
        self.name, self.seqlen = name, seqlen
        self.lengths = documents(seqlen) if name.startswith("varlen") else [seqlen]
        row = torch.arange(seqlen, device="cuda")
        lengths = torch.tensor(self.lengths, device="cuda")
        ends = lengths.cumsum(0)
        self.document = torch.repeat_interleave(torch.arange(len(self.lengths), device="cuda"), lengths)
        self.start = (ends - lengths)[self.document]
        end = ends[self.document]
        self.lo, self.hi = self.start.clone(), end
        if name.endswith("block_causal"):
            self.hi = torch.minimum(end, self.start + ((row - self.start) // BLOCK + 1) * BLOCK)
        elif name.endswith("causal"):
            self.hi = row + 1
        if name == "sw_causal":
            self.lo = (row - (WINDOW - 1)).clamp_min(0)
        self.area = int((self.hi - self.lo).sum())

    def cu_seqlens(self):
        ends = torch.tensor(self.lengths).cumsum(0)
        return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).cuda()

    def flex_mod(self):
        """The mask as one would write it for FlexAttention."""
        document, start = self.document, self.start
        window, block = WINDOW, BLOCK
        return {
            "full": None,
            "causal": lambda b, h, q, k: q >= k,
            "varlen_full": lambda b, h, q, k: document[q] == document[k],
            "varlen_causal": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
            "sw_causal": lambda b, h, q, k: (q >= k) & (q - k < window),
            "block_causal": lambda b, h, q, k: q // block >= k // block,
            "varlen_block_causal": lambda b, h, q, k: (document[q] == document[k])
            & ((q - start[q]) // block >= (k - start[k]) // block),
        }[self.name]
