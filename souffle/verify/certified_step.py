"""The certificate as a step of the compiler: what it made is proven, or compilation fails with the counterexample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from souffle.certificate import REFUTED, VALUES, Certificate, Section
from souffle.codegen.plan import Plan
from souffle.errors import CertificateError
from souffle.verify.bare import bare_functions
from souffle.verify.certify import certify, functions_of
from souffle.verify.values import StageText, compare_stages, values_section

if TYPE_CHECKING:
    from tvm import tirx

    from souffle.codegen.assemble import CompiledKernels
    from souffle.codegen.definitions import StageDefinition

__all__ = ["certified", "of_what_runs", "values_of"]

_EDITED = "a hook replaced the text of its module, and the proof is of the TensorIR, not of the text that runs"


def certified(
    compiled: CompiledKernels, verify: str, progress: Callable[[str], None] = lambda message: None
) -> CompiledKernels:
    """A compiled network with its certificate in the plan.

    Parameters
    ----------
    compiled : CompiledKernels
    verify : str
        One of :data:`souffle.certificate.CHECKS`: ``"memory"``, ``"values"`` for a comparison of the stages with
        their definitions beside it, or ``"off"`` for no certificate.
    progress : callable
        Told what is being done.

    Raises
    ------
    CertificateError
        With the counterexamples, if the network is refuted. What cannot be decided is kept with its reasons.
    """
    if verify == "off":
        return compiled
    progress(f"proving {len(compiled.plan.kernels)} kernels")
    certificate = certify(compiled)
    if verify == "values":
        values = values_of(
            compiled.plan,
            {merged.name: merged.func for merged in compiled.merged},
            functions_of(compiled),
            compiled.definitions,
            progress,
        )
        certificate = replace(certificate, others=(*certificate.others, values))
    certificate = of_what_runs(certificate, compiled.plan)
    if certificate.verdict == REFUTED:
        found = "\n".join(str(one) for one in certificate.counterexamples)
        raise CertificateError(
            f"what was compiled of {compiled.plan.name} is wrong, and is not handed out:\n{found}\nThis is a bug of "
            'Souffle, not of the model: please report it with the model and these lines. verify="off" compiles '
            "without the certificate; the network may then give wrong results",
            certificate,
        )
    return replace(compiled, plan=replace(compiled.plan, certificate=certificate))


def values_of(
    plan: Plan,
    kernels: Mapping[str, tirx.PrimFunc],
    functions: Mapping[str, tirx.PrimFunc],
    definitions: Sequence[StageDefinition],
    progress: Callable[[str], None] = lambda message: None,
) -> Section:
    """Whether the stages of a network compute what they are to (:mod:`souffle.verify.values`).

    Parameters
    ----------
    plan : Plan
        Whose kernels call the stages.
    kernels, functions : mapping of str to PrimFunc
        By their names in the text.
    definitions : sequence of StageDefinition
    progress : callable
        Told what is being done.

    Returns
    -------
    Section
        Undecided where a kernel calls what no definition speaks of.
    """
    functions = bare_functions(kernels, functions)
    stages = [
        StageText(
            tuple(name for name, _, _ in one.functions),
            one.func,
            tuple((functions[name], tiles, threads) for name, tiles, threads in one.functions),
        )
        for one in definitions
        if all(name in functions for name, _, _ in one.functions)
    ]
    section = values_section(compare_stages(stages, progress=progress))
    kernel_of = {stage: kernel.name for kernel in reversed(plan.kernels) for stage in kernel.stages}
    wrong = tuple(replace(one, kernel=kernel_of.get(one.stages[0], "")) for one in section.counterexamples)
    defined = {name for stage in stages for name in stage.names}
    unknown = tuple(f"nothing says what {name} is to compute" for name in kernel_of if name not in defined)
    return replace(section, name=VALUES, counterexamples=wrong, unknown=(*section.unknown, *unknown))


def of_what_runs(certificate: Certificate, plan: Plan) -> Certificate:
    """A certificate of a plan's TensorIR, undecided where the text that runs is another one."""
    edited = {kernel.name for kernel in plan.kernels if plan.modules[kernel.module].edited}
    if not edited:
        return certificate
    kernels = tuple(s.undecided(_EDITED) if s.name in edited else s for s in certificate.kernels)
    why = f"{', '.join(sorted(edited))}: {_EDITED}"
    others = tuple(section.undecided(why) for section in certificate.others)
    return replace(certificate, kernels=kernels, launches=certificate.launches.undecided(why), others=others)
