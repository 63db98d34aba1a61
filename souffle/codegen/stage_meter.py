"""What each stage asks of a multiprocessor, from the stage as compiled (paper §5.4, "Get required resource").

Each distinct stage becomes a ``__global__`` of its own, the loop over tiles included, and ptxas says what it uses. The
figures are kept by the hash of that text, in which nothing stands for the network or the position that the stage has
there, so that equal stages of other networks are not compiled again. Those not known yet are compiled together, one
file for each core: starting nvcc takes longer than one more stage does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import tvm

from souffle.cache import read_entry, write_entry
from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin, compiler_version, content_key, find_nvcc
from souffle.codegen.plan import Plan, Resources
from souffle.decision import Decision
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.parallel import map_in_threads
from souffle.partition import Demand, PartitionRequest, Subprogram
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, Unit, flat_stages, map_stages

__all__ = ["StageMeter", "smaller_waves"]

_FEW = 4
"""Stages that are not worth a second run of nvcc beside the first."""


class StageMeter:
    """Finds the resources of stages, each distinct one once.

    Parameters
    ----------
    arch : str
        Such as ``"sm_90"``.
    target : Target
        TVM's for `arch`.
    measure : bool
        Whether to run nvcc, if there is one. Otherwise registers are assumed.
    cache_dir : Path, optional
        Where figures are kept from one compilation to the next.
    """

    def __init__(self, arch: str, target: tvm.target.Target, *, measure: bool, cache_dir: Path | None = None) -> None:
        self.arch = arch
        self.target = target
        self.cache_dir = cache_dir
        self.nvcc = find_nvcc() if measure else None
        self.version = compiler_version(self.nvcc) if self.nvcc is not None else ""
        self.known: dict[str, Resources] = {}

    def measured(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Stages with their resources.

        Parameters
        ----------
        units : sequence of Stage or LoopStage
            Lowered (:func:`souffle.schedule.lower.stages.lower_stages`); stages of equal structure share functions.

        Raises
        ------
        CudaCompileError
            If nvcc rejects the text of a stage.
        """
        first = {stage.functions: stage for stage in reversed(flat_stages(units))}
        if self.nvcc is None:
            used = {
                own: StageResources.assumed(_pool(own), _threads(own), stage.schedule.registers)
                for own, stage in first.items()
            }
        else:
            keys = {own: self._key(stage) for own, stage in first.items()}
            missing = {key: first[own] for own, key in keys.items() if self._recall(key) is None}
            for key, report in self._compile(missing).items():
                self._keep(key, report)
            used = {own: _resources(own, self.known[key]) for own, key in keys.items()}
        return map_stages(units, lambda stage: replace(stage, resources=used[stage.functions]))

    def _key(self, stage: Stage) -> str:
        text, _ = emit_cuda([("alone", _alone(stage, "stage"))], self.target)
        return content_key(text, self.arch, self.version)

    def _compile(self, missing: Mapping[str, Stage]) -> dict[str, Resources]:
        if not missing:
            return {}
        count = max(1, min(os.cpu_count() or 1, len(missing) // _FEW))
        keys = list(missing)
        parts = [keys[start::count] for start in range(count)]
        texts = [self._text({key: missing[key] for key in part}) for part in parts]
        reports = map_in_threads(count, lambda text: compile_cubin(text, self.arch)[1], texts)
        used = {name: one for report in reports for name, one in report.items()}
        return {key: used[_name(key)] for key in keys}

    def _text(self, stages: Mapping[str, Stage]) -> str:
        kernels = [(_name(key), _alone(stage, f"{_name(key)}_part")) for key, stage in stages.items()]
        return emit_cuda(kernels, self.target)[0]

    def _path(self, key: str) -> Path | None:
        return None if self.cache_dir is None else self.cache_dir / f"{key}.stage.json"

    def _recall(self, key: str) -> Resources | None:
        path = self._path(key)
        if key not in self.known and path is not None and (kept := read_entry(path)) is not None:
            entry = json.loads(kept)
            # An entry of before stacks or sizes were kept is made again.
            if entry.get("stack_bytes") is not None and "code_bytes" in entry:
                self.known[key] = Resources(**entry)
        return self.known.get(key)

    def _keep(self, key: str, used: Resources) -> None:
        self.known[key] = used
        path = self._path(key)
        if path is not None:
            write_entry(path, json.dumps(vars(used)).encode())


def _alone(stage: Stage, prefix: str) -> KernelShape:
    parameters = [(tensor.dtype, tensor.nbytes) for tensor in (*stage.inputs, *stage.outputs)]
    return kernel_of_stage(stage.functions, parameters, prefix, stage.kept)


def _resources(functions: Sequence[DeviceFunction], used: Resources) -> StageResources:
    return StageResources(
        used.registers,
        used.static_shared_bytes,
        _pool(functions),
        _threads(functions),
        used.spill_store_bytes,
        True,
        used.stack_bytes,
        used.code_bytes,
    )


def _name(key: str) -> str:
    return f"stage_{key[:24]}"


def _pool(functions: Sequence[DeviceFunction]) -> int:
    return max(function.shared_bytes for function in functions)


def _threads(functions: Sequence[DeviceFunction]) -> int:
    return max(function.threads for function in functions)


def smaller_waves(plan: Plan, subprograms: Sequence[Subprogram], request: PartitionRequest) -> tuple[Decision, ...]:
    """Where a kernel's compute-intensive stages need more than one wave after all.

    A merged kernel may take more registers than any of its stages does alone. It computes the same, since its stages
    loop over their tiles in a grid of as many blocks as the device holds.

    Parameters
    ----------
    plan : Plan
        Compiled; each launch is of the subprogram at its place.
    subprograms : sequence of Subprogram
    request : PartitionRequest
        What they were decided on.
    """
    kernels = {launch.kernel: sub for launch, sub in zip(reversed(plan.launches), reversed(subprograms), strict=True)}
    decisions = []
    for number, subprogram in sorted(kernels.items()):
        kernel = plan.kernels[number]
        demand = reduce(Demand.joined, (request.demand(unit) for unit in subprogram.stages))
        planned = demand.wave(request.device)
        if kernel.resources is None or not kernel.cooperative or demand.grid > planned:
            continue
        used = kernel.resources
        shared = kernel.dynamic_shared_bytes + used.static_shared_bytes
        wave = request.device.blocks_per_wave(kernel.threads, shared, used.registers) * kernel.teams
        if demand.grid > wave:
            what = "blocks" if kernel.teams == 1 else "teams of blocks"
            reason = (
                f"compiled, it has {used.registers} registers a thread, and {wave} {what} are on the device at once; "
                f"{demand.grid} tiles of {demand.of_grid} take turns"
            )
            decisions.append(Decision("partition", f"a wave of {planned} blocks for {kernel.name}", False, reason))
    return tuple(decisions)
