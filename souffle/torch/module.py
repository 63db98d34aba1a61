"""A module of PyTorch as a compiled network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from souffle.api import compile as compile_model
from souffle.errors import OptionError
from souffle.torch.export import export, fresh

__all__ = ["from_torch"]


class _OfTensors(torch.nn.Module):
    """A module as a function of tensors alone, in order, that gives tensors alone.

    Parameters
    ----------
    module : Module
    leaves, spec
        Its arguments as PyTorch takes them apart.
    tell : callable
        Gets the names of what a call gives. (An attribute would be put back by the exporter.)
    """

    def __init__(
        self, module: torch.nn.Module, leaves: list[Any], spec: pytree.TreeSpec, tell: Callable[[list[str]], object]
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # train() would set it of all modules inside
        self._tell = tell
        # Of a tensor, only that there is one.
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._spec = spec

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        found, _ = pytree.tree_flatten_with_path(self.module(*args, **kwargs))
        found = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        self._tell([_path_text(path) or "output" for path, _ in found])
        return [leaf for _, leaf in found]


class _Function(torch.nn.Module):
    """Any callable as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.training = False


def from_torch(
    module: torch.nn.Module | Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
    **options: Any,
) -> Any:
    """Compile a module of PyTorch.

    It is exported by ``torch.onnx.export`` (PyTorch 2.9 or later) and compiled as that model. The network has the
    module's weights as constants, of their values now, and what the module does in training is not done: call
    ``module.eval()`` before.

    Parameters
    ----------
    module : Module
        Or another callable of tensors.
    example_inputs : Tensor, tuple, list or dict
        What the module is called with: one tensor, positional arguments, or keyword arguments by name. Arguments may be
        nested; what is no tensor is fixed. Inputs of the network have the names of the parameters of ``forward``,
        nested ones with the way to them, as ``"states.0"``.
    dynamic_shapes : mapping of str to mapping of int to str, optional
        The names of open dimensions by the network's input and axis, ``{"x": {0: "batch"}}``, whose values
        ``dims={"batch": [1, 8]}`` gives.
    options
        Those of :func:`souffle.compile`.

    Returns
    -------
    Network, HostNetwork, BackgroundNetwork or VersionedNetwork
        Its output is called ``"output"``; of several the name is the way to it: ``"0"``, ``"logits"``, ``"states.0"``,
        or ``"output.states.0"`` where an input is called so.
        Outputs that are no tensors are left out. It takes NumPy arrays and tensors that need no gradient, on a GPU
        tensors without a copy; :func:`torch.from_numpy` and ``torch.from_dlpack`` take what it gives.

    Raises
    ------
    ModelError
        If PyTorch does not export the module, it is no function (it draws random numbers or changes something in
        place), or Souffle does not import it; the message names the operator.
    OptionError
        If an example, a name or an option is not valid.
    IncompatibleEnvironmentError
        If PyTorch is missing or older.
    """
    title = module.__class__.__name__ if isinstance(module, torch.nn.Module) else getattr(module, "__name__", "module")
    if not isinstance(module, torch.nn.Module):
        if not callable(module):
            raise OptionError(f"from_torch takes a module of PyTorch and was given a {type(module).__name__}")
        module = _Function(module)
    args, kwargs = _arguments(example_inputs)
    found, spec = pytree.tree_flatten_with_path((args, kwargs))
    parameters = _parameters(module, args, kwargs)
    named = [(_input_name(path, parameters), leaf) for path, leaf in found]
    names = [name for name, leaf in named if isinstance(leaf, torch.Tensor)]
    tensors = [leaf for _, leaf in named if isinstance(leaf, torch.Tensor)]
    if len(set(names)) < len(names):
        raise OptionError(f"inputs of {title} have the same name: {', '.join(names)}")
    told: list[list[str]] = []
    flat = _OfTensors(module, [leaf for _, leaf in named], spec, told.append)
    dynamic = _dynamic(dynamic_shapes or {}, dict(zip(names, tensors, strict=True)))
    with torch.inference_mode(False), torch.no_grad():
        examples = [fresh(tensor) for tensor in tensors]
        exported = export(flat, examples, names, lambda: told[-1], name=title, dynamic=dynamic)
    constants = {**exported.weights, **(options.pop("constants", None) or {})}
    return compile_model(exported.model, constants=constants, **options)


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _parameters(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the parameters that take the positional arguments."""
    try:
        signature = inspect.signature(module.forward)
        signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{type(module).__name__} cannot be called with the example inputs: {error}") from error
    names = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{number}" for number in range(len(args) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names


def _steps(path: Sequence[Any]) -> list[str]:
    """The keys, indices and attributes on the way to a leaf."""
    kinds = ("key", "idx", "name")
    return [str(next(getattr(step, kind) for kind in kinds if hasattr(step, kind))) for step in path]


def _path_text(path: Sequence[Any]) -> str:
    return ".".join(_steps(path))


def _input_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    kind, argument, *rest = _steps(path)
    return ".".join([parameters[int(argument)] if kind == "0" else argument, *rest])


def _dynamic(wanted: Mapping[str, Mapping[int, str]], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Open dimensions as the exporter takes them, for one parameter that takes all tensors."""
    for name, axes in wanted.items():
        if name not in tensors:
            raise OptionError(f"dynamic_shapes: there is no input {name!r}; there are {', '.join(map(repr, tensors))}")
        if not all(axis in range(tensors[name].ndim) for axis in axes):
            raise OptionError(f"dynamic_shapes: {name!r} has {tensors[name].ndim} axes, and {dict(axes)} names others")
    return {"tensors": tuple(dict(wanted.get(name, {})) for name in tensors)} if wanted else None
