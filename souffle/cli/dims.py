"""``--dim NAME=1,4``: the values of open dimensions, which several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from souffle.errors import OptionError

__all__ = ["add_batch_and_dims", "add_padding", "dims_of", "padding_of"]


def add_batch_and_dims(parser: argparse.ArgumentParser) -> None:
    """The options ``--batch`` and ``--dim``."""
    parser.add_argument("--batch", type=int, help="value of a symbolic first dimension")
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_dimension,
        metavar="NAME=N[,N...]",
        help="value of an open dimension, once for each; with several values, a version for each combination",
    )


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
        type=_value,
        metavar="INPUT=X",
        help="what is put there, instead of 0",
    )


def _dimension(text: str) -> tuple[str, list[int]]:
    name, separator, values = text.rpartition("=")
    try:
        if not separator or not name:
            raise ValueError
        return name, [int(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=128 or NAME=128,384") from None


def _value(text: str) -> tuple[str, float]:
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


def dims_of(given: Sequence[tuple[str, list[int]]]) -> dict[str, int | list[int]] | None:
    """What :func:`souffle.compile` takes as ``dims``.

    Raises
    ------
    OptionError
        If a dimension is named twice.
    """
    names = [name for name, _ in given]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OptionError(f"--dim names {twice[0]!r} twice; give all of its values at once, as in --dim {twice[0]}=1,4")
    return {name: values if len(values) > 1 else values[0] for name, values in given} or None


def padding_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`souffle.compile` takes of padding."""
    return {"pad": arguments.pad_only or arguments.pad, "pad_values": dict(arguments.pad_value)}
