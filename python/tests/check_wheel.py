"""Checks a wheel: its tag, its size, what is in it, that it names no path of the machine that built it, and that it runs.

Usage: python check_wheel.py WHEEL PATH...     (paths that must not be in it)
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

TAG = {"cp310", "abi3", "manylinux_2_17_x86_64", "manylinux2014_x86_64"}
LARGEST = 8_000_000


def main() -> None:
    wheel, paths = pathlib.Path(sys.argv[1]), sys.argv[2:]
    tags = {part for tag in wheel.stem.split("-")[2:] for part in tag.split(".")}
    assert tags == TAG, f"{wheel.name} is not tagged {sorted(TAG)}"
    size = wheel.stat().st_size
    assert size < LARGEST, f"{wheel.name} has {size:,} bytes"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for suffix in (
            "counterpoint/_native.abi3.so",
            "counterpoint/_native.pyi",
            "counterpoint/py.typed",
            "dist-info/entry_points.txt",
        ):
            assert any(name.endswith(suffix) for name in names), f"{suffix} is not in {names}"
        for name in names:
            assert "tests" not in name and "__pycache__" not in name, name
            content = archive.read(name)
            for path in [*paths, "/.cargo/", "/rustup/"]:
                at = content.find(path.encode())
                assert at < 0, f"{name} names {path}: {content[max(0, at - 40) : at + 80]!r}"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--no-index", str(wheel))
        version = run(f"{folder}/bin/counterpoint", "--version")
        found = run(f"{folder}/bin/python", "-c", "import counterpoint as c; print(c.__version__, c.Mask.causal(9).area)")
        assert found == version.split()[1] + " 45", (version, found)
        planned = run(f"{folder}/bin/counterpoint", "plan", "--mask", "causal:64", "--cp-size", "2", "--json")
        assert '"area":2080' in planned, planned
    print(f"{wheel.name}: {size:,} bytes")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
