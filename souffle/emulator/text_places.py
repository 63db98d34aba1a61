"""From addresses in a compiled text to its functions, lines and shared arrays."""

from __future__ import annotations

import bisect
import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from souffle.emulator.reports import TextPlace
from souffle.emulator.text_scan import matching

__all__ = ["SharedArray", "TextMap", "shared_symbols"]

_FILE = "kernels.cu"  # what toolchain.py calls the text
_SYMBOL_TABLE = 2  # sh_type of .symtab
_TLS = 6  # symbol type of a thread-local variable
_DYNAMIC = "souffle_dynamic"
_STATEMENTS = ("if", "for", "while", "switch", "catch")
_FUNCTION = re.compile(r"\b(\w+)\s*\((?:[^;{}()]|\([^;{}()]*\))*\)\s*(?:const\s*)?\{")
_POOL_ARRAY = re.compile(r"\b([\w ]+?)\s*\*\s*(\w+)\s*=\s*\(\(\s*[\w ]+\*\s*\)\s*\(&\s*\((\w+)\[([^]]+)\]\)\)\)\s*;")
_PLACE = re.compile(r"\(*(\d+)?(?: \+ )?(?:\(?\w+ \* (\d+))?\)*")
"""Where it begins: at a constant, or that of the first part of the threads and so many bytes from each to the next."""


@dataclass(frozen=True)
class SharedArray:
    """A shared array: where it begins in the thread-local segment, and its bytes (0 where the text does not say)."""

    name: str
    offset: int
    bytes: int


def shared_symbols(library: Path) -> tuple[tuple[SharedArray, ...], int]:
    """Read the static shared arrays of a library, and where its dynamic shared memory begins (-1: it has none)."""
    data = library.read_bytes()
    table, entry_size, count = (struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A))
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
    arrays, dynamic = [], -1
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, index, value, size = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 != _TLS or index == 0:
                continue
            label = data[names + name : data.index(b"\0", names + name)].decode()
            if label == _DYNAMIC:
                dynamic = value
            elif size and "souffle_" not in label:
                arrays.append(SharedArray(label, value, size))
    return tuple(sorted(arrays, key=lambda array: array.offset)), dynamic


def _run(command: list[str], text: str) -> list[str]:
    path = shutil.which(command[0])
    if path is None:
        return []
    done = subprocess.run([path, *command[1:]], input=text, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


class TextMap:
    """The places of one loaded library.

    Parameters
    ----------
    library
        The compiled text.
    handle
        It, loaded.
    code
        The text, comments blanked.
    """

    def __init__(self, library: Path, handle: ctypes.CDLL, code: str) -> None:
        self._library, self._code = library, code
        # The first word of what dlopen gives is the address that the library is loaded at.
        self._base = ctypes.cast(handle._handle, ctypes.POINTER(ctypes.c_size_t))[0]
        self._places: dict[int, TextPlace] = {}
        self.shared, self.dynamic = shared_symbols(library)

    def places(self, addresses: Iterable[int]) -> dict[int, TextPlace]:
        """Give the place of each return address; without binutils all are unknown."""
        asked = [address for address in dict.fromkeys(addresses) if address]
        wanted = [address for address in asked if address not in self._places]
        # A return address is behind its call.
        offsets = [address - self._base - 1 for address in wanted]
        command = ["addr2line", "-afiC", "-e", str(self._library)]
        lines = _run(command, "".join(f"{offset:#x}\n" for offset in offsets)) if wanted else []
        frames: dict[int, list[tuple[str, int, bool]]] = {}
        current: list[tuple[str, int, bool]] = []
        i = 0
        while i < len(lines):
            if re.fullmatch(r"0x[0-9a-f]+", lines[i]):
                current = frames.setdefault(int(lines[i], 16), [])
                i += 1
                continue
            function, position = lines[i].partition("(")[0], lines[i + 1].partition(" ")[0]
            file, _, line = position.rpartition(":")
            number = int(line) if line.isdigit() else 0
            # Names of inlined functions are not always right, lines are.
            current.append((self._function_of(number) or function, number, file.endswith(_FILE)))
            i += 2
        for address, offset in zip(wanted, offsets, strict=True):
            of_text = [(function, line) for function, line, own in frames.get(offset, ()) if own]
            self._places[address] = TextPlace(*of_text[-1], tuple(of_text[:-1])) if of_text else TextPlace("", 0)
        return {address: self._places[address] for address in asked}

    @cached_property
    def _functions(self) -> tuple[list[int], list[tuple[str, int, int]]]:
        """First lines, and for each its function with where its body begins and ends."""
        lines, found, at = [], [], 0
        while (head := _FUNCTION.search(self._code, at)) is not None:
            end = matching(self._code, head.end() - 1)
            at = head.end()
            if head[1] in _STATEMENTS or end < 0:
                continue
            lines.append(self._code.count("\n", 0, head.start()) + 1)
            found.append((head[1], head.end(), end))
            at = end
        return lines, found

    def _function_of(self, line: int) -> str:
        lines, found = self._functions
        index = bisect.bisect_right(lines, line) - 1
        if index < 0 or self._code.count("\n", 0, found[index][2]) + 1 < line:
            return ""
        return found[index][0]

    @cached_property
    def _names(self) -> dict[str, str]:
        labels = [array.name for array in self.shared]
        plain = _run(["c++filt"], "".join(f"{label}\n" for label in labels))
        return {label: name.rpartition("::")[2] for label, name in zip(labels, plain)}

    def shared_array(self, offset: int, function: str, dynamic_bytes: int) -> SharedArray:
        """Name the shared array that an offset in the thread-local segment belongs to, or lies closest behind."""
        found = [SharedArray(self._names.get(a.name, a.name), a.offset, a.bytes) for a in self.shared]
        if self.dynamic >= 0:
            found.append(SharedArray("memory", self.dynamic, dynamic_bytes))
            pool = self._pool_arrays(function, dynamic_bytes)
            found += [SharedArray(name, self.dynamic + at, 0) for name, at in pool]
        before = [array for array in found if array.offset <= offset]
        if not before:
            return SharedArray("memory", 0, 0)
        return max(before, key=lambda array: (array.offset, array.bytes == 0))

    def _pool_arrays(self, function: str, dynamic_bytes: int) -> list[tuple[str, int]]:
        """Pointers into dynamic shared memory that a function of the text declares: names and offsets."""
        bodies = [self._code[begin:end] for name, begin, end in self._functions[1] if name == function]
        arrays = [(match[2], _PLACE.fullmatch(match[4])) for body in bodies for match in _POOL_ARRAY.finditer(body)]
        found = []
        for name, place in arrays:
            if place is not None:
                first, each = int(place[1] or 0), int(place[2] or 0)
                found += [(name, at) for at in range(first, max(dynamic_bytes, first + 1), each or dynamic_bytes + 1)]
        return found
