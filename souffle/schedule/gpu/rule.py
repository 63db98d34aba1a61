"""What a GPU schedule rule takes and gives.

A rule is a function ``(func, request) -> Sketch | Refused`` (``sketch.py``). The first rule whose sketch gives a
schedule wins; the last one, the fallback, takes everything that needs no barrier across the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

__all__ = ["STARTS_IN_TILES", "GpuRequest", "GpuSchedule"]

STARTS_IN_TILES = "souffle.starts_in_tiles"
"""Attribute of a stage's function that holds a reduction to be computed in the tiles of its contraction (§6.3)."""


@dataclass(frozen=True)
class GpuRequest:
    """What a schedule is made for.

    Attributes
    ----------
    arch : str
        Such as ``"sm_90"``.
    threads : int
        Threads of a block: a rule's schedule binds exactly so many (as ``threadIdx.x`` times ``threadIdx.y`` times
        ``threadIdx.z``), or fewer if it has no barrier inside. So the stages of a kernel keep all its threads busy.
    sm_count : int
        Multiprocessors of the device, to choose tiles that keep all of them busy.
    max_shared_bytes : int
        Shared memory that one block may use, in bytes.
    """

    arch: str
    threads: int = 256
    sm_count: int = 132
    max_shared_bytes: int = 48 * 1024


@dataclass(frozen=True, eq=False)
class GpuSchedule:
    """A scheduled stage.

    Attributes
    ----------
    func : tirx.PrimFunc
        Loops bound to ``blockIdx.x/y/z`` and ``threadIdx.x/y/z``. Rules use ``blockIdx.x`` alone, and every root-level
        nest of theirs has one extent; a schedule that is brought along may have any grid and block.
    rule : str
        The rule that made it, for ``explain``.
    tiles : int
        Product of the extents of ``blockIdx``.
    threads : int
        Product of the extents of ``threadIdx``.
    tensor_cores : bool
        Whether it uses tensor-core instructions.
    """

    func: tirx.PrimFunc
    rule: str
    tiles: int
    threads: int
    tensor_cores: bool = False
