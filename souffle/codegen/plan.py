"""What compilation hands to the runtime: kernels, buffers and the order of launches, as plain data.

A :class:`Plan` holds no TVM object, so a saved network runs where TVM is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from souffle.certificate import Certificate
from souffle.codegen.dataflow import Dataflow
from souffle.counted_axes import Counts
from souffle.decision import Barrier, Decision
from souffle.options import Options

__all__ = [
    "PLACES",
    "Buffer",
    "CudaModule",
    "Kernel",
    "Launch",
    "Plan",
    "PredictedKernel",
    "PredictedStage",
    "Resources",
    "Touched",
]

PLACES = ("global", "shared", "local")
"""Where tiles find a tensor: in global memory, in shared memory, in registers."""


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
        ``"input"``, ``"output"``, ``"constant"``, ``"workspace"``, ``"state"``: zero before the first launch, and kept
        from launch to launch, or ``"record"``: the same in memory of the host, in which kernels write a wait that was
        over (:mod:`souffle.watchdog`).
    label : str
        The model's own name for an input or output; the tensor's name otherwise.
    offset : int
        For workspace buffers, bytes from the start of the workspace (a multiple of 256; of 64 for a buffer of the CPU
        target that is a piece of another). Buffers that are never live together may overlap. 0 for other kinds.
    stands_for : str
        The element type under which an input or output is given, where its bytes stand for elements of a small one;
        empty where it is `dtype`.
    counts : tuple of (int, str)
        Of an output: its axes of which only the first positions are there, each with the label of the output that says
        how many (:mod:`souffle.counted_axes`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    label: str
    offset: int = 0
    stands_for: str = ""
    counts: tuple[tuple[int, str], ...] = ()

    @property
    def element_type(self) -> str:
        """The element type of the arrays that callers give or get."""
        return self.stands_for or self.dtype

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
    static_shared_bytes : int
        Of a block.
    spill_store_bytes, spill_load_bytes : int
        Of the kernel and of the functions that it calls.
    stack_bytes : int or None
        Of a thread, in local memory: spilled registers, and arrays that are indexed at run time, of the kernel and of
        the functions that it calls. None in files of before it was kept.
    code_bytes : int or None
        Of machine code, with the functions that it calls. None in files of before it was kept.
    """

    registers: int
    static_shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int | None = None
    code_bytes: int | None = None


@dataclass(frozen=True)
class PredictedStage:
    """What the cost model says of a stage in one launch of a kernel.

    Attributes
    ----------
    name : str
        The stage's (:attr:`souffle.codegen.dataflow.StageUse.label`).
    runs : int
        How often it runs in the launch: the steps of its loop, and once for each equal stage.
    tiles : int
        Of one run.
    registers, shared_bytes : int
        What its block would ask for alone.
    seconds : float
        Of all runs, barriers not counted.
    bound : str
        The term of the cost model that decides: ``"memory"``, ``"l2"``, a unit of the multiprocessors, or ``"chain"``
        for latencies.
    stack_bytes : int or None
        Of a thread, alone, as :class:`Resources` has it; None where it is not known.
    """

    name: str
    runs: int
    tiles: int
    registers: int
    shared_bytes: int
    seconds: float
    bound: str
    stack_bytes: int | None = None


@dataclass(frozen=True)
class PredictedKernel:
    """What the cost model says of one launch of a kernel, on the product that the plan names.

    Attributes
    ----------
    seconds : float
        Launch, barriers and stages.
    launch_seconds, sync_seconds : float
        The launch's and the barriers' part of it.
    blocks_per_sm : int
        Resident blocks that it was predicted with.
    stages : tuple of PredictedStage
        In the order of their first run.
    code_seconds : float
        By which the stages take longer together, for machine code that is fetched from the L2 cache.
    """

    seconds: float
    launch_seconds: float
    sync_seconds: float
    blocks_per_sm: int
    stages: tuple[PredictedStage, ...]
    code_seconds: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function.

    Its parameters are one pointer for each entry of a launch's ``buffers`` and, last, ``int num_blocks``: the grid that
    it was launched with. Every stage loops over its tiles in steps of ``num_blocks``, or of the teams of so many
    blocks, so that any grid of at least one block gives the same result.

    Attributes
    ----------
    name : str
        The function's name in its module's text.
    module : int
        Index into ``Plan.modules``.
    tiles : int
        The most tiles that any of its stages has, those that one block computes together counted once; a larger grid
        than this leaves blocks without work.
    threads : int
        Threads of a block, one-dimensional.
    teams : int
        Of a block: each has an equal part of its threads and of its shared memory, and computes tiles as a block does.
    dynamic_shared_bytes : int
    grid_syncs : int
        Grid-wide barriers of one launch, those in a loop counted for each step. With any, the launch must be
        cooperative and all blocks resident at once.
    resources : Resources or None
    stages : tuple of str
        The names of its stages, in order.
    tes : tuple of str
        The names of the TEs that it computes (of one of its launches; isomorphic layers share a kernel).
    predicted : PredictedKernel or None
        None where no device file describes the GPU.
    barriers : tuple of Barrier
        Why it waits (of one of its launches), in the order of its text; those in a loop once.
    most_blocks : int or None
        With how many blocks it is launched at most, where fewer than fit are predicted to be faster.
    arrivals : int
        How often each block of one launch says that it is done with what stands before.
    flag_waits : tuple of (int, int, int)
        What its tiles wait for instead of barriers (:attr:`souffle.kernel.KernelShape.flag_waits`).
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
    predicted: PredictedKernel | None = None
    barriers: tuple[Barrier, ...] = ()
    most_blocks: int | None = None
    arrivals: int = 0
    flag_waits: tuple[tuple[int, int, int], ...] = ()
    teams: int = 1

    @property
    def cooperative(self) -> bool:
        """Whether all blocks must be on the device at once."""
        return self.grid_syncs > 0 or self.arrivals > 0


@dataclass(frozen=True)
class Touched:
    """What a stage of a launch does with one tensor.

    Attributes
    ----------
    stage : str
        Its name (:attr:`souffle.codegen.dataflow.StageUse.name`).
    tensor : str
        In a loop, the outer tensor of which a step has a part, and of a step before what it is there.
    where : str
        ``"global"``; or ``"shared"`` and ``"local"``, where tiles find it in shared memory or in registers.
    written : bool
        Or read.
    nbytes : int
        Of global memory, of distinct elements, in all of the stage's runs.
    """

    stage: str
    tensor: str
    where: str
    written: bool
    nbytes: int


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
    touched : tuple of Touched
        What these are the sums of, for its stages in the order in which they run. None in files of before it was kept.
    """

    kernel: int
    buffers: tuple[int, ...]
    tes: tuple[str, ...]
    bytes_read: int = 0
    bytes_written: int = 0
    touched: tuple[Touched, ...] = ()


@dataclass(frozen=True)
class CudaModule:
    """CUDA text and what it compiled to.

    Attributes
    ----------
    text : str
    cubin : bytes
        Empty where the network was not compiled for a GPU.
    edited : bool
        Whether a hook replaced the text that was emitted from the TensorIR.
    """

    text: str
    cubin: bytes
    edited: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled network as data.

    Attributes
    ----------
    name : str
    options : Options
        As asked for.
    buffers : tuple of Buffer
        Inputs first, then outputs, constants, workspace and state.
    constants : mapping of str to array
        By buffer name.
    modules : tuple of CudaModule
    kernels : tuple of Kernel
    launches : tuple of Launch
        In the order to run.
    workspace_bytes : int
    decisions : tuple of Decision
        What ``explain`` shows.
    predicted_on : str
        The product that the kernels' times were predicted for; empty where they were not.
    tensor_ir : bytes
        What the texts were emitted from (:mod:`souffle.codegen.tensor_ir`); empty for LLVM code, and in files of before
        it was kept.
    compiler : str
        What ``nvcc --version`` said; empty where it was not run.
    certificate : Certificate or None
        What the compiler proved; None where it was not asked to.
    dataflow : Dataflow or None
        What the program says of the stages, for those who check the kernels; None for LLVM code, and in files of before
        it was kept.
    others : tuple of Plan
        The same network for other processors, of which the runtime takes the one that suits. These have none.
    """

    name: str
    options: Options
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, np.ndarray]
    modules: tuple[CudaModule, ...]
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    workspace_bytes: int
    decisions: tuple[Decision, ...]
    predicted_on: str = ""
    tensor_ir: bytes = b""
    compiler: str = ""
    certificate: Certificate | None = None
    dataflow: Dataflow | None = None
    others: tuple[Plan, ...] = ()

    @property
    def processor(self) -> str:
        """LLVM's name of the processor that LLVM code is for."""
        return self.options.arch.removeprefix("llvm ")

    @property
    def counts(self) -> Counts:
        """The counted axes of outputs, by their labels."""
        return {buffer.label: buffer.counts for buffer in self.buffers if buffer.counts}
