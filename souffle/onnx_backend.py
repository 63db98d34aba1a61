"""Souffle as a backend of ONNX (``onnx.backend.base``), which ONNX's own test suite can drive.

``onnx.backend.test.BackendTest(souffle.onnx_backend, __name__)`` makes its tests; :func:`run_model` runs a model once.
A network has fixed shapes, so where inputs of a model decide them, or its program depends on inputs otherwise, such as
axes and conditions, it is compiled when it is first run, with the values of exactly those inputs as constants
(``ModelError.needs``), and once more for other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from souffle.api import compile as compile_model
from souffle.emulator.toolchain import find_gxx
from souffle.errors import CompilerNotFoundError, InputError, ModelError, OptionError, Refusal
from souffle.frontend import import_onnx
from souffle.options import INTEGERS
from souffle.program import TEProgram
from souffle.program.shared import OncePer
from souffle.runtime import Network
from souffle.runtime.detect import gpu_arch
from souffle.runtime.host_network import HostNetwork

__all__ = ["SouffleBackend", "SouffleRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]

_KEPT = 8
_FOR_COMPARISON = ("rtol", "atol")
"""What ONNX's runner gives to a backend beside its options, and means for its own comparison."""


class SouffleRep(BackendRep):
    """A model that is ready to run.

    Parameters
    ----------
    model : ModelProto
    options : mapping
        Those of :func:`souffle.compile` that are not about the model.

    Attributes
    ----------
    inputs : tuple of str
        Those of the model, without its weights.
    constants : tuple of str
        The inputs whose values the network was compiled with, so far as they are known to be needed.
    program : TEProgram or None
        What was compiled last.
    network : Network, HostNetwork or None
        What ran last.

    Raises
    ------
    BackendIsNotSupposedToImplementIt
        Also when it is run: the model cannot be imported, for the reason that its cause says, a
        :class:`souffle.errors.ModelError`.
    """

    def __init__(self, model: onnx.ModelProto, options: Mapping[str, Any]) -> None:
        weights = {tensor.name for tensor in model.graph.initializer}
        self.inputs = tuple(info.name for info in model.graph.input if info.name not in weights)
        self.constants: tuple[str, ...] = ()
        self.program: TEProgram | None = None
        self.network: Network | HostNetwork | None = None
        self._outputs = tuple(info.name for info in model.graph.output)
        self._model, self._options = model, dict(options)
        self._networks: OncePer[Network | HostNetwork] = OncePer(_KEPT)
        self._try_to_compile({})

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, in the order of the model.

        Parameters
        ----------
        inputs : sequence of array, mapping of str to array, or array
            The values of :attr:`inputs`, in order or by name; one array where there is one.

        Raises
        ------
        InputError
            If they are not those of the model.
        """
        given = self._named(inputs)
        network = None
        while network is None:
            network = self._try_to_compile({name: np.asarray(given[name]) for name in self.constants})
        self.network = network
        outputs = network({name: value for name, value in given.items() if name not in self.constants})
        return namedtupledict("Outputs", self._outputs)(*(outputs[name] for name in self._outputs))

    def _named(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) != len(self.inputs):
                names = ", ".join(map(repr, self.inputs)) or "none"
                raise InputError(f"{len(values)} inputs were given, and the model has {len(self.inputs)}: {names}")
            given = dict(zip(self.inputs, values, strict=True))
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise InputError(f"the model was not given its inputs {', '.join(map(repr, missing))}")
        return {name: np.asarray(value) if np.isscalar(value) else value for name, value in given.items()}

    def _try_to_compile(self, constants: Mapping[str, np.ndarray]) -> Network | HostNetwork | None:
        """The network with these constants; ``None`` where it needs more of them, which :attr:`constants` names now."""
        key = tuple((name, str(value.dtype), value.shape, value.tobytes()) for name, value in constants.items())

        def compiled() -> Network | HostNetwork:
            integers = INTEGERS not in self._options.get("disable", ())
            self.program = import_onnx(self._model, constants=constants, integers=integers)
            return compile_model(self.program, **self._options)

        try:
            return self._networks(key, compiled)
        except ModelError as error:
            more = tuple(name for name in error.needs if name not in constants)
            if not more:
                raise _unsupported(error) from error
            self.constants += more
            return None


def _unsupported(error: ModelError) -> Exception:
    """What ONNX's runner takes as a case that a backend need not have; a model that is not valid is an error."""
    return error if error.refusal is Refusal.INVALID else BackendIsNotSupposedToImplementIt(str(error))


class SouffleBackend(Backend):
    """ONNX's interface to :func:`souffle.compile`.

    The device ``"CPU"`` is machine code for the processor. ``"CUDA"``, or ``"CUDA:1"``, is a GPU where one is usable,
    else the CUDA text on the CPU.
    """

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model can be imported, at least when the values of some inputs are known."""
        if not cls.supports_device(device):
            return False
        try:
            import_onnx(model)
        except ModelError as error:
            return bool(error.needs)
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> SouffleRep:
        """Compile a model.

        Parameters
        ----------
        model : ModelProto
        device : str
        **kwargs
            Options of :func:`souffle.compile`, such as ``level``.

        Raises
        ------
        BackendIsNotSupposedToImplementIt
            If the model cannot be imported; its cause is a :class:`souffle.errors.ModelError`.
        ModelError
            If it is not valid.
        """
        options = {name: value for name, value in kwargs.items() if name not in _FOR_COMPARISON}
        return SouffleRep(model, _target(device) | options)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile a model and run it once (:meth:`prepare`, :meth:`SouffleRep.run`)."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Compile one node and run it once.

        Parameters
        ----------
        node : NodeProto
        inputs : sequence of array
            One for each input that is there.
        device : str
        outputs_info : sequence of (type, shape), optional
            Not needed: types and shapes follow from the inputs.
        **kwargs
            As for :meth:`prepare`, and ``opset_version``, that of the node's domain; the newest without.
        """
        super().run_node(node, inputs, device, outputs_info, **kwargs)
        version = kwargs.pop("opset_version", None)
        names = [name for name in dict.fromkeys(node.input) if name]
        if len(names) != len(inputs):
            raise InputError(f"{len(inputs)} inputs were given, and the node has {len(names)}: {', '.join(names)}")
        arrays = [np.asarray(value) for value in inputs]
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, arrays, strict=True)
        ]
        results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "node", infos, results)
        opset = helper.make_opsetid(node.domain, version or _newest(node))
        return cls.run_model(helper.make_model(graph, opset_imports=[opset]), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether networks run there: on a CPU they always do, for CUDA there must be a GPU or g++."""
        try:
            _target(device)
        except (CompilerNotFoundError, OptionError):
            return False
        return True


def _target(device: str) -> dict[str, Any]:
    """The options of :func:`souffle.compile` that a device of ONNX stands for."""
    try:
        wanted = Device(device)
    except (AttributeError, ValueError) as error:
        raise OptionError(f'device {device!r} is not one of "CPU", "CUDA" and "CUDA:N"') from error
    if wanted.type == DeviceType.CPU:
        return {"target": "cpu"}
    if gpu_arch() is not None:
        return {"target": "cuda", "device": f"cuda:{wanted.device_id}"}
    find_gxx()
    return {"target": "cuda", "device": "cpu", "cubin": False}


def _newest(node: onnx.NodeProto) -> int:
    if node.domain in ("", "ai.onnx"):
        return onnx.defs.onnx_opset_version()
    return onnx.defs.get_schema(node.op_type, domain=node.domain).since_version


is_compatible = SouffleBackend.is_compatible
prepare = SouffleBackend.prepare
run_model = SouffleBackend.run_model
run_node = SouffleBackend.run_node
supports_device = SouffleBackend.supports_device
