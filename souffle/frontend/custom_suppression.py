"""NonMaxSuppression: one box after the other, in as many steps as boxes may be selected for a class.

A step takes, for each class of each image, the box of the highest score that is still waiting, the first of equal ones,
and turns away what overlaps it by more than the threshold. What became of a box is one number, of which each step gives
the next::

    state    0 waits    -1 is turned away    n > 0 was taken, n steps ago

So all steps are one expression. A box that was taken `n` steps before the end was taken in step `steps - n`, and the
rows of the result are those of the first class, in the order in which they were taken, then those of the next one.

Overlaps are computed as ONNX Runtime does: boxes without an area have none. A score that is NaN selects nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from tvm import te, tirx

from souffle.errors import Refusal
from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, check_length, int_imm
from souffle.frontend.custom_selection import count_of
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle
from souffle.frontend.through_counts import Reading, reads_counts, with_counts
from souffle.frontend.values import Count, Known, Scope, Value
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

_MOST_STEPS = 1024


def _only(tensor: te.Tensor) -> PrimExpr:
    """The element of a tensor that has one."""
    return tensor(*([int_imm(0)] * len(tensor.shape)))


def _ones(test: PrimExpr) -> PrimExpr:
    return tirx.Select(test, int_imm(1), int_imm(0))


def _corners(operands: NodeOperands, centred: bool) -> list[te.Tensor]:
    """Of each box the lower and the upper end along two dimensions."""
    boxes, (batch, number, _) = operands.tensor(0), operands.shape(0)

    def corner(b, n, k):
        if centred:
            along, half = tirx.Select(k >= 2, int_imm(1), int_imm(0)), tirx.const(2.0, "float32")
            middle, extent = boxes(b, n, along), boxes(b, n, along + 2)
            return tirx.Select(tirx.floormod(k, 2) == 0, middle - extent / half, middle + extent / half)
        along = tirx.Select(k >= 2, int_imm(1), int_imm(0))
        one, other = boxes(b, n, along), boxes(b, n, along + 2)
        lower, upper = tirx.Select(one >= other, other, one), tirx.Select(one >= other, one, other)
        return tirx.Select(tirx.floormod(k, 2) == 0, lower, upper)

    return [te.compute((batch, number, 4), corner, name="corner")]


def _waiting(operands: NodeOperands, thresholded: bool) -> list[te.Tensor]:
    """The first state: which boxes wait. The operands are the scores, a threshold, and how many boxes there are."""
    scores, limit = operands.tensor(0), operands.tensor(2)

    def state(b, c, n):
        score = scores(b, c, n)
        waits = score > _only(operands.tensor(1)) if thresholded else score >= tirx.const(-math.inf, "float32")
        if limit is not None:
            waits = tirx.And(waits, n.astype("int64") < _only(limit))
        return tirx.Select(waits, int_imm(0), int_imm(-1))

    return [te.compute(operands.shape(0), state, name="waiting")]


def _step(operands: NodeOperands) -> list[te.Tensor]:
    """The next state. The operands are the state, the scores, the corners of boxes, and the threshold of overlaps."""
    state, scores, corners = (operands.tensor(k) for k in range(3))
    batch, classes, number = operands.shape(0)
    least = tirx.const(-math.inf, "float32")

    def highest(b, c):
        r = te.reduce_axis((0, number), name="r")
        return te.max(tirx.Select(state(b, c, r) == 0, scores(b, c, r), least), axis=r)

    best = te.compute((batch, classes), highest, name="best")

    def position(b, c):
        r = te.reduce_axis((0, number), name="r")
        taken = tirx.And(state(b, c, r) == 0, scores(b, c, r) == best(b, c))
        return te.min(tirx.Select(taken, r.var, int_imm(number)), axis=r)

    where = te.compute((batch, classes), position, name="where")

    def next_state(b, c, n):
        now, at = state(b, c, n), where(b, c)
        inside = tirx.min(at, int_imm(number - 1))
        away = tirx.And(at < number, _overlaps(corners, b, inside, n, _only(operands.tensor(3))))
        waiting = tirx.Select(n == at, int_imm(1), tirx.Select(away, int_imm(-1), int_imm(0)))
        return tirx.Select(now == 0, waiting, tirx.Select(now > 0, now + 1, now))

    return [te.compute((batch, classes, number), next_state, name="state")]


def _overlaps(corners: te.Tensor, b: PrimExpr, i: PrimExpr, j: PrimExpr, threshold: PrimExpr) -> PrimExpr:
    """Whether the intersection of two boxes is more of their union than the threshold."""
    zero = tirx.const(0.0, "float32")
    shared = [
        tirx.min(corners(b, i, k + 1), corners(b, j, k + 1)) - tirx.max(corners(b, i, k), corners(b, j, k))
        for k in (0, 2)
    ]
    areas = [(corners(b, n, 1) - corners(b, n, 0)) * (corners(b, n, 3) - corners(b, n, 2)) for n in (i, j)]
    intersection = shared[0] * shared[1]
    union = areas[0] + areas[1] - intersection
    positive = [part > zero for part in (*shared, intersection, *areas, union)]
    return tirx.And(tirx.all(*positive), intersection / union > threshold)


def _rows(operands: NodeOperands, steps: int) -> list[te.Tensor]:
    """The result and its count. The operands are the last state, and how many boxes a class has at most."""
    state, limit = operands.tensor(0), operands.tensor(1)
    batch, classes, number = operands.shape(0)
    groups = batch * classes
    check_length(groups * steps)

    def amount(g):
        r = te.reduce_axis((0, number), name="r")
        return te.sum(_ones(state(tirx.floordiv(g, classes), tirx.floormod(g, classes), r) > 0), axis=r)

    taken = te.compute((groups,), amount, name="taken")

    def limited(g):
        if limit is None:
            return taken(g)
        most = tirx.max(tirx.min(_only(limit), int_imm(steps, "int64")), int_imm(0, "int64"))
        return tirx.min(taken(g), most.astype("int32"))

    amounts = te.compute((groups,), limited, name="amount")

    def box_of(g, k):
        r = te.reduce_axis((0, number), name="r")
        then = state(tirx.floordiv(g, classes), tirx.floormod(g, classes), r)
        return te.sum(tirx.Select(then == steps - k, r.var, int_imm(0)), axis=r)

    box = te.compute((groups, steps), box_of, name="box")

    def up_to(g):
        r = te.reduce_axis((0, groups), name="r")
        return te.sum(tirx.Select(r <= g, amounts(r), int_imm(0)), axis=r)

    end = te.compute((groups,), up_to, name="end")

    def ended(j):
        r = te.reduce_axis((0, groups), name="r")
        return te.sum(_ones(end(r) <= j), axis=r)

    group = te.compute((groups * steps,), ended, name="group")

    def row(j, k):
        inside = tirx.min(group(j), int_imm(groups - 1))
        place = tirx.max(tirx.min(j - (end(inside) - amounts(inside)), int_imm(steps - 1)), int_imm(0))
        parts = tirx.floordiv(inside, classes), tirx.floormod(inside, classes), box(inside, place)
        found = tirx.Select(k == 0, parts[0], tirx.Select(k == 1, parts[1], parts[2]))
        return tirx.Select(group(j) < groups, found, int_imm(0)).astype("int64")

    rows = te.compute((groups * steps, 3), row, name="selected")
    return [rows, te.compute((), lambda: end(int_imm(groups - 1)).astype("int64"), name="count")]


@special("NonMaxSuppression")
def _suppression(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    if all(value is None or isinstance(value, Known) for value in inputs):
        return None
    return _suppressed(interpreter, node, inputs, None)


@reads_counts("NonMaxSuppression")
def _suppression_of_counted(reading: Reading) -> Sequence[Value]:
    boxes, scores = reading.counts(0), reading.counts(1)
    if set(boxes) - {1} or set(scores) - {2} or any(reading.counts(k) for k in range(2, len(reading.inputs))):
        raise reading.refused("only the number of boxes may be of such an extent")
    if boxes.get(1) is not scores.get(2):
        raise reading.refused("there may be another number of boxes than of scores")
    inputs = [value.tensor if k < 2 else value for k, value in enumerate(reading.inputs)]
    return _suppressed(reading.interpreter, reading.node, inputs, boxes[1])


def _suppressed(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], number: Count | None
) -> Sequence[Value]:
    boxes, scores, most, overlap, threshold = [*map(interpreter.whole, inputs), *[None] * (5 - len(inputs))]
    batch, count, width = boxes.shape
    if scores.shape[::2] != (batch, count) or width != 4:
        raise Obstacle(
            f"its scores {list(scores.shape)} are not those of boxes {list(boxes.shape)}",
            "give boxes [batch, boxes, 4] and scores [batch, classes, boxes]",
        )
    steps, limit = count, most
    if most is None or isinstance(most, Known):
        steps, limit = min(count, max(0, 0 if most is None else int(most.array.reshape(-1)[0]))), None
    if not steps * math.prod(scores.shape):
        return [Known(np.zeros((0, 3), dtype="int64"), f"{node.name}_empty")]
    if steps > _MOST_STEPS:
        raise Obstacle(
            f"it may select {steps} boxes for a class, one after the other, and at most {_MOST_STEPS} are supported",
            "give max_output_boxes_per_class as a constant that is smaller, or fewer boxes, such as those that TopK "
            "selects by their scores",
            refusal=Refusal.DATA,
            parameters=("max_output_boxes_per_class",),
        )
    overlap = overlap if overlap is not None else Known(np.array(0, dtype="float32"), "iou_threshold")
    (corners,) = interpreter.defined(_corners, _part(node, "corners"), [boxes], (_is_centred(node),))
    given = [scores, threshold, *(() if number is None else (number.tensor,))]
    (state,) = interpreter.defined(_waiting, _part(node, "waiting"), given, (threshold is not None,))
    for k in range(steps):
        (state,) = interpreter.defined(_step, _part(node, f"t{k}"), [state, scores, corners, overlap], ())
    rows, total = interpreter.defined(_rows, node, [state, *(() if limit is None else (limit,))], (steps,))
    return [with_counts(rows, {0: count_of(interpreter, node, total, ("rows", rows))})]


def _is_centred(node: onnx.NodeProto) -> bool:
    return bool(attribute(node, "center_point_box", 0))


def _part(node: onnx.NodeProto, name: str) -> onnx.NodeProto:
    return onnx.NodeProto(name=f"{node.name}/{name}", op_type=node.op_type, domain=node.domain)
