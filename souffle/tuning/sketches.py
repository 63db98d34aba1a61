"""The sketches of a stage, made in a worker: our rules' and MetaSchedule's own, for searches as plain data.

A rule of ours answers with a sketch whose knobs are open. MetaSchedule's own sketches (tiling on several levels on CUDA
cores, reductions across threads) are traces. Its sketches for tensor cores are left out: they need TVM's table of
intrinsics, which takes a minute of processor time to import, also in each compilation that replays such a record. Our
own rules have tensor cores, with knobs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Instruction, Trace

from souffle.schedule.gpu import RULES, GpuRequest, Sketch, StageForms
from souffle.schedule.gpu.forms.blocks import block_views, open_schedule
from souffle.schedule.recipe import NATIVE_RULE
from souffle.schedule.record import workload_module
from souffle.tuning.space import Space
from souffle.tuning.tiles import TileAxis, draw_tiles
from souffle.tvm_compat import const_int

__all__ = ["native_context", "plain", "spaces_of"]

_LOGGER = logging.getLogger("souffle.tuning")
_NEW_CONTEXT = tvm.get_global_func("s_tir.meta_schedule.TuneContext")
_READY_CONTEXT = tvm.get_global_func("s_tir.meta_schedule.TuneContextInitialize")
_WARP = 32
_TILED = "SSSRRSRS"
"""MetaSchedule's tiling of a GPU: grid, virtual threads, threads, reduction twice, and what a thread computes."""
_SPATIAL = _TILED.count("S")
_MOST_REDUCTIONS = 6
"""Of a stage that MetaSchedule sketches. It tries each way of each with each way of the others: eight took it minutes,
and its sketches have no barrier between the reductions of one stage that more than a few of them would need."""
_VECTOR_LENGTHS = [1, 2, 4, 8]
"""Elements of one load: up to 16 bytes, of fp32 or fp16."""


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
            knobs = tuple((knob.name, tuple(int(value) for value in knob.values)) for knob in sketch.knobs)
            ours.append(Space(rule.name, knobs))
    return (*ours, *_native_spaces(func, request, target, seed))


def _native_rules(request: GpuRequest) -> list[ms.ScheduleRule]:
    """MetaSchedule's defaults for CUDA cores, with one grid dimension and our number of threads.

    Loops are marked and left to nvcc to unroll: texts of what is unrolled take long to lower, and longer to price.
    """
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
            max_jobs_per_core=-1, max_vectorize_extent=-1, unroll_max_steps=[0, 16, 64, 256], unroll_explicit=False
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
    reductions = sum(bool(view.reduction) for view in block_views(open_schedule(func)))
    if reductions > _MOST_REDUCTIONS:
        return
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
        drawn = (step.kind.name == "SampleCategorical" for step in trace.insts)
        choices = tuple((number, len(trace.insts[number].attrs[0])) for number, draws in enumerate(drawn) if draws)
        yield Space(NATIVE_RULE, (), plain(trace.as_json()), choices, tiles, lanes)


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
