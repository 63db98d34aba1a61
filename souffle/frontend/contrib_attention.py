"""Attention as domain ``com.microsoft`` has it: whole, of projections that are given, or of quantized projections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.attributes import attribute
from souffle.frontend.contrib import in_single_precision
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.quantized import CONTRIB
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Value

__all__: list[str] = []

_Results = Sequence[Value] | None


def _shaped(write: NodeWriter, value: Value, *shape: int) -> Value:
    return write("Reshape", value, constant(list(shape), "int64"))


def _heads(write: NodeWriter, x: Value, heads: int) -> Value:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    batch, length, hidden = x.shape
    return write("Transpose", _shaped(write, x, batch, length, heads, hidden // heads), perm=[0, 2, 1, 3])


def _refuse_rest(node: onnx.NodeProto, inputs: Sequence[Value], allowed: Sequence[int], names: Sequence[str]) -> None:
    for name in ("do_rotary", "past_present_share_buffer"):
        if attribute(node, name, 0):
            raise Obstacle(f"its attribute {name} = 1 is not supported", f"export the model without {name}")
    for position, value in enumerate(inputs):
        if value is not None and position not in allowed:
            raise Obstacle(
                f"its input {names[position]!r} is not supported", f"export the model without {names[position]}"
            )


def _mask(write: NodeWriter, mask: Value, batch: int, length: int, total: int, low: float) -> Value:
    """What is added to scores, (batch or 1, 1, length or 1, total): `low` where the mask is zero, or beyond its end."""
    zero, filled = constant(0.0, "float32"), constant(low, "float32")
    if len(mask.shape) == 1:
        positions = constant(np.arange(total).reshape(1, total), mask.dtype)
        ends = _shaped(write, write("Slice", mask, *(constant([k], "int64") for k in (0, batch, 0))), batch, 1)
        seen = write("Less", positions, ends)
        if mask.shape[0] == 2 * batch:
            starts = _shaped(
                write, write("Slice", mask, *(constant([k], "int64") for k in (batch, 2 * batch, 0))), batch, 1
            )
            seen = write("And", seen, write("GreaterOrEqual", positions, starts))
        elif mask.shape[0] != batch:
            raise Obstacle(f"its mask of shape {mask.shape} is not supported", "give it one number for each token")
        return _shaped(write, write("Where", seen, zero, filled), batch, 1, 1, total)
    seen = write("Greater", mask, constant(0, mask.dtype))
    added = write("Where", seen, zero, filled)
    if len(mask.shape) == 2 and mask.shape in ((batch, total), (1, total)):
        return _shaped(write, added, mask.shape[0], 1, 1, total)
    if len(mask.shape) == 3 and mask.shape[1:] == (length, total):
        return _shaped(write, added, mask.shape[0], 1, length, total)
    raise Obstacle(f"its mask of shape {mask.shape} is not supported", "give it one number for each token")


def _attended(
    write: NodeWriter,
    node: onnx.NodeProto,
    q: Value,
    k: Value,
    v: Value,
    masks: Sequence[Value],
) -> Value:
    """(batch, length, heads * size) of queries, keys and values of (batch, heads, length, size).

    Parameters
    ----------
    write : NodeWriter
    node : NodeProto
        For ``scale``, ``unidirectional`` and ``mask_filter_value``.
    q, k, v : value
        Keys and values with those of the past.
    masks : sequence of value
        What is added to scores.
    """
    batch, heads, length, size = q.shape
    total = k.shape[2]
    scale = attribute(node, "scale", 0.0) or 1.0 / math.sqrt(size)
    scores = write("Mul", write("MatMul", q, write("Transpose", k, perm=[0, 1, 3, 2])), constant(scale, "float32"))
    for mask in masks:
        scores = write("Add", scores, mask)
    if attribute(node, "unidirectional", 0):
        later = np.arange(total)[None, :] > np.arange(length)[:, None] + (total - length)
        low = np.where(later, np.finfo(np.float32).min, 0.0).astype("float32")
        beyond = Known(low.reshape(1, 1, length, total), f"{node.name}_later")
        # Not added: a filtered score and this would be infinite together.
        scores = write(
            "Min",
            scores,
            write(
                "Where",
                Known(~later.reshape(1, 1, length, total), f"{node.name}_seen"),
                constant(np.finfo(np.float32).max, "float32"),
                beyond,
            ),
        )
    attended = write("MatMul", write("Softmax", scores, axis=-1), v)
    return _shaped(write, write("Transpose", attended, perm=[0, 2, 1, 3]), batch, length, heads * v.shape[3])


def _self_attention(
    write: NodeWriter,
    node: onnx.NodeProto,
    projected: Value,
    sizes: Sequence[int],
    mask: Value,
    past: Value,
    added: Value,
    present: bool,
) -> list[Value]:
    """Of (batch, length, all projections)."""
    heads, (batch, length, _) = attribute(node, "num_heads"), projected.shape
    parts, start = [], 0
    for size in sizes:
        piece = write("Slice", projected, *(constant([n], "int64") for n in (start, start + size, 2)))
        parts.append(_heads(write, piece, heads))
        start += size
    q, k, v = parts
    if past is not None:
        before = [_shaped(write, write("Gather", past, constant(n, "int64"), axis=0), *past.shape[1:]) for n in (0, 1)]
        k, v = write("Concat", before[0], k, axis=2), write("Concat", before[1], v, axis=2)
    low = attribute(node, "mask_filter_value", -10000.0)
    masks = [] if mask is None else [_mask(write, mask, batch, length, k.shape[2], low)]
    result = _attended(write, node, q, k, v, [*masks, *([] if added is None else [added])])
    if not present:
        return [result]
    whole = [_shaped(write, part, 1, *part.shape) for part in (k, v)]
    return [result, write("Concat", *whole, axis=0)]


def _narrowed(write: NodeWriter, values: Sequence[Value], dtype: str) -> list[Value]:
    return [v if v is None else write.cast(v, dtype) for v in values]


@special("Attention", domain=CONTRIB)
def _attention(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    names = ("input", "weights", "bias", "mask_index", "past", "attention_bias", "past_sequence_length")
    _refuse_rest(node, inputs, range(6), names)
    write, dtype = NodeWriter(interpreter, node), inputs[0].dtype
    x, w, bias, mask, past, added = [*in_single_precision(write, inputs), *[None] * 4][:6]
    sizes = list(attribute(node, "qkv_hidden_sizes", [w.shape[1] // 3] * 3))
    projected = write("MatMul", x, w)
    projected = projected if bias is None else write("Add", projected, bias)
    present = len(node.output) > 1 and bool(node.output[1])
    return _narrowed(write, _self_attention(write, node, projected, sizes, mask, past, added, present), dtype)


@special("QAttention", domain=CONTRIB)
def _q_attention(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    names = ("input", "weight", "bias", "input_scale", "weight_scale", "mask_index", "input_zero_point")
    names = (*names, "weight_zero_point", "past")
    _refuse_rest(node, inputs, range(9), names)
    x, w, bias, x_scale, w_scale, mask, x_zero, w_zero, past = [*inputs, *[None] * 4][:9]
    write = NodeWriter(interpreter, node)
    flat = [write("Reshape", value, constant([-1], "int64")) for value in (x_scale, w_scale)]
    scaled = interpreter.emit("MatMulInteger", [x, w, x_zero, w_zero], f"{node.name}/MatMulInteger")[0]
    real = write("Mul", write("Cast", scaled, to=TensorProto.FLOAT), write("Mul", *flat))
    projected = write("Add", real, bias)
    present = len(node.output) > 1 and bool(node.output[1])
    return _self_attention(write, node, projected, [w.shape[1] // 3] * 3, mask, past, None, present)


@special("MultiHeadAttention", domain=CONTRIB)
def _multi_head_attention(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value")
    names = (*names, "past_sequence_length", "cache_indirection")
    _refuse_rest(node, inputs, range(8), names)
    write, dtype, heads = NodeWriter(interpreter, node), inputs[0].dtype, attribute(node, "num_heads")
    q, k, v, bias, mask, added, past_k, past_v = [*in_single_precision(write, inputs), *[None] * 7][:8]
    if len(q.shape) == 5:
        parts = [write("Gather", q, constant(n, "int64"), axis=3) for n in range(3)]
        q, k, v = (_shaped(write, part, *part.shape[:2], -1) for part in parts)
    elif k is None:
        raise Obstacle("its input 'key' is absent, and 'query' does not hold the keys", "give it keys and values")
    elif len(k.shape) == 5:
        parts = [write("Gather", k, constant(n, "int64"), axis=3) for n in range(2)]
        k, v = (_shaped(write, part, *part.shape[:2], -1) for part in parts)
    values: list[Value] = [q, k, v]
    if bias is not None:
        size = q.shape[2]
        starts = (0, size, 2 * size)
        ends = (size, 2 * size, bias.shape[0])
        for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
            own = write("Slice", bias, *(constant([m], "int64") for m in (start, end, 0)))
            if len(values[n].shape) == 3:
                values[n] = write("Add", values[n], own)
    q, k, v = (_heads(write, value, heads) if len(value.shape) == 3 else value for value in values)
    if past_k is not None and past_v is not None:
        k, v = write("Concat", past_k, k, axis=2), write("Concat", past_v, v, axis=2)
    batch, _, length, _ = q.shape
    low = attribute(node, "mask_filter_value", -10000.0)
    masks = [] if mask is None else [_mask(write, mask, batch, length, k.shape[2], low)]
    result = _attended(write, node, q, k, v, [*masks, *([] if added is None else [added])])
    if len(node.output) > 3 and node.output[3]:
        raise Obstacle("its output 'qk' is not supported", "export the model without it")
    return _narrowed(write, [result, k, v], dtype)
