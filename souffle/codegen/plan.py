"""What compilation hands to the runtime: kernels, buffers and the order of launches, as plain data.

A :class:`Plan` holds no TVM object, so a saved network runs where TVM is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Buffer", "CudaModule", "Kernel", "Launch", "Plan", "Resources"]


@dataclass(frozen=True)
class Buffer:
    """One tensor in global memory.

    Attributes
    ----------
    name : str
        The tensor's name in the TE program.
    shape : tuple of int
    dtype : str
    kind : str
        ``"input"``, ``"output"``, ``"constant"`` or ``"workspace"``.
    label : str
        The model's own name for an input or output; the tensor's name otherwise.
    offset : int
        For workspace buffers, bytes from the start of the workspace (a multiple of 256). Buffers that are never live
        together may overlap. 0 for other kinds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    label: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor (bool takes one byte an element)."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size * (1 if self.dtype == "bool" else np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class Resources:
    """What the CUDA compiler reports for a kernel; ``None`` for all where no compiler was run.

    Attributes
    ----------
    registers : int
        Per thread.
    static_shared_bytes, spill_store_bytes, spill_load_bytes : int
    """

    registers: int
    static_shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function.

    Its parameters are one pointer for each entry of a launch's ``buffers`` and, last, ``int num_blocks``: the grid that
    it was launched with. Every stage loops over its tiles in steps of ``num_blocks``, so that any grid of at least one
    block gives the same result.

    Attributes
    ----------
    name : str
        The function's name in its module's text.
    module : int
        Index into ``Plan.modules``.
    tiles : int
        The most tiles that any of its stages has; a larger grid than this leaves blocks without work.
    threads : int
        Threads of a block, one-dimensional.
    dynamic_shared_bytes : int
    grid_syncs : int
        Grid-wide barriers of one launch, those in a loop counted for each step. With any, the launch must be
        cooperative and all blocks resident at once.
    resources : Resources or None
    stages : tuple of str
        The names of its stages, in order.
    tes : tuple of str
        The names of the TEs that it computes (of one of its launches; isomorphic layers share a kernel).
    """

    name: str
    module: int
    tiles: int
    threads: int
    dynamic_shared_bytes: int
    grid_syncs: int
    resources: Resources | None
    stages: tuple[str, ...]
    tes: tuple[str, ...]

    @property
    def cooperative(self) -> bool:
        """Whether all blocks must be on the device at once."""
        return self.grid_syncs > 0


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes
    ----------
    kernel : int
        Index into ``Plan.kernels``.
    buffers : tuple of int
        Indices into ``Plan.buffers``, one for each pointer parameter.
    tes : tuple of str
        The TEs that it computes.
    bytes_read, bytes_written : int
        Global memory that its stages touch: for each stage, the distinct elements of each tensor that it reads or
        writes, in bytes.
    """

    kernel: int
    buffers: tuple[int, ...]
    tes: tuple[str, ...]
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class CudaModule:
    """CUDA text and what it compiled to: ``cubin`` is empty where the network was not compiled for a GPU."""

    text: str
    cubin: bytes


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled network as data.

    Attributes
    ----------
    name, level, precision, partition, arch : str
        As asked for; ``arch`` such as ``"sm_90"``.
    buffers : tuple of Buffer
        Inputs first, then outputs, constants and workspace.
    constants : mapping of str to array
        By buffer name.
    modules : tuple of CudaModule
    kernels : tuple of Kernel
    launches : tuple of Launch
        In the order to run.
    workspace_bytes : int
    decisions : tuple of (stage, subject, accepted, reason)
        What ``explain`` shows.
    """

    name: str
    level: str
    precision: str
    partition: str
    arch: str
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, np.ndarray]
    modules: tuple[CudaModule, ...]
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    workspace_bytes: int
    decisions: tuple[tuple[str, str, bool, str], ...]
