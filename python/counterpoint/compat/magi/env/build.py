"""Environment variables of MagiAttention's build. Nothing is built here; they are read for those who ask."""

from __future__ import annotations

import os
import pathlib

from counterpoint.compat.magi.env.general import is_on

__all__ = [
    "is_build_debug",
    "is_build_verbose",
    "is_force_jit_build",
    "is_no_build_cache",
    "nvcc_threads",
    "workspace_base_dir",
]


def is_no_build_cache() -> bool:
    """A hint."""
    return is_on("NO_BUILD_CACHE")


def workspace_base_dir() -> str:
    """A hint; the home folder."""
    return os.environ.get("MAGI_ATTENTION_WORKSPACE_BASE", pathlib.Path.home().as_posix())


def is_force_jit_build() -> bool:
    """A hint."""
    return is_on("FORCE_JIT_BUILD")


def is_build_verbose() -> bool:
    """A hint."""
    return is_on("BUILD_VERBOSE")


def is_build_debug() -> bool:
    """A hint."""
    return is_on("BUILD_DEBUG")


def nvcc_threads() -> str:
    """A hint; 4."""
    return os.environ.get("NVCC_THREADS", "4")
