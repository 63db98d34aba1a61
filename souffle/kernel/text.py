"""Kernels as text: which stages each runs, where each argument lies, where it waits and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from souffle.decision import Barrier
from souffle.kernel.assignment import Assignment, Digits
from souffle.kernel.kernel_shape import ArgumentPlace, KernelShape, LoopCall, StageCall
from souffle.program import Tensor
from souffle.schedule.lower.shares import ALL_WORKERS
from souffle.wording import counted

__all__ = ["format_calls", "format_parameters"]

_WIDTH = 120


def format_calls(shape: KernelShape, tensors: Sequence[Tensor] = (), reasons: Sequence[Barrier] = ()) -> str:
    """The calls of a kernel.

    Parameters
    ----------
    shape : KernelShape
    tensors : sequence of Tensor, optional
        Those of a launch, one for each parameter.
    reasons : sequence of Barrier, optional
        Why it waits, in the order of its text.
    """
    return _Writer(shape, tuple(tensor.name for tensor in tensors), iter(reasons)).text()


def format_parameters(shape: KernelShape, tensors: Sequence[Tensor]) -> list[str]:
    """The parameters of a kernel, a line each, with the tensors that a launch gives it."""
    return _Writer(shape, tuple(tensor.name for tensor in tensors), iter(())).parameters()


def _summary(shape: KernelShape) -> str:
    """One line of counts."""
    stages = len(tuple(shape.stage_calls))
    flags = f", flags at {counted(shape.ticks, 'place')}" if shape.ticks else ""
    teams = f"{shape.team_count} teams in a block, " if shape.teams else ""
    return (
        f"{counted(stages, 'stage')}, {counted(shape.tiles, 'tile')} of {shape.team_threads} threads, "
        f"{teams}{shape.shared_bytes} bytes of dynamic shared memory, "
        f"{counted(shape.grid_syncs, 'grid barrier')}{flags}"
    )


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes the calls of one kernel; `reasons` has one barrier for each wait, in the order of the text."""

    shape: KernelShape
    names: tuple[str, ...]
    reasons: Iterator[Barrier]

    def text(self) -> str:
        """The kernel as a whole, its parameters, and its calls."""
        shape = self.shape
        lines = [_summary(shape)]
        if shape.blocks_per_sm > 1:
            lines.append(f"  {shape.blocks_per_sm} resident blocks on each multiprocessor bound its registers")
        lines += self.parameters()
        for call in shape.calls:
            lines += self.loop(call) if isinstance(call, LoopCall) else self.stage(call)
        return "\n".join(lines)

    def parameters(self) -> list[str]:
        """A table: each parameter with its type, its bytes, and the tensor that it is at the first launch."""
        parameters = self.shape.parameters
        first = max(len(f"g{len(parameters) - 1}"), 1)
        second = max((len(dtype) for dtype, _ in parameters), default=0)
        third = max((len(str(size)) for _, size in parameters), default=0)
        names = self.names or ("",) * len(parameters)
        return [
            f"  {f'g{number}':{first}}  {dtype:{second}}  {size:{third}} bytes  {name}".rstrip()
            for number, ((dtype, size), name) in enumerate(zip(parameters, names, strict=True))
        ]

    def loop(self, call: LoopCall) -> list[str]:
        """A loop: the wait before its first step, and one step."""
        asked = ", ".join(f"{_place(place)} ({size} bytes)" for place, size in call.prefetch)
        before = _wrapped(f"prefetched before the loop: {asked}", "  ") if asked else []
        before += self.wait("grid", "  ") if call.sync_first else []
        before += self.wait("block", "  ") if call.block_sync_first else []
        body = [f"  {line}" for stage in call.calls for line in self.stage(stage)]
        return [*before, f"  for s in 0 .. {call.steps - 1}:", *body]

    def stage(self, call: StageCall) -> list[str]:
        """A call of a stage, with what stands before it."""
        lines = []
        if call.sync_before or call.block_sync_before or call.arrive_before:
            lines += self.wait("grid" if call.sync_before else "block" if call.block_sync_before else "flags", "  ")
        if call.prefetch:
            asked = ", ".join(f"{_place(place)} ({size} bytes)" for place, size in call.prefetch)
            lines += _wrapped(f"prefetched before it waits: {asked}", "    ")
        for function in call.functions:
            partial = ", its barriers its own" if function.partial else ""
            lines.append(
                f"  {function.name}: {counted(function.tiles, 'tile')} of {function.threads} threads, "
                f"{function.shared_bytes} bytes shared{partial}"
            )
        if call.kept is not None:
            held = ", ".join(_place(call.arguments[number]) for number in call.kept.reads)
            lines += _wrapped(f"finds {held} in {call.kept.where}, read before the loop", "    ")
        if call.prologue is not None:
            copied = ", ".join(_place(call.arguments[number]) for number in call.prologue.reads)
            lines += _wrapped(f"has begun to copy {copied} while it waited", "    ")
        if call.share != ALL_WORKERS:
            lines += _wrapped(f"by {call.share}", "    ")
        for wait in call.waits:
            ago = f", {counted(wait.ago, 'step')} ago" if wait.ago else ""
            lines += _wrapped(f"tile n waits for {wait.band}{ago}", "    ")
        if call.assignment is not None:
            lines += _wrapped(_assigned(call.assignment), "    ")
        return [*lines, *_wrapped(f"given {', '.join(map(_place, call.arguments))}", "    ")]

    def wait(self, scope: str, indent: str) -> list[str]:
        """A barrier, with its reason where that is known."""
        reason = next(self.reasons, None)
        what = scope if scope == "flags" else f"{scope} barrier"
        return _wrapped(f"| {what if reason is None else reason}", indent)


def _place(place: ArgumentPlace) -> str:
    """``g3``, or what part of it a step is given."""
    text = f"g{place.parameter}"
    if place.stride:
        step = f"(s - {len(place.first)})" if place.first else "s"
        step = f"({step} % {place.ring})" if place.ring else step
        text += f"[{step} * {place.stride}]"
    if place.window is not None:
        text += f" in bytes {place.window.start} to {place.window.end} of a block"
    others = [f"g{parameter} at step {step}" for step, parameter in enumerate(place.first)]
    others += [] if place.last is None else [f"g{place.last} at the last step"]
    return f"{text} ({', '.join(others)})" if others else text


def _assigned(assignment: Assignment) -> str:
    """Which tiles a block computes together, as the digits of their numbers."""
    parts = [str(assignment.start)] if assignment.start else []
    parts += [*_digits("slot", assignment.slots), *_digits("place", assignment.group)]
    return (
        f"{counted(assignment.count, 'slot')} of {counted(assignment.per_slot, 'tile')}, each slot on one block: "
        f"tile = {' + '.join(parts) or '0'}"
    )


def _digits(name: str, digits: Digits) -> list[str]:
    """The digits of a number, each ``name[extent] * stride``, the most significant first."""
    return [f"{name}[{extent}]" + (f" * {stride}" if stride > 1 else "") for extent, stride in digits]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)
