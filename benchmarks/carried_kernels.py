"""Kernels that are compiled here and run on a GPU host: what the benchmarks of one mechanism alone have in common."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.runtime.cuda import Cuda

__all__ = ["Found", "build", "command", "opened"]


@dataclass(frozen=True)
class Found:
    """What a run has found.

    Attributes
    ----------
    cuda : Cuda
    text : str
        For a person.
    rows : list of dict
        For the file of ``--json``.
    ok : bool
        Whether all is as it should be; the command's exit status.
    """

    cuda: Cuda
    text: str
    rows: list[dict[str, Any]]
    ok: bool = True


def build(folder: Path, stem: str, text: str, arch: str, **about: Any) -> list[Path]:
    """Compile CUDA text into a folder; the files that travel, ``about`` in one of them."""
    # Neither nvcc nor what calls it is there on the GPU host.
    compile_cubin = importlib.import_module("souffle.codegen.nvcc").compile_cubin
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{stem}.{suffix}" for suffix in ("cu", "cubin", "json")]
    files[0].write_text(text)
    files[1].write_bytes(compile_cubin(text, arch)[0])
    files[2].write_text(json.dumps({"arch": arch, **about}))
    return files


def opened(folder: Path, stem: str, *, rehearse: bool) -> tuple[Cuda, bytes, dict[str, Any]]:
    """The GPU, or the played driver, with the machine code that :func:`build` has left and what was written about it.

    Raises
    ------
    DeviceError
        If there is no GPU, or one that cannot run the code.
    """
    about = json.loads((folder / f"{stem}.json").read_text())
    image = (folder / f"{stem}.cubin").read_bytes()
    if rehearse:
        number = about["arch"][3:].rstrip("af")
        texts = {image: (folder / f"{stem}.cu").read_text()}
        return Cuda(0, RehearsalDriver(texts, capability=(int(number[:-1]), int(number[-1])))), image, about
    cuda = Cuda(0)
    cuda.require_arch(about["arch"])
    return cuda, image, about


def command(
    name: str,
    doc: str,
    compile_kernels: Callable[[Path, str], list[Path]],
    find: Callable[[argparse.Namespace], Found],
    argv: list[str] | None,
) -> int:
    """The command ``python -m benchmarks.NAME build|run|rehearse``.

    Parameters
    ----------
    name, doc
        Of the module.
    compile_kernels
        Of a folder and an architecture, for ``build``.
    find
        Of ``options.input``, ``options.rehearse`` and ``options.repeats``, for the others.
    argv
        Arguments; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="compile the kernels")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--arch", default="sm_90")
    for kind in ("run", "rehearse"):
        running = commands.add_parser(kind, help="on the GPU" if kind == "run" else "the same on the CPU device")
        running.add_argument("--in", dest="input", type=Path, required=True)
        running.add_argument("--json", type=Path, help="where to keep what was found")
        running.add_argument("--repeats", type=int, default=25 if kind == "run" else 1, help="of what is timed")
        running.set_defaults(rehearse=kind == "rehearse")
    options = parser.parse_args(argv)
    if options.command == "build":
        compile_kernels(options.out, options.arch)
        return 0
    found = find(options)
    about = ", a rehearsal without a GPU: times mean nothing" if options.rehearse else ""
    sys.stdout.write(f"{found.cuda.name} {found.cuda.arch}{about}\n{found.text}")
    if options.json:
        content = {
            "device": found.cuda.name,
            "rehearsal": options.rehearse,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
            "ok": found.ok,
            "rows": found.rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if found.ok else 1
