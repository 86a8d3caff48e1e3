"""Megatron-Core: a provider of module specs whose tensor-parallel layers are this package's."""

from __future__ import annotations

from typing import Any

from counterpoint.errors import MissingLibraryError
from counterpoint.nn import ColumnParallelLinear, RowParallelLinear

__all__ = ["SpecProvider"]


class SpecProvider:
    """Gives this package's `ColumnParallelLinear` and `RowParallelLinear`, and everything else of another provider.

    That is `rest`, or Megatron-Core's `LocalSpecProvider`. Layer norms are modules of their own: Transformer Engine's provider
    would put them and linear layers into one. Experts keep the other provider's layers.
    """

    def __init__(self, rest: Any = None) -> None:
        if rest is None:
            try:
                from megatron.core.models.backends import LocalSpecProvider  # type: ignore[import-not-found, unused-ignore]
            except ImportError as error:
                raise MissingLibraryError(
                    f"counterpoint.megatron.SpecProvider needs Megatron-Core, which cannot be imported ({error}); "
                    "pip install megatron-core, or give another provider as rest"
                ) from error
            rest = LocalSpecProvider()
        self._rest = rest

    def column_parallel_linear(self) -> type:
        """This package's."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """This package's."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """They are modules of their own."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """There is no such module."""
        return None

    def __getattr__(self, name: str) -> Any:
        # Not for what is looked for before there is another provider, as when one is copied.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rest, name)
