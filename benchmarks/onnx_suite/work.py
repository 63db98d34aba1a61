"""What workers do for the suite: they run one case, which they are given as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.onnx_suite.cases import case_of
from benchmarks.onnx_suite.engines import run_case

__all__ = ["run"]


def run(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """What became of a case: a :class:`~benchmarks.onnx_suite.outcomes.CaseResult` as a dictionary.

    Parameters
    ----------
    payload : mapping
        ``case``, as :func:`benchmarks.onnx_suite.cases.case_data` has it; ``engine`` and its ``options``.
    shared : mapping
        Not looked at.
    """
    return asdict(run_case(case_of(payload["case"]), payload["engine"], payload["options"]))
