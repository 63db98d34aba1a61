"""Compiles and runs a case on one target, and says what came of it."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import souffle
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.oracle import Expectation, judge, oracle_is_alone
from souffle.errors import CertificateError, CudaCompileError, DeviceError, SouffleError
from souffle.learning import NEEDED
from souffle.options import ON_CHIP
from souffle.stitching import FUSION_PLANNERS

__all__ = [
    "FAILURES",
    "FUSIONS",
    "OUTCOMES",
    "SWITCHES",
    "TARGETS",
    "Outcome",
    "failure_class",
    "precision_of",
    "run_target",
]

TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {"target": "cpu"},
    "V0": {"level": "V0"},
    "V3": {"level": "V3"},
    "V4": {"level": "V4"},
    "persistent": {"level": "V4", "partition": "persistent"},
    "mixed": {"level": "V4", "precision": "mixed"},
    "tf32x3": {"level": "V4", "precision": "tf32x3", "verify": "values"},
    "tf32": {"level": "V4", "precision": "tf32", "verify": "values"},
}
"""Options of each; all but the first are CUDA text on the CPU device."""

SWITCHES: dict[str, dict[str, Any]] = {
    f"{precision} without {name}": {"level": "V4", "precision": precision, "disable": [name], "verify": "values"}
    for name in ON_CHIP
    for precision in ("fp32", "mixed")
}
"""V4 without each thing that keeps tensors on chip, proven with values."""

FUSIONS: dict[str, dict[str, Any]] = {
    f"{level} {planner}": {"level": level, "fusion": planner, "verify": "values"}
    for level in ("V0", "V2", "V3", "V4")
    for planner in FUSION_PLANNERS
    if planner != "learned" or all(map(find_spec, NEEDED))
}
"""Stages by the planners of patterns, level by level, proven with values; by the learned one where it is installed."""

OUTCOMES = ("right", "refused", "unstable", "unsure", "wrong", "exception", "crash", "timeout", "refuted")
"""What can come of a network on a target.

``refused`` is a SouffleError of the compiler. ``unstable``: rounding moves most of the result, so nothing was compared.
``unsure``: ONNX's reference implementation does not bear ONNX Runtime out against the result. ``exception``
is one that is no SouffleError, or text that g++ rejects; ``crash``: the process died; ``refuted``: by the certificate.
"""

FAILURES = ("wrong", "exception", "crash", "timeout", "refuted")


@dataclass(frozen=True)
class Outcome:
    """What came of a network on a target.

    Attributes
    ----------
    kind : str
        One of `OUTCOMES`.
    detail : str
        The message, or which element is wrong.
    verdict : str
        The certificate's; empty where there is none.
    undecided : tuple of str
        What the certificate left open.
    seconds : float
    """

    kind: str
    detail: str = ""
    verdict: str = ""
    undecided: tuple[str, ...] = ()
    seconds: float = 0.0


def precision_of(target: str) -> str:
    """Of the products of a target."""
    return (TARGETS | SWITCHES | FUSIONS)[target].get("precision", "fp32")


def failure_class(target: str, kind: str, detail: str) -> str:
    """A failure without its numbers and names: equal ones are likely to have one cause."""
    first = detail.strip().splitlines()[0] if detail.strip() else ""
    if kind == "wrong":
        # Which element of which output, and by how much, is no part of it.
        first = first.partition(":")[0]
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|\S*_\S*\d\S*", "…", first)
    return f"{'cpu' if target == 'cpu' else 'cuda'} {kind}: {re.sub(r'[0-9.]*[0-9]', '#', plain)[:130]}"


def run_target(case: Case, target: str, expected: Expectation, seed: int, *, checked: bool = False) -> Outcome:
    """Compile a case, run it, and compare.

    Parameters
    ----------
    case : Case
    target : str
        One of `TARGETS`, `SWITCHES` or `FUSIONS`.
    expected : Expectation
    seed : int
        Chooses the options that results must not depend on, and the order of threads.
    checked : bool
        On the CPU device, run with every access looked at, too.
    """
    began = time.monotonic()
    verdict, undecided, options = "", (), dict((TARGETS | SWITCHES | FUSIONS)[target])
    try:
        if target == "cpu":
            network = souffle.compile(case.model, **options)
        else:
            options["reductions"] = ("ordered", "ordered", "one_phase")[seed % 3]
            options["grid_barrier"] = ("cooperative", "counter")[seed // 3 % 2]
            others = next((group for group in (SWITCHES, FUSIONS) if target in group), None)
            if others is not None:
                options["arch"] = ("sm_90", "sm_80")[seed // len(others) % 2]
            network = souffle.compile(case.model, target="cuda", device="cpu", cubin=False, **options)
            certificate = network.certificate
            verdict, undecided = certificate.verdict, certificate.unknown
    except CertificateError as error:
        return Outcome("refuted", str(error), "REFUTED", seconds=time.monotonic() - began)
    except CudaCompileError as error:
        return Outcome("exception", f"CudaCompileError: {error}", seconds=time.monotonic() - began)
    except SouffleError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
    except MemoryError:
        raise  # of the worker
    # What else a compiler may raise is what is looked for here.
    except Exception as error:
        return Outcome("exception", _raised(error), seconds=time.monotonic() - began)
    kind, detail = _run(network, case, target, expected, seed, checked)
    return Outcome(kind, detail, verdict, undecided, time.monotonic() - began)


def _run(network, case: Case, target: str, expected: Expectation, seed: int, checked: bool) -> tuple[str, str]:
    def run(runnable) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in runnable(case.inputs).items()}

    try:
        kept = {name: array.copy() for name, array in case.inputs.items()}
        outputs = run(network)
        again = run(network if target == "cpu" else network.on("cpu", order="shuffled", seed=seed, blocks=1 + seed % 5))
        if checked and target != "cpu":
            run(network.on("cpu", checked=True))
    except CudaCompileError as error:
        return "exception", f"CudaCompileError: {_essence(str(error))}"
    except DeviceError as error:
        return "wrong", f"{type(error).__name__}: {error}"
    except SouffleError as error:
        return "exception", f"{type(error).__name__} at run time: {error}"
    except MemoryError:
        raise
    # As above.
    except Exception as error:
        return "exception", f"at run time: {_raised(error)}"
    for name, array in kept.items():
        if array.tobytes() != case.inputs[name].tobytes():
            return "wrong", f"input: {name} was written to"
    if expected.unstable:
        return "unstable", ""
    verdict = judge(outputs, expected)
    if verdict.kind != "right":
        alone = verdict.kind in ("nan", "value", "type") and oracle_is_alone(case, outputs, expected)
        return ("unsure" if alone else "wrong"), f"{verdict.kind}: {verdict.detail}"
    for name, array in outputs.items():
        if not np.array_equal(array, again[name], equal_nan=array.dtype.kind == "f"):
            order = "" if target == "cpu" else ", the second with threads shuffled"
            return "wrong", f"order: {name} differs between two runs{order}"
    return "right", ""


def _essence(message: str) -> str:
    """The first error line of g++ in front."""
    lines = [line for line in message.splitlines() if "error:" in line]
    return (re.sub(r"^.*error:", "error:", lines[0]) + "\n" if lines else "") + message


def _raised(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/souffle/" in frame.filename] or frames
    last = inside[-1]
    where = f"{last.filename.rpartition('/souffle/')[2]}:{last.name}"
    message = str(error).strip().splitlines()
    last_line = message[-1][:300] if message else ""
    return f"{type(error).__name__} in {where}: {last_line}\n{traceback.format_exc()[-2500:]}"
