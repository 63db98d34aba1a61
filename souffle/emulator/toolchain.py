"""Compile with g++ into shared libraries that are kept by the hash of all that went into them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from souffle.cache import cache_root, read_entry, write_entry
from souffle.errors import CompilerNotFoundError, CudaCompileError, DeviceError

__all__ = ["FOLDER", "SHARED_STEMS", "build_kernel_library", "build_runtime_library", "default_cache_dir", "find_gxx"]

SHARED_STEMS = ("runtime", "checks", "rest", "prelude")
"""What the names of files begin with that serve several texts, and may lie where these are kept."""

FOLDER = Path(__file__).resolve().parent
_INCLUDE = FOLDER / "include"
_SOURCES = FOLDER / "src"
_HEADERS = (f"-I{_INCLUDE}", f"-I{_SOURCES}")
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
# A text in two: whatever is defined in both is taken from the first, and the other is left out with its shared arrays.
# Nothing may be concluded from a function that is replaced, nor two of them made one. A register that is read before it
# is written holds what shows, and not by chance what it held in the function before.
_PART = "-DSOUFFLE_PART"
_DIVIDED = ("-ffunction-sections", "-fdata-sections", "-fno-ipa-icf", "-ftrivial-auto-var-init=pattern")
_JOINED = ("-Wl,--gc-sections", "-Wl,-z,muldefs")
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,now")
# Instruction sets that change no result, in the spelling of /proc/cpuinfo.
_SAFE_SETS = ("avx2", "f16c", "fma", "bmi2", "popcnt")
_PRELUDE = "souffle_device.h"
_MOST_PRELUDES = 8  # of 20 MB; a version of the emulator uses four, for texts whole and in two, checked and not
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


def _serving_all(folder: Path) -> Path:
    """Where that lies which serves all texts: in the cache, wherever the texts are kept, so that it is made once.

    Where nothing can be written there, with the texts, in `folder`.
    """
    own = Path(os.path.abspath(default_cache_dir()))
    there = next(each for each in (own, *own.parents) if each.exists())
    return own if there.is_dir() and os.access(there, os.W_OK) else folder


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


def find_gxx() -> str:
    """The path of the C++ compiler.

    Raises
    ------
    CompilerNotFoundError
        If there is none.
    """
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


@dataclass(frozen=True)
class _Unit:
    """A source and the flags it is compiled with; one that is kept is linked into several libraries."""

    source: str
    flags: tuple[str, ...]
    stem: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.source, *self.flags)

    @property
    def serves_all(self) -> bool:
        """Whether it holds nothing of a text."""
        return not self.source

    @property
    def prelude(self) -> tuple[str, ...]:
        """The flags that its prelude is compiled with, or nothing where that serves no other text."""
        at = self.flags.index("-include") if not self.stem and "-include" in self.flags else -1
        return () if at < 0 else (*self.flags[:at], *self.flags[at + 2 :])


def _build(
    units: tuple[_Unit, ...],
    stem: str,
    cache_dir: Path | None,
    failed: str,
    linked: tuple[str, ...] = (),
) -> Path:
    folder = Path(os.path.abspath(default_cache_dir() if cache_dir is None else cache_dir))
    name = f"{stem}-{_key(*(part for unit in units for part in unit.parts), *_LINK, *linked)}.so"
    for kept in (folder, *(Path(temporary.name) for temporary in _TEMPORARY)):
        # Half a library may load and then end the process.
        if read_entry(kept / name) is not None:
            return kept / name
    with tempfile.TemporaryDirectory(prefix="souffle-build-") as work:
        # Two steps: g++ would link a sanitizer's own runtime to what it compiled for one.
        objects = [str(_object(unit, folder, Path(work) / f"{i}.o", failed)) for i, unit in enumerate(units)]
        made = Path(work) / "out.so"
        _run([*_LINK, *objects, *linked], made, failed)
        image = made.read_bytes()
    if write_entry(folder / name, image):
        return folder / name
    folder = _folder_of_this_process()
    if write_entry(folder / name, image):
        return folder / name
    raise DeviceError(f"{failed}: the compiled library cannot be written, to {folder} neither; is the disk full?")


def _key(*parts: str) -> str:
    compiler = find_gxx()
    made_by = (compiler, _compiler_version(compiler), _headers_digest())
    return hashlib.sha256("\0".join(("sealed", _TEXT_NAME, *parts, *made_by)).encode()).hexdigest()[:24]


def _object(unit: _Unit, folder: Path, result: Path, failed: str) -> Path:
    """Compile a unit, or take it from the folder where such units are kept."""
    entry = (_serving_all(folder) if unit.serves_all else folder) / f"{unit.stem}-{_key(*unit.parts)}.o"
    image = read_entry(entry) if unit.stem else None
    if image is not None:
        result.write_bytes(image)
        return result
    text = result.parent / _TEXT_NAME
    text.write_text(unit.source, encoding="utf-8")
    command = [*_HEADERS, "-x", "c++", "-c", str(text)]
    compiled = _compiled_prelude(unit.prelude, _serving_all(folder)) if unit.prelude else None
    try:
        _run([*unit.flags, *([] if compiled is None else [f"-I{compiled}"]), *command], result, failed)
    except CudaCompileError:
        # The text is wrong; or g++ could not map what was compiled where it has to lie, which is an error of its own.
        if compiled is None:
            raise
        _run([*unit.flags, *command], result, failed)
    if unit.stem:
        write_entry(entry, result.read_bytes())
    return result


@functools.cache
def _compiled_prelude(flags: tuple[str, ...], folder: Path) -> Path | None:
    """A folder with the prelude of all texts as g++ compiled it, which takes g++ longer than most of the texts.

    g++ takes it for what the text includes, if its flags are these, and else goes on to the header. That the header is
    still what was compiled it does not look at: the folder is named by what is in it. ``None`` where it cannot be kept.
    """
    kept = folder / f"prelude-{_key(*flags)}"
    entry = kept / f"{_PRELUDE}.gch"
    if read_entry(entry) is not None:
        with contextlib.suppress(OSError):
            os.utime(entry)
        return kept
    # What cannot be written or compiled is told of by the texts, with which it is the same.
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="souffle-build-") as work:
            made = Path(work) / entry.name
            header = ["-x", "c++-header", str(_INCLUDE / _PRELUDE)]
            _run([*flags, *_HEADERS, *header], made, "the prelude")
            image = made.read_bytes()
    except (OSError, CudaCompileError):
        return None
    if not write_entry(entry, image):
        return None
    _remove_old_preludes(folder)
    return kept


def _remove_old_preludes(folder: Path) -> None:
    """Keep those that were used last; who is reading one goes on, and who finds none takes the header."""
    with contextlib.suppress(OSError):
        entries = sorted(folder.glob(f"prelude-*/{_PRELUDE}.gch"), key=lambda one: one.stat().st_mtime)
        for entry in entries[:-_MOST_PRELUDES]:
            entry.unlink()
            entry.parent.rmdir()


def _run(arguments: list[str], result: Path, failed: str) -> None:
    command = [find_gxx(), *arguments, "-o", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=result.parent)
    if done.returncode != 0 or not result.exists():
        lines = [row.replace(str(result.parent) + "/", "") for row in done.stderr.splitlines()]
        errors = [row for row in lines if "error" in row or "undefined" in row][:_SHOWN_ERRORS]
        raise CudaCompileError(f"{failed}: g++ says\n" + "\n".join(errors or lines[:_SHOWN_ERRORS]))


def build_runtime_library(cache_dir: Path | None = None) -> Path:
    """Build the fiber runtime, once for all texts."""
    # What warps do together is the kernel's code, called from the runtime: the register must hold the thread there too.
    switch = ("-ffixed-r15",) if uses_register() else ("-DSOUFFLE_UCONTEXT",)
    flags = (*_COMMON, "-O2", "-fvisibility=default", "-fno-stack-protector", *switch)
    unit = _Unit(_RUNTIME_SOURCE.read_text(encoding="utf-8"), flags)
    shared = _serving_all(default_cache_dir() if cache_dir is None else cache_dir)
    return _build((unit,), "runtime", shared, "the fiber runtime", ("-lpthread", "-ldl"))


def build_kernel_library(
    source: str, cache_dir: Path | None = None, *, checked: bool = False, rest: str | None = None
) -> Path:
    """Build a translated CUDA text; a checked one calls the functions of ``souffle_check.h`` at each access.

    Parameters
    ----------
    source
        The text.
    cache_dir
        Where libraries are kept.
    checked
        Whether accesses are looked at.
    rest
        A text that is compiled once for many: what `source` defines takes the place of what `rest` does.

    Raises
    ------
    CudaCompileError
        g++ rejects the text; the message holds its first errors, with the line numbers of the CUDA text.
    CompilerNotFoundError
        There is no g++.
    """
    register = ("-ffixed-r15", "-DSOUFFLE_SELF_IN_REGISTER", "-Wno-register") if uses_register() else ()
    flags = (*_COMMON, *_KERNEL, *_machine_flags(), *register, "-include", _PRELUDE)
    if checked:
        checks = (_Unit("", (*flags, _PART, "-DSOUFFLE_CHECK_FUNCTIONS"), "checks"),)
        flags = (*flags, *_CHECKED)
    else:
        checks = ()
    if rest is None:
        units, linked = (_Unit(source, flags),), ()
    else:
        own = (_Unit(source, (*flags, *_DIVIDED, _PART)),) if source else ()
        units, linked = (*own, _Unit(rest, (*flags, *_DIVIDED), "rest")), _JOINED
    return _build((*units, *checks), "checked" if checked else "kernels", cache_dir, "the CUDA text", (*linked, "-lm"))
