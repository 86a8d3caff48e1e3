"""Compresses a wheel again, as far as deflate goes: what is in it stays the same, and any pip reads it.

Usage: python smaller_wheel.py WHEEL     (it is written over; needs the package zopfli)
"""

from __future__ import annotations

import pathlib
import struct
import sys
import zipfile
import zlib

import zopfli.zlib

DEFLATED, VERSION, UNIX = zipfile.ZIP_DEFLATED, 20, 3


def deflated(content: bytes) -> bytes:
    """One pass of zopfli's gets most of what it can, and takes a minute for the whole."""
    # Between zlib's header and its checksum.
    made: bytes = zopfli.zlib.compress(content, numiterations=1)[2:-4]
    assert zlib.decompress(made, -zlib.MAX_WBITS) == content
    return made


def main() -> None:
    wheel = pathlib.Path(sys.argv[1])
    files, directory, before = bytearray(), bytearray(), wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        for entry in entries:
            content, name = archive.read(entry), entry.filename.encode()
            compressed = deflated(content)
            year, month, day, hour, minute, second = entry.date_time
            time, date = hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day
            # Bit 11 of the flags: the name is UTF-8.
            common = struct.pack(
                "<HHHHHIIIHH", VERSION, 1 << 11, DEFLATED, time, date, entry.CRC, len(compressed), len(content), len(name), 0
            )
            at = len(files)
            files += b"PK\3\4" + common + name + compressed
            made_by = UNIX << 8 | VERSION
            places = struct.pack("<HHHII", 0, 0, 0, entry.external_attr, at)
            directory += b"PK\1\2" + struct.pack("<H", made_by) + common + places + name
    count = len(entries)
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(files), 0)
    wheel.write_bytes(files + directory + end)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
    print(f"{wheel.name}: {before:,} bytes, compressed again {wheel.stat().st_size:,}")


if __name__ == "__main__":
    main()
