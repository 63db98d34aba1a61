"""``torch.compile(module, backend="souffle")``: each graph of TorchDynamo as networks, one for each shape.

A graph is compiled when it is first called, for the shapes, numbers and weights that it is called with then, and once
more for others. What cannot be compiled runs in PyTorch, and is named (:mod:`souffle.torch.report`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from souffle.api import compile as compile_model
from souffle.errors import ModelError, OptionError
from souffle.loading import network_of
from souffle.runtime import Network
from souffle.runtime.host_network import HostNetwork
from souffle.runtime.shared_constants import SharedConstants, UniqueArrays
from souffle.torch.arrays import given, taken
from souffle.torch.export import export, fresh
from souffle.torch.graphs import Computed, Unsuitable, is_constant, look_at, operators_of, placeholders_of
from souffle.torch.report import Break, note
from souffle.wording import did_you_mean

__all__ = ["CompiledGraph", "backend"]

_KEPT = 8
"""Networks of one graph and one shape with different weights, as of equal layers that are compiled one by one; and how
often weights may change between calls."""
_SHAPES = 16
"""Of a graph. A text that grows by a token would have a network for each of its lengths."""
_NOT_HERE = ("model", "batch", "dims", "constants", "pad", "pad_values", "on_demand")
"""Options that say what a graph says itself."""


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None
) -> Callable[..., Any]:
    """The backend ``"souffle"`` of ``torch.compile``.

    Parameters
    ----------
    graph, example_inputs
        From TorchDynamo.
    options : mapping, optional
        Those of :func:`souffle.compile`, and ``"strict"``: raise where a graph cannot be compiled, in place of running
        it in PyTorch. (Where TorchDynamo itself breaks a graph, ``fullgraph=True`` raises.)
    mode : optional
        Must not be given.

    Returns
    -------
    callable
        What is wrong is raised when it is called: TorchDynamo would wrap it in an error of its own. An ``OptionError``
        if an option is not valid; with ``"strict"``, a ``ModelError`` if the graph cannot be compiled.
    """
    chosen = dict(options or {})
    strict = bool(chosen.pop("strict", False))
    wrong = _wrong(chosen, mode)
    if wrong is not None:
        return partial(_refuse, wrong)
    _note_graph_break(graph)
    why = None
    if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in example_inputs):
        why = Unsuitable(
            "gradient",
            "its inputs or parameters require a gradient, and networks compute none; call it under torch.no_grad() or "
            "torch.inference_mode()",
        )
    return CompiledGraph(graph, chosen, strict, why)


def _refuse(error: OptionError, *args: Any) -> None:
    raise error


def _wrong(options: Mapping[str, Any], mode: Any) -> OptionError | None:
    """What is wrong with the options."""
    if mode is not None:
        return OptionError(f"mode={mode!r} is Inductor's; give options, such as options={{'level': 'V4'}}")
    known = [name for name in inspect.signature(compile_model).parameters if name not in _NOT_HERE]
    for name in options:
        if name in _NOT_HERE:
            return OptionError(f"option {name!r} is not for torch.compile: graphs have their own inputs and shapes")
        if name not in known:
            return OptionError(f"there is no option {name!r}{did_you_mean(name, [*known, 'strict'])}")
    return None


def _note_graph_break(graph: fx.GraphModule) -> None:
    """Name what TorchDynamo ended a graph for, which it has written to it."""
    found = getattr(graph, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return
    lines = [line.strip() for line in str(found.reason).splitlines() if line.strip()]
    reason = "; ".join(line for number, line in enumerate(lines) if number == 0 or line.startswith("Explanation:"))
    if reason.startswith("generic_jump"):
        reason = f"a branch depends on the values of a tensor ({reason})"
    stack = found.user_stack
    note(Break("graph break", reason, f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""))


def _where(graph: fx.GraphModule) -> str:
    """The first line of the user's code that a graph has something of."""
    for node in graph.graph.nodes:
        trace = node.meta.get("stack_trace") if node.op.startswith("call_") else None
        lines = [line.strip() for line in (trace or "").splitlines() if line.strip().startswith("File ")]
        if lines:
            file, line, *_ = lines[-1].removeprefix("File ").split(", ")
            return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"
    return ""


class CompiledGraph:
    """A graph that is called with tensors and numbers, from any number of threads.

    Parameters
    ----------
    graph : GraphModule
    options : dict
        Of :func:`souffle.compile`.
    strict : bool
        Whether to raise where it cannot be compiled.
    why : Unsuitable, optional
        What is known to stand against it.
    """

    def __init__(
        self, graph: fx.GraphModule, options: dict[str, Any], strict: bool, why: Unsuitable | None = None
    ) -> None:
        self._graph, self._options, self._strict, self._why = graph, options, strict, why
        placeholders = placeholders_of(graph.graph)
        examples = [node.meta.get("example_value") for node in placeholders]
        self._varying = [n for n, (p, v) in enumerate(zip(placeholders, examples)) if not is_constant(p, v)]
        self._made: dict[tuple[Any, ...], list[_Specialized]] = {}
        self._left = False
        self._changes = 0
        self._compiling = threading.Lock()
        # What networks for several shapes have in common of their constants is there once.
        self._unique, self._shared = UniqueArrays(), SharedConstants()

    def _say(self, why: Unsuitable) -> None:
        found = Break(why.kind, why.reason, _where(self._graph), operators_of(self._graph.graph))
        note(found)
        if self._strict:
            raise ModelError(str(found))

    def leave(self, why: Unsuitable) -> None:
        """Let PyTorch run the graph from now on.

        Raises
        ------
        ModelError
            Where the user has asked for that.
        """
        self._say(why)
        self._left = True

    def __call__(self, *args: Any) -> Any:
        """Run once."""
        if self._left:
            return self._graph(*args)
        key = tuple([args[n].shape if isinstance(args[n], torch.Tensor) else args[n] for n in self._varying])
        for made in self._made.get(key, ()):
            if made.is_for(args):
                return made(args)
        made = self._specialized(key, args)
        return self._graph(*args) if made is None else made(args)

    def _specialized(self, key: tuple[Any, ...], args: Sequence[Any]) -> _Specialized | None:
        """The network for these shapes and weights, compiled by one thread; None where there is none."""
        with self._compiling:
            for made in self._made.get(key, ()):
                if made.is_for(args):
                    return made
            if self._why is not None and not self._left:
                self.leave(self._why)
            if self._left:
                return None
            if key not in self._made and len(self._made) == _SHAPES:
                self._say(Unsuitable("shapes", f"it has networks for {_SHAPES} shapes, and further ones get none"))
                return None
            before = self._made.get(key, [])
            others = [made for made in before if not made.is_of_before(args)]
            self._changes += len(others) < len(before)
            if len(others) == _KEPT or self._changes > _KEPT:
                self.leave(Unsuitable("weights", f"it was called with more than {_KEPT} different sets of weights"))
                return None
            with torch.inference_mode(False), torch.no_grad():
                found = look_at(self._graph, args)
                if isinstance(found, Computed) and found.strides:
                    found = self._compiled(found, args)
                elif isinstance(found, Computed):
                    found = _Specialized(found, None, args)
            if isinstance(found, Unsuitable):
                self.leave(found)
                return None
            # A new list: calls go through the one that they have found.
            self._made = {**self._made, key: [*others, found]}
            return found

    def _compiled(self, computed: Computed, args: Sequence[Any]) -> _Specialized | Unsuitable:
        tensors = [args[number] for number in computed.inputs]
        names = [f"input{number}" for number in range(len(tensors))]
        outputs = [f"output{number}" for number in range(len(computed.strides))]
        try:
            exported = export(
                computed.module, [fresh(t) for t in tensors], names, lambda: outputs, name=_title(self._graph)
            )
        except ModelError as error:
            return Unsuitable("export", str(error))
        try:
            placed = _placed(self._options, computed.device)
            network = compile_model(exported.model, constants=exported.weights, **placed)
        except ModelError as error:
            return Unsuitable("refused", str(error))
        if isinstance(network, (Network, HostNetwork)):
            plan = replace(network.plan, constants=self._unique.of(network.plan.constants))
            network = network_of(plan, device=network.device).sharing(self._shared)
        return _Specialized(computed, network, args)


class _Specialized:
    """A graph for certain shapes, numbers and weights."""

    def __init__(self, computed: Computed, network: Any, args: Sequence[Any]) -> None:
        self._network, self._rest, self._places = network, computed.rest, computed.places
        self._inputs, self._strides = computed.inputs, computed.strides
        # The tensors themselves: of one that is gone, another could have the place.
        self._weights = [(n, args[n], args[n].data_ptr(), _written(args[n])) for n in computed.constants]

    def is_for(self, args: Sequence[Any]) -> bool:
        """Whether the weights are those that it has, unchanged."""
        for number, tensor, address, version in self._weights:
            arg = args[number]
            if arg is not tensor or arg.data_ptr() != address or _written(arg) != version:
                return False
        return True

    def is_of_before(self, args: Sequence[Any]) -> bool:
        """Whether it has what the same weights were."""
        return all(args[number] is tensor for number, tensor, _, _ in self._weights)

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        computed: list[torch.Tensor] = []
        if self._network is not None:
            found = self._network(*[given(args[number]) for number in self._inputs])
            computed = [_laid_out(taken(v), s) for v, s in zip(found.values(), self._strides, strict=True)]
        rest = () if self._rest is None else self._rest(*args)
        return tuple(computed[number] if here else rest[number] for here, number in self._places)


def _written(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, which those of ``torch.inference_mode`` do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the order in memory that PyTorch would have given it, which the code behind it may rely on."""
    if tensor.stride() == strides or 0 in strides:
        return tensor
    if all(extent == 1 or a == b for extent, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _title(graph: fx.GraphModule) -> str:
    names = operators_of(graph.graph)
    return f"graph of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _placed(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The options, for the device of the tensors where they do not say another."""
    if "target" in options or "device" in options:
        return options
    if device.type == "cuda":
        return {**options, "target": "cuda", "device": f"cuda:{device.index or 0}"}
    return {**options, "target": "cpu"}
