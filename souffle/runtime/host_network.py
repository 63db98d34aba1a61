"""A network compiled for ``target="cpu"``: LLVM code of the transformed program, called function by function."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from souffle.codegen.plan import Plan
from souffle.errors import ArtifactError
from souffle.runtime import artifact
from souffle.runtime.explain import explain
from souffle.runtime.network import KernelInfo, signature_of
from souffle.runtime.signature import Signature
from souffle.schedule.cpu import host_target, use_cores

__all__ = ["HostNetwork"]


class HostNetwork:
    """A compiled network that runs on this machine's processor.

    Called and saved as :class:`souffle.runtime.Network`. The machine code is loaded by the first call.

    Parameters
    ----------
    plan : Plan
        From :func:`souffle.codegen.llvm.assemble_host`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._signature = signature_of(plan)
        self._target = host_target()
        self._tensors: list[tvm.runtime.Tensor | None] = []
        self._calls: list[tuple[Any, tuple[int, ...]]] = []

    def __repr__(self) -> str:
        return f"HostNetwork({self._plan.name!r}, {self._plan.level}, {self._plan.arch})"

    @property
    def plan(self) -> Plan:
        """What was compiled, as data."""
        return self._plan

    @property
    def certificate(self) -> None:
        """None: what is proven is CUDA kernels (:attr:`souffle.runtime.Network.certificate`), and this is LLVM code."""
        return None

    @property
    def device(self) -> str:
        """``"host"``: LLVM code, not CUDA text."""
        return "host"

    @property
    def signature(self) -> Signature:
        """The inputs."""
        return self._signature

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """The functions, in order of their first call."""
        counts = [0] * len(self._plan.kernels)
        for launch in self._plan.launches:
            counts[launch.kernel] += 1
        return tuple(
            KernelInfo(k.name, "", (1, 1, 1), (1, 1, 1), None, 0, None, 0, k.stages, k.tes, counts[i])
            for i, k in enumerate(self._plan.kernels)
        )

    def explain(self) -> str:
        """What was compiled and every decision with its reason."""
        return explain(self._plan)

    def save(self, path: str | Path, *, constants: str = "stored") -> None:
        """Write a ``.souffle`` file (:func:`souffle.runtime.artifact.save`)."""
        artifact.save(self._plan, path, constants=constants)

    def open(self) -> None:
        """Load the machine code and place the constants now instead of at the first call."""
        if self._calls:
            return
        plan = self._plan
        with tempfile.TemporaryDirectory(prefix="souffle-host-") as folder:
            library = Path(folder) / "network.so"
            library.write_bytes(plan.modules[0].cubin)
            try:
                module = tvm.runtime.load_module(str(library))
            except (RuntimeError, OSError) as error:
                raise ArtifactError(
                    f"the machine code of {plan.name} was made for {plan.arch} and cannot be loaded here; "
                    f"compile the model on this machine: {error}"
                ) from error
        for buffer in plan.buffers:
            if buffer.kind == "constant":
                # ascontiguousarray makes a scalar one-dimensional
                held = np.ascontiguousarray(plan.constants[buffer.name]).reshape(buffer.shape)
                self._tensors.append(tvm.runtime.tensor(held))
            elif buffer.kind == "workspace":
                self._tensors.append(None)
            else:
                self._tensors.append(tvm.runtime.empty(buffer.shape, buffer.dtype))
        self._place_workspace()
        functions = [module.get_function(kernel.name, query_imports=True) for kernel in plan.kernels]
        self._calls = [(functions[launch.kernel], launch.buffers) for launch in plan.launches]

    def _place_workspace(self) -> None:
        """Give the buffers that share an offset, a shape and a type one tensor; others get their own.

        TVM's tensors are whole allocations, so overlapping buffers of different shapes are kept apart.
        """
        shared: dict[tuple[int, tuple[int, ...], str], tvm.runtime.Tensor] = {}
        for index, buffer in enumerate(self._plan.buffers):
            if buffer.kind == "workspace":
                key = (buffer.offset, buffer.shape, buffer.dtype)
                if key not in shared:
                    shared[key] = tvm.runtime.empty(buffer.shape, buffer.dtype)
                self._tensors[index] = shared[key]

    def __call__(self, *args: Any) -> dict[str, np.ndarray]:
        """Run once: one dict of inputs by name, or inputs by position.

        Raises
        ------
        InputError
            If an input has an unknown name, or another shape or dtype than it must; nothing is cast.
        """
        arrays = self._signature.host_arrays(self._signature.arrange(args))
        self.open()
        given = iter(arrays)
        for tensor, buffer in zip(self._tensors, self._plan.buffers, strict=True):
            if buffer.kind == "input":
                tensor.copyfrom(next(given))
        use_cores(self._target)
        for function, buffers in self._calls:
            function(*(self._tensors[i] for i in buffers))
        return {
            buffer.label: tensor.numpy()
            for tensor, buffer in zip(self._tensors, self._plan.buffers, strict=True)
            if buffer.kind == "output"
        }
