"""What a TE program computes: its TEs run on the CPU, one after another. The reference the compiler is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np
import tvm
from tvm import s_tir, tirx

from souffle.errors import InputError
from souffle.program.te import TE, ExternTE, Tensor
from souffle.tvm_compat import primfunc_from_tensors, structural_digest

if TYPE_CHECKING:
    from souffle.program.te_program import TEProgram

__all__ = ["checked_inputs", "evaluate", "run_tes"]


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
        By output name.

    Raises
    ------
    InputError
        Naming the input, and the shape and type that it should have.
    """
    values: dict[Tensor, np.ndarray] = dict(zip(program.inputs, checked_inputs(program, inputs), strict=True))
    values.update(program.constants)
    results = run_tes(program.tes, values, set(program.outputs))
    return {name: results[tensor] for name, tensor in zip(program.output_names, program.outputs, strict=True)}


def run_tes(
    tes: Sequence[TE | ExternTE], values: Mapping[Tensor, np.ndarray], wanted: Set[Tensor]
) -> dict[Tensor, np.ndarray]:
    """The `wanted` ones of the tensors that `tes`, in order of execution, define.

    TEs of equal structure are compiled once, and all of them by one call of the compiler.

    Parameters
    ----------
    tes : sequence of TE or ExternTE
    values : mapping of Tensor to array
        What `tes` read and do not define.
    wanted : set of Tensor
    """
    functions: dict[str, tirx.PrimFunc] = {}
    symbols = []
    for te_ in tes:
        func = _function(te_)
        symbol = f"te_{structural_digest(func)}"
        functions.setdefault(symbol, func)
        symbols.append(symbol)
    if not functions:
        return {}
    module = tvm.IRModule(
        {symbol: _scheduled(func).with_attr("global_symbol", symbol) for symbol, func in functions.items()}
    )
    executable = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "opt-level": 2}))
    last_use = {tensor: position for position, te_ in enumerate(tes) for tensor in te_.inputs}
    arrays: dict[Tensor, tvm.runtime.Tensor] = {}
    results: dict[Tensor, np.ndarray] = {}
    for position, (symbol, te_) in enumerate(zip(symbols, tes, strict=True)):
        for tensor in te_.inputs:
            if tensor not in arrays:
                arrays[tensor] = _to_tvm(values[tensor], tensor)
        outputs = [tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.cpu()) for tensor in te_.outputs]
        executable[symbol](*(arrays[tensor] for tensor in te_.inputs), *outputs)
        for tensor, array in zip(te_.outputs, outputs, strict=True):
            arrays[tensor] = array
            if tensor in wanted:
                results[tensor] = array.numpy()
        for tensor in {*te_.inputs, *te_.outputs}:
            if last_use.get(tensor, position) <= position:
                del arrays[tensor]
    return results


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
        expected = f"{tensor.dtype} of shape {list(tensor.shape)}"
        if name not in inputs:
            raise InputError(f"input {name!r} is missing; it is {expected}")
        array = np.asarray(inputs[name])
        if array.shape != tensor.shape or str(array.dtype) != tensor.dtype:
            raise InputError(f"input {name!r} is {array.dtype} of shape {list(array.shape)}, expected {expected}")
        arrays.append(array)
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
