"""``.souffle`` files: a plan in a zip archive, read without executing anything from it.

Members: ``manifest.json`` (format, versions, architecture, the sha256 and size of every other member), ``plan.json``,
``text/N.cu`` and ``cubin/N.cubin`` for each module, ``constants/N.npy`` for each stored constant, and ``tensorir.z``:
what the texts were emitted from, which only ``souffle verify`` unpacks. Only texts are deflated, so that no member can
unpack to much more than the file's own size.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from souffle import __version__
from souffle.codegen.plan import Buffer, Plan
from souffle.decision import Decision
from souffle.errors import ArtifactError, OptionError
from souffle.runtime.plan_json import PlanFormatError, plan_from_json, plan_to_json

__all__ = ["FORMAT", "ArtifactInfo", "describe", "load", "save"]

FORMAT = 1
"""The version of the file format, raised where an older reader would run a file wrongly; it refuses later ones."""

_KIND = "souffle-network"
_MANIFEST, _PLAN, _TENSOR_IR = "manifest.json", "plan.json", "tensorir.z"
_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_MAX_TEXT = 256 << 20
"""Bytes that a deflated member may unpack to."""
_NPY_HEADER = 4096
_ALWAYS_STORED = 64 << 10
"""Bytes; constants up to this size are stored in any case, since small ones (epsilons, masks) decide the outcome."""
_AGAIN = "save the network again, or copy the file again"


@dataclass(frozen=True)
class ArtifactInfo:
    """What a file says about itself.

    Attributes
    ----------
    format : int
    souffle : str
        Version that wrote it.
    name, level, precision, partition, arch : str
    constants : str
        ``"stored"``, or ``"synthetic"``: the outputs are then meaningless and only the time counts.
    """

    format: int
    souffle: str
    name: str
    level: str
    precision: str
    partition: str
    arch: str
    constants: str


# saving


def _summary(array: np.ndarray) -> dict[str, float]:
    finite = np.asarray(array, np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    figures = {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
    return {name: float(value) for name, value in figures.items()}


def _storable(array: np.ndarray) -> np.ndarray:
    """NumPy's file format knows no bfloat16; its bits go as whole numbers."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array.view(f"uint{8 * array.dtype.itemsize}") if array.dtype.kind == "V" else array


def save(plan: Plan, path: str | Path, *, constants: str = "stored") -> None:
    """Write a plan to a file; the same plan gives the same bytes.

    Parameters
    ----------
    plan
        The compiled network.
    path
        The file, by custom named ``.souffle``. It is replaced only once all was written.
    constants
        ``"stored"``; or ``"synthetic"``, for timing only: of each large floating-point constant, only shape, mean,
        deviation and range are kept, and loading draws random values like them.

    Raises
    ------
    OptionError
        If ``constants`` is another word.
    ArtifactError
        If the file cannot be written.
    """
    if constants not in ("stored", "synthetic"):
        raise OptionError(f'constants {constants!r} is not one of "stored" and "synthetic"')
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    members: dict[str, dict[str, Any]] = {}
    recipes: dict[str, dict[str, Any]] = {}
    stored: dict[str, str] = {}
    held = [buffer for buffer in plan.buffers if buffer.kind == "constant"]
    try:
        try:
            with zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:

                def add(name: str, data: bytes | memoryview, method: int = zipfile.ZIP_STORED) -> None:
                    info = zipfile.ZipInfo(name, _DATE)
                    info.compress_type = method
                    archive.writestr(info, data)
                    members[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

                for index, module in enumerate(plan.modules):
                    add(f"text/{index}.cu", module.text.encode(), zipfile.ZIP_DEFLATED)
                    add(f"cubin/{index}.cubin", module.cubin)
                for index, buffer in enumerate(held):
                    array = plan.constants[buffer.name]
                    floating = array.dtype.kind in "fV"
                    if constants == "synthetic" and floating and array.nbytes > _ALWAYS_STORED:
                        recipes[buffer.name] = _summary(array)
                        continue
                    data = BytesIO()
                    np.lib.format.write_array(data, _storable(array), allow_pickle=False)
                    stored[buffer.name] = f"constants/{index}.npy"
                    add(stored[buffer.name], data.getbuffer())
                if plan.tensor_ir:
                    add(_TENSOR_IR, plan.tensor_ir)
                text = json.dumps(plan_to_json(plan), separators=(",", ":"), sort_keys=True)
                add(_PLAN, text.encode(), zipfile.ZIP_DEFLATED)
                manifest = {
                    "kind": _KIND,
                    "format": FORMAT,
                    "souffle": __version__,
                    "name": plan.name,
                    "level": plan.options.level,
                    "precision": plan.options.precision,
                    "partition": plan.options.partition,
                    "arch": plan.options.arch,
                    "constants": "synthetic" if recipes else "stored",
                    "stored": stored,
                    "recipes": recipes,
                    "members": dict(members),
                }
                add(_MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error


# loading


def _bad(path: Path, what: str, help_text: str = _AGAIN) -> ArtifactError:
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


class _Reader:
    """An open file whose manifest was checked."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = path, archive
        self._infos = {info.filename: info for info in archive.infolist()}
        if len(self._infos) != len(archive.infolist()):
            raise _bad(path, "it holds two members of one name")
        self._size = path.stat().st_size
        self.manifest = self._read_manifest()
        listed = {str(name) for name in self.manifest["members"]}
        for name in sorted(listed - set(self._infos)):
            raise _bad(path, f"member {name} is missing")
        for name in sorted(set(self._infos) - listed - {_MANIFEST}):
            raise _bad(path, f"member {name!r} is not in the manifest")

    def _read_manifest(self) -> dict[str, Any]:
        info = self._infos.get(_MANIFEST)
        if info is None:
            raise _bad(self.path, f"it is a zip archive without {_MANIFEST}", "give a file that Network.save wrote")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._size:
            raise _bad(self.path, f"the size of {_MANIFEST} is wrong")
        with self._archive.open(info) as stream:
            data = stream.read(info.file_size)
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _bad(self.path, f"{_MANIFEST} is not JSON ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("kind") != _KIND:
            raise _bad(self.path, f"{_MANIFEST} is not of a Souffle network", "give a file that Network.save wrote")
        found = manifest.get("format")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise _bad(self.path, f"{_MANIFEST} names no format")
        if found > FORMAT:
            raise _bad(
                self.path,
                f"it has format {found}, of Souffle {manifest.get('souffle')}, and this Souffle reads up to {FORMAT}",
                "update souffle-dl, or compile the model again here",
            )
        texts = ("souffle", "name", "level", "precision", "partition", "arch", "constants")
        tables = ("stored", "recipes", "members")
        wrong = [key for key in texts if not isinstance(manifest.get(key), str)]
        wrong += [key for key in tables if not isinstance(manifest.get(key), dict)]
        if wrong:
            raise _bad(self.path, f"{_MANIFEST} has no proper {', '.join(wrong)}")
        return manifest

    def open(self, name: str) -> tuple[zipfile.ZipInfo, dict[str, Any]]:
        """A member's entries in the archive and in the manifest, whose sizes agree and are possible."""
        listed = self.manifest["members"].get(name)
        info = self._infos.get(name)
        if info is None or not isinstance(listed, dict):
            raise _bad(self.path, f"member {name} is missing")
        if listed.get("bytes") != info.file_size:
            raise _bad(
                self.path, f"member {name} has {info.file_size} bytes and the manifest says {listed.get('bytes')}"
            )
        limit = self._size if info.compress_type == zipfile.ZIP_STORED else _MAX_TEXT
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.file_size > limit:
            raise _bad(self.path, f"member {name} would unpack to {info.file_size} bytes, more than is possible")
        return info, listed

    def _finish(self, name: str, member: _Member, listed: Mapping[str, Any]) -> None:
        if member.digest.hexdigest() != listed.get("sha256"):
            raise _bad(self.path, f"member {name} is damaged: its sha256 is not the manifest's")

    def data(self, name: str) -> bytes:
        info, listed = self.open(name)
        with self._archive.open(info) as stream:
            member = _Member(stream, info.file_size)
            data = member.read()
        self._finish(name, member, listed)
        return data

    def array(self, name: str, buffer: Buffer) -> np.ndarray:
        """A stored constant; nothing is allocated before its header was compared with the plan."""
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
                raise _bad(self.path, f"member {name} is not a NumPy array ({error})") from error
            if (shape, fortran, found) != (buffer.shape, False, on_file):
                raise _bad(
                    self.path,
                    f"member {name} holds {found} {shape} and constant {buffer.name} is {buffer.dtype} {buffer.shape}",
                )
            if not buffer.nbytes < info.file_size <= buffer.nbytes + _NPY_HEADER:
                raise _bad(self.path, f"member {name} has {info.file_size} bytes for an array of {buffer.nbytes}")
            array = np.empty(buffer.shape, on_file)
            member.readinto(memoryview(array.reshape(-1).view(np.uint8)))
            if member.read(1):
                raise _bad(self.path, f"member {name} has bytes after its array")
        self._finish(name, member, listed)
        return array.view(dtype)


def _draw(path: Path, buffer: Buffer, recipe: Any) -> np.ndarray:
    """Random values like those that were left out; the same for the same name."""
    fields = ("mean", "std", "min", "max")
    if not isinstance(recipe, dict) or any(not isinstance(recipe.get(key), (int, float)) for key in fields):
        raise _bad(path, f"{_MANIFEST} has no proper recipe for constant {buffer.name}")
    seed = int.from_bytes(hashlib.sha256(buffer.name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(buffer.shape, dtype=np.float32)
    values *= np.float32(recipe["std"])
    values += np.float32(recipe["mean"])
    np.clip(values, np.float32(recipe["min"]), np.float32(recipe["max"]), out=values)
    return values.astype(buffer.dtype)


def _check_synthetic_size(path: Path, sizes: int) -> None:
    # A recipe costs a few bytes of the file and its array any number: the one place where memory is not bounded by it.
    if sizes > 16 << 30:
        raise _bad(path, f"its left-out constants would take {sizes} bytes, more than any network for one GPU")


def _read(reader: _Reader) -> Plan:
    path, manifest = reader.path, reader.manifest
    try:
        content = json.loads(reader.data(_PLAN))
        count = content["modules"] if isinstance(content, dict) else None
        if not isinstance(count, int) or not 0 <= count <= len(manifest["members"]):
            raise _bad(path, f"{_PLAN} names no number of modules")
        texts = [reader.data(f"text/{index}.cu").decode() for index in range(count)]
        cubins = [reader.data(f"cubin/{index}.cubin") for index in range(count)]
        # Files of before it was kept have none.
        tensor_ir = reader.data(_TENSOR_IR) if _TENSOR_IR in manifest["members"] else b""
        plan = replace(plan_from_json(content, texts, cubins), tensor_ir=tensor_ir)
    except (PlanFormatError, ValueError, KeyError, RecursionError) as error:
        raise _bad(path, f"{_PLAN} is not a plan that can be run: {error}") from error
    constants: dict[str, np.ndarray] = {}
    held = [buffer for buffer in plan.buffers if buffer.kind == "constant"]
    stored, recipes = manifest["stored"], manifest["recipes"]
    _check_synthetic_size(path, sum(buffer.nbytes for buffer in held if buffer.name not in stored))
    for buffer in held:
        if buffer.name in stored:
            constants[buffer.name] = reader.array(str(stored[buffer.name]), buffer)
        elif buffer.name in recipes and np.dtype(buffer.dtype).kind in "fV":
            constants[buffer.name] = _draw(path, buffer, recipes[buffer.name])
        else:
            raise _bad(path, f"constant {buffer.name} is missing")
    decisions = plan.decisions
    if recipes:
        reason = "random values of the same shape, mean, deviation and range: good for timing, the outputs mean nothing"
        decisions += (Decision("artifact", f"{len(recipes)} constants", True, reason),)
    return replace(plan, constants=constants, decisions=decisions)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no file {path}") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise _bad(
            path,
            f"it is not a .souffle file, or was cut short ({error})",
            "give a file that Network.save wrote; an ONNX model goes to souffle.compile",
        ) from error


_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)
"""What reading a damaged archive can raise: RuntimeError for a member marked as encrypted."""


def load(path: str | Path) -> Plan:
    """Read a plan from a file. Nothing in the file is executed.

    Raises
    ------
    ArtifactError
        If the file is missing, foreign, damaged, cut short or of a later format; the message names file and member.
    """
    path = Path(path)
    with _opened(path) as archive:
        try:
            return _read(_Reader(path, archive))
        except _BROKEN as error:
            raise _bad(path, f"the archive is damaged ({error})") from error


def describe(path: str | Path) -> ArtifactInfo:
    """What a file says about itself, read without its content.

    Raises
    ------
    ArtifactError
        As :func:`load`.
    """
    path = Path(path)
    with _opened(path) as archive:
        try:
            manifest = _Reader(path, archive).manifest
        except _BROKEN as error:
            raise _bad(path, f"the archive is damaged ({error})") from error
    return ArtifactInfo(**{name: manifest[name] for name in ArtifactInfo.__dataclass_fields__})
