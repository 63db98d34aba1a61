"""Bisection of the compiler: the first step after which a network is wrong, and the first TE of it whose value is.

The program of each step is run by the reference evaluator, and its values are compared with ONNX Runtime's, or, where
that has none (inside of an operator), with those of the program as it was imported. A transformation keeps the tensors
that it does not replace, so that values are followed through all of them; what it makes anew is named where it lies
between a value that is right and one that is not. If all programs are right and the compiled network is not, it is the
kernels: what schedules, lowers and emits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

import souffle
from souffle.counted_axes import Counts, cut
from souffle.debug.departure import Departure, Reference, first_departure, values_of
from souffle.decision import Decision
from souffle.errors import SouffleError
from souffle.frontend.load import load_model
from souffle.frontend.model_options import ModelOptions
from souffle.frontend.onnx_import import import_named
from souffle.options import INTEGERS, LEVELS, ON_CHIP, Progress, quiet
from souffle.program import Tensor, TEProgram
from souffle.reference import has_onnxruntime, onnxruntime_outputs, static_model, with_outputs
from souffle.runtime.comparison import compare, random_inputs
from souffle.runtime.signature import TensorSpec

__all__ = ["BisectReport", "Step", "bisect"]

KERNELS = "kernels"
"""The last step: what is compiled of the last program, run."""
_ONNX_RUNTIME, _IMPORTED = "ONNX Runtime", "the program as imported"


@dataclass(frozen=True)
class Step:
    """A program, or the compiled network, beside the reference.

    Attributes
    ----------
    name : str
        Of ``docs/debugging.md``'s table of hooks; ``"kernels"`` for the compiled network.
    changed : bool
        Whether the program is another one than before.
    compared, tes : int
        TEs' values that were compared, of how many TEs.
    error : float or None
        Of the outputs; None where they could not be computed.
    ok : bool
        Whether the outputs are within the contract.
    departure : Departure or None
        The first value that is not, of an output or before.
    """

    name: str
    changed: bool
    compared: int
    tes: int
    error: float | None
    ok: bool
    departure: Departure | None = None


@dataclass(frozen=True)
class BisectReport:
    """What a bisection found.

    Attributes
    ----------
    model, level, precision, target, reference : str
    steps : tuple of Step
        As far as the first one whose outputs are wrong.
    failure : str
        What the compiler raised, if it did.
    decisions : tuple of Decision
        Those of the step that is wrong that were taken, about the TE that departs or what lies before it.
    switches : tuple of str
        Names for ``disable`` of which each alone makes the network right.
    """

    model: str
    level: str
    precision: str
    target: str
    reference: str
    steps: tuple[Step, ...]
    failure: str = ""
    decisions: tuple[Decision, ...] = ()
    switches: tuple[str, ...] = ()

    @property
    def wrong(self) -> Step | None:
        """The first step whose outputs are wrong."""
        return next((step for step in self.steps if not step.ok), None)


def bisect(
    model: str | os.PathLike | bytes | onnx.ModelProto,
    *,
    level: str = "V4",
    target: str = "cuda",
    precision: str = "fp32",
    seed: int = 0,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
    disable: Sequence[str] = (),
    progress: Progress = quiet,
    **options: Any,
) -> BisectReport:
    """Find the step of the compiler that makes a network wrong.

    Parameters
    ----------
    model : path, bytes or ModelProto
    level, precision, batch, dims, constants, disable, options
        Of :func:`souffle.compile`. Each open dimension has one value.
    target : str
        ``"cuda"``, whose text runs on the CPU device, or ``"cpu"``.
    seed : int
        Of the random inputs.
    progress : callable, optional
        Told in a few words what is being done.

    Raises
    ------
    SouffleError
        If the model cannot be imported, or an option is not valid. What the compiler raises later is in the report.
    """
    given = ModelOptions(batch, dims, constants, INTEGERS not in disable)
    progress("importing")
    program, named = import_named(load_model(model, given))
    inputs = random_inputs(
        (
            TensorSpec(name, tensor.shape, program.small_types.get(name, tensor.dtype))
            for name, tensor in zip(program.input_names, program.inputs, strict=True)
        ),
        seed,
    )
    progress("computing what is compared with")
    reference = _ONNX_RUNTIME if has_onnxruntime() else _IMPORTED
    values = values_of(program, inputs)
    references = _references(static_model(model, given), program, named, inputs, values)
    asked = {"level": level, "target": target, "precision": precision, **options}
    if target == "cuda":
        asked |= {"device": "cpu", "cubin": False}
    found = _Bisection(inputs, references, precision, progress, program.counts)
    found.program("frontend", program, values)
    programs, decisions, network, failure = _compiled(program, {**asked, "disable": disable}, progress)
    for name, made in programs.items():
        found.program(name, made)
    if network is not None:
        found.network(network)
    about = BisectReport(program.name, level, precision, target, reference, tuple(found.steps), failure)
    wrong = about.wrong
    if wrong is None:
        return about
    return replace(
        about,
        decisions=_about(decisions, wrong),
        switches=_switches(found, program, asked, disable, wrong) if LEVELS[level].merge else (),
    )


class _Bisection:
    """The steps as they come; nothing is looked at after the first whose outputs are wrong."""

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        references: Mapping[Tensor, Reference],
        precision: str,
        progress: Progress,
        counts: Counts,
    ) -> None:
        self.inputs, self.references, self.precision, self.progress = inputs, references, precision, progress
        self.steps: list[Step] = []
        self.expected = {found.value: found.array for found in references.values() if found.value}
        # Programs have the whole room of outputs whose extent data decides; networks give what is there.
        self.given = cut(self.expected, counts)
        self._last: TEProgram | None = None

    def program(
        self, name: str, program: TEProgram, values: Mapping[Tensor, np.ndarray] | None = None
    ) -> None:
        """Compare the values of a program, which are worked out where they are not given."""
        if self.steps and not self.steps[-1].ok:
            return
        changed, self._last = program is not self._last, program
        if not changed:
            last = self.steps[-1]
            self.steps.append(replace(last, name=name, changed=False))
            return
        self.progress(f"running the program after {name}")
        values = values_of(program, self.inputs) if values is None else values
        # What is imported computes in the model's own types.
        precision = "fp32" if name == "frontend" else self.precision
        departure, compared = first_departure(program, values, self.references, precision)
        outputs = {n: values[t] for n, t in zip(program.output_names, program.outputs, strict=True) if t.size}
        count = len(program.expanded().tes)
        self.steps.append(self._step(name, outputs, self.expected, precision, compared, count, departure))

    def network(self, network: Any) -> None:
        """Compare the outputs of the compiled network."""
        if self.steps and not self.steps[-1].ok:
            return
        self.progress("running the kernels")
        outputs = {name: np.asarray(value) for name, value in network(dict(self.inputs)).items()}
        launches = len(network.plan.launches)
        self.steps.append(self._step(KERNELS, outputs, self.given, self.precision, 0, launches, None))

    def right(self, network: Any) -> bool:
        """Whether a network's outputs are."""
        outputs = {name: np.asarray(value) for name, value in network(dict(self.inputs)).items()}
        return self._step(KERNELS, outputs, self.given, self.precision, 0, 0, None).ok

    def _step(
        self,
        name: str,
        outputs: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
        precision: str,
        compared: int,
        tes: int,
        departure: Departure | None,
    ) -> Step:
        wanted = {output: expected[output] for output in outputs if output in expected}
        found = compare({output: outputs[output] for output in wanted}, wanted, precision)
        return Step(name, True, compared, tes, found.error, found.ok, departure)


def _references(
    model: onnx.ModelProto,
    program: TEProgram,
    named: Mapping[str, Tensor],
    inputs: Mapping[str, np.ndarray],
    values: Mapping[Tensor, np.ndarray],
) -> dict[Tensor, Reference]:
    """What each tensor of the imported program is to hold; `values` are those that it holds."""
    found = {tensor: Reference(array, _IMPORTED) for tensor, array in values.items()}
    outputs = dict(zip(program.output_names, program.outputs, strict=True))
    for name, tensor in {**named, **outputs}.items():
        if tensor in values:
            found[tensor] = Reference(values[tensor], _IMPORTED, name)
    if has_onnxruntime():
        given = onnxruntime_outputs(with_outputs(model, named), inputs)
        for name, tensor in {**named, **outputs}.items():
            array = given.get(name)
            same = array is not None and tensor in values and array.shape == tensor.shape
            if same and str(array.dtype) == tensor.dtype:
                found[tensor] = Reference(array, _ONNX_RUNTIME, name)
    return found


def _compiled(
    program: TEProgram, asked: Mapping[str, Any], progress: Progress
) -> tuple[dict[str, TEProgram], tuple[Decision, ...], Any, str]:
    """The programs of the steps in their order, as they are compiled; decisions, the network, and what was raised."""
    programs: dict[str, TEProgram] = {}

    def seen(step: str, result: object) -> object:
        made = getattr(result, "program", None) if step == "fusion" else result
        if isinstance(made, TEProgram) and step != "frontend":
            # Several ways are tried, and what was seen last is what is compiled.
            programs.pop(step, None)
            programs[step] = made
        return result

    try:
        network = souffle.compile(program, **asked, progress=progress, hook=seen)
    except SouffleError as error:
        return programs, (), None, f"{type(error).__name__}: {error}"
    return programs, network.plan.decisions, network, ""


def _about(decisions: Sequence[Decision], wrong: Step) -> tuple[Decision, ...]:
    departure = wrong.departure
    if departure is None:
        return ()
    names = {departure.te, departure.tensor, *departure.unknown}
    transformations = ("gathered", "horizontal", "vertical", "narrow", "roll", "precision")
    stages = {wrong.name} if wrong.name in transformations else None
    return tuple(
        decision
        for decision in decisions
        if decision.accepted
        and (stages is None or decision.stage in stages)
        and any(name in decision.subject or name in decision.reason for name in names)
    )


def _switches(
    found: _Bisection, program: TEProgram, asked: Mapping[str, Any], disable: Sequence[str], wrong: Step
) -> tuple[str, ...]:
    """What, left out alone, makes the network right; asked only where the wrong step has parts with names."""
    if wrong.name not in ("two_phase", "roll", KERNELS):
        return ()
    makes_right = []
    for name in ON_CHIP:
        if name in disable:
            continue
        found.progress(f"compiling without {name}")
        try:
            network = souffle.compile(program, **asked, disable=[*disable, name])
            if found.right(network):
                makes_right.append(name)
        except SouffleError:
            continue
    return tuple(makes_right)
