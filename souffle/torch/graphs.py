"""A graph of TorchDynamo, for the shapes that it is called with: what of it is to be computed, and what only looked up.

PyTorch's graphs are more than functions: an output may be an input or a view of one, which whoever has it may write to,
or share memory with another output; inputs may be written to. PyTorch itself is asked, by a run on fake tensors, which
have shapes and storages and no memory. Outputs that are inputs, views of them or no tensors stay with PyTorch, which
computes nothing for them. The others are computed; that they are apart in memory afterwards is right where they are in
PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from souffle.torch.export import draws_random_numbers

__all__ = ["Computed", "Unsuitable", "is_constant", "look_at", "operators_of", "placeholders_of"]

_DEVICES = ("cpu", "cuda")
_LIFTED = "souffle_constant_"
_COMPARED = 1 << 24
"""Elements of outputs that share a storage, up to which it is found out whether they overlap."""


@dataclass(frozen=True)
class Unsuitable:
    """Why a graph runs in PyTorch: a kind of :class:`souffle.torch.Break` and a reason."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Computed:
    """What of a graph a network computes.

    Attributes
    ----------
    module : GraphModule
        Takes some of the graph's inputs and gives tensors that share no memory.
    inputs : tuple of int
        Which it takes.
    constants : tuple of int
        The inputs that it has as constants.
    strides : tuple of tuple of int
        Those that its outputs have in PyTorch.
    device : torch.device
        Where its outputs are.
    rest : GraphModule or None
        For PyTorch to run on all inputs: gives outputs for which nothing is computed.
    places : tuple of (bool, int)
        For each output of the graph, whether the network gives it, and its number there or in the rest.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    constants: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    device: torch.device
    rest: fx.GraphModule | None
    places: tuple[tuple[bool, int], ...]


class _Recorder(TorchDispatchMode):
    """Writes down the operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.random: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws_random_numbers(function, args, kwargs):
            self.random.append(str(function))
        return function(*args, **kwargs)


def is_constant(placeholder: fx.Node, value: Any) -> bool:
    """Whether an input of a graph is a parameter or buffer of a module."""
    marked = "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})
    return isinstance(value, torch.Tensor) and (marked or isinstance(value, torch.nn.Parameter))


def placeholders_of(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def _outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """The outputs of a graph, of which some may be constants."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    found = output.args[0]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def operators_of(graph: fx.Graph) -> tuple[str, ...]:
    """The operators that a graph calls, each once."""
    called = [node for node in graph.nodes if node.op.startswith("call_")]
    names = [n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target)) for n in called]
    return tuple(dict.fromkeys(name for name, n in zip(names, called) if n.target is not operator.getitem))


def look_at(graph: fx.GraphModule, args: Sequence[Any]) -> Computed | Unsuitable:
    """Find out what a graph does when it is called with these inputs."""
    nodes, results = placeholders_of(graph.graph), _outputs_of(graph.graph)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if any(tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        return Unsuitable("device", "its inputs are not plain tensors (sparse, quantized or distributed ones)")
    recorder = _Recorder()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(arg.detach()) if isinstance(arg, torch.Tensor) else arg for arg in args]
            before = [_version(fake) for fake in fakes]
            with recorder:
                found = _tuple(graph(*fakes))
            after = [_version(fake) for fake in fakes]
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        return Unsuitable("export", f"the shape of a result depends on data: {str(error).splitlines()[0]}")
    changed = [node.name for node, old, new in zip(nodes, before, after, strict=True) if old != new]
    if changed:
        return Unsuitable("mutation", f"it writes to {', '.join(changed)}, which come from outside")
    if recorder.random:
        names = ", ".join(dict.fromkeys(recorder.random))
        return Unsuitable("random", f"{names} draws random numbers, and a compiled network would draw them once")
    outside = {_storage(fake) for fake in fakes if isinstance(fake, FakeTensor)}
    computed: dict[fx.Node, FakeTensor] = {
        node: value
        for value, node in zip(found, results, strict=True)
        if isinstance(node, fx.Node) and isinstance(value, FakeTensor) and _storage(value) not in outside
    }
    if _overlap(list(computed.values())):
        return Unsuitable("aliasing", "its outputs are views of one tensor with elements in common")
    # A number in a tensor may be on the host, whatever it is combined with.
    devices = {value.device for value in [*computed.values(), *(tensor for tensor in tensors if tensor.ndim)]}
    if len(devices) > 1 or any(device.type not in _DEVICES for device in devices):
        return Unsuitable("device", f"its tensors are on {', '.join(sorted(map(str, devices)))}")
    numbers = {node: number for number, node in enumerate(computed)}
    looked_up = [number for number, node in enumerate(results) if node not in numbers]
    rest = _rest(graph, [results[number] for number in looked_up])
    if rest is not None:
        with mode:
            same = all(map(_alike, _tuple(rest(*fakes)), (found[number] for number in looked_up)))
        if not same:
            return Unsuitable("aliasing", "the shape of an output that is a view of an input is changed in place")
    constants = tuple(n for n, (node, arg) in enumerate(zip(nodes, args, strict=True)) if is_constant(node, arg))
    module, inputs = _module(graph, list(computed), args, constants)
    places = tuple((True, numbers[n]) if n in numbers else (False, looked_up.index(i)) for i, n in enumerate(results))
    strides = tuple(tuple(value.stride()) for value in computed.values())
    device = next(iter(devices), torch.device("cpu"))
    return Computed(module, inputs, constants, strides, device, rest, places)


def _tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _version(value: Any) -> int:
    """How often a tensor was written to."""
    return value._version if isinstance(value, torch.Tensor) else 0


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    layouts = [(value.size(), value.stride(), value.storage_offset(), _storage(value)) for value in (one, other)]
    return layouts[0] == layouts[1]


def _overlap(values: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors have an element of memory in common; yes where that would take long to find out."""
    of_storage: dict[int, list[torch.Tensor]] = {}
    for value in values:
        of_storage.setdefault(_storage(value), []).append(value)
    for shared in of_storage.values():
        if len(shared) > 1:
            if sum(value.numel() for value in shared) > _COMPARED:
                return True
            places = [np.unique(_places(value)) for value in shared]
            if len(np.unique(np.concatenate(places))) < sum(map(len, places)):
                return True
    return False


def _places(value: torch.Tensor) -> np.ndarray:
    """Where in its storage each element of a tensor lies, in bytes, so that views of other types are told as well."""
    axes = np.ogrid[tuple(slice(extent) for extent in value.shape)] if value.ndim else []
    size = value.element_size()
    first = sum((axis * stride for axis, stride in zip(axes, value.stride(), strict=True)), np.zeros((), np.int64))
    return (np.broadcast_to(first, value.shape).reshape(-1, 1) + value.storage_offset()) * size + np.arange(size)


def _module(
    graph: fx.GraphModule, outputs: Sequence[fx.Node], args: Sequence[Any], constants: Sequence[int]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The graph with parameters and numbers as constants, and which of its inputs are left.

    Nodes that nobody reads stay: they may write to what others read.
    """
    copied, copies = fx.Graph(), {}
    root = {
        node.target: operator.attrgetter(node.target)(graph)
        for node in graph.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    copied.graph_copy(graph.graph, copies)
    copied.output([copies[node] for node in outputs])
    inputs = []
    for number, (placeholder, arg) in enumerate(zip(placeholders_of(graph.graph), args, strict=True)):
        node = copies[placeholder]
        if number in constants and node.users:
            name = f"{_LIFTED}{number}"
            root[name] = arg.detach()
            with copied.inserting_before(node):
                node.replace_all_uses_with(copied.create_node("get_attr", name))
        elif not isinstance(arg, torch.Tensor):
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n, node=node, arg=arg: arg if n is node else n)
                user.kwargs = fx.map_arg(user.kwargs, lambda n, node=node, arg=arg: arg if n is node else n)
        if node.users:
            inputs.append(number)
        else:
            copied.erase_node(node)
    return fx.GraphModule(root, copied), tuple(inputs)


def _rest(graph: fx.GraphModule, outputs: Sequence[Any]) -> fx.GraphModule | None:
    """The part of a graph that leads to some of its outputs; takes all inputs."""
    if not outputs:
        return None
    needed = [node for node in outputs if isinstance(node, fx.Node)]
    seen = set(needed)
    while needed:
        for node in needed.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                needed.append(node)
    copied, copies = fx.Graph(), {}
    for node in graph.graph.nodes:
        if node in seen or node.op == "placeholder":
            copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output([copies[value] if isinstance(value, fx.Node) else value for value in outputs])
    return fx.GraphModule(graph, copied)
