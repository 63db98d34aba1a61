"""``souffle compile|run|explain|check|ablate|tune|measure-device``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import souffle
from souffle.cli.ablate import ablate
from souffle.cli.check import check
from souffle.cli.counts import counts_table
from souffle.cli.measure_device import add_arguments as add_measure_device
from souffle.cli.output import Progress, format_table, human_bytes, write_json
from souffle.cli.tune import add_arguments as add_tune
from souffle.errors import InputError, SouffleError
from souffle.pipeline import REDUCTIONS
from souffle.runtime.explain import explain_data

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns
    -------
    int
        The exit status: 0, 1 where a check found a mismatch, 2 for an error of the user.
    """
    arguments = _parser().parse_args(argv)
    progress = Progress(arguments.quiet)
    try:
        return arguments.command(arguments, progress)
    except SouffleError as error:
        progress.done()
        print(f"souffle: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="souffle", description="Compile ONNX models to as few CUDA kernels as the GPU allows."
    )
    parser.add_argument("--version", action="version", version=f"souffle {souffle.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON on stdout")
    common.add_argument("--quiet", action="store_true", help="no progress on stderr")

    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--precision", choices=("fp32", "mixed"), default="fp32")
    options.add_argument("--partition", metavar="PLANNER", default="souffle", help="decides where kernels end")
    options.add_argument(
        "--reductions", choices=REDUCTIONS, default="ordered", help="whether long reductions may take two phases"
    )
    options.add_argument("--arch", help="GPU architecture, such as sm_90 (default: that of the GPU at hand, or sm_90)")
    options.add_argument("--batch", type=int, help="value of a symbolic first dimension")

    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("model", metavar="MODEL", help="an ONNX file")
    one.add_argument("--level", choices=("V0", "V1", "V2", "V3", "V4"), default="V4")
    one.add_argument("--target", choices=("auto", "cuda", "cpu"), default="cuda")
    one.add_argument("--tuning-log", metavar="DIR", default="auto", help='folder of tuning logs, or "none"')
    one.add_argument("--no-cubin", action="store_true", help="emit CUDA text only; no CUDA compiler is needed")

    command = commands.add_parser("compile", parents=[common, options, one], help="compile a model and save it")
    command.add_argument("-o", "--output", metavar="FILE", help="the .souffle file (default: beside the model)")
    command.set_defaults(command=_compile)

    command = commands.add_parser("run", parents=[common], help="run a saved network")
    command.add_argument("file", metavar="FILE", help="a .souffle file")
    command.add_argument("--input", action="append", default=[], metavar="NAME=x.npy", help="once for each input")
    command.add_argument("--output", metavar="y.npz", help="where to write the outputs")
    command.add_argument("--device", default="auto", help='"cuda", or "cpu" for the CUDA text on the CPU')
    command.add_argument("--checked", action="store_true", help="on the CPU, look at every memory access")
    command.add_argument("--counts", action="store_true", help="with --checked (implied), print what each kernel moved")
    command.set_defaults(command=_run)

    command = commands.add_parser("explain", parents=[common, options, one], help="print decisions with their reasons")
    command.set_defaults(command=_explain)

    command = commands.add_parser(
        "check", parents=[common, options], help="compile at every level, run, compare with ONNX Runtime"
    )
    command.add_argument("model", metavar="MODEL", help="an ONNX file")
    command.add_argument("--levels", nargs="+", default=["V0", "V1", "V2", "V3", "V4"], metavar="V")
    command.add_argument("--shuffled", type=int, default=0, metavar="N", help="also run in N shuffled thread orders")
    command.add_argument("--checked", action="store_true", help="also look at every memory access on the CPU")
    command.add_argument("--seed", type=int, default=0, help="of the random inputs")
    command.set_defaults(command=check)

    command = commands.add_parser("ablate", parents=[common, options], help="the table V0 to V4")
    command.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files")
    command.add_argument("--no-run", action="store_true", help="compile only; no outputs are compared")
    command.add_argument("--no-cubin", action="store_true", help="do not run nvcc; no registers are reported")
    command.add_argument("--seed", type=int, default=0, help="of the random inputs")
    command.set_defaults(command=ablate)

    add_tune(commands.add_parser("tune", parents=[common, options], help="search schedules and write a tuning log"))

    add_measure_device(
        commands.add_parser("measure-device", parents=[common], help="describe the GPU at hand for the cost model")
    )
    return parser


def _network(arguments: argparse.Namespace, progress: Progress):
    return souffle.compile(
        arguments.model,
        level=arguments.level,
        target=arguments.target,
        arch=arguments.arch,
        precision=arguments.precision,
        partition=arguments.partition,
        reductions=arguments.reductions,
        batch=arguments.batch,
        tuning_log=None if arguments.tuning_log == "none" else arguments.tuning_log,
        cubin=not arguments.no_cubin,
        progress=progress,
    )


def _compile(arguments: argparse.Namespace, progress: Progress) -> int:
    network = _network(arguments, progress)
    path = Path(arguments.output or Path(arguments.model).with_suffix(".souffle"))
    progress(f"saving {path}")
    network.save(path)
    progress.done()
    plan = network.plan
    if arguments.json:
        kernels = [
            {
                "name": k.name,
                "grid": k.grid,
                "block": k.block,
                "registers": k.registers,
                "shared_bytes": k.shared_bytes,
                "spill_bytes": k.spill_bytes,
                "grid_syncs": k.grid_syncs,
                "launches": k.launches,
                "tes": k.tes,
            }
            for k in network.kernels
        ]
        write_json({"file": str(path), "arch": plan.arch, "launches": len(plan.launches), "kernels": kernels})
        return 0
    rows = [
        (k.name, k.launches, k.grid[0], k.block[0], _or_dash(k.registers), k.shared_bytes, k.grid_syncs, len(k.tes))
        for k in network.kernels
    ]
    print(format_table(("kernel", "launches", "tiles", "threads", "registers", "shared B", "syncs", "TEs"), rows))
    size = human_bytes(path.stat().st_size)
    print(f"{path}: {len(plan.launches)} launches of {len(plan.kernels)} kernels for {plan.arch}, {size}")
    return 0


def _or_dash(value: int | None) -> int | str:
    return "-" if value is None else value


def _explain(arguments: argparse.Namespace, progress: Progress) -> int:
    network = _network(arguments, progress)
    progress.done()
    if arguments.json:
        write_json(explain_data(network.plan))
    else:
        print(network.explain())
    return 0


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    options = {"checked": True} if arguments.checked or arguments.counts else {}
    network = souffle.load(arguments.file, device=arguments.device, **options)
    inputs = {}
    for item in arguments.input:
        name, separator, path = item.partition("=")
        if not separator:
            raise InputError(
                f"--input {item!r} is not of the form NAME=x.npy; {network.plan.name} takes {network.signature}"
            )
        inputs[name] = _read_array(name, path)
    progress("running")
    outputs = {name: np.asarray(value) for name, value in network(inputs).items()}
    progress.done()
    if arguments.output:
        np.savez(arguments.output, **outputs)
    if arguments.json:
        record = {name: {"shape": value.shape, "dtype": str(value.dtype)} for name, value in outputs.items()}
        if arguments.counts:
            record = {"outputs": record, "launches": [dataclasses.asdict(report) for report in network.counts]}
        write_json(record)
        return 0
    rows = [
        (name, value.dtype, "x".join(map(str, value.shape)) or "scalar", _range(value))
        for name, value in outputs.items()
    ]
    print(format_table(("output", "type", "shape", "min .. max"), rows))
    if arguments.counts:
        print(counts_table(network.counts))
    return 0


def _range(value: np.ndarray) -> str:
    return f"{value.min():.6g} .. {value.max():.6g}" if value.size else "empty"


def _read_array(name: str, path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"input {name!r}: {path} cannot be read as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"input {name!r}: {path} is an .npz archive; give one .npy file for each input")
    return array
