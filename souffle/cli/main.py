"""``souffle compile|run|verify|explain|check|ablate|reproduce|bench|debug|report|mutate|tune|log|learn|hfuse|...``.

What needs the compiler is imported by the command that needs it: ``souffle run`` works where TVM is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import souffle
from souffle.certificate import CHECKS
from souffle.cli.compiled import named_versions, print_compiled
from souffle.cli.compiler_options import compiler_options
from souffle.cli.counts import counts_table
from souffle.cli.hfuse import add_arguments as add_hfuse
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.later import add_bench, add_debug, add_log, command_in
from souffle.cli.learn import add_arguments as add_learn
from souffle.cli.measure_device import add_arguments as add_measure_device
from souffle.cli.model_options import add_model_options, add_padding, add_threads, model_options, padding_of
from souffle.cli.output import Progress, format_table, write_json
from souffle.cli.overwriting import ARCHIVE, add_force, check_output
from souffle.cli.table_arguments import add_ablate, add_reproduce
from souffle.cli.tune import add_arguments as add_tune
from souffle.element_types import SMALL_TYPES
from souffle.errors import InputError, SouffleError
from souffle.garbage import collect_rarely
from souffle.options import GRID_BARRIER_NAMES, LEVELS, PRECISIONS, REDUCTIONS, REUSE_POLICIES, SOUFFLE, SWITCHES, WAITS
from souffle.runtime import VersionedNetwork
from souffle.runtime.explain import explain_data

__all__ = ["command_parser", "entry", "main"]

_COMPILER = frozenset({"islpy", "onnx", "onnxscript", "tvm", "tvm_ffi"})
"""What only the compiler imports."""

_Parents = Sequence[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns
    -------
    int
        The exit status: 0; 1 where a check found a mismatch or the certificate refutes a network; 2 for an error of
        the user; 3 where ``verify`` could not decide; 130 after Ctrl-C.
    """
    arguments = command_parser().parse_args(argv)
    progress = Progress(arguments.quiet)
    return interruptible(lambda: _status(arguments, progress), progress)


def entry() -> None:
    """Run the command of this process and end it."""
    collect_rarely()
    run_process(main)


def _status(arguments: argparse.Namespace, progress: Progress) -> int:
    try:
        return status_of(lambda: arguments.command(arguments, progress), progress)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _COMPILER or progress.interrupted:
            raise
        progress.done()
        print(
            f"souffle: this command needs the compiler, and Python's package {missing} is not installed here; install "
            "all it needs with: pip install souffle-dl",
            file=sys.stderr,
        )
        return 2


def command_parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    parser = argparse.ArgumentParser(
        prog="souffle", description="Compile ONNX models to as few CUDA kernels as the GPU allows."
    )
    parser.add_argument("--version", action="version", version=f"souffle {souffle.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON on stdout")
    common.add_argument("--quiet", action="store_true", help="no progress on stderr")

    options, waits, proofs = _compiler_parsers()
    _add_compiling(commands, [common, options], [waits, proofs])
    _add_files(commands, common)
    _add_trials(commands, [common, options], [waits, proofs])
    add_tune(commands.add_parser("tune", parents=[common, options], help="search schedules and write a tuning log"))

    add_log(commands.add_parser("log", help="look at tuning logs, merge, shorten, try and convert them"), [common])
    add_learn(
        commands.add_parser("learn", parents=[common], help="train a policy that orders the fusions of networks")
    )
    add_hfuse(commands.add_parser("hfuse", parents=[common], help="fuse kernels of CUDA files into one"))
    command = commands.add_parser("doctor", parents=[common], help="what is installed here, and what is missing")
    command.set_defaults(command=command_in("souffle.cli.doctor", "doctor"))
    add_measure_device(
        commands.add_parser("measure-device", parents=[common], help="describe the GPU at hand for the cost model")
    )
    return parser


def _compiler_parsers() -> tuple[argparse.ArgumentParser, ...]:
    """The options of the compiler: those of all commands that form stages, of those that make kernels, and proofs."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--precision", choices=PRECISIONS, default="fp32")
    options.add_argument(
        "--fusion", metavar="PLANNER", default=SOUFFLE, help="decides which TEs one block computes together"
    )
    options.add_argument("--policy", metavar="FILE", help="of souffle learn, for --fusion learned (default: ours)")
    options.add_argument("--partition", metavar="PLANNER", default="souffle", help="decides where kernels end")
    options.add_argument(
        "--reductions",
        choices=REDUCTIONS,
        default="ordered",
        help="whether long reductions may take two phases",
    )
    options.add_argument(
        "--disable",
        action="append",
        choices=SWITCHES,
        default=[],
        help="leave this out of V4 (integers: of every level), to see its effect alone; may be given several times",
    )
    options.add_argument("--arch", help="GPU architecture, such as sm_90 (default: that of the GPU at hand, or sm_90)")
    add_model_options(options)

    waits = argparse.ArgumentParser(add_help=False)
    waits.add_argument(
        "--grid-barrier",
        choices=GRID_BARRIER_NAMES,
        default="counter",
        help="how the blocks of a kernel wait for each other (default: %(default)s)",
    )
    waits.add_argument(
        "--watchdog-ms",
        type=float,
        metavar="MS",
        help="a kernel ends, with an error that says where, when a block has waited so long for the others",
    )
    waits.add_argument(
        "--waits",
        choices=WAITS,
        default="auto",
        help="what stands between stages that depend on each other: barriers of all blocks, flags that tiles wait for "
        "wherever it is known which tiles they need, or at V4 what is predicted to take less",
    )
    waits.add_argument(
        "--reuse-policy",
        choices=REUSE_POLICIES,
        default="belady",
        help="which tensors stay in shared memory where not all have room",
    )
    waits.add_argument("--graph", action="store_true", help="the network is to run as one CUDA graph")

    proofs = argparse.ArgumentParser(add_help=False)
    proofs.add_argument("--verify", choices=CHECKS, default="memory", help="what is proven of the CUDA kernels")
    return options, waits, proofs


def _add_compiling(commands: Any, common: _Parents, kernels: _Parents) -> None:
    """The commands that compile one model."""
    one = argparse.ArgumentParser(add_help=False, parents=kernels)
    one.add_argument("model", metavar="MODEL", help="an ONNX file")
    one.add_argument("--level", choices=tuple(LEVELS), default="V4")
    one.add_argument("--target", choices=("auto", "cuda", "cpu"), default="cuda")
    one.add_argument("--tuning-log", metavar="DIR", default="auto", help='folder of tuning logs, or "none"')
    one.add_argument("--no-cubin", action="store_true", help="emit CUDA text only; no CUDA compiler is needed")

    add_threads(one)
    one.add_argument(
        "--processor",
        metavar="NAME,...",
        help="of a network for the CPU, such as x86-64-v3 (default: this one); for several, the file has code for each",
    )
    add_padding(one)

    command = commands.add_parser("compile", parents=[*common, one], help="compile a model and save it")
    command.add_argument("-o", "--output", metavar="FILE", help="the .souffle file (default: beside the model)")
    command.add_argument("--dump", metavar="DIR", help="a folder for what each stage of the compiler gives, as text")
    add_force(command)
    command.set_defaults(command=_compile)

    command = commands.add_parser(
        "explain", parents=[*common, one], help="print decisions with their reasons; of a .souffle file, those in it"
    )
    command.set_defaults(command=_explain)


def _add_files(commands: Any, common: argparse.ArgumentParser) -> None:
    """The commands about a saved network."""
    command = commands.add_parser("run", parents=[common], help="run a saved network")
    command.add_argument("file", metavar="FILE", help="a .souffle file")
    command.add_argument("--input", action="append", default=[], metavar="NAME=x.npy", help="once for each input")
    command.add_argument("--output", metavar="y.npz", help="where to write the outputs")
    add_force(command)
    command.add_argument("--device", default="auto", help='"cuda", or "cpu" for the CUDA text on the CPU')
    add_threads(command)
    command.add_argument("--checked", action="store_true", help="on the CPU, look at every memory access")
    command.add_argument("--counts", action="store_true", help="with --checked (implied), print what each kernel moved")
    command.set_defaults(command=_run)

    command = commands.add_parser("verify", parents=[common], help="prove a saved network again, from its file alone")
    command.add_argument("file", metavar="FILE", help="a .souffle file")
    command.add_argument(
        "--rebuild", action="store_true", help="also compile the text, with the same nvcc, and compare the machine code"
    )
    command.add_argument(
        "--values", action="store_true", help="also compare stages with what they are to compute, at random inputs"
    )
    command.set_defaults(command=command_in("souffle.cli.verify", "verify"))


def _add_trials(commands: Any, common: _Parents, kernels: _Parents) -> None:
    """The commands that compile a model several times, or in several ways."""
    command = commands.add_parser(
        "check", parents=[*common, *kernels], help="compile at every level, run, compare with ONNX Runtime"
    )
    command.add_argument("model", metavar="MODEL", help="an ONNX file")
    command.add_argument("--levels", nargs="+", default=list(LEVELS), metavar="V")
    command.add_argument("--file", metavar="FILE", help="compile nothing: run a .souffle file of the model")
    command.add_argument("--shuffled", type=int, default=0, metavar="N", help="also run in N shuffled thread orders")
    command.add_argument("--checked", action="store_true", help="also look at every memory access on the CPU")
    command.add_argument("--seed", type=int, default=0, help="of the random inputs")
    add_threads(command)
    command.set_defaults(command=command_in("souffle.cli.check", "check"))

    command = commands.add_parser("ablate", parents=[*common, *kernels], help="the table V0 to V4, and more rows")
    add_ablate(command)
    command.set_defaults(command=command_in("souffle.cli.ablate", "ablate"))

    add_bench(
        commands.add_parser("bench", parents=[*common, *kernels], help="time a model beside other compilers, in turn")
    )

    add_debug(commands.add_parser("debug", help="find where a network goes wrong"), [*common, kernels[0]])

    command = commands.add_parser(
        "report", parents=[*common, *kernels], help="write one HTML file that shows what was compiled and why"
    )
    command.add_argument("model", metavar="MODEL", help="an ONNX file, or a .souffle file")
    command.add_argument("-o", "--output", metavar="FILE", help="the HTML file (default: beside the model)")
    command.add_argument(
        "--levels", nargs="+", default=list(LEVELS), metavar="V", help="to compare; all else is of the last of them"
    )
    command.add_argument("--tuning-log", metavar="DIR", default="auto", help='folder of tuning logs, or "none"')
    command.add_argument("--no-cubin", action="store_true", help="do not run nvcc; no registers are reported")
    command.set_defaults(command=command_in("souffle.cli.report", "report"))

    command = commands.add_parser(
        "reproduce", parents=common[:1], help="tables and figures of the papers, with ours beside them"
    )
    add_reproduce(command)
    command.set_defaults(command=command_in("souffle.cli.reproduce", "reproduce"))

    command = commands.add_parser("mutate", parents=common, help="test the certificate with wrong kernels")
    command.add_argument("model", metavar="MODEL", help="an ONNX file")
    command.add_argument("--level", choices=tuple(LEVELS), default="V4")
    command.add_argument("-n", "--mutants", type=int, default=20, metavar="N")
    command.add_argument("--seed", type=int, default=0, help="of the mutants and of the random inputs")
    command.set_defaults(command=command_in("souffle.cli.mutate", "mutate"))


def _network(arguments: argparse.Namespace, progress: Progress, dump: str | None = None):
    return souffle.compile(
        arguments.model,
        level=arguments.level,
        target=arguments.target,
        **compiler_options(arguments),
        **model_options(arguments),
        **padding_of(arguments),
        tuning_log=None if arguments.tuning_log == "none" else arguments.tuning_log,
        threads=arguments.threads,
        processor=_names(arguments.processor),
        cubin=not arguments.no_cubin,
        progress=progress,
        dump=dump,
    )


def _names(given: str | None) -> str | list[str] | None:
    """A name, or several with commas between them."""
    return given.split(",") if given is not None and "," in given else given


def _compile(arguments: argparse.Namespace, progress: Progress) -> int:
    path = Path(arguments.output or Path(arguments.model).with_suffix(".souffle"))
    check_output(path, ARCHIVE, arguments.force)
    try:
        network = _network(arguments, progress, arguments.dump)
    except SouffleError:
        progress.done()
        if arguments.dump is not None and Path(arguments.dump).is_dir():
            print(f"souffle: what was compiled before the error is in {arguments.dump}", file=sys.stderr)
        raise
    progress(f"saving {path}")
    network.save(path)
    progress.done()
    print_compiled(network, path, arguments)
    return 0


def _explain(arguments: argparse.Namespace, progress: Progress) -> int:
    saved = Path(arguments.model).suffix == ".souffle"
    network = souffle.load(arguments.model) if saved else _network(arguments, progress)
    progress.done()
    if arguments.json and isinstance(network, VersionedNetwork):
        write_json([{"version": said, **explain_data(version.plan)} for said, version in named_versions(network)])
    elif arguments.json:
        write_json(explain_data(network.plan))
    else:
        print(network.explain())
    return 0


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.output:
        # NumPy writes under this name.
        target = arguments.output if arguments.output.endswith(".npz") else f"{arguments.output}.npz"
        check_output(target, ARCHIVE, arguments.force)
    options = {"checked": True} if arguments.checked or arguments.counts else {}
    network = souffle.load(arguments.file, device=arguments.device, threads=arguments.threads, **options)
    inputs, types = {}, {spec.name: spec.dtype for spec in network.signature.inputs}
    for item in arguments.input:
        name, separator, path = item.partition("=")
        if not separator:
            raise InputError(
                f"--input {item!r} is not of the form NAME=x.npy; {network.signature.network} takes {network.signature}"
            )
        array = _read_array(name, path)
        dtype = types.get(name, array.dtype)
        # NumPy's files have no names for the types that are not its own, and hold their bytes alone.
        nameless = array.dtype == np.dtype(f"V{np.dtype(dtype).itemsize}")
        inputs[name] = array.view(dtype) if nameless else array
    progress("running")
    outputs = {name: np.asarray(value) for name, value in network(inputs).items()}
    progress.done()
    if arguments.output:
        np.savez(arguments.output, **outputs)
    if arguments.json:
        record = {name: {"shape": value.shape, "dtype": str(value.dtype)} for name, value in outputs.items()}
        if arguments.counts:
            launches = [dataclasses.asdict(report) for report in _ran(network, inputs).counts]
            record = {"outputs": record, "launches": launches}
        write_json(record)
        return 0
    rows = [
        (name, value.dtype, "x".join(map(str, value.shape)) or "scalar", _range(value))
        for name, value in outputs.items()
    ]
    print(format_table(("output", "type", "shape", "min .. max"), rows))
    if arguments.counts:
        print(counts_table(_ran(network, inputs).counts))
    return 0


def _ran(network: Any, inputs: dict[str, np.ndarray]) -> Any:
    """The network that has run."""
    return network.chosen(inputs) if isinstance(network, VersionedNetwork) else network


def _range(value: np.ndarray) -> str:
    # NumPy has no smallest element of the types that are not its own.
    value = value.astype("float64") if value.dtype.name in SMALL_TYPES else value
    return f"{value.min():.6g} .. {value.max():.6g}" if value.size else "empty"


def _read_array(name: str, path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"input {name!r}: {path} cannot be read as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"input {name!r}: {path} is an .npz archive; give one .npy file for each input")
    return array
