"""Bytes that fusion keeps off device memory, and the time that they would have taken (003 §4.3, Figure 4; 000 §5.4).

003's Figure 4 shows the utilization of bandwidth rising with the volume of a transfer, measured once for a GPU. Here it
follows from two figures of the device file by Little's law: a transfer of V bytes takes the latency of its first byte,
and then streams at the bandwidth B that all threads together reach,

    M(V) = latency + V / B        utilization(V) = V / (V + latency * B)        M(0) = 0

so that it rises from 0 to 1 and is one half at latency * B, the bytes that must be in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from souffle.cost.device import CostDevice
from souffle.stitching.graph import OpGraph

__all__ = ["MemoryModel", "device_memory", "read_inside", "shared_memory", "volume_saved"]


@dataclass(frozen=True)
class MemoryModel:
    """A memory as a latency in seconds and a bandwidth in bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, volume: float) -> float:
        """``M(V)`` of so many bytes in a row."""
        return self.latency + volume / self.bandwidth if volume > 0 else 0.0

    def utilization(self, volume: float) -> float:
        """The part of the bandwidth that a transfer of so many bytes reaches."""
        return volume / (volume + self.latency * self.bandwidth)


def device_memory(device: CostDevice) -> MemoryModel:
    """Global memory of a GPU."""
    return MemoryModel(device.memory_latency_clocks / device.clock_hz, device.memory_bytes_per_second)


def shared_memory(device: CostDevice) -> MemoryModel:
    """The shared memories of all multiprocessors together."""
    rate = device.shared_bytes_per_clock_per_sm * device.sm_count * device.clock_hz
    return MemoryModel(device.shared_latency_clocks / device.clock_hz, rate)


def volume_saved(graph: OpGraph, members: Iterable[int]) -> int:
    """Bytes of global memory that are neither read nor written where some vertices are one kernel.

    Each alone reads its inputs and writes its outputs. Together they read what several of them read once, and do not
    write and read what nothing else needs.
    """
    inside = frozenset(members)
    saved = 0
    outside: dict[object, int] = {}
    for number in inside:
        op = graph.ops[number]
        if not graph.escapes(number, inside):
            saved += op.written
        for read in op.reads:
            saved += read.bytes
            if read.producer not in inside:
                outside[read.tensor] = max(outside.get(read.tensor, 0), read.bytes)
    return saved - sum(outside.values())


def read_inside(graph: OpGraph, members: frozenset[int], number: int) -> int:
    """Bytes of a member's result that go through global memory no more: read by others, and written for them alone."""
    readers = [graph.ops[consumer] for consumer in graph.consumers[number] if consumer in members]
    read = sum(one.bytes for reader in readers for one in reader.reads if one.producer == number)
    return read + (graph.ops[number].written if read and not graph.escapes(number, members) else 0)
