"""Flags, and constants that stay in registers: mutants of both, many runs of one network, runs after an aborted one.

``python -m benchmarks.waits_and_residence --json out.json``. Small networks are compiled at V4 with flags and with all
constants in registers that can be. Mutants are of what waits, of the kernel's calls that fill registers, and of the
functions that fill and use them; each is run in shuffled orders against the bits of the network itself, and the
certificate is asked. Each result is kept as it is made: the same command goes on where it stopped, and asks again for
misses.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from tvm import tirx

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.recurrent import recurrent
from souffle.choice import stationary
from souffle.cli.mutate import trial_table
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.plan import Plan
from souffle.errors import KernelTimeoutError
from souffle.kernel.block_flags import WATCHED_WAIT_FUNCTION
from souffle.mutation.fills import calls_fill, fill_changes
from souffle.mutation.mutants import Mutation, Mutations
from souffle.mutation.residence import residence_changes
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.statement_paths import Change
from souffle.mutation.trial import Trial, Trials, described, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime.cpu_runner import CpuRunner
from souffle.schedule.lower.kept_loads import FILL_SUFFIX, FILLED_SUFFIX
from souffle.verify import REFUTED

__all__ = ["main"]

_PROGRAM = "benchmarks.waits_and_residence"
_LSTM = "LSTM"
_FLAG_KINDS = ("arrival", "flag wait", "flags left")
_CALL_KINDS = ("fill call", "kept registers")
_OWN_KINDS = (*_CALL_KINDS, "residence")
"""Of which each is a part: others are of any statement."""
_RESIDENCE = (
    *("calls that fill", "around calls that fill", "functions that fill", "functions that use"),
    "residence",
)
_GRIDS = (64, 4, 2, 3, 1, 48, 5, 7)
_INPUTS = 3
_LIMIT_MS = 20.0


def _rows(name: str) -> TEProgram:
    # The tests' own networks, which have no cells.
    from tests.kernel.test_kept_weights import power
    from tests.kernel.test_tile_waits import rows_apart

    return power() if name == "power" else rows_apart()


def _cells(kind: str, *sizes: int, **options: Any) -> TEProgram:
    return souffle.import_onnx(recurrent(kind, *sizes, **options))


NETWORKS: dict[str, Callable[[], TEProgram]] = {
    "a batch of rows": partial(_rows, "power"),
    "rows apart": partial(_rows, "rows_apart"),
    _LSTM: partial(_cells, "LSTM", 48, 48, 48, steps=7),
    "GRU": partial(_cells, "GRU", 40, 40, steps=6, linear_before_reset=1),
    "RNN": partial(_cells, "RNN", 64, 72, 72, steps=8),
    "LSTM both ways": partial(_cells, "LSTM both ways", 24, 40, steps=6),
}


def _compiled(program: TEProgram, **options: Any) -> CompiledKernels:
    how = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", "waits": "flags", **options}
    with mock.patch.object(stationary, "pays", lambda made, before: True):
        return compile_cuda(program, **how)


def _inputs(plan: Plan, seed: int) -> tuple[np.ndarray, ...]:
    """Whole numbers, which sums of the networks of whole numbers keep exact."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-3, 4, b.shape).astype(b.dtype) for b in plan.buffers if b.kind == "input")


# ---- mutants ----


def _places(net: CompiledKernels) -> dict[str, tuple[Sequence[str], Callable[[str | None, Change], bool]]]:
    """Parts of the campaign: kinds of mutations, and whether one of them is of the part."""
    return {
        "flags": (_FLAG_KINDS, lambda stage, change: True),
        "calls that fill": (_CALL_KINDS, lambda stage, change: True),
        "around calls that fill": ((), partial(_around_calls, net)),
        "functions that fill": ((), partial(_of_functions, lambda stage: stage.endswith(FILL_SUFFIX))),
        "functions that use": ((), partial(_of_functions, lambda stage: FILLED_SUFFIX in stage)),
        "residence": (("residence",), lambda stage, change: True),
    }


def _of_functions(chosen: Callable[[str], bool], stage: str | None, change: Change) -> bool:
    return stage is not None and chosen(stage) and change.kind not in _OWN_KINDS


def _around_calls(net: CompiledKernels, stage: str | None, change: Change) -> bool:
    if stage is not None or change.kind in _OWN_KINDS:
        return False
    given = re.search(r" is given g(\d+) for g(\d+)$", change.what)
    if given:
        # Another tensor, of at least as many bytes.
        other, own = (net.plan.buffers[net.plan.launches[0].buffers[int(number)]] for number in given.groups())
        return calls_fill(change.statement) and other.nbytes >= own.nbytes
    declared = isinstance(change.statement, tirx.AllocBuffer) and str(change.statement.buffer.scope()) == "local"
    return declared or calls_fill(change.statement)


def _tried(net: CompiledKernels, label: str, counts: dict[str, int], results: list[dict], save: Callable) -> None:
    known = {(r["part"], r["identity"]) for r in results if r["network"] == label and "identity" in r}
    mutations = Mutations(net, thorough=True)
    mutations.changes += (fill_changes, residence_changes)
    with Sandbox() as sandbox:
        trials = None
        for part, (kinds, where) in _places(net).items():
            # Which are drawn does not depend on how many: more of them begin with the same.
            for mutation in mutations.sample(counts[part], seed=7, kinds=kinds, where=where):
                if (part, mutation.identity) in known:
                    continue
                trials = trials or Trials(mutations, _inputs(net.plan, 1), sandbox)
                found = trials.run(mutation)
                results.append({"network": label, "part": part, "identity": mutation.identity, **_as_kept(found)})
                save()
                if found.missed:
                    print(f"\n{label}, {part}: {described(found)}", file=sys.stderr, flush=True)


def _as_kept(trial: Trial) -> dict[str, Any]:
    """As JSON, of a refuted one without its text."""
    long = 0 if trial.verdict == REFUTED else 200
    mutation = replace(trial.mutation, text=trial.mutation.text[:long])
    kept = dataclasses.asdict(replace(trial, mutation=mutation, detail=trial.detail[:long], reason=trial.reason[:100]))
    return {**kept, "seconds": round(trial.seconds, 2)}


def _trial(result: dict[str, Any]) -> Trial:
    own = {field.name: result[field.name] for field in dataclasses.fields(Trial)}
    return Trial(**{**own, "mutation": Mutation(**own["mutation"]), "rules": tuple(own["rules"])})


# ---- runs ----


def _differs(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return any(one.tobytes() != other.tobytes() for one, other in zip(found, expected, strict=True))


def _many_runs(net: CompiledKernels, count: int) -> dict[str, Any]:
    """One object, in shuffled orders on grids that change, with some inputs in turn."""
    began = time.monotonic()
    runner, inputs = CpuRunner(net.plan), [_inputs(net.plan, seed) for seed in range(_INPUTS)]
    expected = [runner.run(one) for one in inputs]
    wrong = 0
    for seed, blocks in zip(range(count), itertools.cycle(_GRIDS)):
        found = runner.reordered(seed=seed, blocks=blocks).run(inputs[seed % _INPUTS])
        wrong += _differs(found, expected[seed % _INPUTS])
    distinct = len({b"".join(o.tobytes() for o in one) for one in expected})
    same_memory = len(runner._idle) == 1
    seconds = round(time.monotonic() - began, 1)
    about = {"runs": count, "other_bits": wrong, "inputs": distinct, "grids": _GRIDS, "one_memory": same_memory}
    return {"part": "runs", **about, "seconds": seconds}


def _timeouts(program: TEProgram, count: int) -> dict[str, Any]:
    """Launches in which a block leaves and the others wait in vain, each followed by runs that are compared."""
    plan = _compiled(program, watchdog_ms=_LIMIT_MS, grid_barrier="counter").plan
    (module,) = plan.modules
    place = next(n for n, index in enumerate(plan.launches[0].buffers) if plan.buffers[index].kind == "input")
    body, call = module.text.rsplit("for (int s0", 1), f"{WATCHED_WAIT_FUNCTION}("
    leaves = f"if (g{place}[0] < 0.0f && blockIdx.x == 1 && s0 == 1) return;\n    {call}"
    if call not in body[1]:
        raise ValueError("no step of the loop waits for flags")
    text = f"{body[0]}for (int s0{body[1].replace(call, leaves, 1)}"
    runner = CpuRunner(replace(plan, modules=(replace(module, text=text),)))
    whole = [_inputs(plan, seed) for seed in range(_INPUTS)]
    for inputs in whole:
        inputs[0].reshape(-1)[0] = 1
    expected = [CpuRunner(plan).run(one) for one in whole]
    timed_out = wrong = after = 0
    for seed, blocks in zip(range(count), itertools.cycle((64, 3, 2, 4))):
        broken = tuple(array.copy() for array in whole[seed % _INPUTS])
        broken[0].reshape(-1)[0] = -1
        try:
            runner.reordered(seed=seed, blocks=blocks).run(broken)
        except KernelTimeoutError:
            timed_out += 1
        for turn in range(3):
            found = runner.reordered(seed=seed + turn, blocks=_GRIDS[(seed + turn) % len(_GRIDS)]).run(whole[turn])
            wrong, after = wrong + _differs(found, expected[turn]), after + 1
    about = {"aborted": count, "timed_out": timed_out, "runs": after, "other_bits": wrong}
    return {"part": "after a wait that was over", **about}


def _interrupts(net: CompiledKernels, count: int) -> dict[str, Any]:
    """Launches in which Ctrl-C comes, each followed by runs that are compared."""
    runner, inputs = CpuRunner(net.plan), [_inputs(net.plan, seed) for seed in range(_INPUTS)]
    expected = [runner.run(one) for one in inputs]
    began = time.monotonic()
    runner.reordered(seed=0, blocks=64).run(inputs[0])
    length = time.monotonic() - began
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = wrong = after = 0
    try:
        for seed in range(count):
            try:
                signal.setitimer(signal.ITIMER_REAL, length * (seed + 1) / (count + 2))
                runner.reordered(seed=seed, blocks=64).run(inputs[seed % _INPUTS])
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for turn in range(3):
                found = runner.reordered(seed=seed, blocks=_GRIDS[(seed + turn) % len(_GRIDS)]).run(inputs[turn])
                wrong, after = wrong + _differs(found, expected[turn]), after + 1
    finally:
        signal.signal(signal.SIGALRM, before)
    about = {"aborted": count, "interrupted": interrupted, "runs": after, "other_bits": wrong}
    return {"part": "after Ctrl-C", **about}


# ---- all ----


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not kept yet, and print; 1 where a change of a result is not refuted, or bits are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--flags", type=int, default=40, help="mutants of a network, of what waits")
    parser.add_argument("--residence", type=int, default=120, help="of a network, of what fills and uses registers")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--aborted", type=int, default=20)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args(argv)
    # Misses are asked again: the certificate may know more by now.
    results = [r for r in kept_results(arguments.json) if "identity" not in r or not misses([_trial(r)])]
    save = partial(save_results, arguments.json, _PROGRAM, results)
    counts = {"flags": arguments.flags, **dict.fromkeys(_RESIDENCE, arguments.residence // len(_RESIDENCE))}
    for label in arguments.networks:
        program = NETWORKS[label]()
        net = _compiled(program)
        kept = sum(d.stage == "weights" and d.accepted for d in net.plan.decisions)
        print(f"{label}: {net.plan.certificate.verdict}, constants of {kept} stages stay", file=sys.stderr, flush=True)
        if label == _LSTM:
            jobs = {
                "runs": lambda net=net: _many_runs(net, arguments.runs),
                "after a wait that was over": lambda program=program: _timeouts(program, arguments.aborted),
                "after Ctrl-C": lambda net=net: _interrupts(net, arguments.aborted),
            }
            for part, job in jobs.items():
                if part not in {r["part"] for r in results}:
                    results.append({"network": label, **job()})
                    save()
        _tried(net, label, counts, results, save)
    return _report(results)


def _report(results: Sequence[dict[str, Any]]) -> int:
    tried = [(r, _trial(r)) for r in results if "identity" in r]
    for part in dict.fromkeys(r["part"] for r, _ in tried):
        print(f"{part}\n{trial_table(t for r, t in tried if r['part'] == part)}\n")
    wrong = misses(t for _, t in tried)
    for result, trial in tried:
        if trial in wrong:
            print(f"{result['network']}, {result['part']}: {described(trial)}\n")
    others = [r for r in results if "identity" not in r]
    rows = [(r["network"], r["part"], r.get("aborted", ""), r["runs"], r["other_bits"]) for r in others]
    print(format_table(("network", "runs", "aborted", "compared", "of other bits"), rows))
    print(f"misses: {len(wrong)}; trials took {sum(t.seconds for _, t in tried):.0f} s")
    return int(bool(wrong) or any(r["other_bits"] for r in others))


if __name__ == "__main__":
    sys.exit(main())
