"""The certificate of a compiled network: everything re-derived from the TensorIR that the text was made from.

What makes it a proof. Every stage is static, so its accesses are functions on a finite box of (tile, thread, turns of
loops), and sets of them are ranged or enumerated exactly; what depends on data is taken to be anything its type allows.
Tiles are given to blocks as ``tile = it * num_blocks + blockIdx``, so two different tiles are on different blocks of
some grid and equal ones on one block of every grid; where a kernel takes tiles together, so it is with its slots, and
"tile" stands for the tiles of a slot below. Hence, for every grid:

- between grid barriers, no tile writes what another tile of any stage touches, unless the later one waits for the
  earlier one's block to have come past it, and no wait is for an arrival that does not stand before it in the text;
- what threads of one tile touch, in one stage or in several, has a block barrier between, or one thread touches it,
  and so has shared memory of any tiles that some block computes in a row (:mod:`souffle.verify.tiles_in_a_row`);
- lanes of a warp come to what they do together, all that are named;
- barriers stand under conditions that are the same for all who wait;
- what is read through pointers that are never written, and may be cached past barriers, is written through no other;
- what stays in shared memory from one stage to a later one does as it would in global memory
  (:mod:`souffle.verify.shared_parts`), and what stays in registers is what each call would fill them with
  (:mod:`souffle.verify.kept_memory`), also where they are slices of shared memory (:mod:`souffle.verify.kept_slices`);
- accesses stay in their buffers, and each read finds the definition, and the step's, that the program says
  (:mod:`souffle.verify.definitions_found`);
- what blocks copy while they wait for each other is what the stages behind would copy themselves
  (:mod:`souffle.verify.prologues`);
- a block of several teams is as many blocks of one (:mod:`souffle.verify.teams`), and a part of one a block of its
  stage (:mod:`souffle.verify.parts`);
- a block has room on a multiprocessor, and a kernel with grid barriers is launched cooperatively;
- grid barriers and flags are known ones, and those that count in memory have it for themselves.

Nothing here looks at how stages were merged, where they were meant to wait, or how memory was planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from souffle.certificate import ACTIVE_LANES, ARRIVALS, GRID_BARRIERS, PAIRS, Certificate, Counterexample, Section
from souffle.codegen.plan import Buffer, Kernel, Plan
from souffle.schedule.gpu.device import device_for
from souffle.verify.accesses import BarrierWait, WarpMeeting, all_of, waits_of
from souffle.verify.bounds import calculated, fit, inside, outside_pointer
from souffle.verify.definitions_found import Contents
from souffle.verify.expressions import Undecided
from souffle.verify.footprint import Footprint
from souffle.verify.grid_barriers import counter_text, memory_of_its_own, not_renamed
from souffle.verify.kept_memory import without_kept_memory
from souffle.verify.kept_slices import without_slices
from souffle.verify.kernel_reader import KernelText, read_kernel
from souffle.verify.named_barriers import mixed_numbers
from souffle.verify.parts import beyond_parts, without_parts
from souffle.verify.prologues import without_prologues
from souffle.verify.races_between_stages import Located, StagePairs
from souffle.verify.races_in_a_span import WARP
from souffle.verify.registers import unwritten
from souffle.verify.shared_parts import outside_part, unordered
from souffle.verify.shares import without_shares
from souffle.verify.stage_functions import Library, shown, text_of
from souffle.verify.teams import without_teams
from souffle.verify.tiles_in_a_row import Arrive, Prefetch, StageRun, Sync

if TYPE_CHECKING:
    from tvm import tirx

    from souffle.codegen.assemble import CompiledKernels

__all__ = ["certify", "certify_plan", "functions_of"]


def certify(compiled: CompiledKernels) -> Certificate:
    """Prove a compiled network free of races and stray accesses, or say what is wrong, or why neither can be said.

    Parameters
    ----------
    compiled : CompiledKernels
        From :func:`souffle.pipeline.compile_cuda`.
    """
    kernels = {merged.name: merged.func for merged in compiled.merged}
    return certify_plan(compiled.plan, kernels, functions_of(compiled))


def functions_of(compiled: CompiledKernels) -> dict[str, tirx.PrimFunc]:
    """What the kernels of a compiled network call, by the names in the text."""
    return {function.name: function.func for merged in compiled.merged for function in merged.shape.called}


def certify_plan(plan: Plan, kernels: dict[str, tirx.PrimFunc], functions: dict[str, tirx.PrimFunc]) -> Certificate:
    """As :func:`certify`, of a plan with its kernels and the stage functions that they call, by name."""
    alone = without_prologues(kernels, functions)
    parts = without_parts(alone.kernels, alone.functions)
    shares = without_shares(parts.kernels, parts.functions)
    teams = without_teams(shares.kernels, shares.functions)
    slices = without_slices(teams.kernels, teams.functions)
    kept = without_kept_memory(slices.kernels, slices.functions)
    launched, plan, kernels, library = plan, teams.of(plan), kept.kernels, Library(kept.functions)
    texts = {kernel.name: read_kernel(kernels[kernel.name]) for kernel in plan.kernels}
    known = {
        kernel.name: [
            *beyond_parts(parts, kernel),
            *teams.beyond(launched, kernel, texts[kernel.name]),
            *kept.findings.get(kernel.name, ()),
            *alone.findings.get(kernel.name, ()),
        ]
        for kernel in launched.kernels
    }
    for kernel in plan.kernels:
        known[kernel.name] += [*shares.findings.get(kernel.name, ()), *slices.beyond(kernel)]
    checks = {
        kernel.name: _KernelCheck(plan, kernel, texts[kernel.name], library, known[kernel.name])
        for kernel in plan.kernels
    }
    contents = Contents(plan)
    findings: list[Counterexample | Undecided] = []
    for launch in plan.launches:
        check = checks[plan.kernels[launch.kernel].name]
        check.launch(launch.buffers)
        name = check.kernel.name
        check.unchanging(launch.buffers, kept.constants.get(name, frozenset()), "registers keep")
        check.unchanging(launch.buffers, alone.constants.get(name, frozenset()), "blocks copy before a wait")
        contents.launch()
        findings += _contents(contents, check.kernel.name, check.text, library, launch.buffers)
    findings += contents.outputs()
    if not library.understood or any(text.problems for text in texts.values()):
        # What could not be read may well write what seems to be missing.
        findings = [_doubted(finding) for finding in findings]
    facts = (
        ("launches", len(plan.launches)),
        ("reads of tensors", contents.reads),
        ("writes of tensors", contents.writes),
        ("tensors overwritten by others", contents.overwrites),
    )
    return Certificate(
        tuple(check.section() for check in checks.values()), _section("memory over all launches", findings, facts)
    )


def _doubted(finding: Counterexample | Undecided) -> Undecided:
    if isinstance(finding, Undecided):
        return finding
    return Undecided(f"{finding.element}: as far as could be read, {finding.reason}")


def _contents(
    contents: Contents, kernel: str, text: KernelText, library: Library, buffers: Sequence[int]
) -> Iterator[Counterexample | Undecided]:
    for event in text.events:
        if isinstance(event, StageRun):
            try:
                footprint = library.taken(event)
            except Undecided as reason:
                yield reason
                continue
            yield from contents.run(kernel, event, footprint, [(buffers[p], start) for p, start in event.pointers])


class _KernelCheck:
    """One kernel over all its launches."""

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel,
        text: KernelText,
        library: Library,
        known: Sequence[Counterexample | Undecided] = (),
    ) -> None:
        self.plan = plan
        self.kernel = kernel
        self.text = text
        self.library = library
        self.pairs = StagePairs(library)
        self.findings: list[Counterexample | Undecided] = [*known, *(Undecided(p) for p in text.problems)]
        self.bounded: set[tuple] = set()
        self.epochs = 0
        self.bounds = 0
        self.launches = 0
        for why in text.refuted:
            self.wrong("divergent barrier" if "barrier" in why else "launch", kernel.name, why)
        self.findings += counter_text(plan, kernel, text)
        self.runs = {(e.name, e.tiles, e.threads, e.part): e for e in text.events if isinstance(e, StageRun)}
        for run in self.runs.values():
            self.stage(run)
        self.findings += fit(kernel, text, device_for(plan.options.arch), self.static_bytes())
        self.findings += mixed_numbers(kernel.name, text, library)

    def wrong(
        self, rule: str, element: str, why: str, stages: tuple[str, ...] = (), statements: tuple[str, ...] = ()
    ) -> None:
        self.findings.append(Counterexample(rule, self.kernel.name, stages, statements, (), element, why))

    def static_bytes(self) -> int:
        """Of shared memory that the stage functions declare beside the launch's, each for itself."""
        found = 0
        for run in {run.name: run for run in self.runs.values()}.values():
            with suppress(Undecided):
                memories = self.library.footprint(run).function.memories
                found += sum(memory.nbytes for memory in memories if memory.kind == "shared" and not memory.pool)
        return found

    def stage(self, run: StageRun) -> None:
        """What does not depend on the launch."""
        try:
            footprint = self.library.footprint(run)
            self.findings += [Undecided(f"{run.name}: {p}") for p in footprint.function.problems]
            # A part's memory is of the block that it is a part of.
            room = _ANY_BYTES if run.part else self.kernel.dynamic_shared_bytes
            self.findings += inside(self.kernel.name, footprint, room)
            self.findings += calculated(self.kernel.name, footprint.function)
            self.findings += unwritten(self.kernel.name, footprint)
            # Lanes beside the stage's own are none of those that come to its barriers of warps.
            scopes = ("block", "grid", "warp") if run.threads % WARP else ("block", "grid")
            if run.threads < (run.part or self.text.threads) and waits_of(footprint.function.body, scopes):
                why = f"it holds barriers, and {run.threads} of {self.text.threads} threads call it"
                self.wrong("divergent barrier", run.name, why, (run.name,))
            self.grid_inside(run, footprint)
            report = self.library.block((run,))
            self.epochs += report.epochs
        except Undecided as reason:
            self.findings.append(Undecided(f"{run.name}: {reason}"))
            return
        if report.found is not None:
            self.findings.append(shown(self.kernel.name, (run.name,), report.found))

    def grid_inside(self, run: StageRun, footprint: Footprint) -> None:
        """A grid barrier inside of a stage: each block comes to it once for each of its tiles."""
        waits = [wait for wait in all_of(footprint.function.body, BarrierWait) if wait.scope == "grid"]
        uneven = next((grid for grid in range(2, self.kernel.tiles + 1) if run.turns % grid), None)
        if waits and not self.kernel.cooperative:
            why = "a stage waits for the whole grid, and the kernel is not launched cooperatively"
            self.wrong("launch", run.name, why, (run.name,), (text_of(waits[0].statement),))
        elif waits and uneven is not None:
            what = "tiles" if run.slots is None else "slots of tiles"
            why = f"a grid of {uneven} blocks shares {run.turns} {what} unevenly, and blocks without one do not come"
            self.wrong("divergent barrier", run.name, why, (run.name,), (text_of(waits[0].statement),))

    def launch(self, buffers: Sequence[int]) -> None:
        """One launch with these buffers."""
        self.launches += 1
        self.findings += memory_of_its_own(self.plan, self.kernel, self.text, buffers)
        self.findings += not_renamed(self.plan, self.kernel, self.text, self.library, buffers)
        span: list[tuple[StageRun, tuple[Located, ...]] | Sync | Arrive] = []
        self.in_shared_memory(buffers)
        for event in self.text.events:
            if isinstance(event, Prefetch):
                buffer = self.plan.buffers[buffers[event.pointer[0]]]
                if event.pointer[1] < 0 or event.pointer[1] + event.nbytes > buffer.nbytes:
                    why = f"{event.nbytes} bytes from byte {event.pointer[1]} are prefetched"
                    self.wrong("out of bounds", buffer.name, why)
            elif isinstance(event, Sync) and event.scope == "grid":
                self.span(span)
                span = []
            elif isinstance(event, Sync | Arrive):
                span.append(event)
            else:
                self.bound(event, buffers)
                span.append((event, tuple(self.place(buffers[p], start) for p, start in event.pointers)))
        self.span(span)

    def unchanging(self, buffers: Sequence[int], parameters: Collection[int], who: str) -> None:
        """What is read once for all steps, or before a wait, is the same whenever it is read."""
        for number in parameters:
            buffer = self.plan.buffers[buffers[number]]
            if buffer.kind != "constant":
                why = f"{who} what a launch reads of it, and it is no constant but {buffer.kind}"
                self.wrong("stale or undefined read", buffer.name, why)

    def in_shared_memory(self, buffers: Sequence[int]) -> None:
        """What stays there from one stage to a later one."""
        if not any(event.shared for event in self.text.events if isinstance(event, StageRun)):
            return
        span: list[tuple[StageRun, tuple[int, ...]] | Sync] = []
        for event in (*self.text.events, Sync("grid")):
            if isinstance(event, StageRun):
                span.append((event, tuple(buffers[p] for p, _ in event.pointers)))
            elif isinstance(event, Sync) and event.scope == "grid":
                with suppress(Undecided):
                    self.findings += unordered(self.kernel.name, span, self.library)
                span = []
            elif isinstance(event, Sync):
                span.append(event)

    def span(self, events: list[tuple[StageRun, tuple[Located, ...]] | Sync | Arrive]) -> None:
        try:
            self.findings += self.pairs.span(self.kernel.name, events)
        except Undecided as reason:
            self.findings.append(reason)

    def place(self, index: int, start: int) -> Located:
        buffer: Buffer = self.plan.buffers[index]
        if buffer.kind == "workspace":
            first = buffer.offset
            return Located("workspace", first + start, buffer.name, (first, first + buffer.nbytes - 1))
        return Located(f"buffer {index}", start, buffer.name, (0, buffer.nbytes - 1))

    def bound(self, run: StageRun, buffers: Sequence[int]) -> None:
        try:
            footprint = self.library.footprint(run)
        except Undecided:
            return
        for parameter, (index, start) in enumerate(run.pointers):
            buffer = self.plan.buffers[buffers[index]]
            key = (id(footprint), parameter, start, buffer.nbytes, buffer.offset, buffer.kind, run.shared)
            if key in self.bounded:
                continue
            self.bounded.add(key)
            self.bounds += 1
            self.findings += outside_part(self.kernel.name, run, footprint, parameter, self.kernel.dynamic_shared_bytes)
            if buffer.kind == "workspace" and not 0 <= buffer.offset <= self.plan.workspace_bytes - buffer.nbytes:
                end = buffer.offset + buffer.nbytes
                why = f"it takes bytes {buffer.offset} to {end} of {self.plan.workspace_bytes}"
                self.wrong("out of bounds", f"{buffer.name} in the workspace", why)
            self.findings += outside_pointer(self.kernel.name, run, footprint, parameter, start, buffer)

    def section(self) -> Section:
        events = self.text.events
        grid = sum(isinstance(e, Sync) and e.scope == "grid" for e in events)
        arrivals = sum(isinstance(e, Arrive) for e in events)
        accesses = active = 0
        for run in self.runs.values():
            with suppress(Undecided):
                footprint = self.library.footprint(run)
                accesses += footprint.count
                active += sum(shuffle.mask is None for shuffle in all_of(footprint.function.body, WarpMeeting))
        facts = (
            ("stages in a launch", sum(isinstance(e, StageRun) for e in events)),
            ("stage functions", len(self.runs)),
            ("accesses in their text", accesses),
            (GRID_BARRIERS, grid),
            *([(ARRIVALS, arrivals)] if arrivals else []),
            ("spans between block barriers", self.epochs),
            (PAIRS, self.pairs.pairs),
            ("pointers bounded", self.bounds),
            ("launches", self.launches),
            *([(ACTIVE_LANES, active)] if active else []),
        )
        return _section(self.kernel.name, self.findings, facts)


_ANY_BYTES = 1 << 62

_MOST_OF_A_RULE = 3
"""Counterexamples of one rule that are kept of a section; the first is what helps."""


def _section(name: str, findings: Sequence[Counterexample | Undecided], facts: tuple[tuple[str, int], ...]) -> Section:
    kept: list[Counterexample] = []
    for finding in findings:
        if not isinstance(finding, Counterexample) or finding in kept:
            continue
        if sum(k.rule == finding.rule for k in kept) < _MOST_OF_A_RULE:
            kept.append(finding)
    unknown = tuple(dict.fromkeys(str(f) for f in findings if isinstance(f, Undecided)))
    return Section(name, tuple(kept), unknown, facts)
