"""``.souffle`` files: a plan, or plans of several versions of a network, in a zip archive; nothing of it is executed.

Members: ``manifest.json`` (format, versions, architecture, the sha256 and size of every other member), ``plan.json``,
``text/N.cu`` and ``cubin/N.cubin`` for each module, ``constants/N.npy`` for each stored constant, and ``tensorir.z``:
what the texts were emitted from, which only ``souffle verify`` unpacks. Equal constants are stored once. In a file of
versions, those members of a plan but for the constants are in a folder ``versions/N`` of their own; of a plan for
several processors, those of the others in folders ``processors/N`` beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from souffle import __version__
from souffle.codegen.plan import Buffer, Plan
from souffle.decision import Decision
from souffle.dimensions import extents_text
from souffle.errors import ArtifactError, OptionError
from souffle.runtime.archive import (
    BROKEN,
    COUNTED,
    FORMAT,
    KIND,
    MANIFEST,
    ArchiveReader,
    ArchiveWriter,
    bad_file,
    opened_archive,
)
from souffle.runtime.plan_json import PlanFormatError, plan_from_json, plan_to_json
from souffle.runtime.plan_versions import (
    PlanVersions,
    check_padding,
    check_version,
    versions_from_json,
    versions_to_json,
)
from souffle.runtime.shared_constants import UniqueArrays
from souffle.wording import counted

__all__ = ["FORMAT", "ArtifactInfo", "describe", "load", "read", "save"]

_Choose = Callable[[Sequence[str]], int]

_PLAN, _TENSOR_IR = "plan.json", "tensorir.z"
_ALWAYS_STORED = 64 << 10
"""Bytes; constants up to this size are stored in any case, since small ones (epsilons, masks) decide the outcome."""


@dataclass(frozen=True)
class ArtifactInfo:
    """What a file says about itself.

    Attributes
    ----------
    format : int
    souffle : str
        Version that wrote it.
    name, level, precision, partition, arch : str
        The last one with the names of all processors, of code for several.
    constants : str
        ``"stored"``, or ``"synthetic"``: the outputs are then meaningless and only the time counts.
    versions : tuple of str
        Of what its versions are, such as ``"batch=1, sequence=128"``; empty for a network of one shape.
    """

    format: int
    souffle: str
    name: str
    level: str
    precision: str
    partition: str
    arch: str
    constants: str
    versions: tuple[str, ...] = ()


# saving


def _summary(array: np.ndarray) -> dict[str, float]:
    finite = np.asarray(array, np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    figures = {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
    return {name: float(value) for name, value in figures.items()}


def save(plan: Plan | PlanVersions, path: str | Path, *, constants: str = "stored") -> None:
    """Write a plan, or plans of several versions, to a file; the same plan gives the same bytes.

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
    try:
        with ArchiveWriter(path) as archive:
            if isinstance(plan, PlanVersions):
                manifest = _written_versions(archive, plan, constants)
            else:
                tables = _written(archive, plan, "", constants)
                manifest = _manifest(plan, _format([plan], 1), bool(tables["recipes"])) | tables
            archive.finish(manifest)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error


def _format(plans: Iterable[Plan], least: int) -> int:
    """The format of a file (:data:`souffle.runtime.archive.FORMAT`)."""
    plans = list(plans)
    if any(plan.others for plan in plans):
        return FORMAT
    return COUNTED if any(plan.counts for plan in plans) else least


def _manifest(plan: Plan, form: int, synthetic: bool) -> dict[str, Any]:
    return {
        "kind": KIND,
        "format": form,
        "souffle": __version__,
        "name": plan.name,
        "level": plan.options.level,
        "precision": plan.options.precision,
        "partition": plan.options.partition,
        "arch": plan.options.arch,
        "constants": "synthetic" if synthetic else "stored",
    }


def _written_versions(archive: ArchiveWriter, versions: PlanVersions, constants: str) -> dict[str, Any]:
    entries = [
        {"extents": list(extents), **_written(archive, plan, f"versions/{number}/", constants)}
        for number, (extents, plan) in enumerate(versions.plans.items())
    ]
    first = next(iter(versions.plans.values()))
    form = _format(versions.plans.values(), 2)
    manifest = _manifest(first, form, any(entry["recipes"] for entry in entries))
    return manifest | {"stored": {}, "recipes": {}, "versions": {**versions_to_json(versions), "plans": entries}}


def _written(archive: ArchiveWriter, plan: Plan, folder: str, constants: str) -> dict[str, Any]:
    """Add a plan's members; where its constants are stored, or what is known of those that are not."""
    recipes: dict[str, dict[str, Any]] = {}
    stored: dict[str, str] = {}
    first = len(archive.members)
    for index, module in enumerate(plan.modules):
        archive.add(f"{folder}text/{index}.cu", module.text.encode(), deflated=True)
        archive.add(f"{folder}cubin/{index}.cubin", module.cubin)
    for index, buffer in enumerate(buffer for buffer in plan.buffers if buffer.kind == "constant"):
        array = plan.constants[buffer.name]
        if constants == "synthetic" and array.dtype.kind in "fV" and array.nbytes > _ALWAYS_STORED:
            recipes[buffer.name] = _summary(array)
        else:
            # Numbers go on from one version to the next.
            stored[buffer.name] = archive.add_array(f"constants/{first + index}.npy", array)
    if plan.tensor_ir:
        archive.add(folder + _TENSOR_IR, plan.tensor_ir)
    text = json.dumps(plan_to_json(plan), separators=(",", ":"), sort_keys=True)
    archive.add(folder + _PLAN, text.encode(), deflated=True)
    others = [
        {"processor": other.processor, **_written(archive, other, f"{folder}processors/{number}/", constants)}
        for number, other in enumerate(plan.others)
    ]
    found = {"stored": stored, "recipes": recipes}
    return found | {"processor": plan.processor, "processors": others} if others else found


# loading


def _draw(path: Path, buffer: Buffer, recipe: Any) -> np.ndarray:
    """Random values like those that were left out; the same for the same name."""
    fields = ("mean", "std", "min", "max")
    if not isinstance(recipe, dict) or any(not isinstance(recipe.get(key), (int, float)) for key in fields):
        raise bad_file(path, f"{MANIFEST} has no proper recipe for constant {buffer.name}")
    seed = int.from_bytes(hashlib.sha256(buffer.name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(buffer.shape, dtype=np.float32)
    values *= np.float32(recipe["std"])
    values += np.float32(recipe["mean"])
    np.clip(values, np.float32(recipe["min"]), np.float32(recipe["max"]), out=values)
    return values.astype(buffer.dtype)


def _check_synthetic_size(path: Path, sizes: int) -> None:
    # A recipe costs a few bytes of the file and its array any number: the one place where memory is not bounded by it.
    if sizes > 16 << 30:
        raise bad_file(path, f"its left-out constants would take {sizes} bytes, more than any network for one GPU")


def _read(reader: ArchiveReader, folder: str, entry: Mapping[str, Any], choose: _Choose | None) -> Plan:
    """The plan of an entry with those for other processors, or the one of them that is chosen."""
    entries = [(folder, entry), *((f"{folder}processors/{n}/", one) for n, one in enumerate(_others(reader, entry)))]
    if choose is not None and len(entries) > 1:
        entries = [entries[choose([one["processor"] for _, one in entries])]]
    first, *others = (_read_one(reader, where, one["stored"], one["recipes"]) for where, one in entries)
    return replace(first, others=tuple(others)) if others else first


def _others(reader: ArchiveReader, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an entry says of its plans for other processors."""
    others = entry.get("processors", [])
    proper = isinstance(others, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("processor"), str)
        and all(isinstance(one.get(key), dict) for key in ("stored", "recipes"))
        for one in others
    )
    if not proper or (others and not isinstance(entry.get("processor"), str)):
        raise bad_file(reader.path, f"{MANIFEST} has no proper description of its processors")
    return others


def _read_one(reader: ArchiveReader, folder: str, stored: Mapping[str, Any], recipes: Mapping[str, Any]) -> Plan:
    path = reader.path
    try:
        content = json.loads(reader.data(folder + _PLAN))
        count = content["modules"] if isinstance(content, dict) else None
        if not isinstance(count, int) or not 0 <= count <= len(reader.manifest["members"]):
            raise bad_file(path, f"{folder}{_PLAN} names no number of modules")
        texts = [reader.data(f"{folder}text/{index}.cu").decode() for index in range(count)]
        cubins = [reader.data(f"{folder}cubin/{index}.cubin") for index in range(count)]
        # Files of before it was kept have none.
        kept = folder + _TENSOR_IR in reader.manifest["members"]
        tensor_ir = reader.data(folder + _TENSOR_IR) if kept else b""
        plan = replace(plan_from_json(content, texts, cubins), tensor_ir=tensor_ir)
    except (PlanFormatError, ValueError, KeyError, RecursionError) as error:
        raise bad_file(path, f"{folder}{_PLAN} is not a plan that can be run: {error}") from error
    constants: dict[str, np.ndarray] = {}
    held = [buffer for buffer in plan.buffers if buffer.kind == "constant"]
    _check_synthetic_size(path, sum(buffer.nbytes for buffer in held if buffer.name not in stored))
    for buffer in held:
        if buffer.name in stored:
            constants[buffer.name] = reader.array(str(stored[buffer.name]), buffer)
        elif buffer.name in recipes and np.dtype(buffer.dtype).kind in "fV":
            constants[buffer.name] = _draw(path, buffer, recipes[buffer.name])
        else:
            raise bad_file(path, f"constant {buffer.name} is missing")
    decisions = plan.decisions
    if recipes:
        reason = "random values of the same shape, mean, deviation and range: good for timing, the outputs mean nothing"
        decisions += (Decision("artifact", f"{len(recipes)} constants", True, reason),)
    return replace(plan, constants=constants, decisions=decisions)


def _entries(reader: ArchiveReader) -> list[dict[str, Any]]:
    """What the manifest says of each version's plan; empty for a network of one shape."""
    versions = reader.manifest.get("versions")
    if versions is None:
        return []
    entries = versions.get("plans") if isinstance(versions, dict) else None
    if not isinstance(entries, list) or not entries:
        raise bad_file(reader.path, f"{MANIFEST} names no versions")
    for entry in entries:
        tables = isinstance(entry, dict) and all(isinstance(entry.get(key), dict) for key in ("stored", "recipes"))
        extents = entry.get("extents") if tables else None
        if not isinstance(extents, list) or not all(type(extent) is int and extent > 0 for extent in extents):
            raise bad_file(reader.path, f"{MANIFEST} has no proper description of a version")
    return entries


def _read_versions(reader: ArchiveReader, entries: list[dict[str, Any]], choose: _Choose | None) -> PlanVersions:
    plans, unique = {}, UniqueArrays()
    try:
        dimensions, padding = versions_from_json(reader.manifest["versions"])
        for number, entry in enumerate(entries):
            plan = _read(reader, f"versions/{number}/", entry, choose)
            extents = tuple(entry["extents"])
            if extents in plans or len(extents) != len(dimensions.names):
                raise ValueError(f"it has no version of its own for {extents}")
            check_version(dimensions, extents, plan)
            if padding is not None:
                check_padding(dimensions, extents, plan, padding)
            # Those that are drawn are equal, too, but nobody knows it yet.
            plans[extents] = replace(plan, constants=unique.of(plan.constants)) if entry["recipes"] else plan
    except (ValueError, OptionError) as error:
        raise bad_file(reader.path, str(error)) from error
    return PlanVersions(dimensions, padding, plans)


def read(path: str | Path, choose: _Choose | None = None) -> Plan | PlanVersions:
    """Read what a file holds. Nothing in the file is executed.

    Parameters
    ----------
    path
    choose : callable, optional
        Given the names of several processors, the plan for which of them is read; all without.

    Raises
    ------
    ArtifactError
        If the file is missing, foreign, damaged, cut short or of a later format; the message names file and member.
    """
    path = Path(path)
    with opened_archive(path) as archive:
        try:
            reader = ArchiveReader(path, archive)
            entries = _entries(reader)
            if entries:
                return _read_versions(reader, entries, choose)
            return _read(reader, "", reader.manifest, choose)
        except BROKEN as error:
            raise bad_file(path, f"the archive is damaged ({error})") from error


def load(path: str | Path) -> Plan:
    """Read the one plan of a file.

    Raises
    ------
    ArtifactError
        As :func:`read`, and if the file holds several versions.
    """
    found = read(path)
    if isinstance(found, PlanVersions):
        what = counted(len(found.plans), "version")
        raise bad_file(Path(path), f"it holds {what} of a network and not one plan", "souffle.load takes it")
    return found


def describe(path: str | Path) -> ArtifactInfo:
    """What a file says about itself, read without its content.

    Raises
    ------
    ArtifactError
        As :func:`read`.
    """
    path = Path(path)
    with opened_archive(path) as archive:
        try:
            reader = ArchiveReader(path, archive)
            entries = _entries(reader)
            names = versions_from_json(reader.manifest["versions"])[0].names if entries else ()
            versions = tuple(extents_text(names, entry["extents"]) for entry in entries)
            others = _others(reader, entries[0] if entries else reader.manifest)
        except BROKEN as error:
            raise bad_file(path, f"the archive is damaged ({error})") from error
    said = {field.name: reader.manifest[field.name] for field in fields(ArtifactInfo) if field.name != "versions"}
    said["arch"] = ", ".join([said["arch"], *(one["processor"] for one in others)])
    return ArtifactInfo(**said, versions=versions)
