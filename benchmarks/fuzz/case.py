"""A network with its inputs, as an object, as plain data and as a small text file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf import json_format
from onnx import numpy_helper

__all__ = ["Case", "case_data", "case_of", "operators_of", "read_case", "write_case", "write_case_data"]


@dataclass(frozen=True, eq=False)
class Case:
    """What is compiled and run.

    Attributes
    ----------
    model : onnx.ModelProto
    inputs : dict of str to array
        A value for each graph input.
    note : str
        Where it comes from, for people.
    """

    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    note: str = ""


def operators_of(model: onnx.ModelProto) -> Counter[str]:
    """How often each operator stands in the graph."""
    return Counter(node.op_type for node in model.graph.node)


def case_data(case: Case) -> dict[str, Any]:
    """A case as JSON has it."""
    inputs = {
        name: json_format.MessageToDict(numpy_helper.from_array(array, name)) for name, array in case.inputs.items()
    }
    return {"note": case.note, "inputs": inputs, "model": json_format.MessageToDict(case.model)}


def case_of(data: Mapping[str, Any]) -> Case:
    """A case from what :func:`case_data` gave."""
    inputs = {
        name: numpy_helper.to_array(json_format.ParseDict(tensor, onnx.TensorProto()))
        for name, tensor in data["inputs"].items()
    }
    return Case(json_format.ParseDict(data["model"], onnx.ModelProto()), inputs, data.get("note", ""))


def write_case(case: Case, path: Path, **facts: object) -> None:
    """Write a case as JSON text.

    Parameters
    ----------
    case : Case
    path : Path
    facts
        Anything else worth keeping, such as what went wrong.
    """
    write_case_data(case_data(case), path, **facts)


def write_case_data(data: Mapping[str, Any], path: Path, **facts: object) -> None:
    """As :func:`write_case`, from what :func:`case_data` gave."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"note": data["note"], **facts, "inputs": data["inputs"], "model": data["model"]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_case(path: Path) -> Case:
    """Read what :func:`write_case` wrote."""
    return case_of(json.loads(path.read_text()))
