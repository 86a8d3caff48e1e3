"""What tests share."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# What was tuned and measured on this machine is not what tests are about.
os.environ["COUNTERPOINT_PROFILE_DIR"] = str(pathlib.Path(__file__).parent / "no-profiles")

# Most of the package needs no PyTorch, and is tested without where there is none.
if importlib.util.find_spec("torch") is not None:
    from ranks import ranks  # noqa: F401
