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
    return [_either(interpreter, node, condition, a, b) for a, b in zip(yes, no, strict=True)]


def _either(interpreter: Interpreter, node: onnx.NodeProto, condition: Value, yes: Value, no: Value) -> Value:
    """`yes` or `no`, as a condition of the run time says; sequences of one length element by element."""
    if yes is None and no is None:
        return None
    if isinstance(yes, list) and isinstance(no, list) and len(yes) == len(no):
        return [_either(interpreter, node, condition, a, b) for a, b in zip(yes, no, strict=True)]
    parts = (yes, no)
    if any(value is None or isinstance(value, list) for value in parts) or yes.shape != no.shape:
        raise Obstacle(
            "its condition is computed at run time, and its branches give results of different shapes or kinds",
            "give the condition as a constant, or let both branches give tensors of one shape",
            refusal=Refusal.PARAMETER,
            parameters=("cond",),
        )
    return interpreter.emit("Where", [condition, yes, no], f"{node.name}/Where")[0]


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
        return _scan_of_batch(interpreter, node, inputs, scope)
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


def _scan_of_batch(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    """The form of operator set 8: over each element of a batch for itself, as long as its own sequence is."""
    body, count = attribute(node, "body"), attribute(node, "num_scan_inputs")
    lengths, *values = inputs
    if lengths is not None and not isinstance(lengths, Known):
        raise computed("sequence_lens")
    initial, sequences = values[: len(values) - count], values[len(values) - count :]
    batch, longest = sequences[0].shape[:2]
    reverse = attribute(node, "directions", [0] * count)

    def element(value: Value, index: int, name: str) -> Value:
        number = Known(np.array(index, dtype="int64"), "index")
        return interpreter.emit("Gather", [value, number], f"{node.name}/{name}", axis=0)[0]

    rows: list[list[Value]] = []
    for row in range(batch):
        steps = longest if lengths is None else int(lengths.array.reshape(-1)[row])
        if not 1 <= steps <= longest:
            raise Obstacle(
                f"element {row} of its batch has a sequence of {steps}, and there are {longest} steps",
                "give each a sequence_lens from 1 to the number of steps",
            )
        state = [element(value, row, f"b{row}/state") for value in initial]
        parts = [element(value, row, f"b{row}/x") for value in sequences]
        scanned: list[list[Value]] = [[] for _ in range(len(body.output) - len(state))]
        for step in range(steps):
            given = [
                element(part, steps - 1 - step if turned else step, f"b{row}/t{step}/x")
                for part, turned in zip(parts, reverse, strict=True)
            ]
            results = interpreter.subgraph(body, [*state, *given], f"{node.name}/b{row}/t{step}", scope)
            state = results[: len(state)]
            for collected, value in zip(scanned, results[len(state) :], strict=True):
                collected.append(interpreter.whole(value))
        for collected in scanned:
            # Behind the end of a sequence there are zeros.
            rest = Known(np.zeros(collected[0].shape, dtype=collected[0].dtype), "rest")
            collected.extend([rest] * (longest - steps))
        whole = [interpreter.whole(_collected(node, collected)) for collected in scanned]
        rows.append([*map(interpreter.whole, state), *whole])
    return [_collected(node, column) for column in zip(*rows, strict=True)]


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
    sequence.insert(_position(inputs[2:], len(sequence), len(sequence) + 1, len(sequence)), inputs[1])
    return [sequence]


@special("SequenceErase")
def _erase(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    sequence = list(inputs[0])
    del sequence[_position(inputs[1:], len(sequence), len(sequence), len(sequence) - 1)]
    return [sequence]


@special("SequenceAt")
def _at(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    return [inputs[0][_position(inputs[1:], len(inputs[0]), len(inputs[0]), 0)]]


@special("SequenceMap")
def _map(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    first, body = inputs[0], attribute(node, "body")
    if any(isinstance(value, list) and len(value) != len(first) for value in inputs):
        raise Obstacle("its sequences are of different lengths", "give it sequences of one length")
    results: list[Value] = [[] for _ in body.output]
    for position in range(len(first)):
        given = [value[position] if isinstance(value, list) else value for value in inputs]
        found = interpreter.subgraph(body, given, f"{node.name}/t{position}", scope)
        for collected, value in zip(results, found, strict=True):
            collected.append(value)
    return results


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


def _position(given: Sequence[Value], length: int, places: int, default: int) -> int:
    """A position in a sequence of `length`, where there are `places` of them; negative ones count from its end."""
    if not given or given[0] is None:
        position = default
    elif isinstance(given[0], Known):
        position = int(given[0].array.reshape(-1)[0])
        position += length if position < 0 else 0
    else:
        raise computed("position")
    if not 0 <= position < places:
        raise Obstacle(
            f"its position is {position}, and there are {places} places in the sequence", "give it a position within"
        )
    return position
