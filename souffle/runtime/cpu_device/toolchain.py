"""Compile with g++ into shared libraries that are kept by the hash of all that went into them."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from souffle.cache import cache_root, read_entry, write_entry
from souffle.errors import CompilerNotFoundError, CudaCompileError, DeviceError

__all__ = ["FOLDER", "build_kernel_library", "build_runtime_library", "default_cache_dir"]

FOLDER = Path(__file__).resolve().parent
_INCLUDE = FOLDER / "include"
_SOURCES = FOLDER / "src"
_RUNTIME_SOURCE = _SOURCES / "fiber_runtime.cpp"
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-w")
# No contraction and no errno: a kernel's arithmetic is what its text says, and math calls are inlined where exact.
_KERNEL = (
    "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-strict-aliasing",
    "-fno-stack-protector", "-fstack-clash-protection", "-fno-extern-tls-init", "-fno-threadsafe-statics",
    "-fno-asynchronous-unwind-tables", "-fno-ipa-reference", "-fmax-errors=8",
    # Lines of the text for reports; the return address of a barrier has to lie in the function that names it.
    "-g1", "-fno-optimize-sibling-calls",
)  # fmt: skip
# A call before every access to memory that other threads may see. The accesses are those of the text: none is moved to
# where the text would not have made it, none is made twice or joined with another. The last two passes that are off
# unroll loops, and join what is equal in their turns.
_CHECKED = (
    "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-DSOUFFLE_CHECKED", "-fno-tree-loop-im",
    "-fno-tree-pre", "-fno-code-hoisting", "-fno-tree-loop-if-convert", "-fno-ssa-phiopt", "-fno-tree-vectorize",
    "-fno-tree-loop-distribute-patterns", "-fno-store-merging", "-fno-tree-fre", "-fno-tree-dominator-opts",
    "-fdisable-tree-cunroll", "-fdisable-tree-cunrolli",
)  # fmt: skip
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,now")
# Instruction sets that change no result, in the spelling of /proc/cpuinfo.
_SAFE_SETS = ("avx2", "f16c", "fma", "bmi2", "popcnt")
_SHOWN_ERRORS = 5
_TEXT_NAME = "kernels.cu"  # debug information names this file, or that of the #line directive: one name for both


def default_cache_dir() -> Path:
    """Give the folder for compiled libraries, which have to be files: the cache, or a temporary one where it is off."""
    root = cache_root()
    if root is not None:
        return root / "cpu_device"
    folder = Path(tempfile.gettempdir()) / f"souffle-cpu-device-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if folder.stat().st_uid == os.getuid() else _folder_of_this_process()
    except OSError:
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    """Where libraries lie that cannot be kept: gone when the process ends."""
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="souffle-cpu-device-"))
    return Path(_TEMPORARY[-1].name)


_TEMPORARY: list[tempfile.TemporaryDirectory] = []


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    if platform.machine() != "x86_64":
        return ()
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    line = next((row for row in cpu.splitlines() if row.startswith("flags")), "")
    present = set(line.split())
    return tuple(f"-m{name}" for name in _SAFE_SETS if name in present)


def uses_register() -> bool:
    """Tell whether the current thread is held in a register, as the hand-written fiber switch does it."""
    return platform.machine() == "x86_64" and os.environ.get("SOUFFLE_CPU_DEVICE_UCONTEXT") != "1"


def _compiler() -> str:
    for name in (os.environ.get("SOUFFLE_CXX"), "g++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise CompilerNotFoundError("no g++ on the PATH: the CPU device compiles kernels with it; install g++ 12 or newer")


@functools.cache
def _compiler_version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


@functools.cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((*_INCLUDE.iterdir(), *_SOURCES.iterdir())):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(
    source: str,
    flags: tuple[str, ...],
    stem: str,
    cache_dir: Path | None,
    failed: str,
    libraries: tuple[str, ...] = (),
) -> Path:
    compiler = _compiler()
    folder = Path(os.path.abspath(default_cache_dir() if cache_dir is None else cache_dir))
    made_by = (compiler, _compiler_version(compiler), _headers_digest())
    parts = ("sealed", _TEXT_NAME, source, *flags, *_LINK, *libraries, *made_by)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    name = f"{stem}-{key}.so"
    for kept in (folder, *(Path(temporary.name) for temporary in _TEMPORARY)):
        # Half a library may load and then end the process.
        if read_entry(kept / name) is not None:
            return kept / name
    with tempfile.TemporaryDirectory(prefix="souffle-build-") as work:
        text = Path(work) / _TEXT_NAME
        text.write_text(source, encoding="utf-8")
        compiled, made = Path(work) / "out.o", Path(work) / "out.so"
        # Two steps: g++ would link a sanitizer's own runtime to what it compiled for one.
        for command, result in (
            ([*flags, f"-I{_INCLUDE}", f"-I{_SOURCES}", "-x", "c++", "-c", str(text)], compiled),
            ([*_LINK, str(compiled), *libraries], made),
        ):
            command = [compiler, *command, "-o", str(result)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
            if done.returncode != 0 or not result.exists():
                lines = [row.replace(str(Path(work)) + "/", "") for row in done.stderr.splitlines()]
                errors = [row for row in lines if "error" in row or "undefined" in row][:_SHOWN_ERRORS]
                raise CudaCompileError(f"{failed}: g++ says\n" + "\n".join(errors or lines[:_SHOWN_ERRORS]))
        image = made.read_bytes()
    if write_entry(folder / name, image):
        return folder / name
    folder = _folder_of_this_process()
    if write_entry(folder / name, image):
        return folder / name
    raise DeviceError(f"{failed}: the compiled library cannot be written, to {folder} neither; is the disk full?")


def build_runtime_library(cache_dir: Path | None = None) -> Path:
    """Build the fiber runtime, once for each cache folder."""
    # What warps do together is the kernel's code, called from the runtime: the register must hold the thread there too.
    switch = ("-ffixed-r15",) if uses_register() else ("-DSOUFFLE_UCONTEXT",)
    flags = (*_COMMON, "-O2", "-fvisibility=default", "-fno-stack-protector", *switch)
    source, libraries = _RUNTIME_SOURCE.read_text(encoding="utf-8"), ("-lpthread", "-ldl")
    return _build(source, flags, "runtime", cache_dir, "the fiber runtime", libraries)


def build_kernel_library(source: str, cache_dir: Path | None = None, *, checked: bool = False) -> Path:
    """Build a translated CUDA text; a checked one calls the functions of ``souffle_check.h`` at each access.

    Raises
    ------
    CudaCompileError
        g++ rejects the text; the message holds its first errors, with the line numbers of the CUDA text.
    CompilerNotFoundError
        There is no g++.
    """
    register = ("-ffixed-r15", "-DSOUFFLE_SELF_IN_REGISTER", "-Wno-register") if uses_register() else ()
    prelude = ("-include", "souffle_device.h")
    flags = (*_COMMON, *_KERNEL, *(_CHECKED if checked else ()), *_machine_flags(), *register, *prelude)
    return _build(source, flags, "checked" if checked else "kernels", cache_dir, "the CUDA text", ("-lm",))
