"""The final TensorIR of a network as bytes, so that a saved network can be proven, and its text emitted, again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx

from souffle.codegen.cuda import text_of_functions
from souffle.codegen.definitions import StageDefinition
from souffle.codegen.plan import Plan
from souffle.errors import ArtifactError
from souffle.schedule.lower import cuda_target
from souffle.tvm_calls import structural_walk

__all__ = ["TensorIR", "called_names", "pack", "text_of_module", "unpack"]

_MAX_JSON = 1 << 30
"""Bytes that the packed form may grow to."""


@dataclass(frozen=True, eq=False)
class TensorIR:
    """Everything that the text of a network was emitted from, and what it is to compute.

    Attributes
    ----------
    kernels, functions : dict of str to PrimFunc
        By their names in the text.
    tvm : str
        The version of TVM that emitted the text.
    definitions : tuple of StageDefinition or None
        What the functions are to compute; ``None`` in files of before they were kept.
    """

    kernels: dict[str, tirx.PrimFunc]
    functions: dict[str, tirx.PrimFunc]
    tvm: str
    definitions: tuple[StageDefinition, ...] | None = None


def pack(
    kernels: Mapping[str, tirx.PrimFunc],
    functions: Mapping[str, tirx.PrimFunc],
    definitions: Sequence[StageDefinition] | None = None,
) -> bytes:
    """Kernels, the stage functions that they call, by name, and their definitions, as compressed JSON of TVM's."""
    content = {"tvm": tvm.__version__, "kernels": dict(kernels), "functions": dict(functions)}
    if definitions is not None:
        content["definitions"] = [{"stage": d.func, "functions": [list(f) for f in d.functions]} for d in definitions]
    return zlib.compress(tvm.ir.save_json(content).encode())


def unpack(data: bytes) -> TensorIR:
    """What :func:`pack` packed.

    Raises
    ------
    ArtifactError
        If it is not that, or a kernel calls a function that is not there.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _MAX_JSON)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ArtifactError(f"the TensorIR is cut short, or unpacks to more than {_MAX_JSON} bytes")
        content = tvm.ir.load_json(text.decode())
        kernels, functions = _functions(content, "kernels"), _functions(content, "functions")
        found = TensorIR(kernels, functions, str(content["tvm"]), _definitions(content))
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ArtifactError(f"the TensorIR cannot be read by TVM {tvm.__version__}: {error}") from error
    for name, kernel in found.kernels.items():
        missing = sorted(called_names(kernel) - set(found.functions))
        if missing:
            raise ArtifactError(f"kernel {name} of the TensorIR calls {', '.join(missing)}, which is not there")
    for name in (name for one in found.definitions or () for name, _, _ in one.functions):
        if name not in found.functions:
            raise ArtifactError(f"the TensorIR defines what {name} computes, which is not there")
    return found


def _functions(content: Mapping[str, object], key: str) -> dict[str, tirx.PrimFunc]:
    found = {str(name): func for name, func in content[key].items()}
    wrong = [name for name, func in found.items() if not isinstance(func, tirx.PrimFunc)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)} in its {key} is no function")
    return found


def _definitions(content: Mapping[str, object]) -> tuple[StageDefinition, ...] | None:
    if "definitions" not in content:
        return None
    found = []
    for one in content["definitions"]:
        listed = tuple((str(name), int(tiles), int(threads)) for name, tiles, threads in one["functions"])
        if not isinstance(one["stage"], tirx.PrimFunc) or not listed:
            raise TypeError("a definition of a stage is no function, or says of none what it computes")
        found.append(StageDefinition(one["stage"], listed))
    return tuple(found)


def text_of_module(plan: Plan, number: int, ir: TensorIR) -> str:
    """The text of a module, emitted anew.

    Raises
    ------
    ArtifactError
        If TVM emits none.
    """
    kernels = {kernel.name: ir.kernels[kernel.name] for kernel in plan.kernels if kernel.module == number}
    try:
        return text_of_functions(kernels, ir.functions, cuda_target(plan.options.arch))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ArtifactError(f"{plan.name}: TVM emits no text of its TensorIR: {error}") from error


def called_names(kernel: tirx.PrimFunc) -> set[str]:
    """The functions of the module that a kernel calls."""
    names: set[str] = set()

    def see(call: tvm.ir.Call) -> None:
        if isinstance(call.op, tvm.ir.GlobalVar):
            names.add(str(call.op.name_hint))

    structural_walk(kernel.body, (tvm.ir.Call, see))
    return names
