"""Kernels that are given as CUDA text, fused into one (paper Figures 4 and 5).

Three spaces in which the parts of a fused kernel lie side by side:

- ``thread``: the paper's horizontal fusion. The threads of a block are divided; each part has so many, whole warps.
- ``block``: each block is one part's, and has as many threads as the largest part. The grids follow each other.
- ``sequence``: the paper's vertical fusion (VFuse). The same threads run one part after the other, with a barrier of
  the block between.

In the first and the last a block is the same block of all parts whose grids have it. The grids are arguments of the
fused kernel, for they depend on the sizes of the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from souffle.hfuse.errors import FusionError
from souffle.hfuse.fused_text import Bound, FusedText, grid_names
from souffle.hfuse.launch import Argument, Launch
from souffle.hfuse.part import MOST_THREADS, Part
from souffle.hfuse.position import Position
from souffle.hfuse.rewrite import rewrite
from souffle.hfuse.shared_arrays import ALIGNMENT

__all__ = ["SPACES", "FusedKernel", "fuse"]

SPACES = ("thread", "block", "sequence")

_MOST_PARTS = 15
"""A block has sixteen named barriers, and number 0 is that of all threads."""

_REGISTERS = 65536
"""Of a multiprocessor."""


@dataclass(frozen=True, eq=False)
class FusedKernel:
    """A fused kernel.

    Attributes
    ----------
    name : str
    text : str
        CUDA C++: the parts, the kernel, and a function of the host that launches it.
    space : str
        One of :data:`SPACES`.
    block : int
        Threads of a block, which is one-dimensional.
    splits : tuple of int
        Threads of each part.
    shared_bytes : int
        Dynamic shared memory of a block.
    parts : tuple of Part
    bound : Bound or None
    parameters : tuple of tuple of str
        For each part, its parameters' names here. Then come the grids.
    symbols : tuple of str
        Variables of the device that the host has to fill, under their names here.
    """

    name: str
    text: str
    space: str
    block: int
    splits: tuple[int, ...]
    shared_bytes: int
    parts: tuple[Part, ...]
    bound: Bound | None
    parameters: tuple[tuple[str, ...], ...]
    symbols: tuple[str, ...]

    def grids(self) -> tuple[tuple[str, int], ...]:
        """The last arguments, names and values: extents of each part's grid.

        Raises
        ------
        FusionError
            A part has no launch.
        """
        given = []
        for number, part in enumerate(self.parts, 1):
            values = self._launch_of(part).grid
            names = grid_names(number, part.rank)
            given += list(zip(names, values if part.rank == 3 else values[:1], strict=True))
        return tuple(given)

    def launch(self) -> Launch:
        """The launch of the fused kernel, made of those of its parts; raises FusionError where a part has none."""
        launches = [self._launch_of(part) for part in self.parts]
        blocks = [math.prod(launch.grid) for launch in launches]
        grid = sum(blocks) if self.space == "block" else max(blocks)
        arguments: list[Argument] = []
        for part, launch, names in zip(self.parts, launches, self.parameters, strict=True):
            if len(launch.arguments) != len(names):
                raise FusionError(
                    f"{part.place}: it has {len(names)} parameters, and its launch gives {len(launch.arguments)} of "
                    "them; list all in the launch, in their order"
                )
            arguments += [replace(a, name=name) for a, name in zip(launch.arguments, names, strict=True)]
        arguments += [Argument(name, value=value) for name, value in self.grids()]
        return Launch(self.name, (grid, 1, 1), (self.block, 1, 1), self.shared_bytes, tuple(arguments))

    def _launch_of(self, part: Part) -> Launch:
        if part.launch is None:
            raise FusionError(f"{part.place}: its launch is not known; give one (--launch A.json B.json)")
        return part.launch


def fuse(
    parts: Sequence[Part],
    splits: Sequence[int],
    *,
    space: str = "thread",
    bound: Bound | None = None,
    name: str | None = None,
) -> FusedKernel:
    """Fuse kernels.

    Parameters
    ----------
    parts : sequence of Part
        Two or more, at most fifteen.
    splits : sequence of int
        Threads of each part.
    space : str
        One of :data:`SPACES`.
    bound : Bound, optional
        Of the registers.
    name : str, optional
        Of the fused kernel; made of the parts' where not given.

    Returns
    -------
    FusedKernel

    Raises
    ------
    FusionError
        The parts do not fit into a block, or cannot be told of their grid; with file and line.
    """
    if space not in SPACES:
        raise FusionError(f"space {space!r} is none of {', '.join(SPACES)}")
    if not 2 <= len(parts) <= _MOST_PARTS:
        raise FusionError(f"{len(parts)} kernels: two to {_MOST_PARTS} can be fused, each with a barrier of its own")
    if len(splits) != len(parts):
        raise FusionError(f"{len(splits)} numbers of threads were given for {len(parts)} kernels")
    shapes = [part.shape(threads) for part, threads in zip(parts, splits, strict=True)]
    block = sum(splits) if space == "thread" else max(splits)
    if block > MOST_THREADS:
        total = " + ".join(str(threads) for threads in splits)
        raise FusionError(f"{total} threads are {block}, and a block has at most {MOST_THREADS}; give the parts fewer")
    if bound is not None and bound.registers is not None and bound.registers * block > _REGISTERS:
        raise FusionError(
            f"{bound.registers} registers of {block} threads are more than the {_REGISTERS} of a multiprocessor; ask "
            "for fewer"
        )
    positions, pool = [], 0
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True), 1):
        part.demand_known_memory()
        first = sum(splits[: number - 1]) if space == "thread" else 0
        whole = space != "thread" and splits[number - 1] == block
        # Parts of other spaces never use their memory at the same time.
        offset = pool if space == "thread" else 0
        shifted = space == "block" and number > 1
        positions.append(Position(number, first, shape, whole, offset, part.rank, shifted))
        size = -(-part.shared_bytes // ALIGNMENT) * ALIGNMENT
        pool = pool + size if space == "thread" else max(pool, size)
    written = [rewrite(part.reach, part.kernel, position) for part, position in zip(parts, positions, strict=True)]
    label = name or "hfused_" + "_".join(part.reach.kernel.name for part in parts)
    writer = FusedText(label, tuple(parts), tuple(positions), tuple(written), space, block, pool, bound)
    return FusedKernel(
        label, writer.text(), space, block, tuple(splits), pool, tuple(parts), bound, writer.names, writer.symbols
    )
