"""LSTM, GRU and RNN as cells of elementary operators, one for each time step.

A cell multiplies its input, and its state, by the packed weights of all gates at once, and slices the gates out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Stacked, Value

__all__: list[str] = []

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULT_ACTIVATIONS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
# Activations with attributes, and the defaults of these by the operator specification.
_ALPHA_DEFAULTS = {
    "Affine": 1.0,
    "Elu": 1.0,
    "HardSigmoid": 0.2,
    "LeakyRelu": 0.01,
    "ScaledTanh": 1.0,
    "ThresholdedRelu": 1.0,
}
_BETA_DEFAULTS = {"Affine": 0.0, "HardSigmoid": 0.5, "ScaledTanh": 1.0}
_PLAIN_ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")


@dataclass(frozen=True)
class _Activation:
    kind: str
    alpha: float
    beta: float


@dataclass(frozen=True, eq=False)
class _Direction:
    """One direction of one recurrent node."""

    emit: Callable[..., Value]
    hidden: int
    activations: tuple[_Activation, ...]
    clip: float | None
    weights: Value
    recurrence: Value
    bias: Value
    state_bias: Value
    peepholes: tuple[Value, ...]
    input_forget: bool
    linear_before_reset: bool


@special("LSTM", "GRU", "RNN")
def _recurrent(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    given = [*inputs, *[None] * (8 - len(inputs))]
    x, w, r, b, lengths, h0, c0, p = given
    layout = attribute(node, "layout", 0)
    steps = _steps(interpreter, node.name, x, layout)
    if not steps:
        raise Obstacle("its sequence has no time steps", "give it at least one")
    direction = attribute(node, "direction", b"forward").decode()
    names = {"forward": ["forward"], "reverse": ["reverse"], "bidirectional": ["forward", "reverse"]}[direction]
    hidden = attribute(node, "hidden_size", r.shape[-1])
    activations = _activations(node, len(names))
    masks = _masks(interpreter, node.name, lengths, len(steps))
    outputs, last_h, last_c = [], [], []
    for position, name in enumerate(names):
        prefix = f"{node.name}/{name}"

        def emit(operator: str, *operands: Value, at: str, prefix: str = prefix, **attributes) -> Value:
            return interpreter.emit(operator, list(operands), f"{prefix}/{at}", **attributes)[0]

        def part(value: Value, what: str, axis: int = 0, emit=emit, position: int = position) -> Value:
            return None if value is None else _index(emit, value, position, axis, what)

        bias, state_bias = _biases(emit, node, part(b, "B"), hidden, w.dtype)
        cell = _Direction(
            emit=emit,
            hidden=hidden,
            activations=activations[position],
            clip=attribute(node, "clip"),
            weights=emit("Transpose", part(w, "W"), at="W_transposed", perm=[1, 0]),
            recurrence=emit("Transpose", part(r, "R"), at="R_transposed", perm=[1, 0]),
            bias=bias,
            state_bias=state_bias,
            peepholes=_columns(emit, part(p, "P"), 3, hidden, "P") if p is not None else (),
            input_forget=bool(attribute(node, "input_forget", 0)),
            linear_before_reset=bool(attribute(node, "linear_before_reset", 0)),
        )
        state = tuple(None if _is_zero(s) else part(s, f"initial_{k}", layout) for k, s in (("h", h0), ("c", c0)))
        order = range(len(steps)) if name == "forward" else range(len(steps))[::-1]
        initial = state
        hs, state = _run(cell, node.op_type, steps, order, masks, state)
        if masks is not None and not (isinstance(lengths, Known) and bool(np.all(lengths.array > 0))):
            ends = zip("hc", initial, state, strict=True)
            state = tuple(s if i is None else _last(emit, masks[0], s, kind) for kind, i, s in ends)
        outputs.append(hs)
        last_h.append(state[0])
        last_c.append(state[1])
    results = [_stacked_output(interpreter, node.name, outputs, layout)]
    results.append(Stacked(tuple(last_h), layout, f"{node.name}/Y_h"))
    if node.op_type == "LSTM":
        results.append(Stacked(tuple(last_c), layout, f"{node.name}/Y_c"))
    return results


def _steps(interpreter: Interpreter, name: str, x: Value, layout: int) -> list[Value]:
    """The input of every time step, (batch, input) each."""
    if isinstance(x, Stacked) and x.axis == layout:
        return list(x.pieces)
    x = interpreter.whole(x)

    def emit(operator: str, *operands: Value, at: str, **attributes) -> Value:
        return interpreter.emit(operator, list(operands), f"{name}/{at}", **attributes)[0]

    return [_index(emit, x, step, layout, f"t{step}/x") for step in range(x.shape[layout])]


def _run(cell: _Direction, operator: str, steps, order, masks, state) -> tuple[list[Value], tuple[Value, Value]]:
    hs: list[Value] = [None] * len(steps)
    compute = {"LSTM": _lstm_cell, "GRU": _gru_cell, "RNN": _rnn_cell}[operator]
    for step in order:
        at = f"t{step}"
        new = compute(cell, at, steps[step], *state)
        if masks is None:
            hs[step] = new[0]
            state = new
            continue
        zero = Known(np.zeros((), dtype=new[0].dtype), "zero")
        hs[step] = cell.emit("Where", masks[step], new[0], zero, at=f"{at}/Where_y")
        state = tuple(
            None if n is None else cell.emit("Where", masks[step], n, zero if o is None else o, at=f"{at}/Where_{k}")
            for k, n, o in zip("hc", new, state, strict=True)
        )
    return hs, state


def _last(emit, reaches: Value, state: Value, kind: str) -> Value:
    """The last state: of a sequence without elements nothing, as ONNX Runtime has it, and not the initial one."""
    return emit("Where", reaches, state, Known(np.zeros((), dtype=state.dtype), "zero"), at=f"last_{kind}")


def _lstm_cell(cell: _Direction, at: str, x: Value, h: Value, c: Value) -> tuple[Value, Value]:
    f, g, k = cell.activations
    i_gate, o_gate, f_gate, c_gate = _columns(cell.emit, _gates(cell, at, x, h), 4, cell.hidden, at, "iofc")
    p_i, p_o, p_f = cell.peepholes or (None, None, None)
    i = _activate(cell, f, _peep(cell, i_gate, p_i, c, f"{at}/i"), f"{at}/i")
    if cell.input_forget:
        one = Known(np.ones((), dtype=i.dtype), "one")
        forget = cell.emit("Sub", one, i, at=f"{at}/f/Sub")
    else:
        forget = _activate(cell, f, _peep(cell, f_gate, p_f, c, f"{at}/f"), f"{at}/f")
    candidate = _activate(cell, g, c_gate, f"{at}/c")
    new_c = cell.emit("Mul", i, candidate, at=f"{at}/Mul_ic")
    if c is not None:
        kept = cell.emit("Mul", forget, c, at=f"{at}/Mul_fc")
        new_c = cell.emit("Add", kept, new_c, at=f"{at}/Add_c")
    o = _activate(cell, f, _peep(cell, o_gate, p_o, new_c, f"{at}/o"), f"{at}/o")
    shown = _activate(cell, k, new_c, f"{at}/h", clip=False)
    return cell.emit("Mul", o, shown, at=f"{at}/Mul_h"), new_c


def _gru_cell(cell: _Direction, at: str, x: Value, h: Value, _: Value) -> tuple[Value, None]:
    f, g = cell.activations
    hidden, emit = cell.hidden, cell.emit
    from_x = emit("Add", emit("MatMul", x, cell.weights, at=f"{at}/MatMul_x"), cell.bias, at=f"{at}/Add_bias")
    x_zr = _slice(emit, from_x, 0, 2 * hidden, f"{at}/x_zr")
    x_h = _slice(emit, from_x, 2 * hidden, 3 * hidden, f"{at}/x_h")
    r_zr = _slice(emit, cell.recurrence, 0, 2 * hidden, "R_zr")
    r_h = _slice(emit, cell.recurrence, 2 * hidden, 3 * hidden, "R_h")
    h_h: Value = None
    if h is not None and cell.linear_before_reset:
        from_h = emit("MatMul", h, cell.recurrence, at=f"{at}/MatMul_h")
        h_zr = _slice(emit, from_h, 0, 2 * hidden, f"{at}/h_zr")
        h_h = _slice(emit, from_h, 2 * hidden, 3 * hidden, f"{at}/h_h")
        x_zr = emit("Add", x_zr, h_zr, at=f"{at}/Add_zr")
    elif h is not None:
        x_zr = emit("Add", x_zr, emit("MatMul", h, r_zr, at=f"{at}/MatMul_h"), at=f"{at}/Add_zr")
    zr = _activate(cell, f, x_zr, f"{at}/zr")
    z, r = _columns(emit, zr, 2, hidden, at, "zr")
    if cell.linear_before_reset:
        inner = cell.state_bias if h_h is None else h_h
        if h_h is not None and cell.state_bias is not None:
            inner = emit("Add", h_h, cell.state_bias, at=f"{at}/Add_hb")
        if inner is not None:
            x_h = emit("Add", x_h, emit("Mul", r, inner, at=f"{at}/Mul_r"), at=f"{at}/Add_h")
    elif h is not None:
        reset = emit("Mul", r, h, at=f"{at}/Mul_r")
        x_h = emit("Add", x_h, emit("MatMul", reset, r_h, at=f"{at}/MatMul_rh"), at=f"{at}/Add_h")
    candidate = _activate(cell, g, x_h, f"{at}/h")
    one = Known(np.ones((), dtype=z.dtype), "one")
    new_h = emit("Mul", emit("Sub", one, z, at=f"{at}/Sub_z"), candidate, at=f"{at}/Mul_new")
    if h is not None:
        new_h = emit("Add", new_h, emit("Mul", z, h, at=f"{at}/Mul_old"), at=f"{at}/Add_new")
    return new_h, None


def _rnn_cell(cell: _Direction, at: str, x: Value, h: Value, _: Value) -> tuple[Value, None]:
    return _activate(cell, cell.activations[0], _gates(cell, at, x, h), at), None


def _gates(cell: _Direction, at: str, x: Value, h: Value) -> Value:
    """All gates before their activations: (batch, gates * hidden)."""
    gates = cell.emit("MatMul", x, cell.weights, at=f"{at}/MatMul_x")
    if h is not None:
        from_h = cell.emit("MatMul", h, cell.recurrence, at=f"{at}/MatMul_h")
        gates = cell.emit("Add", gates, from_h, at=f"{at}/Add_gates")
    return gates if cell.bias is None else cell.emit("Add", gates, cell.bias, at=f"{at}/Add_bias")


def _peep(cell: _Direction, gate: Value, weight: Value, c: Value, at: str) -> Value:
    if weight is None or c is None:
        return gate
    return cell.emit("Add", gate, cell.emit("Mul", weight, c, at=f"{at}/Mul_p"), at=f"{at}/Add_p")


def _activate(cell: _Direction, activation: _Activation, value: Value, at: str, clip: bool = True) -> Value:
    if clip and cell.clip is not None:
        low, high = (Known(np.array(sign * cell.clip, dtype=value.dtype), "clip") for sign in (-1, 1))
        value = cell.emit("Clip", value, low, high, at=f"{at}/Clip")
    kind, alpha, beta = activation.kind, activation.alpha, activation.beta
    at = f"{at}/{kind}"
    if kind in _PLAIN_ACTIVATIONS:
        return cell.emit(kind, value, at=at)
    if kind in ("Affine", "ScaledTanh"):
        scale, shift = (Known(np.array(number, dtype=value.dtype), "scalar") for number in (alpha, beta))
        if kind == "Affine":
            return cell.emit("Add", cell.emit("Mul", value, scale, at=at), shift, at=at)
        return cell.emit("Mul", cell.emit("Tanh", cell.emit("Mul", value, shift, at=at), at=at), scale, at=at)
    attributes = {"alpha": alpha} | ({"beta": beta} if kind == "HardSigmoid" else {})
    return cell.emit(kind, value, at=at, **attributes)


def _activations(node: onnx.NodeProto, directions: int) -> list[tuple[_Activation, ...]]:
    defaults = _DEFAULT_ACTIVATIONS[node.op_type]
    names = [name.decode() for name in attribute(node, "activations", [])]
    names = names or [name for _ in range(directions) for name in defaults]
    alphas, betas = iter(attribute(node, "activation_alpha", [])), iter(attribute(node, "activation_beta", []))
    known = {name.lower(): name for name in (*_PLAIN_ACTIVATIONS, *_ALPHA_DEFAULTS)}
    if len(names) != directions * len(defaults):
        raise Obstacle(
            f"it names {len(names)} activations, and its {directions} direction(s) have {directions * len(defaults)}",
            "name one for each gate function of each direction",
        )
    for name in names:
        if name.lower() not in known:
            raise Obstacle(
                f"its activation {name!r} is not supported", f"supported ones are {', '.join(sorted(known.values()))}"
            )
    every = [_activation(known[name.lower()], alphas, betas) for name in names]
    return [tuple(every[k * len(defaults) : (k + 1) * len(defaults)]) for k in range(directions)]


def _activation(kind: str, alphas: Iterator[float], betas: Iterator[float]) -> _Activation:
    # Values are listed for those activations only that have them.
    alpha = next(alphas, _ALPHA_DEFAULTS[kind]) if kind in _ALPHA_DEFAULTS else 0.0
    beta = next(betas, _BETA_DEFAULTS[kind]) if kind in _BETA_DEFAULTS else 0.0
    return _Activation(kind, alpha, beta)


def _biases(emit, node: onnx.NodeProto, b: Value, hidden: int, dtype: str) -> tuple[Value, Value]:
    """The bias of all gates; and, for a GRU that is linear before reset, what is added to the state's part inside."""
    if b is None:
        gates = _GATES[node.op_type] * hidden
        return (Known(np.zeros(gates, dtype=dtype), "zeros") if node.op_type == "GRU" else None), None
    gates = _GATES[node.op_type] * hidden
    of_w, of_r = _slice(emit, b, 0, gates, "Wb"), _slice(emit, b, gates, 2 * gates, "Rb")
    if node.op_type != "GRU" or not attribute(node, "linear_before_reset", 0):
        return emit("Add", of_w, of_r, at="B"), None
    outer = _slice(emit, of_r, 0, 2 * hidden, "Rb_zr")
    both = emit("Add", _slice(emit, of_w, 0, 2 * hidden, "Wb_zr"), outer, at="B_zr")
    bias = emit("Concat", both, _slice(emit, of_w, 2 * hidden, gates, "Wb_h"), at="B", axis=0)
    return bias, _slice(emit, of_r, 2 * hidden, gates, "Rb_h")


def _masks(interpreter: Interpreter, name: str, lengths: Value, steps: int) -> list[Value] | None:
    """For each time step, which sequences of the batch reach it: (batch, 1); ``None`` if all do."""
    if lengths is None or (isinstance(lengths, Known) and bool(np.all(lengths.array >= steps))):
        return None
    column = interpreter.emit("Unsqueeze", [lengths, Known(np.array([1]), "one")], f"{name}/lengths")[0]
    return [
        interpreter.emit("Greater", [column, Known(np.array(k, dtype=lengths.dtype), "step")], f"{name}/t{k}/mask")[0]
        for k in range(steps)
    ]


def _stacked_output(interpreter: Interpreter, name: str, outputs: Sequence[Sequence[Value]], layout: int) -> Stacked:
    """Y: (steps, directions, batch, hidden), or (batch, steps, directions, hidden) in layout 1."""
    pieces = []
    inner = 0 if layout == 0 else 1
    for step in range(len(outputs[0])):
        parts = Stacked(tuple(hs[step] for hs in outputs), inner, f"{name}/t{step}/Y")
        pieces.append(parts)
    whole = []
    for step, parts in enumerate(pieces):
        if len(parts.pieces) > 1:
            whole.append(interpreter.whole(parts))
            continue
        target = Known(np.array(parts.shape, dtype="int64"), "shape")
        whole.append(interpreter.emit("Reshape", [parts.pieces[0], target], f"{name}/t{step}/Y")[0])
    return Stacked(tuple(whole), layout, f"{name}/Y")


def _is_zero(value: Value) -> bool:
    return value is None or (isinstance(value, Known) and not value.array.any())


def _index(emit, value: Value, position: int, axis: int, at: str) -> Value:
    """``value[position]`` along `axis`."""
    index = Known(np.array(position, dtype="int64"), "index")
    if isinstance(value, Known):
        return Known(np.take(value.array, position, axis=axis), f"{value.name}_{position}")
    return emit("Gather", value, index, at=at, axis=axis)


def _slice(emit, value: Value, start: int, stop: int, at: str) -> Value:
    """Columns ``start:stop`` of `value`'s last axis."""
    axis = len(value.shape) - 1
    if value.shape[axis] == stop - start:
        return value
    bounds = [Known(np.array([k], dtype="int64"), "bound") for k in (start, stop, axis)]
    return emit("Slice", value, *bounds, at=f"{at}/Slice")


def _columns(emit, value: Value, count: int, hidden: int, at: str, names: str = "") -> tuple[Value, ...]:
    """`count` blocks of `hidden` columns."""
    return tuple(
        _slice(emit, value, k * hidden, (k + 1) * hidden, f"{at}/{names[k] if names else k}") for k in range(count)
    )
