"""TVM in a benchmark: its own importer of ONNX and its default pipeline for the target, as a user of it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from souffle.benchmark.gpu_cache import evict_gpu_caches
from souffle.benchmark.host_way import HostWay
from souffle.benchmark.peer import HOST, LAUNCHES, Setting, Way
from souffle.schedule.cpu import host_target, use_cores

__all__ = ["TvmPeer"]


class TvmPeer:
    """TVM's Relax without tuning: on the processor its kernels are loops that LLVM vectorizes."""

    failures: tuple[type[Exception], ...] = (
        *(RuntimeError, ValueError, TypeError, AttributeError, LookupError),
        *(NotImplementedError, AssertionError, tvm.error.OpNotImplemented),
    )
    """What its importer raises has no base of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lacking(self, setting: Setting) -> str:
        """Why it cannot take part here; empty where it can."""
        if setting.device == "cuda" and not tvm.runtime.enabled("cuda"):
            return "this TVM was built without CUDA; build it from source with USE_CUDA to have it here"
        if setting.precision not in ("fp32", "tf32x3"):
            return f"its default pipeline computes fp32, not {setting.precision}"
        return ""

    def version(self) -> str:
        """Of TVM."""
        return tvm.__version__

    def prepare(self, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], setting: Setting) -> Sequence[Way]:
        """A virtual machine, and one way to run it."""
        gpu = setting.device == "cuda"
        target = tvm.target.Target.from_device(tvm.cuda()) if gpu else host_target()
        device = tvm.cuda() if gpu else tvm.cpu()
        module = from_onnx(model, keep_params_in_input=False)
        if not gpu:
            use_cores(target)
        machine = relax.VirtualMachine(tvm.compile(module, target=target), device)
        constants = {item.name for item in model.graph.initializer}
        names = [item.name for item in model.graph.input if item.name not in constants]
        arguments = [tvm.runtime.tensor(inputs[name], device=device) for name in names]
        outputs = [item.name for item in model.graph.output]

        def call() -> object:
            found = machine["main"](*arguments)
            device.sync()
            return found

        def named(found: object) -> Mapping[str, np.ndarray]:
            values = [found] if isinstance(found, tvm.runtime.Tensor) else list(found)
            return {name: value.numpy() for name, value in zip(outputs, values, strict=True)}

        if not gpu:
            return [HostWay(call, named, form=HOST)]
        clock = "wall clock, with the host's wait"
        return [HostWay(call, named, form=LAUNCHES, clock=clock, evict=evict_gpu_caches)]
