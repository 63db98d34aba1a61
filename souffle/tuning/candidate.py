"""A candidate of a search: one trace, the schedule that it gives, and the time that the cost model predicts for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from souffle.cost import CostDevice, predict_stage
from souffle.decision import Refused
from souffle.errors import SouffleError
from souffle.schedule.gpu import GpuRequest, GpuSchedule
from souffle.schedule.log import RULE, workload_module
from souffle.schedule.lower import DeviceFunction, lower_stage
from souffle.schedule.resources import StageResources
from souffle.schedule.tuned import NATIVE_RULE, schedule_of_trace
from souffle.tuning.space import Space, native_context, plain, trace_key

__all__ = ["Candidate", "Evaluator", "predicted_seconds"]

_FAILING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, SouffleError)
"""What TVM and the rules raise where choices do not go together."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule that obeys the rules of stages and lowers.

    Attributes
    ----------
    space : Space
        The sketch that it is of.
    key : str
        What tells it apart; see :func:`souffle.tuning.space.trace_key`.
    trace : Trace
        With the steps that MetaSchedule's postprocessors added.
    schedule : GpuSchedule
    functions : tuple of DeviceFunction
    seconds : float
        As the cost model predicts them without a compiler's report.
    """

    space: Space
    key: str
    trace: Trace
    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]
    seconds: float

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max(function.shared_bytes for function in self.functions)

    @property
    def summary(self) -> str:
        """The rule, and the values of its knobs or the tiles."""
        drawn = [
            [int(one) for one in decision] if hasattr(decision, "__len__") else int(decision)
            for decision in (self.trace.get_decision(step) for step in self._drawn)
        ]
        if self.space.rule == NATIVE_RULE:
            return f"{NATIVE_RULE} {'tensor cores' if self.space.lanes > 1 else 'CUDA cores'} {drawn}"
        keys = [str(s.attrs[0]).split(".")[-1] for s in self.trace.insts if s.kind.name == "Annotate"]
        values = [int(step.attrs[0][index]) for step, index in zip(self._drawn, drawn, strict=True)]
        knobs = zip(keys, values, strict=False)
        return " ".join((self.space.rule, *(f"{name}={value}" for name, value in knobs)))

    @property
    def _drawn(self) -> list[s_tir.schedule.Instruction]:
        steps = [step for step in self.trace.insts if self.trace.get_decision(step) is not None]
        return [step for step in steps if step.kind.name.startswith("Sample")]


def predicted_seconds(
    functions: tuple[DeviceFunction, ...], device: CostDevice, resources: StageResources | None = None
) -> tuple[float, float]:
    """Seconds with a cold and with a warm second-level cache.

    Raises
    ------
    OptionError
        If a block does not fit on the device.
    """
    cold, warm = (predict_stage(functions, device, resources, warm=warm).seconds for warm in (False, True))
    return cold, warm


class Evaluator:
    """Makes candidates of one stage from traces, each distinct one once.

    Parameters
    ----------
    func : PrimFunc
        The stage before it is scheduled.
    request : GpuRequest
    target : Target
    device : CostDevice
        Ranks candidates that are not built yet.
    """

    def __init__(self, func: tirx.PrimFunc, request: GpuRequest, target: tvm.target.Target, device: CostDevice) -> None:
        self.func = func
        self.request = request
        self.target = target
        self.device = device
        self.tried: dict[str, Candidate | Refused] = {}
        self._postprocs = None

    def key_of(self, trace: Trace) -> str:
        """What tells a trace apart."""
        return trace_key(plain(trace.as_json(remove_postproc=True)))

    def candidate(self, space: Space, trace: Trace) -> Candidate | Refused:
        """The candidate of a trace, or why it is none."""
        key = self.key_of(trace)
        if key not in self.tried:
            try:
                self.tried[key] = self._made(space, trace, key)
            except _FAILING as error:
                lines = str(error).strip().splitlines()
                self.tried[key] = Refused(f"{type(error).__name__}: {lines[-1] if lines else ''}")
        return self.tried[key]

    def _made(self, space: Space, trace: Trace, key: str) -> Candidate | Refused:
        # A postprocessor may draw too: from the candidate itself, so that it is the same whenever it is made.
        seed = random.Random(key).randrange(1, 2**31 - 1)
        sch = s_tir.Schedule(workload_module(self.func), seed=seed, debug_mask="none", error_render_level="none")
        trace.apply_to_schedule(sch, remove_postproc=True)
        sch.enter_postproc()
        if RULE not in dict(sch.get(sch.get_sblock("root")).annotations):
            for postproc in self._native_postprocs():
                if not postproc.apply(sch):
                    return Refused(f"{type(postproc).__name__} refuses it")
            # Some steps of postprocessors do not replay; what a log cannot give back is no candidate.
            whole = s_tir.Schedule(workload_module(self.func), debug_mask="none", error_render_level="none")
            sch.trace.apply_to_schedule(whole, remove_postproc=False)
            sch = whole
        trace = sch.trace
        schedule = schedule_of_trace(sch, self.func, self.request)
        if isinstance(schedule, Refused):
            return schedule
        functions = lower_stage("stage", schedule, self.target)
        shared = max(function.shared_bytes for function in functions)
        if shared > self.request.max_shared_bytes:
            most = self.request.max_shared_bytes
            return Refused(f"{shared} bytes of shared memory, a block may use {most}")
        cold, warm = predicted_seconds(functions, self.device)
        return Candidate(space, key, trace, schedule, functions, (cold + warm) / 2)

    def _native_postprocs(self) -> list:
        if self._postprocs is None:
            context = native_context(self.func, self.request, self.target, seed=1)
            self._postprocs = list(context.space_generator.postprocs)
            self._context = context
        return self._postprocs
