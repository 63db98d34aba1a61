"""What a search may choose from for one stage: our rules' sketches and MetaSchedule's, all as traces of MetaSchedule.

A rule of ours answers with a sketch whose knobs are open. Each knob becomes a sampling step of a trace, and annotations
of the root block say which rule it is and what was sampled; the rule itself makes the schedule of it. MetaSchedule's
own sketches (tiling on several levels on CUDA cores, reductions across threads) are traces already. Its sketches for
tensor cores are left out: they need TVM's table of intrinsics, which takes a minute of processor time to import, also
in each compilation that replays such a record. Our own rules have tensor cores, with knobs.

A stage has blocks of exactly so many threads as all stages have. MetaSchedule draws tile sizes without regard to it,
and one draw in many fits; so tiles are drawn here (:mod:`souffle.tuning.tiles`), with the threads right from the start.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Instruction, Trace

from souffle.schedule.gpu import RULES, GpuRequest, Sketch, StageForms
from souffle.schedule.gpu.rule import Values
from souffle.schedule.log import KNOB, RULE, workload_module
from souffle.schedule.tuned import NATIVE_RULE
from souffle.tuning.tiles import TileAxis, draw_tiles, move_factor
from souffle.tvm_compat import const_int

__all__ = ["Space", "mutated", "native_context", "plain", "sampled", "spaces_of", "trace_key", "trace_with_values"]

_LOGGER = logging.getLogger("souffle.tuning")
_NEW_CONTEXT = tvm.get_global_func("s_tir.meta_schedule.TuneContext")
_READY_CONTEXT = tvm.get_global_func("s_tir.meta_schedule.TuneContextInitialize")
_WARP = 32
_TILED = "SSSRRSRS"
"""MetaSchedule's tiling of a GPU: grid, virtual threads, threads, reduction twice, and what a thread computes."""
_SPATIAL = _TILED.count("S")
_VECTOR_LENGTHS = [1, 2, 4, 8]
"""Elements of one load: up to 16 bytes, of fp32 or fp16."""
_NEAR = 0.5
"""How often a mutated knob takes a neighbouring value: values ascend, and neighbours behave alike."""


@dataclass(frozen=True, eq=False)
class Space:
    """One sketch.

    Attributes
    ----------
    rule : str
        Ours, or ``"metaschedule"``.
    trace : Trace
        With any decisions; those are what a search chooses.
    tiles : tuple of (tuple of TileAxis)
        MetaSchedule's tiled nests: the axes of each, with the sampling steps that tile them.
    lanes : int
        Threads that a nest has beside those of its tiles: a warp for tensor cores, else 1.
    size : int
        Combinations of our knobs; 0 where they are not counted.
    """

    rule: str
    trace: Trace
    tiles: tuple[tuple[TileAxis, ...], ...] = ()
    lanes: int = 1
    size: int = 0


def plain(value: Any) -> Any:
    """What TVM gives as JSON, as Python's own types."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return value.value
    if hasattr(value, "items"):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value]


def trace_key(trace: Sequence[Any]) -> str:
    """What tells two candidates of a stage apart: a trace as JSON without the steps that follow from the others."""
    steps, decisions = trace
    end = next((number for number, step in enumerate(steps) if step[0] == "EnterPostproc"), len(steps))
    return json.dumps([steps[:end], [one for one in decisions if one[0] < end]])


def spaces_of(func: tirx.PrimFunc, request: GpuRequest, target: tvm.target.Target, *, seed: int) -> tuple[Space, ...]:
    """The sketches of a stage: ours in the order of the rules, then MetaSchedule's.

    Parameters
    ----------
    func : PrimFunc
        The stage before it is scheduled.
    request : GpuRequest
    target : Target
    seed : int
        Of what MetaSchedule draws while it makes sketches.
    """
    ours = []
    stage = StageForms(func)
    for rule in RULES.values():
        sketch = rule.sketch(stage, request)
        if isinstance(sketch, Sketch):
            ours.append(Space(rule.name, _knob_trace(func, sketch), size=sketch.size))
    return (*ours, *_native_spaces(func, request, target, seed))


def _knob_trace(func: tirx.PrimFunc, sketch: Sketch) -> Trace:
    sch = s_tir.Schedule(workload_module(func), debug_mask="none", error_render_level="none")
    root = sch.get_sblock("root")
    for knob in sketch.knobs:
        count = len(knob.values)
        value = sch.sample_categorical(list(knob.values), [1 / count] * count)
        sch.annotate(root, KNOB + knob.name, value)
    sch.annotate(root, RULE, sketch.rule)
    return sch.trace


def trace_with_values(space: Space, values: Values) -> Trace:
    """The trace of one of our sketches with given values of its knobs."""
    trace = space.trace
    steps = list(trace.insts)
    draws = [step for step in steps if step.kind.name == "SampleCategorical"]
    keys = [str(step.attrs[0]) for step in steps if step.kind.name == "Annotate"]
    # Each knob is drawn, then named.
    for step, key in zip(draws, (key for key in keys if key.startswith(KNOB)), strict=True):
        offered = [const_int(value) for value in step.attrs[0]]
        trace = _decided(trace, step, offered.index(values[key.removeprefix(KNOB)]))
    return trace


def _native_rules(request: GpuRequest) -> list[ms.ScheduleRule]:
    """MetaSchedule's defaults for CUDA cores, with one grid dimension and our number of threads."""
    rules = ms.schedule_rule
    return [
        rules.MultiLevelTiling(
            structure=_TILED,
            tile_binds=["blockIdx.x", "vthread.x", "threadIdx.x"],
            max_innermost_factor=64,
            vector_load_lens=_VECTOR_LENGTHS,
            reuse_read=rules.ReuseType(req="must", levels=[4], scope="shared"),
            reuse_write=rules.ReuseType(req="must", levels=[3], scope="local"),
        ),
        rules.InlineConstantScalars(),
        rules.AutoInline(
            into_producer=True,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=False,
            require_injective=False,
            require_ordered=False,
            disallow_op=None,
        ),
        rules.CrossThreadReduction(thread_extents=[request.threads]),
        rules.ParallelizeVectorizeUnroll(
            max_jobs_per_core=-1, max_vectorize_extent=-1, unroll_max_steps=[0, 16, 64, 256], unroll_explicit=True
        ),
        rules.AutoBind(max_threadblocks=2**31 - 1, thread_extents=[request.threads]),
    ]


class _Context(ms.TuneContext):
    """MetaSchedule's context without its Python constructor, which imports intrinsics for half a minute of text."""

    def __init__(
        self, module: tvm.IRModule, target: tvm.target.Target, generator: ms.SpaceGenerator, seed: int
    ) -> None:
        log = get_logging_func(logging.getLogger("souffle.tuning.metaschedule"))
        self.__init_handle_by_constructor__(_NEW_CONTEXT, module, target, generator, None, "main", 1, seed, log)
        _READY_CONTEXT(self)


def native_context(func: tirx.PrimFunc, request: GpuRequest, target: tvm.target.Target, seed: int) -> ms.TuneContext:
    """MetaSchedule's context of a stage, with its postprocessors made ready."""
    post = ms.postproc
    generator = ms.space_generator.PostOrderApply(
        sch_rules=_native_rules(request),
        postprocs=[
            post.DisallowDynamicLoop(),
            post.RewriteCooperativeFetch(),
            post.RewriteUnboundBlock(2**31 - 1),
            post.RewriteParallelVectorizeUnroll(),
            post.RewriteReductionBlock(),
            post.RewriteTensorize(),
        ],
        mutator_probs={},
    )
    return _Context(workload_module(func), target, generator, seed)


def _native_spaces(func: tirx.PrimFunc, request: GpuRequest, target: tvm.target.Target, seed: int) -> Iterator[Space]:
    try:
        designs = native_context(func, request, target, seed).generate_design_space()
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        _LOGGER.info("MetaSchedule has no sketch for stage of %s: %s", ", ".join(map(str, func.params)), error)
        return
    for design in designs:
        trace = design.trace.simplified(True)
        lanes = _WARP if any(_tensorized(step) for step in trace.insts) else 1
        tiles = _tiled_nests(trace)
        if any(not draw_tiles(nest, request.threads // lanes, random.Random(0)) for nest in tiles):
            continue  # its extents have no divisors that make so many threads
        yield Space(NATIVE_RULE, trace, tiles, lanes)


def _tensorized(step: Instruction) -> bool:
    return step.kind.name == "Annotate" and str(step.attrs[0]) == "meta_schedule.auto_tensorize"


def _tiled_nests(trace: Trace) -> tuple[tuple[TileAxis, ...], ...]:
    """The axes that are tiled together: those of the loops of one block."""
    nests: list[list[TileAxis]] = []
    for number, step in enumerate(trace.insts):
        if step.kind.name == "GetLoops":
            nests.append([])
        elif step.kind.name == "SamplePerfectTile":
            parts, innermost = (const_int(value) for value in step.attrs)
            extent = 1
            for part in trace.get_decision(step):
                extent *= const_int(part)
            if not nests:
                nests.append([])
            nests[-1].append(TileAxis(number, extent, parts, innermost, spatial=parts == _SPATIAL))
    return tuple(tuple(nest) for nest in nests if any(axis.spatial for axis in nest))


def sampled(space: Space, threads: int, rng: random.Random) -> Trace:
    """One candidate of a sketch, drawn evenly from its choices."""
    trace = space.trace
    steps = list(trace.insts)
    for step in steps:
        if step.kind.name == "SampleCategorical":
            trace = _decided(trace, step, rng.randrange(len(step.attrs[0])))
    for nest in space.tiles:
        trace = _tiled(trace, steps, draw_tiles(nest, threads // space.lanes, rng))
    return trace


def _tiled(trace: Trace, steps: Sequence[Instruction], tiles: dict[int, list[int]] | None) -> Trace:
    for number, parts in (tiles or {}).items():
        trace = _decided(trace, steps[number], parts)
    return trace


def mutated(space: Space, trace: Trace, threads: int, rng: random.Random) -> Trace:
    """A candidate near another of the same sketch: one choice differs, or one nest is tiled anew."""
    steps = list(trace.insts)
    knobs = [s for s in steps if s.kind.name == "SampleCategorical" and len(s.attrs[0]) > 1]
    choices: list[Any] = [*knobs, *space.tiles]
    if not choices:
        return trace
    choice = rng.choice(choices)
    if isinstance(choice, tuple):
        if rng.random() < _NEAR:
            axis = rng.choice(choice)
            now = [const_int(part) for part in trace.get_decision(steps[axis.step])]
            return _decided(trace, steps[axis.step], move_factor(axis, now, rng))
        return _tiled(trace, steps, draw_tiles(choice, threads // space.lanes, rng))
    count, now = len(choice.attrs[0]), const_int(trace.get_decision(choice))
    near = [index for index in (now - 1, now + 1) if 0 <= index < count]
    other = [index for index in range(count) if index != now]
    return _decided(trace, choice, rng.choice(near if rng.random() < _NEAR else other))


def _decided(trace: Trace, step: Instruction, decision: Any) -> Trace:
    return trace.with_decision(step, decision, remove_postproc=True)
