"""Kernels of random stages, with the barriers that they need, and sometimes more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import tirx

from benchmarks.siege.case import Case, plan_of
from benchmarks.siege.forms import stage_of
from benchmarks.siege.setting import Setting, Stage
from benchmarks.siege.writer import Assignment, Call, Step, Tensor, Writer
from souffle.codegen.dataflow import Dataflow, StageUse
from souffle.codegen.plan import Buffer, Kernel, Launch
from souffle.kernel.grid_barrier import STATE_DTYPE

__all__ = ["random_case"]

_ALIGNMENT = 256
_STRENGTH = {"none": 0, "block": 1, "grid": 2}
_STATE_WORDS = 32


class _Planner:
    def __init__(self, seed: int, forms: tuple[str, ...] = ()) -> None:
        self.draw = random.Random(seed)
        self.forms, self.prefix = forms, f"c{seed}_"
        draw = self.draw
        self.block = draw.choice([32, 64, 64, 96, 128, 128, 40])
        per = draw.choice([self.block] * 5 + [2 * self.block, 3 * self.block, self.block + 8, 24, 7])
        tiles = draw.choice([1, 2, 3, 4, 5, 7, 8, 13])
        self.count = per * tiles - (draw.randrange(1, per) if draw.random() < 0.2 else 0)
        self.partition = (tiles, draw.choice([self.block] * 4 + [32]))
        if self.partition[1] > self.block:
            self.partition = (tiles, self.block)
        self.tensors: list[Tensor] = []
        self.calls: list[Call] = []
        self.stages: list[Stage] = []
        self.results: list[tuple[Tensor, Stage, Assignment]] = []
        self.launches = draw.random() < 0.12

    # Stages

    def setting(self) -> Setting:
        draw = self.draw
        tiles, threads = self.partition
        if self.results and draw.random() < 0.35:
            tiles = max(1, min(self.count, draw.choice([1, 2, 3, 4, 5, 6, 8, 16])))
            threads = draw.choice([self.block, self.block, 32]) if self.block >= 32 else self.block
        if self.block % 32:
            threads = self.block
        return Setting(draw, f"{self.prefix}stage{len(self.stages)}", self.count, tiles, threads, self.block)

    def tensor(self, name: str, dtype: str, kind: str, count: int = 0) -> Tensor:
        found = Tensor(f"{name}{len(self.tensors)}", count or self.count, dtype, kind)
        self.tensors.append(found)
        return found

    def new_stage(self, reads: int = 0) -> Stage:
        """A new function, or one that was there already."""
        if self.stages and self.draw.random() < 0.15:
            again = self.draw.choice(self.stages)
            if not reads or (len(again.reads) == reads and not again.scratch):
                return again
        forms = self.forms
        while True:
            found = stage_of(self.setting(), forms)
            # Those that were asked for may all be such that they do not fit here.
            forms = ()
            if not reads or (len(found.reads) == reads and not found.scratch and found.reads[0].dtype == "float32"):
                self.stages.append(found)
                return found

    def assignment(self, stage: Stage) -> Assignment:
        """As the call before has it, another one, or a tile for each block."""
        tiles, draw = stage.setting.tiles, self.draw
        before = self.calls[-1] if self.calls else None
        if before is not None and before.stage.setting.tiles == tiles and draw.random() < 0.8:
            return before.assignment
        factors = [n for n in range(2, tiles + 1) if tiles % n == 0]
        if not factors or draw.random() < 0.8:
            return Assignment()
        together = draw.choice([1, *factors])
        rows = [n for n in range(2, tiles // together) if tiles // together % n == 0]
        return Assignment(together, draw.random() < 0.5, draw.choice(rows) if rows and draw.random() < 0.5 else 1)

    def need(self, stage: Stage, assignment: Assignment, reads: Sequence[tuple[str, Tensor]]) -> str:
        """What must stand between what made these tensors and this stage."""
        worst = "none"
        for reach, tensor in reads:
            for made, maker, own in self.results:
                if made is tensor:
                    between = _between(maker, stage, reach) if own == assignment else "grid"
                    worst = max(worst, between, key=_STRENGTH.get)
        return worst

    def append(self, stage: Stage, output: Tensor) -> None:
        """A call that reads earlier tensors, with what it needs before it or more."""
        arguments: list[Tensor] = []
        reads: list[tuple[str, Tensor]] = []
        floats = [t for t in self.tensors if t.dtype == "float32" and t.count == self.count and t is not output]
        floats = [t for t in floats if t.kind == "input" or any(t is made for made, *_ in self.results)]
        for place, read in enumerate(stage.reads):
            if read.dtype != "float32":
                chosen = self.tensor("i", "int32", "input")
            elif self.results and not any(t.dtype == "float32" for t in arguments):
                chosen = self.results[-1][0]
            elif floats and self.draw.random() < 0.8:
                chosen = self.draw.choice(floats)
            else:
                chosen = self.tensor("x", "float32", "input")
            arguments.append(chosen)
            reads.append((stage.reads[place].reach, chosen))
        arguments += [self.tensor("w", "float32", "workspace") for _ in range(stage.scratch)]
        number = len(self.calls)
        launch = number if self.launches else 0
        # What this stage needs, of calls since the last barrier that is strong enough.
        before = "none"
        assignment = self.assignment(stage)
        wanted = self.need(stage, assignment, reads) if not self.launches else "none"
        if _STRENGTH[wanted] and not self.met(wanted, reads):
            before = wanted
        shared = self.calls and self.calls[-1].stage.shares and not self.calls[-1].after and not self.launches
        if shared and before == "none":
            before = "block"
        if before != "grid" and self.calls and not self.launches and self.draw.random() < 0.2:
            before = "grid" if self.draw.random() < 0.5 else max(before, "block", key=_STRENGTH.get)
        after = stage.shares or self.draw.random() < 0.25
        if stage.shares and stage.setting.tiles == 1 and self.draw.random() < 0.1:
            after = False
        for t in (*arguments, output):
            t.touch(number)
        self.calls.append(Call(stage, (*arguments, output), before, after, launch, assignment=assignment))
        self.results.append((output, stage, assignment))

    def met(self, wanted: str, reads: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether barriers since the last of these tensors was made are strong enough."""
        makers = [i for i, c in enumerate(self.calls) for _, t in reads if any(a is t for a in c.arguments[-1:])]
        last = max(makers, default=-1)
        found = 0
        for call in self.calls[last + 1 :]:
            found = max(found, _STRENGTH[call.before])
        if last >= 0 and self.calls[last].after:
            found = max(found, 1)
        return found >= _STRENGTH[wanted]

    # Kinds of cases

    def chain(self) -> None:
        """Stages, one after the other."""
        for left in reversed(range(self.draw.choice([1, 1, 2, 2, 3, 4]))):
            stage = self.new_stage()
            self.append(stage, self.tensor("y" if not left else "h", "float32", "output" if not left else "workspace"))

    def steps(self) -> None:
        """A loop over steps that goes through a ring of slots in the workspace."""
        self.launches = False
        draw = self.draw
        slots, steps = draw.choice([2, 2, 3, 4]), draw.choice([2, 3, 5, 6])
        stride = -(-self.count // 64) * 64
        first = self.new_stage(1)
        ring = Tensor("ring", slots * stride, "float32", "workspace")
        x = self.tensor("x", "float32", "input")
        self.tensors.append(ring)
        ring.touch(0)
        inner, last = self.new_stage(1), self.new_stage(1)
        y = self.tensor("y", "float32", "output")
        makers = (first, inner)
        waits = max((_between(m, inner, inner.reads[0].reach) for m in makers), key=_STRENGTH.get)
        waits = max(waits, _between(inner, first, "thread") if slots < 1 else "none", key=_STRENGTH.get)
        end = _between(inner, last, last.reads[0].reach)
        if any(s.shares for s in (first, inner, last)):
            waits, end = (max(w, "block", key=_STRENGTH.get) for w in (waits, end))
        # The slot that a step writes was read some steps ago, by tiles of other blocks perhaps.
        waits = waits if waits != "none" or draw.random() < 0.5 else draw.choice(["block", "grid"])
        self.calls = [
            Call(first, (x, Step(ring, 0, stride, 0)), "none", True),
            Call(inner, (Step(ring, slots, stride, 0), Step(ring, slots, stride, 1)), waits, True, 0, steps),
            Call(last, (Step(ring, 0, stride, steps % slots, True), y), end, True),
        ]

    def fuse(self) -> None:
        """Some calls that need no more than a block barrier stand in the turn of the call before."""
        for place in range(1, len(self.calls)):
            one, two = self.calls[place - 1], self.calls[place]
            a, b = one.stage.setting, two.stage.setting
            fits = (
                one.assignment == two.assignment
                and a.tiles == b.tiles
                and a.threads == b.threads == self.block
                and two.before != "grid"
            )
            # Few have blocks that take tiles together: all of those.
            share = 0.3 if one.assignment.together == 1 else 1.0
            if fits and not one.steps and not two.steps and not self.launches and self.draw.random() < share:
                strong = two.before == "block" or one.after
                self.calls[place - 1] = replace(one, after=strong)
                self.calls[place] = replace(two, before="none", joined=True)
                if two.after is False and one.after:
                    self.calls[place] = replace(self.calls[place], after=True)

    def place_workspace(self) -> int:
        """Offsets; tensors whose lives a grid barrier parts may share memory."""
        work = [t for t in self.tensors if t.kind == "workspace"]
        share = self.draw.random() < 0.4
        end, placed = 0, []
        for tensor in work:
            tensor.offset = end
            if share:
                tries = [t.offset + self.draw.choice([0, 0, 0, _ALIGNMENT]) for t in placed]
                self.draw.shuffle(tries)
                for offset in tries:
                    below = offset + tensor.nbytes
                    meets = [t for t in placed if t.offset < below and offset < t.offset + t.nbytes]
                    if all(self.parted(t, tensor) for t in meets):
                        tensor.offset = offset
                        break
            placed.append(tensor)
            end = max(end, -(-(tensor.offset + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return end

    def parted(self, one: Tensor, other: Tensor) -> bool:
        """Whether a grid barrier, or a launch, stands between the lives of two tensors."""
        early, late = (one, other) if one.last < other.first else (other, one)
        if early.last >= late.first or early.first < 0 or late.first < 0:
            return False
        return self.launches or any(c.before == "grid" for c in self.calls[early.last + 1 : late.first + 1])

    def case(self, seed: int) -> Case:
        if self.draw.random() < 0.15:
            self.steps()
        else:
            self.chain()
            self.fuse()
        size = self.place_workspace()
        counter = self.draw.random() < 0.15
        return _assembled(self, size, "counter" if counter else "cooperative", f"seed {seed}")


def _between(maker: Stage, reader: Stage, reach: str) -> str:
    a, b = maker.setting, reader.setting
    if a.tiles != b.tiles or a.per_tile != b.per_tile or reach == "all":
        return "grid"
    if reach == "thread" and maker.own and reader.own and a.threads == b.threads:
        return "none"
    return "block"


def random_case(seed: int, forms: tuple[str, ...] = ()) -> Case:
    """A case that is right; the same for the same seed.

    Parameters
    ----------
    seed : int
    forms : tuple of str
        Of stages; all if none are named.
    """
    return _Planner(seed, forms).case(seed)


def _assembled(planner: _Planner, workspace: int, barrier: str, note: str) -> Case:
    order = {"input": 0, "output": 1, "workspace": 2}
    tensors = sorted(planner.tensors, key=lambda t: order[t.kind])
    buffers = tuple(Buffer(t.name, (t.count,), t.dtype, t.kind, t.name, t.offset) for t in tensors)
    index = {t: i for i, t in enumerate(tensors)}
    kernels: dict[str, tirx.PrimFunc] = {}
    variables = {c.stage.name: tvm.ir.GlobalVar(c.stage.name) for c in planner.calls}
    records, launches = [], []
    state = False
    for launch in sorted({c.launch for c in planner.calls}):
        calls = [c for c in planner.calls if c.launch == launch]
        used: list[Tensor] = []
        for c in calls:
            used += [a.tensor if isinstance(a, Step) else a for a in c.arguments]
        used = list(dict.fromkeys(used))
        name = f"{planner.prefix}kernel{launch}"
        writer = Writer(used, planner.block, barrier, variables)
        kernels[name] = writer.kernel(name, calls)
        state = state or writer.counts
        stages = tuple(dict.fromkeys(c.stage.name for c in calls))
        tiles = max(c.slots for c in calls)
        shared = max(c.stage.shared_bytes + c.stage.static_bytes for c in calls)
        records.append(Kernel(name, 0, tiles, planner.block, shared, writer.syncs, None, stages, ()))
        bound = tuple(index[t] for t in used) + ((len(buffers),) if writer.counts else ())
        launches.append(Launch(len(records) - 1, bound, ()))
    if state:
        buffers = (*buffers, Buffer("grid_state", (_STATE_WORDS,), STATE_DTYPE, "state", "grid_state"))
    plan = plan_of(buffers, tuple(records), tuple(launches), workspace, barrier if state else "cooperative")
    plan = replace(plan, dataflow=_dataflow(planner))
    stages = {c.stage.name: c.stage for c in planner.calls}
    definitions = {
        n: (s.definition, s.setting.tiles, s.setting.threads) for n, s in stages.items() if s.definition is not None
    }
    what = " ".join(f"{c.stage.name.removeprefix(planner.prefix)}={c.stage.form}" for c in planner.calls)
    return Case(kernels, {n: s.func for n, s in stages.items()}, plan, definitions, f"{note}: {what}")


def _dataflow(planner: _Planner) -> Dataflow:
    """What each call reads and makes; what a step of a loop makes is a tensor of its own."""
    numbers: dict[tuple[Tensor, int], int] = {}
    sizes: list[tuple[str, int, int]] = []

    def tensor(argument: Tensor | Step, step: int, steps: int) -> int:
        one = argument.tensor if isinstance(argument, Step) else argument
        # Where in the ring a step's value lies is the text's business; what is read after the loop is the last.
        made = step + argument.ahead if isinstance(argument, Step) and argument.slots else 0
        if isinstance(argument, Step) and not argument.slots:
            made = steps if argument.last else 0
        key = (one, made)
        if key not in numbers:
            numbers[key] = len(sizes)
            sizes.append((one.name, planner.count if isinstance(argument, Step) else one.count, 4))
        return numbers[key]

    uses: list[StageUse] = []
    turns = max((c.steps for c in planner.calls), default=0)
    for one in planner.calls:
        for step in range(max(1, one.steps)):
            given = [tensor(a, step, turns) for a in one.arguments]
            reads, setting = len(one.stage.reads), one.stage.setting
            functions = (((one.stage.name, setting.tiles, setting.threads),),)
            uses.append(StageUse(functions, tuple(given[:reads]), tuple(given[reads:])))
    edges = {
        kind: tuple((t.name, n) for (t, _), n in numbers.items() if t.kind == kind) for kind in ("input", "output")
    }
    return Dataflow(tuple(sizes), edges["input"], (), edges["output"], tuple(uses))
