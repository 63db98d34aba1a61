"""``souffle doctor``: what of all that Souffle can use is here; what is missing, what it would bring, how to get it.

Nothing of the compiler is imported: it works where TVM cannot be. That the compiler works is found out by compiling and
running a small network in a process of its own, which may end in any way.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from souffle.cache import cache_root
from souffle.codegen.nvcc import compiler_version, find_nvcc
from souffle.emulator.toolchain import find_gxx
from souffle.errors import CompilerNotFoundError, DeviceError, IncompatibleEnvironmentError, NoGpuError
from souffle.parallel import physical_cores, processor_quota
from souffle.runtime.cuda import Cuda
from souffle.schedule.log_folders import LOG_VARIABLE, RECORDS, log_folders
from souffle.tvm_pair import check_tvm_pair, installed_pair, installed_version

__all__ = ["Diagnosis", "Finding", "examine"]

_TRIAL_SECONDS = 300
_UNNAMED = ("not installed", "of no package that pip knows")
"""Of what has no version: where it is not there, and where it is."""
_REQUIRED = ("islpy", "numpy", "ml_dtypes", "onnx", "onnxscript")
"""Modules that the compiler imports, of packages of the same names; TVM is looked at by itself."""
_OPTIONAL = (
    ("ONNX Runtime", "onnxruntime", "onnxruntime", "check", "outputs are compared with it (check, ablate, bench)"),
    ("cuda-bindings", "cuda", "cuda-bindings", "cuda", "networks run on a GPU"),
    ("PyTorch", "torch", "torch", "learn", "souffle learn, fusion=learned, and peers in souffle bench"),
    ("HiGHS", "highspy", "highspy", "stitching", "the planner stitching-ilp"),
    ("Ray", "ray", "ray", "cluster", "souffle tune --on ray: searches on many machines"),
    ("xgboost", "xgboost", "xgboost-cpu", "tune", "souffle tune ranks candidates by what measured records teach"),
    ("tree-sitter", "tree_sitter_cuda", "tree-sitter-cuda", "hfuse", "souffle hfuse reads CUDA files"),
)
"""What people call it, its module and package, the extra that installs it, and what it brings."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes
    ----------
    name : str
    there : bool
    needed : bool
        Whether nothing can be compiled without.
    found : str
        What is there, or in which way it is not.
    brings : str
        What it is for.
    install : str
        What would help; empty where it is there.
    """

    name: str
    there: bool
    needed: bool
    found: str
    brings: str
    install: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that was looked for.

    Attributes
    ----------
    findings : tuple of Finding
    target : str
        What ``target="auto"`` is here.
    why : str
    works : bool
        Whether a small network was compiled for it, run, and computed what it is to.
    trial : str
        What was done to know that, or what went wrong.
    """

    findings: tuple[Finding, ...]
    target: str
    why: str
    works: bool
    trial: str


def examine() -> Diagnosis:
    """Look at all of it, and compile a small network."""
    gpu = _gpu()
    compiler = [_tvm(), *map(_library, _REQUIRED)]
    findings = (
        _python(),
        *compiler,
        _gxx(),
        _nvcc(),
        gpu,
        *(_extra(*about) for about in _OPTIONAL),
        _cache(),
        _logs(),
        _cores(),
    )
    target = "cuda" if gpu.there else "cpu"
    why = f"{gpu.found}" if gpu.there else f"no GPU is usable ({gpu.found}), so LLVM code for this processor is made"
    missing = [finding.name for finding in compiler if not finding.there]
    if missing:
        return Diagnosis(findings, target, why, False, f"nothing can be compiled without {', '.join(missing)}")
    works, trial = _trial(target)
    return Diagnosis(findings, target, why, works, trial)


def _python() -> Finding:
    version = sys.version_info
    fits = (3, 10) <= version[:2] <= (3, 12)
    found = f"{platform.python_version()} at {sys.executable}"
    return Finding("Python", fits, True, found, "all of it", "" if fits else "Python 3.10 to 3.12, as TVM has")


def _tvm() -> Finding:
    brings = "the compiler; networks that are compiled already run without"
    install = "pip install souffle-dl, which brings the pair that it was checked with"
    pair = installed_pair()
    found = f"apache-tvm {pair[0] or 'not installed'}, apache-tvm-ffi {pair[1] or 'not installed'}"
    try:
        check_tvm_pair(*pair)
        importlib.import_module("tvm")
    except IncompatibleEnvironmentError as error:
        return Finding("TVM", False, True, f"{found}: {error}" if all(pair) else found, brings, install)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return Finding("TVM", False, True, f"{found}, which cannot be imported: {error}", brings, install)
    return Finding("TVM", True, True, found, brings)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _library(name: str) -> Finding:
    there = _there(name)
    found = installed_version(name) or _UNNAMED[there]
    return Finding(name, there, True, found, "the compiler", "" if there else f"pip install {name}")


def _extra(name: str, module: str, package: str, extra: str, brings: str) -> Finding:
    there = _there(module)
    found = installed_version(package) or _UNNAMED[there]
    return Finding(name, there, False, found, brings, "" if there else f"pip install 'souffle-dl[{extra}]'")


def _gxx() -> Finding:
    brings = "the CPU device: CUDA text runs, and is checked, without a GPU"
    try:
        path = find_gxx()
    except CompilerNotFoundError as error:
        install = "the system's package g++ (12 or newer), or its path in $SOUFFLE_CXX"
        return Finding("g++", False, False, str(error).partition(":")[0], brings, install)
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=False)
    return Finding("g++", True, False, f"{done.stdout.strip()} at {path}", brings)


def _nvcc() -> Finding:
    brings = "machine code for a GPU, and the registers of kernels; without, cubin=False gives the CUDA text"
    path = find_nvcc()
    if path is None:
        where = "in none of $CUDA_HOME/bin, the PATH, the registry's wheels and /usr/local/cuda"
        return Finding("nvcc", False, False, where, brings, "pip install 'souffle-dl[cuda]'")
    lines = [line for line in compiler_version(path).splitlines() if "release" in line]
    release = lines[0].partition("release ")[2] if lines else "of an unknown release"
    return Finding("nvcc", True, False, f"{release} at {path}", brings)


def _gpu() -> Finding:
    brings = "networks run on it, and schedules are measured"
    try:
        cuda = Cuda()
    except (NoGpuError, DeviceError) as error:
        reason = str(error).partition("; ")[0]
        return Finding("GPU", False, False, reason, brings, "an NVIDIA GPU with its driver, and souffle-dl[cuda]")
    major, minor = divmod(cuda.driver_version // 10, 100)
    return Finding("GPU", True, False, f"{cuda.label}, driver for CUDA {major}.{minor}", brings)


def _cache() -> Finding:
    brings = "what was compiled once is read the next time; $SOUFFLE_CACHE is its folder, or off"
    root, said = cache_root(), os.environ.get("SOUFFLE_CACHE", "")
    if root is None:
        why = "off" if said == "off" else "no folder for it is known"
        return Finding("cache", False, False, why, brings, "SOUFFLE_CACHE=DIR")
    files = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    first = next(folder for folder in (root, *root.parents) if folder.exists())
    found = f"{root}: {len(files)} files, {size / 1e6:.1f} MB; SOUFFLE_CACHE is {said or 'not set'}"
    if not os.access(first, os.W_OK):
        return Finding("cache", False, False, f"{found}; {first} cannot be written", brings, "SOUFFLE_CACHE=DIR")
    return Finding("cache", True, False, found, brings)


def _logs() -> Finding:
    brings = f"schedules that a search found, looked up when compiling; further folders in ${LOG_VARIABLE}"
    found = [
        f"{records.parent.name} ({_lines(records)} records) in {folder}"
        for folder in log_folders("auto")
        for records in sorted(folder.glob(f"*/{RECORDS}"))
    ]
    words = ", ".join(found) or "none"
    return Finding("tuning logs", bool(found), False, words, brings, "" if found else "souffle tune MODEL --trials N")


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _cores() -> Finding:
    cores, all_of_them = physical_cores(), os.cpu_count() or len(physical_cores())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_of_them
    found = f"{len(cores)}, on {usable} of the machine's {all_of_them} processors, which this process may use"
    quota = processor_quota()
    found += "" if quota is None else f"; its control group gives it the time of {quota:g}"
    return Finding("cores", True, False, found, "target=cpu runs on all of them; threads= and taskset give fewer")


def _trial(target: str) -> tuple[bool, str]:
    """Whether a small network is compiled and right, in a process that may be killed by a library's fault."""
    command = [sys.executable, "-m", "souffle.doctor_trial", target]
    # What was imported here is imported there.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TRIAL_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, f"a small network was not compiled within {_TRIAL_SECONDS} s"
    if done.returncode < 0:
        return False, f"compiling a small network ended the process with signal {-done.returncode}"
    answer = _last_answer(done.stdout.splitlines())
    if answer is None:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return False, f"compiling a small network failed: {lines[-1]}"
    return bool(answer["ok"]), str(answer["said"])


def _last_answer(lines: Sequence[str]) -> dict[str, object] | None:
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and {"ok", "said"} <= found.keys() else None
