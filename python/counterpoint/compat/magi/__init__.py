"""MagiAttention's face: `import counterpoint.compat.magi as magi_attention`, or `install()` for code that imports by that name.

Names, signatures, defaults and return values are MagiAttention's (version 1.1.1); the engine is ours. Options that only tune
are accepted, said once, and ignored. What would change results and cannot be had raises `NotImplementedError`.
"""

from __future__ import annotations

import importlib
import sys

from counterpoint.compat.magi import api, common, config, env, functional, utils
from counterpoint.compat.magi.dist_attn_runtime_mgr import init_dist_attn_runtime_key, init_dist_attn_runtime_mgr

__version__: str | None = "1.1.1"

__all__ = [
    "api",
    "common",
    "config",
    "env",
    "functional",
    "init_dist_attn_runtime_key",
    "init_dist_attn_runtime_mgr",
    "install",
    "utils",
]

# Their path, and ours where it is another.
_PATHS = {
    "api": "",
    "api.functools": "",
    "api.magi_attn_interface": "",
    "common": "",
    "common.enum": "",
    "common.forward_meta": "",
    "common.mask": "",
    "common.range": "",
    "common.ranges": "",
    "config": "",
    "dist_attn_runtime_mgr": "",
    "env": "",
    "env.build": "",
    "env.comm": "",
    "env.general": "",
    "functional": "",
    "functional.fa4": "",
    "functional.flex_flash_attn": "",
    "functional.utils": "",
    "meta.collection.calc_meta": "arguments",
    "meta.solver.dispatch_solver": "config",
    "meta.solver.overlap_solver": "config",
    "utils": "",
    "utils._utils": "utils",
}


def install() -> None:
    """From now on `import magi_attention`, and its documented submodules, give this face, in this process.

    An error if MagiAttention itself is loaded already: modules that have its functions would keep them.
    """
    loaded = sys.modules.get("magi_attention")
    if loaded is not None and loaded is not sys.modules[__name__]:
        where = getattr(loaded, "__file__", "?")
        raise ImportError(
            f"magi_attention is loaded already, from {where}; call counterpoint.compat.magi.install() before it is imported"
        )
    sys.modules["magi_attention"] = sys.modules[__name__]
    for path, ours in _PATHS.items():
        sys.modules[f"magi_attention.{path}"] = importlib.import_module(f"{__name__}.{ours or path}")
