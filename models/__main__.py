"""``python -m souffle.models NAME``: write one model to an ONNX file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx

from souffle.errors import SouffleError
from souffle.models.registry import ALL_NAMES, MODEL_SIZES, build

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for wrong arguments, 1 if the file cannot be written)."""
    parser = argparse.ArgumentParser(prog="python -m souffle.models", description="Write a model as an ONNX file.")
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(ALL_NAMES)}")
    parser.add_argument("--size", default="tiny", help=f"{' or '.join(MODEL_SIZES)} (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="number of time steps, for the LSTM models")
    parser.add_argument("--batch", type=int, help="images, sequences or rows at once, for models that take several")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument(
        "--open", action="store_true", help="leave batch and sequence open, with an attention mask, for bert"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: NAME-SIZE.onnx)")
    options = parser.parse_args(arguments)
    try:
        model = build(
            options.name,
            options.size,
            steps=options.steps,
            batch=options.batch,
            seed=options.seed,
            open_dimensions=options.open,
        )
    except SouffleError as error:
        parser.error(str(error))
    path = options.output or Path(f"{options.name.replace(':', '-')}-{options.size}.onnx")
    try:
        onnx.save(model, str(path))
    except OSError as error:
        print(f"{parser.prog}: error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    floats = (t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    parameters = sum(math.prod(t.dims) for t in floats)
    size = path.stat().st_size / 1e6
    print(f"{path}: {len(model.graph.node)} nodes, {parameters:,} parameters, {size:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
