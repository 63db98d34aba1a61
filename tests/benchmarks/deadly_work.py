"""What workers of campaigns do, some of which kills them. It stands alone, so that a process of it begins soon."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["made_case", "run", "sampled", "tried", "tried_batch", "tried_case"]

_Shared = Mapping[str, bytes]


def made_case(payload: Mapping[str, Any], shared: _Shared) -> dict[str, Any]:
    """A network of no nodes, for the fuzzer; the making of every second one kills its process."""
    if payload["seed"] % 2:
        ctypes.string_at(0)
    facts = {"operators": {}, "refused": 0, "seconds": time.monotonic()}
    return {"facts": facts, "case": {"note": "played", "inputs": {}, "model": {}}, "expected": {False: b"", True: b""}}


def tried_case(payload: Mapping[str, Any], shared: _Shared) -> Any:
    """What comes of it depends on the target."""
    target = payload["target"]
    if target == "V0":
        _abort()
    if target == "V3":
        time.sleep(60)
    if target == "V4":
        _die_once()
        return {"kind": "right", "detail": "at the second try", "seconds": time.monotonic()}
    if target == "tf32":
        bytearray(10**11)
    return "nonsense" if target == "mixed" else {"kind": "right", "detail": ""}


def run(payload: Mapping[str, Any], shared: _Shared) -> Any:
    """What becomes of a case of ONNX's suite."""
    name = payload["case"]["name"].removeprefix("test_")
    if name == "shrink":
        _abort()
    if name == "sequence_model1":
        time.sleep(60)
    result = {"name": name, "outcome": "passed", "message": "", "seconds": time.monotonic()}
    if name.endswith("empty_output"):
        _die_once()
        return {**result, "message": "at the second try"}
    return "nonsense" if name == "sign_model" else result


def sampled(payload: Mapping[str, Any], shared: _Shared) -> dict[str, Any]:
    """Mutations of a network; of one at V0, its worker dies."""
    if payload["network"]["options"]["level"] == "V0":
        _abort()
    words = {"kind": "index", "action": "off by one", "kernel": "k", "stage": "s", "what": "off", "text": "a[i]"}
    return {"possible": 9, "mutations": [{**words, "number": number} for number in (2, 0, 1, 3)]}


def tried(payload: Mapping[str, Any], shared: _Shared) -> dict[str, Any]:
    """What is said of a mutant."""
    assert set(shared) == {payload["network"]["model"]}
    number = payload["mutation"]["number"]
    if number == 1:
        _abort()
    if number == 2:
        time.sleep(60)
    if number == 3:
        _die_once()
    words = {"verdict": "REFUTED", "rules": (), "reason": "", "outcome": "same", "checked": "", "checked_detail": ""}
    detail = "at the second try" if number == 3 else "tried"
    return {"mutation": payload["mutation"], **words, "detail": detail, "seconds": time.monotonic()}


def tried_batch(payload: Mapping[str, Any], shared: _Shared) -> list[dict[str, Any]]:
    """What came of random kernels."""
    if 3 in payload["seeds"]:
        _abort()
    words = dict.fromkeys(("reason", "values_reason", "detail"), "") | {"mistakes": (), "what": (), "rules": ()}
    words |= {"note": "played", "right": True, "memory": "PROVEN", "values": "agree", "outcome": "right"}
    return [{"seed": seed, **words, "seconds": time.monotonic()} for seed in payload["seeds"]]


def _abort() -> None:
    os.write(2, b"Assertion failed\n")
    os.abort()


def _die_once() -> None:
    # In the folder of the owner, which all its workers have.
    tried = Path(os.environ["TMPDIR"]).parent / "tried"
    if not tried.exists():
        tried.touch()
        os._exit(1)
