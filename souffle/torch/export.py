"""From a module of PyTorch to ONNX: PyTorch's exporter, and the weights beside the model as arrays."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnxscript import ir

from souffle.errors import ModelError, Refusal

__all__ = ["Exported", "draws_random_numbers", "export", "fresh"]

_LIFTED_BYTES = 1 << 10
"""Of a weight, from which on it is kept as an array: models of more than 2 GB cannot be written as one message."""


@dataclass(frozen=True)
class Exported:
    """A module as ONNX.

    Attributes
    ----------
    model : onnx.ModelProto
        Inputs and outputs have the names that were asked for, in order; behind them, inputs for large weights.
    weights : dict of str to array
        The values of those inputs, for ``compile(constants=...)``.
    """

    model: onnx.ModelProto
    weights: dict[str, np.ndarray]


def export(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[str],
    outputs: Callable[[], Sequence[str]],
    *,
    name: str,
    dynamic: Any = None,
) -> Exported:
    """Write a module that takes tensors by position and gives tensors.

    Parameters
    ----------
    module : Module
    tensors : sequence of Tensor
        Examples of its inputs.
    inputs : sequence of str
        The names that they get.
    outputs : callable
        Gives those of the outputs, once the module was called.
    name : str
        Of the network.
    dynamic : optional
        As ``dynamic_shapes`` of ``torch.onnx.export``.

    Raises
    ------
    ModelError
        If PyTorch cannot export it, or the module is no function of its inputs: it draws random numbers, or changes
        its inputs, parameters or buffers.
    """
    try:
        with _quiet():
            program = torch.onnx.export(
                module, tuple(tensors), input_names=list(inputs), dynamic_shapes=dynamic, dynamo=True, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(
            f"PyTorch {torch.__version__} does not export {name} to ONNX: {_cause(error)}", refusal=Refusal.OPERATOR
        ) from error
    exported = program.exported_program
    signature = exported.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise ModelError(
            f"{name} changes {', '.join(map(repr, changed))} in place, and a compiled network changes nothing; call "
            "module.eval() if this is the bookkeeping of its training",
            refusal=Refusal.FORM,
        )
    drawn = [str(n.target) for n in exported.graph.nodes if draws_random_numbers(n.target, n.args, n.kwargs)]
    if drawn:
        raise ModelError(
            f"{name} draws random numbers ({', '.join(dict.fromkeys(drawn))}), which would be the same in each run of "
            "a compiled network; call module.eval() if this is a dropout",
            refusal=Refusal.FORM,
        )
    model = program.model
    _rename_outputs(model.graph, outputs())
    weights = _lift_weights(model.graph)
    model.graph.name = name
    return Exported(ir.to_proto(model), weights)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another, as an example: of no graph of gradients, and not made under ``torch.inference_mode``."""
    return tensor.detach().clone()


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator of PyTorch gives other numbers each time."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    # Attention, among others, has the tag and a probability of dropout, which is 0 but in training.
    parameters = operator._schema.arguments
    values = {p.name: p.default_value for p in parameters if p.has_default_value()}
    values |= dict(zip((p.name for p in parameters), args)) | dict(kwargs)
    never = any(values.get(name) == 0 for name in ("p", "dropout_p") if isinstance(values.get(name), (int, float)))
    return not (never or values.get("train") is False)


def _rename_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give each output a value of its own with its name, also one that is an input, a weight or another output."""
    outer = {value.name for value in graph.inputs}
    wanted: list[str] = []
    for name in names:
        wanted.append(_free(f"output.{name}" if name in outer else name, {*outer, *wanted}))
    inner = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = {*outer, *wanted, *(value.name for value in inner)}
    for value in inner:  # what has an output's name gives way
        if value.name in wanted:
            weight = graph.initializers.pop(value.name, None)
            value.name = _free(value.name, taken)
            taken.add(value.name)
            if weight is not None:
                graph.register_initializer(weight)
    for number, (value, name) in enumerate(zip(graph.outputs, wanted, strict=True)):
        if value.producer() is None and value.const_value is not None and value.name not in graph.initializers:
            # The exporter forgets weights that no node reads any more.
            value.name = _free(value.name, taken) if value.name in wanted else value.name
            graph.register_initializer(value)
        node = ir.node("Identity", [value])
        (made,) = node.outputs
        made.name, made.type, made.shape = name, value.type, value.shape
        graph.append(node)
        graph.outputs[number] = made


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _lift_weights(graph: ir.Graph) -> dict[str, np.ndarray]:
    """Make inputs of large weights, and give their values: copies, since parameters may be trained further."""
    weights = {}
    for name, value in list(graph.initializers.items()):
        if value.const_value is None or value.const_value.nbytes < _LIFTED_BYTES:
            continue
        weights[name] = np.array(value.const_value.numpy())
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    return weights


def _cause(error: BaseException) -> str:
    """What was first, in one line, with the node where it was."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    first = str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__]
    nodes = [str(e).split(". See the stack trace")[0] for e in chain if str(e).startswith("Error when translating")]
    return "; ".join([first[0], *nodes[:1]])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says on the way: an error has it all."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
