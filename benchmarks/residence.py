"""Constants that stay on chip: mutants on them, a thousand runs of one network, and runs after one that failed.

``python -m benchmarks.residence [--memory shared] --out docs/results/residence.json``. Small recurrent networks, sizes
of primes among them, are compiled at V4 so that whatever can stay does, whether or not it pays. Of each, mutants
(:mod:`souffle.mutation.residence`) are run in 20 shuffled orders against the bits of the network itself, and the
certificate is asked, values included; one object is run in shuffled orders on grids of several sizes; and a thread
traps in the middle of a launch, after which the same object is run again. A network's results are kept as they are
made: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.recurrent import recurrent
from souffle.choice import stationary
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.plan import Plan
from souffle.errors import DeviceError
from souffle.mutation.residence import ResidenceMutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trial, Trials, described
from souffle.pipeline import compile_cuda
from souffle.runtime.cpu_runner import CpuRunner
from souffle.schedule.lower.kept_loads import FILLED_SUFFIX
from souffle.verify import PROVEN, REFUTED, UNKNOWN

__all__ = ["NETWORKS", "counted", "trapping"]

_GRIDS = (64, 1, 2, 3, 5, 7, 13)
_INPUTS = 4
_STEP_LOOP = re.compile(r"for \(int (s\d+) = 0; \1 < (\d+); \+\+\1\) \{")
_TRAPS = 4096.0
"""What the first element of an input is where a thread traps; the next two are its step and its block."""


def _constant(name: str, *shape: int) -> onnx.TensorProto:
    value = np.random.default_rng(sum(name.encode()) + shape[-1]).standard_normal(shape) / np.sqrt(shape[0])
    return numpy_helper.from_array(value.astype(np.float32), name)


def _body(name: str, operators: Sequence[tuple[str, list[str], str]], inputs: Mapping[str, tuple]) -> onnx.GraphProto:
    nodes = [helper.make_node(operator, read, [made]) for operator, read, made in operators]
    given = [helper.make_tensor_value_info(k, kind, shape) for k, (kind, shape) in inputs.items()]
    shape = next(shape for kind, shape in inputs.values() if kind == TensorProto.FLOAT)
    results = [made for _, _, made in operators if made.startswith("to_")]
    kinds = [TensorProto.BOOL if made == "to_go" else TensorProto.FLOAT for made in results]
    outputs = [
        helper.make_tensor_value_info(made, kind, [] if kind == TensorProto.BOOL else shape)
        for made, kind in zip(results, kinds, strict=True)
    ]
    return helper.make_graph(nodes, name, given, outputs)


def _model(node: onnx.NodeProto, shape: list[int], constants: list[onnx.TensorProto]) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output if name]
    graph = helper.make_graph([node], "loop", [x], outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _loop(size: int, inner: int, steps: int) -> onnx.ModelProto:
    """``s = tanh(tanh(s W) V)``, a constant number of times."""
    operators = [
        ("MatMul", ["s", "w"], "a"),
        ("Tanh", ["a"], "b"),
        ("MatMul", ["b", "v"], "d"),
        ("Identity", ["go"], "to_go"),
        ("Tanh", ["d"], "to_s"),
    ]
    inputs = {"i": (TensorProto.INT64, []), "go": (TensorProto.BOOL, []), "s": (TensorProto.FLOAT, [1, size])}
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=_body("body", operators, inputs))
    count = numpy_helper.from_array(np.array(steps, np.int64), "n")
    return _model(node, [1, size], [count, _constant("w", size, inner), _constant("v", inner, size)])


def _scan(size: int, steps: int, batch: int) -> onnx.ModelProto:
    """``h = tanh(h W + x)`` over the rows of a sequence."""
    operators = [
        ("MatMul", ["h", "w"], "a"),
        ("Add", ["a", "t"], "b"),
        ("Tanh", ["b"], "to_h"),
        ("Neg", ["to_h"], "to_y"),
    ]
    inputs = {"h": (TensorProto.FLOAT, [batch, size]), "t": (TensorProto.FLOAT, [batch, size])}
    node = helper.make_node("Scan", ["h0", "x"], ["", "y"], body=_body("body", operators, inputs), num_scan_inputs=1)
    return _model(node, [steps, batch, size], [_constant("h0", batch, size), _constant("w", size, size)])


NETWORKS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "LSTM": (partial(recurrent, "LSTM", 24, 44, steps=7), {}),
    "LSTM of primes, batch 4": (partial(recurrent, "LSTM", 31, 37, 37, steps=8, batch=4), {}),
    "LSTM, 2 layers": (partial(recurrent, "LSTM", 24, 48, 48, steps=9), {}),
    "LSTM both ways": (partial(recurrent, "LSTM both ways", 64, 128, steps=8), {}),
    "GRU, reset behind": (partial(recurrent, "GRU", 40, 40, 40, steps=8, linear_before_reset=1), {}),
    "GRU, reset before": (partial(recurrent, "GRU", 24, 40, steps=7, linear_before_reset=0), {}),
    "RNN, 2 layers": (partial(recurrent, "RNN", 64, 72, 72, steps=8), {}),
    "Loop of two products": (partial(_loop, 60, 43, 8), {}),
    "Scan, batch 4": (partial(_scan, 67, 9, batch=4), {}),
}
"""By its name a network, and with which options it is compiled so that it has a loop."""


MEMORIES = {"registers": "local", "shared": "shared"}
"""Where constants may stay, and how TVM calls it."""


def compiled(name: str, memory: str = "registers", **others: Any) -> CompiledKernels:
    """A network in which all constants stay that can, in one kind of memory."""
    make, options = NETWORKS[name]
    how = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", **options, **others}
    always = mock.patch.object(stationary, "pays", lambda made, before: True)
    with always, mock.patch.object(stationary, "SCOPES", (MEMORIES[memory],)):
        return compile_cuda(souffle.import_onnx(make()), **how)


def _inputs(plan: Plan, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(b.shape).astype(b.dtype) for b in plan.buffers if b.kind == "input")


# ---- mutants ----


def counted(trials: Sequence[Trial]) -> dict[str, int]:
    """What came of mutants; those whose text does not compile are none."""
    there = [trial for trial in trials if trial.counts]
    verdicts = Counter((trial.verdict, trial.changed) for trial in there)
    return {
        "mutants": len(there),
        "changing": sum(trial.changed for trial in there),
        "changing_refuted": verdicts[REFUTED, True],
        "missed": sum(trial.missed for trial in there),
        "same_refuted": verdicts[REFUTED, False],
        "same_unknown": verdicts[UNKNOWN, False],
        "same_proven": verdicts[PROVEN, False],
    }


def _tried(net: CompiledKernels, count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    mutations = ResidenceMutations(net)
    trials: list[Trial] = []
    with Sandbox() as sandbox:
        attempts = Trials(mutations, _inputs(net.plan, 0), sandbox)
        for number, mutation in enumerate(mutations.sample(count, seed, ["residence"]), 1):
            trials.append(attempts.run(mutation))
            if trials[-1].missed:
                say(f"\n{described(trials[-1])}\n")
            say(f"\rmutant {number} of {count}")
    actions = {
        action: [len(own), sum(t.changed for t in own), sum(t.verdict == REFUTED for t in own)]
        for action in dict.fromkeys(t.mutation.action for t in trials)
        if (own := [t for t in trials if t.mutation.action == action and t.counts])
    }
    wrong = [described(trial)[:600] for trial in trials if trial.missed]
    return {"possible": len(mutations), **counted(trials), "actions": dict(sorted(actions.items())), "misses": wrong}


# ---- runs ----


def _differs(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return any(one.tobytes() != other.tobytes() for one, other in zip(found, expected, strict=True))


def _many_runs(plan: Plan, count: int) -> dict[str, Any]:
    """Of one object: inputs change from run to run and come again, orders are shuffled, and grids change."""
    runner, inputs = CpuRunner(plan), [_inputs(plan, seed) for seed in range(_INPUTS)]
    first: dict[int, tuple[np.ndarray, ...]] = {}
    wrong = 0
    for seed, blocks in zip(range(count), itertools.cycle(_GRIDS)):
        number = seed % _INPUTS
        found = runner.reordered(seed=seed, blocks=blocks).run(inputs[number])
        wrong += _differs(found, first.setdefault(number, tuple(one.copy() for one in found)))
    distinct = len({b"".join(one.tobytes() for one in found) for found in first.values()})
    return {"runs": count, "inputs": distinct, "grids": len(_GRIDS), "other_bits": wrong}


def trapping(plan: Plan) -> tuple[Plan, int]:
    """A plan in whose kernel a thread traps where the input says so, and the steps of its loop.

    Raises
    ------
    ValueError
        If it has not one kernel with one loop of steps around what uses the constants.
    """
    (module,), (launch,) = plan.modules, plan.launches
    loops = [m for m in _STEP_LOOP.finditer(module.text) if FILLED_SUFFIX in module.text[m.end() :]]
    if not loops:
        raise ValueError(f"{plan.name} has no loop with constants in registers")
    loop = loops[-1]
    place = next(n for n, index in enumerate(launch.buffers) if plan.buffers[index].kind == "input")
    step, block = f"{loop.group(1)} == (int)g{place}[1]", f"(int)blockIdx.x == (int)g{place}[2]"
    trap = f"\n    if (g{place}[0] == {_TRAPS:.1f}f && {step} && {block} && threadIdx.x == 5) __trap();"
    text = module.text[: loop.end()] + trap + module.text[loop.end() :]
    return replace(plan, modules=(replace(module, text=text),)), int(loop.group(2))


def _after_failures(plan: Plan, count: int) -> dict[str, Any]:
    """Launches that fail in a step, in a block, on a grid; after each, runs of the same object."""
    broken, steps = trapping(plan)
    runner, inputs = CpuRunner(broken), [_inputs(plan, seed) for seed in range(_INPUTS)]
    expected = [tuple(one.copy() for one in CpuRunner(plan).run(given)) for given in inputs]
    failed = runs = wrong = 0
    for seed, blocks in zip(range(count), itertools.cycle(_GRIDS)):
        other = runner.reordered(seed=seed, blocks=blocks)
        bad = tuple(array.copy() for array in inputs[seed % _INPUTS])
        bad[0].reshape(-1)[:3] = _TRAPS, seed % steps, seed // steps % other.grids[0]
        try:
            other.run(bad)
        except DeviceError as error:
            failed += "trap" in str(error)
        for turn, given in enumerate(inputs):
            found = runner.reordered(seed=seed + turn, blocks=_GRIDS[(seed + turn) % len(_GRIDS)]).run(given)
            runs, wrong = runs + 1, wrong + _differs(found, expected[turn])
    return {"aborted": failed, "runs_after": runs, "other_bits_after": wrong}


# ---- all ----


def _named(name: str, memory: str) -> str:
    """A network in a table."""
    return name if memory == "registers" else f"{name}, in {memory} memory"


def _of_network(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    def say(what: str) -> None:
        print(f"{what}", end="", file=sys.stderr, flush=True)

    began = time.monotonic()
    net = compiled(name, arguments.memory)
    kept = [call.kept for merged in net.merged for call in merged.shape.stage_calls if call.kept]
    row: dict[str, Any] = {"network": _named(name, arguments.memory), "certificate": net.plan.certificate.verdict}
    row |= {"stages": len(kept)}
    row |= {"tiles": [one.use.tiles for one in kept], "registers": [one.registers for one in kept]}
    row |= {"shared_bytes": [one.shared_bytes for one in kept]}
    if not kept:
        return row
    row |= _many_runs(net.plan, arguments.runs) | _after_failures(net.plan, arguments.aborted)
    row |= _tried(net, arguments.mutants, arguments.seed, say)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not kept yet, and print; 1 where a change is not refuted, bits are others, or nothing stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--memory", choices=MEMORIES, default="registers")
    parser.add_argument("--mutants", type=int, default=60, help="of each network")
    parser.add_argument("--runs", type=int, default=1000, help="of each network")
    parser.add_argument("--aborted", type=int, default=30, help="of each network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    results = kept_results(arguments.out)
    for name in arguments.networks:
        if _named(name, arguments.memory) not in {row["network"] for row in results}:
            results.append(_of_network(name, arguments))
            save_results(str(arguments.out), "benchmarks.residence", results)
            print(f"\r{name}: {results[-1]}"[:400], file=sys.stderr, flush=True)
    return _report(results)


_COLUMNS = ("mutants", "changing", "changing_refuted", "missed", "same_refuted", "same_unknown", "same_proven")


def _report(results: Sequence[dict[str, Any]]) -> int:
    whole = [row for row in results if "mutants" in row]
    totals = [sum(row[column] for row in whole) for column in _COLUMNS]
    head = (
        "network",
        "stages",
        "mutants",
        "changing",
        "refuted",
        "missed",
        "same: refuted",
        "unknown",
        "proven",
    )
    table = [(row["network"], row["stages"], *(row[column] for column in _COLUMNS)) for row in whole]
    print(format_table(head, [*table, ("all", sum(row["stages"] for row in whole), *totals)]))
    runs = ("runs", "other_bits", "aborted", "runs_after", "other_bits_after", "seconds")
    rows = [(row["network"], row["certificate"], *(row[column] for column in runs)) for row in whole]
    head = ("network", "certificate", "runs", "other bits", "aborted", "runs after", "other bits after", "s")
    print("\n" + format_table(head, rows))
    for row in results:
        print(*row.get("misses", [f"{row['network']}: nothing stays"]), sep="\n", end="")
    wrong = any(row["missed"] or row["other_bits"] or row["other_bits_after"] for row in whole)
    return int(wrong or len(whole) < len(results))


if __name__ == "__main__":
    sys.exit(main())
