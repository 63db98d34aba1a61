"""Compile a model for several values of its open dimensions: one network of versions, which share their constants."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.dimensions import extents_text
from souffle.errors import CompilerNotFoundError, NoGpuError, OptionError
from souffle.frontend.load import LoadedModel, OpenModel, load_model, open_model
from souffle.frontend.model_options import ModelOptions, values_of
from souffle.frontend.onnx_import import import_loaded
from souffle.frontend.open_dimensions import checked_extent
from souffle.loading import network_of
from souffle.program import TEProgram
from souffle.runtime.comparison import compare, random_inputs
from souffle.runtime.plan_versions import Padding, check_padding
from souffle.runtime.shared_constants import UniqueArrays
from souffle.runtime.versioned_network import VersionedNetwork

__all__ = [
    "VersionsRequest",
    "check_open",
    "choices_of",
    "in_versions",
    "program_of",
    "programs_of",
]

_ONE_AT_A_TIME = threading.Lock()
"""Versions are compiled one after another, whichever network asks for them and from whatever thread."""


def choices_of(model: OpenModel, options: ModelOptions) -> list[tuple[int, ...]]:
    """The values of all open dimensions, one after another, for each version: the product of the lists.

    Raises
    ------
    OptionError, ModelError
        As :func:`souffle.import_onnx`; if a list is empty.
    """
    lists = {}
    for name, value in (options.dims or {}).items():
        values = values_of(value)
        if not values:
            raise OptionError(f"dims gives {name!r} an empty list; give at least one value")
        lists[name] = list(dict.fromkeys(checked_extent(name, one) for one in values))
    # What is wrong with names or values is said before anything is compiled.
    first = model.extents(options.batch, {name: values[0] for name, values in lists.items()})
    if not first:
        raise OptionError(
            f"dims={dict(options.dims)} has no effect: constants settle all open dimensions; leave it away"
        )
    order = sorted(lists, key=[*first, *lists].index)
    combined = itertools.product(*(lists[name] for name in order))
    return [tuple(model.extents(options.batch, dict(zip(order, choice, strict=True))).values()) for choice in combined]


def check_open(model: Any, options: ModelOptions) -> None:
    """Refuse what is given about a program, none of whose dimensions is open and which has its inputs.

    Raises
    ------
    OptionError
    """
    given = options.words() if isinstance(model, TEProgram) else ""
    if given:
        shapes = ", ".join(f"{n!r} {t.shape}" for n, t in zip(model.input_names, model.inputs, strict=True))
        raise OptionError(
            f"{given} has no effect on the program {model.name}, whose inputs and their shapes are settled "
            f"({shapes}); give it to souffle.import_onnx, which makes the program"
        )


def program_of(model: Any, options: ModelOptions) -> TEProgram:
    """The program of a model, or the model itself where it is one.

    Raises
    ------
    SouffleError
        As :func:`souffle.import_onnx`.
    """
    check_open(model, options)
    return model if isinstance(model, TEProgram) else import_loaded(load_model(model, options))


def programs_of(model: Any, options: ModelOptions) -> Iterator[tuple[str, TEProgram]]:
    """The programs of all versions of a model, each with words such as ``"batch=1, seq=128"``; empty words for one."""
    if not options.has_versions or isinstance(model, TEProgram):
        yield "", program_of(model, options)
        return
    opened = open_model(model, options)
    names = opened.dimensions.names
    for choice in choices_of(opened, options):
        yield extents_text(names, choice), import_loaded(opened.fixed(None, dict(zip(names, choice, strict=True))))


@dataclass(frozen=True)
class VersionsRequest:
    """Which versions are wanted, and what is done with inputs of other shapes; see :func:`souffle.compile`.

    Attributes
    ----------
    model : OpenModel
        With the constants of `options`.
    options : ModelOptions
    pad : bool or sequence of str
    pad_values : mapping of str to number
    on_demand : bool
    device : str
    compares : bool
        Whether outputs with and without padding are compared.
    """

    model: OpenModel
    options: ModelOptions
    pad: bool | Sequence[str]
    pad_values: Mapping[str, Any]
    on_demand: bool
    device: str
    compares: bool = True

    def padding(self) -> Padding | None:
        """How inputs are padded.

        Raises
        ------
        OptionError
            If it names no open dimension.
        """
        names = self.model.dimensions.names
        chosen = names if self.pad is True else tuple(self.pad or ())
        unknown = [name for name in chosen if name not in names]
        if isinstance(self.pad, str) or unknown:
            raise OptionError(
                f"pad={self.pad!r} is not valid; choose True, False, or a list of open dimensions, which are "
                f"{', '.join(map(repr, names))}"
            )
        if self.pad_values and not chosen:
            raise OptionError("pad_values says with what inputs are padded; give pad=True, or dimensions to pad, too")
        return Padding(chosen, dict(self.pad_values)) if chosen else None


def in_versions(
    request: VersionsRequest,
    plan_of: Callable[[LoadedModel, str], Plan],
    progress: Callable[[str], None] = lambda message: None,
) -> VersionedNetwork:
    """Compile all versions, one after another.

    Parameters
    ----------
    request : VersionsRequest
    plan_of : callable
        Compiles a model of one shape; its second argument says of what values it is.
    progress : callable, optional
        Told in a few words what is being done.

    Raises
    ------
    SouffleError
        As :func:`souffle.compile`.
    """
    model, padding, unique = request.model, request.padding(), UniqueArrays()
    names = model.dimensions.names

    def compiled(extents: Mapping[str, int], said: str) -> Plan:
        with _ONE_AT_A_TIME:
            plan = plan_of(model.fixed(None, extents), said)
            others = tuple(replace(other, constants=unique.of(other.constants)) for other in plan.others)
            return replace(plan, constants=unique.of(plan.constants), others=others)

    plans, choices = {}, choices_of(model, request.options)
    for number, choice in enumerate(choices):
        said = extents_text(names, choice)
        progress(f"version {number + 1} of {len(choices)}: {said}")
        plans[choice] = compiled(dict(zip(names, choice, strict=True)), said)
        if padding is not None:
            check_padding(model.dimensions, choice, plans[choice], padding)

    def on_demand(extents: dict[str, int]) -> Any:
        said = extents_text(tuple(extents), tuple(extents.values()))
        return network_of(compiled(extents, said), device=request.device)

    networks = {extents: network_of(plan, device=request.device) for extents, plan in plans.items()}
    compiler = on_demand if request.on_demand else None
    network = VersionedNetwork(model.dimensions, networks, padding=padding, compiler=compiler)
    if padding is not None and request.compares:
        progress("comparing outputs with and without padding")
        padding = replace(padding, comparison=_compared(network))
        network = VersionedNetwork(model.dimensions, networks, padding=padding, compiler=compiler)
    return network


def _compared(network: VersionedNetwork) -> str:
    """Run two versions with the same inputs along each dimension that is padded: once with padding, once without.

    Returns
    -------
    str
        What was found, in words.

    Raises
    ------
    OptionError
        If outputs are not the same within the tolerance of :func:`souffle.runtime.comparison.compare`.
    """
    worst, left_out = 0.0, []
    for name in network.padding.names:
        pair = _neighbours(network, name)
        if pair is None:
            left_out.append(name)
            continue
        small, large = pair
        version = network.versions[small]
        inputs = random_inputs(version.signature.inputs)
        # Of whole numbers and truth values, ones: most are masks, and a row of which nothing is left means nothing.
        ones = {spec.name for spec in version.signature.inputs if np.dtype(spec.dtype).kind in "biu"}
        inputs |= {key: np.ones_like(inputs[key]) for key in ones}
        try:
            expected = version(inputs)
        except (NoGpuError, CompilerNotFoundError) as error:
            return f"outputs with and without padding were not compared, since nothing runs here: {error}"
        result = compare(network.run_in(large, inputs), expected, version.plan.options.precision)
        if not result.ok:
            raise OptionError(
                f"inputs of {version.plan.name} cannot be padded along {name!r}: for random ones of "
                f"{extents_text(network.dimensions, small)}, outputs of the version "
                f"{extents_text(network.dimensions, large)} are {result.error:.2g} of their largest magnitude apart "
                "from those without padding; give pad the dimensions that the model bears it along, or pad_values that "
                'its mask leaves out; verify="off" compares nothing'
            )
        worst = max(worst, result.error)
    if len(left_out) == len(network.padding.names):
        return "outputs with and without padding were not compared, since no version holds another"
    but = f", but not along {', '.join(left_out)}, where no version holds another" if left_out else ""
    return f"for random inputs, outputs with and without padding are {worst:.2g} of their largest magnitude apart{but}"


def _neighbours(network: VersionedNetwork, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The two smallest versions that differ along one dimension alone."""
    axis = network.dimensions.index(name)
    pairs = [
        (small, large)
        for small, large in itertools.permutations(network.versions, 2)
        if small[axis] < large[axis] and small[:axis] == large[:axis] and small[axis + 1 :] == large[axis + 1 :]
    ]
    return min(pairs, key=lambda pair: (math.prod(pair[1]), math.prod(pair[0]), pair), default=None)
