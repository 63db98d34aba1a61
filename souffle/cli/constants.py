"""Values of a model's inputs on the command line, for commands that compile."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from souffle.errors import OptionError

__all__ = ["add_constants", "constants_of"]


def add_constants(parser: argparse.ArgumentParser) -> None:
    """The option that gives inputs their values."""
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE|x.npy",
        help="value of an input, which the network then has as a constant, such as axes=[0,1]; may be given several "
        "times",
    )


def constants_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`souffle.compile` takes as ``constants``.

    Raises
    ------
    OptionError
        If one is not of the form, or cannot be read.
    """
    constants = {}
    for item in arguments.constant:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise OptionError(f"--constant {item!r} is not of the form NAME=VALUE, such as axes=[0,1] or k=k.npy")
        if name in constants:
            raise OptionError(f"--constant gives {name!r} two values; give it one")
        constants[name] = _array(name, value) if value.endswith(".npy") else _number(name, value)
    return constants


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
