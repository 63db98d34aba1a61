"""``--batch``, ``--dim`` and ``--constant``: what commands are given about a model; and padding, and threads."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from souffle.errors import OptionError
from souffle.options import INTEGERS

__all__ = ["add_model_options", "add_padding", "add_threads", "import_options", "model_options", "padding_of"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options ``--batch``, ``--dim`` and ``--constant``."""
    parser.add_argument("--batch", type=int, help="value of a symbolic first dimension")
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_dimension,
        metavar="NAME=N[,N...]",
        help="value of an open dimension, once for each; with several values, a version for each combination",
    )
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE|x.npy",
        help="value of an input, which the network then has as a constant, such as axes=[0,1]; once for each",
    )


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`souffle.compile` takes as ``batch``, ``dims`` and ``constants``.

    Raises
    ------
    OptionError
        If a dimension or an input is named twice, or the value of an input cannot be read.
    """
    dims: dict[str, int | list[int]] = {}
    for name, values in arguments.dim:
        if name in dims:
            raise OptionError(f"--dim names {name!r} twice; give all of its values at once, as in --dim {name}=1,4")
        dims[name] = values if len(values) > 1 else values[0]
    constants: dict[str, Any] = {}
    for item in arguments.constant:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise OptionError(f"--constant {item!r} is not of the form NAME=VALUE, such as axes=[0,1] or k=k.npy")
        if name in constants:
            raise OptionError(f"--constant gives {name!r} two values; give it one")
        constants[name] = _array(name, value) if value.endswith(".npy") else _number(name, value)
    return {"batch": arguments.batch, "dims": dims or None, "constants": constants or None}


def import_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`souffle.import_onnx` takes: :func:`model_options`, and whether products are computed on integers."""
    return model_options(arguments) | {"integers": INTEGERS not in arguments.disable}


def add_padding(parser: argparse.ArgumentParser) -> None:
    """What a network of versions does with inputs of other shapes."""
    parser.add_argument(
        "--pad", action="store_true", help="with versions: inputs of other shapes are made larger, and outputs cut back"
    )
    parser.add_argument(
        "--pad-only", action="append", default=[], metavar="NAME", help="as --pad, along this open dimension alone"
    )
    parser.add_argument(
        "--pad-value",
        action="append",
        default=[],
        type=_padding_value,
        metavar="INPUT=X",
        help="what is put there, instead of 0",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """With how many threads a network for the CPU computes."""
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of a network for the CPU, at most (default: as it was compiled; cores that this process may use)",
    )


def padding_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`souffle.compile` takes of padding."""
    return {"pad": arguments.pad_only or arguments.pad, "pad_values": dict(arguments.pad_value)}


def _dimension(text: str) -> tuple[str, list[int]]:
    name, separator, values = text.rpartition("=")
    try:
        if not separator or not name:
            raise ValueError
        return name, [int(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=128 or NAME=128,384") from None


def _padding_value(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if not name:
            raise ValueError
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INPUT=0.5") from None
    try:
        return name, int(value)
    except ValueError:
        return name, number


def _array(name: str, path: str) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"--constant {name}: {path} cannot be read as a .npy file: {error}") from error


def _number(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"--constant {name}: {text!r} is neither a number, true, false, a list of these, such as [0,1], nor the "
            "path of a .npy file"
        ) from error
