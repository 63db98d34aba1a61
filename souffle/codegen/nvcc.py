"""Compile CUDA text to a cubin with nvcc, and read back what the kernels use."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from souffle.cache import read_entry, write_entry
from souffle.codegen.machine_code import code_bytes
from souffle.codegen.plan import Resources
from souffle.errors import CompilerNotFoundError, CudaCompileError

__all__ = ["compile_cubin", "compiler_version", "content_key", "find_nvcc"]

_ENTRIES = "sealed"
"""How entries of the cache are written; another way is another key."""


def find_nvcc() -> Path | None:
    """The nvcc to use: ``$CUDA_HOME/bin``, the one on the PATH, the registry's wheel, ``/usr/local/cuda``."""
    candidates: list[Path] = []
    if os.environ.get("CUDA_HOME"):
        candidates.append(Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates.extend(sorted(Path(root).glob("cu*/bin/nvcc")))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((c for c in candidates if c.is_file()), None)


def compiler_version(nvcc: Path) -> str:
    """What a compiler says of itself: another one may give other code."""
    return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout


def content_key(text: str, arch: str, version: str) -> str:
    """The name under which what was made of a text is kept."""
    return hashlib.sha256("\0".join((_ENTRIES, text, arch, version)).encode()).hexdigest()


def compile_cubin(text: str, arch: str, *, cache_dir: Path | None = None) -> tuple[bytes, dict[str, Resources]]:
    """Compile CUDA text.

    Parameters
    ----------
    text : str
    arch : str
        Such as ``"sm_90"``.
    cache_dir : Path, optional
        Where results are kept by the text's hash; compiling the same text again is then a read. A folder that cannot
        be used costs a warning.

    Returns
    -------
    cubin : bytes
    resources : dict of str to Resources
        By kernel name, from ptxas' report and the cubin.

    Raises
    ------
    CompilerNotFoundError
        If there is no nvcc.
    CudaCompileError
        With the first lines of nvcc's message.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerNotFoundError(
            "no nvcc found in $CUDA_HOME/bin, on the PATH or in the registry's wheels; install CUDA 13's compiler "
            "with: pip install 'souffle-dl[cuda]', or compile with cubin=False to get the CUDA text only"
        )
    key = content_key(text, arch, compiler_version(nvcc))
    if cache_dir is not None:
        image, words = read_entry(cache_dir / f"{key}.cubin"), read_entry(cache_dir / f"{key}.txt")
        if image is not None and words is not None:
            return image, _with_code(_parse_report(words.decode()), image)
    with tempfile.TemporaryDirectory(prefix="souffle-nvcc-") as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(text)
        command = [str(nvcc), "-cubin", f"-arch={arch}", "-O3", "-std=c++17", "-Xptxas", "-v", "-diag-suppress=177"]
        done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line] or ["no message"]
            raise CudaCompileError(f"nvcc rejected the CUDA text for {arch}: " + " | ".join(lines[:3]))
        image, report = cubin.read_bytes(), done.stderr + done.stdout
    if cache_dir is not None:
        write_entry(cache_dir / f"{key}.txt", report.encode())
        write_entry(cache_dir / f"{key}.cubin", image)
    return image, _with_code(_parse_report(report), image)


def _with_code(found: dict[str, Resources], image: bytes) -> dict[str, Resources]:
    sizes = code_bytes(image)
    return {name: replace(used, code_bytes=sizes.get(name)) for name, used in found.items()}


def _parse_report(report: str) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    # What ptxas says of the functions that a kernel calls comes before or after what the kernel uses.
    for part in report.split("Compiling entry function ")[1:]:
        name, used = re.match(r"'(\w+)'", part), re.search(r"Used (\d+) registers.*", part)
        if name is None or used is None:
            continue
        figures = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        frames, stores, loads = ([int(line[i]) for line in figures] for i in range(3))
        shared = re.search(r"(\d+) bytes smem", used[0])
        # Of the longest chain of calls; ptxas leaves it out where there is no stack.
        stack = re.search(r"(\d+) bytes cumulative stack size", used[0])
        found[name[1]] = Resources(
            int(used[1]),
            int(shared[1]) if shared else 0,
            sum(stores),
            sum(loads),
            int(stack[1]) if stack else max(frames, default=0),
        )
    return found
