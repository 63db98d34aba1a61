"""What workers do for the fuzzer: make a network and ask the oracle, and try it on one target.

A worker may die of either, or take too long; what it was given is with who asked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.case import Case, case_data, case_of, operators_of
from benchmarks.fuzz.draft import Settings
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.oracle import ORACLE_ERRORS, Expectation, expect
from benchmarks.fuzz.targets import precision_of, run_target
from souffle.parallel import physical_cores

__all__ = ["expected_of", "judged_case", "made_case", "tried_case"]

_FP16 = 6e4
_TF32 = 3.4e38


def made_case(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """The network of a seed, and what it should give.

    Parameters
    ----------
    payload : mapping
        ``seed``; ``settings``, those of :class:`benchmarks.fuzz.draft.Settings` that are not as usual; ``targets``.
    shared : mapping
        Not looked at.

    Returns
    -------
    dict
        ``facts`` (``operators``, ``refused``, ``seconds``), ``case`` (:func:`benchmarks.fuzz.case.case_data`),
        ``expected`` (:func:`expected_of`).
    """
    began = time.monotonic()
    settings = {name: _setting(name, value) for name, value in payload["settings"].items()}
    made = generate(payload["seed"], Settings(**settings))
    return _judged(made.case, made.refused, payload["targets"], began)


def judged_case(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """As :func:`made_case`, of the network that the payload has as ``case``."""
    return _judged(case_of(payload["case"]), 0, payload["targets"], time.monotonic())


def _judged(case: Case, refused: int, targets: list[str], began: float) -> dict[str, Any]:
    facts = {"operators": dict(operators_of(case.model)), "refused": refused, "seconds": time.monotonic() - began}
    return {"facts": facts, "case": case_data(case), "expected": expected_of(case, targets)}


def _setting(name: str, value: object) -> object:
    return frozenset(value) if name in ("without", "only") else tuple(value) if name == "dtypes" else value


def _is_rounded(target: str) -> bool:
    return precision_of(target) in ("mixed", "tf32")


def expected_of(case: Case, targets: list[str]) -> dict[bool, bytes | str]:
    """What the oracle expects, by whether products are rounded: pickled, or why it says nothing."""
    found: dict[bool, bytes | str] = {}
    for rounded in {_is_rounded(target) for target in targets}:
        try:
            found[rounded] = pickle.dumps(expect(case, rounded=rounded), pickle.HIGHEST_PROTOCOL)
        except ORACLE_ERRORS as error:
            found[rounded] = f"oracle: {error}"
    return found


def tried_case(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """What comes of a network on a target: an :class:`~benchmarks.fuzz.targets.Outcome` as a dictionary.

    Parameters
    ----------
    payload : mapping
        ``case`` and ``expected`` as :func:`made_case` has them; ``target``; ``seed``, which chooses what results must
        not depend on; ``checked``, the share of networks run in checked mode, too.
    shared : mapping
        Not looked at.
    """
    target, seed = payload["target"], payload["seed"]
    precision, content = precision_of(target), payload["expected"][_is_rounded(target)]
    if isinstance(content, str):
        return {"kind": "unsure", "detail": content}
    expected: Expectation = pickle.loads(content)
    if precision == "mixed" and expected.largest > _FP16:
        return {"kind": "unstable", "detail": "beyond float16"}
    if precision == "tf32x3" and (expected.infinite or expected.largest > _TF32):
        return {"kind": "unstable", "detail": "an infinity, which may be a factor"}
    checked = bool(np.random.default_rng(seed).random() < payload["checked"])
    with _setting_of(seed):
        record = asdict(run_target(case_of(payload["case"]), target, expected, seed, checked=checked))
    if expected.unsure and record["kind"] == "right":
        record["detail"] = "some elements not compared: the oracle is unsure"
    # Where this process has its files is no part of what was found.
    record["detail"] = record["detail"].replace(tempfile.gettempdir(), "TMP")
    return record


@contextlib.contextmanager
def _setting_of(seed: int) -> Iterator[None]:
    """Compiled code is kept apart and goes with this process; loops have one core or all, by the seed."""
    cores = 1 if seed % 2 else len(physical_cores())
    chosen = {"SOUFFLE_CACHE": str(Path(_cache().name)), "SOUFFLE_CORES": str(cores)}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@cache
def _cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="souffle-fuzz-")
