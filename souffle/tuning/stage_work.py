"""What workers do of a search for one stage: its sketches, looks at recipes, and candidates built by nvcc.

Each function takes plain data and what is shared of the stage and of the setting, and gives plain data. A worker keeps
stages that it has seen, since jobs of the same ones follow each other; it could make them anew. A candidate is lowered
once, by whoever looks at it: what is compiled of it comes with the look (:mod:`souffle.tuning.candidate`).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import CudaModule, Resources
from souffle.cost import CostDevice, count_stage
from souffle.decision import Refused
from souffle.errors import CudaCompileError, OptionError, SouffleError
from souffle.schedule.follow import followed
from souffle.schedule.gpu import RULES, GpuRequest, GpuSchedule, Sketch, sketch_of
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage, text_of
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.record import workload_module
from souffle.schedule.stage import StageDraft
from souffle.tuning.candidate import Candidate, text_of_candidates
from souffle.tuning.learned.features import features_of
from souffle.tuning.sketches import native_context, plain, spaces_of
from souffle.tuning.trial_plan import trial_plan
from souffle.tvm_calls import of_text, to_text

__all__ = ["SearchSetting", "build", "look", "packed_setting", "packed_stage", "predict_built", "sketches"]

_FAILING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, SouffleError)
"""What TVM and the rules raise where choices do not go together."""


@dataclass(frozen=True)
class SearchSetting:
    """What all stages of a search have in common.

    Attributes
    ----------
    request : GpuRequest
    device : CostDevice
        Ranks candidates that are not built yet.
    rules : tuple of str
        Names of the schedule rules, which have to be the same in a worker.
    """

    request: GpuRequest
    device: CostDevice
    rules: tuple[str, ...]


def packed_setting(request: GpuRequest, device: CostDevice) -> bytes:
    """A setting as it is shared with workers."""
    return pickle.dumps(SearchSetting(request, device, tuple(RULES)))


def packed_stage(draft: StageDraft) -> bytes:
    """A stage as it is shared with workers."""
    ends = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (draft.inputs, draft.outputs)]
    return pickle.dumps((draft.name, to_text(draft.func), *ends))


@dataclass(frozen=True)
class _Looked:
    """A schedule that obeys the rules of stages and lowers."""

    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]
    trace: list[Any] | None


class _StageWork:
    """One stage in a worker."""

    def __init__(self, stage: bytes, setting: bytes) -> None:
        self.setting = _setting(setting)
        self.request = self.setting.request
        if self.setting.rules != tuple(RULES):
            other = sorted(set(self.setting.rules) ^ set(RULES)) or self.setting.rules
            raise OptionError(
                f"the rules {', '.join(other)} were registered or taken out in the process that searches; "
                f"workers have only Souffle's own: search with on='here'"
            )
        _, func, inputs, outputs = pickle.loads(stage)
        self.func: tirx.PrimFunc = of_text(func)
        self.target = cuda_target(self.request.arch)
        self.parameters = [(dtype, _bytes(shape, dtype)) for shape, dtype in (*inputs, *outputs)]

    @cached_property
    def _context(self) -> Any:
        return native_context(self.func, self.request, self.target, seed=1)

    def looked(self, recipe: Recipe) -> _Looked | Refused:
        """The schedule of a recipe, or why there is none."""
        try:
            return self._made(recipe)
        except _FAILING as error:
            lines = str(error).strip().splitlines()
            return Refused(f"{type(error).__name__}: {lines[-1] if lines else ''}")

    def _made(self, recipe: Recipe) -> _Looked | Refused:
        whole = recipe if recipe.rule != NATIVE_RULE else self._processed(recipe)
        if isinstance(whole, Refused):
            return whole
        schedule = followed(whole, self.func, self.request)
        if isinstance(schedule, Refused):
            return schedule
        most = self.request.max_shared_bytes
        functions = lower_stage("stage", schedule, self.target, max_shared_bytes=most)
        return _Looked(schedule, functions, whole.trace)

    def _processed(self, recipe: Recipe) -> Recipe | Refused:
        """MetaSchedule's trace with the steps of its postprocessors.

        Some of these do not replay: what a log cannot give back is no candidate, so that the trace is followed anew.
        """
        # A postprocessor may draw too: from the candidate itself, so that it is the same whenever it is made.
        seed = random.Random(recipe.key).randrange(1, 2**31 - 1)
        sch = s_tir.Schedule(workload_module(self.func), seed=seed, debug_mask="none", error_render_level="none")
        Trace.apply_json_to_schedule(recipe.choices, sch)
        sch.enter_postproc()
        for postproc in self._context.space_generator.postprocs:
            if not postproc.apply(sch):
                return Refused(f"{type(postproc).__name__} refuses it")
        return Recipe(recipe.rule, {}, plain(sch.trace.as_json(remove_postproc=False)))

    def own(self, rule: str) -> Recipe | None:
        """What a rule chooses by itself."""
        sketch = sketch_of(rule, self.func, self.request) if rule in RULES else Refused("")
        values = sketch.choose() if isinstance(sketch, Sketch) else sketch
        if isinstance(values, Refused):
            return None
        return Recipe(rule, {knob.name: int(values[knob.name]) for knob in sketch.knobs})


def _bytes(shape: Sequence[int], dtype: str) -> int:
    size = tvm.DataType(dtype).bits // 8
    for extent in shape:
        size *= extent
    return size


@lru_cache(maxsize=16)
def _setting(setting: bytes) -> SearchSetting:
    return pickle.loads(setting)


_work = lru_cache(maxsize=16)(_StageWork)


def _stage(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> _StageWork:
    return _work(shared[payload["stage"]], shared[payload["setting"]])


def sketches(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """The sketches of a stage, and what the rule that the compiler took chooses by itself.

    Parameters
    ----------
    payload : mapping
        ``stage`` and ``setting``: keys of what is shared; ``seed``; ``rule``.
    shared : mapping

    Returns
    -------
    dict
        ``spaces`` (:meth:`souffle.tuning.space.Space.data`) and ``own``, a recipe or ``None``.
    """
    work = _stage(payload, shared)
    spaces = spaces_of(work.func, work.request, work.target, seed=payload["seed"])
    own = work.own(payload["rule"])
    return {"spaces": [space.data() for space in spaces], "own": None if own is None else own.data()}


def look(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """What a recipe gives, without a compiler.

    Parameters
    ----------
    payload : mapping
        ``stage``, ``setting``, the ``recipe``, and whether ``features`` are wanted.
    shared : mapping

    Returns
    -------
    dict
        ``problem``, or the ``recipe`` with what postprocessors added, ``seconds`` predicted with a cold and with a warm
        second-level cache, ``tiles``, ``shared_bytes``, ``text``, ``candidate`` (bytes), and ``features``, which may be
        empty.
    """
    work = _stage(payload, shared)
    recipe = Recipe.of_data(payload["recipe"])
    looked = work.looked(recipe)
    if isinstance(looked, Refused):
        return {"problem": looked.reason}
    try:
        candidate = Candidate.of_stage(recipe.key, looked.functions, work.parameters, count_stage(looked.functions))
        seconds = candidate.seconds(work.setting.device)
    except (LoweringError, OptionError) as error:
        return {"problem": str(error)}
    return {
        "problem": "",
        "recipe": {**payload["recipe"], "trace": looked.trace},
        "seconds": seconds,
        "tiles": looked.schedule.tiles,
        "shared_bytes": max(function.shared_bytes for function in looked.functions),
        "text": text_of(looked.functions),
        "candidate": candidate.packed(),
        "features": features_of(looked.functions, work.setting.device).tolist() if payload["features"] else [],
    }


def predict_built(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What the cost model predicts of candidates with ptxas' report.

    Parameters
    ----------
    payload : mapping
        ``setting``, and ``candidates``, of :func:`look`, which go into one call of nvcc.
    shared : mapping

    Returns
    -------
    list of dict
        ``problem``, or ``seconds``, ``registers`` and ``spill_bytes``, for each.
    """
    setting = _setting(shared[payload["setting"]])

    def figures(one: _Built) -> dict[str, Any]:
        try:
            seconds = one.candidate.seconds(setting.device, one.used)
        except OptionError as error:
            return {"problem": str(error)}
        return {"problem": "", "seconds": seconds, **one.figures}

    return _of_each(payload, setting, figures)


def build(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Candidates as plans that a GPU's worker measures; parameters as for :func:`predict_built`, and ``stage``.

    Returns
    -------
    list of dict
        ``problem``, or ``plan`` (bytes of a pickle), ``registers`` and ``spill_bytes``, for each.
    """
    setting = _setting(shared[payload["setting"]])
    name, _, inputs, outputs = pickle.loads(shared[payload["stage"]])

    def planned(one: _Built) -> dict[str, Any]:
        plan = trial_plan(one.candidate, name, inputs, outputs, one.module, one.used, setting.request.arch)
        return {"problem": "", "plan": pickle.dumps(plan), **one.figures}

    return _of_each(payload, setting, planned)


@dataclass(frozen=True)
class _Built:
    """A candidate, compiled."""

    candidate: Candidate
    module: CudaModule
    used: Resources

    @property
    def figures(self) -> dict[str, int]:
        """What ptxas says of it."""
        return {"registers": self.used.registers, "spill_bytes": self.used.spill_store_bytes}


def _of_each(
    payload: Mapping[str, Any], setting: SearchSetting, found: Callable[[_Built], dict[str, Any]]
) -> list[dict[str, Any]]:
    """What is found of each candidate once it is compiled, or the problem: where one keeps the others from compiling,
    each is alone."""
    candidates = [Candidate.of_bytes(data) for data in payload["candidates"]]
    arch = setting.request.arch
    try:
        return [found(one) for one in _compiled(candidates, arch)]
    except CudaCompileError as error:
        if len(candidates) == 1:
            return [{"problem": str(error)}]
    alone = ({**payload, "candidates": [data]} for data in payload["candidates"])
    return [one for each in alone for one in _of_each(each, setting, found)]


def _compiled(candidates: Sequence[Candidate], arch: str) -> list[_Built]:
    text = text_of_candidates(candidates, cuda_target(arch))
    cubin, report = compile_cubin(text, arch)
    module = CudaModule(text, cubin)
    return [_Built(one, module, report[one.name]) for one in candidates]
