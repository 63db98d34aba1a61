"""Commands that live in modules of their own, which are imported when they are run, and the arguments of some."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

from souffle.benchmark.registry import PEERS
from souffle.cli.output import Progress
from souffle.options import LEVELS

__all__ = ["Command", "add_bench", "add_debug", "command_in"]

Command = Callable[[argparse.Namespace, Progress], int]


def command_in(module: str, name: str) -> Command:
    """A command of a module."""

    def run(arguments: argparse.Namespace, progress: Progress) -> int:
        return getattr(importlib.import_module(module), name)(arguments, progress)

    return run


def add_bench(command: argparse.ArgumentParser) -> None:
    """The arguments of ``souffle bench``, beside the compiler's."""
    command.add_argument("model", metavar="MODEL", help="an ONNX file")
    command.add_argument("--against", default="ort", metavar="PEER,...", help=f"of {', '.join(PEERS)} (default: ort)")
    command.add_argument("--threads", type=int, metavar="N", help="cores that each may use (default: all)")
    command.add_argument("--runs", type=int, default=100, metavar="N", help="rounds that count (default: %(default)s)")
    command.add_argument("--warmup", type=int, default=10, metavar="N", help="rounds before (default: %(default)s)")
    command.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="no peer is timed that would take longer in all"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random inputs")
    command.add_argument("--level", choices=tuple(LEVELS), default="V4")
    command.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto")
    command.add_argument("--tuning-log", metavar="DIR", default="auto", help='folder of tuning logs, or "none"')
    command.add_argument("--out", metavar="FILE", help="for the figures, as JSON")
    command.add_argument(
        "--profile", metavar="FILE", help="for a trace of our kernels and stages, which ui.perfetto.dev opens"
    )
    command.set_defaults(command=command_in("souffle.cli.bench", "bench"))


def add_debug(command: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """``souffle debug bisect``, with the compiler's arguments."""
    ways = command.add_subparsers(required=True, metavar="HOW")
    one = ways.add_parser("bisect", parents=parents, help="find the step of the compiler that makes a network wrong")
    one.add_argument("model", metavar="MODEL", help="an ONNX file")
    one.add_argument("--level", choices=tuple(LEVELS), default="V4")
    one.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    one.add_argument("--seed", type=int, default=0, help="of the random inputs")
    one.set_defaults(command=command_in("souffle.cli.debug", "debug_bisect"))
