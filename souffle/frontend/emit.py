"""Lowered nodes become TEs of one program: templates are instantiated with the program's own tensors and names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace

import numpy as np
import tvm_ffi
from tvm import te, tirx
from tvm.ir import Call
from tvm.relax.expr import TEPlaceholderOp

from souffle.errors import Refusal
from souffle.frontend.accumulation import with_wide_rounding, with_wide_sum
from souffle.frontend.lowering import Step, Template
from souffle.frontend.naming import identifier
from souffle.frontend.narrow_indices import narrowed
from souffle.frontend.refusal import Obstacle
from souffle.program import ELEMENT_TYPES, TE, ExternTE, Origin, Tensor, make_te
from souffle.program.evaluate import run_tes
from souffle.program.extrema import infinite
from souffle.program.names import NameSupply
from souffle.tvm_compat import PrimExpr, const_int, fresh_axis, is_load, load_indices, load_tensor, reduce_node

__all__ = ["Emitter", "OperatorCall", "check_element_types"]


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """One operator of TVM in the program: what TVM's own fusion decides about (the paper's V0).

    Attributes
    ----------
    func : tirx.PrimFunc
        The operator alone.
    inputs, outputs : tuple of Tensor
        The arguments of `func`.
    tes : tuple of TE or ExternTE
        The TEs that compute it.
    """

    func: tirx.PrimFunc
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tes: tuple[TE | ExternTE, ...]


@dataclass
class Emitter:
    """Collects the TEs and constants of a program under construction; `inputs` are named as in the model."""

    names: NameSupply = field(default_factory=NameSupply)
    calls: list[OperatorCall] = field(default_factory=list)
    constants: dict[Tensor, np.ndarray] = field(default_factory=dict)
    inputs: dict[Tensor, str] = field(default_factory=dict)
    _constant_tensors: dict[tuple, Tensor] = field(default_factory=dict)
    _kept_arrays: list[np.ndarray] = field(default_factory=list)
    _shared: dict[tuple, tuple[TE, tuple[int, ...]]] = field(default_factory=dict)

    def tensor(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        """A new tensor with a name made from `name`."""
        return Tensor(self.names.fresh(identifier(name)), tuple(shape), dtype)

    def constant(self, array: np.ndarray, name: str) -> Tensor:
        """The tensor of a constant; the same array, or equal small arrays, give one tensor."""
        if array.nbytes <= 4096:
            key: tuple = (array.dtype.str, array.shape, array.tobytes())
        else:
            key = (array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides)
        if key not in self._constant_tensors:
            tensor = self.tensor(name, array.shape, str(array.dtype))
            self.constants[tensor] = array
            self._constant_tensors[key] = tensor
            self._kept_arrays.append(array)
        return self._constant_tensors[key]

    def inputs_behind(self, values: Iterable[object]) -> list[str]:
        """The names of those inputs of the model that values are computed from."""
        makers = {tensor: call for call in self.calls for tensor in call.outputs}
        seen: set[Tensor] = set()
        stack = [tensor for value in values for tensor in _tensors_in(value)]
        while stack:
            tensor = stack.pop()
            if tensor not in seen:
                seen.add(tensor)
                stack.extend(makers[tensor].inputs if tensor in makers else ())
        return [name for tensor, name in self.inputs.items() if tensor in seen]

    def fold_constants(self, outputs: Set[Tensor]) -> None:
        """Evaluate the TEs that read nothing but constants; what others, or `outputs`, need becomes constants."""
        known: set[Tensor] = set(self.constants)
        folded: list[TE | ExternTE] = []
        for te_ in (te_ for call in self.calls for te_ in call.tes):
            if known.issuperset(te_.inputs):
                known.update(te_.outputs)
                folded.append(te_)
        if not folded:
            return
        removed = set(folded)
        read = {tensor for call in self.calls for te_ in call.tes if te_ not in removed for tensor in te_.inputs}
        results = run_tes(folded, self.constants, read | outputs)
        remaining = [(call, tuple(te_ for te_ in call.tes if te_ not in removed)) for call in self.calls]
        self.calls = [replace(call, tes=tes) for call, tes in remaining if tes]
        self.constants.update(results)

    def instantiate(
        self, template: Template, inputs: Sequence[Tensor | None], node: str, operator: str
    ) -> list[Tensor]:
        """Add the TEs of a lowered node and return the tensors of its outputs.

        Parameters
        ----------
        template : Template
        inputs : sequence of Tensor
            The node's inputs that the template takes as tensors, in order.
        node, operator : str
            The node's name and operator type.
        """
        check_element_types(_types_of(template))
        _check_sizes(template)
        origin = Origin((node,), (operator,), node)
        slots: dict[int, Tensor] = dict(enumerate(inputs))
        for slot, array in template.constants.items():
            slots[slot] = self.constant(array, f"{node}_c{slot}")
        scalars = {
            slot: tirx.const(array.reshape(-1)[0].item(), str(array.dtype))
            for slot, array in template.constants.items()
            if array.size == 1
        }
        final = set(template.results)
        for step in template.steps:
            self._run_step(step, template, slots, scalars, final, origin)
        return [slots[slot] for slot in template.results]

    def _run_step(
        self,
        step: Step,
        template: Template,
        slots: dict[int, Tensor],
        scalars: Mapping[int, PrimExpr],
        final: set[int],
        origin: Origin,
    ) -> None:
        inputs = tuple(slots[slot] for slot in step.inputs)
        node = origin.nodes[0]
        graph = compute_graph(step.tensors) if step.tensors else None
        labels = {slot: node if slot in final else f"{node}_{step.name}" for slot in step.outputs}
        if graph is None:
            _check_self_contained(step, origin)
            outputs = tuple(self.tensor(labels[slot], *template.types[slot]) for slot in step.outputs)
            extern = ExternTE(outputs[0].name, step.func, inputs, outputs, origin)
            slots.update(zip(step.outputs, outputs, strict=True))
            self.calls.append(OperatorCall(step.func, inputs, outputs, (extern,)))
            return
        known: dict[tuple, Tensor] = {
            (placeholder.op, 0): tensor for placeholder, tensor in zip(step.placeholders, inputs, strict=True)
        }
        inlined = {
            placeholder.op: scalars[slot]
            for placeholder, slot in zip(step.placeholders, step.inputs, strict=True)
            if slot in scalars
        }
        wanted = {
            (tensor.op, tensor.value_index): slot for tensor, slot in zip(step.tensors, step.outputs, strict=True)
        }
        tes: list[TE] = []
        for op in graph:
            alias = _copied_tensor(op, known)
            if alias is not None:
                known[op, 0] = alias
                continue
            slot = next((wanted[op, k] for k in range(op.num_outputs) if (op, k) in wanted), None)
            label = labels[slot] if slot is not None else f"{node}_{op.name}"
            name = self.names.fresh(identifier(label))
            te_ = self._fresh_te(op, name, known, inlined, origin)
            tes.append(te_)
            if te_.outputs[0].dtype != str(op.output(0).dtype):
                te_ = self._converted(te_.output, str(op.output(0).dtype), self.names.fresh(f"{name}_rounded"), origin)
                tes.append(te_)
            known.update({(op, k): tensor for k, tensor in enumerate(te_.outputs)})
        slots.update({slot: known[key] for key, slot in wanted.items()})
        outputs = tuple(slots[slot] for slot in step.outputs)
        if tes:
            self.calls.append(OperatorCall(step.func, inputs, outputs, tuple(tes)))

    def _fresh_te(
        self, op: te.ComputeOp, name: str, known: dict[tuple, Tensor], inlined: Mapping, origin: Origin
    ) -> TE:
        sources = [known[source.op, source.value_index] for source in op.input_tensors]
        # The same expression, where the same ones of its operands are one tensor, is one te.ComputeOp.
        key = (op, tuple(sources.index(tensor) for tensor in sources))
        if key not in self._shared:
            expression = with_wide_sum(narrowed(op, inlined))
            bodies = expression.bodies
            if reduce_node(bodies[0]) is None:
                bodies = [with_wide_rounding(body) for body in bodies]
            if "MaxPool" in origin.operators and reduce_node(bodies[0]) is None:
                # What lies beyond the edge is less than every number, and not the least of them.
                bodies = [tvm_ffi.structural_map(body, (tirx.FloatImm, infinite)) for body in bodies]
            reads = zip(op.input_tensors, sources, strict=True)
            first = make_te(name, expression.axes, bodies, list(reads), origin)
            self._shared[key] = first, tuple(sources.index(tensor) for tensor in first.inputs)
        first, order = self._shared[key]
        single = len(first.outputs) == 1
        outputs = tuple(
            self.tensor(f"{name}_{k}", t.shape, t.dtype) if not single else Tensor(name, t.shape, t.dtype)
            for k, t in enumerate(first.outputs)
        )
        return replace(first, name=name, inputs=tuple(sources[i] for i in order), outputs=outputs, origin=origin)

    def _converted(self, tensor: Tensor, dtype: str, name: str, origin: Origin) -> TE:
        """A TE that converts a tensor; those of one shape share their expression."""
        key = (tensor.shape, tensor.dtype, dtype)
        if key not in self._shared:
            axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(tensor.shape)]
            source = te.placeholder(tensor.shape, tensor.dtype, name="p0")
            body = tirx.Cast(dtype, source(*(axis.var for axis in axes)))
            self._shared[key] = make_te(name, axes, [body], [(source, tensor)], origin), (0,)
        first, _ = self._shared[key]
        output = Tensor(name, tensor.shape, dtype)
        return replace(first, name=name, inputs=(tensor,), outputs=(output,), origin=origin)


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that a value of a graph is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)
    elif is_dataclass(value):
        yield from _tensors_in([getattr(value, part.name) for part in fields(value)])


def check_element_types(types: Iterable[str]) -> None:
    """Refuse a node that has to do with elements of a type that programs cannot hold.

    Raises
    ------
    Obstacle
    """
    unknown = sorted(set(types) - ELEMENT_TYPES)
    if unknown:
        raise Obstacle(
            f"it reads or makes elements of type {', '.join(unknown)}, which networks here cannot hold",
            f"they hold {', '.join(sorted(ELEMENT_TYPES))}",
            refusal=Refusal.TYPE,
        )


def _check_sizes(template: Template) -> None:
    """Refuse what reads or makes a tensor without elements; one that nothing reads, such as a roi, may be there."""
    for step in template.steps:
        graph = compute_graph(step.tensors) if step.tensors else None
        if graph is None:
            types = [template.types[slot] for slot in (*step.inputs, *step.outputs)]
        else:
            tensors = [tensor for op in graph for tensor in (*op.input_tensors, op.output(0))]
            types = [(tuple(const_int(extent) for extent in t.shape), str(t.dtype)) for t in tensors]
        for shape, dtype in types:
            if 0 in shape:
                raise Obstacle(
                    f"it makes elements from a tensor {dtype}{list(shape)}, which has none, or makes such a tensor "
                    "beside others",
                    "leave the empty tensor out of the model",
                    refusal=Refusal.EMPTY,
                )


def _types_of(template: Template) -> set[str]:
    types = {dtype for _, dtype in template.types}
    operations = (op for step in template.steps for op in compute_graph(step.tensors) or ())
    return types | {str(op.output(k).dtype) for op in operations for k in range(op.num_outputs)}


def _check_self_contained(step: Step, origin: Origin) -> None:
    called: list[str] = []

    def collect(call: Call) -> None:
        name = str(getattr(call.op, "name", ""))
        if "packed" in name or "extern" in name:
            called.append(name)

    tvm_ffi.structural_walk(step.func.body, (Call, collect))
    if called:
        raise Obstacle(
            f"TVM has {origin.operators[0]} as a call of a library and not as a tensor expression",
            "export the model with this part written in simpler operators, or end the network before it",
            refusal=Refusal.OPERATOR,
        )


def compute_graph(tensors: Sequence[te.Tensor]) -> list[te.ComputeOp] | None:
    """The compute operations that `tensors` need, producers first; ``None`` where one of them is no TE."""
    order: list[te.ComputeOp] = []
    seen: set = set()
    stack = [(tensor.op, False) for tensor in reversed(tensors)]
    while stack:
        op, ready = stack.pop()
        if isinstance(op, (te.PlaceholderOp, TEPlaceholderOp)):
            continue
        if not isinstance(op, te.ComputeOp):
            return None
        if ready:
            order.append(op)
            continue
        if op in seen:
            continue
        seen.add(op)
        stack.append((op, True))
        stack.extend((source.op, False) for source in reversed(list(op.input_tensors)))
    return order


def _copied_tensor(op: te.ComputeOp, known: dict[tuple, Tensor]) -> Tensor | None:
    """The tensor that `op` copies element by element, if that is all it does."""
    body = op.body[0]
    if len(op.body) != 1 or reduce_node(body) is not None or not is_load(body):
        return None
    source = load_tensor(body)
    tensor = known[source.op, source.value_index]
    if tensor.shape != tuple(const_int(axis.dom.extent) for axis in op.axis):
        return None
    indices = load_indices(body)
    if len(indices) != len(op.axis):
        return None
    for axis, index in zip(op.axis, indices, strict=True):
        same = isinstance(index, tirx.Var) and index.same_as(axis.var)
        only = const_int(axis.dom.extent) == 1 and isinstance(index, tirx.IntImm) and int(index.value) == 0
        if not same and not only:
            return None
    return tensor
