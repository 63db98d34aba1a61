"""Recipes of several operators, as networks have them."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.draft import Draft, Value
from benchmarks.fuzz.grammar import recipe
from benchmarks.fuzz.heavy import image
from benchmarks.fuzz.movers import indices

__all__: list[str] = []


def _sequence(d: Draft, most: int = 33) -> Value:
    """A tensor of (batch, tokens, features)."""
    present = [v for v in d.values if v.rank == 3 and v.dtype == d.float_dtype and 0 < v.array.size <= 2000]
    if present and d.chance(0.7):
        return d.choice(present[-3:])
    return d.fresh(d.float_dtype, d.fitted((d.integer(1, 2), d.size(most), d.size(most)), 1500), constant=0)


def _one(d: Draft, op: str, *inputs: Value | None, **attributes) -> Value:
    return d.emit(op, inputs, **attributes)[0]


@recipe("attention block", weight=0.8)
def _attention_block(d: Draft) -> None:
    x = _sequence(d)
    batch, tokens, features = x.shape
    heads = d.choice([h for h in (1, 2, 3, 4) if features % h == 0])
    head = features // heads
    parts = []
    for _ in range(3):
        projected = _one(d, "MatMul", x, d.weight(x.dtype, (features, features)))
        split = _one(d, "Reshape", projected, d.ints(batch, tokens, heads, head))
        parts.append(_one(d, "Transpose", split, perm=[0, 2, 1, 3]))
    q, k, v = parts
    scores = _one(d, "MatMul", q, _one(d, "Transpose", k, perm=[0, 1, 3, 2]))
    scores = _one(d, "Mul", scores, d.scalar(0.25, x.dtype))
    if d.chance(0.4):
        mask = np.triu(np.full((tokens, tokens), -1e4 if x.dtype != "float16" else -1e3), 1).astype(x.dtype)
        scores = _one(d, "Add", scores, d.constant(mask))
    context = _one(d, "MatMul", _one(d, "Softmax", scores, axis=-1), v)
    context = _one(d, "Reshape", _one(d, "Transpose", context, perm=[0, 2, 1, 3]), d.ints(batch, tokens, features))
    _one(d, "Add", context, x)


@recipe("one-token attention", weight=0.6)
def _one_token(d: Draft) -> None:
    heads, tokens, head = d.size(13), d.size(64), d.size(64)
    q = d.fresh(d.float_dtype, (1, heads, 1, head), constant=0)
    k = d.fresh(d.float_dtype, d.fitted((1, heads, head, tokens), 5000))
    heads, head, tokens = k.shape[1:]
    q = q if q.shape == (1, heads, 1, head) else d.fresh(d.float_dtype, (1, heads, 1, head), constant=0)
    weights = _one(d, "Softmax", _one(d, "MatMul", q, k), axis=-1)
    _one(d, "MatMul", weights, d.fresh(d.float_dtype, (1, heads, tokens, d.size(16))))


@recipe("layer norm by hand", weight=0.7)
def _layer_norm(d: Draft) -> None:
    x = d.pick("f", 1, tame=True)
    old = d.opset < 18
    mean = _one(d, "ReduceMean", x, None if old else d.ints(-1), axes=[-1] if old else None)
    centred = _one(d, "Sub", x, mean)
    squares = _one(d, "Pow", centred, d.scalar(2, x.dtype)) if d.chance(0.5) else _one(d, "Mul", centred, centred)
    variance = _one(d, "ReduceMean", squares, None if old else d.ints(-1), axes=[-1] if old else None)
    spread = _one(d, "Sqrt", _one(d, "Add", variance, d.scalar(1e-3, x.dtype)))
    normal = _one(d, "Div", centred, spread)
    scaled = _one(d, "Mul", normal, d.weight(x.dtype, x.shape[-1:]))
    _one(d, "Add", scaled, d.weight(x.dtype, x.shape[-1:]))


@recipe("softmax by hand", weight=0.7)
def _softmax(d: Draft) -> None:
    x = d.pick("f", 1, tame=True)
    old, axis = d.opset < 18, d.axis(x)
    top = _one(d, "ReduceMax", x, None if old else d.ints(axis), axes=[axis] if old else None)
    powers = _one(d, "Exp", _one(d, "Sub", x, top))
    total = _one(d, "ReduceSum", powers, d.ints(axis))
    _one(d, "Div", powers, total)


@recipe("squeeze and excitation", weight=0.7)
def _squeeze_excite(d: Draft) -> None:
    x = image(d, ranks=(4,))
    channels, inner = x.shape[1], d.choice((1, 2, 4))
    y = _one(d, "GlobalAveragePool", x)
    y = _one(d, "Relu", _one(d, "Conv", y, d.weight(x.dtype, (inner, channels, 1, 1))))
    y = _one(d, "Sigmoid", _one(d, "Conv", y, d.weight(x.dtype, (channels, inner, 1, 1))))
    _one(d, "Mul", x, y)


@recipe("mlp", weight=0.8)
def _mlp(d: Draft) -> None:
    x = d.pick("f", 2, tame=True, elements=2000)
    features, hidden = x.shape[-1], d.size(33)
    y = _one(d, "Add", _one(d, "MatMul", x, d.weight(x.dtype, (features, hidden))), d.weight(x.dtype, (hidden,)))
    y = _one(d, d.choice(("Relu", "Tanh", "Sigmoid", "Softplus", "Erf")), y)
    y = _one(d, "MatMul", y, d.weight(x.dtype, (hidden, features)))
    _one(d, "Add", x, y)


@recipe("residual", weight=0.7)
def _residual(d: Draft) -> None:
    x = image(d, ranks=(4,))
    channels = x.shape[1]
    y = _one(d, "Conv", x, d.weight(x.dtype, (channels, channels, 3, 3)), pads=[1, 1, 1, 1])
    weights = [d.weight(x.dtype, (channels,)) for _ in range(3)]
    y = _one(d, "BatchNormalization", y, *weights, d.weight(x.dtype, (channels,), "positive"))
    _one(d, "Relu", _one(d, "Add", y, x))


@recipe("depthwise separable", weight=0.6)
def _separable(d: Draft) -> None:
    x = image(d, ranks=(4,))
    channels = x.shape[1]
    stride = d.choice((1, 2))
    w = d.weight(x.dtype, (channels, 1, 3, 3))
    y = _one(d, "Conv", x, w, group=channels, pads=[1, 1, 1, 1], strides=[stride, stride])
    y = _one(d, "Clip", y, d.scalar(0, x.dtype), d.scalar(6, x.dtype))
    _one(d, "Conv", y, d.weight(x.dtype, (d.choice((1, 3, 8)), channels, 1, 1)))


@recipe("unrolled cell", weight=0.6)
def _cell(d: Draft) -> None:
    size, batch = d.size(17), d.integer(1, 3)
    w, u = d.weight(d.float_dtype, (size, size)), d.weight(d.float_dtype, (size, size))
    h = d.fresh(d.float_dtype, (batch, size), constant=0.5)
    for _ in range(d.integer(2, 4)):
        x = d.fresh(d.float_dtype, (batch, size), constant=0)
        h = _one(d, "Tanh", _one(d, "Add", _one(d, "MatMul", x, w), _one(d, "MatMul", h, u)))


@recipe("graph convolution", since=16, weight=0.6)
def _graph_convolution(d: Draft) -> None:
    nodes, edges, features = d.size(17), d.size(33), d.size(16)
    x = d.fresh(d.float_dtype, (nodes, features), constant=0)
    source = indices(d, (edges,), nodes, dtype="int64")
    target = indices(d, (edges, 1), nodes, dtype="int64")
    messages = _one(d, "Gather", _one(d, "MatMul", x, d.weight(x.dtype, (features, features))), source)
    zeros = d.constant(np.zeros((nodes, features), x.dtype))
    _one(d, "Relu", _one(d, "ScatterND", zeros, target, messages, reduction="add"))


@recipe("shared expression", weight=0.6)
def _shared(d: Draft) -> None:
    x = d.pick("f", tame=True)
    op = d.choice(("Tanh", "Sigmoid", "Relu", "Erf"))
    one, other = _one(d, op, x), _one(d, op, x)
    _one(d, d.choice(("Add", "Mul", "Sub")), one, other)
    if d.chance(0.5):
        _one(d, "Add", other, x)


@recipe("heads", weight=0.6)
def _heads(d: Draft) -> None:
    x = d.pick("f", 2, 2, tame=True, elements=1500)
    width = d.size(17)
    made = [_one(d, "MatMul", x, d.weight(x.dtype, (x.shape[1], width))) for _ in range(d.integer(2, 4))]
    made = [_one(d, d.choice(("Tanh", "Relu")), y) for y in made]
    d.emit(d.choice(("Sum", "Max")), made) if d.chance(0.5) else d.emit("Concat", made, axis=1)


@recipe("embedding bag", weight=0.5)
def _embedding_bag(d: Draft) -> None:
    rows, features = d.size(33), d.size(17)
    table = d.weight(d.float_dtype, (rows, features))
    taken = _one(d, "Gather", table, indices(d, (d.size(5), d.size(7)), rows))
    old = d.opset < 18
    _one(d, "ReduceSum" if old or d.chance(0.5) else "ReduceMax", taken, d.ints(1), keepdims=0)
