"""Grid barriers as the compiler places them, beside those of the paper's rule on the same kernels.

``python -m benchmarks.sync_table [--models bert ...] [--level V3 V4] [--partition souffle] [--out FILE.json]``.
Barriers of one run, over all launches; those in a loop as often as they are waited at.

grid, block
    As placed (:mod:`souffle.kernel.waits`): waits of all blocks, and waits of a block's threads between stages.
paper
    By the paper's rule (§6.4), a grid barrier between all stages with a one-relies-on-many dependence: one before each
    stage that relies so on what a stage of its kernel has written since the last barrier. Stages stand in the order of
    the program, with the steps of a loop one after the other. A stage relies on a tensor as one on many if a TE in it
    does, directly or through TEs of the stage.
any
    The same without the classification: one before each stage that reads what a stage of its kernel has written since
    the last barrier.
each
    One before each stage that reads anything that its kernel has written, whatever barriers stand between.
races
    Dependences that the paper's rule leaves without a barrier, and that do not stay on one block: some tile of the
    consumer reads what a tile of another number wrote, or isl cannot say. Those in a loop count once. With the paper's
    barriers alone such a kernel is wrong. What a later step of a loop overwrites is not looked at here.

Kernels are those of the compiler, cut by `--partition`; without ``--cubin`` the ``persistent`` planner knows no
registers and cuts nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.analysis import Analysis, Relies
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.kernel.dependences import TileDependences
from souffle.partition import Subprogram
from souffle.pipeline import LEVELS, compile_cuda
from souffle.program import ExternTE, Tensor
from souffle.schedule.stage import LoopStage, Stage, Unit

__all__ = ["Read", "RuleSyncs", "main", "measure", "relies", "rule_syncs", "runs", "stays_on_block"]


@dataclass(frozen=True)
class Read:
    """A tensor that a stage reads in one of its runs, and which run of another stage of the kernel wrote it.

    Attributes
    ----------
    run : int
        Number of the producer's run, in order from 0.
    producer : Stage
    written, read : Tensor
        What the producer and the reader call it.
    """

    run: int
    producer: Stage
    written: Tensor
    read: Tensor


@dataclass(frozen=True)
class RuleSyncs:
    """Grid barriers by rules that look at TEs alone; see the module.

    Attributes
    ----------
    paper, any, each : int
    races : frozenset of (str, str, str)
        Producer, consumer and tensor of each dependence that the paper's rule leaves open.
    """

    paper: int
    any: int
    each: int
    races: frozenset[tuple[str, str, str]]


def runs(units: Sequence[Unit]) -> Iterator[tuple[Stage, LoopStage | None, tuple[Read, ...]]]:
    """The runs of the stages of a kernel, in order, each with the loop that it is in and what it reads of others.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        In topological order.
    """
    outer: dict[Tensor, tuple[int, Stage, Tensor]] = {}
    number = 0
    for unit in units:
        if isinstance(unit, Stage):
            yield unit, None, tuple(Read(*outer[t], t) for t in unit.inputs if t in outer)
            outer.update({t: (number, unit, t) for t in unit.outputs})
            number += 1
            continue
        loop = unit.loop
        sources = {p.tensor: p.source for p in loop.indexed}
        carried = {c.tensor: c for c in loop.carried}
        history: list[dict[Tensor, tuple[int, Stage, Tensor]]] = []
        for step in range(loop.steps):
            inside: dict[Tensor, tuple[int, Stage, Tensor]] = {}
            history.append(inside)
            for stage in unit.stages:
                reads = []
                for t in stage.inputs:
                    if t in carried:
                        one = carried[t]
                        first = step < one.distance
                        home = outer.get(one.initial[step]) if first else history[step - one.distance].get(one.value)
                    else:
                        home = inside.get(t) or outer.get(sources.get(t, t))
                    if home is not None:
                        reads.append(Read(*home, t))
                yield stage, unit, tuple(reads)
                inside.update({t: (number, stage, t) for t in stage.outputs})
                number += 1
        outer.update({c.tensor: history[-1][c.value] for c in loop.collected})


def relies(stage: Stage, tensor: Tensor, analysis: Analysis) -> Relies:
    """How a stage relies on a tensor that it reads: as one on many if a TE in it does, or one that reads such a TE.

    Parameters
    ----------
    stage : Stage
    tensor : Tensor
        One of its inputs.
    analysis : Analysis
        Of the program, or of the loop, that its TEs are of.
    """
    reached = {tensor}
    for te_ in stage.tes:
        positions = [i for i, t in enumerate(te_.inputs) if t in reached]
        if isinstance(te_, ExternTE) and positions:
            return Relies.MANY
        if any(analysis.relies(te_, i) is Relies.MANY for i in positions):
            return Relies.MANY
        if positions:
            reached.update(te_.outputs)
    return Relies.ONE


Stays = Callable[[Stage, Tensor, Stage, Tensor], bool]


def stays_on_block(dependences: TileDependences) -> Stays:
    """Whether each tile of a consumer reads only what the producer's tile of equal number wrote.

    Not where the consumer reads a part of the tensor, which the step of a loop chooses.
    """

    def stays(producer: Stage, written: Tensor, consumer: Stage, read: Tensor) -> bool:
        return written.shape == read.shape and dependences.between(producer, written, consumer, read).same

    return stays


def rule_syncs(units: Sequence[Unit], analysis: Analysis, stays: Stays) -> RuleSyncs:
    """Place barriers in one kernel by the rules of this module.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        Of the kernel, in the order of the program.
    analysis : Analysis
        Of the whole program.
    stays : callable
        From :func:`stays_on_block`.
    """
    kinds: dict[tuple[Stage, Tensor], Relies] = {}
    paper = any_ = each = 0
    # Runs before this one are behind the last barrier.
    paper_from = any_from = 0
    races: dict[tuple[Stage, Stage, Tensor], bool] = {}
    for number, (stage, loop, reads) in enumerate(runs(units)):
        inside = analysis if loop is None else analysis.inside(loop.loop)
        each += bool(reads)
        if any(read.run >= any_from for read in reads):
            any_, any_from = any_ + 1, number
        still_open = [read for read in reads if read.run >= paper_from]
        for read in still_open:
            if (stage, read.read) not in kinds:
                kinds[stage, read.read] = relies(stage, read.read, inside)
        if any(kinds[stage, read.read] is Relies.MANY for read in still_open):
            paper, paper_from = paper + 1, number
            continue
        for read in still_open:
            key = (read.producer, stage, read.read)
            if key not in races:
                races[key] = not stays(read.producer, read.written, stage, read.read)
    left = frozenset((a.name, b.name, t.name) for (a, b, t), race in races.items() if race)
    return RuleSyncs(paper, any_, each, left)


class _Seen:
    """What the compiler's stages gave, for one compilation."""

    def __init__(self) -> None:
        self.subprograms: tuple[Subprogram, ...] = ()
        self.analysis: Analysis | None = None

    def __call__(self, name: str, result: Any) -> Any:
        if name == "partition":
            self.subprograms = result.subprograms
        elif name == "analysis":
            self.analysis = result
        return result


def _counted(compiled: CompiledKernels, seen: _Seen) -> dict[str, Any]:
    plan = compiled.plan
    launched = [plan.kernels[launch.kernel] for launch in plan.launches]
    shapes = {kernel.name: kernel.shape for kernel in compiled.merged}
    stays = stays_on_block(TileDependences())
    rules = [rule_syncs(sub.stages, seen.analysis, stays) for sub in seen.subprograms]
    runs_in_all = sum(sum(1 for _ in runs(sub.stages)) for sub in seen.subprograms)
    races = [race for rule in rules for race in sorted(rule.races)]
    return {
        "launches": len(launched),
        "stage_runs": runs_in_all,
        "grid": sum(kernel.grid_syncs for kernel in launched),
        "block": sum(shapes[kernel.name].block_syncs for kernel in launched),
        "paper": sum(rule.paper for rule in rules),
        "any": sum(rule.any for rule in rules),
        "each": sum(rule.each for rule in rules),
        "races": len(races),
        "first_races": races[:5],
    }


Case = tuple[str, str, str]
"""Level, precision, partition."""


def measure(name: str, size: str, arch: str, cubin: bool, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Compile one model in this process, for each case, and count."""
    program = souffle.import_onnx(models.build(name, size))
    results = []
    for level, precision, partition in cases:
        start, seen = time.perf_counter(), _Seen()
        how = {"level": level, "precision": precision, "partition": partition, "arch": arch, "cubin": cubin}
        compiled = compile_cuda(program, **how, verify="off", hook=seen)
        figures = _counted(compiled, seen)
        figures["seconds"] = round(time.perf_counter() - start, 1)
        results.append({"model": name, "size": size} | how | figures)
    return results


_COLUMNS = ("model", "level", "precision", "partition", "launches", "stage_runs")
_COLUMNS += ("grid", "block", "paper", "any", "each", "races")


def main(argv: list[str] | None = None) -> int:
    """Count for all models asked for and print a table; the exit status is 1 if one failed or ran out of time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--size", default="paper", choices=models.MODEL_SIZES)
    parser.add_argument("--level", nargs="+", default=["V3", "V4"], choices=list(LEVELS))
    parser.add_argument("--precision", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--partition", nargs="+", default=["souffle", "persistent"])
    parser.add_argument("--arch", default="sm_80", help="the paper's GPU is an A100")
    parser.add_argument("--cubin", action="store_true", help="run nvcc, so that registers are known to the planner")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one model")
    parser.add_argument("--out", "--json", help="where to write the results as JSON")
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    cases = [
        (level, precision, partition)
        for precision in arguments.precision
        for partition in arguments.partition
        for level in arguments.level
    ]
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.size, arguments.arch, arguments.cubin, cases)))
        return 0
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in arguments.models:
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.sync_table", "--one", name, "--size", arguments.size]
        command += ["--level", *arguments.level, "--precision", *arguments.precision, "--arch", arguments.arch]
        command += ["--partition", *arguments.partition, *(["--cubin"] if arguments.cubin else [])]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(f"{name}: {type(error).__name__}")
            continue
        results += json.loads(done.stdout)
        if arguments.out:
            save_results(arguments.out, "benchmarks.sync_table", results, failed=failed)
    print("Barriers of a run. grid, block: as placed; paper: one between all one-relies-on-many dependences; any: one")
    print("between all; each: one before each dependent stage; races: dependences that the paper leaves wrongly.")
    print(format_table(_COLUMNS, [[row[c] for c in _COLUMNS] for row in results]))
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
