"""Makes PyTorch's wheel import where no CUDA library is installed: writes a library of stand-ins for each that it misses.

Usage: python stand_ins.py SITE_PACKAGES

The package index has PyTorch for CUDA alone on this platform, and its libraries are 4 GB that a machine without a GPU has no use
for. The stand-ins define what PyTorch links to, and every function of them says that there is no device. Needs a C compiler.
"""

from __future__ import annotations

import pathlib
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field

NO_DEVICE = 100  # cudaErrorNoDevice
CUDA = ("libcu", "libnv", "libnccl")
# What the interpreter defines, and the standard library of C++; CUDA's names are C's.
NOT_CUDA = ("Py", "_Py", "_Z")


@dataclass
class Library:
    """What a shared library has to do with others: the names in its dynamic section."""

    needed: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    # (symbol, version, the library that the version is of); the latter two are None for a symbol without.
    missing: list[tuple[str, str | None, str | None]] = field(default_factory=list)


class Elf:
    """The sections of a 64-bit little-endian file that the dynamic linker reads."""

    def __init__(self, path: pathlib.Path) -> None:
        self.bytes = path.read_bytes()
        (table,) = struct.unpack_from("<Q", self.bytes, 0x28)
        size, count, names = struct.unpack_from("<HHH", self.bytes, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.bytes, table + size * index) for index in range(count)]
        name_table = headers[names][4]
        self.sections = {self.text(name_table, header[0]): header for header in headers}

    def text(self, table: int, offset: int) -> str:
        return self.bytes[table + offset : self.bytes.index(b"\0", table + offset)].decode()

    def start(self, section: str) -> int:
        return int(self.sections[section][4])

    def size(self, section: str) -> int:
        return int(self.sections[section][5])

    def versions(self) -> dict[int, tuple[str, str]]:
        """By number: (version, library)."""
        found: dict[int, tuple[str, str]] = {}
        if ".gnu.version_r" not in self.sections:
            return found
        strings, at = self.start(".dynstr"), self.start(".gnu.version_r")
        for _ in range(self.sections[".gnu.version_r"][7]):
            _, count, library, first, following = struct.unpack_from("<HHIII", self.bytes, at)
            entry = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", self.bytes, entry)
                found[number] = (self.text(strings, name), self.text(strings, library))
                entry += step
            at += following
        return found

    def library(self) -> Library:
        library, strings, versions = Library(), self.start(".dynstr"), self.versions()
        dynamic = self.start(".dynamic")
        for at in range(dynamic, dynamic + self.size(".dynamic"), 16):
            tag, value = struct.unpack_from("<qQ", self.bytes, at)
            if tag == 1:  # DT_NEEDED
                library.needed.append(self.text(strings, value))
        symbols, numbers = self.start(".dynsym"), self.start(".gnu.version")
        for index in range(1, self.size(".dynsym") // 24):
            name, info, _, section = struct.unpack_from("<IBBH", self.bytes, symbols + 24 * index)
            weak = info >> 4 == 2
            if section:
                library.defined.add(self.text(strings, name))
            elif not weak:
                (number,) = struct.unpack_from("<H", self.bytes, numbers + 2 * index)
                library.missing.append((self.text(strings, name), *versions.get(number & 0x7FFF, (None, None))))
        return library


def wanted(folder: pathlib.Path) -> dict[str, dict[str | None, set[str]]]:
    """By the missing libraries of `folder`: their symbols by version."""
    libraries = [Elf(path).library() for path in sorted(folder.glob("*.so*"))]
    present = {path.name for path in folder.iterdir()}
    defined = set().union(*(library.defined for library in libraries))
    found: dict[str, dict[str | None, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in libraries:
        absent = [name for name in library.needed if name.startswith(CUDA) and name not in present]
        for name in absent:
            found[name][None].update()
        for symbol, version, of in library.missing:
            if of is not None and of.startswith(CUDA) and of not in present:
                found[of][version].add(symbol)
            elif of is None and absent and symbol not in defined and not symbol.startswith(NOT_CUDA):
                # A symbol without a version is found in whichever library has it.
                found[absent[0]][None].add(symbol)
    return found


def function(symbol: str) -> str:
    if symbol.endswith(("String", "ErrorName")):
        return f'const char *{symbol}(void) {{ return "no CUDA here"; }}'
    # Those with underscores register kernels as libraries are loaded.
    return f"long {symbol}(void) {{ return {0 if symbol.startswith('__') else NO_DEVICE}; }}"


def build(name: str, versions: dict[str | None, set[str]], folder: pathlib.Path) -> None:
    symbols = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as temporary:
        source, script = pathlib.Path(temporary, "stand_in.c"), pathlib.Path(temporary, "versions.map")
        source.write_text("\n".join(map(function, symbols)) + "\n")
        named = {version: names for version, names in versions.items() if version is not None}
        blocks = [f"{version} {{ global: {'; '.join(sorted(names))}; }};" for version, names in named.items()]
        script.write_text("\n".join(blocks) + "\n")
        options = [f"-Wl,--version-script={script}"] if named else []
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}", *options]
        subprocess.run([*command, "-o", str(folder / name), str(source)], check=True)


def main() -> None:
    folder = pathlib.Path(sys.argv[1], "torch", "lib")
    libraries = wanted(folder)
    for name, versions in libraries.items():
        build(name, versions, folder)
    functions = sum(len(names) for versions in libraries.values() for names in versions.values())
    print(f"{len(libraries)} libraries of {functions} stand-ins")


if __name__ == "__main__":
    main()
