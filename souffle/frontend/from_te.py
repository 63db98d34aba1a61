"""``from_te``: a graph of plain ``te.placeholder`` and ``te.compute`` as one TE program (paper §3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm import te

from souffle.alone import one_at_a_time
from souffle.frontend.naming import identifier
from souffle.program import Origin, ProgramError, Tensor, TEProgram, make_te
from souffle.program.names import NameSupply
from souffle.program.te import with_fresh_axes
from souffle.tvm_compat import const_int

__all__ = ["from_te"]

_OPERATOR = "te.compute"

_Key = tuple[te.tensor.Operation, int]
"""An output of an operation; two ``te.Tensor`` objects may stand for one."""


@one_at_a_time
def from_te(
    inputs: Sequence[te.Tensor] | Mapping[str, te.Tensor],
    outputs: Sequence[te.Tensor] | Mapping[str, te.Tensor],
    constants: Mapping[te.Tensor, np.ndarray] | None = None,
    *,
    name: str = "main",
) -> TEProgram:
    """Make a program of tensor expressions written with TVM's ``te``.

    Each ``te.compute`` that the outputs need becomes one TE, named as it was there, with a number behind where a name
    is taken. Reductions of tuples (``te.comm_reducer``) become one TE with several outputs.

    Parameters
    ----------
    inputs : sequence of te.Tensor, or mapping of str to te.Tensor
        Made by ``te.placeholder``, of constant shape. A mapping gives the names under which :meth:`TEProgram.run` and
        compiled networks take them; without, these are the placeholders' own.
    outputs : sequence of te.Tensor, or mapping of str to te.Tensor
        Made by ``te.compute``; named likewise.
    constants : mapping of te.Tensor to array, optional
        The values of the placeholders that are weights; each has the shape and type of its placeholder.
    name : str, optional
        The program's.

    Returns
    -------
    TEProgram

    Raises
    ------
    ProgramError
        If a tensor is read that is neither computed, nor an input, nor a constant; if a shape is not constant; if an
        array does not fit its placeholder; if an input is computed or an output is not. The message names the tensor.
    """
    given, wanted = _named(inputs), _named(outputs)
    if not wanted:
        raise ProgramError(f"program {name!r} has no outputs; name at least one te.compute")
    names = NameSupply()
    known: dict[_Key, Tensor] = {}
    for label, source in given:
        _enter(known, names, source, label, "input")
    weights = {}
    for source, array in (constants or {}).items():
        tensor = _enter(known, names, source, source.op.name, "constant")
        weights[tensor] = _fitting(array, tensor)
    tes = []
    for op in _in_order([tensor for _, tensor in wanted]):
        label = names.fresh(identifier(op.name))
        reads = [(tensor, _tensor_of(known, tensor, op)) for tensor in op.input_tensors]
        axes, bodies = with_fresh_axes(tuple(op.axis), list(op.body))
        for tensor in (op.output(k) for k in range(op.num_outputs)):
            _shape(tensor, tensor.op.name)
        made = make_te(label, axes, bodies, reads, Origin((label,), (_OPERATOR,), label))
        tes.append(made)
        known.update({(op, k): tensor for k, tensor in enumerate(made.outputs)})
    results = []
    for label, tensor in wanted:
        if not isinstance(tensor.op, te.ComputeOp):
            raise ProgramError(f"output {label!r} is not made by te.compute; copy it with one to return it as it is")
        results.append(known[_key(tensor)])
        if results.count(results[-1]) > 1:
            raise ProgramError(f"output {label!r} is {results[-1]}, which is an output already")
    program = TEProgram(
        tuple(known[_key(tensor)] for _, tensor in given),
        tuple(results),
        (),
        weights,
        _unique("input", [label for label, _ in given]),
        _unique("output", [label for label, _ in wanted]),
        name,
    )
    return program.with_tes(tes)


def _named(tensors: Sequence[te.Tensor] | Mapping[str, te.Tensor]) -> list[tuple[str, te.Tensor]]:
    if isinstance(tensors, te.Tensor):
        tensors = [tensors]
    pairs = list(tensors.items()) if isinstance(tensors, Mapping) else [(None, tensor) for tensor in tensors]
    for label, tensor in pairs:
        if not isinstance(tensor, te.Tensor):
            raise ProgramError(f"{label or tensor!r} is a {type(tensor).__name__}, and not a te.Tensor")
    return [(label or _own_name(tensor), tensor) for label, tensor in pairs]


def _own_name(tensor: te.Tensor) -> str:
    return f"{tensor.op.name}_{tensor.value_index}" if tensor.op.num_outputs > 1 else tensor.op.name


def _unique(kind: str, labels: Sequence[str]) -> tuple[str, ...]:
    for label in labels:
        if labels.count(label) > 1:
            raise ProgramError(f"two {kind}s are named {label!r}; give te tensors names, or {kind}s as a mapping")
    return tuple(labels)


def _key(tensor: te.Tensor) -> _Key:
    return tensor.op, tensor.value_index


def _shape(tensor: te.Tensor, label: str) -> tuple[int, ...]:
    try:
        return tuple(const_int(extent) for extent in tensor.shape)
    except TypeError:
        raise ProgramError(f"{label!r} has shape {list(tensor.shape)}; every extent must be a constant") from None


def _enter(known: dict[_Key, Tensor], names: NameSupply, source: te.Tensor, label: str, kind: str) -> Tensor:
    """The tensor that a placeholder stands for."""
    if not isinstance(source.op, te.PlaceholderOp):
        raise ProgramError(f"{kind} {label!r} is computed; make it with te.placeholder")
    if _key(source) in known:
        raise ProgramError(f"{kind} {label!r} is {known[_key(source)]}, which was given already")
    tensor = Tensor(names.fresh(identifier(label)), _shape(source, label), str(source.dtype))
    known[_key(source)] = tensor
    return tensor


def _fitting(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    array = np.asarray(array)
    if array.shape != tensor.shape or str(array.dtype) != tensor.dtype:
        found, expected = (f"{x.dtype} of shape {list(x.shape)}" for x in (array, tensor))
        raise ProgramError(f"constant {tensor.name!r} is {found}, expected {expected}")
    return array


def _tensor_of(known: Mapping[_Key, Tensor], tensor: te.Tensor, reader: te.ComputeOp) -> Tensor:
    if _key(tensor) not in known:
        shape = list(tensor.shape)
        raise ProgramError(
            f"TE {reader.name} reads {tensor.op.name!r} of shape {shape}, which is neither an input nor a constant"
        )
    return known[_key(tensor)]


def _in_order(results: Sequence[te.Tensor]) -> list[te.ComputeOp]:
    """The operations that `results` need, each after those that it reads, and after the longer of two chains first.

    So the steps of a recurrence come one after another, each with what it alone reads.
    """
    heights: dict[te.tensor.Operation, int] = {}
    for op in _depth_first(results, lambda op: list(op.input_tensors)):
        heights[op] = 1 + max((heights.get(tensor.op, 0) for tensor in op.input_tensors), default=0)
    return _depth_first(results, lambda op: sorted(op.input_tensors, key=lambda tensor: -heights.get(tensor.op, 0)))


def _depth_first(results: Sequence[te.Tensor], reads: Callable[[te.ComputeOp], list[te.Tensor]]) -> list[te.ComputeOp]:
    order: dict[te.tensor.Operation, None] = {}
    stack = [(tensor.op, False) for tensor in reversed(results)]
    while stack:
        op, ready = stack.pop()
        if op in order or isinstance(op, te.PlaceholderOp):
            continue
        if not isinstance(op, te.ComputeOp):
            raise ProgramError(f"{op.name!r} is a {type(op).__name__}; only te.compute makes tensor expressions")
        if ready:
            order[op] = None
            continue
        stack.append((op, True))
        stack.extend((tensor.op, False) for tensor in reversed(reads(op)))
    return list(order)
