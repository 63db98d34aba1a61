"""A model that was compiled before: its plan is read, and nothing is compiled."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
from tvm.target import codegen

from souffle.cache import most_bytes
from souffle.codegen.nvcc import compiler_version, find_nvcc
from souffle.codegen.plan import Plan
from souffle.frontend.load import LoadedModel
from souffle.options import SOUFFLE, Options, Progress
from souffle.parallel import map_in_threads, usable_cores
from souffle.partition import planner_for
from souffle.runtime.kept_plans import keep_plan, kept_plan
from souffle.schedule.cpu import host_target, machine_of
from souffle.schedule.gpu import RULES
from souffle.schedule.log_folders import log_folders
from souffle.source import package_digest
from souffle.stitching import fusion_planner_for

__all__ = ["KeptPlan", "kept_or_made", "place_of"]

_FOLDER = "plans"
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "islpy", "ml-dtypes", "numpy", "onnx", "onnxscript")
"""What else decides about a plan: it reads models, folds constants and makes code."""
_OF_PLANNERS = ("highspy", "torch", "torch_geometric", "safetensors")
"""What fusion planners ask, where it is installed."""


@dataclass(frozen=True)
class KeptPlan:
    """The place of a plan in the cache, where it may be or not.

    Attributes
    ----------
    folder : Path
    key : str
        Of all that the plan is made of.
    options : Options
        As the caller asked for it.
    """

    folder: Path
    key: str
    options: Options

    def plan(self) -> Plan | None:
        """What is kept; None where nothing is, or not the whole of it."""
        return kept_plan(self.folder, self.key, self.options)

    def keep(self, plan: Plan) -> None:
        """Keep it for whoever asks for the same."""
        keep_plan(self.folder, self.key, plan)


def place_of(model: LoadedModel, options: Options, *, on_host: bool) -> KeptPlan | None:
    """Where the plan of a model is kept; None where none is to be.

    The key is all that a plan is made of: the model as the frontend takes it, with its weights and the values of its
    dimensions; the options; the compiler's files and packages; for the CPU the processor, and the threads that loops
    are cut for; for CUDA what the tuning logs and a policy of one's own hold, nvcc, and the cores, for which kernels
    are shared out to files. Of a rule or planner that is not Souffle's own the files are not known: with one, nothing
    is kept.

    Parameters
    ----------
    model : LoadedModel
    options : Options
        Nothing is kept where they name no folder, nor where :func:`souffle.cache.most_bytes` says 0.
    on_host : bool
        LLVM code for this machine's processor, or one that the options name, instead of CUDA kernels.
    """
    if options.cache_dir is None or not most_bytes() or not (on_host or _is_own(options)):
        return None
    machine = _processor(options) if on_host else _cuda(options)
    return KeptPlan(options.cache_dir / _FOLDER, _key(model, options, machine), options)


def kept_or_made(place: KeptPlan | None, made: Callable[[], Plan], progress: Progress) -> Plan:
    """The plan that is kept at a place, or else what `made` gives, which is kept there."""
    if place is None:
        return made()
    progress("looking for what was compiled before")
    plan = place.plan()
    if plan is None:
        plan = made()
        place.keep(plan)
    return plan


def _is_own(options: Options) -> bool:
    """Whether all that decides about kernels is of Souffle."""
    planners = [planner_for(options.partition)]
    if options.fusion != SOUFFLE:
        planners.append(fusion_planner_for(options.fusion))
    steps = [step for rule in RULES.values() for step in (rule.reads, rule.apply)]
    modules = [*(type(planner).__module__ for planner in planners), *(step.__module__ for step in steps)]
    return all(str(module).startswith("souffle.") for module in modules)


def _key(model: LoadedModel, options: Options, machine: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    # Each part by its length, and each list by its own, so that no two lists of parts are one text.
    for parts in (_compiler(), machine, _wanted(options), _parts(model)):
        digest.update(b"%d;" % len(parts))
        for part in parts:
            text = part if isinstance(part, bytes) else part.encode()
            digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


@cache
def _compiler() -> tuple[str, ...]:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return (package_digest(), platform.python_version(), platform.machine(), *versions)


def _wanted(options: Options) -> tuple[str, ...]:
    names = [field.name for field in fields(options) if field.name != "cache_dir"]
    return tuple(f"{name}={getattr(options, name)!r}" for name in names)


def _processor(options: Options) -> tuple[str, ...]:
    target = host_target(options.threads, options.processor)
    return ("processor", str(target), repr(machine_of(target)), f"LLVM {codegen.llvm_version_major()}")


def _cuda(options: Options) -> tuple[str, ...]:
    nvcc = find_nvcc()
    said = ["cuda", compiler_version(nvcc) if nvcc else "no nvcc", f"{os.cpu_count()} cores", " ".join(RULES)]
    for folder in log_folders(options.tuning_log):
        said.extend(("log", *_files(sorted((folder / options.arch).glob("*.json*")))))
    if options.fusion != SOUFFLE:
        said.extend(f"{name} {_version(name)}" for name in _OF_PLANNERS)
    if options.policy is not None:
        said.extend(("policy", *_files([Path(options.policy)])))
    return tuple(said)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _files(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_file():
            yield f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _parts(model: LoadedModel) -> list[str | bytes]:
    names = list(model.initializers)
    digests = map_in_threads(usable_cores(), _content, model.initializers.values())
    said = (model.name, model.inputs, model.outputs, sorted(model.functions), model.integers, names)
    functions = [model.functions[name] for name in sorted(model.functions)]
    protos = [*model.opsets, *functions, *model.nodes]
    counts = (len(model.opsets), len(functions), len(model.nodes))
    return [repr(said), repr(counts), *digests, *(proto.SerializeToString(deterministic=True) for proto in protos)]


def _content(array: np.ndarray) -> str:
    if array.dtype.hasobject:
        return repr((array.shape, array.tolist()))
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{array.dtype} {array.shape} {hashlib.sha256(content).hexdigest()}"
