"""A zip archive of named members with a manifest that lists the sha256 and size of each: what ``.souffle`` files are.

Nothing that it holds is executed, and only what deflates well is deflated, so that no member can unpack to much more
than the file's own size.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from souffle.aligned import aligned_array
from souffle.codegen.plan import Buffer
from souffle.errors import ArtifactError

__all__ = [
    "BROKEN",
    "COUNTED",
    "FORMAT",
    "KIND",
    "MANIFEST",
    "ArchiveReader",
    "ArchiveWriter",
    "bad_file",
    "opened_archive",
]

COUNTED, FORMAT = 3, 4
"""The latest format of files that is read. Files of one network have format 1, and those of several versions 2. Where
data decides how long an output is they have format 3: who knows nothing of it would give all that there is room for.
Files for several processors have format 4: who knows nothing of them would find members that nobody names."""
KIND = "souffle-network"
MANIFEST = "manifest.json"

_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_MAX_TEXT = 256 << 20
"""Bytes that a deflated member may unpack to."""
_NPY_HEADER = 4096
_AGAIN = "save the network again, or copy the file again"


class ArchiveWriter:
    """An archive in the making, in a file that takes the place of `path` when :meth:`finish` is called.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    members : dict
        What the manifest says of each that was added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        self.members: dict[str, dict[str, Any]] = {}
        self._arrays: dict[str, str] = {}

    def __enter__(self) -> ArchiveWriter:
        try:
            self._archive = zipfile.ZipFile(self._temporary, "w", allowZip64=True)
        except OSError:
            self._temporary.unlink(missing_ok=True)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._archive.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def add(self, name: str, data: bytes | memoryview, *, deflated: bool = False) -> None:
        """Add a member."""
        self._write(name, data, deflated, hashlib.sha256(data).hexdigest())

    def _write(self, name: str, data: bytes | memoryview, deflated: bool, digest: str) -> None:
        info = zipfile.ZipInfo(name, _DATE)
        info.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
        self._archive.writestr(info, data)
        self.members[name] = {"bytes": len(data), "sha256": digest}

    def add_array(self, name: str, array: np.ndarray) -> str:
        """Add an array in NumPy's format, if none that is equal bit by bit was added; the name of the one that was."""
        data = BytesIO()
        np.lib.format.write_array(data, _storable(array), allow_pickle=False)
        digest = hashlib.sha256(data.getbuffer()).hexdigest()
        if digest not in self._arrays:
            self._arrays[digest] = name
            self._write(name, data.getbuffer(), False, digest)
        return self._arrays[digest]

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Add the manifest, which gets the members, and put the file in its place."""
        listed = {**manifest, "members": dict(self.members)}
        self.add(MANIFEST, json.dumps(listed, indent=1, sort_keys=True).encode())
        self._archive.close()
        os.replace(self._temporary, self._path)


def _storable(array: np.ndarray) -> np.ndarray:
    """NumPy's file format knows no bfloat16; its bits go as whole numbers."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array.view(f"uint{8 * array.dtype.itemsize}") if array.dtype.kind == "V" else array


def bad_file(path: Path, what: str, help_text: str = _AGAIN) -> ArtifactError:
    """The error of a file that cannot be read, with what would help."""
    return ArtifactError(f"{path}: {what}; {help_text}")


class _Member:
    """One member as a stream that is hashed and bounded while it is read."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._left = stream, limit
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(size)
        self._left -= len(data)
        self.digest.update(data)
        return data

    def readinto(self, target: memoryview) -> int:
        done = 0
        while done < len(target):
            data = self.read(min(_CHUNK, len(target) - done))
            if not data:
                break
            target[done : done + len(data)] = data
            done += len(data)
        return done


class ArchiveReader:
    """An open file whose manifest was checked."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = path, archive
        self._infos = {info.filename: info for info in archive.infolist()}
        if len(self._infos) != len(archive.infolist()):
            raise bad_file(path, "it holds two members of one name")
        self._size = path.stat().st_size
        self._arrays: dict[tuple[str, str, tuple[int, ...]], np.ndarray] = {}
        self.manifest = self._read_manifest()
        listed = {str(name) for name in self.manifest["members"]}
        for name in sorted(listed - set(self._infos)):
            raise bad_file(path, f"member {name} is missing")
        for name in sorted(set(self._infos) - listed - {MANIFEST}):
            raise bad_file(path, f"member {name!r} is not in the manifest")

    def _read_manifest(self) -> dict[str, Any]:
        info = self._infos.get(MANIFEST)
        if info is None:
            raise bad_file(self.path, f"it is a zip archive without {MANIFEST}", "give a file that Network.save wrote")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._size:
            raise bad_file(self.path, f"the size of {MANIFEST} is wrong")
        with self._archive.open(info) as stream:
            data = stream.read(info.file_size)
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise bad_file(self.path, f"{MANIFEST} is not JSON ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
            raise bad_file(self.path, f"{MANIFEST} is not of a Souffle network", "give a file that Network.save wrote")
        found = manifest.get("format")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise bad_file(self.path, f"{MANIFEST} names no format")
        if found > FORMAT:
            raise bad_file(
                self.path,
                f"it has format {found}, of Souffle {manifest.get('souffle')}, and this Souffle reads up to {FORMAT}",
                "update souffle-dl, or compile the model again here",
            )
        texts = ("souffle", "name", "level", "precision", "partition", "arch", "constants")
        tables = ("stored", "recipes", "members")
        wrong = [key for key in texts if not isinstance(manifest.get(key), str)]
        wrong += [key for key in tables if not isinstance(manifest.get(key), dict)]
        if wrong:
            raise bad_file(self.path, f"{MANIFEST} has no proper {', '.join(wrong)}")
        return manifest

    def open(self, name: str) -> tuple[zipfile.ZipInfo, dict[str, Any]]:
        """A member's entries in the archive and in the manifest, whose sizes agree and are possible."""
        listed = self.manifest["members"].get(name)
        info = self._infos.get(name)
        if info is None or not isinstance(listed, dict):
            raise bad_file(self.path, f"member {name} is missing")
        if listed.get("bytes") != info.file_size:
            raise bad_file(
                self.path, f"member {name} has {info.file_size} bytes and the manifest says {listed.get('bytes')}"
            )
        limit = self._size if info.compress_type == zipfile.ZIP_STORED else _MAX_TEXT
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.file_size > limit:
            raise bad_file(self.path, f"member {name} would unpack to {info.file_size} bytes, more than is possible")
        return info, listed

    def _finish(self, name: str, member: _Member, listed: Mapping[str, Any]) -> None:
        if member.digest.hexdigest() != listed.get("sha256"):
            raise bad_file(self.path, f"member {name} is damaged: its sha256 is not the manifest's")

    def data(self, name: str) -> bytes:
        info, listed = self.open(name)
        with self._archive.open(info) as stream:
            member = _Member(stream, info.file_size)
            data = member.read()
        self._finish(name, member, listed)
        return data

    def array(self, name: str, buffer: Buffer) -> np.ndarray:
        """A stored constant, the same array wherever the member is asked for.

        Nothing is allocated before its header was compared with the plan.
        """
        key = (name, buffer.dtype, buffer.shape)
        if key not in self._arrays:
            self._arrays[key] = self._array(name, buffer)
        return self._arrays[key]

    def _array(self, name: str, buffer: Buffer) -> np.ndarray:
        info, listed = self.open(name)
        dtype = np.dtype(buffer.dtype)
        on_file = np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "V" else dtype
        with self._archive.open(info) as stream:
            member = _Member(stream, info.file_size)
            try:
                version = np.lib.format.read_magic(member)
                if version != (1, 0):
                    raise ValueError(f"version {version} of NumPy's format")
                shape, fortran, found = np.lib.format.read_array_header_1_0(member, max_header_size=_NPY_HEADER)
            except (ValueError, EOFError, SyntaxError) as error:
                raise bad_file(self.path, f"member {name} is not a NumPy array ({error})") from error
            if (shape, fortran, found) != (buffer.shape, False, on_file):
                raise bad_file(
                    self.path,
                    f"member {name} holds {found} {shape} and constant {buffer.name} is {buffer.dtype} {buffer.shape}",
                )
            if not buffer.nbytes < info.file_size <= buffer.nbytes + _NPY_HEADER:
                raise bad_file(self.path, f"member {name} has {info.file_size} bytes for an array of {buffer.nbytes}")
            array = aligned_array(buffer.shape, on_file)
            member.readinto(memoryview(array.reshape(-1).view(np.uint8)))
            if member.read(1):
                raise bad_file(self.path, f"member {name} has bytes after its array")
        self._finish(name, member, listed)
        array.flags.writeable = False  # so it is not copied to be called with
        return array.view(dtype)


def opened_archive(path: Path) -> zipfile.ZipFile:
    """The archive of a path.

    Raises
    ------
    ArtifactError
        If there is none.
    """
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no file {path}") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise bad_file(
            path,
            f"it is not a .souffle file, or was cut short ({error})",
            "give a file that Network.save wrote; an ONNX model goes to souffle.compile",
        ) from error


BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)
"""What reading a damaged archive can raise: RuntimeError for a member marked as encrypted."""
