"""Makes a failing network small, while it goes on failing in the same way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.fuzz.case import Case, case_data, case_of, write_case
from benchmarks.fuzz.oracle import ORACLE_ERRORS, all_tensors
from benchmarks.fuzz.targets import failure_class
from benchmarks.fuzz.trying import Limits, try_case
from souffle.workers import Engine
from souffle.workers.cases import Cases

__all__ = ["minimize", "minimize_file"]


def minimize_file(path: Path, small: Path, engine: Engine, limits: Limits, limit: float = 240.0) -> str:
    """Make a saved failure small.

    Parameters
    ----------
    path : Path
        As a campaign wrote it.
    small : Path
        Where the small one goes.
    engine : Engine
    limits : Limits
        Of one trial.
    limit : float
        Seconds in all.

    Returns
    -------
    str
        What came of it, for people.
    """
    record = json.loads(path.read_text())
    target = record["target"]
    seed, wanted = int(path.name.split("-")[0]), []

    def fails(case: Case) -> bool:
        trial = try_case(case_data(case), seed, [target], limits, path.name)
        ((_, tried),) = Cases(engine, [("", trial)])
        outcome = tried["outcomes"].get(target, {"kind": "none", "detail": ""})
        undecided = record["kind"] == "UNKNOWN" and outcome.get("verdict") == "UNKNOWN"
        seen = "UNKNOWN" if undecided else failure_class(target, outcome["kind"], outcome["detail"])
        if not wanted:
            wanted.append(seen)
        return seen == wanted[0]

    case = case_of(record)
    fails(case)
    if record["kind"] not in wanted[0].split(":")[0].split():
        return f"does not fail any more ({wanted[0]})"
    case = minimize(case, fails, limit)
    write_case(case, small, target=target, kind=record["kind"], detail=record["detail"])
    return f"{len(case.model.graph.node)} nodes: {' '.join(n.op_type for n in case.model.graph.node)} ({wanted[0]})"


def minimize(case: Case, fails: Callable[[Case], bool], limit: float = 240.0) -> Case:
    """The smallest case found that fails.

    Parameters
    ----------
    case : Case
    fails : callable
        Whether a case fails as the first one did.
    limit : float
        Seconds.
    """
    end = time.monotonic() + limit
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for step in (_fewer_outputs, _later_start, _bypassed, _smaller, _plainer):
            going = True
            while going and time.monotonic() < end:
                going = False
                for candidate in step(case):
                    if time.monotonic() > end:
                        break
                    if _size(candidate) < _size(case) and fails(candidate):
                        case, progress, going = candidate, True, True
                        break
    return case


def _size(case: Case) -> tuple[int, ...]:
    graph = case.model.graph
    arrays = [*case.inputs.values(), *(numpy_helper.to_array(i) for i in graph.initializer)]
    plain = sum(int(np.unique(a).size > 1) for a in arrays)
    elements = sum(a.size for a in arrays)
    return len(graph.node), len(graph.output), elements, len(arrays), len(graph.input), plain


def rebuilt(case: Case, nodes: list, outputs: list[str], inputs: dict, constants: dict) -> Case | None:
    """A case of these parts, without what nothing needs; None where ONNX Runtime refuses it."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & {*node.output}:
            kept.append(node)
            needed |= {*node.input} | _captured(node)
    nodes = kept[::-1]
    made = {name for node in nodes for name in node.output}
    inputs = {name: array for name, array in inputs.items() if name in needed and name not in made}
    others = needed - made - inputs.keys()
    constants = {name: array for name, array in constants.items() if name in others}
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = helper.make_graph(
        nodes,
        case.model.graph.name,
        [_info(name, array) for name, array in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model.graph.CopyFrom(graph)
    candidate = Case(model, inputs, case.note)
    try:
        tensors = all_tensors(candidate)
    except ORACLE_ERRORS:
        return None
    del model.graph.output[:]
    model.graph.output.extend(_info(name, tensors[name]) for name in outputs)
    return candidate


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _captured(node: onnx.NodeProto) -> set[str]:
    return {n for a in node.attribute if a.type == onnx.AttributeProto.GRAPH for inner in a.g.node for n in inner.input}


def _parts(case: Case) -> tuple[list, list[str], dict, dict]:
    graph = case.model.graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    return list(graph.node), [o.name for o in graph.output], dict(case.inputs), constants


def _fewer_outputs(case: Case) -> Iterator[Case]:
    """One output alone; then a tensor inside as the only one, the earliest first; then one output less."""
    nodes, outputs, inputs, constants = _parts(case)
    inside = [name for node in nodes for name in node.output if name and node.op_type != "Constant"]
    trials = [[name] for name in inside] + [[o for o in outputs if o != name] for name in outputs if len(outputs) > 1]
    for chosen in trials:
        candidate = rebuilt(case, nodes, chosen, inputs, constants)
        if candidate is not None:
            yield candidate


def _later_start(case: Case) -> Iterator[Case]:
    """A tensor inside as an input with the value that it had, the latest first."""
    nodes, outputs, inputs, constants = _parts(case)
    tensors = all_tensors(case)
    for node in reversed(nodes):
        for name in node.output:
            if not name or name in outputs:
                continue
            others = [n for n in nodes if n is not node]
            left = [n for n in node.output if n and n != name]
            if any(n in {*m.input} for n in left for m in others):
                continue
            for constant in (False, True):
                more = {name: tensors[name]}
                arguments = (inputs, constants | more) if constant else (inputs | more, constants)
                candidate = rebuilt(case, others, outputs, *arguments)
                if candidate is not None:
                    yield candidate


def _bypassed(case: Case) -> Iterator[Case]:
    """A node left out: what reads it reads one of its operands of the same type."""
    nodes, outputs, inputs, constants = _parts(case)
    tensors = all_tensors(case)
    for position, node in enumerate(nodes):
        name = node.output[0]
        for operand in node.input:
            alike = operand in tensors and name in tensors and tensors[operand].dtype == tensors[name].dtype
            if not alike or name in outputs:
                continue
            changed = []
            for other in nodes[:position] + nodes[position + 1 :]:
                copy = onnx.NodeProto()
                copy.CopyFrom(other)
                for index, read in enumerate(copy.input):
                    if read == name:
                        copy.input[index] = operand
                changed.append(copy)
            candidate = rebuilt(case, changed, outputs, inputs, constants)
            if candidate is not None:
                yield candidate


def _smaller(case: Case) -> Iterator[Case]:
    """One extent smaller wherever it occurs, in shapes given as constants too."""
    nodes, outputs, inputs, constants = _parts(case)
    arrays = {**inputs, **constants}
    extents = sorted({extent for array in arrays.values() for extent in array.shape if extent > 1}, reverse=True)
    for extent in extents:
        for less in dict.fromkeys((1, 2, extent // 2, extent - 1)):
            if not 0 < less < extent:
                continue

            def cut(array: np.ndarray, extent: int = extent, less: int = less) -> np.ndarray:
                if array.dtype == np.int64 and array.ndim == 1 and extent in array:
                    return np.where(array == extent, less, array)
                return np.asarray(array[tuple(slice(less) if n == extent else slice(None) for n in array.shape)])

            candidate = rebuilt(
                case, nodes, outputs, {n: cut(a) for n, a in inputs.items()}, {n: cut(a) for n, a in constants.items()}
            )
            if candidate is not None:
                yield candidate


def _plainer(case: Case) -> Iterator[Case]:
    """One tensor of floats all ones, or an input as a constant."""
    nodes, outputs, inputs, constants = _parts(case)
    for name, array in {**inputs, **constants}.items():
        if array.dtype.kind == "f" and array.size and np.unique(array).size > 1:
            plain = {name: np.ones_like(array)}
            if name in inputs:
                candidate = rebuilt(case, nodes, outputs, inputs | plain, constants)
            else:
                candidate = rebuilt(case, nodes, outputs, inputs, constants | plain)
            if candidate is not None:
                yield candidate
