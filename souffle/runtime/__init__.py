"""What runs compiled networks: inputs checked, kernels launched on a GPU or on the CPU, files saved and loaded.

Needs NumPy alone, and cuda-bindings for a GPU: a saved network runs where the compiler is not installed.
"""

from __future__ import annotations

from souffle.runtime.artifact import ArtifactInfo, describe, load, save
from souffle.runtime.bound import BoundNetwork
from souffle.runtime.device_array import DeviceArray
from souffle.runtime.explain import explain
from souffle.runtime.network import KernelInfo, Network
from souffle.runtime.signature import Signature, TensorSpec
from souffle.runtime.versioned_network import VersionedNetwork

__all__ = [
    "ArtifactInfo",
    "BoundNetwork",
    "DeviceArray",
    "KernelInfo",
    "Network",
    "Signature",
    "TensorSpec",
    "VersionedNetwork",
    "describe",
    "explain",
    "load",
    "save",
]
