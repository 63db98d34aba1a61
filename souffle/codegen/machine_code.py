"""What a cubin holds: the sections of a 64-bit ELF file, and how much code each kernel has."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["code_bytes", "sections"]

_ELF = b"\x7fELF"

_CODE = ".text."


def sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    start = headers[names][4]
    for header in headers:
        end = image.index(b"\0", start + header[0])
        yield image[start + header[0] : end].decode(), image[header[4] : header[4] + header[5]]


def code_bytes(image: bytes) -> dict[str, int]:
    """The machine code of each kernel of a cubin, with that of the functions that it calls, which stand in its section.

    An instruction takes 16 bytes. What a kernel executes once is fetched from the L2 cache once by each multiprocessor.
    Of what is no ELF file nothing is known.
    """
    if not image.startswith(_ELF):
        return {}
    return {name.removeprefix(_CODE): len(code) for name, code in sections(image) if name.startswith(_CODE)}
