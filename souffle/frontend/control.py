"""Control flow, sequences and optionals, resolved while the graph is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from souffle.errors import Refusal
from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle, computed
from souffle.frontend.values import Known, Scope, Stacked, Value

__all__: list[str] = []

_MOST_ITERATIONS = 10_000


@special("If")
def _if(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    condition = interpreter.whole(inputs[0])
    branches = {True: attribute(node, "then_branch"), False: attribute(node, "else_branch")}
    if isinstance(condition, Known):
        taken = bool(condition.array.reshape(-1)[0])
        return interpreter.subgraph(branches[taken], [], node.name, scope)
    # Both branches have no effects, so both can be computed and the result be chosen.
    yes, no = (
        interpreter.subgraph(branches[taken], [], f"{node.name}/{name}", scope)
        for taken, name in ((True, "then"), (False, "else"))
    )
    results = []
    for a, b in zip(yes, no, strict=True):
        if a is None or b is None or isinstance(a, list) or isinstance(b, list) or a.shape != b.shape:
            raise Obstacle(
                "its condition is computed at run time, and its branches give results of different shapes or kinds",
                "give the condition as a constant, or let both branches give tensors of one shape",
                refusal=Refusal.PARAMETER,
                parameters=("cond",),
            )
        results.extend(interpreter.emit("Where", [condition, a, b], f"{node.name}/Where"))
    return results


@special("Loop")
def _loop(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    body = attribute(node, "body")
    limit, condition, *state = inputs
    if not all(value is None or isinstance(value, Known) for value in (limit, condition)):
        raise computed("M" if not isinstance(limit, Known) and limit is not None else "cond")
    count = _MOST_ITERATIONS if limit is None else int(limit.array.reshape(-1)[0])
    going = condition is None or bool(condition.array.reshape(-1)[0])
    scanned: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    iteration = 0
    while going and iteration < count:
        if iteration >= _MOST_ITERATIONS:
            raise Obstacle(
                f"it runs more than {_MOST_ITERATIONS} times, and each time becomes code of its own",
                "let it end earlier, or write it with operators on whole tensors",
            )
        counter = Known(np.array(iteration, dtype="int64"), "iteration")
        known = Known(np.array(True), "condition")
        onward, *results = interpreter.subgraph(body, [counter, known, *state], f"{node.name}/t{iteration}", scope)
        if not isinstance(onward, Known):
            raise Obstacle(
                "how often it runs is decided at run time, by the condition that its body computes",
                "give it a fixed number of iterations, with the true constant as the body's condition",
                refusal=Refusal.DATA,
            )
        going = bool(onward.array.reshape(-1)[0])
        state = results[: len(state)]
        for values, value in zip(scanned, results[len(state) :], strict=True):
            values.append(interpreter.whole(value))
        iteration += 1
    return [*state, *(_collected(node, values) for values in scanned)]


@special("Scan")
def _scan(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    version = next((o.version for o in scope.opsets if o.domain in ("", "ai.onnx")), 0)
    if version < 9:
        raise Obstacle(
            f"its form of operator set {version} is not supported", "export the model with operator set 9 or newer"
        )
    body = attribute(node, "body")
    count = attribute(node, "num_scan_inputs")
    state, sequences = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    outputs = len(body.output) - len(state)
    in_axes = attribute(node, "scan_input_axes", [0] * count)
    out_axes = attribute(node, "scan_output_axes", [0] * outputs)
    in_reverse = attribute(node, "scan_input_directions", [0] * count)
    out_reverse = attribute(node, "scan_output_directions", [0] * outputs)
    in_axes = [axis % len(value.shape) for axis, value in zip(in_axes, sequences, strict=True)]
    length = sequences[0].shape[in_axes[0]]
    scanned: list[list[Value]] = [[] for _ in range(outputs)]
    for step in range(length):
        given = []
        for value, axis, reverse in zip(sequences, in_axes, in_reverse, strict=True):
            index = Known(np.array(length - 1 - step if reverse else step, dtype="int64"), "index")
            given.extend(interpreter.emit("Gather", [value, index], f"{node.name}/t{step}/x", axis=axis))
        results = interpreter.subgraph(body, [*state, *given], f"{node.name}/t{step}", scope)
        state = results[: len(state)]
        for values, value in zip(scanned, results[len(state) :], strict=True):
            values.append(interpreter.whole(value))
    collected = []
    for values, axis, reverse in zip(scanned, out_axes, out_reverse, strict=True):
        ordered = values[::-1] if reverse else values
        collected.append(_collected(node, ordered, axis))
    return [*state, *collected]


def _collected(node: onnx.NodeProto, values: Sequence[Value], axis: int = 0) -> Stacked:
    if not values:
        raise Obstacle(
            "it does not run even once, so that its outputs have no shape", "let it run at least once, or leave it out"
        )
    return Stacked(tuple(values), axis % (len(values[0].shape) + 1), node.name)


@special("SequenceConstruct")
def _construct(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [list(inputs)]


@special("SequenceEmpty")
def _empty(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [[]]


@special("SequenceInsert")
def _insert(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    sequence = list(inputs[0])
    at = _position(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else len(sequence)
    sequence.insert(at + len(sequence) if at < 0 else at, inputs[1])
    return [sequence]


@special("SequenceErase")
def _erase(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    sequence = list(inputs[0])
    del sequence[_position(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else -1]
    return [sequence]


@special("SequenceAt")
def _at(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [inputs[0][_position(inputs[1])]]


@special("SequenceLength")
def _length(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [Known(np.array(len(inputs[0]), dtype="int64"), node.name)]


@special("ConcatFromSequence")
def _concat(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    parts = [interpreter.whole(value) for value in inputs[0]]
    axis = attribute(node, "axis")
    if attribute(node, "new_axis", 0):
        return [Stacked(tuple(parts), axis % (len(parts[0].shape) + 1), node.name)]
    return interpreter.emit("Concat", parts, f"{node.name}/Concat", axis=axis)


@special("SplitToSequence")
def _split(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    value = interpreter.whole(inputs[0])
    axis = attribute(node, "axis", 0) % len(value.shape)
    extent = value.shape[axis]
    split = inputs[1] if len(inputs) > 1 else None
    if split is None:
        sizes = [1] * extent
    elif not isinstance(split, Known):
        raise computed("split")
    elif split.array.ndim == 0:
        size = int(split.array)
        sizes = [min(size, extent - start) for start in range(0, extent, size)]
    else:
        sizes = split.array.tolist()
    given = Known(np.array(sizes, dtype="int64"), "sizes")
    parts = interpreter.emit("Split", [value, given], f"{node.name}/Split", outputs=len(sizes), axis=axis)
    if split is None and not attribute(node, "keepdims", 1):
        axes = Known(np.array([axis], dtype="int64"), "axes")
        parts = [interpreter.emit("Squeeze", [part, axes], f"{node.name}/Squeeze")[0] for part in parts]
    return [parts]


@special("Optional", "OptionalGetElement")
def _optional(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [inputs[0] if inputs else None]


@special("OptionalHasElement")
def _has_element(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [Known(np.array(bool(inputs) and inputs[0] is not None), node.name)]


def _position(value: Value) -> int:
    if not isinstance(value, Known):
        raise computed("position")
    return int(value.array.reshape(-1)[0])
