"""``import_onnx``: an ONNX model as one program of tensor expressions (paper §4)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from tvm import te

from souffle.alone import one_at_a_time
from souffle.counted_axes import Counts
from souffle.errors import Refusal, UnsupportedOperatorError
from souffle.frontend import (  # noqa: F401  (these enter the operators that they define)
    contrib,
    contrib_attention,
    control,
    conversions,
    counted_elements,
    counted_movers,
    counted_sums,
    custom_convolution,
    custom_determinant,
    custom_elementwise,
    custom_fourier,
    custom_indexing,
    custom_ngrams,
    custom_order,
    custom_resize,
    custom_selection,
    custom_suppression,
    custom_trees,
    custom_windows,
    dequantized,
    empty,
    integer_products,
    ml_operators,
    pooling,
    quantization,
    quantized,
    random_operators,
    recurrent,
    reduction_operators,
    rewrites,
    stacks,
    structural,
    training,
)
from souffle.frontend.emit import Emitter, OperatorCall
from souffle.frontend.groups import fusion_groups, with_groups
from souffle.frontend.interpreter import Interpreter
from souffle.frontend.load import LoadedModel, load_model
from souffle.frontend.model_options import ModelOptions
from souffle.frontend.refusal import Obstacle, is_text, position_name, refuse, value_type
from souffle.frontend.small_types import CODES, is_small, standing_for
from souffle.frontend.through_counts import room_of
from souffle.frontend.values import Counted, Known, Scope, Value
from souffle.program import Origin, Tensor, TEProgram, make_te
from souffle.tvm_compat import fresh_axis, primfunc_from_tensors

__all__ = ["import_loaded", "import_named", "import_onnx"]


def import_onnx(
    model: str | os.PathLike | bytes | onnx.ModelProto,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
    integers: bool = True,
) -> TEProgram:
    """Read an ONNX model as a TE program.

    Parameters
    ----------
    model : path, bytes or ModelProto
        A path may have external data beside it. A ModelProto is not changed.
    batch : int, optional
        The value of a symbolic first dimension of the inputs. Where no dimension is open, it must be the first
        dimension that the inputs have.
    dims : mapping of str to int, optional
        The values of the open dimensions by name: a symbolic dimension's own, or ``"input:axis"`` for one without. What
        a model declares as sums, differences, products or floor divisions of them, such as ``past + seq``, follows.
    constants : mapping of str to array, optional
        Values of inputs that are known now, such as axes and shapes: they are constants of the program, which has no
        such inputs. An array has the input's type; numbers and lists of them are taken in it. Open dimensions of such
        an input are what its value has.
    integers : bool
        Whether products of what was quantized are computed on the integers (:mod:`souffle.frontend.dequantized`).

    Returns
    -------
    TEProgram
        Input and output names are the model's own. The origin of each TE names its ONNX node, and the group that
        TVM's operator fusion puts it in. Weights are the model's own arrays.

    Raises
    ------
    ModelError
        If the model is missing, no ONNX, invalid, or leaves a dimension open.
    UnsupportedOperatorError
        If it holds an operator, or a form of one, that cannot be expressed; names the node and its shapes.
    OptionError
        If `batch` cannot be what the model computes on, `dims` names no open dimension or one that `batch` fixes, or
        the model has no input that takes a value of `constants`.
    """
    return import_loaded(load_model(model, ModelOptions(batch, dims, constants, integers)))


def import_loaded(loaded: LoadedModel) -> TEProgram:
    """The program of a model that was read; see :func:`import_onnx`.

    Raises
    ------
    UnsupportedOperatorError
    """
    return import_named(loaded)[0]


@one_at_a_time
def import_named(loaded: LoadedModel) -> tuple[TEProgram, dict[str, Tensor]]:
    """The program of a model that was read, and which of its tensors the values of the graph are, by their names.

    Values that became constants, that no TE computes as one tensor, or whose extent data decides are left out, as are
    those of inner graphs.

    Raises
    ------
    UnsupportedOperatorError
    """
    emitter = Emitter()
    small = {name: dtype for name, _, dtype in loaded.inputs if is_small(dtype)}
    inputs = tuple(
        emitter.tensor(name, shape, CODES if is_small(dtype) else dtype) for name, shape, dtype in loaded.inputs
    )
    values: dict[str, Value] = {name: Known(array, name) for name, array in loaded.initializers.items()}
    for (name, shape, dtype), tensor in zip(loaded.inputs, inputs, strict=True):
        # An input without elements is known.
        given = tensor if tensor.size else Known(np.zeros(shape, dtype=dtype), name)
        values[name] = standing_for(given, dtype) if tensor.size and is_small(dtype) else given
    interpreter = Interpreter(emitter, loaded.functions, loaded.integers)
    scope = Scope(values, loaded.opsets)
    emitter.inputs.update(zip(inputs, (name for name, _, _ in loaded.inputs), strict=True))
    interpreter.run(loaded.nodes, scope)
    results = [_output_tensor(interpreter, scope, name, loaded) for name in loaded.outputs]
    kinds = ((name, room_of(scope.lookup(name)).dtype) for name in loaded.outputs)
    small |= {name: dtype for name, dtype in kinds if is_small(dtype)}
    counts, hidden = _counted(scope, loaded.outputs)
    names = (*loaded.outputs, *hidden)
    results += hidden.values()
    emitter.fold_constants(set(results))
    outputs: list[Tensor] = []
    for name, tensor in zip(names, results, strict=True):
        outputs.append(_defined_output(emitter, interpreter, tensor, name, outputs))
    program = _assemble(loaded, emitter, inputs, dict(zip(names, outputs, strict=True)), small, counts)
    named = {name: value for name, value in scope.values.items() if isinstance(value, Tensor)}
    named |= {name: tensor for name, tensor in zip(loaded.outputs, outputs, strict=False) if name not in counts}
    return program, {name: tensor for name, tensor in named.items() if tensor in program.producers}


def _counted(scope: Scope, names: Sequence[str]) -> tuple[Counts, dict[str, Tensor]]:
    """The counted axes of outputs, and the outputs more that say how long they are, by names that no output has."""
    counts: dict[str, tuple[tuple[int, str], ...]] = {}
    hidden: dict[Tensor, str] = {}
    for name in names:
        value = scope.lookup(name)
        if not isinstance(value, Counted):
            continue
        for axis, count in value.counts.items():
            label = f"{name}#{axis}"
            while label in names or label in hidden.values():
                label += "#"
            hidden.setdefault(count.tensor, label)
        counts[name] = tuple((axis, hidden[count.tensor]) for axis, count in sorted(value.counts.items()))
    return counts, {name: tensor for tensor, name in hidden.items()}


def _output_tensor(interpreter: Interpreter, scope: Scope, name: str, loaded: LoadedModel) -> Tensor:
    value = scope.lookup(name)
    if value is None or isinstance(value, list) or is_text(value):
        remedy = "let the model return tensors of numbers: every output of a network is one"
        refusal = Refusal.TEXT if is_text(value) else Refusal.SEQUENCE
        for position, node in enumerate(loaded.nodes):
            if name in node.output:
                named = onnx.NodeProto()
                named.CopyFrom(node)
                named.name = position_name(node, position)
                given = [scope.lookup(source) if source else None for source in node.input]
                words = f"it makes output {name!r} of the network, which is {value_type(value)}"
                refuse(named, given, loaded.opsets, Obstacle(words, remedy, refusal=refusal))
        raise UnsupportedOperatorError(f"output {name!r} is {value_type(value)}; {remedy}", refusal=refusal)
    return interpreter.tensor_of(room_of(value))


def _defined_output(
    emitter: Emitter, interpreter: Interpreter, tensor: Tensor, name: str, earlier: list[Tensor]
) -> Tensor:
    """The tensor of an output; a copy where it is not the result of a TE of its own and has any elements."""
    if not tensor.size:
        return emitter.tensor(name, tensor.shape, tensor.dtype)
    # One of several outputs of an operator may have become a constant.
    defined = any(tensor in te_.outputs for call in emitter.calls for te_ in call.tes)
    if defined and tensor not in earlier:
        return tensor
    axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(tensor.shape)]
    source = te.placeholder(tensor.shape, tensor.dtype, name="p0")
    body = source[tuple(axis.var for axis in axes)] if axes else source()
    node = interpreter.node_names.fresh(f"{name}_copy")
    label = emitter.tensor(node, tensor.shape, tensor.dtype).name
    copy = make_te(label, axes, [body], [(source, tensor)], Origin((node,), ("Identity",), node))
    func = primfunc_from_tensors([copy.placeholders[0], copy.op.output(0)], "copy")
    emitter.calls.append(OperatorCall(func, (tensor,), copy.outputs, (copy,)))
    return copy.output


def _assemble(
    loaded: LoadedModel,
    emitter: Emitter,
    inputs: tuple[Tensor, ...],
    outputs: Mapping[str, Tensor],
    small: Mapping[str, str],
    counts: Counts,
) -> TEProgram:
    live = _live_calls(emitter.calls, list(outputs.values()))
    tes = with_groups(live, fusion_groups(live, list(outputs.values())))
    program = TEProgram(
        inputs=inputs,
        outputs=tuple(outputs.values()),
        tes=(),
        constants=emitter.constants,
        input_names=tuple(name for name, _, _ in loaded.inputs),
        output_names=tuple(outputs),
        name=loaded.name,
        small_types=small,
        counts=counts,
    )
    return program.with_tes(tes)


def _live_calls(calls: list[OperatorCall], outputs: list[Tensor]) -> list[OperatorCall]:
    needed = set(outputs)
    live = []
    for call in reversed(calls):
        if any(tensor in needed for tensor in call.outputs):
            needed.update(call.inputs)
            live.append(call)
    return live[::-1]
