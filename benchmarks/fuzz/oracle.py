"""What a network should give, and how surely.

ONNX Runtime is asked without and with its graph optimizations. How far rounding may move each element is found by
trial: the network runs again with every inexact tensor in it multiplied by ``1 + e``, `e` a random rounding error.
Elements that move too far, or whose infinities, integers and booleans change, are not compared. So a tolerance is what
the network's own conditioning makes of rounding, and no more.

Where ONNX Runtime's maxima lose NaN, nodes beside them pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.values import is_exact

__all__ = ["ORACLE_ERRORS", "Expectation", "Verdict", "expect", "judge", "oracle_is_alone", "run_oracle"]

ORACLE_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""What ONNX Runtime raises for a model that it does not take."""

_NO_MEMORY = ("bad_alloc", "Failed to allocate memory")
"""What it says among them where there is no memory."""

# fmt: off
_MOVERS = frozenset((
    "Identity", "Dropout", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Pad",
    "Slice", "Split", "Concat", "DepthToSpace", "SpaceToDepth", "Gather", "GatherElements", "GatherND",
    "ScatterElements", "ScatterND", "Where", "Trilu", "ReverseSequence", "Compress", "TopK", "Relu", "Max", "Min",
    "Neg", "Abs", "Clip", "ReduceMax", "ReduceMin", "MaxPool", "Shape", "Size", "Constant", "ConstantOfShape",
    "Floor", "Ceil", "Round", "Sign", "Hardmax", "EyeLike", "OneHot", "Range", "If", "Not", "Equal", "Greater",
    "Less", "CenterCropPad", "Col2Im", "MaxUnpool", "NonZero", "Unique"
))
# fmt: on
"""Operators that round nothing, so that what they give is as exact as what they take (ScatterND by a sum aside)."""

# fmt: off
_ARITHMETIC = frozenset((
    "Add", "Sub", "Mul", "Sum", "MatMul", "Gemm", "Conv", "ConvTranspose", "ReduceSum", "ReduceSumSquare",
    "ReduceL1", "CumSum", "Einsum", "GlobalMaxPool", "Cast", "CastLike", "PRelu", "LeakyRelu", "ThresholdedRelu",
    "Shrink", "Mod"
))
# fmt: on
"""Operators whose result is exact where it and its operands are small multiples of 1/64."""

ROUNDING = {"float32": 2.0**-22, "float64": 2.0**-50, "float16": 2.0**-10}
"""The rounding errors tried: a few units in the last place."""

# fmt: off
_SUMS = frozenset((
    "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "ReduceSum", "ReduceMean", "AveragePool", "GlobalAveragePool",
    "CumSum", "Attention", "LSTM", "GRU", "RNN"
))
# fmt: on
"""Operators whose zeros have the sign that the sum was begun with, or not."""

_LOSE_NAN = {"MaxPool": "MaxPool", "GlobalMaxPool": "GlobalMaxPool"}
_LOSE_NAN |= dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceLogSumExp"), "ReduceMax")
"""Operators through which ONNX Runtime loses NaN, and what tells where one was."""

_LOSSY = "__lossy"

_STASHED = frozenset(("GroupNormalization", "RMSNormalization", "Attention"))
"""Operators whose definition computes in float32 (``stash_type``) whatever they are given."""

FACTOR_ROUNDING = 2.0**-11
"""That of precision="mixed" and "tf32", whose factors have 11 bits."""

_RTOL = {"float32": 1e-3, "float64": 1e-6, "float16": 1e-2}
_ATOL = {"float32": 1e-5, "float64": 1e-9, "float16": 2e-3}
_ROUNDED = 2e-2
_FACTOR = 16.0
"""How many times the largest deviation seen in the trials a result may be off."""


def _options(optimized: bool) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    return options


def run_oracle(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], *, optimized: bool = False
) -> list[np.ndarray]:
    """The outputs that ONNX Runtime gives.

    Parameters
    ----------
    model : onnx.ModelProto
    inputs : mapping of str to array
    optimized : bool
        With its graph optimizations.

    Raises
    ------
    One of ORACLE_ERRORS
        If it does not take the model.
    MemoryError
        Which says nothing of the model.
    """
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), _options(optimized), providers=["CPUExecutionProvider"]
        )
        return session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})
    except ORACLE_ERRORS as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        raise


def all_tensors(case: Case) -> dict[str, np.ndarray]:
    """Every tensor of the graph by name, as ONNX Runtime computes it."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    held = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    present = {output.name for output in model.graph.output}
    made = [name for node in model.graph.node for name in node.output if name and name not in present]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    names = [output.name for output in model.graph.output]
    return {**held, **case.inputs, **dict(zip(names, run_oracle(model, case.inputs), strict=True))}


def _with_nan_passed_on(case: Case) -> Case:
    """The case with nodes that make NaN of what an operator makes of NaN by leaving it out."""
    while True:
        tensors = all_tensors(case)
        loses = (
            node
            for node in case.model.graph.node
            if node.op_type in _LOSE_NAN
            and not node.output[0].endswith(_LOSSY)
            and np.isnan(tensors[node.input[0]]).any()
        )
        node = next(loses, None)
        if node is None:
            return case
        case = Case(_with_nan_after(case.model, node, tensors[node.output[0]].dtype), case.inputs)


def _with_infinity_passed_on(case: Case) -> Case:
    """The case with minus infinity where ONNX Runtime's MaxPool has left it out: it starts from the least number."""
    tensors, model = all_tensors(case), case.model
    for node in list(model.graph.node):
        if node.op_type not in ("MaxPool", "GlobalMaxPool") or tensors[node.output[0]].dtype.kind != "f":
            continue
        if np.isneginf(tensors[node.input[0]]).any():
            model = _with_infinity_after(model, node, tensors[node.output[0]].dtype)
    return Case(model, case.inputs)


def _with_infinity_after(model: onnx.ModelProto, node: onnx.NodeProto, dtype: np.dtype) -> onnx.ModelProto:
    name = node.output[0]
    least, infinity = (numpy_helper.from_array(np.array(value, dtype)) for value in (np.finfo(dtype).min, -np.inf))
    of = [f"{name}__{step}" for step in ("least", "is_least", "infinity")]
    beside = [
        helper.make_node("Constant", [], [of[0]], value=least),
        helper.make_node("Equal", [f"{name}__finite", of[0]], [of[1]]),
        helper.make_node("Constant", [], [of[2]], value=infinity),
        helper.make_node("Where", [of[1], of[2], f"{name}__finite"], [name]),
    ]
    return _with_nodes_after(model, node, f"{name}__finite", beside)


def _with_nan_after(model: onnx.ModelProto, node: onnx.NodeProto, dtype: np.dtype) -> onnx.ModelProto:
    name, (data, *rest) = node.output[0], node.input
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "storage_order"}
    one, nan = (numpy_helper.from_array(array) for array in (np.ones((), np.float32), np.array(np.nan, dtype)))
    of = [f"{name}__{step}" for step in ("of", "number", "most", "one", "set", "nan")]
    beside = [
        helper.make_node("IsNaN", [data], [of[0]]),
        helper.make_node("Cast", [of[0]], [of[1]], to=onnx.TensorProto.FLOAT),
        helper.make_node(_LOSE_NAN[node.op_type], [of[1], *rest], [of[2]], **attributes),
        helper.make_node("Constant", [], [of[3]], value=one),
        helper.make_node("Equal", [of[2], of[3]], [of[4]]),
        helper.make_node("Constant", [], [of[5]], value=nan),
        helper.make_node("Where", [of[4], of[5], f"{name}{_LOSSY}"], [name]),
    ]
    return _with_nodes_after(model, node, f"{name}{_LOSSY}", beside)


def _with_nodes_after(
    model: onnx.ModelProto, node: onnx.NodeProto, name: str, beside: list[onnx.NodeProto]
) -> onnx.ModelProto:
    """The model with nodes after one of its own, whose first output has another name."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:]
    for present in model.graph.node:
        changed.graph.node.append(present)
        if list(present.output) == list(node.output):
            changed.graph.node[-1].output[0] = name
            changed.graph.node.extend(beside)
    return changed


def _noisy(case: Case, tensors: Mapping[str, np.ndarray], rounding: float, seed: int) -> Case:
    """The case with a rounding error in each tensor that is not exact."""
    rng = np.random.default_rng(seed)

    def errors(array: np.ndarray, least: float = rounding) -> np.ndarray:
        size = max(least, ROUNDING[str(array.dtype)])
        return np.asarray(1 + size * rng.choice((-1.0, 1.0), array.shape)).astype(array.dtype)

    def inexact(array: np.ndarray) -> bool:
        return str(array.dtype) in ROUNDING and not is_exact(array)

    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    inputs = {
        name: np.asarray(array * errors(array)) if inexact(array) else array for name, array in case.inputs.items()
    }
    for initializer in graph.initializer:
        array = numpy_helper.to_array(initializer)
        if inexact(array):
            initializer.CopyFrom(numpy_helper.from_array(np.asarray(array * errors(array)), initializer.name))
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for position, name in enumerate(node.output):
            array = tensors.get(name)
            if array is None or str(array.dtype) not in ROUNDING or not array.size:
                continue
            scatters = node.op_type.startswith("Scatter") and any(a.name == "reduction" for a in node.attribute)
            if node.op_type in _MOVERS and not scatters:
                continue
            operands = [tensors[i] for i in node.input if i in tensors]
            exact = (node.op_type in _ARITHMETIC or scatters) and all(is_exact(a) for a in (array, *operands))
            signs = node.op_type in _SUMS and bool((array == 0).any())
            if exact and not signs:
                continue
            factor = f"{name}__rounding"
            node.output[position] = f"{name}__exact"
            least = max(rounding, ROUNDING["float32"] if node.op_type in _STASHED else 0.0)
            # An input of no declared shape: what is inferred for the tensor may differ from what it comes to.
            inputs[factor] = np.ones_like(array) if exact else errors(array, least)
            if signs:
                # All in one trial, and some in another.
                turned = -1.0 if seed == 0 else rng.choice((-1.0, 1.0), array.shape)
                inputs[factor] = np.where(array == 0, turned, inputs[factor]).astype(array.dtype)
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(helper.make_tensor_value_info(factor, kind, None))
            nodes.append(helper.make_node("Mul", [f"{name}__exact", factor], [name]))
    del graph.node[:]
    graph.node.extend(nodes)
    return Case(model, inputs)


@dataclass(frozen=True, eq=False)
class Expectation:
    """What outputs should be.

    Attributes
    ----------
    outputs : dict of str to array
    tolerance : dict of str to array
        How far each element may be off; infinite where nothing can be said.
    unsure : bool
        Whether ONNX Runtime with its optimizations gives something else than without.
    largest : float
        Magnitude of the largest finite number anywhere in the network.
    infinite : bool
        Whether there is an infinite one.
    """

    outputs: dict[str, np.ndarray]
    tolerance: dict[str, np.ndarray]
    unsure: bool
    largest: float
    infinite: bool = False

    @property
    def unstable(self) -> bool:
        """Whether most of the elements cannot be compared."""
        open_elements = sum(int(np.isinf(t).sum()) for t in self.tolerance.values())
        return 2 * open_elements > sum(t.size for t in self.tolerance.values())


def expect(case: Case, *, rounded: bool = False, trials: int = 2) -> Expectation:
    """Ask ONNX Runtime.

    Parameters
    ----------
    case : Case
    rounded : bool
        Judge precision="mixed" or "tf32": factors of 11 bits.
    trials : int
        With rounding errors.

    Raises
    ------
    One of ORACLE_ERRORS
        If it does not take the model.
    """
    case = _with_infinity_passed_on(_with_nan_passed_on(case))
    tensors = all_tensors(case)
    names = [output.name for output in case.model.graph.output]
    # A double is no more precise than what it was made of.
    single = any(node.op_type in _STASHED for node in case.model.graph.node)
    single = single or any(array.dtype in (np.float32, np.float16) for array in tensors.values())
    outputs = {name: tensors[name] for name in names}
    rounding = FACTOR_ROUNDING if rounded else 0.0
    noisy = [_noisy(case, tensors, rounding, seed) for seed in range(trials)]
    moved = [dict(zip(names, run_oracle(n.model, n.inputs), strict=True)) for n in noisy]
    optimized = dict(zip(names, run_oracle(case.model, case.inputs, optimized=True), strict=True))
    tolerance, unsure = {}, False
    products = [tensors[node.input[0]] for node in case.model.graph.node if node.op_type == "ReduceProd"]
    overflows = any(map(_overflows_in_part, products))
    for name, array in outputs.items():
        precision = "float32" if single and array.dtype == np.float64 else str(array.dtype)
        allowed = _tolerance(array, [m[name] for m in moved], precision, rounded)
        off = _beyond(optimized[name], array, allowed)
        unsure = unsure or bool(off.any())
        allowed[off] = np.inf
        tolerance[name] = np.full_like(allowed, np.inf) if overflows else allowed
    floats = [t[np.isfinite(t)] for t in tensors.values() if t.dtype.kind == "f"]
    largest = max((float(np.max(np.abs(t), initial=0.0)) for t in floats), default=0.0)
    infinite = any(bool(np.isinf(t).any()) for t in tensors.values() if t.dtype.kind == "f")
    return Expectation(outputs, tolerance, unsure, largest, infinite)


def _overflows_in_part(factors: np.ndarray) -> bool:
    """Whether a product may leave its type on the way, in some order, though as a whole it does not."""
    if factors.dtype.kind != "f":
        return False
    largest = np.finfo(np.promote_types(factors.dtype, np.float32)).maxexp
    magnitudes = np.abs(factors[np.isfinite(factors)].astype(np.float64))
    return float(np.log2(magnitudes[magnitudes > 1]).sum()) >= largest


def _tolerance(array: np.ndarray, moved: Sequence[np.ndarray], precision: str, rounded: bool) -> np.ndarray:
    if array.dtype.kind != "f":
        changed = np.zeros(array.shape, bool)
        for other in moved:
            changed = changed | (other != array)
        return np.asarray(np.where(changed, np.inf, 0.0))
    wide = array.astype(np.float64)
    finite = np.isfinite(wide)
    largest = float(np.max(np.abs(wide[finite]), initial=0.0))
    deviation = np.zeros(array.shape)
    for other in moved:
        other = other.astype(np.float64)
        same = (wide == other) | (np.isnan(wide) & np.isnan(other))
        both = finite & np.isfinite(other)
        moved_by = np.abs(np.where(both, wide, 0.0) - np.where(both, other, 0.0))
        step = np.where(same, 0.0, np.where(both, moved_by, np.inf))
        deviation = np.maximum(deviation, step)
    magnitude = np.where(finite, np.abs(wide), 0.0)
    if rounded:
        base = np.full(array.shape, _ROUNDED * largest + 1e-5)
    else:
        base = _ATOL[precision] * max(1.0, largest) + _RTOL[precision] * magnitude
    # Where rounding alone moves an element further than that, a wrong one could not be told from a right one.
    return np.asarray(np.where(_FACTOR * deviation > 10 * base, np.inf, base + _FACTOR * deviation))


def _beyond(given: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Which elements are off by more than allowed; NaN equals NaN, and an infinity only itself."""
    if expected.dtype.kind != "f":
        return np.asarray((given != expected) & np.isfinite(allowed))
    one, other = given.astype(np.float64), expected.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    both = np.isfinite(one) & np.isfinite(other)
    with np.errstate(invalid="ignore"):
        near = both & (np.abs(np.where(both, one, 0) - np.where(both, other, 0)) <= allowed)
    return np.asarray(~(same | near) & np.isfinite(allowed))


@dataclass(frozen=True)
class Verdict:
    """Of outputs against an expectation.

    `kind` is ``"right"``, or what is wrong: ``"names"``, ``"type"``, ``"nan"`` (NaN or infinity in the wrong place),
    ``"value"``.
    """

    kind: str
    detail: str = ""


def judge(given: Mapping[str, np.ndarray], expected: Expectation) -> Verdict:
    """Compare outputs with what they should be."""
    if list(given) != list(expected.outputs):
        return Verdict("names", f"{list(given)} for {list(expected.outputs)}")
    for name, wanted in expected.outputs.items():
        array = np.asarray(given[name])
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            return Verdict("type", f"{name}: {array.dtype}{array.shape} for {wanted.dtype}{wanted.shape}")
        off = _beyond(array, wanted, expected.tolerance[name])
        if off.any():
            at = tuple(int(i) for i in np.argwhere(off)[0])
            odd = wanted.dtype.kind == "f" and not (np.isfinite(array[at]) and np.isfinite(wanted[at]))
            detail = f"{name}: {int(off.sum())} of {off.size} elements, such as {at}: {array[at]!r} for {wanted[at]!r}"
            return Verdict("nan" if odd else "value", f"{detail}, allowed {expected.tolerance[name][at]:.3g}")
    return Verdict("right")


def _inferred_shape(model: onnx.ModelProto, name: str) -> tuple[int, ...] | None:
    inferred = onnx.ModelProto()
    inferred.CopyFrom(model)
    for output in inferred.graph.output:
        output.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return None
    for output in inferred.graph.output:
        tensor = output.type.tensor_type
        if output.name == name and tensor.HasField("shape"):
            dims = tensor.shape.dim
            return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None
    return None


def _other_form(array: np.ndarray, wanted: np.ndarray) -> bool:
    return np.shape(array) != wanted.shape or np.asarray(array).dtype != wanted.dtype


def oracle_is_alone(case: Case, given: Mapping[str, np.ndarray], expected: Expectation) -> bool:
    """Whether ONNX's reference implementation does not bear ONNX Runtime out against what was given.

    Where what was given is off, the reference is off from ONNX Runtime, too; and, unless it is about NaN and
    infinities, it gives what was given. About shapes, as of a reduction over an axis of no elements, ONNX's shape
    inference is asked first.
    """
    names = [name for name, wanted in expected.outputs.items() if _other_form(given[name], wanted)]
    inferred = {name: _inferred_shape(case.model, name) for name in names}
    if any(inferred[name] == expected.outputs[name].shape for name in names):
        return False
    if names and all(inferred[name] == np.shape(given[name]) for name in names):
        rest = {name: wanted for name, wanted in expected.outputs.items() if name not in names}
        if not any(_beyond(np.asarray(given[name]), rest[name], expected.tolerance[name]).any() for name in rest):
            return True
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(case.model).run(None, case.inputs)
    # It is many small functions, which raise whatever NumPy raises; then it is no witness.
    except Exception:
        return False
    for (name, wanted), result in zip(expected.outputs.items(), results, strict=True):
        result, array, allowed = np.asarray(result), np.asarray(given[name]), expected.tolerance[name]
        if _other_form(array, wanted):
            if result.shape != array.shape or result.dtype != array.dtype:
                return False
            if _beyond(array, result, np.abs(np.nan_to_num(result.astype("float64"))) * 1e-3 + 1e-5).any():
                return False
            continue
        if result.size == wanted.size and result.dtype == wanted.dtype:
            result = result.reshape(wanted.shape)  # its global pooling leaves axes of 1 too many
        if result.shape != wanted.shape or result.dtype != wanted.dtype:
            return False
        off = _beyond(array, wanted, allowed)
        odd = off & ~(np.isfinite(array) & np.isfinite(wanted)) if wanted.dtype.kind == "f" else np.zeros_like(off)
        if (off & ~_beyond(result, wanted, allowed)).any() or (off & ~odd & _beyond(array, result, allowed)).any():
            return False
    return True
