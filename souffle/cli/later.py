"""Commands that live in modules of their own, which are imported when they are run, and the arguments of some."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

from souffle.benchmark.registry import PEERS
from souffle.cli.output import Progress
from souffle.options import LEVELS

__all__ = ["Command", "add_bench", "add_debug", "add_log", "command_in"]

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


def add_log(command: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """``souffle log merge|show|prune|verify|export|import``."""
    ways = command.add_subparsers(required=True, metavar="HOW")
    arch = argparse.ArgumentParser(add_help=False, parents=parents)
    arch.add_argument("--arch", help="only the log of this architecture, such as sm_90")
    one = argparse.ArgumentParser(add_help=False, parents=[arch])
    one.add_argument("log", nargs="?", default="tuning_logs", metavar="DIR", help="of the logs (default: tuning_logs)")

    def add(name: str, parent: argparse.ArgumentParser, words: str) -> argparse.ArgumentParser:
        way = ways.add_parser(name, parents=[parent], help=words)
        way.set_defaults(command=command_in("souffle.cli.log", f"{name}_logs"))
        return way

    way = add("merge", arch, "put the records of several logs into one, equal ones once")
    way.add_argument("sources", nargs="+", metavar="FROM", help="folders of logs")
    way.add_argument("-o", "--output", required=True, metavar="TO", help="a log; what it holds already stays")

    way = add("show", one, "list the stages of a log, each with its best schedule")
    way.add_argument("--tasks", default="", metavar="REGEX", help="only stages whose name it is found in")
    way.add_argument("--replay", action="store_true", help="also say what the schedule gives now; this lowers each")

    way = add("prune", one, "keep the best records of each stage")
    way.add_argument("--keep", type=int, required=True, metavar="N", help="how many of each")
    way.add_argument("-o", "--output", metavar="TO", help="write them to another log (default: in place)")

    way = add("verify", one, "follow each record's recipe: to the text of its figure, to another, or to nothing")
    way.add_argument("--all", action="store_true", help="also list those that are as they were")

    way = add("export", one, "write another tuner's database of a log")
    way.add_argument("-o", "--output", required=True, metavar="DIR", help="for a folder of each architecture")
    way.add_argument("--to", choices=("metaschedule",), default="metaschedule", help="whose (default: %(default)s)")

    way = ways.add_parser("import", parents=parents, help="add MetaSchedule's database, or a log of its form, to a log")
    way.add_argument("database", metavar="DIR", help="with the two files, or with folders that have them")
    way.add_argument("-o", "--output", required=True, metavar="LOG", help="a log; what it holds already stays")
    way.add_argument("--device", metavar="GPU", help="on what was measured that does not say it, such as 'NVIDIA H200'")
    way.set_defaults(command=command_in("souffle.cli.log", "import_logs"))
