"""PyTorch, or a sentence and exit status 3 where there is none."""

import sys

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"{sys.executable} has no PyTorch ({error}); pip install torch", file=sys.stderr)
    sys.exit(3)

__all__ = ["dist", "torch"]
