"""A kernel that is to be a part of a fused one: what its text and its launch say of its threads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from souffle.hfuse.errors import FusionError
from souffle.hfuse.launch import Launch
from souffle.hfuse.reach import Reach
from souffle.hfuse.refusals import demand_fusible
from souffle.hfuse.rewrite import grid_rank
from souffle.hfuse.shared_arrays import pool_declarations
from souffle.hfuse.source import Source

__all__ = ["MOST_THREADS", "WARP", "Part", "even_split"]

WARP = 32
MOST_THREADS = 1024
"""Of a block."""


@dataclass(frozen=True, eq=False)
class Part:
    """A kernel to be fused; made with :meth:`of`, which refuses what cannot be.

    Attributes
    ----------
    reach : Reach
        The kernel with what it needs of its file.
    kernel : str
        Its name, with template arguments.
    launch : Launch or None
        Where it is not known, the block is one-dimensional and tunable.
    """

    reach: Reach
    kernel: str
    launch: Launch | None = None

    @staticmethod
    def of(source: Source, kernel: str | None = None, launch: Launch | None = None) -> Part:
        """A part.

        Parameters
        ----------
        source : Source
        kernel : str, optional
            The name of a kernel of the source; that of the launch, or its only one, where not given.
        launch : Launch, optional

        Raises
        ------
        FusionError
            The kernel cannot be fused; with file, line, what stands there and what would help.
        """
        name = kernel or (launch.kernel if launch is not None else None)
        function = source.kernel(name)
        reach = Reach(source, function)
        demand_fusible(reach)
        return Part(reach, name or function.name, launch)

    @property
    def threads(self) -> int | None:
        """Of a block, or None where the block is tunable."""
        return None if self.launch is None else self.launch.threads

    @property
    def granule(self) -> int:
        """A tunable part has a multiple of so many threads: whole warps, and whole rows of its block."""
        rows = 1 if self.launch is None else self.launch.block[1] * self.launch.block[2]
        return math.lcm(WARP, rows)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0 if self.launch is None else self.launch.shared_bytes

    @cached_property
    def most_threads(self) -> int:
        """What the kernel's own ``__launch_bounds__`` says, or the most that a block can have."""
        source, kernel = self.reach.source, self.reach.kernel
        head = source.slice(kernel.start, kernel.declarator.start_byte)
        match = re.search(r"__launch_bounds__\s*\(\s*(\w+)", head)
        bound = match[1] if match is not None else ""
        bound = next((macro.body.strip() for macro in source.macros if macro.name == bound), bound)
        return int(bound) if bound.isdecimal() else MOST_THREADS

    @property
    def place(self) -> str:
        """The kernel with its file and line, for messages."""
        return f"{self.reach.source.place(self.reach.kernel.start)}: kernel {self.kernel}"

    def shape(self, threads: int) -> tuple[int, int, int]:
        """Its block of so many threads; raises FusionError where there is none."""
        if threads < WARP or threads % WARP:
            raise FusionError(f"{self.place}: {threads} threads are not whole warps of {WARP}; give it a multiple")
        if threads > self.most_threads:
            raise FusionError(
                f"{self.place}: it is declared for at most {self.most_threads} threads, and would get {threads}; give "
                "it fewer, or change its __launch_bounds__"
            )
        return (threads, 1, 1) if self.launch is None else self.launch.block_of(threads)

    @cached_property
    def rank(self) -> int:
        """1 where its grid is one-dimensional, or 3."""
        flat = self.launch is None or self.launch.grid[1:] == (1, 1)
        return grid_rank(self.reach) if flat else 3

    def demand_known_memory(self) -> None:
        """Refuse dynamic shared memory of a size that is not known."""
        declared = pool_declarations(self.reach)
        if declared and self.launch is None:
            source, start = self.reach.source, declared[0].start_byte
            raise FusionError(
                f"{source.place(start)}: `{source.excerpt(start)}`: the size of this array is a matter of the launch; "
                "give the launches of the kernels (--launch A.json B.json)"
            )


def even_split(parts: Sequence[Part], block: int) -> tuple[int, ...]:
    """A partition of a block into equal parts, as near as whole warps and fixed blocks allow (the paper's "naive" one).

    Raises
    ------
    FusionError
        The fixed blocks leave no threads to the others, or do not fill the block.
    """
    fixed = sum(part.threads or 0 for part in parts)
    tunable = [part for part in parts if part.threads is None]
    if not tunable:
        return tuple(part.threads or 0 for part in parts)
    rest = block - fixed
    splits: list[int] = []
    left = len(tunable)
    for part in parts:
        if part.threads is not None:
            splits.append(part.threads)
            continue
        # The last one takes what is left, so that the block is full where it can be.
        share = rest if left == 1 else rest // left
        threads = share // part.granule * part.granule
        if threads < part.granule:
            raise FusionError(
                f"{part.place}: of a block of {block} threads {max(share, 0)} are left for it, and it takes a multiple "
                f"of {part.granule}; ask for a larger block"
            )
        splits.append(threads)
        rest, left = rest - threads, left - 1
    return tuple(splits)
