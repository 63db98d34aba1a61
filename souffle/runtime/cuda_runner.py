"""Runs a plan's machine code on a GPU, for any number of threads at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from souffle.codegen.plan import Plan
from souffle.errors import DeviceError, InputError, KernelTimeoutError
from souffle.runtime.cuda import Cuda
from souffle.runtime.cuda_workspace import CudaCode, CudaWorkspace
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination, Signature

__all__ = ["CudaRunner"]

_Result = TypeVar("_Result")


class CudaRunner:
    """A plan made ready on one GPU.

    Modules and constants are there once. A call takes a workspace that no other call has, and makes one where all are
    taken; they are kept for later calls. Outputs are fresh for each call.

    Parameters
    ----------
    plan
        The compiled network.
    cuda
        The device.
    poison
        Set outputs and workspace to all ones (NaN) before each call, so that an element that nobody wrote is seen.
    shared
        Where the constants of other networks are, too.

    Raises
    ------
    CompilerNotFoundError
        If the plan holds no machine code.
    NoGpuError
        If the device is of another architecture.
    DeviceError
        If the driver refuses a module, a kernel or an allocation.
    """

    def __init__(
        self, plan: Plan, cuda: Cuda, *, poison: bool = False, shared: SharedConstants | None = None
    ) -> None:
        self._poison = poison
        with cuda.current():
            self._code = CudaCode(plan, cuda, shared)
            self._idle = [CudaWorkspace(self._code, poison)]
        self.registers = self._code.registers

    @property
    def grids(self) -> tuple[int, ...]:
        """Blocks of each kernel's launches, as they are now."""
        return tuple(self._code.grids)

    def run(
        self,
        signature: Signature,
        values: Sequence[Any],
        wanted: Sequence[Destination | None] = (),
        *,
        graph: bool = False,
    ) -> tuple[Any, ...]:
        """Run once.

        Parameters
        ----------
        signature
            What the inputs must be.
        values
            Arranged inputs: NumPy arrays, or objects with ``__dlpack__``, which are used in place on this GPU (a tensor
            whose address is no multiple of 16 is copied, since kernels load vectors).
        wanted
            Destinations of outputs. Where there is any, the call waits for the device.
        graph
            Replay the captured CUDA graph; inputs and outputs are then copied to and from its fixed places.

        Returns
        -------
        tuple
            What was given for outputs that have a destination. The others are NumPy arrays; where any input was on the
            GPU, :class:`DeviceArray` objects, without waiting for the device.
        """
        wanted = wanted or (None,) * len(signature.produced)
        return self._with_workspace(lambda workspace: workspace.run(signature, values, wanted, graph))

    def capture(self) -> None:
        """Record all launches as one CUDA graph."""
        self._with_workspace(CudaWorkspace.capture)

    def samples(self, signature: Signature, values: Sequence[Any], **options: Any) -> list[float]:
        """Times of runs; see :meth:`CudaWorkspace.samples`."""
        return self._with_workspace(lambda workspace: workspace.samples(signature, values, **options))

    def _with_workspace(self, use: Callable[[CudaWorkspace], _Result]) -> _Result:
        with self._naming_kernels(), self._code.cuda.current():
            workspace = self._idle_workspace() or CudaWorkspace(self._code, self._poison)
            clean = False
            try:
                result = use(workspace)
                clean = True
            except InputError:
                clean = True  # nothing was launched
                raise
            except DeviceError:
                # A kernel that follows one which has ended early works on what that has left: what was first is said.
                workspace.check()
                raise
            finally:
                if clean:
                    self._idle.append(workspace)
                else:
                    # A launch that did not end may have left some of its blocks' arrivals at a barrier; and what it
                    # reads and writes on the host must stay until the device has done with it.
                    workspace.release()
            return result

    def _idle_workspace(self) -> CudaWorkspace | None:
        while True:
            try:
                workspace = self._idle.pop()
            except IndexError:
                return None
            spent = True
            try:
                spent = workspace.spent()
            finally:
                if spent:
                    workspace.release()
            if not spent:
                return workspace

    @contextlib.contextmanager
    def _naming_kernels(self) -> Iterator[None]:
        """Say with every failure which kernels it may come from: the driver reports a fault at any later call."""
        try:
            yield
        except KernelTimeoutError:
            raise  # it names the kernel
        except DeviceError as error:
            plan = self._code.plan
            names = ", ".join(dict.fromkeys(plan.kernels[launch.kernel].name for launch in plan.launches))
            raise DeviceError(f"{plan.name} (kernels {names}): {error}") from error
