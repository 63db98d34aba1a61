"""Runs one case by Souffle or by ONNX Runtime, and compares what it gives by ONNX's own rule."""

from __future__ import annotations

import ctypes
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt, Runner

from benchmarks.onnx_suite.cases import DataSet, model_and_data
from benchmarks.onnx_suite.exact import expectation_is_inexact
from benchmarks.onnx_suite.outcomes import CaseResult
from souffle import onnx_backend
from souffle.certificate import Certificate
from souffle.errors import ModelError
from souffle.program import ExternTE

__all__ = ["ENGINES", "run_case"]

_REGISTERED = 2  # what NumPy says of types that another package brings
_WIDE = ("complex64", "complex128", "object")
_DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose numbers are any implementation's own: ONNX gives expected values of their cases as examples."""


def run_case(case: TestCase, engine: str, options: Mapping[str, Any]) -> CaseResult:
    """Run all data sets of a case.

    Parameters
    ----------
    case : TestCase
    engine : str
        One of :data:`ENGINES`.
    options : mapping
        Of the engine: for Souffle the device of ONNX's backend and options of :func:`souffle.compile`.
    """
    start = time.monotonic()
    model, data_sets = model_and_data(case)
    found = ENGINES[engine](case, model, data_sets, options)
    name = case.name.removeprefix("test_")
    return CaseResult(name, seconds=round(time.monotonic() - start, 3), **found)


def _souffle(
    case: TestCase, model: onnx.ModelProto, data_sets: Sequence[DataSet], options: Mapping[str, Any]
) -> dict[str, Any]:
    about: dict[str, Any] = {}
    try:
        network = onnx_backend.prepare(model, **options)
        for inputs, expected in data_sets:
            given = network.run(inputs)
            tes = network.program.tes
            extern = {operator for te in tes if isinstance(te, ExternTE) for operator in te.origin.operators}
            about = {"constants": network.constants, "folded": not tes, "extern": tuple(sorted(extern))}
            about["certificate"] = _verdict(network.network.certificate)
            problem = _difference(given, expected, case, drawn=_draws(model))
            if problem:
                return {"outcome": _wrong_or(case, model, inputs, expected, given), "message": problem, **about}
    except BackendIsNotSupposedToImplementIt as error:
        return {"outcome": "refused", "message": str(error), **_kind(error.__cause__)}
    except ModelError as error:
        return {"outcome": "refused", "message": str(error), **_kind(error)}
    except MemoryError:
        raise  # of the worker
    except Exception as error:  # whatever else comes out of the compiler is what is looked for
        return {"outcome": "exception", "message": _words(error), **about}
    return {"outcome": "constants" if network.constants else "passed", **about}


def _wrong_or(
    case: TestCase, model: onnx.ModelProto, inputs: Sequence[Any], expected: Sequence[Any], given: Sequence[Any]
) -> str:
    """``"wrong"``, or that what was expected is inexact."""

    def is_near(exact: np.ndarray, value: np.ndarray) -> bool:
        return not _array_difference(value, exact, case, "", drawn=False)

    return "inexact" if expectation_is_inexact(model, inputs, expected, given, is_near) else "wrong"


def _verdict(certificate: Certificate | None) -> str:
    if certificate is None:
        return ""
    return ": ".join([certificate.verdict, *["; ".join(certificate.unknown)] * bool(certificate.unknown)])


def _kind(error: ModelError) -> dict[str, str]:
    return {"refusal": error.refusal.name}


def _words(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip()[-400:]} ({Path(place.filename).name}:{place.lineno})"


def _onnxruntime(
    case: TestCase, model: onnx.ModelProto, data_sets: Sequence[DataSet], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Whatever it does not take is a refusal: it has one kind of exception for that and for its own defects."""
    try:
        for inputs, expected in data_sets:
            given = _by_onnxruntime(model, inputs)
            problem = _difference(given, expected, case, drawn=_draws(model))
            if problem:
                return {"outcome": _wrong_or(case, model, inputs, expected, given), "message": problem}
    except Exception as error:  # its exceptions have no base of their own
        return {"outcome": "refused", "message": _words(error)}
    return {"outcome": "passed"}


def _by_onnxruntime(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    """Its outputs; elements of types that NumPy lacks go in as weights, and come out as bytes."""
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [info.name for info in model.graph.input if info.name not in weights]
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    feeds = {}
    for name, value in zip(names, inputs, strict=True):
        value = np.asarray(value) if np.isscalar(value) else value
        if isinstance(value, np.ndarray) and _is_small(value.dtype):
            kept = [info for info in fed.graph.input if info.name != name]
            del fed.graph.input[:]
            fed.graph.input.extend(kept)
            fed.graph.initializer.append(numpy_helper.from_array(value, name))
        else:
            feeds[name] = value
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    settings.add_session_config_entry("session.allow_released_opsets_only", "0")
    session = onnxruntime.InferenceSession(fed.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    outputs = [info.name for info in session.get_outputs()]
    elements = {info.name: info.type.tensor_type.elem_type for info in model.graph.output}
    if any(_is_small(onnx.helper.tensor_dtype_to_np_dtype(element)) for element in elements.values() if element):
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        found = session.run_with_ort_values(outputs, values)
        return [_array(value, elements[name]) for name, value in zip(outputs, found, strict=True)]
    return session.run(outputs, feeds)


def _is_small(dtype: np.dtype) -> bool:
    """Whether NumPy has the type from another package, which ONNX Runtime does not take."""
    return dtype.isbuiltin == _REGISTERED


def _array(value: onnxruntime.OrtValue, element: int) -> np.ndarray:
    if not _is_small(onnx.helper.tensor_dtype_to_np_dtype(element)):
        return value.numpy()
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return numpy_helper.to_array(onnx.TensorProto(data_type=element, dims=value.shape(), raw_data=content))


Engine = Callable[[TestCase, onnx.ModelProto, Sequence[DataSet], Mapping[str, Any]], dict[str, Any]]
ENGINES: dict[str, Engine] = {"souffle": _souffle, "ort": _onnxruntime}


def _draws(model: onnx.ModelProto) -> bool:
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return any(node.op_type in _DRAWING for body in bodies for node in body)


def _difference(
    given: Sequence[Any], expected: Sequence[Any], case: TestCase, label: str = "output", *, drawn: bool
) -> str:
    """What is wrong with outputs; empty where they are right. Of those that were drawn, shape and type are compared."""
    if len(given) != len(expected):
        return f"{len(given)} of {label}, expected {len(expected)}"
    for position, (value, wanted) in enumerate(zip(given, expected, strict=True)):
        here = f"{label} {position}"
        if isinstance(wanted, (list, tuple)) and isinstance(value, (list, tuple)):
            problem = _difference(value, wanted, case, f"{here}, element", drawn=drawn)
        elif wanted is None or value is None or isinstance(wanted, (list, tuple)) or isinstance(value, (list, tuple)):
            same = wanted is None and value is None
            problem = "" if same else f"{here} is a {type(value).__name__}, expected a {type(wanted).__name__}"
        else:
            problem = _array_difference(np.asarray(value), np.asarray(wanted), case, here, drawn=drawn)
        if problem:
            return problem
    return ""


def _array_difference(array: np.ndarray, wanted: np.ndarray, case: TestCase, here: str, *, drawn: bool) -> str:
    label = f"{here}: {array.dtype}{list(array.shape)}"
    if wanted.dtype.kind in "US" and array.dtype.kind == "O":
        wanted = wanted.astype(object)
    if array.shape != wanted.shape or array.dtype != wanted.dtype:
        return f"{label}, expected {wanted.dtype}{list(wanted.shape)}"
    if drawn:
        return ""
    if _is_small(array.dtype) and str(array.dtype) != "bfloat16":
        # NumPy compares the small types of ml_dtypes only as wider ones; no two of their values are that near.
        array, wanted = array.astype("float32"), wanted.astype("float32")
    try:
        Runner.assert_similar_outputs([wanted], [array], case.rtol, case.atol)
    except AssertionError as error:
        return f"{label}: {_size_of(array, wanted)}; {' '.join(str(error).split())[:300]}"
    return ""


def _size_of(given: np.ndarray, wanted: np.ndarray) -> str:
    if str(given.dtype) in _WIDE:
        return f"{int((given != wanted).sum())} of {given.size} differ"
    a, b = given.astype("float64"), wanted.astype("float64")
    with np.errstate(all="ignore"):
        off = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        error = np.abs(a - b)[off & np.isfinite(a) & np.isfinite(b)]
    largest = f"largest error {error.max():.3g} of {np.abs(b[np.isfinite(b)]).max():.3g}" if error.size else ""
    return f"{int(off.sum())} of {given.size} differ, {int((np.isfinite(a) != np.isfinite(b)).sum())} NaN; {largest}"
