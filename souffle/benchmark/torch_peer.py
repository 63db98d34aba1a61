"""PyTorch in a benchmark: eager, by Inductor, and by XLA through torch_xla, of the model traced from its graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from souffle.benchmark.gpu_cache import evict_gpu_caches
from souffle.benchmark.host_way import HostWay
from souffle.benchmark.peer import GRAPH, HOST, LAUNCHES, Setting, Way
from souffle.benchmark.torch_graph import to_torch

try:
    import torch
except ImportError:
    torch = None

__all__ = ["TorchPeer", "captured"]

_MODES: dict[str, dict[str, str] | None] = {
    "eager": None,
    "inductor": {"mode": "default"},
    # What is captured here is one graph, and not one in another.
    "autotuned": {"mode": "max-autotune-no-cudagraphs"},
    "xla": {"backend": "openxla"},
}
"""What ``torch.compile`` is given, by the peers' names."""
_WARM_CALLS = 3
"""Before a capture: what libraries allocate and choose is there then."""


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, and the outputs into which it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


class _EventWay:
    """A run that two CUDA events of PyTorch's stream stand around."""

    clock, untimed = "CUDA events", ""

    def __init__(self, run: Callable[[], Any], outputs: Callable[[], Mapping[str, np.ndarray]], form: str) -> None:
        self.form, self._run, self._outputs = form, run, outputs

    def outputs(self) -> Mapping[str, np.ndarray]:
        return self._outputs()

    def sample(self, cold: bool) -> float:
        if cold:
            evict_gpu_caches()
        else:
            self._run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


class TorchPeer:
    """PyTorch. Beside mixed precision all weights and inputs are in float16, as its users have them.

    How many threads it takes, and whether products are rounded to TF32, is set for the whole process, and stays.

    Parameters
    ----------
    name : str
        ``"eager"``, ``"inductor"``, ``"autotuned"`` or ``"xla"``.
    """

    failures: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError)

    def __init__(self, name: str) -> None:
        self.name = name

    def lacking(self, setting: Setting) -> str:
        """Why it cannot take part here; empty where it can."""
        if torch is None:
            return "PyTorch is not installed: pip install torch"
        if self.name == "xla":
            try:
                importlib.import_module("torch_xla")
            except ImportError as error:
                return f"torch_xla is not usable ({error}): pip install torch_xla, of PyTorch's version"
            if setting.device != "cpu":
                return "this peer has XLA on the processor alone"
        if setting.device == "cuda" and not torch.cuda.is_available():
            return "PyTorch finds no GPU here"
        if setting.device == "cpu" and setting.precision == "mixed":
            return "the processor computes in fp32 here"
        return ""

    def version(self) -> str:
        """Of PyTorch."""
        return str(torch.__version__)

    def prepare(self, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], setting: Setting) -> Sequence[Way]:
        """The traced module, compiled if the peer does so; on a GPU as a CUDA graph and call by call.

        Raises
        ------
        ValueError
            If the model has an operator that is not translated.
        """
        torch.set_num_threads(setting.threads)
        tf32 = setting.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
        device = str(importlib.import_module("torch_xla").device()) if self.name == "xla" else setting.device
        module = to_torch(model, device)
        constants = {item.name for item in model.graph.initializer}
        names = [item.name for item in model.graph.input if item.name not in constants]
        arguments = [torch.from_numpy(np.array(inputs[name])).to(device) for name in names]
        halves = setting.precision == "mixed"
        if halves:
            module = module.half()
            arguments = [value.half() if value.is_floating_point() else value for value in arguments]
        how = _MODES[self.name]
        if how is not None:
            module = torch.compile(module, fullgraph=True, **how)
        results = [item.name for item in model.graph.output]

        # XLA gives results before they are computed: who takes them to the processor waits.
        settled = (lambda found: [value.cpu() for value in found]) if self.name == "xla" else (lambda found: found)

        def call() -> Any:
            with torch.inference_mode():
                return settled(module(*arguments))

        def named(found: Any) -> Mapping[str, np.ndarray]:
            values = ((value.float() if halves else value).cpu().numpy() for value in found)
            return dict(zip(results, values, strict=True))

        if setting.device == "cpu":
            return [HostWay(call, named, form=HOST)]
        graph, outputs = captured(call)

        def replayed() -> Mapping[str, np.ndarray]:
            graph.replay()
            return named(outputs)

        return [_EventWay(graph.replay, replayed, GRAPH), _EventWay(call, lambda: named(call()), LAUNCHES)]
