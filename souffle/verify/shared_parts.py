"""Tensors whose parts stay in the shared memory of the blocks that make them, from one stage to a later one.

**Theorem.** Let all of a kernel's launch be proven with each such tensor where its pointer says, in global memory. If
moreover

1. a run touches through such a pointer, in each tile, bytes of that tile's part alone, one thread at a time, at
   multiples of what it touches at once;
2. what is read so was written so in the same launch: at the same place, with as many turns, and by tiles that are given
   to blocks in the same way;
3. between the two no run touches those bytes of the pool otherwise, as its own memory or as parts of another tensor;
4. a block barrier stands between all that touches a byte of the pool in one way and what touches it in another;

then the kernel does the same with the parts in shared memory. *Proof.* Which block computes a tile, and as which of its
tiles, is the same for all that touch the tensor (2). So a part is either for all of them in the block's pool or for all
of them in global memory, and each of a block's tiles has bytes of its own. Renaming the bytes of parts in pools to
those of the tensor maps each execution to one with the tensor in global memory: it is one to one on what is touched
(1), while a part lives nothing else is there (3), and what was there before or comes after is ordered (4). What was
proven of that execution, races and contents, holds of this one.

The first is :func:`outside_part`, the second and third are :mod:`souffle.verify.definitions_found`'s, by what is said
here of a run, and the fourth is :func:`unordered`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from souffle.certificate import Counterexample
from souffle.verify.expressions import Undecided, const, operation, variable
from souffle.verify.footprint import Footprint
from souffle.verify.ranges import index_range
from souffle.verify.stage_functions import Library, text_of
from souffle.verify.tiles_in_a_row import SharedParts, StageRun, Sync

__all__ = ["outside_part", "pool_bytes", "unordered"]


def pool_bytes(footprint: Footprint) -> int:
    """Bytes of the pool, from its start, that a function has for itself."""
    return max((memory.nbytes for memory in footprint.function.memories if memory.pool), default=0)


def outside_part(
    kernel: str, run: StageRun, footprint: Footprint, parameter: int, shared_bytes: int
) -> Iterator[Counterexample | Undecided]:
    """What keeps the parts of a tensor from being in the pool: where they lie, and how they are touched."""
    parts = run.parts(parameter)
    if parts is None:
        return
    name, function = run.name, footprint.function
    subject = f"the parts of {function.pointers[parameter].name}"
    if parts.start < 0 or parts.end > shared_bytes:
        why = f"they take bytes {parts.start} to {parts.end} of shared memory, the launch has {shared_bytes}"
        yield Counterexample("does not fit", kernel, (name,), (), (), subject, why)
    if run.place is not None:
        yield Undecided(f"{subject} in {name}, which takes turns with other stages in the tiles of a slot")
    for other, theirs in enumerate(run.shared):
        if theirs is not None and other > parameter and theirs.meets(parts.start, parts.end):
            why = f"those of {function.pointers[other].name} lie in the same shared memory"
            yield Counterexample("race in a block", kernel, (name,), (), (), subject, why)
    if parts.meets(0, pool_bytes(footprint)):
        why = f"they begin at byte {parts.start} of shared memory, of which it has {pool_bytes(footprint)} for itself"
        yield Counterexample("race in a block", kernel, (name,), (), (), subject, why)
    for writes in (False, True):
        for touch in footprint.of(parameter, writes):
            text, wide = text_of(touch.access.statement), touch.access.alignment
            if touch.access.by != "thread":
                why = "asynchronous copies and what a warp does together are not for memory that may be shared"
                yield Counterexample("out of bounds", kernel, (name,), (text,), (), subject, why)
            if parts.start % wide or parts.nbytes % wide:
                why = f"{wide} bytes are touched at once, of parts of {parts.nbytes} from byte {parts.start}"
                yield Counterexample("misaligned", kernel, (name,), (text,), (), subject, why)
            first = operation("mul", variable(function.tile), const(parts.nbytes))
            reach = index_range(operation("sub", touch.access.place.offset, first), touch.conditions)
            if reach is None or (reach.low >= 0 and reach.high + touch.access.width <= parts.nbytes):
                continue
            byte = reach.low if reach.low < 0 else reach.high + touch.access.width - 1
            why = f"a tile touches byte {byte} of its part, which has {parts.nbytes}"
            if reach.exact:
                yield Counterexample("out of bounds", kernel, (name,), (text,), (), subject, why)
            else:
                yield Undecided(f"whether in {name} each tile keeps to its own of {subject}: {text}")


def unordered(
    kernel: str, events: Sequence[tuple[StageRun, tuple[int, ...]] | Sync], library: Library
) -> Iterator[Counterexample | Undecided]:
    """Runs that touch a byte of the pool as different things, with no block barrier between.

    Parameters
    ----------
    kernel : str
    events : sequence
        Between two grid barriers: runs with the buffers of their pointers, and block barriers.
    library : Library
    """
    # What a block may still be at when it comes to the next run.
    open_: list[tuple[StageRun, list[_Use]]] = []
    for event in events:
        if isinstance(event, Sync):
            open_.clear()
            continue
        run, buffers = event
        uses = list(_uses(run, library.footprint(run), buffers))
        if any(other.loop == run.loop and other.step == run.step for other, _ in open_) and any(run.shared):
            yield Undecided(f"what stays in shared memory in a loop over tiles that calls {run.name} and others")
        for other, theirs in open_:
            for one in theirs:
                for two in uses:
                    if one.conflicts(two):
                        why = (
                            f"{one.what} of {other.name} and {two.what} of {run.name} share bytes, and no block barrier"
                        )
                        names = (other.name, run.name)
                        yield Counterexample(
                            "race in a block", kernel, names, (), (), "shared memory", f"{why} stands between"
                        )
        open_.append((run, uses))
        if run.after:
            # A block that has none of its tiles does not come to the barrier.
            open_ = [(other, theirs) for other, theirs in open_ if other.turns > run.turns]


class _Use:
    """Bytes of the pool that a run touches as its own, or as parts of the tensor that lies in a buffer."""

    def __init__(self, what: str, first: int, end: int, writes: bool, of: tuple[int, SharedParts] | None) -> None:
        self.what, self.first, self.end, self.writes, self.of = what, first, end, writes, of

    def conflicts(self, other: _Use) -> bool:
        """Whether the two have to be ordered, and not only as two accesses to one tensor have."""
        if (self.of is None and other.of is None) or (self.of is not None and self.of == other.of):
            return False
        return self.first < other.end and other.first < self.end and (self.writes or other.writes)


def _uses(run: StageRun, footprint: Footprint, buffers: Sequence[int]) -> Iterator[_Use]:
    if pool_bytes(footprint):
        yield _Use("memory", 0, pool_bytes(footprint), True, None)
    for parameter, parts in enumerate(run.shared):
        if parts is not None:
            name, writes = footprint.function.pointers[parameter].name, footprint.range_of(parameter, True) is not None
            yield _Use(f"parts of {name}", parts.start, parts.end, writes, (buffers[parameter], parts))
