"""TE programs for the tests of the analysis, and an interpreter that lists the reads of a TE by running it."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict

import numpy as np
from tvm import te, tirx

from souffle.program import TE, Origin, Tensor, TEProgram, make_te
from souffle.tvm_compat import const_int, is_load, load_indices, load_tensor, reduce_node

ORIGIN = Origin(("node",), ("Operator",), "group")


def _key(tensor: te.Tensor) -> tuple[object, int]:
    return tensor.op, tensor.value_index


def program_of(*results: te.Tensor) -> TEProgram:
    """The TE program that computes `results` from their placeholders (inputs ``x0``, ``x1``, ...)."""
    order: list[te.ComputeOp] = []

    def visit(op: te.Operation) -> None:
        if isinstance(op, te.ComputeOp) and op not in order:
            for tensor in op.input_tensors:
                visit(tensor.op)
            order.append(op)

    for result in results:
        visit(result.op)
    known: dict[tuple[object, int], Tensor] = {}
    inputs: list[Tensor] = []
    tes: list[TE] = []
    for op in order:
        reads = []
        for tensor in op.input_tensors:
            if _key(tensor) not in known:
                shape = tuple(const_int(extent) for extent in tensor.shape)
                inputs.append(Tensor(f"x{len(inputs)}", shape, str(tensor.dtype)))
                known[_key(tensor)] = inputs[-1]
            reads.append((tensor, known[_key(tensor)]))
        name = f"{op.name}_{len(tes)}"
        if all(isinstance(tensor.op, te.PlaceholderOp) for tensor, _ in reads):
            shape = tuple(const_int(axis.dom.extent) for axis in op.axis)
            outputs = tuple(Tensor(f"{name}_o{i}", shape, str(op.output(i).dtype)) for i in range(op.num_outputs))
            made = TE(name, op, tuple(t for t, _ in reads), tuple(t for _, t in reads), outputs, ORIGIN)
        else:
            made = make_te(name, list(op.axis), list(op.body), reads, ORIGIN)
        tes.append(made)
        known.update({(op, i): tensor for i, tensor in enumerate(made.outputs)})
    outputs = tuple(known[_key(result)] for result in results)
    return TEProgram(
        tuple(inputs), outputs, tuple(tes), {}, tuple(t.name for t in inputs), tuple(t.name for t in outputs)
    )


def te_of(result: te.Tensor) -> TE:
    """The last TE of a program."""
    return program_of(result).tes[-1]


_BINARY = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: min,
    tirx.Max: max,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.BitwiseAnd: operator.and_,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
    tirx.Mod: math.fmod,
}
_CALLS = {
    "exp": math.exp,
    "erf": math.erf,
    "tanh": math.tanh,
    "log": lambda x: math.log(abs(x) + 1e-6),
    "rsqrt": lambda x: 1 / math.sqrt(abs(x) + 1e-6),
    "pow": lambda x, y: abs(x) ** y,
    "sqrt": lambda x: math.sqrt(abs(x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": lambda x: np.copysign(np.floor(abs(x) + 0.5), x),
    "fabs": abs,
}


class Interpreter:
    """Runs a TE point by point over small arrays and records which element it reads for which output element.

    Shares nothing with the analysis: it walks the expression itself.

    Attributes
    ----------
    reads : mapping of int to set
        For each input index, the pairs (output element, input element).
    point_reads : mapping of int to set
        The same for points of the whole iteration space: output element, then reduction axes.
    """

    def __init__(self, te_: TE, arrays: dict[Tensor, np.ndarray]) -> None:
        self.te, self.arrays = te_, arrays
        self.reads: dict[int, set] = defaultdict(set)
        self.point_reads: dict[int, set] = defaultdict(set)
        self.output: tuple[int, ...] = ()
        self.inner: tuple[int, ...] = ()

    def run(self) -> dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """For each input index, the pairs (output element, input element)."""
        reduce = reduce_node(self.te.body)
        for point in itertools.product(*(self._values(axis) for axis in self.te.axes)):
            self.output, self.inner = point, ()
            env = dict(zip((hash(axis.var) for axis in self.te.axes), self.output, strict=True))
            if reduce is None:
                for body in self.te.op.body:
                    self.eval(body, env)
                continue
            for init in reduce.init:
                self.eval(init, env)
            ranges = [
                range(first := int(self.eval(axis.dom.min, env)), first + int(self.eval(axis.dom.extent, env)))
                for axis in self.te.reduce_axes
            ]
            for inner_point in itertools.product(*ranges):
                self.inner = inner_point
                inner = env | dict(zip((hash(axis.var) for axis in self.te.reduce_axes), inner_point, strict=True))
                if self.eval(reduce.condition, inner):
                    for source in reduce.source:
                        self.eval(source, inner)
        return self.reads

    @staticmethod
    def _values(axis: tirx.IterVar) -> range:
        first = const_int(axis.dom.min)
        return range(first, first + const_int(axis.dom.extent))

    def eval(self, node, env):
        value = self._eval(node, env)
        dtype = str(node.ty)
        return np.float32(value) if dtype.startswith("float") else value

    def _eval(self, node, env):
        cls = type(node)
        if cls is tirx.Var:
            return env[hash(node)]
        if cls in (tirx.IntImm, tirx.FloatImm):
            return node.value
        if cls is tirx.And:
            return self.eval(node.a, env) and self.eval(node.b, env)
        if cls is tirx.Or:
            return self.eval(node.a, env) or self.eval(node.b, env)
        if cls is tirx.Not:
            return not self.eval(node.a, env)
        if cls is tirx.Div:
            left, right = self.eval(node.a, env), self.eval(node.b, env)
            return int(left / right) if str(node.ty).startswith("int") else left / (right or 1)
        if cls in _BINARY:
            return _BINARY[cls](self.eval(node.a, env), self.eval(node.b, env))
        if cls is tirx.Cast:
            value = self.eval(node.value, env)
            return int(value) if "int" in str(node.ty) else value
        if cls is tirx.Let:
            return self.eval(node.body, env | {hash(node.var): self.eval(node.value, env)})
        if cls is tirx.Select:
            return self.eval(node.true_value if self.eval(node.condition, env) else node.false_value, env)
        if is_load(node):
            index = tuple(int(self.eval(i, env)) for i in load_indices(node))
            position = next(i for i, p in enumerate(self.te.placeholders) if p.same_as(load_tensor(node)))
            self.reads[position].add((self.output, index))
            self.point_reads[position].add((self.output + self.inner, index))
            assert all(0 <= i < n for i, n in zip(index, self.te.inputs[position].shape, strict=True)), index
            return self.arrays[self.te.inputs[position]][index].item()
        name = node.op.name.rpartition(".")[2]
        if name == "if_then_else":
            return self.eval(node.args[1] if self.eval(node.args[0], env) else node.args[2], env)
        if name == "likely":
            return self.eval(node.args[0], env)
        return _CALLS[name](*(self.eval(arg, env) for arg in node.args))


def reads_of(te_: TE, seed: int = 0, largest_index: int = 2) -> dict[int, set]:
    """What `te_` reads on random data; integer inputs hold values below `largest_index`."""
    return interpreted(te_, seed, largest_index).reads


def interpreted(te_: TE, seed: int = 0, largest_index: int = 2) -> Interpreter:
    """An interpreter that has run `te_` on random data; integer inputs hold values below `largest_index`."""
    rng = np.random.default_rng(seed)
    arrays = {
        tensor: rng.integers(0, largest_index, tensor.shape)
        if "int" in tensor.dtype or tensor.dtype == "bool"
        else rng.random(tensor.shape, np.float32) - np.float32(0.5)
        for tensor in te_.inputs
    }
    interpreter = Interpreter(te_, {t: np.asarray(a) for t, a in arrays.items()})
    interpreter.run()
    return interpreter
