"""What a TE program computes: its TEs run on the CPU, one after another. The reference the compiler is held to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import prod
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx

from souffle.counted_axes import cut
from souffle.errors import InputError
from souffle.program.llvm_pipeline import compile_llvm, with_exact_arithmetic
from souffle.program.loop import Loop
from souffle.program.te import TE, ExternTE, Tensor
from souffle.tvm_compat import primfunc_from_tensors

if TYPE_CHECKING:
    from souffle.program.te_program import Item, TEProgram

__all__ = ["checked_inputs", "evaluate", "run_tes"]

_WORTH_OPTIMIZING = 1 << 20
"""Evaluations of a function, about, beyond which LLVM's optimizations save more time than they take."""
_MOST_FUNCTIONS = 2048
_Code = Callable[..., object]
_CODE: OrderedDict[tuple[tvm_ffi.StructuralKey, int], _Code] = OrderedDict()
"""Of functions that were compiled before, at a level of LLVM's; the least recently used are forgotten."""
_USED = Lock()
"""Around each use of it: to compare keys runs Python, where threads take turns, and an `OrderedDict` that another one
changes meanwhile can lose track of its order for good."""


def evaluate(program: TEProgram, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Run a program on the CPU.

    Parameters
    ----------
    program : TEProgram
    inputs : mapping of str to array, or sequence of arrays
        By the model's own input names, or in their order. Types must match exactly.

    Returns
    -------
    dict of str to array
        By output name, as long as their counts say.

    Raises
    ------
    InputError
        Naming the input, and the shape and type that it should have.
    """
    values: dict[Tensor, np.ndarray] = dict(zip(program.inputs, checked_inputs(program, inputs), strict=True))
    values.update(program.constants)
    results = run_tes(program.expanded().tes, values, set(program.outputs))
    results.update({t: np.zeros(t.shape, dtype=t.dtype) for t in program.outputs if not t.size})
    named = {name: results[tensor] for name, tensor in zip(program.output_names, program.outputs, strict=True)}
    typed = {name: array.view(program.small_types.get(name, array.dtype)) for name, array in named.items()}
    return cut(typed, program.counts)


def run_tes(tes: Sequence[Item], values: Mapping[Tensor, np.ndarray], wanted: Set[Tensor]) -> dict[Tensor, np.ndarray]:
    """The `wanted` ones of the tensors that `tes`, in order of execution, define.

    TEs of equal structure are compiled once, and all of them by one call of the compiler.

    Parameters
    ----------
    tes : sequence of TE, ExternTE or Loop
    values : mapping of Tensor to array
        What `tes` read and do not define.
    wanted : set of Tensor
    """
    compiled = _compiled(tes)
    arrays: dict[Tensor, tvm.runtime.Tensor] = {}
    results: dict[Tensor, np.ndarray] = {}
    last_use = {tensor: position for position, te_ in enumerate(tes) for tensor in te_.inputs}
    for position, te_ in enumerate(tes):
        for tensor in te_.inputs:
            if tensor not in arrays:
                arrays[tensor] = _to_tvm(values[tensor], tensor)
        if isinstance(te_, Loop):
            arrays.update(_run_loop(te_, {t: arrays[t].numpy() for t in te_.inputs}, compiled))
        else:
            compiled.run(te_, arrays)
        for tensor in te_.outputs:
            if tensor in wanted:
                results[tensor] = arrays[tensor].numpy()
        for tensor in {*te_.inputs, *te_.outputs}:
            if last_use.get(tensor, position) <= position:
                del arrays[tensor]
    return results


class _Compiled:
    """The functions of some TEs; those of equal structure are one."""

    def __init__(self, functions: Mapping[TE | ExternTE, _Code]) -> None:
        self._functions = functions

    def run(self, te_: TE | ExternTE, arrays: dict[Tensor, tvm.runtime.Tensor]) -> None:
        """Add what `te_` defines to `arrays`."""
        outputs = [tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.cpu()) for tensor in te_.outputs]
        self._functions[te_](*(arrays[tensor] for tensor in te_.inputs), *outputs)
        arrays.update(zip(te_.outputs, outputs, strict=True))


def _compiled(tes: Sequence[Item]) -> _Compiled:
    wanted: dict[TE | ExternTE, tvm_ffi.StructuralKey] = {}
    known: dict[object, tvm_ffi.StructuralKey] = {}
    pending = list(tes)
    while pending:
        te_ = pending.pop()
        if isinstance(te_, Loop):
            pending.extend(te_.body)
            continue
        key = te_.op if isinstance(te_, TE) else te_.func
        if key not in known:
            known[key] = tvm_ffi.StructuralKey(_function(te_))
        wanted[te_] = known[key]
    functions = dict.fromkeys(wanted.values())
    level = 2 if _evaluations(tes) > _WORTH_OPTIMIZING * len(functions) else 0
    code = _code_of(functions, level)
    return _Compiled({te_: code[key] for te_, key in wanted.items()})


def _code_of(functions: Iterable[tvm_ffi.StructuralKey], level: int) -> dict[tvm_ffi.StructuralKey, _Code]:
    """The machine code of functions; what is not there from before is compiled by one call."""
    code: dict[tvm_ffi.StructuralKey, _Code] = {}
    new: dict[str, tvm_ffi.StructuralKey] = {}
    with _USED:
        for key in functions:
            if (key, level) in _CODE:
                _CODE.move_to_end((key, level))
                code[key] = _CODE[key, level]
            else:
                new[f"te_{len(new)}"] = key
    if new:
        scheduled = {symbol: with_exact_arithmetic(_scheduled(key.key)) for symbol, key in new.items()}
        named = {symbol: func.with_attr("global_symbol", symbol) for symbol, func in scheduled.items()}
        executable = compile_llvm(named, tvm.target.Target({"kind": "llvm", "opt-level": level}))
        code |= {key: executable[symbol] for symbol, key in new.items()}
        with _USED:
            _CODE.update(((key, level), code[key]) for key in new.values())
            while len(_CODE) > _MOST_FUNCTIONS:
                _CODE.popitem(last=False)
    return code


def _evaluations(tes: Sequence[Item]) -> int:
    """Of elements and of terms of their sums."""
    total = 0
    for te_ in tes:
        if isinstance(te_, Loop):
            total += te_.steps * _evaluations(te_.body)
        else:
            terms = prod(te_.reduction_shape) if isinstance(te_, TE) else 1
            total += terms * sum(tensor.size for tensor in te_.outputs)
    return total


def _run_loop(loop: Loop, outer: Mapping[Tensor, np.ndarray], compiled: _Compiled) -> dict[Tensor, tvm.runtime.Tensor]:
    """What a loop defines."""
    kept = {c.value for c in (*loop.carried, *loop.collected)}
    past: list[dict[Tensor, np.ndarray]] = []
    invariant = {tensor: _to_tvm(outer[tensor], tensor) for tensor in loop.invariants}
    for step in range(loop.steps):
        parameters = loop.parameters(step, outer, past)
        arrays = invariant | {tensor: _to_tvm(array, tensor) for tensor, array in parameters.items()}
        for te_ in loop.body:
            compiled.run(te_, arrays)
        past.append({tensor: arrays[tensor].numpy() for tensor in kept})
    return {
        c.tensor: _to_tvm(np.stack([p[c.value] for p in past]) if c.every else past[-1][c.value], c.tensor)
        for c in loop.collected
    }


def checked_inputs(program: TEProgram, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
    """`inputs` in the program's order, each of the right shape and type.

    Raises
    ------
    InputError
        Naming the input, and the shape and type that it should have.
    """
    wanted = dict(zip(program.input_names, program.inputs, strict=True))
    if not isinstance(inputs, Mapping):
        if len(inputs) != len(wanted):
            raise InputError(f"{len(inputs)} inputs were given, the network takes {len(wanted)}: {', '.join(wanted)}")
        inputs = dict(zip(wanted, inputs, strict=True))
    for name in inputs:
        if name not in wanted:
            raise InputError(f"the network has no input {name!r}; it takes {', '.join(map(repr, wanted)) or 'none'}")
    arrays = []
    for name, tensor in wanted.items():
        dtype = program.small_types.get(name, tensor.dtype)
        expected = f"{dtype} of shape {list(tensor.shape)}"
        if name not in inputs:
            raise InputError(f"input {name!r} is missing; it is {expected}")
        array = np.asarray(inputs[name])
        if array.shape != tensor.shape or str(array.dtype) != dtype:
            raise InputError(f"input {name!r} is {array.dtype} of shape {list(array.shape)}, expected {expected}")
        arrays.append(array.view(tensor.dtype) if dtype != tensor.dtype else array)
    return arrays


def _to_tvm(array: np.ndarray, tensor: Tensor) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.ascontiguousarray(array).reshape(tensor.shape))


def _function(te_: TE | ExternTE) -> tirx.PrimFunc:
    if isinstance(te_, ExternTE):
        return te_.func.with_attr("global_symbol", "main")
    outputs = [te_.op.output(k) for k in range(te_.op.num_outputs)]
    return primfunc_from_tensors([*te_.placeholders, *outputs], "main")


def _scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with the last data-parallel loop of a reduction innermost, so that reads of rows stay reads of rows."""
    schedule = s_tir.Schedule(func)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    if len(blocks) == 1:
        kinds = [axis.iter_type for axis in schedule.get(blocks[0]).iter_vars]
        loops = schedule.get_loops(blocks[0])
        reductions = [loop for loop, kind in zip(loops, kinds, strict=False) if kind == 2]
        parallel = [loop for loop, kind in zip(loops, kinds, strict=False) if kind == 0]
        if len(kinds) == len(loops) and reductions and len(parallel) > 1:
            schedule.reorder(*parallel[:-1], *reductions, parallel[-1])
    return schedule.mod["main"]
