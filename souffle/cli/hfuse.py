"""``souffle hfuse``: kernels of CUDA files fused into one (HFuse), checked on the CPU device and measured on a GPU."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from souffle.cache import cache_root
from souffle.cli.output import Progress, format_table, write_json
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import Resources
from souffle.hfuse.check import Check, check
from souffle.hfuse.errors import FusionError
from souffle.hfuse.fuse import SPACES, FusedKernel, fuse
from souffle.hfuse.fused_text import Bound
from souffle.hfuse.launch import Launch
from souffle.hfuse.original import original
from souffle.hfuse.part import Part, even_split
from souffle.hfuse.profile import Profiler, Times
from souffle.hfuse.resources import Usage, compiled_usage, multiprocessor_of
from souffle.hfuse.search import RegisterBound, Search, register_bound, search
from souffle.hfuse.source import Source
from souffle.runtime.cuda import Cuda

__all__ = ["add_arguments", "hfuse"]

_FILE = re.compile(r"(?P<path>.+?\.\w+)(?::(?!:)(?P<kernel>.+))?")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument("files", nargs="+", metavar="FILE.cu[:KERNEL]", help="two or more, each with a kernel to fuse")
    command.add_argument("--block", type=int, default=1024, help="threads of the fused block (default: %(default)s)")
    command.add_argument("--split", metavar="N,N", help="threads of each part (default: as even as can be)")
    command.add_argument("--launch", nargs="+", default=[], metavar="FILE.json", help="how each kernel is launched")
    command.add_argument("--space", choices=SPACES, default="thread", help="what the parts divide (default: thread)")
    command.add_argument(
        "--registers",
        default="none",
        metavar="none|bound|N",
        help='the most registers of a thread: no bound, that of the paper\'s Figure 6, or a number (default: "none")',
    )
    command.add_argument("--arch", default="sm_90", help="that registers are counted for (default: %(default)s)")
    command.add_argument("--check", type=int, default=0, metavar="N", help="compare in N shuffled orders on the CPU")
    command.add_argument("--checked", action="store_true", help="with --check, also look at every memory access")
    command.add_argument("--seed", type=int, default=0, help="of the arrays and orders of the check")
    command.add_argument("--profile", action="store_true", help="search the fastest partition on the GPU at hand")
    command.add_argument("-o", "--output", metavar="FILE.cu", type=Path, help="default: the text goes to stdout")
    command.add_argument("--force", action="store_true", help="overwrite the output")
    command.set_defaults(command=hfuse)


@dataclass(frozen=True)
class _Report:
    """What the command tells."""

    fused: FusedKernel
    resources: Resources | None
    bound: RegisterBound | None
    bounded: Resources | None
    alone: tuple[Resources | None, ...]
    arch: str
    check: Check | None
    search: Search | None
    times: Times | None


def hfuse(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if the fused kernel gives other bits than its parts alone."""
    if arguments.output is not None and arguments.output.exists() and not arguments.force:
        raise FusionError(f"{arguments.output} exists; give --force to overwrite it, or another name with -o")
    multiprocessor_of(arguments.arch)
    parts = _parts(arguments.files, arguments.launch)
    splits = _splits(arguments.split, parts, arguments.block)
    if arguments.check and any(part.launch is None for part in parts):
        raise FusionError("a check runs the kernels and needs their launches: --launch A.json B.json")
    usage = None if find_nvcc() is None else _usage(arguments.arch)
    if usage is None and (arguments.registers == "bound" or arguments.profile):
        raise FusionError("the register bound is made of what nvcc says of the kernels, and there is no nvcc here; "
                          "install it with: pip install 'souffle-dl[cuda]'")  # fmt: skip
    searched, times = _profile(arguments, parts, progress) if arguments.profile else (None, None)
    if searched is not None:
        fused, splits = searched.best.fused, searched.best.splits
    else:
        fused = _fused(arguments, parts, splits, usage)
    report = _measured(arguments, fused, usage, searched, times, progress)
    if arguments.check:
        progress("compiling for the CPU device")
        result = check(fused, orders=arguments.check, seed=arguments.seed, checked=arguments.checked, progress=progress)
        report = _Report(**{**vars(report), "check": result})
    progress.done()
    if arguments.output is not None:
        arguments.output.write_text(fused.text, encoding="utf-8")
    if arguments.json:
        write_json(_record(report, arguments.output))
    else:
        _print(report, arguments.output)
    return 0 if report.check is None or report.check.ok else 1


def _parts(files: Sequence[str], launches: Sequence[str]) -> tuple[Part, ...]:
    if len(files) < 2:
        raise FusionError(f"{files[0]}: one kernel is nothing to fuse; give two files or more")
    if launches and len(launches) != len(files):
        raise FusionError(
            f"{len(launches)} launches were given for {len(files)} kernels; give one for each, in their order"
        )
    parts = []
    for position, file in enumerate(files):
        match = _FILE.fullmatch(file)
        if match is None:
            raise FusionError(f"{file!r} is not of the form FILE.cu or FILE.cu:KERNEL")
        launch = Launch.read(launches[position]) if launches else None
        parts.append(Part.of(Source.read(match["path"]), match["kernel"], launch))
    return tuple(parts)


def _splits(given: str | None, parts: Sequence[Part], block: int) -> tuple[int, ...]:
    if given is None:
        return even_split(parts, block)
    numbers = given.split(",")
    if len(numbers) != len(parts) or not all(number.strip().isdecimal() for number in numbers):
        raise FusionError(f"--split {given!r}: {len(parts)} numbers of threads are needed, as in --split 768,256")
    return tuple(int(number) for number in numbers)


def _usage(arch: str) -> Usage:
    root = cache_root()
    return compiled_usage(arch, None if root is None else root / "hfuse")


def _fused(
    arguments: argparse.Namespace, parts: tuple[Part, ...], splits: tuple[int, ...], usage: Usage | None
) -> FusedKernel:
    """The fused kernel with the register bound that was asked for."""
    wanted = arguments.registers
    if wanted == "none":
        return fuse(parts, splits, space=arguments.space)
    if wanted == "bound" and usage is not None:
        plain = fuse(parts, splits, space=arguments.space)
        return fuse(
            parts, splits, space=arguments.space, bound=Bound(blocks=_bound(plain, usage, arguments.arch).blocks)
        )
    if not wanted.isdecimal():
        raise FusionError(f"--registers {wanted!r} is neither none, bound nor a number")
    return fuse(parts, splits, space=arguments.space, bound=Bound(registers=int(wanted)))


def _bound(fused: FusedKernel, usage: Usage, arch: str) -> RegisterBound:
    registers = []
    for part in fused.parts:
        text = original(part, wrapped=True)
        registers.append(usage(text.text, text.name).registers)
    shared = usage(fused.text, fused.name).static_shared_bytes + fused.shared_bytes
    return register_bound(fused.splits, registers, shared, multiprocessor_of(arch))


def _profile(arguments: argparse.Namespace, parts: tuple[Part, ...], progress: Progress) -> tuple[Search, Times]:
    """Figure 6 on the GPU at hand, and its best candidate against the parts alone."""
    if arguments.space != "thread":
        raise FusionError(f"--profile searches partitions of threads; leave out --space {arguments.space}")
    cuda = Cuda()
    with Profiler(cuda, parts, even_split(parts, arguments.block)) as profiler:
        searched = search(
            parts,
            arguments.block,
            profiler.seconds,
            usage=_usage(cuda.arch),
            multiprocessor=multiprocessor_of(cuda.arch),
            progress=progress,
        )
        return searched, profiler.times([searched.best.fused])


def _measured(
    arguments: argparse.Namespace,
    fused: FusedKernel,
    usage: Usage | None,
    searched: Search | None,
    times: Times | None,
    progress: Callable[[str], None],
) -> _Report:
    """What nvcc says of the originals, of the fused kernel, and of it with the bound r0."""
    alone: tuple[Resources | None, ...] = (None,) * len(fused.parts)
    plain = bounded = bound = None
    if usage is not None:
        progress(f"nvcc for {arguments.arch}")
        texts = [original(part, wrapped=True) for part in fused.parts]
        alone = tuple(usage(text.text, text.name) for text in texts)
        plain = usage(fused.text, fused.name)
        if fused.bound is None and fused.space == "thread":
            bound = _bound(fused, usage, arguments.arch)
            other = fuse(fused.parts, fused.splits, space=fused.space, bound=Bound(blocks=bound.blocks))
            bounded = usage(other.text, other.name)
    return _Report(fused, plain, bound, bounded, alone, arguments.arch, None, searched, times)


def _print(report: _Report, output: Path | None) -> None:
    fused = report.fused
    if output is None:
        print(fused.text)
    header = ("kernel", "threads", "barriers", "shared B", "registers", "spilled B", "resident")
    rows: list[tuple[Any, ...]] = []
    for part, threads, used in zip(fused.parts, fused.splits, report.alone, strict=True):
        rows.append(_row(part.kernel, threads, part.reach.barriers(), part.shared_bytes, used, report.arch))
    barriers = sum(part.reach.barriers() for part in fused.parts)
    rows.append(_row(fused.name, fused.block, barriers, fused.shared_bytes, report.resources, report.arch))
    if report.bound is not None:
        label = f"... of at most {report.bound.registers} registers"
        rows.append(_row(label, fused.block, barriers, fused.shared_bytes, report.bounded, report.arch))
    lines = "// " if output is None else ""
    table = format_table(header, rows)
    print("\n".join(f"{lines}{line}" for line in table.splitlines()))
    for symbol in fused.symbols:
        print(f"{lines}the host fills {symbol}")
    if report.resources is None:
        print(f"{lines}no nvcc is at hand: registers are not known")
    if report.search is not None and report.times is not None:
        trials = [
            (" + ".join(map(str, t.splits)), _dash(t.registers), f"{1e3 * t.seconds:.4f}") for t in report.search.trials
        ]
        table = format_table(("partition", "registers", "ms"), trials)
        print("\n".join(f"{lines}{line}" for line in table.splitlines()))
        native, serial = 1e3 * report.times.parallel, 1e3 * report.times.serial
        print(f"{lines}alone: {native:.4f} ms side by side, {serial:.4f} ms one after the other; fused: "
              f"{1e3 * report.times.fused[0]:.4f} ms, {100 * report.times.speedup():+.1f} %")  # fmt: skip
    if report.check is not None:
        result = report.check
        verdict = "the same bits as the kernels alone" if result.ok else "MISMATCH"
        print(f"{lines}check: {verdict} in {result.orders} orders, {result.buffers} buffers each")
        for difference in result.differences:
            print(f"{lines}  {difference}")
    if output is not None:
        print(f"{output}: {fused.name}, blocks of {fused.block} threads")


def _row(name: str, threads: int, barriers: int, shared: int, used: Resources | None, arch: str) -> tuple[Any, ...]:
    if used is None:
        return name, threads, barriers, shared, "-", "-", "-"
    total = shared + used.static_shared_bytes
    resident = multiprocessor_of(arch).resident(threads, total, used.registers)
    return name, threads, barriers, total, used.registers, used.spill_store_bytes, resident


def _dash(value: int | None) -> int | str:
    return "-" if value is None else value


def _record(report: _Report, output: Path | None) -> dict[str, Any]:
    fused = report.fused
    parts = [
        {
            "kernel": part.kernel,
            "file": part.reach.source.name,
            "threads": threads,
            "barriers": part.reach.barriers(),
            "shared_bytes": part.shared_bytes,
            "resources": None if used is None else asdict(used),
        }
        for part, threads, used in zip(fused.parts, fused.splits, report.alone, strict=True)
    ]
    record: dict[str, Any] = {
        "name": fused.name,
        "space": fused.space,
        "block": fused.block,
        "shared_bytes": fused.shared_bytes,
        "symbols": fused.symbols,
        "parts": parts,
        "arch": report.arch,
        "resources": None if report.resources is None else asdict(report.resources),
        "bound": None if report.bound is None else asdict(report.bound),
        "bounded": None if report.bounded is None else asdict(report.bounded),
    }
    if all(part.launch is not None for part in fused.parts):
        record["launch"] = fused.launch().to_json()
    if report.check is not None:
        record["check"] = {"ok": report.check.ok} | asdict(report.check)
    if report.search is not None and report.times is not None:
        keys = ("splits", "registers", "blocks", "seconds")
        record["trials"] = [{key: getattr(trial, key) for key in keys} for trial in report.search.trials]
        record["times"] = asdict(report.times)
    return record | ({"text": fused.text} if output is None else {"file": str(output)})
