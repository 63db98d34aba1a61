"""Recipes of operators that sum, pool, normalize, resize and recur."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from benchmarks.fuzz.draft import Draft, Refused, Value
from benchmarks.fuzz.grammar import recipe
from benchmarks.fuzz.values import is_tame

__all__: list[str] = []

_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")


@recipe(*(f"Reduce{kind}" for kind in _REDUCTIONS), weight=0.7)
def _reduce(d: Draft, op: str) -> None:
    x = d.pick("ffff" if op in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd") else "fffi")
    if op == "ReduceProd":
        x = d.emit("Clip", [x, d.scalar(-1.25, x.dtype), d.scalar(1.25, x.dtype)])[0] if x.array.size > 8 else x
    if op == "ReduceLogSum":
        x = d.emit("Add", [d.emit("Abs", [x])[0], d.scalar(0.25, x.dtype)])[0]
    axes = d.axes(x) if x.rank and d.chance(0.85) else None
    keep = d.choice((None, 0, 0, 1))
    as_input = d.opset >= 18 or op == "ReduceSum"
    if as_input:
        empty = d.choice((None, 1)) if axes is None else None
        d.emit(op, [x, d.ints(*axes) if axes else None], keepdims=keep, noop_with_empty_axes=empty)
    else:
        d.emit(op, [x], axes=axes, keepdims=keep)


@recipe("Softmax", "LogSoftmax", weight=1.2)
def _softmax(d: Draft, op: str) -> None:
    # Of doubles with NaN among them, ONNX Runtime gives numbers.
    x = d.pick("f", 1, where=lambda v: v.dtype != "float64" or is_tame(v.array))
    d.emit(op, [x], axis=d.choice((None, d.axis(x))))


@recipe("MatMul", weight=3)
def _matmul(d: Draft) -> None:
    x = d.pick("ffffffi", 1, elements=3000)
    if x.dtype in ("int8", "uint8", "int16", "uint16"):
        return
    k = x.shape[-1]
    form = d.choice(("matrix", "matrix", "batched", "vector", "left"))
    if form == "vector":
        d.emit("MatMul", [x, d.weight(x.dtype, (k,))])
    elif form == "left" and x.rank > 1:
        d.emit("MatMul", [d.weight(x.dtype, d.choice(((x.shape[-2],), (d.size(33), x.shape[-2])))), x])
    elif form == "batched" and x.rank > 2:
        lead = [1 if d.chance(0.3) else extent for extent in x.shape[:-2]]
        lead = lead[d.integer(0, len(lead)) if d.chance(0.3) else 0 :]
        d.emit("MatMul", [x, d.weight(x.dtype, (*lead, k, d.size(33)))])
    else:
        d.emit("MatMul", [x, d.weight(x.dtype, (k, d.size(33)))])


@recipe("Gemm", weight=1.5)
def _gemm(d: Draft) -> None:
    x = d.pick("f", 2, 2, elements=3000)
    turned, turned_weight = d.choice((None, 0, 1)), d.choice((None, 0, 1))
    m, k = x.shape[::-1] if turned else x.shape
    n = d.size(33)
    w = d.weight(x.dtype, (n, k) if turned_weight else (k, n))
    bias = d.choice((None, (n,), (1, n), (m, 1), (m, n), (), (1,)))
    alpha, beta = d.choice((None, None, 0.5)), d.choice((None, None, 1.5, 0.0))
    c = None if bias is None else d.weight(x.dtype, bias)
    d.emit("Gemm", [x, w, c], transA=turned, transB=turned_weight, alpha=alpha, beta=beta)


_EQUATIONS = ("ij,jk->ik", "bij,bjk->bik", "bhid,bhjd->bhij", "ij->ji", "ij,ij->", "i,j->ij", "ij->i", "bij,bkj->bik")
_EQUATIONS += (
    "ii->i",
    "abc,cd->abd",
    "ab,bc,cd->ad",
    "...ij,...jk->...ik",
    "bij->b",
    "ij,kj",
    "ijk,ijk->ik",
    "bi,bj->bij",
)


@recipe("Einsum", weight=0.8)
def _einsum(d: Draft) -> None:
    equation = d.choice(_EQUATIONS)
    extents: dict[str, int] = {}
    operands = []
    for letters in equation.split("->")[0].split(","):
        lead = (2, 3) if "..." in letters else ()
        shape = (*lead, *(extents.setdefault(letter, d.size(17)) for letter in letters.replace("...", "")))
        operands.append(d.weight(d.float_dtype, shape) if operands else d.fresh(d.float_dtype, shape, constant=0))
    d.emit("Einsum", operands, equation=equation)


def image(d: Draft, channels: int = 0, ranks: tuple[int, ...] = (3, 4, 4, 4, 5), *, tame: bool = False) -> Value:
    """A tensor with a batch, channels and space: one that is there, or a new one; `tame` as for :meth:`Draft.pick`."""
    present = [
        v
        for v in d.values
        if v.rank in ranks
        and v.dtype == d.float_dtype
        and 0 < v.array.size <= 3000
        and v.shape[1] <= 16
        and (not channels or v.shape[1] == channels)
        and (not tame or is_tame(v.array))
    ]
    if present and d.chance(0.8):
        return d.choice(present[-3:])
    space = {3: 33, 4: 13, 5: 6}
    rank = d.choice(ranks)
    shape = [d.choice((1, 1, 2, 3)), channels or d.choice((1, 2, 3, 4, 6, 8))]
    shape += [d.size(space[rank]) for _ in range(rank - 2)]
    style = "normal" if tame else ""
    return d.fresh(d.float_dtype, d.fitted(shape, 2500) if not channels else shape, style, constant=0)


def _windows(d: Draft, x: Value, *, dilated: bool = True) -> dict:
    """Kernel, strides, dilations and pads of a window that fits."""
    kernel, dilations, pads = [], [], []
    for extent in x.shape[2:]:
        k = d.choice((1, 2, 3, 3, 3, 5))
        a = d.choice((1, 1, 1, 2)) if dilated else 1
        before, after = d.choice((0, 0, 1, 2)), d.choice((0, 0, 1, 2))
        while (k - 1) * a + 1 > extent + before + after:
            k, a = k - 1, 1
        kernel.append(max(k, 1))
        dilations.append(a)
        pads.append((min(before, (kernel[-1] - 1) * a), min(after, (kernel[-1] - 1) * a)))
    rank = len(kernel)
    strides = [d.choice((1, 1, 2, 3)) for _ in range(rank)] if d.chance(0.6) else None
    window = {"kernel_shape": kernel, "strides": strides}
    if dilated and d.chance(0.7):
        window["dilations"] = dilations
    auto = d.choice((None,) * 6 + ("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"))
    window["auto_pad"] = auto
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        # ONNX Runtime's pooling pads for a window that is not dilated; and of one that is smaller than its stride it
        # drops the first elements (AveragePool, LpPool with SAME_UPPER) or refuses the model (MaxPool).
        window.pop("dilations", None)
        window["strides"] = strides and [min(pair) for pair in zip(strides, kernel, strict=True)]
    if auto in (None, "NOTSET") and d.chance(0.8):
        window["pads"] = [p[0] for p in pads] + [p[1] for p in pads]
    return window


@recipe("Conv", weight=3)
def _conv(d: Draft) -> None:
    x = image(d)
    channels = x.shape[1]
    group = d.choice([g for g in range(1, channels + 1) if channels % g == 0] if d.chance(0.5) else [1, channels])
    out = group * d.choice((1, 1, 2, 3))
    window = _windows(d, x)
    w = d.weight(x.dtype, (out, channels // group, *window["kernel_shape"]))
    bias = d.weight(x.dtype, (out,)) if d.chance(0.5) else None
    if d.chance(0.3):
        window.pop("kernel_shape")
    d.emit("Conv", [x, w, bias], group=None if group == 1 else group, **window)


@recipe("ConvTranspose", weight=1.2)
def _conv_transpose(d: Draft) -> None:
    x = image(d)
    channels = x.shape[1]
    group = d.choice([g for g in range(1, channels + 1) if channels % g == 0])
    out = d.choice((1, 2, 3))
    window = _windows(d, x)
    if window["strides"] and (window["auto_pad"] or "").startswith("SAME"):
        # Where a stride is longer than the kernel, ONNX Runtime gives less than input times stride.
        window["strides"] = [min(pair) for pair in zip(window["strides"], window["kernel_shape"], strict=True)]
    if window["strides"] and d.chance(0.3):
        window["output_padding"] = [d.integer(0, s - 1) for s in window["strides"]]
    w = d.weight(x.dtype, (channels, out, *window["kernel_shape"]))
    bias = d.weight(x.dtype, (out * group,)) if d.chance(0.5) else None
    d.emit("ConvTranspose", [x, w, bias], group=None if group == 1 else group, **window)


@recipe("MaxPool", weight=1.2)
def _max_pool(d: Draft) -> None:
    x = image(d)
    both = d.chance(0.15)
    d.emit("MaxPool", [x], outputs=2 if both else 1, ceil_mode=d.choice((None, None, 1)), **_windows(d, x))


@recipe("AveragePool", weight=1.2)
def _average_pool(d: Draft) -> None:
    x = image(d)
    window = _windows(d, x, dilated=d.opset >= 19)
    d.emit("AveragePool", [x], ceil_mode=d.choice((None, None, 1)), count_include_pad=d.choice((None, 0, 1)), **window)


@recipe("LpPool", weight=0.5)
def _lp_pool(d: Draft) -> None:
    x = image(d)
    window = _windows(d, x, dilated=d.opset >= 18)
    d.emit("LpPool", [x], p=d.choice((None, 1, 2, 3)), **window)


@recipe("GlobalAveragePool", "GlobalMaxPool", weight=0.6)
def _global_pool(d: Draft, op: str) -> None:
    d.emit(op, [image(d)])


@recipe("GlobalLpPool", weight=0.3)
def _global_lp_pool(d: Draft) -> None:
    d.emit("GlobalLpPool", [image(d)], p=d.choice((None, 1, 2, 3)))


@recipe("LayerNormalization", since=17, weight=1.2)
def _layer_norm(d: Draft) -> None:
    # The mean of a row with an infinity is that infinity, and NaN to ONNX Runtime.
    x = d.pick("f", 1, where=lambda v: is_tame(v.array))
    axis = d.axis(x)
    shape = x.shape[axis:]
    scale, bias = d.weight(x.dtype, shape), d.weight(x.dtype, shape) if d.chance(0.6) else None
    outputs = d.choice(([True], [True], [True, True, True], [True, False, True]))
    d.emit("LayerNormalization", [x, scale, bias], outputs, axis=axis, epsilon=d.choice((None, 1e-3)))


@recipe("RMSNormalization", since=23, weight=0.7)
def _rms_norm(d: Draft) -> None:
    x = d.pick("f", 1)
    axis = d.axis(x)
    d.emit("RMSNormalization", [x, d.weight(x.dtype, x.shape[axis:])], axis=axis)


@recipe("GroupNormalization", since=21, weight=0.7)
def _group_norm(d: Draft) -> None:
    x = image(d)
    channels = x.shape[1]
    groups = d.choice([g for g in range(1, channels + 1) if channels % g == 0])
    scale, bias = d.weight(x.dtype, (channels,)), d.weight(x.dtype, (channels,))
    d.emit("GroupNormalization", [x, scale, bias], num_groups=groups)


@recipe("InstanceNormalization", weight=0.7)
def _instance_norm(d: Draft) -> None:
    x = image(d)
    d.emit("InstanceNormalization", [x, d.weight(x.dtype, x.shape[1:2]), d.weight(x.dtype, x.shape[1:2])])


@recipe("BatchNormalization", weight=0.8)
def _batch_norm(d: Draft) -> None:
    x = image(d, ranks=(2, 3, 4, 5)) if d.chance(0.2) else image(d)
    n = x.shape[1:2]
    weights = [d.weight(x.dtype, n), d.weight(x.dtype, n), d.weight(x.dtype, n), d.weight(x.dtype, n, "positive")]
    d.emit("BatchNormalization", [x, *weights], epsilon=d.choice((None, 1e-3)))


@recipe("LpNormalization", weight=0.5)
def _lp_norm(d: Draft) -> None:
    x = d.pick("f", 1)
    d.emit("LpNormalization", [x], axis=d.choice((None, d.axis(x))), p=d.choice((None, 1, 2)))


@recipe("MeanVarianceNormalization", weight=0.5)
def _mvn(d: Draft) -> None:
    x = d.pick("f", 4, 4)
    d.emit("MeanVarianceNormalization", [x], axes=d.choice((None, [0, 2, 3], [1], [2, 3])))


@recipe("LRN", weight=0.5)
def _lrn(d: Draft) -> None:
    # ONNX Runtime adds what enters the window and subtracts what leaves it, where infinities leave NaN.
    x = d.pick("f", 4, 4, where=lambda v: v.dtype == "float32" and is_tame(v.array))
    alpha, beta, bias = d.choice((None, 0.1)), d.choice((None, 0.5)), d.choice((None, 2.0))
    d.emit("LRN", [x], size=d.choice((1, 2, 3, 5)), alpha=alpha, beta=beta, bias=bias)


_NEAREST = (None, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@recipe("Resize", weight=1.5)
def _resize(d: Draft) -> None:
    x = image(d, ranks=(3, 4, 4, 4), tame=True)
    mode = d.choice(("nearest", "linear", "cubic"))
    transform = d.choice(
        (
            None,
            "half_pixel",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            *(("half_pixel_symmetric",) if d.opset >= 19 else ()),
            "tf_crop_and_resize",
        )
    )
    space = x.shape[2:]
    keep = 2 if mode == "cubic" or d.chance(0.85) else 1
    lead = x.shape[:2] if keep == 2 else (x.shape[0], x.shape[1] * d.choice((1, 2)))
    whole = np.array([0.0] * x.rank + [1.0] * x.rank, np.float32)
    roi = d.constant(whole) if transform == "tf_crop_and_resize" else None
    if d.chance(0.5):
        sizes = [*lead, *(max(1, d.choice((n, 2 * n, n + 1, n // 2, 3 * n, d.size(17)))) for n in space)]
        given = [roi, None, d.ints(*sizes)]
    else:
        factors = [1.0, lead[1] / x.shape[1], *(d.choice((1.0, 2.0, 0.5, 1.5, 3.0, 0.75)) for _ in space)]
        given = [roi, d.constant(np.array(factors, np.float32))]
    cubic = mode == "cubic"
    d.emit(
        "Resize",
        [x, *given],
        mode=mode,
        coordinate_transformation_mode=transform,
        nearest_mode=d.choice(_NEAREST) if mode == "nearest" else None,
        cubic_coeff_a=d.choice((None, -0.5)) if cubic else None,
        exclude_outside=d.choice((None, 0, 1)) if cubic else None,
        antialias=d.choice((None, None, 1)) if d.opset >= 18 and mode != "nearest" else None,
        extrapolation_value=d.choice((None, 1.5)) if roi else None,
    )


@recipe("GridSample", since=16, weight=0.6)
def _grid_sample(d: Draft) -> None:
    x = image(d, ranks=(4,), tame=True)
    grid = d.rng.integers(-9, 10, (x.shape[0], d.size(5), d.size(5), 2)) / 8 + d.choice((0, 0.0625))
    names = ("linear", "nearest", "cubic") if d.opset >= 20 else ("bilinear", "nearest", "bicubic")
    held = grid.astype(x.dtype)
    d.emit(
        "GridSample",
        [x, d.constant(held) if d.chance(0.4) else d.input(held)],
        mode=d.choice((None, *names)),
        padding_mode=d.choice((None, "zeros", "border", "reflection")),
        align_corners=d.choice((None, 0, 1)),
    )


@recipe("AffineGrid", since=20, weight=0.3)
def _affine_grid(d: Draft) -> None:
    n = d.integer(1, 2)
    theta = d.fresh(d.float_dtype, (n, 2, 3), "eighths")
    d.emit("AffineGrid", [theta, d.ints(n, 2, d.size(7), d.size(7))], align_corners=d.choice((None, 0, 1)))


@recipe("Col2Im", since=18, weight=0.3)
def _col2im(d: Draft) -> None:
    h, w, k = d.integer(2, 6), d.integer(2, 6), d.choice((1, 2))
    x = d.fresh(d.float_dtype, (1, d.integer(1, 3) * k * k, (h - k + 1) * (w - k + 1)), constant=0)
    d.emit("Col2Im", [x, d.ints(h, w), d.ints(k, k)])


@recipe("LSTM", "GRU", "RNN", weight=0.5)
def _recurrent(d: Draft, op: str) -> None:
    dtype = d.float_dtype
    steps, batch, size, hidden = d.integer(1, 4), d.integer(1, 3), d.size(8), d.size(8)
    direction = d.choice((None, "forward", "reverse", "bidirectional"))
    ways, gates = 2 if direction == "bidirectional" else 1, {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    # ONNX Runtime's cells clamp what they take, and NaN with it.
    x = d.fresh(dtype, (steps, batch, size), d.choice(("normal", "eighths", "whole")), constant=0)
    w, r = d.weight(dtype, (ways, gates * hidden, size)), d.weight(dtype, (ways, gates * hidden, hidden))
    bias = d.weight(dtype, (ways, 2 * gates * hidden)) if d.chance(0.6) else None
    lengths = None
    if d.chance(0.2):
        lengths = d.constant(np.asarray(d.rng.integers(1, steps + 1, batch)).astype(np.int32))
    states = 2 if op == "LSTM" else 1
    initial = [d.weight(dtype, (ways, batch, hidden)) if d.chance(0.4) else None for _ in range(states)]
    peephole = [d.weight(dtype, (ways, 3 * hidden))] if op == "LSTM" and d.chance(0.15) else []
    outputs = d.choice(([True], [True] * (states + 1), [False] + [True] * states))
    d.emit(
        op,
        [x, w, r, bias, lengths, *initial, *peephole],
        outputs,
        hidden_size=hidden,
        direction=direction,
        linear_before_reset=d.choice((None, 1)) if op == "GRU" else None,
    )


@recipe("MatMulInteger", weight=0.3)
def _matmul_integer(d: Draft) -> None:
    x = d.fresh(d.choice(("uint8", "int8")), d.shape(2, 3, 400), constant=0)
    w = d.fresh(d.choice(("uint8", "int8")), (x.shape[-1], d.size(17)), constant=0.8)
    zero = d.scalar(d.integer(0, 3), x.dtype) if d.chance(0.5) else None
    d.emit("MatMulInteger", [x, w, zero])


@recipe("Attention", since=23, weight=0.5)
def _attention(d: Draft) -> None:
    b, h, n, m, s = d.integer(1, 2), d.integer(1, 3), d.size(9), d.size(9), d.size(16)
    q = d.fresh(d.float_dtype, (b, h, n, s), constant=0)
    k, v = d.fresh(d.float_dtype, (b, h, m, s)), d.fresh(d.float_dtype, (b, h, m, d.size(16)))
    d.emit("Attention", [q, k, v], is_causal=d.choice((None, 1)), scale=d.choice((None, 0.5)))


@recipe("If", weight=0.3)
def _if(d: Draft) -> None:
    x = d.pick("f", where=lambda v: v.array.size <= 600)
    kind = helper.np_dtype_to_tensor_dtype(x.array.dtype)

    def branch(op: str) -> object:
        out = helper.make_tensor_value_info("branch_out", kind, x.shape)
        return helper.make_graph([helper.make_node(op, [x.name], ["branch_out"])], op, [], [out])

    taken = bool(d.chance(0.5))
    condition = d.constant(np.array(taken)) if d.chance(0.7) else d.input(np.array(taken))
    d.emit("If", [condition], captured=[x], then_branch=branch("Tanh"), else_branch=branch("Neg"))


@recipe("Loop", weight=0.3)
def _loop(d: Draft) -> None:
    x = d.pick("f", where=lambda v: v.array.size <= 600)
    kind = helper.np_dtype_to_tensor_dtype(x.array.dtype)
    body = helper.make_graph(
        [helper.make_node("Tanh", ["state"], ["next"]), helper.make_node("Identity", ["go_on"], ["go_on_out"])],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, ()),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("state", kind, x.shape),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("next", kind, x.shape),
        ],
    )
    d.emit("Loop", [d.scalar(d.integer(1, 4), "int64"), None, x], body=body)


@recipe("Scan", weight=0.3)
def _scan(d: Draft) -> None:
    x = d.pick("f", 2, 3, where=lambda v: 0 < v.shape[0] <= 5)
    if x.shape[0] > 5:
        raise Refused("long")
    kind, shape = helper.np_dtype_to_tensor_dtype(x.array.dtype), x.shape[1:]
    infos = {name: helper.make_tensor_value_info(name, kind, shape) for name in ("state", "row", "next", "out")}
    nodes = [helper.make_node("Add", ["state", "row"], ["next"]), helper.make_node("Sigmoid", ["next"], ["out"])]
    body = helper.make_graph(nodes, "body", [infos["state"], infos["row"]], [infos["next"], infos["out"]])
    start = d.weight(x.dtype, shape)
    d.emit("Scan", [start, x], outputs=2, body=body, num_scan_inputs=1)
