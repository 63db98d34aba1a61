"""Operators that move elements, each as one TE: gathering, padding, reversing."""

from __future__ import annotations

import onnx
from onnx import helper
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines, int_imm, position_on_axis
from souffle.frontend.refusal import Obstacle
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


@defines("Gather")
def _gather(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape, index_shape = operands.shape(0), operands.shape(1)
    axis = attribute(node, "axis", 0) % len(shape)
    rank = len(index_shape)

    def element(*at):
        index = indices(*at[axis : axis + rank])
        return data(*at[:axis], position_on_axis(index, shape[axis]), *at[axis + rank :])

    return [te.compute((*shape[:axis], *index_shape, *shape[axis + 1 :]), element, name="gather")]


@defines("GatherElements")
def _gather_elements(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape = operands.shape(0)
    axis = attribute(node, "axis", 0) % len(shape)

    def element(*at):
        return data(*at[:axis], position_on_axis(indices(*at), shape[axis]), *at[axis + 1 :])

    return [te.compute(operands.shape(1), element, name="gather_elements")]


@defines("GatherND")
def _gather_nd(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape, index_shape = operands.shape(0), operands.shape(1)
    batch = attribute(node, "batch_dims", 0)
    depth = index_shape[-1]

    def element(*at):
        outer, inner = at[: len(index_shape) - 1], at[len(index_shape) - 1 :]
        chosen = [position_on_axis(indices(*outer, k), shape[batch + k]) for k in range(depth)]
        return data(*at[:batch], *chosen, *inner)

    return [te.compute((*index_shape[:-1], *shape[batch + depth :]), element, name="gather_nd")]


@defines("Pad")
def _pad(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    if len(operands.inputs) > 1 and operands.constant(1) is None:
        return None
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    pads = operands.constant(1).reshape(-1).tolist() if len(operands.inputs) > 1 else attribute(node, "pads")
    if operands.present(3):
        if operands.constant(3) is None:
            return None
        axes = [int(axis) % len(shape) for axis in operands.constant(3).reshape(-1)]
    else:
        axes = list(range(len(shape)))
    before, after = [0] * len(shape), [0] * len(shape)
    for k, axis in enumerate(axes):
        before[axis], after[axis] = int(pads[k]), int(pads[k + len(axes)])
    mode = attribute(node, "mode", b"constant").decode()
    value = tirx.const(attribute(node, "value", 0.0), dtype)
    if operands.present(2):
        value = operands.tensor(2)(*([0] * len(operands.shape(2))))
    padded = [k for k in range(len(shape)) if before[k] or after[k]]
    result_shape = [extent + b + a for extent, b, a in zip(shape, before, after, strict=True)]
    if min(result_shape, default=1) < 1:
        return None

    def source(index: PrimExpr, k: int) -> PrimExpr:
        place, extent = index - before[k], shape[k]
        if mode == "edge":
            return tirx.max(tirx.min(place, int_imm(extent - 1)), int_imm(0))
        if mode == "wrap":
            return tirx.floormod(place, int_imm(extent))
        if mode == "reflect":
            mirrored = tirx.Select(place < 0, -place, place)
            return tirx.Select(mirrored >= extent, 2 * (extent - 1) - mirrored, mirrored)
        return place

    def element(*at):
        if mode != "constant":
            return data(*(source(index, k) if k in padded else index for k, index in enumerate(at)))
        tests = [at[k] >= before[k] for k in padded if before[k] > 0]
        tests += [at[k] < before[k] + shape[k] for k in padded if after[k] > 0]
        inside = data(*(index - before[k] if k in padded else index for k, index in enumerate(at)))
        if not tests:
            return inside
        return tirx.if_then_else(tirx.all(*tests), inside, value)

    return [te.compute(result_shape, element, name="pad")]


@defines("OneHot")
def _one_hot(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    if operands.constant(1) is None:
        return None
    depth = int(operands.constant(1).reshape(-1)[0])
    indices, values, shape = operands.tensor(0), operands.tensor(2), operands.shape(0)
    axis = attribute(node, "axis", -1) % (len(shape) + 1)

    def element(*at):
        index = indices(*at[:axis], *at[axis + 1 :])
        index = index if operands.dtype(0) == "int64" else index.astype("int64")
        place = at[axis].astype("int64")
        here = tirx.Or(index == place, index + depth == place)
        return tirx.Select(here, values(1), values(0))

    return [te.compute((*shape[:axis], depth, *shape[axis:]), element, name="one_hot")]


@defines("ReverseSequence")
def _reverse_sequence(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, lengths, shape = operands.tensor(0), operands.tensor(1), operands.shape(0)
    batch, time = attribute(node, "batch_axis", 1), attribute(node, "time_axis", 0)

    if shape[time] == 1:
        return [te.compute(shape, lambda *at: data(*at), name="reverse_sequence")]

    def element(*at):
        # Within the axis, whatever the input says.
        length = tirx.max(tirx.min(lengths(at[batch]), int_imm(shape[time], "int64")), int_imm(0, "int64"))
        length = length.astype("int32")
        place = tirx.Select(at[time] < length, tirx.max(length - 1 - at[time], int_imm(0)), at[time])
        return data(*at[:time], place, *at[time + 1 :])

    return [te.compute(shape, element, name="reverse_sequence")]


@defines("TensorScatter")
def _tensor_scatter(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """Each element of the cache looks whether the update, from where it is written on, reaches it."""
    cache, update, written = (operands.tensor(k) for k in range(3))
    shape, axis = operands.shape(0), attribute(node, "axis", -2) % len(operands.shape(0))
    length, extent = operands.shape(1)[axis], shape[axis]
    others = [k for k in range(len(shape)) if k != axis]
    if not axis or length > extent or any(shape[k] != operands.shape(1)[k] for k in others):
        raise Obstacle(
            f"an update of {list(operands.shape(1))} along axis {axis} does not fit a cache of {list(shape)}",
            "let both differ along one axis other than the first, along which the update is not longer",
        )
    circular = attribute(node, "mode", b"linear") == b"circular"

    def first(batch):
        """Where the update begins; of indices that fit nowhere, somewhere outside."""
        if written is None:
            return int_imm(0, "int64")
        start, low, high = written(batch), int_imm(-length, "int64"), int_imm(extent, "int64")
        return tirx.floormod(start, high) if circular else tirx.max(tirx.min(start, high), low)

    def element(*at):
        start = first(at[0])
        # In 64 bits for the question, in 32 for the address: of the same expression a simplifier would take what keeps
        # the address inside away.
        asked, place = tirx.Cast("int64", at[axis]) - start, at[axis] - tirx.Cast("int32", start)
        if circular:
            asked, place = tirx.floormod(asked, int_imm(extent, "int64")), tirx.floormod(place, int_imm(extent))
        reached = tirx.all(asked >= 0, asked < int_imm(length, "int64"))
        inside = tirx.max(tirx.min(place, int_imm(length - 1)), int_imm(0))
        return tirx.if_then_else(reached, update(*at[:axis], inside, *at[axis + 1 :]), cache(*at))

    return [te.compute(shape, element, name="tensor_scatter")]


@defines("BitCast")
def _bit_cast(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """Between types of as many bits that are neither small nor ``bool``: see ``conversions.py``."""
    data, target = operands.tensor(0), str(helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    return [te.compute(operands.shape(0), lambda *at: tirx.reinterpret(target, data(*at)), name="bit_cast")]
