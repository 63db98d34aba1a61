"""Stages: the TEs that one schedule computes together, with no tensor between them in global memory (paper §6.3)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tvm import te, tirx

from souffle.errors import ModelError, Refusal
from souffle.program import TE, ExternTE, Loop, Tensor, TEProgram
from souffle.program.printer import format_item, loop_edges
from souffle.program.products import IEEE, sums_products
from souffle.schedule.gpu.rule import MULTIPLIES, NORMALIZES, OWNS_TILES, STARTS_IN_TILES, GpuSchedule
from souffle.schedule.lower import DeviceFunction, KeptLoads
from souffle.schedule.resources import StageResources
from souffle.schedule.text import block_text, labelled, rule_text, tiles_text
from souffle.tvm_compat import primfunc_from_tensors, structural_digest

__all__ = ["LoopStage", "Stage", "StageDraft", "Stages", "Unit", "Window", "draft_stage", "flat_stages", "map_stages"]


@dataclass(frozen=True, eq=False)
class StageDraft:
    """TEs that might become one stage, as one TensorIR function that is not scheduled yet.

    Attributes
    ----------
    tes : tuple of TE or ExternTE
        In topological order; an ExternTE stands alone.
    inputs, outputs : tuple of Tensor
        What the function reads and writes in global memory: its parameters in this order.
    func : tirx.PrimFunc
        Blocks and parameters are named by position, so that equal stages of different layers are structurally equal.
    digest : str
        Equal for structurally equal functions.
    """

    tes: tuple[TE | ExternTE, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    func: tirx.PrimFunc
    digest: str

    @property
    def name(self) -> str:
        """The name of its last TE, which names the stage."""
        return self.tes[-1].name


@dataclass(frozen=True)
class Window:
    """Where the parts that tiles make of a tensor stay, in the shared memory of the block that computes the tiles.

    Of the tiles of a block the first `turns` have a part each, one behind the other; of others it is in the tensor's
    own place in global memory, and so is all of it that the block does not hold.

    Attributes
    ----------
    start : int
        Bytes from the start of the block's pool.
    turns : int
    nbytes : int
        Of a part; tile ``t`` makes bytes ``t * nbytes`` to ``(t + 1) * nbytes`` of the tensor, and no others.
    """

    start: int
    turns: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.start + self.turns * self.nbytes


@dataclass(frozen=True, eq=False)
class Stage:
    """A draft with its schedule, and from step to step what is known of it.

    Attributes
    ----------
    draft : StageDraft
    schedule : object
        What the target's scheduler answered: a ``GpuSchedule`` for CUDA, a scheduled ``PrimFunc`` for the CPU.
    functions : tuple of DeviceFunction
        What `schedule` was lowered to, for CUDA, in the order in which they run; usually one. Equal stages share them.
    resources : StageResources or None
        What a block of it asks of a multiprocessor, once that is known.
    parts : tuple of Stage
        The stages that it was joined of to keep what passes between them on chip; none where TEs became it.
    windows : tuple of (Tensor, Window)
        What it reads or writes in shared memory, of its inputs and outputs.
    kept : KeptLoads or None
        What its function was parted into, where constants stay in registers from one step of a loop to the next; its
        function is the one that finds them there.
    """

    draft: StageDraft
    schedule: object
    functions: tuple[DeviceFunction, ...] = ()
    resources: StageResources | None = None
    parts: tuple[Stage, ...] = ()
    windows: tuple[tuple[Tensor, Window], ...] = ()
    kept: KeptLoads | None = None

    @property
    def label(self) -> str:
        """Its name in the text, which equal stages share: that of the first of its functions."""
        return self.functions[0].name

    @property
    def name(self) -> str:
        """See :attr:`StageDraft.name`."""
        return self.draft.name

    @property
    def pool_bytes(self) -> int:
        """Of shared memory that its functions need; what stays there does not count."""
        return max(function.shared_bytes for function in self.functions)

    @property
    def tes(self) -> tuple[TE | ExternTE, ...]:
        """See :attr:`StageDraft.tes`."""
        return self.draft.tes

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """See :attr:`StageDraft.inputs`."""
        return self.draft.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """See :attr:`StageDraft.outputs`."""
        return self.draft.outputs

    def __str__(self) -> str:
        """Its rule and tiles, what it asks for where that is known, what it reads and writes, and its TEs."""
        rule = [rule_text(self.schedule)] if isinstance(self.schedule, GpuSchedule) else []
        functions = [f"{f.name}: {tiles_text(f)}, {f.shared_bytes} bytes shared" for f in self.functions]
        lines = [f"stage {self.name}", *labelled("rule", rule), *labelled("function", functions)]
        lines += labelled("block", [block_text(self.resources)] if self.resources else [])
        lines += [*labelled("reads", map(repr, self.inputs)), *labelled("writes", map(repr, self.outputs))]
        lines += ["  computes", *(f"    {line}" for te_ in self.tes for line in format_item(te_))]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class LoopStage:
    """A loop whose body is stages.

    Attributes
    ----------
    loop : Loop
    stages : tuple of Stage
        Of one step; in topological order.
    """

    loop: Loop
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """The loop's name."""
        return self.loop.name

    @property
    def tes(self) -> tuple[TE | ExternTE, ...]:
        """The TEs of one step."""
        return tuple(te_ for stage in self.stages for te_ in stage.tes)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What it reads from outside."""
        return self.loop.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What it defines for others."""
        return self.loop.outputs

    def __str__(self) -> str:
        """Its steps, what each is given and what is kept of it, and the stages of one step."""
        given, kept = loop_edges(self.loop)
        lines = [f"loop {self.name}: {self.loop.steps} steps"]
        lines += [*labelled("reads", map(repr, self.inputs)), *labelled("writes", map(repr, self.outputs))]
        lines += [*labelled("given", given), *labelled("kept", kept)]
        for stage in self.stages:
            lines += ["", *textwrap.indent(str(stage), "  ").splitlines()]
        return "\n".join(lines)


Unit = Stage | LoopStage
"""What a kernel is a sequence of."""


class Stages(tuple[Unit, ...]):
    """The stages of a program in topological order, which print as text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))


def flat_stages(units: Iterable[Unit]) -> tuple[Stage, ...]:
    """The stages of some units, those of a loop once."""
    return tuple(stage for unit in units for stage in (unit.stages if isinstance(unit, LoopStage) else (unit,)))


def map_stages(units: Iterable[Unit], change: Callable[[Stage], Stage]) -> tuple[Unit, ...]:
    """Some units with each stage changed, those of a loop in their loop."""
    return tuple(
        replace(unit, stages=tuple(map(change, unit.stages))) if isinstance(unit, LoopStage) else change(unit)
        for unit in units
    )


def draft_stage(tes: Sequence[TE | ExternTE], program: TEProgram, *, owned: bool = False) -> StageDraft:
    """One TensorIR function for some TEs of a program.

    Parameters
    ----------
    tes : sequence of TE or ExternTE
        In topological order.
    program : TEProgram
        Says which of their tensors others need: those become outputs, the rest stays inside.
    owned : bool
        Whether its tiles are to own what they compute, from its first TE to its last (``OWNS_TILES``).

    Raises
    ------
    ModelError
        If TVM's simplifier falls over an index of theirs.
    """
    inside = set(tes)
    defined = {tensor for te_ in tes for tensor in te_.outputs}
    inputs = tuple(dict.fromkeys(t for te_ in tes for t in te_.inputs if t not in defined))
    results = set(program.outputs)
    outputs = tuple(
        tensor
        for te_ in tes
        for tensor in te_.outputs
        if tensor in results or _read_outside(program.consumers[tensor], inside) or not program.consumers[tensor]
    )
    if isinstance(tes[0], ExternTE):
        func = tes[0].func.with_attr("global_symbol", "stage")
        return StageDraft(tuple(tes), tes[0].inputs, tes[0].outputs, func, structural_digest(func))
    values: dict[Tensor, te.Tensor] = {
        tensor: te.placeholder(tensor.shape, tensor.dtype, name=f"in{i}") for i, tensor in enumerate(inputs)
    }
    for index, te_ in enumerate(tes):
        values.update(zip(te_.outputs, te_.on([values[t] for t in te_.inputs], name=f"t{index}"), strict=True))
    try:
        func = primfunc_from_tensors([values[t] for t in (*inputs, *outputs)], "stage")
    except ValueError as error:
        # As where its simplifier joins (x // a) // b to a division by a number that 32 bits do not hold.
        names = ", ".join(te_.name for te_ in tes)
        reason = str(error).strip().splitlines()[-1].rpartition(": ")[2]
        raise ModelError(
            f"TVM makes no TensorIR of {names}: {reason}; smaller constants in its indices would help",
            refusal=Refusal.FORM,
        ) from error
    placements = [te_.placement for te_ in tes if te_.placement is not None and te_.placement.phase != "elements"]
    if placements:
        func = func.with_attr(STARTS_IN_TILES, True)
    if owned:
        func = func.with_attr(OWNS_TILES, True)
    normalizing = {placement.contraction for placement in placements if placement.phase != "results"}
    for index, te_ in enumerate(tes):
        if te_.name in normalizing:
            func = func.with_attr(NORMALIZES, f"t{index}")
    if program.products != IEEE and any(sums_products(te_) for te_ in tes):
        func = func.with_attr(MULTIPLIES, program.products)
    return StageDraft(tuple(tes), inputs, outputs, func, structural_digest(func))


def _read_outside(consumers: Iterable[TE | ExternTE], inside: set[TE | ExternTE]) -> bool:
    return any(consumer not in inside for consumer in consumers)
