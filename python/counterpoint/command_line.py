"""The command `counterpoint`, which pip installs: that of the compiled module."""

from __future__ import annotations

import os
import sys

from counterpoint._native import _command_line, _search_packages


def main() -> None:
    """Does what the arguments of this process ask for, and ends it with the command's status."""
    # Where CUDA's compiler may lie.
    _search_packages([path for path in sys.path if os.path.isabs(path) and path.endswith("-packages")])
    sys.exit(_command_line(os.path.abspath(sys.argv[0]), sys.argv[1:]))


if __name__ == "__main__":
    main()
