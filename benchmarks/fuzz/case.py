"""A network with its inputs, as an object and as a small text file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf import json_format
from onnx import numpy_helper

__all__ = ["Case", "operators_of", "read_case", "write_case"]


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


def write_case(case: Case, path: Path, **facts: object) -> None:
    """Write a case as JSON text.

    Parameters
    ----------
    case : Case
    path : Path
    facts
        Anything else worth keeping, such as what went wrong.
    """
    inputs = {
        name: json_format.MessageToDict(numpy_helper.from_array(array, name)) for name, array in case.inputs.items()
    }
    model = json_format.MessageToDict(case.model)
    record = {"note": case.note, **facts, "inputs": inputs, "model": model}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_case(path: Path) -> Case:
    """Read what :func:`write_case` wrote."""
    record = json.loads(path.read_text())
    inputs = {
        name: numpy_helper.to_array(json_format.ParseDict(tensor, onnx.TensorProto()))
        for name, tensor in record["inputs"].items()
    }
    return Case(json_format.ParseDict(record["model"], onnx.ModelProto()), inputs, record.get("note", ""))
