"""The cases of the onnx package: their models, their data, and what they are about."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from benchmarks.onnx_suite.outcomes import Subject

__all__ = ["KINDS", "SEVERAL", "DataSet", "case_data", "case_of", "model_and_data", "subject_of", "suite_cases"]

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted", "light")
SEVERAL = "several operators"
"""The operator of a case whose model has more than one."""
_LOADED_AS = {"light": "real"}
_PREFIX, _EXPANDED = "test_", "_expanded"
_PACKAGE = Path(onnx.__file__).parent.parent

DataSet = tuple[list[Any], list[Any]]
"""Inputs and expected outputs: arrays, lists of arrays for sequences, ``None`` for absent optionals."""


def suite_cases(kinds: Sequence[str]) -> tuple[dict[str, TestCase], int]:
    """The cases by name, without ``test_``, and how many are left out because the onnx package does not hold them."""
    cases, absent = {}, 0
    for kind in kinds:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            loaded = load_model_tests(kind=_LOADED_AS.get(kind, kind))
        for case in sorted(loaded, key=lambda case: case.name) if kind != "node" else loaded:
            if case.model is None and not _model_path(case).exists():
                absent += 1
            else:
                cases[case.name.removeprefix(_PREFIX)] = case
    return cases, absent


def _model_path(case: TestCase) -> Path:
    if case.model_dir is None:
        # Whole networks with small files; others have an address in the network, which no path is.
        return _PACKAGE / case.url
    return Path(case.model_dir) / "model.onnx"


def model_and_data(case: TestCase) -> tuple[onnx.ModelProto, list[DataSet]]:
    """The model of a case, and its data sets."""
    if case.model is not None:
        sets = [tuple([_value(value) for value in part] for part in data) for data in case.data_sets]
        return case.model, sets
    path = _model_path(case)
    model = onnx.load(path)
    if case.model_dir is None:
        return model, [_dummy_data(model, path)]
    sets = []
    for folder in sorted(path.parent.glob("test_data_set_*")):
        ends = (("input", model.graph.input), ("output", model.graph.output))
        sets.append(tuple([_read(file, info) for file, info in _files(folder, end, infos)] for end, infos in ends))
    return model, sets


def _files(folder: Path, end: str, infos: Sequence[onnx.ValueInfoProto]) -> list[tuple[Path, onnx.ValueInfoProto]]:
    count = len(list(folder.glob(f"{end}_*.pb")))
    return [(folder / f"{end}_{k}.pb", infos[k]) for k in range(count)]


def _value(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(path: Path, info: onnx.ValueInfoProto) -> Any:
    content = path.read_bytes()
    if info.type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if info.type.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _dummy_data(model: onnx.ModelProto, path: Path) -> DataSet:
    """What ONNX's runner gives a network that comes without inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [Runner.generate_dummy_data(info) for info in model.graph.input if info.name not in weights]
    stored = [path.with_name(f"{path.stem}_output_{k}.pb") for k in range(len(model.graph.output))]
    return inputs, [_read(file, info) for file, info in zip(stored, model.graph.output, strict=True)]


def case_data(case: TestCase) -> dict[str, Any]:
    """A case as plain data, with its model and its data sets, for who may have another onnx package or none."""
    model, sets = model_and_data(case)
    return {
        "name": case.name,
        "kind": case.kind,
        "rtol": case.rtol,
        "atol": case.atol,
        "model": model.SerializeToString(),
        "sets": pickle.dumps(sets, pickle.HIGHEST_PROTOCOL),
    }


def case_of(data: Mapping[str, Any]) -> TestCase:
    """A case from what :func:`case_data` gave."""
    model = onnx.ModelProto.FromString(data["model"])
    name, sets = data["name"], pickle.loads(data["sets"])
    return TestCase(name, name, None, None, model, sets, data["kind"], data["rtol"], data["atol"])


def subject_of(name: str, cases: Mapping[str, TestCase], model: onnx.ModelProto) -> Subject:
    """What the case of this name is about; `model` is its own."""
    kind = next(kind for kind in KINDS if _LOADED_AS.get(kind, kind) == cases[name].kind)
    about = model
    base = name.partition(_EXPANDED)[0]
    if base != name and base in cases:
        about, _ = model_and_data(cases[base])
    nodes = about.graph.node
    domain, operator = (nodes[0].domain, nodes[0].op_type) if len(nodes) == 1 else ("", SEVERAL)
    infos = [*about.graph.input, *about.graph.output]
    return Subject(kind, "" if domain == "ai.onnx" else domain, operator, _element_type(infos[0]) if infos else "")


def _element_type(info: onnx.ValueInfoProto) -> str:
    """The name of the element type of a value, whatever holds its tensors."""
    kind = info.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    element = kind.tensor_type.elem_type
    if element == onnx.TensorProto.STRING:
        return "string"
    return str(helper.tensor_dtype_to_np_dtype(element)) if element else ""
