"""A model that was compiled for this processor before: its plan is read, and nothing is compiled."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import fields
from functools import cache

import numpy as np
from tvm.target import codegen

from souffle.cache import most_bytes
from souffle.codegen.plan import Plan
from souffle.frontend.load import LoadedModel
from souffle.options import Options, Progress
from souffle.parallel import map_in_threads, usable_cores
from souffle.runtime.kept_plans import keep_plan, kept_plan
from souffle.schedule.cpu import host_target, machine_of
from souffle.source import package_digest

__all__ = ["plan_on_host"]

_FOLDER = "host_plans"
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "islpy", "ml-dtypes", "numpy", "onnx", "onnxscript")
"""What else decides about a plan: it reads models, folds constants and makes code."""


def plan_on_host(model: LoadedModel, options: Options, made: Callable[[], Plan], progress: Progress) -> Plan:
    """The plan of a model for this processor: a kept one, or else what `made` gives, which is kept.

    The key is all that a plan is made of: the model as the frontend takes it, with its weights and the values of its
    dimensions; the options; the processor, and the threads that loops are cut for; the compiler's files and packages.

    Parameters
    ----------
    model : LoadedModel
    options : Options
        Nothing is kept where they name no folder, nor where :func:`souffle.cache.most_bytes` says 0.
    made : callable
    progress : callable
    """
    if options.cache_dir is None or not most_bytes():
        return made()
    folder, key = options.cache_dir / _FOLDER, _key(model, options)
    progress("looking for what was compiled before")
    plan = kept_plan(folder, key, options)
    if plan is None:
        plan = made()
        keep_plan(folder, key, plan)
    return plan


def _key(model: LoadedModel, options: Options) -> str:
    digest = hashlib.sha256()
    # Each part by its length, so that no two lists of parts are one text.
    for part in (*_compiler(), *_wanted(options), *_parts(model)):
        text = part if isinstance(part, bytes) else part.encode()
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


@cache
def _compiler() -> tuple[str, ...]:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return (package_digest(), platform.python_version(), platform.machine(), *versions)


def _wanted(options: Options) -> tuple[str, ...]:
    target = host_target(options.threads, options.processor)
    names = [field.name for field in fields(options) if field.name != "cache_dir"]
    chosen = [f"{name}={getattr(options, name)!r}" for name in names]
    return (str(target), repr(machine_of(target)), f"LLVM {codegen.llvm_version_major()}", *chosen)


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
