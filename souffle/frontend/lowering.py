"""One ONNX node → TEs, by TVM's ONNX importer and the TE functions that TVM registers for its operators (paper §4).

A node is lowered alone, from a model that holds nothing else, so that every TE is known to be that node's. What is
lowered is a :class:`Template`: nodes that differ only in names and weights share one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax, te, tirx
from tvm.ir import Call, GenericConst
from tvm.relax.frontend.onnx import from_onnx

from souffle.frontend.refusal import Obstacle
from souffle.tvm_compat import const_int

__all__ = ["IMPORTER_ERRORS", "NodeInput", "Step", "Template", "lower_node", "single_node_model"]

_CALL_TIR = "relax.call_tir"


@dataclass(frozen=True)
class NodeInput:
    """What a node reads: a tensor of static shape, whose value is given where it is a small constant."""

    shape: tuple[int, ...]
    dtype: str
    value: np.ndarray | None = None

    @property
    def key(self) -> tuple:
        """Equal for inputs that lower alike."""
        return self.shape, self.dtype, None if self.value is None else self.value.tobytes()


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of TVM: a graph of ``te.ComputeOp`` s, or a TensorIR function that is no TE.

    Attributes
    ----------
    name : str
        TVM's name for the operator.
    func : tirx.PrimFunc
        The operator as TensorIR; parameters are `inputs`, then `outputs`.
    inputs : tuple of int
        Slots of the template that it reads.
    outputs : tuple of int
        Slots that it defines.
    placeholders : tuple of te.Tensor
        One for each input; empty for a function that is no TE.
    tensors : tuple of te.Tensor
        One for each output; empty for a function that is no TE.
    """

    name: str
    func: tirx.PrimFunc
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    placeholders: tuple[te.Tensor, ...]
    tensors: tuple[te.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Template:
    """A lowered node. Its values are numbered slots.

    Attributes
    ----------
    types : tuple of (shape, dtype)
        Of every slot; the node's inputs come first.
    constants : dict of int to array
        Slots whose value TVM's importer made or took in.
    steps : tuple of Step
        In order of execution.
    results : tuple of int
        The slots of the node's outputs.
    """

    types: tuple[tuple[tuple[int, ...], str], ...]
    constants: dict[int, np.ndarray]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


_capture_lock = threading.RLock()


@contextlib.contextmanager
def _captured_te_calls() -> Iterator[dict[str, tuple[tuple[te.Tensor, ...], tuple[te.Tensor, ...]]]]:
    """While active, every ``BlockBuilder.call_te`` also records its TEs, by the name of the function it makes.

    A subclass would not do: the builder crosses TVM's FFI and comes back as the base class.
    """
    captured: dict[str, tuple[tuple[te.Tensor, ...], tuple[te.Tensor, ...]]] = {}

    def call_te(self: relax.BlockBuilder, func, *args, **kwargs):
        record: list[tuple[tuple[te.Tensor, ...], tuple[te.Tensor, ...]]] = []

        @functools.wraps(func)
        def traced(*te_args, **te_kwargs):
            result = func(*te_args, **te_kwargs)
            outputs = (result,) if isinstance(result, te.Tensor) else tuple(result)
            record.append((tuple(_tensors([*te_args, *te_kwargs.values()])), outputs))
            return result

        call = original(self, traced, *args, **kwargs)
        captured[call.args[0].name_hint] = record[-1]
        return call

    def exit_scope(self: relax.BlockBuilder, kind, error, trace) -> None:
        leave(self, kind, error, trace)
        if kind is not None:
            # A builder that an error leaves with an open block complains about it on stderr when it goes.
            self._end_block()

    with _capture_lock:
        # Another thread's stand-ins are gone by now.
        original, leave = relax.BlockBuilder.call_te, relax.BlockBuilder._exit_function_scope
        relax.BlockBuilder.call_te, relax.BlockBuilder._exit_function_scope = call_te, exit_scope
        try:
            yield captured
        finally:
            relax.BlockBuilder.call_te, relax.BlockBuilder._exit_function_scope = original, leave


def _tensors(arguments) -> Iterator[te.Tensor]:
    for argument in arguments:
        if isinstance(argument, te.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple, tvm.ir.Array)):
            yield from _tensors(argument)
        elif isinstance(argument, dict):
            yield from _tensors(argument.values())


def lower_node(
    node: onnx.NodeProto,
    inputs: Sequence[NodeInput | None],
    outputs: int,
    opset_imports: Sequence[onnx.OperatorSetIdProto],
) -> Template:
    """Lower one node.

    Parameters
    ----------
    node : NodeProto
    inputs : sequence
        One for each of the node's inputs; ``None`` for an optional one that is absent.
    outputs : int
        How many outputs the node has.
    opset_imports : sequence of OperatorSetIdProto

    Raises
    ------
    Obstacle
        Chained to what TVM's importer ended with, which :mod:`souffle.frontend.diagnosis` puts into words.
    """
    model = single_node_model(node, inputs, outputs, opset_imports)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with _captured_te_calls() as of_importer:
                module = from_onnx(model, keep_params_in_input=False)
            module = relax.transform.DecomposeOpsForInference()(module)
            # Folding makes functions of its own, whose names may be those of other functions here: not captured.
            module = relax.transform.FoldConstant()(module)
            with _captured_te_calls() as of_operators:
                module = relax.transform.LegalizeOps(enable_warning=False)(module)
            module = relax.transform.CanonicalizeBindings()(module)
            return _Reader(module, of_importer | of_operators).template()
    except IMPORTER_ERRORS as error:
        raise Obstacle(f"TVM's importer does not take this form of {node.op_type}") from error


IMPORTER_ERRORS = (
    tvm.error.OpError,
    tvm.error.InternalError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What TVM's importer, and expressions made with TVM, end with where a form of an operator is beyond them."""


def single_node_model(
    node: onnx.NodeProto,
    inputs: Sequence[NodeInput | None],
    outputs: int,
    opset_imports: Sequence[onnx.OperatorSetIdProto],
) -> onnx.ModelProto:
    """A model that holds nothing but `node`; its inputs are those of the node that are no constants."""
    single = onnx.NodeProto()
    single.CopyFrom(node)
    del single.input[:]
    del single.output[:]
    values, initializers = [], []
    for position, given in enumerate(inputs):
        name = "" if given is None else f"i{position}"
        single.input.append(name)
        if given is None:
            continue
        if given.value is not None:
            initializers.append(numpy_helper.from_array(given.value, name))
        else:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(given.dtype))
            values.append(helper.make_tensor_value_info(name, element, given.shape))
    single.output.extend(f"o{k}" for k in range(outputs))
    results = [helper.make_empty_tensor_value_info(name) for name in single.output]
    graph = helper.make_graph([single], "node", values, results, initializers)
    return helper.make_model(graph, opset_imports=opset_imports)


class _Reader:
    """Reads a legalized Relax function into a template."""

    def __init__(self, module: tvm.IRModule, captured):
        self.module = module
        self.captured = captured
        self.types: list[tuple[tuple[int, ...], str]] = []
        self.constants: dict[int, np.ndarray] = {}
        self.steps: list[Step] = []
        self.values: dict[str, tuple] = {}

    def template(self) -> Template:
        function = self.module["main"]
        for param in function.params:
            self.values[param.name] = self._new(param.ty)
        for block in function.body.blocks:
            for binding in block.bindings:
                self.values[binding.var.name] = self._evaluate(binding.var, binding.value)
        result = self._operand(function.body.body)
        results = (result,) if isinstance(result, int) else tuple(result)
        return Template(tuple(self.types), self.constants, tuple(self.steps), results)

    def _new(self, ty):
        if isinstance(ty, relax.TupleType):
            return tuple(self._new(field) for field in ty.fields)
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise ValueError(f"a value of type {ty} has no static shape")
        try:
            shape = tuple(const_int(extent) for extent in ty.shape.values)
        except TypeError as error:
            raise ValueError(f"the shape {ty.shape} depends on data") from error
        self.types.append((shape, str(ty.dtype.dtype)))
        return len(self.types) - 1

    def _operand(self, expr):
        if isinstance(expr, GenericConst):
            slot = self._new(expr.ty)
            self.constants[slot] = expr.value.numpy()
            return slot
        if isinstance(expr, relax.Tuple):
            return tuple(self._operand(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._operand(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Var):
            return self.values[expr.name]
        if isinstance(expr, relax.ShapeExpr):
            slot = len(self.types)
            value = np.array([const_int(v) for v in expr.values], dtype="int64")
            self.types.append((value.shape, "int64"))
            self.constants[slot] = value
            return slot
        raise ValueError(f"{type(expr).__name__} {expr} has no tensor expression")

    def _evaluate(self, var, value):
        if not isinstance(value, Call):
            return self._operand(value)
        operator = getattr(value.op, "name", str(value.op))
        if operator != _CALL_TIR:
            raise ValueError(f"{operator} has no tensor expression")
        symbol = value.args[0].name_hint
        inputs = tuple(_flatten(self._operand(value.args[1])))
        result = self._new(var.ty)
        placeholders, tensors = self.captured.get(symbol, ((), ()))
        self.steps.append(Step(symbol, self.module[symbol], inputs, tuple(_flatten(result)), placeholders, tensors))
        return result


def _flatten(slots) -> Iterator[int]:
    if isinstance(slots, int):
        yield slots
    else:
        for slot in slots:
            yield from _flatten(slot)
