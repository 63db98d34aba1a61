"""A compiled CUDA text and its launches on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path

import numpy as np

from souffle.emulator.abi import Arg, FindingRecord, KernelEntry, Result, Spec, TrafficRecord, WaitRecord, load_runtime
from souffle.emulator.checked_memory import CheckedBuffer, CheckedMemory
from souffle.emulator.decode import findings_of, traffic_of, waits_of
from souffle.emulator.divided import divided
from souffle.emulator.ptx_translation import translate_asm
from souffle.emulator.reports import BarrierError, CheckError, Finding, LaunchReport, Traffic
from souffle.emulator.text_places import TextMap
from souffle.emulator.text_scan import (
    KernelDeclaration,
    blank_comments,
    dynamic_shared_names,
    find_kernels,
    uses_atomics,
    uses_releases,
)
from souffle.emulator.toolchain import build_kernel_library, build_runtime_library, default_cache_dir
from souffle.errors import CudaCompileError, DeviceError

__all__ = ["CpuModule", "compile_text"]

DYNAMIC_SHARED_LIMIT = 227 * 1024  # bytes one block may ask for on a Hopper GPU
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_THREADS = 1024
_SPIN_SECONDS = 10.0
_FINDINGS = 20
_COPIES = 256  # records of barriers that the optimizer copied, which are left out once lines are known
_WAITS = 64


def _epilogue(kernels: tuple[KernelDeclaration, ...], dynamic: tuple[str, ...]) -> str:
    """Give the text that follows the translated CUDA text: entry points, and storage for dynamic shared memory."""
    rows = ", ".join(f'souffle_describe<&{k.name}>("{k.name}", &{k.name})' for k in kernels)
    lines = [""]
    if dynamic:
        labels = "\\n".join(f".hidden {n}\\n.globl {n}\\n.type {n}, @object\\n{n}:" for n in dynamic)
        lines.append(f'SOUFFLE_DYNAMIC_SHARED({DYNAMIC_SHARED_LIMIT}, "{labels}")')
    lines.append(f"SOUFFLE_EXPORT const SouffleKernel souffle_kernels[] = {{{rows}}};")
    return "\n".join(lines) + "\n"


class CpuModule:
    """A CUDA text that has been compiled for the CPU; see :func:`compile_text`.

    Attributes
    ----------
    kernels
        Names of the text's kernels, in the order of the text.
    library
        The compiled library.
    checked
        Whether it was compiled with checks.
    """

    def __init__(
        self,
        library: Path,
        declarations: tuple[KernelDeclaration, ...],
        *,
        code: str,
        ordered: bool,
        releases: bool,
        runtime: Path,
        checked: bool,
    ) -> None:
        self.library, self.checked = library, checked
        self._runtime = load_runtime(runtime)
        self._handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL | os.RTLD_NOW)
        table = (KernelEntry * len(declarations)).in_dll(self._handle, "souffle_kernels")
        self._table = {entry.name.decode(): entry for entry in table}
        self._bounds = {d.name: d.launch_bounds for d in declarations}
        self._map = TextMap(library, self._handle, code)
        # Where results may depend on the order of blocks, "fixed" has to mean one order.
        self._ordered, self._releases = ordered, releases
        self.kernels = tuple(self._table)

    def memory(self, buffers: Sequence[CheckedBuffer], workspace_bytes: int = 0) -> CheckedMemory:
        """Make a memory for several checked launches; its arrays are then the arguments."""
        return CheckedMemory(self._runtime, buffers, workspace_bytes)

    def _entry(self, kernel: str) -> KernelEntry:
        if kernel not in self._table:
            raise DeviceError(f"no kernel {kernel!r} in the text; it has {', '.join(self.kernels) or 'none'}")
        return self._table[kernel]

    def launch(
        self,
        kernel: str,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[np.ndarray | int | float],
        shared_bytes: int = 0,
        cooperative: bool = False,
        order: str = "fixed",
        seed: int = 0,
        workers: int | None = None,
        timeout_seconds: float = 600.0,
        memory: CheckedMemory | None = None,
        uninitialized: Collection[int] = (),
        max_findings: int = _FINDINGS,
        raises: bool = True,
    ) -> LaunchReport:
        """Run a kernel to its end.

        Parameters
        ----------
        kernel
            Name of a ``__global__`` function of the text.
        grid, block
            Blocks and threads per block along x, y, z.
        args
            One per parameter: a C-contiguous array for a pointer, an integer or a float for a scalar, which is
            converted to the parameter's type. Arrays are passed without a copy and written in place.
        shared_bytes
            Size of dynamic shared memory, in bytes.
        cooperative
            Allow grid-wide barriers. Every block then exists at once.
        order
            ``"fixed"``: threads and blocks run in the order of their indices. ``"shuffled"``: both in an order drawn
            from ``seed``, with blocks interleaved at barriers when cooperative; the same seed gives the same run.
        workers
            OS threads that run blocks. None takes all cores for ``"fixed"``, or one where the text uses atomics or
            releases, so that a run can be repeated exactly. One is always taken for ``"shuffled"``, and for checked
            texts that release memory to other blocks.
        timeout_seconds
            Wall time after which the launch is stopped.
        memory
            Of a checked text, the memory whose arrays the pointer arguments are. Without one the arguments are copied
            to a memory of this launch and back; arrays that NumPy holds to be read-only must then not be written.
        uninitialized
            Without ``memory``, the arguments that hold no values yet, by position.
        max_findings
            Of a checked text, how many places of the text findings are kept of.
        raises
            Raise an error for findings; otherwise they are only in the report.

        Returns
        -------
        LaunchReport
            Barriers executed, and the time taken; of a checked text, its traffic and the findings.

        Raises
        ------
        CheckError
            There are findings.
        BarrierError
            A barrier under divergent control, or a deadlock.
        DeviceError
            The launch is not valid, or the kernel failed, as by a fault. The message names the kernel, the block and
            the thread.
        """
        entry = self._entry(kernel)
        grid, block = _extent("grid", grid, _MAX_GRID), _extent("block", block, _MAX_BLOCK)
        self._demand_fitting(kernel, grid, block, shared_bytes)
        if order not in ("fixed", "shuffled"):
            raise DeviceError(f"order {order!r} is neither 'fixed' nor 'shuffled'")
        if workers is None:
            workers = 1 if self._ordered else len(os.sched_getaffinity(0))
        copied: dict[int, np.ndarray] = {}
        if self.checked and memory is None:
            memory, args, copied = self._copy_in(args, uninitialized)
        has_dynamic = hasattr(self._handle, "souffle_dynamic_shared")
        spec = Spec(
            kernel=kernel.encode(),
            entry=entry.entry,
            args=_pack(kernel, entry.kinds.decode(), args),
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(*block),
            shared_bytes=shared_bytes,
            dynamic_capacity=DYNAMIC_SHARED_LIMIT if has_dynamic else 0,
            seed=seed % 2**64,
            cooperative=int(cooperative),
            shuffled=int(order == "shuffled"),
            workers=workers,
            timeout_seconds=timeout_seconds,
            # A deadlock is to be found before the time is over.
            spin_seconds=min(_SPIN_SECONDS, timeout_seconds / 2),
            dynamic_shared=ctypes.cast(self._handle.souffle_dynamic_shared, ctypes.c_void_p) if has_dynamic else None,
            shared_anchor=ctypes.cast(self._handle.souffle_shared_anchor, ctypes.c_void_p),
        )
        records = self._records(spec, memory if self.checked else None, max_findings)
        result = Result()
        self._runtime.souffle_launch(ctypes.byref(spec), ctypes.byref(result))
        for index, array in copied.items():
            array[...] = memory.arrays[index]
        findings = findings_of(
            self._map, records.findings[: result.findings], kernel, memory, grid, block, shared_bytes
        )
        findings = _told_apart(findings, result)
        left_out = result.findings_left_out + sum(finding.count for finding in findings[max_findings:])
        findings = findings[:max_findings]
        message = result.message.decode(errors="replace") if result.failed else ""
        if result.waits:
            raise BarrierError(message, waits_of(self._map, records.waits[: result.waits]), findings)
        message += _near_argument(result.fault_address, args)
        report = LaunchReport(kernel, result.grid_syncs, result.block_barriers, result.seconds)
        if self.checked:
            report = dataclasses.replace(
                report,
                buffers=records.moved(memory),
                shared=traffic_of(result.shared),
                findings=findings,
                findings_left_out=left_out,
                races_checked=not result.synchronizes,
            )
        if findings and (raises or message):
            raise CheckError(report, message)
        if message:
            raise DeviceError(message)
        return report

    def _demand_fitting(
        self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> None:
        """Refuse a launch that a GPU would not take, or that is too large here."""
        threads, bounds = prod(block), self._bounds[kernel]
        if threads > _MAX_THREADS:
            raise DeviceError(f"kernel {kernel}: a block of {block} has {threads} threads, more than {_MAX_THREADS}")
        if bounds is not None and threads > bounds:
            raise DeviceError(f"kernel {kernel}: a block of {block} exceeds its __launch_bounds__({bounds})")
        if prod(grid) >= 2**31:
            raise DeviceError(f"kernel {kernel}: a grid of {grid} has more blocks than the CPU device can run")
        if not 0 <= shared_bytes <= DYNAMIC_SHARED_LIMIT:
            raise DeviceError(
                f"kernel {kernel}: {shared_bytes} bytes of dynamic shared memory, not in 0 to {DYNAMIC_SHARED_LIMIT}"
            )

    def _records(self, spec: Spec, memory: CheckedMemory | None, max_findings: int) -> _Records:
        """Room for what a launch tells, which `spec` points to; `memory` is that of a checked text."""
        waits, findings, traffic = (WaitRecord * _WAITS)(), (FindingRecord * (max_findings + _COPIES))(), None
        spec.wait, spec.wait_capacity = waits, _WAITS
        if memory is not None:
            traffic = (TrafficRecord * memory.arena.slots)()
            ranges = [value for array in self._map.shared for value in (array.offset, array.bytes)]
            spec.arena, spec.traffic = ctypes.pointer(memory.arena), traffic
            spec.shared_range, spec.shared_ranges = (ctypes.c_uint64 * len(ranges))(*ranges), len(ranges) // 2
            spec.finding, spec.finding_capacity = findings, len(findings)
            spec.releases = int(self._releases)
        return _Records(waits, findings, traffic)

    def _copy_in(
        self, args: Sequence[np.ndarray | int | float], uninitialized: Collection[int]
    ) -> tuple[CheckedMemory, list[np.ndarray | int | float], dict[int, np.ndarray]]:
        """A memory that holds the array arguments, the arguments in it, and what to copy its arrays back to."""
        placed: dict[int, int] = {}
        buffers: list[CheckedBuffer] = []
        origins: list[np.ndarray] = []
        for i, value in enumerate(args):
            if isinstance(value, np.ndarray) and value.ndim > 0 and value.ctypes.data not in placed:
                placed[value.ctypes.data] = len(buffers)
                name, known = f"argument {i}", i not in uninitialized
                buffers.append(CheckedBuffer(name, value.shape, str(value.dtype), value.flags.writeable, known))
                origins.append(value)
        memory = self.memory(buffers)
        memory.begin()
        for origin, buffer, array in zip(origins, buffers, memory.arrays):
            if buffer.initialized:
                array[...] = origin
        moved = [memory.arrays[placed[v.ctypes.data]] if isinstance(v, np.ndarray) and v.ndim > 0 else v for v in args]
        return memory, moved, {i: origin for i, origin in enumerate(origins) if origin.flags.writeable}


@dataclasses.dataclass(frozen=True, eq=False)
class _Records:
    """What the runtime writes during a launch; ``traffic`` of a checked text alone."""

    waits: ctypes.Array
    findings: ctypes.Array
    traffic: ctypes.Array | None

    def moved(self, memory: CheckedMemory) -> tuple[tuple[str, Traffic], ...]:
        """The traffic of each buffer that has any."""
        return tuple(
            (buffer.name, traffic_of(record))
            for buffer, record in zip(memory.buffers, self.traffic)
            if record.read or record.written or record.atomics
        )


def _told_apart(findings: tuple[Finding, ...], result: Result) -> tuple[Finding, ...]:
    """Findings without the races of what may well be ordered, by means that are not looked into."""
    if result.synchronizes:
        findings = tuple(finding for finding in findings if finding.kind != "race")
    if result.half_barriers:
        findings = tuple(finding for finding in findings if not finding.within_block)
    return findings


def _extent(what: str, value: Sequence[int], limits: tuple[int, int, int]) -> tuple[int, int, int]:
    extent = tuple(int(v) for v in value)
    if len(extent) != 3 or any(not 1 <= v <= limit for v, limit in zip(extent, limits)):
        raise DeviceError(f"{what} {tuple(value)}: three extents from 1 to {limits} are needed")
    return extent


def _pack(kernel: str, kinds: str, args: Sequence[np.ndarray | int | float]) -> ctypes.Array:
    if len(args) != len(kinds):
        raise DeviceError(f"kernel {kernel} has {len(kinds)} parameters, {len(args)} arguments were given")
    packed = (Arg * max(len(args), 1))()
    for i, (kind, value) in enumerate(zip(kinds, args)):
        where = f"kernel {kernel}, argument {i}"
        if isinstance(value, np.ndarray) and value.ndim == 0 and kind != "p":
            value = value[()]
        if isinstance(value, np.ndarray):
            if kind != "p":
                raise DeviceError(f"{where}: an array of shape {value.shape} for a parameter that is no pointer")
            if not value.flags.c_contiguous:
                raise DeviceError(f"{where}: the array of shape {value.shape} is not C-contiguous")
            packed[i].p = value.ctypes.data
        elif kind == "p":
            raise DeviceError(f"{where}: {value!r} for a pointer parameter; pass an array")
        elif isinstance(value, (bool, int, np.integer, np.bool_)):
            packed[i].i = int(value) if int(value) < 2**63 else int(value) - 2**64
            packed[i].d = float(value)
        elif isinstance(value, (float, np.floating)):
            if kind == "i":
                raise DeviceError(f"{where}: {value!r} for an integer parameter")
            packed[i].d = float(value)
        else:
            raise DeviceError(f"{where}: a {type(value).__name__} is neither an array nor a number")
        if kind == "?":
            raise DeviceError(f"{where}: the parameter's type is neither a pointer nor a number")
    return packed


def _near_argument(address: int, args: Sequence[np.ndarray | int | float]) -> str:
    """Say which array a faulting address is close to."""
    best: tuple[int, str] | None = None
    for i, value in enumerate(args):
        if not address or not isinstance(value, np.ndarray):
            continue
        begin, end = value.ctypes.data, value.ctypes.data + value.nbytes
        past = address - end if address >= end else begin - address
        side = "past the end" if address >= end else "before the start"
        if begin <= address < end:
            past, side = 0, "inside"
        if best is None or past < best[0]:
            best = (past, f" ({past} bytes {side} of argument {i}, shape {value.shape}, {value.dtype})")
    return best[1] if best and best[0] < 2**30 else ""


def compile_text(
    cuda_text: str, *, cache_dir: Path | None = None, checked: bool = False, base: str | None = None
) -> CpuModule:
    """Compile CUDA C++ text for the CPU.

    The text is what nvcc gets. Only its inline PTX is rewritten, and g++ reads it with headers of CUDA's names that
    stand in for CUDA's own.

    Parameters
    ----------
    cuda_text
        The text of one or more kernels.
    cache_dir
        Where compiled libraries are kept. None takes Souffle's cache (:func:`souffle.cache.cache_root`).
    checked
        Look at each access to global and shared memory: bounds, initialization, order of blocks; and count them.
    base
        Another text, which is compiled once: of one that differs from it in few functions, only these are compiled.

    Raises
    ------
    CudaCompileError
        The text has no kernel, inline PTX without a stand-in, or is rejected by g++.
    CompilerNotFoundError
        There is no g++.
    """
    parts = divided(cuda_text, base) if base is not None else None
    text = cuda_text if parts is None else parts.whole
    code = blank_comments(text)
    kernels = find_kernels(code)
    if not kernels:
        raise CudaCompileError("the CUDA text has no __global__ function")
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    names = dynamic_shared_names(code if parts is None else blank_comments(base))
    epilogue = _epilogue(kernels, names)
    runtime = build_runtime_library(folder)
    load_runtime(runtime)
    if parts is None:
        library = build_kernel_library(_source(text) + epilogue, folder, checked=checked)
    else:
        own = _source(parts.own) if parts.own else ""
        library = build_kernel_library(own, folder, checked=checked, rest=_source(parts.rest) + epilogue)
    kept = blank_comments(text, strings=False)
    ordered, releases = uses_atomics(kept), uses_releases(kept)
    return CpuModule(library, kernels, code=code, ordered=ordered, releases=releases, runtime=runtime, checked=checked)


def _source(text: str) -> str:
    return '#line 1 "kernels.cu"\n' + translate_asm(text)
