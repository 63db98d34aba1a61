"""The stage functions of a network, each read and looked at once for each way in which it is called."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from tvm import tirx

from souffle.certificate import Counterexample
from souffle.verify.accesses_in_order import FunctionInSpan
from souffle.verify.expressions import Undecided, asked_once
from souffle.verify.footprint import Footprint
from souffle.verify.function_reader import read_function
from souffle.verify.races_in_a_block import BlockReport, check_block
from souffle.verify.races_in_a_span import Wrong
from souffle.verify.tiles_in_a_row import Follows, StageRun

__all__ = ["Library", "shown", "text_of"]

_DECLARATION = re.compile(r"\w+ = T\.(Buffer|u?int\d+|float\d+|handle|bool)\(")
_LONGEST = 240
"""Characters of a statement in a message."""


class Library:
    """Footprints and block reports, by function, tiles and threads."""

    def __init__(self, functions: Mapping[str, tirx.PrimFunc]) -> None:
        self.functions = functions
        self._footprints: dict[tuple[str, int, int], Footprint] = {}
        self._parts: dict[tuple, Footprint] = {}
        self._reports: dict[tuple, BlockReport | Undecided] = {}
        self._missing = False

    @property
    def understood(self) -> bool:
        """Whether all that the functions do, of those that were asked for, could be read."""
        return not self._missing and not any(f.function.problems for f in self._footprints.values())

    def footprint(self, run: StageRun) -> Footprint:
        """What a stage touches in global memory.

        Raises
        ------
        Undecided
            If there is no such function.
        """
        key = (run.name, run.tiles, run.threads)
        if key not in self._footprints:
            if run.name not in self.functions:
                self._missing = True
                raise Undecided(f"the function {run.name}, which is not in the module")
            self._footprints[key] = Footprint(read_function(*key[:1], self.functions[run.name], *key[1:]))
        return self._footprints[key]

    def taken(self, run: StageRun) -> Footprint:
        """What a run touches in the tiles that it computes.

        Raises
        ------
        Undecided
            As for :meth:`footprint`.
        """
        whole = self.footprint(run)
        if run.place is None:
            return whole
        key = (whole, run.ranks, run.slots, run.place)
        if key not in self._parts:
            tiles = np.arange(run.tiles)
            self._parts[key] = whole.in_tiles(tiles[run.takes(run.located(tiles)[1])])
        return self._parts[key]

    def promises_no_alias(self, run: StageRun) -> bool:
        """Whether a stage's pointers become ``__restrict__`` in the text."""
        attributes = self.functions[run.name].attrs
        return attributes is not None and "tirx.noalias" in attributes and bool(attributes["tirx.noalias"])

    def uses_shared(self, run: StageRun) -> bool:
        """Whether a stage touches shared memory."""
        return self.footprint(run).uses_shared

    def waits(self, run: StageRun) -> bool:
        """Whether all threads of a block wait for each other somewhere in each tile of a stage."""
        try:
            return self.footprint(run).waits
        except Undecided:
            return False

    def may_wait(self, run: StageRun) -> bool:
        """Whether they do so in some tiles of it only."""
        return self.footprint(run).may_wait

    def block(
        self,
        runs: tuple[StageRun, ...],
        globals_: tuple[tuple[tuple[int, str, int], ...], ...] = (),
        tiles: tuple[int, ...] | Follows | None = None,
    ) -> BlockReport:
        """Whether threads of one block conflict that runs these stages with no barrier between.

        Parameters
        ----------
        runs : tuple of StageRun
        globals_ : tuple
            For each, what :class:`souffle.verify.races_in_a_block.FunctionInSpan` looks at too.
        tiles : tuple of int or Follows, optional
            The tile of each, or which of two stages may follow each other; by default all of them are run for the same
            tile, whichever.

        Raises
        ------
        Undecided
        """
        which = tiles.form if isinstance(tiles, Follows) else tiles
        key = (tuple((r.name, r.tiles, r.threads) for r in runs), globals_, which)
        own = globals_ or ((),) * len(runs)

        def ask() -> BlockReport:
            parts = [
                FunctionInSpan(self.footprint(run).function, looked_at)
                for run, looked_at in zip(runs, own, strict=True)
            ]
            return check_block(parts, tiles.holds if isinstance(tiles, Follows) else tiles)

        return asked_once(self._reports, key, ask)


def shown(kernel: str, stages: tuple[str, ...], found: Wrong, element: str = "", reason: str = "") -> Counterexample:
    """What is wrong in a block, in stages of a kernel; with an element and a reason in place of its own."""
    texts = tuple(text_of(statement) for statement in found.statements)
    element = element or found.element or stages[0]
    return Counterexample(found.rule, kernel, stages, texts, found.threads, element, reason or found.reason)


def text_of(statement: object) -> str:
    """A statement in one line."""
    if isinstance(statement, tirx.IfThenElse):
        return f"if {statement.condition}"
    lines = [line.strip() for line in str(statement).splitlines()]
    # TVM declares the variables that a statement alone leaves open.
    told = (line for line in lines if line and not line.startswith(("#", "@")) and not _DECLARATION.match(line))
    text = " ".join(told)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
