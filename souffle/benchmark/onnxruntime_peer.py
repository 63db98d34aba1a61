"""ONNX Runtime in a benchmark: its own kernels on the processor or a GPU, and TensorRT behind its interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from souffle.benchmark.gpu_cache import evict_gpu_caches
from souffle.benchmark.host_way import HostWay
from souffle.benchmark.peer import HOST, LAUNCHES, Setting, Way

try:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as raised
except ImportError:
    onnxruntime = raised = None

__all__ = ["OnnxRuntimePeer"]

_RAISES = ("EPFail", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
"""Which have no base of their own."""
_GPU = {"ort": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}


class OnnxRuntimePeer:
    """ONNX Runtime with all of its optimizations.

    On a GPU inputs and outputs stay there, and the host waits for each run, so that the wall clock has what a launch
    and the wait cost beside the kernels.

    Parameters
    ----------
    name : str
        ``"ort"``, or ``"tensorrt"`` for TensorRT behind it, which is for a GPU alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        found = tuple(getattr(raised, kind) for kind in _RAISES if hasattr(raised, kind))
        self.failures: tuple[type[Exception], ...] = (*found, RuntimeError, ValueError)

    def lacking(self, setting: Setting) -> str:
        """Why it cannot take part here; empty where it can."""
        if onnxruntime is None:
            return "ONNX Runtime is not installed: pip install onnxruntime"
        if setting.device == "cpu":
            return "TensorRT needs a GPU" if self.name == "tensorrt" else ""
        if setting.precision not in ("fp32", "tf32x3", "tf32"):
            return f"a model of fp32 is not computed in {setting.precision} precision by it"
        if _GPU[self.name] not in onnxruntime.get_available_providers():
            return f"this ONNX Runtime has no {_GPU[self.name]}: pip install onnxruntime-gpu, with what it asks for"
        return ""

    def version(self) -> str:
        """Of ONNX Runtime."""
        return onnxruntime.__version__

    def prepare(self, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], setting: Setting) -> Sequence[Way]:
        """A session, and one way to run it."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads, options.inter_op_num_threads = setting.threads, 1
        if setting.device == "cpu":
            session = _session(model, options, "CPUExecutionProvider", {})
            names, given = [output.name for output in session.get_outputs()], dict(inputs)
            way = HostWay(lambda: session.run(names, given), lambda found: dict(zip(names, found)), form=HOST)
            return [way]
        # What the provider does not take would run on the processor otherwise, and count as the GPU's.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        tf32 = {"use_tf32": int(setting.precision == "tf32")} if self.name == "ort" else {}
        return [_on_gpu(_session(model, options, _GPU[self.name], tf32), inputs)]


def _session(model: onnx.ModelProto, options: object, provider: str, settings: Mapping[str, int]) -> object:
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[(provider, dict(settings))])


def _on_gpu(session: object, inputs: Mapping[str, np.ndarray]) -> Way:
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    names = [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name, "cuda")

    def call() -> list[object]:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()

    return HostWay(
        call,
        lambda found: {name: value.numpy() for name, value in zip(names, found)},
        form=LAUNCHES,
        clock="wall clock, with the host's wait",
        evict=evict_gpu_caches,
    )
