"""What each stage function of a network is to compute: the TensorIR that its stage was scheduled from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tvm import tirx

from souffle.codegen.assemble import lower_stages
from souffle.kernel import DeviceFunction, Lowering, LoweringError, cuda_target
from souffle.kernel.partial import partial_function
from souffle.schedule.stage import Unit, flat_stages

__all__ = ["Recorder", "StageDefinition"]


@dataclass(frozen=True, eq=False)
class StageDefinition:
    """A stage.

    Attributes
    ----------
    func : tirx.PrimFunc
        Not scheduled; inputs, then outputs.
    functions : tuple of (str, int, int)
        The names of its functions in the text, with their tiles and threads.
    """

    func: tirx.PrimFunc
    functions: tuple[tuple[str, int, int], ...]


class Recorder:
    """A hook for :func:`souffle.pipeline.compile_cuda` that keeps the stages.

    Parameters
    ----------
    arch : str
        That is compiled for.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._stages: Sequence[Unit] = ()

    def __call__(self, name: str, result: object) -> object:
        """See the result of a step of the compiler."""
        if name == "schedule":
            self._stages = result
        return result

    def definitions(self) -> Mapping[str, StageDefinition]:
        """By the names of stage functions, those with partial barriers among them."""
        stages = flat_stages(self._stages)
        functions, names = lower_stages(stages, Lowering(cuda_target(self._arch)))
        found: dict[str, StageDefinition] = {}
        for stage in stages:
            own = functions[stage]
            for function in own:
                for form in _forms(function, names):
                    used = [form if f is function else f for f in own]
                    listed = tuple((names[f], f.tiles, f.threads) for f in used)
                    found.setdefault(names[form], StageDefinition(stage.draft.func, listed))
        return found


def _forms(function: DeviceFunction, names: Mapping[DeviceFunction, str]) -> tuple[DeviceFunction, ...]:
    forms = [function]
    with suppress(LoweringError):
        forms.append(partial_function(function))
    return tuple(dict.fromkeys(f for f in forms if f in names))
