"""Which workers of a kernel compute the tiles of a stage, where independent stages are computed side by side.

A worker is what computes tiles: a block, or a team of one (:mod:`souffle.schedule.lower.teams`). Stages that stand
between the same two barriers and do not depend on each other may be given to workers in three ways, of which none
changes what a tile computes:

- *one after the other*: worker ``w`` of ``n`` has tiles ``w, w + n, ...`` of each;
- *block space*: the second stage's tiles begin with the worker behind the first one's last tile, so that what the last
  turn of the one leaves idle begins with the other;
- *thread space* (HFuse, 001 §III): some teams of each block have the tiles of one stage, the others those of the other,
  so that each multiprocessor has threads of both at once and one computes while the other waits for memory. Teams are
  whole warps, and their barriers ``bar.sync id, n`` of their own. Or the threads of a block are divided otherwise, and
  each part has a stage that is scheduled for as many (:mod:`souffle.schedule.lower.parts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from souffle.schedule.lower.parts import Part

__all__ = ["ALL_WORKERS", "Share"]


@dataclass(frozen=True)
class Share:
    """The workers that compute the tiles of a stage.

    Attributes
    ----------
    team, teams : int
        Those of so many teams of each block, from that one on; 0 teams are all that there are.
    shift : int
        Of them the one that has tile 0; they take turns, so that it is `shift` modulo their number.
    part : Part or None
        The part of each block that is one of its workers, and no team.
    """

    team: int = 0
    teams: int = 0
    shift: int = 0
    part: Part | None = None

    def __str__(self) -> str:
        if self.part:
            return str(self.part)
        parts = []
        if self.teams:
            last = self.team + self.teams - 1
            parts.append(f"team {self.team}" if self.teams == 1 else f"teams {self.team} to {last}")
        if self.shift:
            parts.append(f"tile 0 on worker {self.shift}")
        return ", ".join(parts) or "all workers"

    @property
    def form(self) -> tuple[int, int, int, int]:
        """As numbers: `team`, `teams`, `shift`, and the threads of the part; 0 where there is none.

        Parts of a division follow each other in a block, so that where one begins is known.
        """
        return self.team, self.teams, self.shift, self.part.function.threads if self.part else 0

    def tiles_of(self, tiles: int, blocks: int, teams: int) -> np.ndarray:
        """How many tiles each worker has: an array of (teams, blocks); of a part as of the first of one team.

        Parameters
        ----------
        tiles : int
            Of the stage.
        blocks, teams : int
            Of the kernel, and of each block.
        """
        if self.part:
            return ALL_WORKERS.tiles_of(tiles, blocks, 1)
        own = self.teams or teams
        count = own * blocks
        place = (np.arange(count) - self.shift) % count
        had = np.zeros((teams, blocks), np.int64)
        had[self.team : self.team + own] = ((tiles - place + count - 1) // count).reshape(own, blocks)
        return had


ALL_WORKERS = Share()
"""Each worker has tiles, the first one tile 0."""
