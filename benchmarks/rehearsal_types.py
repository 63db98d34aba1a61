"""Enumerations and structures of the played driver: as much of ``cuda.bindings.driver`` as Souffle uses."""

from __future__ import annotations

import enum
from types import SimpleNamespace

__all__ = ["STAND_INS", "CUresult"]


class CUresult(enum.IntEnum):
    """The statuses that are given, with the real ones' numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_CAPTURED_EVENT = 907
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908


STAND_INS = SimpleNamespace(
    CUresult=CUresult,
    CU_MEMHOSTALLOC_DEVICEMAP=2,
    CUdevice_attribute=enum.IntEnum(
        "CUdevice_attribute",
        {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
            "CU_DEVICE_ATTRIBUTE_CLOCK_RATE": 13,
            "CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH": 95,
            "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 38,
            "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR": 39,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81,
            "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
            "CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR": 106,
        },
    ),
    CUfunction_attribute=enum.IntEnum(
        "CUfunction_attribute",
        {
            "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1,
            "CU_FUNC_ATTRIBUTE_NUM_REGS": 4,
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
            "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": 9,
        },
    ),
    CUstream_flags=enum.IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1}),
    CUevent_flags=enum.IntEnum("CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2}),
    CUstreamCaptureMode=enum.IntEnum(
        "CUstreamCaptureMode",
        {
            "CU_STREAM_CAPTURE_MODE_GLOBAL": 0,
            "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1,
            "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
        },
    ),
    CUstreamCaptureStatus=enum.IntEnum(
        "CUstreamCaptureStatus",
        {
            "CU_STREAM_CAPTURE_STATUS_NONE": 0,
            "CU_STREAM_CAPTURE_STATUS_ACTIVE": 1,
            "CU_STREAM_CAPTURE_STATUS_INVALIDATED": 2,
        },
    ),
    CUlaunchAttributeID=enum.IntEnum("CUlaunchAttributeID", {"CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2}),
    CUlaunchConfig=SimpleNamespace,
    CUlaunchAttribute=lambda: SimpleNamespace(id=None, value=SimpleNamespace(cooperative=0)),
)
