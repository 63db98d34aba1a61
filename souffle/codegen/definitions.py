"""What each stage function of a network is to compute: the TensorIR that its stage was scheduled from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tvm import tirx

from souffle.kernel import DeviceFunction, LoweringError, partial_function
from souffle.schedule.stage import Stage

__all__ = ["StageDefinition", "stage_definitions"]


@dataclass(frozen=True, eq=False)
class StageDefinition:
    """A stage as it was before it was scheduled, and what computes it.

    Attributes
    ----------
    func : tirx.PrimFunc
        Not scheduled; inputs, then outputs.
    functions : tuple of (str, int, int)
        The names of its functions in the text, with their tiles and threads; together they make the outputs. A stage
        whose functions are called in two forms (:mod:`souffle.kernel.partial`) has a definition for each.
    """

    func: tirx.PrimFunc
    functions: tuple[tuple[str, int, int], ...]


def stage_definitions(
    functions: Mapping[Stage, tuple[DeviceFunction, ...]],
    names: Mapping[DeviceFunction, str],
    called: Collection[DeviceFunction],
) -> tuple[StageDefinition, ...]:
    """The distinct stages of a network.

    Parameters
    ----------
    functions : mapping of Stage to tuple of DeviceFunction
        Of all stages.
    names : mapping of DeviceFunction to str
    called : collection of DeviceFunction
        Those that kernels call, in the form in which they do; each is in a definition.
    """
    found: dict[tuple, StageDefinition] = {}
    for stage, own in functions.items():
        forms = [[form for form in _forms(function) if form in called] for function in own]
        if not all(forms):
            continue
        for number in range(max(map(len, forms))):
            chosen = tuple(several[min(number, len(several) - 1)] for several in forms)
            listed = tuple((names[f], f.tiles, f.threads) for f in chosen)
            found.setdefault((stage.draft.digest, *chosen), StageDefinition(stage.draft.func, listed))
    return tuple(found.values())


def _forms(function: DeviceFunction) -> tuple[DeviceFunction, ...]:
    forms = [function]
    with suppress(LoweringError):
        forms.append(partial_function(function))
    return tuple(dict.fromkeys(forms))
