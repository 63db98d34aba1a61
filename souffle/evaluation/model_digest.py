"""Whether a model is still the one that results are of."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

__all__ = ["model_digest"]


def model_digest(path: str | Path) -> str:
    """A digest of an ONNX file and of the files beside it that hold its tensors; empty where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            content = file.read()
        digest.update(content)
        model = onnx.load_model_from_string(content)
        beside = {
            entry.value
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
            for entry in tensor.external_data
            if entry.key == "location"
        }
        for name in sorted(beside):
            with open(Path(path).parent / name, "rb") as file:
                for part in iter(lambda: file.read(1 << 20), b""):
                    digest.update(part)
    except (OSError, DecodeError):
        return ""  # the import says what is wrong
    return digest.hexdigest()
