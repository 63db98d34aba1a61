"""Which operators TVM's own fusion would put into one kernel: the groups of level V0 (paper, Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import relax

from souffle.frontend.emit import OperatorCall
from souffle.program import TE, ExternTE, Tensor

__all__ = ["fusion_groups", "with_groups"]


def fusion_groups(calls: Sequence[OperatorCall], outputs: Sequence[Tensor]) -> list[int]:
    """The fusion group of each call, as the index of the group's first call.

    The program is written as a Relax function that calls one TensorIR function per operator, and TVM's ``FuseOps`` is
    run on it. Every operator has a function name of its own, so that the fused functions tell what is in them.

    Parameters
    ----------
    calls : sequence of OperatorCall
        In order of execution.
    outputs : sequence of Tensor
        The program's outputs.
    """
    builder = relax.BlockBuilder()
    variables: dict[Tensor, relax.Var] = {}
    defined = {tensor for call in calls for tensor in call.outputs}
    params = []
    for tensor in dict.fromkeys([t for call in calls for t in call.inputs] + list(outputs)):
        if tensor not in defined:
            variables[tensor] = relax.Var(tensor.name, relax.TensorType(tensor.shape, tensor.dtype))
            params.append(variables[tensor])
    annotated: dict[tvm.tirx.PrimFunc, tvm.tirx.PrimFunc] = {}
    symbols: dict[str, int] = {}
    with builder.function("main", params):
        with builder.dataflow():
            for position, call in enumerate(calls):
                if call.func not in annotated:
                    annotated[call.func] = _with_pattern(call.func)
                symbol = f"op{position}"
                # The builder would merge equal functions; a distinct global_symbol keeps them apart.
                func = annotated[call.func].with_attr("global_symbol", symbol)
                variable = builder.add_func(func, symbol)
                symbols[variable.name_hint] = position
                types = [relax.TensorType(tensor.shape, tensor.dtype) for tensor in call.outputs]
                result = builder.emit(
                    relax.call_tir(
                        variable,
                        relax.Tuple([variables[t] for t in call.inputs]),
                        types[0] if len(types) == 1 else types,
                    )
                )
                if len(types) == 1:
                    variables[call.outputs[0]] = result
                else:
                    for k, tensor in enumerate(call.outputs):
                        variables[tensor] = builder.emit(relax.TupleGetItem(result, k))
            result = builder.emit_output(relax.Tuple([variables[t] for t in outputs]))
        builder.emit_func_output(result)
    module = relax.transform.FuseOps(fuse_opt_level=2)(builder.get())
    group = list(range(len(calls)))
    for function in module.functions.values():
        if isinstance(function, relax.Function) and function.attrs and "Primitive" in function.attrs:
            members = sorted(_called(function, symbols))
            for member in members:
                group[member] = members[0]
    return group


def with_groups(calls: Sequence[OperatorCall], groups: Sequence[int]) -> list[TE | ExternTE]:
    """The TEs of `calls`, labelled with their fusion groups."""
    label = [call.tes[0].name for call in calls]
    return [
        replace(te_, origin=replace(te_.origin, group=label[group]))
        for call, group in zip(calls, groups, strict=True)
        for te_ in call.tes
    ]


def _with_pattern(func: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    module = relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"op": func.with_attr("global_symbol", "op")}))
    return module["op"]


def _called(function: relax.Function, symbols: dict[str, int]) -> set[int]:
    found = set()
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if getattr(getattr(value, "op", None), "name", "") == "relax.call_tir":
                found.add(symbols[value.args[0].name_hint])
    return found
