"""The spellings of TVM that change between versions, and the check that this version works at all.

Everything else in Souffle reaches TVM's expressions through the helpers below, so that a new TVM is one file's work.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from souffle.tvm_pair import TVM_FFI_PIN, TVM_PIN, check_tvm_pair, installed_pair

__all__ = [
    "MIN_BLOCKS_ATTRIBUTE",
    "TVM_FFI_PIN",
    "TVM_PIN",
    "PrimExpr",
    "StatementVisitor",
    "believed_bounds",
    "bounded_analyzer",
    "buffer_loads",
    "cast",
    "check_tvm_pair",
    "choice_parts",
    "collect",
    "compute_op",
    "const_int",
    "dtype_of",
    "fresh_axis",
    "function_symbol",
    "is_branch",
    "is_choice",
    "is_load",
    "is_shuffle",
    "largest_value",
    "limit_parallel_loops",
    "load_indices",
    "load_tensor",
    "loads",
    "map_bodies",
    "map_constants",
    "map_loads",
    "map_outermost",
    "named_key",
    "only_calculates",
    "primfunc_from_tensors",
    "reduce_node",
    "register_reducer",
    "same_expression",
    "sequence",
    "simplified_index",
    "statements_of",
    "structural_digest",
    "structural_key",
    "substitute",
    "variables",
]

MIN_BLOCKS_ATTRIBUTE = "tirx.launch_bounds_min_blocks_per_sm"
"""Of a kernel: the second figure of its ``__launch_bounds__``, which TVM's generator writes."""


check_tvm_pair(*installed_pair())

import tvm_ffi  # noqa: E402
from tvm import s_tir, te, tirx  # noqa: E402
from tvm.ir import Call, PrimType, Var  # noqa: E402
from tvm.ir.expr import TensorLoad  # noqa: E402
from tvm.libinfo import find_libtvm_runtime  # noqa: E402
from tvm.sym import Analyzer  # noqa: E402

from souffle.tvm_calls import collect, structural_map, structural_mutate, structural_walk  # noqa: E402

PrimExpr = Any
"""A TVM scalar expression. TVM 0.27 has no common Python base class for all of them."""

_TENSOR_LOAD = "te.tensor_load"
_IF_THEN_ELSE = "prim.if_then_else"
# Parts of the names of operations on whole numbers that are calls in TensorIR; ``likely`` is its argument.
_ON_BITS = ("shift", "bitwise", "likely")


# TVM registers no function that sets this without making the thread a pool.
_set_max_concurrency = ctypes.CDLL(find_libtvm_runtime())["_ZN3tvm7runtime9threading17SetMaxConcurrencyEi"]
_set_max_concurrency.argtypes, _set_max_concurrency.restype = (ctypes.c_int,), None


def limit_parallel_loops(workers: int) -> None:
    """Let parallel loops of functions that the calling thread runs use so many workers; one needs no pool."""
    _set_max_concurrency(workers)


def function_symbol(name: str) -> str:
    """What a compiled function is called in its library; to be called by the convention of TVM's FFI."""
    return f"__tvm_ffi_{name}"


def register_reducer(combine: Callable[[Any, Any], Any], start: Callable[[Any], Any]) -> None:
    """Tell TVM of a combiner that threads may share: of one value, which starts from what `start` says for a value."""
    combiner = tvm_ffi.convert(lambda left, right: [combine(left[0], right[0])])
    identity = tvm_ffi.convert(lambda values: [start(values[0])])
    for kept in (combiner, identity):
        # TVM's list of reducers is taken down after the interpreter, when nothing of it may be called to free them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")(1, combiner, identity)


def is_load(node: Any) -> bool:
    """Whether `node` reads one element of a ``te.Tensor``."""
    return isinstance(node, Call) and getattr(node.op, "name", None) == _TENSOR_LOAD


def load_tensor(load: Call) -> te.Tensor:
    """The ``te.Tensor`` that a load reads."""
    return load.args[0]


def load_indices(load: Call) -> tuple[PrimExpr, ...]:
    """The index expressions of a load, one per dimension of the tensor."""
    return tuple(load.args[1:])


def loads(expression: PrimExpr) -> list[Call]:
    """All loads in `expression`, inner before outer, in the order of its text; repeated ones repeat."""
    found: list[Call] = []
    if type(expression) in (tirx.Var, tirx.IntImm):
        return found

    def collect(call: Call) -> None:
        if is_load(call):
            found.append(call)

    structural_walk(expression, (Call, collect))
    return found


def map_loads(expression: PrimExpr, rewrite: Callable[[Call], PrimExpr]) -> PrimExpr:
    """Replace every load in `expression` by ``rewrite(load)``, inner loads first."""
    return structural_map(expression, (Call, lambda call: rewrite(call) if is_load(call) else call))


def is_branch(node: Any) -> bool:
    """Whether `node` is an ``if_then_else``, which does not evaluate the side that is not chosen."""
    return isinstance(node, Call) and getattr(node.op, "name", None) == _IF_THEN_ELSE


def is_shuffle(node: Any) -> bool:
    """Whether `node` hands a register from one lane of a warp to another; its arguments are the mask, then what, ..."""
    name = str(getattr(node.op, "name", "")) if isinstance(node, Call) else ""
    return "__shfl" in name or "warp_shuffle" in name


def is_choice(node: Any) -> bool:
    """Whether `node` is one of two values by a condition: ``if_then_else`` or ``Select``."""
    return isinstance(node, tirx.Select) or is_branch(node)


def choice_parts(choice: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
    """The condition of a choice, its value where that holds, and its value elsewhere."""
    if isinstance(choice, tirx.Select):
        return choice.condition, choice.true_value, choice.false_value
    return tuple(choice.args)


def choice_like(choice: PrimExpr, condition: PrimExpr, then: PrimExpr, other: PrimExpr) -> PrimExpr:
    """A choice of the same kind with other parts."""
    kind = tirx.Select if isinstance(choice, tirx.Select) else tirx.if_then_else
    return kind(condition, then, other)


def map_outermost(expression: PrimExpr, rewrite: Callable[[PrimExpr], PrimExpr]) -> PrimExpr:
    """Replace each choice and each load of `expression` that is in no other one by ``rewrite(it)``."""

    def call(node: Call, mutator: Any) -> PrimExpr:
        return rewrite(node) if is_load(node) or is_choice(node) else mutator.default_mutate(node)

    return structural_mutate(expression, [(tirx.Select, lambda node, _: rewrite(node)), (Call, call)])


def map_bodies(bodies: Sequence[PrimExpr], rewrite: Callable[[Call], PrimExpr]) -> list[PrimExpr]:
    """:func:`map_loads` over the bodies of one TE. Outputs of one reduction of tuples keep sharing its sources."""
    if len(bodies) == 1 or reduce_node(bodies[0]) is None:
        return [map_loads(body, rewrite) for body in bodies]
    first = map_loads(bodies[0], rewrite)
    return [
        tirx.Reduce(first.combiner, first.source, first.axis, first.condition, index, first.init)
        for index in range(len(bodies))
    ]


def substitute(expression: PrimExpr, mapping: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
    """Replace variables of `expression`, by identity. Bound reduction variables may be mapped too."""
    table = list(mapping.items())

    def replace(variable: tirx.Var) -> PrimExpr:
        for old, new in table:
            if variable.same_as(old):
                return new
        return variable

    if type(expression) is tirx.Var:
        return replace(expression)
    if type(expression) is tirx.IntImm or not table:
        return expression
    return structural_map(expression, (tirx.Var, replace))


def simplified_index(index: PrimExpr, analyzer: Analyzer) -> PrimExpr:
    """An index simplified for any value of the data in it."""
    if not loads(index):
        return analyzer.simplify(index)
    bare, hidden = _without_loads(index)
    return substitute(analyzer.simplify(bare), hidden)


def believed_bounds(value: PrimExpr) -> tuple[int, int]:
    """The least and the greatest that TVM takes an integer expression to be, for any value of the data in it."""
    bounds = Analyzer().const_int_bound(_without_loads(value)[0])
    return int(bounds.min_value), int(bounds.max_value)


def _without_loads(expression: PrimExpr) -> tuple[PrimExpr, dict[tirx.Var, PrimExpr]]:
    """TVM's analyzer corrupts memory when it is given a load of a ``te.Tensor``: variables that stand for them."""
    hidden: dict[tirx.Var, PrimExpr] = {}

    def hide(node: Call, mutator: Any) -> PrimExpr:
        if not is_load(node):
            return mutator.default_mutate(node)
        hidden[tirx.Var(f"data{len(hidden)}", dtype_of(node))] = node
        return list(hidden)[-1]

    return structural_mutate(expression, [(Call, hide)]), hidden


def map_constants(expression: PrimExpr, rewrite: Callable[[int, str], PrimExpr]) -> PrimExpr:
    """Replace every integer literal of `expression` by ``rewrite(value, type)``."""
    return structural_map(
        expression, (tirx.IntImm, lambda literal: rewrite(int(literal.value), dtype_of(literal)))
    )


def constant_term(index: PrimExpr) -> tuple[PrimExpr, int]:
    """An index as the sum of an expression and an integer."""
    if isinstance(index, tirx.IntImm):
        return tirx.IntImm(dtype_of(index), 0), int(index.value)
    if isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm):
        return index.a, int(index.b.value)
    if isinstance(index, tirx.Sub) and isinstance(index.b, tirx.IntImm):
        return index.a, -int(index.b.value)
    return index, 0


_STATEMENTS = {
    s_tir.SBlockRealize: "visit_block",
    tirx.AllocBuffer: "visit_alloc_buffer",
    tirx.AttrStmt: "visit_attr",
    tirx.Bind: "visit_bind",
    tirx.BufferStore: "visit_buffer_store",
    tirx.DeclBuffer: "visit_decl_buffer",
    tirx.Evaluate: "visit_evaluate",
    tirx.For: "visit_for",
    tirx.IfThenElse: "visit_if_then_else",
    tirx.SeqStmt: "visit_sequence",
    tirx.While: "visit_while",
}


class StatementVisitor(ABC):
    """A walk over statements. TVM 0.27 has none in Python.

    A subclass has methods for the statements that it reads: ``visit_for(node, ...)`` and so on, one for a class, given
    what its caller gave to :meth:`visit`. Sequences are walked through in order, and attributes are passed over, unless
    it says otherwise; what has no method is for :meth:`visit_other`.
    """

    def visit(self, node: tirx.Stmt, *context: Any) -> Any:
        """What the method for a statement's class returns."""
        return getattr(self, _STATEMENTS.get(type(node), "visit_other"), self.visit_other)(node, *context)

    def visit_sequence(self, node: tirx.SeqStmt, *context: Any) -> Any:
        """Each of its statements."""
        for part in node.seq:
            self.visit(part, *context)

    def visit_attr(self, node: tirx.AttrStmt, *context: Any) -> Any:
        """The statement that has the attribute."""
        return self.visit(node.body, *context)

    @abstractmethod
    def visit_other(self, node: tirx.Stmt, *context: Any) -> Any:
        """A statement of which nothing is known. Passed over without a word it would be a hole in what is found."""


def statements_of(body: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements of a sequence, or the only one."""
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def sequence(*statements: tirx.Stmt | None) -> tirx.Stmt:
    """One statement or more in order, without the missing ones; those in sequences stand among the others.

    TVM's own sequence of sequences drops what does nothing, and fails where one statement is left.
    """
    parts = [part for statement in statements if statement is not None for part in statements_of(statement)]
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)


def buffer_loads(root: Any) -> list[TensorLoad]:
    """All reads of buffers in an expression or statement; repeated ones repeat."""
    return collect(root, TensorLoad)


def only_calculates(expression: PrimExpr) -> bool:
    """Whether an expression reads no memory, names no part of itself, and calls nothing but operations on bits."""
    calls = [str(getattr(call.op, "name", "")) for call in collect(expression, Call)]
    arithmetic = all(any(part in name for part in _ON_BITS) for name in calls)
    return arithmetic and not collect(expression, TensorLoad) and not collect(expression, tirx.Let)


def variables(expression: PrimExpr) -> list[tirx.Var]:
    """The distinct variables that occur in `expression`, in order of first use."""
    found: list[tirx.Var] = []
    for variable in collect(expression, tirx.Var):
        if not any(variable.same_as(seen) for seen in found):
            found.append(variable)
    return found


def const_int(expression: Any) -> int:
    """The value of an integer constant expression (or Python int).

    Raises
    ------
    TypeError
        If it is not a constant.
    """
    if isinstance(expression, int):
        return expression
    if isinstance(expression, tirx.IntImm):
        return int(expression.value)
    raise TypeError(f"not a constant: {expression}")


def largest_value(expression: PrimExpr, axes: Iterable[tirx.IterVar]) -> int:
    """The largest value of an integer expression over `axes`."""
    if isinstance(expression, tirx.IntImm):
        return int(expression.value)
    return int(bounded_analyzer(axes).const_int_bound(expression).max_value)


def dtype_of(expression: PrimExpr) -> str:
    """The scalar type of an expression, such as ``"int32"``."""
    of = expression.ty
    known = _NAMED_TYPES.get(of.__chandle__())
    if known is not None:
        return known[1]
    name = str(of.dtype)
    if isinstance(of, PrimType):
        _NAMED_TYPES[of.__chandle__()] = (of, name)
    return name


_NAMED_TYPES: dict[int, tuple[PrimType, str]] = {}
"""By address, which no other type has while these are held: TVM makes each once, and works out its name each time."""


def cast(expression: PrimExpr, dtype: str) -> PrimExpr:
    """An expression in a type: itself where it has that, an integer literal of that type, or a conversion."""
    if dtype_of(expression) == dtype:
        return expression
    if isinstance(expression, tirx.IntImm) and dtype.startswith("int"):
        return tirx.IntImm(dtype, int(expression.value))
    return tirx.Cast(dtype, expression)


def fresh_axis(extent: int, name: str, *, reduction: bool = False) -> tirx.IterVar:
    """A new iteration variable over ``[0, extent)``, data-parallel or reduction."""
    return te.reduce_axis((0, extent), name=name) if reduction else tirx.IterVar((0, extent), name, 0)


def compute_op(name: str, axes: Sequence[tirx.IterVar], bodies: Sequence[PrimExpr], tag: str = "") -> te.ComputeOp:
    """A TE from its axes and one body per output.

    Parameters
    ----------
    name : str
        The TE's name; it becomes its block's name in TensorIR.
    axes : sequence of IterVar
        Data-parallel axes, one per output dimension.
    bodies : sequence of expressions
        One per output. Outputs of one multi-output reduction are ``Reduce`` nodes that differ in ``value_index``.
    """
    return te._ffi_api.ComputeOp(name, tag, {}, list(axes), list(bodies))


def reduce_node(body: PrimExpr) -> tirx.Reduce | None:
    """The reduction at the root of a TE's body, or ``None`` for a TE without reduction axes."""
    return body if isinstance(body, tirx.Reduce) else None


def primfunc_from_tensors(tensors: Sequence[te.Tensor], name: str) -> tirx.PrimFunc:
    """TensorIR for a graph of TEs; parameters in the order of `tensors` (inputs, then outputs)."""
    return te.create_prim_func(list(tensors)).with_attr("global_symbol", name)


def structural_key(expression: PrimExpr) -> Any:
    """A dictionary key that is equal for structurally equal expressions of the same variables. Without loads."""
    return tvm_ffi.StructuralKey(expression)


def structural_digest(node: Any) -> str:
    """A hash that is equal for structurally equal TVM objects (free variables mapped by position)."""
    return format(tvm_ffi.structural_hash(node, map_free_vars=True) & (2**64 - 1), "016x")


def named_key(func: tirx.PrimFunc) -> Any:
    """A dictionary key that is equal for structurally equal functions in which all has the same name too."""
    variables, blocks = collect(func, Var), collect(func, s_tir.SBlock)
    return tvm_ffi.StructuralKey(func), *(str(one.name) for one in variables), *(str(one.name_hint) for one in blocks)


def same_expression(left: PrimExpr, right: PrimExpr) -> bool:
    """Structural equality, with variables and the tensors of loads compared by identity."""
    return tvm_ffi.structural_equal(_hashable(left), _hashable(right))


def _hashable(expression: PrimExpr) -> PrimExpr:
    """TVM compares no ``te.Tensor`` structurally, so loads become calls named after the tensor's identity."""

    def rename(load: Call) -> PrimExpr:
        name = f"tensor{hash(load_tensor(load))}"
        return tirx.call_pure_extern(str(load_tensor(load).dtype), name, *load_indices(load))

    return map_loads(expression, rename)


def bounded_analyzer(axes: Iterable[tirx.IterVar]) -> Analyzer:
    """TVM's arithmetic analyzer that knows the ranges of `axes`."""
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    return analyzer
