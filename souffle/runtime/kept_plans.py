"""Plans that were compiled before, in a folder of the cache.

A plan is one file, by its key; each large constant is a file of its own, by the digest of its bytes, so that versions
of a network and compilers of other days share it. What was used longest ago makes room for what is new.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from souffle.aligned import aligned_array
from souffle.cache import most_bytes, read_entry, trim, write_entry, write_whole
from souffle.codegen.plan import Buffer, Plan
from souffle.options import Options
from souffle.parallel import map_in_threads, usable_cores
from souffle.runtime.plan_json import PlanFormatError, plan_from_json, plan_to_json

__all__ = ["keep_plan", "kept_plan"]

_LOG = logging.getLogger(__name__)
_ALONE = 64 << 10
"""Bytes from which on a constant is a file of its own."""
_CHUNK = 1 << 20
_DIGEST = re.compile("[0-9a-f]{64}")


def kept_plan(folder: Path, key: str, options: Options) -> Plan | None:
    """The plan of a key; None where there is none, or not the whole of it.

    Parameters
    ----------
    folder : Path
    key : str
        Made of all that a plan depends on.
    options : Options
        As the caller asked for it.
    """
    path = folder / f"{key}.plan"
    content = read_entry(path)
    if content is None:
        return None
    try:
        told = json.loads(content)
        codes = [base64.b64decode(code) for code in told["codes"]]
        plan = plan_from_json(told["plan"], told["texts"], codes)
        tensor_ir = base64.b64decode(told["tensor_ir"])
        held = [buffer for buffer in plan.buffers if buffer.kind == "constant"]
        sources = [told["constants"][buffer.name] for buffer in held]
        arrays = map_in_threads(usable_cores(), partial(_read, folder), sources, held)
    except (PlanFormatError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not used, and compiled again: %s", path, error)
        return None
    if any(array is None for array in arrays):
        return None
    for array in arrays:
        array.flags.writeable = False  # so it is not copied to be called with
    for used in (path, *(_file(folder, digest) for digest in told["constants"].values() if isinstance(digest, str))):
        with contextlib.suppress(OSError):
            os.utime(used)
    # Of the options, files have those that the runtime asks for.
    asked = replace(options, partition=plan.options.partition, arch=plan.options.arch)
    constants = {buffer.name: array for buffer, array in zip(held, arrays, strict=True)}
    return replace(plan, options=asked, constants=constants, tensor_ir=tensor_ir)


def keep_plan(folder: Path, key: str, plan: Plan) -> None:
    """Keep a plan, if it has room; whoever else writes the same.

    Plans of more than :func:`souffle.cache.most_bytes` are not kept, nor what would take half of the room on the disk.
    """
    large = {name: array for name, array in plan.constants.items() if array.nbytes >= _ALONE}
    digests = dict(zip(large, map_in_threads(usable_cores(), _digest, large.values()), strict=True))
    new = {digest: large[name] for name, digest in digests.items() if not _is_there(folder, digest, large[name])}
    if not _has_room(folder, sum(array.nbytes for array in large.values()), sum(map(_size, new.values()))):
        return
    # Readers find the plan when all else is there.
    if all(write_whole(_file(folder, digest), _bytes(array)) for digest, array in new.items()) and write_entry(
        folder / f"{key}.plan", _content(plan, digests)
    ):
        trim(folder, most_bytes())


def _content(plan: Plan, digests: Mapping[str, str]) -> bytes:
    constants: dict[str, Any] = {
        name: digests[name] if name in digests else [_text(_bytes(array))]
        for name, array in plan.constants.items()
    }
    told = {
        "plan": plan_to_json(plan),
        "texts": [module.text for module in plan.modules],
        "codes": [_text(module.cubin) for module in plan.modules],
        "tensor_ir": _text(plan.tensor_ir),
        "constants": constants,
    }
    return json.dumps(told).encode()


def _text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def _has_room(folder: Path, whole: int, new: int) -> bool:
    if whole > most_bytes():
        _LOG.info("a plan with constants of %d bytes is not kept: SOUFFLE_CACHE_GB allows %d", whole, most_bytes())
        return False
    try:
        there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        return 2 * new <= shutil.disk_usage(there).free
    except OSError:
        return True  # the writer says what is wrong


def _file(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.bytes"


def _is_there(folder: Path, digest: str, array: np.ndarray) -> bool:
    path = _file(folder, digest)
    try:
        if path.stat().st_size != array.nbytes:
            return False
        os.utime(path)
        return True
    except OSError:
        return False


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _size(array: np.ndarray) -> int:
    return array.nbytes


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(_bytes(array)).hexdigest()


def _read(folder: Path, told: Any, buffer: Buffer) -> np.ndarray | None:
    """A constant, from a plan's own file or from one that is compared with its digest."""
    array = aligned_array(buffer.shape, buffer.dtype)
    target = memoryview(array.reshape(-1).view(np.uint8))
    if isinstance(told, list):
        target[:] = base64.b64decode(told[0])
        return array
    if not _DIGEST.fullmatch(told):
        raise ValueError(f"constant {buffer.name} is in {told!r}, which is no digest")
    path, digest, done = _file(folder, told), hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < len(target):
                count = file.readinto(target[done : done + _CHUNK])
                if not count:
                    break
                digest.update(target[done : done + count])
                done += count
            whole = done == len(target) and not file.read(1)
    except OSError:
        return None
    if whole and digest.hexdigest() == told:
        return array
    # It would be taken for what it is not by whoever compiles the network again.
    _LOG.warning("%s is damaged, and made again", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return None
