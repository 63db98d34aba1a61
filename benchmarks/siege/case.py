"""A kernel or several with their stages, tensors and launches, as an object and as a small text file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import ir as ir_script
from tvm.script import tirx as tirx_script

from benchmarks.siege.body import ARCH, as_kernel, as_stage
from souffle.codegen.cuda import text_of_functions
from souffle.codegen.dataflow import Dataflow, StageUse
from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan
from souffle.options import Options
from souffle.schedule.lower import cuda_target

__all__ = ["Case", "plan_of", "read_case", "text_of", "write_case"]

_MARK = "# plan: "
_FUNCTION = "@T.prim_func"
_DEFINES = "defines_"


@dataclass(frozen=True, eq=False)
class Case:
    """Everything that is proven and run.

    Attributes
    ----------
    kernels, functions : mapping of str to PrimFunc
        By name; kernels call functions.
    plan : Plan
        Without text; its kernels lie in one module.
    definitions : mapping of str to (PrimFunc, int, int)
        What functions are to compute, with their tiles and threads; not of all.
    note : str
        For people.
    """

    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    plan: Plan
    definitions: Mapping[str, tuple[tirx.PrimFunc, int, int]] = field(default_factory=dict)
    note: str = ""

    def emitted(self, text: str = "") -> Plan:
        """The plan with its text, or with one that holds it.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            From TVM, if no text can be made of it.
        """
        return replace(self.plan, modules=(CudaModule(text or text_of([self]), b""),))

    def inputs(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Whole numbers for all inputs: small ones as floats; integers that leave the tensors, too."""
        draw = np.random.default_rng(seed)
        found = []
        for buffer in self.plan.buffers:
            if buffer.kind == "input":
                size = buffer.shape[0]
                low, high = (-300, 300) if buffer.dtype == "float32" else (-size // 4, size + size // 4 + 1)
                found.append(draw.integers(low, high, buffer.shape).astype(buffer.dtype))
        return tuple(found)


def text_of(cases: Sequence[Case]) -> str:
    """One CUDA text of several cases, whose names differ.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        From TVM.
    """
    kernels = {name: func for case in cases for name, func in case.kernels.items()}
    functions = {name: func for case in cases for name, func in case.functions.items()}
    return text_of_functions(kernels, functions, cuda_target(ARCH))


def _bare(func: tirx.PrimFunc, name: str) -> str:
    """The script of a function, without what all of a kind have."""
    plain = func.with_attr("global_symbol", name)
    for attribute in ("target", "calling_conv", "tirx.is_global_func"):
        plain = plain.without_attr(attribute)
    return "\n".join(line for line in plain.script().splitlines() if not line.startswith("#")).strip()


def write_case(case: Case, path: Path, *comments: str) -> None:
    """Write a case as TensorIR script, with its plan in a comment."""
    plan = case.plan
    told = {
        "buffers": [asdict(b) for b in plan.buffers],
        "kernels": [
            {k: v for k, v in asdict(one).items() if k not in ("predicted", "barriers", "resources")}
            for one in plan.kernels
        ],
        "launches": [asdict(one) for one in plan.launches],
        "workspace_bytes": plan.workspace_bytes,
        "grid_barrier": plan.options.grid_barrier,
        "dataflow": None if plan.dataflow is None else asdict(plan.dataflow),
        "defined": {name: [tiles, threads] for name, (_, tiles, threads) in case.definitions.items()},
    }
    head = [f"# {line}" for text in (case.note, *comments) if text for line in text.splitlines()]
    functions = [_bare(func, name) for name, func in (*case.functions.items(), *case.kernels.items())]
    functions += [_bare(func, _DEFINES + name) for name, (func, _, _) in case.definitions.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n\n".join(["\n".join([*head, _MARK + json.dumps(told)]), *functions]) + "\n")


def read_case(path: Path) -> Case:
    """Read what :func:`write_case` wrote."""
    head, *scripts = path.read_text().split(_FUNCTION)
    told = json.loads(next(line for line in head.splitlines() if line.startswith(_MARK))[len(_MARK) :])
    buffers = tuple(Buffer(**{**b, "shape": tuple(b["shape"]), "counts": ()}) for b in told["buffers"])
    kernels = tuple(
        Kernel(**{**k, "stages": tuple(k["stages"]), "tes": tuple(k["tes"])}, resources=None) for k in told["kernels"]
    )
    launches = tuple(
        Launch(**{**n, "buffers": tuple(n["buffers"]), "tes": (), "touched": ()}) for n in told["launches"]
    )
    names = {kernel.name for kernel in kernels}
    found: dict[str, tirx.PrimFunc] = {}
    defined: dict[str, tirx.PrimFunc] = {}
    variables: dict[str, object] = {"T": tirx_script, "I": ir_script}
    for script in scripts:
        func = tvm.script.from_source(_FUNCTION + script, extra_vars=dict(variables))
        name = str(func.attrs["global_symbol"])
        if name.startswith(_DEFINES):
            defined[name.removeprefix(_DEFINES)] = func
            continue
        variables[name] = tvm.ir.GlobalVar(name)
        found[name] = as_kernel(_normal(func)) if name in names else as_stage(_normal(func))
    note = "\n".join(line[2:] for line in head.splitlines() if line.startswith("# ") and not line.startswith(_MARK))
    plan = plan_of(buffers, kernels, launches, told["workspace_bytes"], told["grid_barrier"])
    if told.get("dataflow") is not None:
        plan = replace(plan, dataflow=_dataflow(told["dataflow"]))
    functions = {name: func for name, func in found.items() if name not in names}
    definitions = {name: (func, *told["defined"][name]) for name, func in defined.items()}
    return Case({k.name: found[k.name] for k in kernels}, functions, plan, definitions, note)


def plan_of(
    buffers: tuple[Buffer, ...],
    kernels: tuple[Kernel, ...],
    launches: tuple[Launch, ...],
    workspace_bytes: int,
    grid_barrier: str,
) -> Plan:
    """A plan without text."""
    empty = (CudaModule("", b""),)
    options = Options(level="V3", arch=ARCH, grid_barrier=grid_barrier)
    return Plan("siege", options, buffers, {}, empty, kernels, launches, workspace_bytes, ())


def _dataflow(told: Mapping[str, Sequence]) -> Dataflow:
    def pairs(name: str) -> tuple[tuple, ...]:
        return tuple(tuple(pair) for pair in told[name])

    def use(one: Mapping[str, Sequence]) -> StageUse:
        functions = tuple(tuple(map(tuple, forms)) for forms in one["functions"])
        return StageUse(functions, tuple(one["inputs"]), tuple(one["outputs"]))

    edges = (pairs(name) for name in ("tensors", "inputs", "constants", "outputs"))
    return Dataflow(*edges, tuple(map(use, told["items"])))


def _normal(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A parsed function: the parser adds arguments to barriers, and folds the turns of a loop over one tile."""

    def plain(node: tvm.ir.Call) -> tvm.ir.Call:
        if str(getattr(node.op, "name", "")) == "tirx.tvm_storage_sync":
            return tirx.call_intrin("int32", "tirx.tvm_storage_sync", node.args[0].value)
        return node

    def unfolded(node: tirx.For) -> tirx.For:
        blocks = func.params[-1]
        if not node.loop_var.name.startswith("it") or not isinstance(node.extent, tirx.IntImm):
            return node
        return tirx.For(node.loop_var, node.min, tirx.Div(blocks, blocks), node.kind, node.body)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tvm.ir.Call, plain), (tirx.For, unfolded)]))
