"""TE programs as text, in the notation of the paper's Figure 2: one line for each TE."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Call

from souffle.program.fused import FusedTE
from souffle.program.loop import Loop
from souffle.program.te import TE, ExternTE, Tensor
from souffle.tvm_compat import PrimExpr, const_int, is_load, load_indices, load_tensor, reduce_node

__all__ = ["format_item", "format_te", "loop_edges"]

_DATA_NAMES = "ijklmn"
_REDUCTION_NAMES = ("rk", "rl", "rm", "rn")
_REDUCTIONS = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}
# Operators with their strength; operands of less strength are put in parentheses.
_INFIX: dict[type, tuple[str, int]] = {
    tirx.Or: ("or", 1),
    tirx.And: ("and", 2),
    tirx.EQ: ("==", 4),
    tirx.NE: ("!=", 4),
    tirx.LT: ("<", 4),
    tirx.LE: ("<=", 4),
    tirx.GT: (">", 4),
    tirx.GE: (">=", 4),
    tirx.Add: ("+", 6),
    tirx.Sub: ("-", 6),
    tirx.Mul: ("*", 7),
    tirx.Div: ("/", 7),
    tirx.FloorDiv: ("//", 7),
    tirx.FloorMod: ("%", 7),
    tirx.Mod: ("%", 7),
}
# Their order of strength is not what readers know by heart: operands that bind are put in parentheses.
_BITWISE: dict[type, str] = {
    tirx.BitwiseOr: "|",
    tirx.BitwiseXor: "^",
    tirx.BitwiseAnd: "&",
    tirx.LShift: "<<",
    tirx.RShift: ">>",
}
_BITWISE_STRENGTH = 5
_UNARY_STRENGTH = 3
_ATOM = 10


def format_te(te_: TE | FusedTE) -> str:
    """One TE: ``O[i, j] = sum(A[i, rk] * B[rk, j]), 0 ≤ i < 64, 0 ≤ j < 64, rk < 32   # MatMul /layer/MatMul``.

    Of a fused TE first the last statement, then from last to first those that it needs: ``where`` of a tensor that
    nothing else needs, ``and`` of one that is an output too.
    """
    if isinstance(te_, FusedTE):
        return _format_fused(te_)
    return "\n".join(
        f"{_statement(te_, tensor, body)}   # {te_.comment}"
        for tensor, body in zip(te_.outputs, te_.op.body, strict=True)
    )


def format_item(item: TE | FusedTE | ExternTE | Loop) -> list[str]:
    """The lines of anything that a program is a sequence of."""
    if isinstance(item, Loop):
        return _format_loop(item)
    return [_format_extern(item)] if isinstance(item, ExternTE) else format_te(item).splitlines()


def _format_fused(te_: FusedTE) -> str:
    last = te_.parts[-1]
    lines = [_statement(last, tensor, body) for tensor, body in zip(last.outputs, last.op.body, strict=True)]
    lines[-1] += f"   # {te_.comment}"
    for part in te_.parts[-2::-1]:
        for tensor, body in zip(part.outputs, part.op.body, strict=True):
            lines.append(f"    {'and' if tensor in te_.outputs else 'where'} {_statement(part, tensor, body)}")
    return "\n".join(lines)


def _statement(te_: TE, tensor: Tensor, body: PrimExpr) -> str:
    writer = _Writer(te_)
    return f"{tensor.name}[{', '.join(writer.data)}] = {writer.body(body)}{writer.bounds()}"


def loop_edges(loop: Loop) -> tuple[list[str], list[str]]:
    """What stands before and after the body of a loop: what a step is given, and what is kept of it."""
    given = [f"{p.tensor!r} ← {p.source.name} from element s * {p.stride}" for p in loop.indexed]
    for p in loop.carried:
        first = ", ".join(tensor.name for tensor in p.initial)
        steps = "the step before" if p.distance == 1 else f"{p.distance} steps before"
        given.append(f"{p.tensor!r} ← {p.value.name} of {steps}; at first {first}")
    kept = [f"{c.tensor!r} = {c.value.name} of {'every step' if c.every else 'the last step'}" for c in loop.collected]
    return given, kept


def _format_loop(loop: Loop) -> list[str]:
    given, kept = loop_edges(loop)
    body = [line for item in loop.body for line in format_item(item)]
    return [f"for s in 0 .. {loop.steps - 1}:   # {loop.name}", *(f"    {line}" for line in (*given, *body, *kept))]


def _format_extern(te_: ExternTE) -> str:
    outputs = ", ".join(map(repr, te_.outputs))
    return f"{outputs} = extern({', '.join(tensor.name for tensor in te_.inputs)})   # {te_.origin}"


class _Writer:
    """Writes expressions of one TE."""

    def __init__(self, te_: TE):
        self.te = te_
        self.data = [_DATA_NAMES[k] if k < len(_DATA_NAMES) else f"i{k}" for k in range(len(te_.axes))]
        self.reduced = [
            _REDUCTION_NAMES[k] if k < len(_REDUCTION_NAMES) else f"r{k}" for k in range(len(te_.reduce_axes))
        ]
        axes = [*te_.axes, *te_.reduce_axes]
        self.names = [(axis.var, name) for axis, name in zip(axes, [*self.data, *self.reduced], strict=True)]

    def bounds(self) -> str:
        """The ranges of all axes."""
        parts = [f"0 ≤ {name} < {self.extent(axis)}" for name, axis in zip(self.data, self.te.axes, strict=True)]
        parts += [f"{name} < {self.extent(axis)}" for name, axis in zip(self.reduced, self.te.reduce_axes, strict=True)]
        return "".join(f", {part}" for part in parts)

    def extent(self, axis: tirx.IterVar) -> str:
        """The extent of an axis."""
        extent = axis.dom.extent
        return str(const_int(extent)) if isinstance(extent, tirx.IntImm) else self.text(extent)

    def body(self, body: PrimExpr) -> str:
        """The right-hand side."""
        reduction = reduce_node(body)
        if reduction is None:
            return self.text(body)
        index = int(reduction.value_index)
        result = reduction.combiner.result[index]
        kind = _REDUCTIONS.get(type(result)) if len(reduction.source) == 1 else None
        sources = ", ".join(self.text(source) for source in reduction.source)
        where = "" if _is_true(reduction.condition) else f" if {self.text(reduction.condition)}"
        if kind is not None:
            return f"{kind}({sources}{where})"
        combined = _Combiner(reduction.combiner).text(result)
        return f"reduce({sources}{where}; {combined})"

    def text(self, node: PrimExpr, strength: int = 0) -> str:
        """An expression, in parentheses where it binds less than `strength`."""
        written, own = self.write(node)
        return f"({written})" if own < strength else written

    def write(self, node: PrimExpr) -> tuple[str, int]:
        """An expression and how strongly it binds."""
        if isinstance(node, tirx.Var):
            return self.variable(node), _ATOM
        if isinstance(node, tirx.IntImm):
            value = int(node.value)
            if str(node.ty.dtype) == "bool":
                return str(bool(value)), _ATOM
            return str(value), _ATOM if value >= 0 else _UNARY_STRENGTH
        if isinstance(node, tirx.FloatImm):
            return _number(float(node.value)), _ATOM if node.value >= 0 else _UNARY_STRENGTH
        if type(node) in _INFIX:
            sign, own = _INFIX[type(node)]
            return f"{self.text(node.a, own)} {sign} {self.text(node.b, own + 1)}", own
        if type(node) in _BITWISE:
            sign, inner = _BITWISE[type(node)], _BITWISE_STRENGTH + 1
            return f"{self.text(node.a, inner)} {sign} {self.text(node.b, inner)}", _BITWISE_STRENGTH
        if isinstance(node, tirx.BitwiseNot):
            return f"~{self.text(node.a, _ATOM)}", _ATOM - 1
        if isinstance(node, (tirx.Max, tirx.Min)):
            name = "max" if isinstance(node, tirx.Max) else "min"
            return f"{name}({self.text(node.a)}, {self.text(node.b)})", _ATOM
        if isinstance(node, tirx.Not):
            return f"not {self.text(node.a, _UNARY_STRENGTH + 1)}", _UNARY_STRENGTH
        if isinstance(node, tirx.Cast):
            return f"{node.ty.dtype}({self.text(node.value)})", _ATOM
        if isinstance(node, tirx.Select):
            parts = (node.condition, node.true_value, node.false_value)
            return f"where({', '.join(map(self.text, parts))})", _ATOM
        if isinstance(node, Call):
            return self.call(node), _ATOM
        return str(node), 0

    def variable(self, variable: tirx.Var) -> str:
        """The name of an axis."""
        return next((name for candidate, name in self.names if variable.same_as(candidate)), variable.name)

    def call(self, node: Call) -> str:
        """A load or a function."""
        if is_load(node):
            tensor = self.te.input_of(load_tensor(node))
            return f"{tensor.name}[{', '.join(map(self.text, load_indices(node)))}]"
        name = str(getattr(node.op, "name", node.op)).rsplit(".", 1)[-1]
        return f"{'where' if name == 'if_then_else' else name}({', '.join(map(self.text, node.args))})"


class _Combiner(_Writer):
    """Writes the combining expression of a reduction of tuples."""

    def __init__(self, combiner: tirx.CommReducer):
        count = len(combiner.lhs)
        letters = [(variable, f"a{k}") for k, variable in enumerate(combiner.lhs)]
        letters += [(variable, f"b{k}") for k, variable in enumerate(combiner.rhs)]
        self.names = letters if count > 1 else [(combiner.lhs[0], "a"), (combiner.rhs[0], "b")]


def _is_true(node: PrimExpr) -> bool:
    return isinstance(node, tirx.IntImm) and int(node.value) == 1


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.9g}"
