"""The arguments of the commands that make tables; they need no compiler, which the commands import when they run."""

from __future__ import annotations

import argparse

__all__ = ["add_ablate", "add_reproduce"]


def add_ablate(parser: argparse.ArgumentParser) -> None:
    """Those of ``souffle ablate``, beside the compiler's."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files")
    parser.add_argument("--each", action="store_true", help="also V4 without each thing that keeps tensors on chip")
    parser.add_argument(
        "--planners",
        type=_names,
        metavar="NAME,...",
        default=(),
        help='also V0 and V4 by other fusion planners, or "all" of them',
    )
    parser.add_argument(
        "--out", metavar="FILE.json", help="keep each row when it is there; given again, go on with what is missing"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw a bar for each row, of its stages and waits")
    parser.add_argument("--force", action="store_true", help="make all rows anew; write over what is something else")
    parser.add_argument("--no-run", action="store_true", help="compile only; no outputs are compared")
    parser.add_argument("--no-cubin", action="store_true", help="do not run nvcc; no registers are reported")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")


def add_reproduce(parser: argparse.ArgumentParser) -> None:
    """Those of ``souffle reproduce``."""
    parser.add_argument("tables", nargs="+", metavar="TABLE", help='such as table4 or figure6, or "all"')
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        default="souffle-results",
        help="keep each row when it is there; given again, go on with what is missing (default: %(default)s)",
    )
    parser.add_argument("--size", choices=("paper", "tiny"), default="paper", help='"tiny" to try the command out')
    parser.add_argument("--arch", help="compile for this one (default: that of the GPU, or of the paper's A100)")
    parser.add_argument("--no-cubin", action="store_true", help="do not run nvcc; registers are assumed")
    parser.add_argument(
        "--on", metavar="WHERE", help="local:N (default: local:2, with a GPU local:1), here, ray, ray://HOST:PORT"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at a time: short for --on local:N")
    parser.add_argument(
        "--evaluations", type=int, default=200, metavar="N", help="orders that annealing tries (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="make all rows anew")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
