"""One kernel and its one launch: what of a plan goes to a board."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from souffle.codegen.plan import Plan
from souffle.errors import CompilerNotFoundError, OptionError

__all__ = ["BoardKernel", "BoardTensor"]

_MAX_GRID = 2**31 - 1
_UNASKED_SHARED_BYTES = 48 * 1024
"""Of a block, static and dynamic, that a kernel is launched with though nobody has allowed it more."""


@dataclass(frozen=True)
class BoardTensor:
    """One pointer of a kernel.

    Attributes
    ----------
    name : str
    kind : str
        ``"input"`` or ``"output"``.
    shape : tuple of int
    dtype : str
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that are there on the board; one where there are no elements."""
        return max(1, prod(self.shape) * np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class BoardKernel:
    """A kernel with its launch, which is that of :class:`souffle.runtime.cuda_workspace.CudaCode`.

    Attributes
    ----------
    name : str
        In the machine code.
    arch : str
        That the machine code is for.
    grid, threads : int
        Blocks, and threads of a block, both of one dimension.
    shared_bytes : int
        Of dynamic shared memory.
    tensors : tuple of BoardTensor
        In the order of its pointers; behind them it is given its grid.
    code : bytes
        Machine code that holds it.
    """

    name: str
    arch: str
    grid: int
    threads: int
    shared_bytes: int
    tensors: tuple[BoardTensor, ...]
    code: bytes = field(repr=False)

    @staticmethod
    def of_plan(plan: Plan) -> BoardKernel:
        """The kernel of a plan.

        Raises
        ------
        CompilerNotFoundError
            If there is no machine code.
        OptionError
            If the plan is more than one launch of one kernel on inputs and outputs, or such a launch as TVM's runtime
            would make differently.
        """
        if len(plan.kernels) != 1 or len(plan.launches) != 1:
            raise OptionError(
                f"{plan.name} is {len(plan.launches)} launches of {len(plan.kernels)} kernels; a board measures one "
                "launch of one kernel"
            )
        (kernel,), (launch,) = plan.kernels, plan.launches
        code = plan.modules[kernel.module].cubin
        if not code:
            raise CompilerNotFoundError(
                f"{plan.name} holds no machine code, which a board is sent: compile it where nvcc (CUDA 13) is"
            )
        if kernel.cooperative:
            raise OptionError(f"kernel {kernel.name} waits for its grid, of which a board says not how much it holds")
        static = kernel.resources.static_shared_bytes if kernel.resources is not None else 0
        shared = kernel.dynamic_shared_bytes
        if shared < _UNASKED_SHARED_BYTES < static + shared:
            # TVM's runtime looks at the dynamic part alone.
            raise OptionError(
                f"kernel {kernel.name} has {static} bytes of static and {shared} of dynamic shared memory, more than "
                f"{_UNASKED_SHARED_BYTES} together, for which TVM's runtime does not ask"
            )
        buffers = [plan.buffers[index] for index in launch.buffers]
        others = [buffer.name for buffer in buffers if buffer.kind not in ("input", "output")]
        if others:
            raise OptionError(f"{plan.name} has more than inputs and outputs ({', '.join(others)}); a stage has not")
        tensors = tuple(BoardTensor(buffer.name, buffer.kind, buffer.shape, buffer.dtype) for buffer in buffers)
        grid = max(1, min(kernel.tiles, kernel.most_blocks or _MAX_GRID, _MAX_GRID))
        return BoardKernel(kernel.name, plan.options.arch, grid, kernel.threads, shared, tensors, code)
