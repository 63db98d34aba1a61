"""Walks an ONNX graph once, forwards, and turns every node into TEs (paper §4).

A value is known either wholly (:class:`Known`, a constant) or by its shape and type (a program tensor). So shape
arithmetic is evaluated where it stands, and no shape inference is needed beside what lowering itself finds out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tvm import te

from souffle.errors import Refusal, UnsupportedOperatorError
from souffle.frontend.accumulation import NARROW
from souffle.frontend.constant_folding import empty_outputs, evaluate_node
from souffle.frontend.custom import NodeOperands, custom_template, template_of
from souffle.frontend.diagnosis import diagnosed, run_time_parameters
from souffle.frontend.emit import Emitter, check_element_types
from souffle.frontend.function_bodies import definition
from souffle.frontend.lowering import IMPORTER_ERRORS, NodeInput, Template, lower_node
from souffle.frontend.moved_bytes import has_small_elements, moved_as_bytes
from souffle.frontend.refusal import (
    Obstacle,
    computed,
    is_text,
    operator_name,
    position_name,
    refuse,
    unknown_extent,
    version_of,
)
from souffle.frontend.small_types import codes_of
from souffle.frontend.values import Coded, Count, Counted, Known, QuantizedValues, Scope, Stacked, Value, is_counted
from souffle.program import Tensor
from souffle.program.names import NameSupply

__all__ = ["BUILDER_OPSETS", "COUNTED_FORMS", "SPECIAL_OPERATORS", "Interpreter", "on_integers", "special"]

_SCALAR = 1
_SMALL_INTEGERS = 65536
_CONCAT_FAN_IN = 16
# Operators whose other inputs say what to do, so that their values are wanted, whatever their types.
_VALUE_OPERATORS = frozenset({"Resize", "Upsample"})
_SEQUENCE_NAMES = """
ConcatFromSequence Identity If Loop Optional OptionalGetElement OptionalHasElement Scan SequenceAt SequenceConstruct
SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence
"""
# Operators that take sequences, and absent optionals, as values.
_SEQUENCE_OPERATORS = frozenset(_SEQUENCE_NAMES.split())
# They know about small types themselves, or do not read elements at all.
_ANY_TYPE_OPERATORS = _SEQUENCE_OPERATORS | frozenset(
    {"BitCast", "Cast", "CastLike", "DequantizeLinear", "QuantizeLinear", "Shape", "Size"}
)
_CLASSIFYING_OPERATORS = frozenset({"IsInf", "IsNaN"})
# Of 16-bit numbers they compute in 32 bits: a sum, a power or a distance on the way to their result is beyond half
# precision where the result is not, or neither LLVM nor CUDA has the function for the 16-bit types.
_WIDE_NAMES = """
Acos Acosh Asin Asinh Atan Atanh AveragePool Cosh DFT GlobalAveragePool InstanceNormalization IsInf IsNaN LRN
LpNormalization LpPool Mean MeanVarianceNormalization Mish ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean Round STFT
Sinh Softplus Tan
"""
_WIDE_OPERATORS = frozenset(_WIDE_NAMES.split())
# Their weights are data, whatever their size: layers that differ in nothing else share their expressions.
_PRODUCT_OPERATORS = frozenset({"ConvInteger", "MatMulInteger"})
# Without updates their result is their first input.
_SCATTERS = frozenset({"Scatter", "ScatterElements", "ScatterND"})
BUILDER_OPSETS = (helper.make_opsetid("", 17),)
"""The operator set of nodes that the importer itself writes."""


class Interpreter:
    """Turns ONNX nodes into TEs of an :class:`Emitter`."""

    def __init__(
        self, emitter: Emitter, functions: Mapping[tuple[str, str], onnx.FunctionProto], integers: bool = True
    ):
        self.emitter = emitter
        self.functions = functions
        self.integers = integers
        self.quantized = QuantizedValues()
        self.node_names = NameSupply()
        self._templates: dict[tuple, Template] = {}
        self.reshaped_from: dict[Tensor, Tensor] = {}
        self.counts: dict[tuple, Count] = {}
        self.without_ends: dict[tuple, Value] = {}
        self._whole: dict[Stacked, Known | Tensor] = {}

    def run(self, nodes: Sequence[onnx.NodeProto], scope: Scope) -> None:
        """Interpret `nodes` in order and enter their outputs into `scope`."""
        for position, node in enumerate(nodes):
            bound = bind_attributes(node, scope)
            bound.name = self.node_names.fresh(f"{scope.prefix}{position_name(node, position)}")
            inputs = [scope.lookup(given) if given else None for given in node.input]
            try:
                results = self.node(bound, inputs, scope)
            except UnsupportedOperatorError as error:
                if scope.prefix:
                    raise
                # A node of the model itself is named first, those that it consists of after it.
                refuse(bound, inputs, scope.opsets, error)
            for given, value in zip(node.output, results, strict=False):
                if given:
                    scope.values[given] = value

    def node(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value]:
        """The outputs of one node, whose name is already unique.

        Raises
        ------
        UnsupportedOperatorError
            Naming operator, node, the type of every input, the reason, and what would help.
        """
        try:
            return self._node(node, inputs, scope)
        except Obstacle as obstacle:
            refuse(node, inputs, scope.opsets, obstacle, self.emitter.inputs_behind)
        except IMPORTER_ERRORS as error:
            obstacle = diagnosed(node, _node_inputs(inputs), scope.opsets, error)
            refuse(node, inputs, scope.opsets, obstacle, self.emitter.inputs_behind)

    def _node(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value]:
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            return self.call(function, node, inputs, scope)
        _check_inputs(node, inputs, scope.opsets)
        if any(map(is_counted, inputs)):
            return self._on_counts(node, inputs, scope)
        if any(map(has_small_elements, inputs)) and node.op_type not in _ANY_TYPE_OPERATORS:
            if node.op_type in _CLASSIFYING_OPERATORS:
                return self.in_single_precision(node, inputs, scope)
            return moved_as_bytes(node, inputs, scope.opsets, lambda given: self._node(node, given, scope))
        if any(isinstance(value, Known) and not value.array.size for value in inputs):
            if node.op_type in _SCATTERS and not math.prod(inputs[2].shape):
                return [inputs[0]]
            empty = self._empty(node, inputs, scope.opsets)
            if empty is not None:
                return empty
        form = INTEGER_FORMS.get(operator_name(node)) if self.integers else None
        results = None if form is None else form(self, node, inputs, scope)
        return self.standard(node, inputs, scope) if results is None else results

    def _on_counts(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value]:
        """The outputs of a node some inputs of which have counted axes: nothing is read unless it is known how."""
        form = COUNTED_FORMS.get(operator_name(node))
        if form is not None:
            return form(self, node, inputs, scope)
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = version_of(domain, scope.opsets)
        if onnx.defs.has(node.op_type, version, domain):
            schema = onnx.defs.get_schema(node.op_type, version, domain)
            if schema.has_function and not schema.has_context_dependent_function:
                return self.by_definition(node, inputs, scope)
        raise unknown_extent(node, inputs, scope.opsets)

    def standard(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value]:
        """The outputs of a node as its operator is defined, whatever its inputs were quantized from."""
        operator = operator_name(node)
        if operator in _WIDE_OPERATORS and inputs[0].dtype in NARROW:
            return self.in_single_precision(node, inputs, scope)
        special = SPECIAL_OPERATORS.get(operator)
        results = None if special is None else special(self, node, inputs, scope)
        return self.primitive(node, inputs, scope.opsets) if results is None else results

    def in_single_precision(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value]:
        """The outputs of a node whose first input is of narrower floating-point numbers, computed in 32 bits."""
        narrow = inputs[0].dtype

        def cast(value: Value, source: str, target: str) -> Value:
            if value is None or isinstance(value, list) or value.dtype != source:
                return value
            to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
            return self.emit("Cast", [value], f"{node.name}/Cast", to=to)[0]

        wide = self._node(node, [cast(value, narrow, "float32") for value in inputs], scope)
        return [cast(value, "float32", narrow) for value in wide]

    def whole(self, value: Value) -> Value:
        """`value`, written as one tensor where it is a stack."""
        if not isinstance(value, Stacked):
            return value
        if value not in self._whole:
            shape = list(value.shape)
            shape[value.axis] = 1
            target = Known(np.array(shape, dtype="int64"), f"{value.name}_shape")
            parts: list[Value] = [
                self.emit("Reshape", [piece, target], f"{value.name}/t{k}/Unsqueeze")[0]
                for k, piece in enumerate(value.pieces)
            ]
            while len(parts) > 1:
                groups = [parts[k : k + _CONCAT_FAN_IN] for k in range(0, len(parts), _CONCAT_FAN_IN)]
                parts = [self.emit("Concat", group, f"{value.name}/Concat", axis=value.axis)[0] for group in groups]
            self._whole[value] = parts[0]
        return self._whole[value]

    def primitive(
        self,
        node: onnx.NodeProto,
        inputs: Sequence[Value],
        opsets: Sequence[onnx.OperatorSetIdProto],
        *,
        folding: bool = True,
    ) -> Sequence[Value]:
        """The outputs of a node of a plain operator: folded, lowered through TVM, or by its ONNX definition.

        Without `folding` constants are lowered, too: for inputs that are as TVM's importer needs them.
        """
        inputs = [self.whole(value) for value in inputs]
        if folding and all(value is None or isinstance(value, Known) for value in inputs):
            folded = evaluate_node(node, [None if v is None else v.array for v in inputs], opsets)
            if folded is not None:
                return [Known(array, f"{node.name}_value") if array is not None else None for array in folded]
        if any(is_text(value) for value in inputs):
            raise Obstacle("it reads text", "encode text as numbers outside of the network", refusal=Refusal.TEXT)
        try:
            return self._with_formal_types(node, inputs, self._lower(node, inputs, opsets), opsets)
        except Obstacle as obstacle:
            empty = self._empty(node, inputs, opsets)
            if empty is not None:
                return empty
            body = definition(node, inputs, opsets)
            if body is not None:
                try:
                    return self.call(body, node, inputs, Scope({}, tuple(opsets)))
                except UnsupportedOperatorError as inner:
                    own = run_time_parameters(node, _node_inputs(inputs), opsets)
                    raise computed(*own) if own else _by_definition(inner) from inner
            cause = obstacle.__cause__
            if cause is None:
                raise
            raise diagnosed(node, _node_inputs(inputs), opsets, cause) from cause

    def _empty(self, node: onnx.NodeProto, inputs: Sequence[Value], opsets) -> Sequence[Value] | None:
        """The outputs of a node all of whose outputs have no elements; ``None`` for all others."""
        if any(isinstance(v, list) or is_text(v) for v in inputs) or any(a.HasField("g") for a in node.attribute):
            return None
        given = [
            None if v is None else (v.shape, v.dtype, v.array if isinstance(v, Known) and v.array.ndim < 2 else None)
            for v in inputs
        ]
        arrays = empty_outputs(node, given, opsets)
        return arrays and [None if array is None else Known(array, f"{node.name}_empty") for array in arrays]

    def by_definition(self, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> Sequence[Value] | None:
        """The outputs of a node by the body that ONNX defines its operator with; ``None`` if it has none."""
        whole = [self.whole(value) for value in inputs]
        body = definition(node, whole, scope.opsets)
        return None if body is None else self.call(body, node, whole, scope)

    def call(
        self, function: onnx.FunctionProto, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
    ) -> Sequence[Value]:
        """The outputs of a node whose operator is defined by `function`."""
        attributes = {a.name: a for a in function.attribute_proto}
        attributes.update({a.name: a for a in node.attribute})
        values: dict[str, Value] = dict.fromkeys(function.input)
        values.update(zip(function.input, inputs, strict=False))
        # A body that names no operator set of a domain takes the model's.
        named = {o.domain for o in function.opset_import}
        opsets = (*function.opset_import, *(o for o in scope.opsets if o.domain not in named))
        inner = Scope(values, opsets, f"{node.name}/", attributes)
        self.run(function.node, inner)
        return [
            inner.lookup(name) if wanted else None for name, wanted in zip(function.output, node.output, strict=False)
        ]

    def subgraph(self, graph: onnx.GraphProto, inputs: Sequence[Value], name: str, scope: Scope) -> list[Value]:
        """The outputs of a sub-graph that sees the names of `scope`."""
        values: dict[str, Value] = {t.name: Known(numpy_helper.to_array(t), t.name) for t in graph.initializer}
        values.update(zip((i.name for i in graph.input), inputs, strict=True))
        inner = Scope(values, scope.opsets, f"{name}/", scope.attributes, scope)
        self.run(graph.node, inner)
        return [inner.lookup(output.name) for output in graph.output]

    def emit(self, operator: str, inputs: Sequence[Value], name: str, *, outputs: int = 1, **attributes) -> list[Value]:
        """The outputs of a new node of a standard operator, for expansions."""
        node = helper.make_node(
            operator,
            ["" if value is None else f"i{k}" for k, value in enumerate(inputs)],
            [f"o{k}" for k in range(outputs)],
            name=self.node_names.fresh(name),
            **attributes,
        )
        return list(self.node(node, inputs, Scope({}, BUILDER_OPSETS)))

    def _with_formal_types(
        self, node: onnx.NodeProto, inputs: Sequence[Value], outputs: Sequence[Value], opsets
    ) -> list[Value]:
        """`outputs` in the types of ONNX, where that is the type of an input: some of TVM's operators have another."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = version_of(domain, opsets)
        if not onnx.defs.has(node.op_type, version, domain):
            return list(outputs)
        schema = onnx.defs.get_schema(node.op_type, version, domain)
        types = {
            formal.type_str: value.dtype
            for formal, value in zip(schema.inputs, inputs, strict=False)
            if isinstance(value, Known | Tensor)
        }
        results = []
        for k, value in enumerate(outputs):
            dtype = types.get(schema.outputs[min(k, len(schema.outputs) - 1)].type_str)
            if isinstance(value, Tensor) and dtype is not None and value.dtype != dtype:
                to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
                (value,) = self.emit("Cast", [value], f"{node.name}/Cast", to=to)
            results.append(value)
        return results

    def _lower(self, node: onnx.NodeProto, inputs: Sequence[Value], opsets) -> Sequence[Value]:
        limit = _SCALAR if node.op_type in _PRODUCT_OPERATORS else _SMALL_INTEGERS
        given = [_as_node_input(value, node.op_type in _VALUE_OPERATORS, limit) for value in inputs]
        check_element_types(form.dtype for form in given if form is not None)
        try:
            template = self._template(node, given, opsets)
        except Obstacle:
            # Some converters of TVM want an input as a constant, whatever its size.
            whole = [_as_node_input(value, True) for value in inputs]
            if all((a is None or a.value is None) == (b is None or b.value is None) for a, b in zip(whole, given)):
                raise
            given = whole
            template = self._template(node, given, opsets)
        return self._instances(template, node, inputs, given)

    def defined(
        self,
        definition: Callable[..., Sequence[te.Tensor]],
        node: onnx.NodeProto,
        inputs: Sequence[Value],
        parameters: tuple,
    ) -> Sequence[Value]:
        """The outputs of a node that `definition` makes of its operands and `parameters`, which say all about it."""
        inputs = [self.whole(value) for value in inputs]
        given = [_as_node_input(value, False) for value in inputs]
        key = (definition, parameters, *(None if form is None else form.key for form in given))
        if key not in self._templates:

            def bound(operands: NodeOperands) -> Sequence[te.Tensor]:
                return definition(operands, *parameters)

            self._templates[key] = template_of(bound, given, node.op_type.lower())
        return self._instances(self._templates[key], node, inputs, given)

    def _instances(
        self, template: Template, node: onnx.NodeProto, inputs: Sequence[Value], given: Sequence[NodeInput | None]
    ) -> Sequence[Value]:
        types = [template.types[slot] for slot in template.results]
        if types and not any(math.prod(shape) for shape, _ in types):
            return [Known(np.zeros(shape, dtype=dtype), f"{node.name}_empty") for shape, dtype in types]
        feeds = [
            self.tensor_of(value)
            for value, form in zip(inputs, given, strict=True)
            if form is not None and form.value is None
        ]
        results = self.emitter.instantiate(template, feeds, node.name, node.op_type)
        return [r if r.size else Known(np.zeros(r.shape, dtype=r.dtype), f"{node.name}_empty") for r in results]

    def _template(self, node: onnx.NodeProto, given: Sequence[NodeInput | None], opsets) -> Template:
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        versions = tuple((o.domain, o.version) for o in opsets)
        keys = tuple(None if form is None else form.key for form in given)
        key = (node.domain, node.op_type, attributes, versions, len(node.output), keys)
        if key not in self._templates:
            self._templates[key] = custom_template(node, given) or lower_node(node, given, len(node.output), opsets)
        return self._templates[key]

    def tensor_of(self, value: Known | Tensor | Coded | Stacked) -> Tensor:
        """The program tensor of a value; of bytes, where its elements are of a small type."""
        value = codes_of(self.whole(value))
        if isinstance(value, Counted):
            value = value.shape  # which it refuses to say
        return self.emitter.constant(value.array, value.name) if isinstance(value, Known) else value


def _by_definition(inner: UnsupportedOperatorError) -> Obstacle:
    return Obstacle(f"by its ONNX definition, {inner}", refusal=inner.refusal, needs=inner.needs)


def _node_inputs(inputs: Sequence[Value]) -> list[NodeInput | None]:
    room = [value.tensor if isinstance(value, Counted) else value for value in inputs]
    return [None if isinstance(value, list) else _as_node_input(value, True) for value in room]


def _check_inputs(node: onnx.NodeProto, inputs: Sequence[Value], opsets: Sequence[onnx.OperatorSetIdProto]) -> None:
    """Refuse what no handler of an operator looks out for: sequences and strings where tensors are wanted."""
    if node.op_type in _SEQUENCE_OPERATORS:
        return
    if any(isinstance(value, list) for value in inputs):
        words = "it reads a sequence, which only operators of sequences may"
        raise Obstacle(words, "give it a tensor", refusal=Refusal.SEQUENCE)
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = version_of(domain, opsets)
    if not onnx.defs.has(node.op_type, version, domain):
        return
    for formal, value in zip(onnx.defs.get_schema(node.op_type, version, domain).inputs, inputs, strict=False):
        if formal.option == onnx.defs.OpSchema.FormalParameterOption.Single and value is None:
            raise Obstacle(f"its input {formal.name!r} is absent", "give it a value: it is not optional")


def _as_node_input(value: Value, by_value: bool, limit: int = _SMALL_INTEGERS) -> NodeInput | None:
    if value is None:
        return None
    small = isinstance(value, Known) and (
        by_value
        or value.array.size <= _SCALAR
        or (value.array.dtype.kind in "iub" and value.array.size <= limit)
    )
    return NodeInput(value.shape, value.dtype, value.array if small else None)


def bind_attributes(node: onnx.NodeProto, scope: Scope) -> onnx.NodeProto:
    """A copy of `node` in which attributes that refer to a function's attributes are replaced by their values."""
    bound = onnx.NodeProto()
    bound.CopyFrom(node)
    if not any(a.ref_attr_name for a in node.attribute):
        return bound
    del bound.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound.attribute.append(attribute)
        elif attribute.ref_attr_name in scope.attributes:
            bound.attribute.append(scope.attributes[attribute.ref_attr_name])
            bound.attribute[-1].name = attribute.name
    return bound


SpecialOperator = Callable[[Interpreter, onnx.NodeProto, Sequence[Value], Scope], Sequence[Value] | None]
"""Handles an operator itself; ``None`` leaves the node to TVM."""

SPECIAL_OPERATORS: dict[str, SpecialOperator] = {}
INTEGER_FORMS: dict[str, SpecialOperator] = {}
"""Handle operators of ONNX on values that stand for integers; ``None`` leaves the node to the others."""
COUNTED_FORMS: dict[str, Callable[[Interpreter, onnx.NodeProto, Sequence[Value], Scope], Sequence[Value]]] = {}
"""Handle operators of ONNX on values with counted axes; all that are not here are refused."""


def special(*operators: str, domain: str = "") -> Callable[[SpecialOperator], SpecialOperator]:
    """Enter a function as the handler of `operators`.

    An operator of another domain than ONNX's is entered as ``domain::operator``, and may be named so.
    """

    def register(function: SpecialOperator) -> SpecialOperator:
        names = [f"{domain}::{operator}" if domain else operator for operator in operators]
        SPECIAL_OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def on_integers(*operators: str) -> Callable[[SpecialOperator], SpecialOperator]:
    """Enter a function as the handler of `operators` where integers are wanted (:attr:`Interpreter.integers`)."""

    def register(function: SpecialOperator) -> SpecialOperator:
        INTEGER_FORMS.update(dict.fromkeys(operators, function))
        return function

    return register
