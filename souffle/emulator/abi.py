"""The structures that the fiber runtime shares with Python (see ``fiber_runtime.cpp``), and its loading."""

from __future__ import annotations

import ctypes
from pathlib import Path

from souffle.errors import DeviceError

__all__ = [
    "Arena",
    "Arg",
    "CheckedRegion",
    "FindingRecord",
    "KernelEntry",
    "Order",
    "Result",
    "Spec",
    "TrafficRecord",
    "WaitRecord",
    "WarpOrder",
    "load_runtime",
]


class Arg(ctypes.Structure):
    """One argument of a launch, in all three forms."""

    _fields_ = (("i", ctypes.c_longlong), ("d", ctypes.c_double), ("p", ctypes.c_void_p))


class KernelEntry(ctypes.Structure):
    """A row of the table of kernels that follows each text."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_int),
        ("kinds", ctypes.c_char_p),
    )


Order = ctypes.c_uint64
"""The last accesses to one element."""


class WarpOrder(ctypes.Structure):
    """The last accesses to one element within a block."""

    _fields_ = (
        ("written", ctypes.c_uint64),
        ("read", ctypes.c_uint64),
        ("readers", ctypes.c_uint),
        ("reserved", ctypes.c_uint),
    )


class CheckedRegion(ctypes.Structure):
    """One buffer of a checked memory."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("owners", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("warps", ctypes.c_void_p),
        ("element_shift", ctypes.c_uint),
        ("tag", ctypes.c_ubyte),
        ("writable", ctypes.c_ubyte),
    )


class TrafficRecord(ctypes.Structure):
    """Bytes read and written, and atomics."""

    _fields_ = (("read", ctypes.c_uint64), ("written", ctypes.c_uint64), ("atomics", ctypes.c_uint64))


class Arena(ctypes.Structure):
    """The address space of a checked memory."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("slot_bits", ctypes.c_uint),
        ("slots", ctypes.c_uint),
        ("regions", ctypes.POINTER(CheckedRegion)),
        ("epoch", ctypes.c_uint),
        ("sets", ctypes.c_uint),
    )


class FindingRecord(ctypes.Structure):
    """What was found at one place of the text."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("region", ctypes.c_int),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("offset", ctypes.c_longlong),
        ("bytes", ctypes.c_uint),
        ("what", ctypes.c_uint),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("other", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("count", ctypes.c_uint64),
    )


class WaitRecord(ctypes.Structure):
    """Threads in one state where nothing could go on."""

    _fields_ = (
        ("state", ctypes.c_int),
        ("barrier", ctypes.c_int),
        ("arrived", ctypes.c_int),
        ("expected", ctypes.c_int),
        ("threads", ctypes.c_uint),
        ("mask", ctypes.c_uint),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("what", ctypes.c_char * 32),
        ("pc", ctypes.c_uint64),
    )


class Spec(ctypes.Structure):
    """A launch."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("args", ctypes.POINTER(Arg)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("dynamic_capacity", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("cooperative", ctypes.c_int),
        ("shuffled", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("timeout_seconds", ctypes.c_double),
        ("spin_seconds", ctypes.c_double),
        ("dynamic_shared", ctypes.c_void_p),
        ("shared_anchor", ctypes.c_void_p),
        ("arena", ctypes.POINTER(Arena)),
        ("traffic", ctypes.POINTER(TrafficRecord)),
        ("shared_range", ctypes.POINTER(ctypes.c_uint64)),
        ("finding", ctypes.POINTER(FindingRecord)),
        ("shared_ranges", ctypes.c_uint),
        ("finding_capacity", ctypes.c_int),
        ("releases", ctypes.c_int),
        ("wait", ctypes.POINTER(WaitRecord)),
        ("wait_capacity", ctypes.c_int),
    )


class Result(ctypes.Structure):
    """What came of a launch."""

    _fields_ = (
        ("failed", ctypes.c_int),
        ("waits", ctypes.c_int),
        ("grid_syncs", ctypes.c_uint64),
        ("block_barriers", ctypes.c_uint64),
        ("fault_address", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("shared", TrafficRecord),
        ("findings", ctypes.c_int),
        ("synchronizes", ctypes.c_int),
        ("findings_left_out", ctypes.c_uint64),
        ("half_barriers", ctypes.c_uint64),
        ("message", ctypes.c_char * 2048),
    )


_loaded: dict[str, ctypes.CDLL] = {}


def load_runtime(path: Path) -> ctypes.CDLL:
    """Load a built fiber runtime.

    Raises
    ------
    DeviceError
        It was built from another state of the sources than this module.
    """
    # By name, which holds the hash of its source: one process has one runtime, whatever cache folders it uses.
    if path.name in _loaded:
        return _loaded[path.name]
    # Global: the libraries of kernels find the runtime's functions by name.
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.souffle_launch.argtypes = (ctypes.POINTER(Spec), ctypes.POINTER(Result))
    library.souffle_launch.restype = None
    library.souffle_reserve.argtypes = (ctypes.c_uint64,)
    library.souffle_reserve.restype = ctypes.c_void_p
    library.souffle_map_file.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    library.souffle_release.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    sizes = {"spec": Spec, "result": Result, "finding": FindingRecord, "wait": WaitRecord}
    for name, kind in sizes.items():
        size = getattr(library, f"souffle_{name}_size")
        size.restype = ctypes.c_uint64
        if size() != ctypes.sizeof(kind):
            raise DeviceError(f"the fiber runtime {path} disagrees with its Python side on {kind.__name__}: delete it")
    return _loaded.setdefault(path.name, library)
