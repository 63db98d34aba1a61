"""Functions for the CPU, scheduled and compiled by LLVM."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import tvm
from tvm import tirx
from tvm.error import InternalError
from tvm.target import codegen

from souffle.cache import most_bytes, read_entry, trim, write_entry
from souffle.parallel import map_in_threads, usable_cores
from souffle.program.llvm_pipeline import compile_llvm, with_exact_arithmetic
from souffle.schedule.cpu.elementary import rounded_to_bfloat16
from souffle.schedule.cpu.schedule import ScheduledFunction, schedule_with_constants
from souffle.schedule.cpu.words import plain_target
from souffle.source import package_digest

__all__ = ["build_cpu", "build_objects"]

# Buffers are as large here as they should be, and for an index such as (48 * task + c) % 32 TVM would shrink one to an
# extent that depends on the loops inside.
_DISABLED = ["s_tir.CompactBufferAllocation"]
_FOLDER = "host_functions"
_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def build_cpu(
    funcs: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    *,
    workers: int | None = None,
    report: list[tuple[str, str]] | None = None,
    constants: Mapping[str, Collection[int]] | None = None,
    scheduled: dict[str, ScheduledFunction] | None = None,
    winograd: bool = True,
    backwards: Collection[str] = (),
) -> tvm.runtime.Module:
    """Schedule and compile functions into one module.

    Parameters
    ----------
    funcs : mapping of str to PrimFunc
        By the name that each will have in the module.
    target : Target
        See :func:`host_target`.
    workers : int, optional
        Threads, for LLVM works outside of Python's lock; by default as many as this process may use.
    report : list, optional
        Gets ``(name, reason)`` for each function that is compiled without a schedule, in the order of `funcs`.
    constants : mapping of str to collection of int, optional
        By function, the positions of parameters that hold the same in every call.
    scheduled : dict, optional
        Gets what was compiled of each function, whose parameters say which constants it takes packed. Needed with
        `constants`.
    winograd : bool
        Whether convolutions with constant weights may be computed by minimal filtering.
    backwards : collection of str
        The functions that read packed constants from their end.

    Returns
    -------
    Module
        ``module.get_function(name, query_imports=True)`` is a function of tensors, in the order of its parameters as
        scheduled.
        Compiled functions use as many cores as TVM's pool has (:func:`use_cores`), or what a library is linked with.
    """
    schedule = _Scheduling(funcs, target, constants or {}, winograd, backwards)
    first, *others = schedule.each(workers, lambda func: _module(func, target), report, scheduled)
    for module in others:
        first.import_module(module)
    return first


def build_objects(
    funcs: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    *,
    folder: Path | None,
    report: list[tuple[str, str]],
    constants: Mapping[str, Collection[int]],
    scheduled: dict[str, ScheduledFunction],
    winograd: bool = True,
    backwards: Collection[str] = (),
) -> list[bytes]:
    """Schedule and compile functions, each to an object file; parameters as for :func:`build_cpu`.

    Parameters
    ----------
    folder : Path or None
        The folder of a cache, in which object files are kept by all that they are made of. So a network with other
        weights is not compiled by LLVM again.

    Returns
    -------
    list of bytes
        In the order of `funcs`.
    """
    folder = folder / _FOLDER if folder is not None and most_bytes() else None
    new: list[Path] = []

    def made(func: tirx.PrimFunc) -> bytes:
        path = None if folder is None else folder / f"{_key(func, target)}.o"
        found = None if path is None else read_entry(path)
        if found is not None:
            return found
        content = _object(func, target)
        if path is not None and write_entry(path, content):
            new.append(path)
        return content

    objects = _Scheduling(funcs, target, constants, winograd, backwards).each(None, made, report, scheduled)
    if new:
        trim(folder, most_bytes())
    return objects


class _Scheduling:
    """Schedules functions, and makes something of each in threads."""

    def __init__(
        self,
        funcs: Mapping[str, tirx.PrimFunc],
        target: tvm.target.Target,
        constants: Mapping[str, Collection[int]],
        winograd: bool,
        backwards: Collection[str],
    ) -> None:
        self._funcs, self._target, self._constants = funcs, target, constants
        self._winograd, self._backwards = winograd, backwards

    def each(
        self,
        workers: int | None,
        make: Callable[[tirx.PrimFunc], _Made],
        report: list[tuple[str, str]] | None,
        scheduled: dict[str, ScheduledFunction] | None,
    ) -> list[_Made]:
        found = map_in_threads(workers or usable_cores(), lambda name: self._one(name, make), self._funcs)
        for name, (function, _, why) in zip(self._funcs, found, strict=True):
            if scheduled is not None:
                scheduled[name] = function
            if why and report is not None:
                report.append((name, why))
        return [made for _, made, _ in found]

    def _one(self, name: str, make: Callable[[tirx.PrimFunc], _Made]) -> tuple[ScheduledFunction, _Made, str]:
        func = self._funcs[name]
        try:
            function = schedule_with_constants(
                func,
                target=self._target,
                constants=self._constants.get(name, ()),
                winograd=self._winograd,
                backwards=name in self._backwards,
            )
            return function, make(_named(name, function.func)), ""
        except (InternalError, ValueError) as error:
            # One function that TVM does not lower as scheduled must not cost the whole network.
            # TVM's message begins with what failed; where it was thrown follows.
            why = str(error).strip().partition("\n")[0]
        _LOG.info("function %s is compiled without a schedule: %s", name, why)
        return ScheduledFunction.as_it_is(func), make(_named(name, func)), why


def _named(name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
    return rounded_to_bfloat16(with_exact_arithmetic(func)).with_attr("global_symbol", name)


def _module(func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.runtime.Module:
    target = plain_target(target, func.body)
    with tvm.transform.PassContext(disabled_pass=_DISABLED):
        return compile_llvm({str(func.attrs["global_symbol"]): func}, target).mod


def _object(func: tirx.PrimFunc, target: tvm.target.Target) -> bytes:
    with tempfile.TemporaryDirectory(prefix="souffle-llvm-") as folder:
        path = Path(folder) / "function.o"
        _module(func, target).write_to_file(str(path))
        return path.read_bytes()


def _key(func: tirx.PrimFunc, target: tvm.target.Target) -> str:
    """A digest of what machine code depends on: the function, the processor, and the compiler with its packages."""
    parts = (tvm.ir.save_json(func), str(target), package_digest(), tvm.__version__, str(codegen.llvm_version_major()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
