"""A network for several shapes of its inputs: a version for each, and the one that a call takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from souffle.dimensions import OpenDimensions, extents_text
from souffle.errors import InputError, OptionError, SouffleError
from souffle.runtime import artifact, dlpack
from souffle.runtime.bound import BoundNetwork
from souffle.runtime.explain import explain
from souffle.runtime.network import Network
from souffle.runtime.plan_versions import Padding, PlanVersions, check_padding
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Signature, TensorSpec
from souffle.wording import counted

__all__ = ["VersionedNetwork"]

_SHOWN = 24
"""Versions that a message names."""

Extents = tuple[int, ...]


class VersionedNetwork:
    """What ``souffle.compile(..., dims={"batch": [1, 4], "seq": [128, 384]})`` gives: one network for several shapes.

    It is called as :class:`souffle.runtime.Network`, from any number of threads, and each call runs the version that
    was compiled for the shape of its inputs. An input of another shape is refused with a list of the versions, or

    - where padding was asked for, made larger at the end of its padded dimensions, to the smallest version that holds
      it, and outputs are cut back to what follows from the input. This is right only where the model bears it: where
      what is added is told apart by an attention mask, or does not reach the rest, as in a batch. :meth:`explain` says
      what is padded with what. Arrays of the host can be padded, tensors on a GPU cannot;
    - where versions are compiled on demand, compiled for that shape by the first call that needs it, for which calls of
      the same shape wait, and kept. A file, a copy and a pickle hold the versions that there are, and compile no more.

    Constants that are equal in several versions are there once: in this process, on each device, and in a file.

    Parameters
    ----------
    dimensions : OpenDimensions
    networks : mapping of tuple of int to network
        By the values of the open dimensions, in the order of their names.
    padding : Padding, optional
    compiler : callable, optional
        Gives the network for other values of the open dimensions, by name.
    """

    def __init__(
        self,
        dimensions: OpenDimensions,
        networks: Mapping[Extents, Any],
        *,
        padding: Padding | None = None,
        compiler: Callable[[dict[str, int]], Any] | None = None,
    ) -> None:
        self._dimensions, self._padding, self._compiler = dimensions, padding, compiler
        self._shared = SharedConstants()
        self._networks = {extents: network.sharing(self._shared) for extents, network in networks.items()}
        self._first = next(iter(self._networks.values()))
        self._compiling = threading.Lock()
        self._awaited: dict[Extents, Future] = {}
        inputs = zip(dimensions.inputs, self._first.signature.inputs, strict=True)
        specs = tuple(TensorSpec(name, shape, spec.dtype) for (name, shape), spec in inputs)
        self._signature = Signature(self._first.plan.name, specs, self._declared_outputs())
        # What tells versions apart: one place of each open dimension, by the input's name and by its number.
        places = tuple(dimensions.places())
        self._by_name = tuple((specs[number].name, axis) for _, number, axis in places)
        self._by_number = tuple((number, axis) for _, number, axis in places)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._dimensions, dict(self._networks), self._padding)

    def __repr__(self) -> str:
        return f"VersionedNetwork({self._signature.network!r}, {self._listed(self._networks)}, device={self.device!r})"

    @property
    def versions(self) -> dict[Extents, Any]:
        """The networks, by the values of :attr:`dimensions` in their order."""
        return dict(self._networks)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of the open dimensions."""
        return self._dimensions.names

    @property
    def padding(self) -> Padding | None:
        """Which dimensions of inputs are padded, and with what; None where none is."""
        return self._padding

    @property
    def plan(self) -> PlanVersions:
        """What was compiled, as data."""
        return PlanVersions(
            self._dimensions, self._padding, {extents: network.plan for extents, network in self._networks.items()}
        )

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``; ``"host"`` for LLVM code."""
        return self._first.device

    @property
    def signature(self) -> Signature:
        """The inputs and outputs, whose shapes have the names of open dimensions in them."""
        return self._signature

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the inputs."""
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the outputs; ``"?"`` is an extent of which the model does not say the name."""
        return self._signature.outputs

    def _declared_outputs(self) -> tuple[TensorSpec, ...]:
        declared = dict(self._dimensions.outputs)
        return tuple(
            TensorSpec(
                spec.name,
                tuple("?" if d is None else d for d in declared[spec.name] or (None,) * len(spec.shape)),
                spec.dtype,
            )
            for spec in self._first.outputs
        )

    def explain(self) -> str:
        """Which versions there are and what is done with other shapes; then what was decided of each version."""
        lines = [f"{self._signature.network}: {self._listed(self._networks)}", f"  inputs: {self._signature}"]
        lines += [f"  outputs: {', '.join(map(str, self.outputs))}", *self._padding_lines()]
        if self._compiler is not None:
            lines.append("  on demand: a version for another shape is compiled when it is called, and kept")
        arrays = {id(array): array for network in self._networks.values() for array in network.plan.constants.values()}
        held = sum(array.nbytes for array in arrays.values())
        each = sum(array.nbytes for network in self._networks.values() for array in network.plan.constants.values())
        lines.append(f"  constants: {held} bytes, which would be {each} bytes if versions had none in common")
        for extents, network in self._networks.items():
            lines += ["", f"version {extents_text(self.dimensions, extents)}", explain(network.plan)]
        return "\n".join(lines)

    def _padding_lines(self) -> list[str]:
        padding = self._padding
        if padding is None:
            return ["  padding: none; the inputs must have the shape of a version"]
        padded = [
            f"{name} with {padding.values.get(name, 0)}"
            for name, shape in self._dimensions.inputs
            if any(self._dimensions.follows(dimension, padding.names) for dimension in shape)
        ]
        return [
            f"  padding: along {', '.join(padding.names)}, at the end, to the smallest version that holds the inputs: "
            f"{', '.join(padded)}",
            "    outputs are cut back; what they hold is right only if the model tells what was added from the rest",
            f"    {padding.comparison or 'outputs with and without padding were not compared'}",
        ]

    def save(self, path: str | Path, *, constants: str = "stored") -> None:
        """Write one ``.souffle`` file of all versions (:func:`souffle.runtime.artifact.save`)."""
        artifact.save(self.plan, path, constants=constants)

    def on(self, device: str, **options: Any) -> VersionedNetwork:
        """The same versions on another device or with other options (:meth:`souffle.runtime.Network.on`)."""
        if not isinstance(self._first, Network):
            raise OptionError(
                f"{self._signature.network} was compiled for this machine's processor and runs there alone; compile it "
                'with target="cuda" for other devices'
            )
        networks = {extents: network.on(device, **options) for extents, network in self._networks.items()}
        return VersionedNetwork(self._dimensions, networks, padding=self._padding)

    def open(self) -> None:
        """Load the code and the constants of all versions now instead of at the first call of each."""
        for network in list(self._networks.values()):
            network.open()

    def chosen(self, *args: Any) -> Network | Any:
        """The version that a call with these inputs runs, compiled where that is done on demand.

        Raises
        ------
        InputError
            As a call.
        """
        network = self._exact(args)
        return self._other(args)[0] if network is None else network

    def __call__(self, /, *args: Any, out: Any = None, **named: Any) -> dict[str, Any]:
        """Run once (:meth:`souffle.runtime.Network.__call__`); `out` has the shapes of the outputs of this call.

        Raises
        ------
        InputError
            If there is no version for the inputs' shapes, or an input or an array of `out` has an unknown name or
            another dtype or device than it must; nothing is cast.
        SouffleError
            What compiling a version on demand raises; what a call of :class:`souffle.runtime.Network` does.
        """
        if named:
            args = self._signature.arrange(args, named)
        network = self._exact(args)
        if network is None:
            network, values, extents = self._other(args)
            if values is not None:
                return self._padded(network, values, extents, out)
        try:
            return network(*args, out=out)
        except InputError:
            self._extents(self._signature.arrange(args))  # says it of all versions, if it is about shapes
            raise

    def bind(self, inputs: Any, outputs: Any = None) -> BoundNetwork:
        """Settle the buffers of calls (:meth:`souffle.runtime.Network.bind`) of the version for the inputs' shapes.

        Raises
        ------
        InputError
            As a call, and if the inputs would have to be padded.
        """
        args = (inputs,) if isinstance(inputs, Mapping) or not isinstance(inputs, (list, tuple)) else tuple(inputs)
        network = self._exact(args)
        if network is None:
            network, values, extents = self._other(args)
            if values is not None:
                found = extents_text(self.dimensions, tuple(extents.values()))
                raise InputError(
                    f"inputs of {self._signature.network} with {found} would be padded, which buffers that are bound "
                    f"are not; bind those of a version: {self._listed(self._networks)}"
                )
        return network.bind(inputs, outputs)

    def run_in(self, version: Extents, *args: Any) -> dict[str, Any]:
        """As a call, in a version that is named, to which the inputs are padded.

        Raises
        ------
        InputError
            If the version does not hold the inputs, or they are wrong.
        """
        values = self._signature.arrange(args)
        extents = self._extents(values)
        if version not in self._networks or not self._holds(version, tuple(extents.values())):
            raise InputError(
                f"inputs of {self._signature.network} with {extents_text(self.dimensions, tuple(extents.values()))} "
                f"cannot be run in version {version}; there are {self._listed(self._networks)}"
            )
        if version == tuple(extents.values()):
            return self._networks[version](*args)
        return self._padded(self._networks[version], values, extents)

    def _exact(self, args: Sequence[Any]) -> Any:
        """The version for the shapes of the inputs that tell them apart; None where there is none."""
        try:
            given = args[0] if len(args) == 1 else None
            # What is nearly always a dict is asked first: the other question takes longer than all the rest.
            if type(given) is dict or isinstance(given, Mapping):
                return self._networks.get(tuple([given[name].shape[axis] for name, axis in self._by_name]))
            return self._networks.get(tuple([args[number].shape[axis] for number, axis in self._by_number]))
        except (AttributeError, IndexError, KeyError, TypeError):
            return None  # what is wrong with it is said where it is looked at closely

    # shapes that are not a version's

    def _other(self, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...] | None, dict[str, int]]:
        """The version for inputs of another shape, and where they must be padded, their values in order."""
        values = self._signature.arrange(args)
        extents = self._extents(values)
        wanted = tuple(extents.values())
        if wanted in self._networks:
            return self._networks[wanted], None, extents
        holding = self._smallest(wanted)
        if holding is not None:
            return self._networks[holding], values, extents
        if self._compiler is not None:
            return self._compiled(wanted), None, extents
        helps = "compile it with dims=... for that, or with on_demand=True"
        raise InputError(
            f"{self._signature.network} has no version {'that holds' if self._padding else 'for'} "
            f"{extents_text(self.dimensions, wanted)}; it has {self._listed(self._networks)}; {helps}"
        )

    def _listed(self, versions: Mapping[Extents, Any]) -> str:
        shown = [f"({extents_text(self.dimensions, extents)})" for extents in list(versions)[:_SHOWN]]
        more = f" and {len(versions) - _SHOWN} more" if len(versions) > _SHOWN else ""
        return f"{counted(len(versions), 'version')}: {', '.join(shown)}{more}"

    def _extents(self, values: Sequence[Any]) -> dict[str, int]:
        """The values of the open dimensions that inputs have, which must agree in all of them."""
        shapes = [
            _shape_of(self._signature, spec, value) for spec, value in zip(self._signature.inputs, values, strict=True)
        ]
        for (name, declared), found in zip(self._dimensions.inputs, shapes, strict=True):
            fixed = all(not isinstance(d, int) or d == f for d, f in zip(declared, found, strict=False))
            if len(found) != len(declared) or not fixed:
                raise InputError(self._must_have(name, declared, found))
        extents = {name: shapes[number][axis] for name, number, axis in self._dimensions.places()}
        for (name, declared), found in zip(self._dimensions.inputs, shapes, strict=True):
            chosen = extents_text(self.dimensions, tuple(extents.values()))
            try:
                wanted = self._dimensions.shape(declared, extents)
            except OptionError as error:
                raise InputError(f"inputs of {self._signature.network} do not fit each other: {error}") from error
            if wanted != found:
                raise InputError(f"{self._must_have(name, declared, found)}, where other inputs have {chosen}")
        return extents

    def _must_have(self, name: str, declared: tuple[Any, ...], found: tuple[int, ...]) -> str:
        shape = f"({', '.join(map(str, declared))}{',' * (len(declared) == 1)})"
        return f"input {name!r} of {self._signature.network} must have shape {shape} and was given {found}"

    def _smallest(self, wanted: Extents) -> Extents | None:
        """The version with the fewest elements that inputs can be padded to."""
        if self._padding is None:
            return None
        holding = [has for has in list(self._networks) if self._holds(has, wanted)]
        return min(holding, key=lambda has: (math.prod(has), has), default=None)

    def _holds(self, version: Extents, wanted: Extents) -> bool:
        """Whether inputs can be padded to a version."""
        grows = () if self._padding is None else self._padding.names
        each = zip(self.dimensions, version, wanted, strict=True)
        return all(has >= needed if name in grows else has == needed for name, has, needed in each)

    def _padded(
        self, network: Any, values: Sequence[Any], extents: dict[str, int], out: Any = None
    ) -> dict[str, Any]:
        declared = [dict(self._dimensions.outputs)[spec.name] for spec in network.outputs]
        cut = tuple(
            replace(spec, shape=spec.shape if shape is None else self._dimensions.shape(shape, extents))
            for spec, shape in zip(network.outputs, declared, strict=True)
        )
        wanted = Signature(self._signature.network, (), cut).destinations(out)
        arrays = []
        for spec, target, value in zip(self._signature.inputs, network.signature.inputs, values, strict=True):
            shape = self._dimensions.shape(spec.shape, extents)
            if hasattr(value, "__dlpack_device__") and dlpack.device_of(value)[0] not in (dlpack.CPU, dlpack.CUDA_HOST):
                raise InputError(
                    f"input {spec.name!r} of {self._signature.network} is {shape} and on a GPU, and only arrays of the "
                    f"host are padded; pad it to {target.shape} before"
                )
            array = self._signature.host_array(TensorSpec(spec.name, shape, spec.dtype), value)
            if shape != target.shape:
                whole = np.full(target.shape, self._padding.values.get(spec.name, 0), spec.dtype)
                whole[tuple(map(slice, shape))] = array
                array = whole
            arrays.append(array)
        found = network(*arrays)
        for spec, destination in zip(cut, wanted, strict=True):
            part = found[spec.name][tuple(map(slice, spec.shape))]
            if destination is not None:
                destination.array[...] = part.view(destination.array.dtype)
                found[spec.name] = destination.given
            elif part.shape != found[spec.name].shape:
                found[spec.name] = part.copy()
        return found

    # on demand

    def _compiled(self, wanted: Extents) -> Any:
        """The version of these values: compiled by one call, for which others wait."""
        while wanted not in self._networks:
            with self._compiling:
                awaited = self._awaited.get(wanted)
                if awaited is None:
                    if wanted in self._networks:
                        break
                    self._awaited[wanted] = Future()
            if awaited is None:
                with _Settling(self, wanted):
                    network = self._compiler(dict(zip(self.dimensions, wanted, strict=True)))
                    if self._padding is not None:
                        check_padding(self._dimensions, wanted, network.plan, self._padding)
                    network = network.sharing(self._shared)
                    with self._compiling:
                        # A new dict: calls look into the one that they have found.
                        self._networks = {**self._networks, wanted: network}
            else:
                error = awaited.result()
                if error is not None:
                    raise error
        return self._networks[wanted]

    def _settle(self, extents: Extents, error: SouffleError | None) -> None:
        """Whoever waits for a version goes on: it is there, or nobody is making it any more, or it cannot be made."""
        with self._compiling:
            awaited = self._awaited.pop(extents)
        awaited.set_result(error)


class _Settling:
    """Ends the wait of others however the compilation ends."""

    def __init__(self, network: VersionedNetwork, extents: Extents) -> None:
        self._network, self._extents = network, extents

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        # Of an interrupt only the thread that had it knows: another one compiles then.
        self._network._settle(self._extents, error if isinstance(error, SouffleError) else None)


def _again(dimensions: OpenDimensions, networks: Mapping[Extents, Any], padding: Padding | None) -> VersionedNetwork:
    return VersionedNetwork(dimensions, networks, padding=padding)


def _shape_of(signature: Signature, spec: TensorSpec, value: Any) -> tuple[int, ...]:
    """The shape of a value, in whatever way it says it."""
    shape = getattr(value, "shape", None)
    if shape is None and hasattr(value, "__dlpack__"):
        try:
            shape = np.from_dlpack(value).shape
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"input {spec.name!r} of {signature.network} does not say its shape, and cannot be read through "
                f"DLPack: {error}"
            ) from error
    if shape is None:
        raise InputError(
            f"input {spec.name!r} of {signature.network} must be {spec} and was given a {type(value).__name__}; give a "
            f"NumPy array, as with np.asarray(value, dtype={spec.dtype!r}), or a tensor that has __dlpack__"
        )
    return tuple(int(extent) for extent in shape)
