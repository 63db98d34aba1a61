"""What workers do of a search for one stage: its sketches, looks at recipes, and candidates built by nvcc.

Each function takes plain data and what is shared of the stage and of the setting, and gives plain data. A worker keeps
stages and candidates that it has seen, since jobs of the same ones follow each other; it could make them anew.
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import CudaModule, Resources
from souffle.cost import CostDevice, predict_stage
from souffle.decision import Refused
from souffle.errors import CudaCompileError, OptionError, SouffleError
from souffle.kernel.kernel_shape import KernelShape, kernel_of_stage
from souffle.schedule.follow import followed
from souffle.schedule.gpu import RULES, GpuRequest, GpuSchedule, Sketch, sketch_of
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage, text_of
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.record import workload_module
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import StageDraft
from souffle.tuning.learned.features import features_of
from souffle.tuning.sketches import native_context, plain, spaces_of
from souffle.tuning.trial_plan import trial_plan
from souffle.tvm_calls import of_text, to_text

__all__ = ["SearchSetting", "build", "look", "packed_setting", "packed_stage", "predict_built", "sketches"]

_FAILING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, SouffleError)
"""What TVM and the rules raise where choices do not go together."""
_REMEMBERED = 64
"""Candidates that a worker keeps."""


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
        self.setting: SearchSetting = pickle.loads(setting)
        self.request = self.setting.request
        if self.setting.rules != tuple(RULES):
            other = sorted(set(self.setting.rules) ^ set(RULES)) or self.setting.rules
            raise OptionError(
                f"the rules {', '.join(other)} were registered or taken out in the process that searches; "
                f"workers have only Souffle's own: search with on='here'"
            )
        self.name, func, self.inputs, self.outputs = pickle.loads(stage)
        self.func: tirx.PrimFunc = of_text(func)
        self.target = cuda_target(self.request.arch)
        self._looked: OrderedDict[str, _Looked | Refused] = OrderedDict()

    @cached_property
    def _context(self) -> Any:
        return native_context(self.func, self.request, self.target, seed=1)

    def looked(self, recipe: Recipe) -> _Looked | Refused:
        """The schedule of a recipe, or why there is none."""
        if recipe.key not in self._looked:
            try:
                found = self._made(recipe)
            except _FAILING as error:
                lines = str(error).strip().splitlines()
                found = Refused(f"{type(error).__name__}: {lines[-1] if lines else ''}")
            self._looked[recipe.key] = found
            while len(self._looked) > _REMEMBERED:
                self._looked.popitem(last=False)
        return self._looked[recipe.key]

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

    def seconds(self, functions: tuple[DeviceFunction, ...], resources: StageResources | None = None) -> list[float]:
        """As predicted, with a cold and with a warm second-level cache; OptionError if it does not fit."""
        device = self.setting.device
        return [predict_stage(functions, device, resources, warm=warm).seconds for warm in (False, True)]

    def compiled(self, looked: Sequence[_Looked]) -> list[tuple[KernelShape, CudaModule, Resources]]:
        """Kernels of some candidates, from one call of nvcc; CudaCompileError if it fails."""
        parameters = [(dtype, _bytes(shape, dtype)) for shape, dtype in (*self.inputs, *self.outputs)]
        names = [f"trial{number}" for number in range(len(looked))]
        shapes = [
            kernel_of_stage(one.functions, parameters, f"{name}_part")
            for name, one in zip(names, looked, strict=True)
        ]
        text = emit_cuda(list(zip(names, shapes, strict=True)), self.target)[0]
        cubin, report = compile_cubin(text, self.request.arch)
        module = CudaModule(text, cubin)
        return [(shape, module, report[name]) for name, shape in zip(names, shapes, strict=True)]


def _bytes(shape: Sequence[int], dtype: str) -> int:
    size = tvm.DataType(dtype).bits // 8
    for extent in shape:
        size *= extent
    return size


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
        second-level cache, ``tiles``, ``shared_bytes``, ``text``, and ``features``, which may be empty.
    """
    work = _stage(payload, shared)
    looked = work.looked(Recipe.of_data(payload["recipe"]))
    if isinstance(looked, Refused):
        return {"problem": looked.reason}
    try:
        seconds = work.seconds(looked.functions)
    except OptionError as error:
        return {"problem": str(error)}
    return {
        "problem": "",
        "recipe": {**payload["recipe"], "trace": looked.trace},
        "seconds": seconds,
        "tiles": looked.schedule.tiles,
        "shared_bytes": max(function.shared_bytes for function in looked.functions),
        "text": text_of(looked.functions),
        "features": features_of(looked.functions, work.setting.device).tolist() if payload["features"] else [],
    }


def predict_built(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What the cost model predicts of candidates with ptxas' report.

    Parameters
    ----------
    payload : mapping
        ``stage``, ``setting``, and ``recipes``, which go into one call of nvcc.
    shared : mapping

    Returns
    -------
    list of dict
        ``problem``, or ``seconds``, ``registers`` and ``spill_bytes``, for each.
    """
    work = _stage(payload, shared)

    def figures(looked: _Looked, used: Resources) -> dict[str, Any]:
        pool = max(function.shared_bytes for function in looked.functions)
        threads = max(function.threads for function in looked.functions)
        spilled = used.spill_store_bytes
        resources = StageResources(used.registers, used.static_shared_bytes, pool, threads, spilled, True)
        try:
            seconds = work.seconds(looked.functions, resources)
        except OptionError as error:
            return {"problem": str(error)}
        return {"problem": "", "seconds": seconds, "registers": used.registers, "spill_bytes": spilled}

    return [
        one if isinstance(one, dict) else figures(one[0], one[1][2])
        for one in _built(work, [Recipe.of_data(data) for data in payload["recipes"]])
    ]


def build(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Candidates as plans that a GPU's worker measures; parameters as for :func:`predict_built`.

    Returns
    -------
    list of dict
        ``problem``, or ``plan`` (bytes of a pickle), ``registers`` and ``spill_bytes``, for each.
    """
    work = _stage(payload, shared)
    found = []
    for number, one in enumerate(_built(work, [Recipe.of_data(data) for data in payload["recipes"]])):
        if isinstance(one, dict):
            found.append(one)
            continue
        shape, module, used = one[1]
        name = f"trial{number}"
        plan = trial_plan(name, work.name, work.inputs, work.outputs, shape, module, used, work.request.arch)
        figures = {"registers": used.registers, "spill_bytes": used.spill_store_bytes}
        found.append({"problem": "", "plan": pickle.dumps(plan), **figures})
    return found


def _built(
    work: _StageWork, recipes: Sequence[Recipe]
) -> list[tuple[_Looked, tuple[KernelShape, CudaModule, Resources]] | dict[str, Any]]:
    """Each candidate compiled, or the problem with it: where one keeps the others from compiling, each is alone."""
    looks = [work.looked(recipe) for recipe in recipes]
    fitting = [one for one in looks if isinstance(one, _Looked)]
    compiled: dict[int, tuple[KernelShape, CudaModule, Resources] | str] = {}
    try:
        compiled = dict(zip(map(id, fitting), work.compiled(fitting) if fitting else [], strict=True))
    except CudaCompileError:
        for one in fitting:
            try:
                (compiled[id(one)],) = work.compiled([one])
            except CudaCompileError as error:
                compiled[id(one)] = str(error)
    results: list[Any] = []
    for one in looks:
        if isinstance(one, Refused):
            results.append({"problem": one.reason})
        elif isinstance(compiled[id(one)], str):
            results.append({"problem": compiled[id(one)]})
        else:
            results.append((one, compiled[id(one)]))
    return results
