"""Environment variables of MagiAttention."""

from counterpoint.compat.magi.env import build, comm, general

__all__ = ["build", "comm", "general"]
