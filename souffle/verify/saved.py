"""Verify a saved network again, from what its file holds alone: the plan, the texts, and the TensorIR.

The chain has three links. The certificate proves the TensorIR; the text is, byte for byte, what TVM emits of that
TensorIR; and, where it is compiled again, the machine code is what nvcc makes of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import tvm
from tvm import tirx

from souffle.alone import one_at_a_time
from souffle.certificate import Certificate, Counterexample, Section
from souffle.codegen.nvcc import compile_cubin, compiler_version, find_nvcc
from souffle.codegen.plan import Plan, Resources
from souffle.codegen.tensor_ir import TensorIR, called_names, text_of_module, unpack
from souffle.errors import ArtifactError
from souffle.verify.certified_step import of_what_runs, values_of
from souffle.verify.certify import certify_plan
from souffle.verify.kept_functions import fills_registers
from souffle.verify.prologue_functions import only_copies

__all__ = ["verify_plan"]

_OF_THE_FOLDER = re.compile(rb"_INTERNAL_[0-9a-f]{8}_")
"""What nvcc puts into the names of static functions: a hash of the path of the folder that it ran in."""

_NO_PROGRAM = "the file does not say which tensors its stages are to be given: an older Souffle saved it"


@one_at_a_time
def verify_plan(
    plan: Plan,
    *,
    rebuild: bool = False,
    values: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Certificate:
    """Prove a plan again, and that its texts are those of the proven TensorIR.

    Parameters
    ----------
    plan : Plan
        As a file gave it (:func:`souffle.runtime.artifact.load`, which checks the members' hashes).
    rebuild : bool
        Also compile the texts, where nvcc is the version that made the machine code, and compare the results.
    values : bool
        Also compare the stages with what they are to compute (:mod:`souffle.verify.values`).
    progress : callable
        Told what is being done.

    Returns
    -------
    Certificate
        With a section for each text in ``others``, with ``values`` one before them, and with ``rebuild`` one for each
        cubin.

    Raises
    ------
    ArtifactError
        If the plan is not of CUDA kernels, or holds no TensorIR, or one of other kernels, or with ``values`` not what
        the stages are to compute.
    CudaCompileError
        If a text is compiled again and nvcc rejects it.
    """
    if plan.options.arch.startswith("llvm"):
        raise ArtifactError(f"{plan.name} was compiled for {plan.options.arch}; certificates are of CUDA kernels")
    if not plan.tensor_ir:
        raise ArtifactError(
            f"{plan.name} holds no TensorIR, which is what the proof is about: an older Souffle saved it; "
            "compile the model and save it again"
        )
    ir = unpack(plan.tensor_ir)
    _check_names(plan, ir)
    if values and ir.definitions is None:
        raise ArtifactError(
            f"{plan.name}: its TensorIR does not say what the stages are to compute, which is what values are compared "
            "with: an older Souffle saved it; compile the model and save it again"
        )
    texts = []
    for number in range(len(plan.modules)):
        progress(f"emitting text {number + 1} of {len(plan.modules)}")
        texts.append(_text(plan, number, ir))
    cubins, measured = _rebuilt(plan, progress) if rebuild else ((), {})
    # What the file says of registers is not believed, unless they were counted again.
    plan = replace(plan, kernels=tuple(replace(k, resources=measured.get(k.name)) for k in plan.kernels))
    progress(f"proving {len(plan.kernels)} kernels")
    certificate = certify_plan(plan, ir.kernels, ir.functions)
    if values:
        found = values_of(plan, ir.kernels, ir.functions, ir.definitions, progress)
        certificate = replace(certificate, others=(found,))
    certificate = of_what_runs(certificate, plan)
    if plan.dataflow is None:
        launches = certificate.launches
        certificate = replace(certificate, launches=replace(launches, unknown=(*launches.unknown, _NO_PROGRAM)))
    return replace(certificate, others=(*certificate.others, *texts, *cubins))


def _is_stage(function: tirx.PrimFunc) -> bool:
    """Whether a function is no part of a stage alone, which fills its registers or makes its first copies."""
    return not fills_registers(function) and not only_copies(function)


def _check_names(plan: Plan, ir: TensorIR) -> None:
    """Both speak of the same kernels, and of the same stages in them."""
    for kernel in plan.kernels:
        if kernel.name not in ir.kernels:
            raise ArtifactError(f"{plan.name}: its TensorIR holds no kernel {kernel.name}; save the network again")
        called = {n for n in called_names(ir.kernels[kernel.name]) if _is_stage(ir.functions[n])}
        if called != set(kernel.stages):
            differ = ", ".join(sorted(called ^ set(kernel.stages)))
            raise ArtifactError(
                f"{plan.name}: plan and TensorIR do not agree on the stages of kernel {kernel.name} ({differ}); "
                "save the network again"
            )


def _text(plan: Plan, number: int, ir: TensorIR) -> Section:
    module, name = plan.modules[number], f"text of module {number}"
    kernels = [kernel.name for kernel in plan.kernels if kernel.module == number]
    emitted = text_of_module(plan, number, ir)
    facts = (("bytes of text", len(module.text.encode())), ("kernels", len(kernels)))
    if module.text == emitted:
        return Section(name, (), (), facts)
    if module.edited:
        return Section(name, (), ("a hook replaced it after it was emitted",), facts)
    if ir.tvm != tvm.__version__:
        why = f"TVM {ir.tvm} emitted it, and TVM {tvm.__version__}, which emits another text, is here"
        return Section(name, (), (why,), facts)
    line, stored, wanted = _first_difference(module.text.split("\n"), emitted.split("\n"))
    found = Counterexample(
        rule="text",
        kernel=", ".join(kernels),
        stages=(),
        statements=(f"stored:  {stored}", f"emitted: {wanted}"),
        blocks=(),
        element=f"line {line}",
        reason="the text in the file is not the one that is emitted of the TensorIR that was proven",
    )
    return Section(name, (found,), (), facts)


def _first_difference(stored: Sequence[str], emitted: Sequence[str]) -> tuple[int, str, str]:
    """The number of the first line that differs, and both lines."""
    pairs = enumerate(zip_longest(stored, emitted, fillvalue="(the text has ended)"), 1)
    return next((number, one.strip(), other.strip()) for number, (one, other) in pairs if one != other)


def _rebuilt(plan: Plan, progress: Callable[[str], None]) -> tuple[list[Section], dict[str, Resources]]:
    """Whether machine code is what nvcc makes of the texts, and what it reports of the kernels."""
    nvcc = find_nvcc()
    here = compiler_version(nvcc).strip() if nvcc else ""
    sections: list[Section] = []
    measured: dict[str, Resources] = {}
    for number, module in enumerate(plan.modules):
        name, facts = f"machine code of module {number}", (("bytes of machine code", len(module.cubin)),)
        if not module.cubin:
            sections.append(Section(name, (), ("the file holds none: the network was compiled without",), facts))
        elif nvcc is None:
            sections.append(Section(name, (), ("no nvcc was found to compile the text again",), facts))
        elif here != plan.compiler:
            made, ours = _release(plan.compiler) or "an nvcc that the file does not name", _release(here)
            sections.append(Section(name, (), (f"{made} made it, and {ours} is here",), facts))
        else:
            progress(f"nvcc: module {number + 1} of {len(plan.modules)} for {plan.options.arch}")
            image, report = compile_cubin(module.text, plan.options.arch)
            measured |= report
            same = _OF_THE_FOLDER.sub(b"", image) == _OF_THE_FOLDER.sub(b"", module.cubin)
            kernels = ", ".join(kernel.name for kernel in plan.kernels if kernel.module == number)
            element = f"{len(module.cubin)} bytes in the file, {len(image)} compiled again"
            reason = f"it is not what {_release(here)} makes of the text"
            found = Counterexample("machine code", kernels, (), (), (), element, reason)
            sections.append(Section(name, () if same else (found,), (), facts))
    return sections, measured


def _release(version: str) -> str:
    """The line of a compiler's own words that names its release."""
    return next((line.strip() for line in version.splitlines() if "release" in line), version)
