"""What each read finds: the definition, and the step's, that the program says it reads, over all launches in order.

Memory holds definitions (:mod:`souffle.verify.definitions_meant`): an element of one is where it was written last,
until anything else is written there. A run of a stage function is taken for a use of it in the program. Through each
pointer it must find what that use reads, by a stage before or earlier in the same tile
(:mod:`souffle.verify.own_writes`), and what it writes is from then on what that use makes. When all has run, each
output holds the definition that the program returns, as a whole.

**Theorem.** If no read and no output is found to hold anything else, and each stage function computes its stage's TEs
(:mod:`souffle.verify.values`), then the network computes the program. *Proof*, by induction over the runs, in any order
that the barriers allow, which all give the same where nothing races: whatever memory is said to hold of a definition
has the value that the program gives it. So it is at first, of inputs and constants. A run finds these values in all
that it reads, so that what it writes are the values of the use that it is taken for, which are the program's; and what
it overwrites is said to be lost. For which use it is taken does not matter: each choice that goes through is a proof.

Where stages take turns in the tiles of a slot, a run is of the tiles at one place. What it writes is of the same
definition though the other places have yet to come: no element is written in two tiles
(:mod:`souffle.verify.races_between_stages`), so none is one halfway.

So it does not matter either who chose the order of the stages, the slots of a ring or the memory of tensors. Where the
program is not known, a definition is a tensor of the plan, and so much is shown that a read finds what was last written
as the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from souffle.certificate import Counterexample
from souffle.codegen.plan import Plan
from souffle.verify.definitions_meant import Definition, Pointee, Program
from souffle.verify.expressions import Undecided
from souffle.verify.footprint import Footprint
from souffle.verify.own_writes import Missing, missing_read
from souffle.verify.shared_parts import pool_bytes
from souffle.verify.stage_functions import text_of
from souffle.verify.tiles_in_a_row import StageRun

__all__ = ["Contents"]

_STALE, _WRONG = "stale or undefined read", "wrong definition"


class _Role(NamedTuple):
    """What a pointer of a run points to: byte `start` of a definition whose first byte lies at `origin` of a space.

    Roles of two pointers into one definition at one place differ in `start` alone.
    """

    space: str
    of: Definition
    origin: int
    start: int

    @property
    def key(self) -> tuple[Definition, int]:
        return self.of, self.origin


@dataclass(eq=False)
class _Held:
    """What memory holds of a definition that lies at one place.

    Attributes
    ----------
    role : _Role
    nbytes, unit : int
        Of the definition, and of its elements.
    full : bool
        Whether every element is held; otherwise `mask` says which, and ``None`` is for none.
    doubt : str
        Why what it holds is not known for certain.
    overwritten : str
        Who has last destroyed a part.
    near : tuple
        How it is in shared memory, and since which launch; empty for what is where its pointer says.
    gone : str
        Who has used that shared memory since.
    """

    role: _Role
    nbytes: int
    unit: int
    full: bool = False
    mask: np.ndarray | None = None
    doubt: str = ""
    overwritten: str = ""
    near: tuple = ()
    gone: str = ""

    @property
    def some(self) -> np.ndarray:
        """Which elements are held."""
        if self.mask is None:
            self.mask = np.full(self.nbytes // self.unit, self.full)
        return self.mask

    def has(self, byte: int) -> bool:
        """Whether a byte of the space is of it, and held."""
        at = byte - self.role.origin
        return 0 <= at < self.nbytes and bool(self.full or self.some[at // self.unit])


class Contents:
    """The state of all memory while the launches run.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self.buffers = plan.buffers
        self.program = None if plan.dataflow is None else Program(plan.dataflow)
        self.held: dict[str, dict[tuple[Definition, int], _Held]] = {}
        self.lost: dict[tuple[str, Definition, int], str] = {}
        self.reads = self.writes = self.overwrites = self.launches = 0
        # What is in shared memory in this launch.
        self.near: list[_Held] = []
        edges: dict[tuple[str, str], int] = {}
        self.outer: dict[int, Pointee] = {}
        # Of calls whose stages take turns in the tiles of a slot: what they were taken for at the first place.
        self.begun: dict[tuple[int, tuple[int, ...]], tuple[Pointee, ...] | None] = {}
        if plan.dataflow is not None:
            for kind in ("input", "constant", "output"):
                edges.update(((kind, label), tensor) for label, tensor in getattr(plan.dataflow, f"{kind}s"))
        for number, buffer in enumerate(self.buffers):
            if self.program is None:
                self.outer[number] = Pointee(Definition(number))
            elif (buffer.kind, buffer.label) in edges:
                self.outer[number] = self.program.outer(edges[buffer.kind, buffer.label])
            if buffer.kind in ("input", "constant") and number in self.outer:
                self._register(self._role(number, 0, self.outer[number])).full = True

    def launch(self) -> None:
        """The next launch: what the last had in shared memory is gone."""
        self.launches += 1
        self.near.clear()

    def run(
        self, kernel: str, run: StageRun, footprint: Footprint, places: Sequence[tuple[int, int]]
    ) -> Iterator[Counterexample | Undecided]:
        """A stage reads, and writes; `places` are (buffer, byte) of its pointers."""
        halfway = self.program is not None and self.program.begun is not None
        parts = self._parts(run, footprint, places)
        if run.place is not None and self.program is not None and (halfway or self.program.begun is not None):
            yield Undecided(f"what {run.name} makes, which is of one stage with others that take turns with it")
        if parts is None or len(parts) != len(places):
            why = (
                f"{run.tiles} tiles of {run.threads} threads with {len(places)} tensors are no stage that may come here"
            )
            yield Counterexample(_WRONG, kernel, (run.name,), (), (), run.name, why)
            return
        roles = [self._role(number, at, part) for (number, at), part in zip(places, parts, strict=True)]
        self._take(run, 0, pool_bytes(footprint))
        for parameter, role in enumerate(roles):
            if footprint.range_of(parameter, False) is None:
                continue
            yield from self._near(kernel, run, parameter, role)
            meet = {other for other in range(len(roles)) if self._meet(footprint, parameter, other, False, roles)}
            own = all(roles[other].key != role.key for other in meet)
            yield from self._read(kernel, run, footprint, parameter, role, own)
            for other in sorted(meet):
                if roles[other].key == role.key:
                    continue
                lost = list(self._lost(kernel, run, footprint, parameter, other, roles))
                yield from lost
                one, two = self._name(role.of), self._name(roles[other].of)
                if not lost:
                    yield Undecided(
                        f"whether {run.name} reads {one} before it writes {two}, which shares memory with it"
                    )
        for parameter, role in enumerate(roles):
            for other in range(parameter):
                if role.key != roles[other].key and self._meet(footprint, parameter, other, True, roles):
                    one, two = self._name(role.of), self._name(roles[other].of)
                    yield Undecided(f"which of {one} and {two} {run.name} writes last in memory that they share")
            self._write(run, footprint, parameter, role)
            self._written_near(run, footprint, parameter, role)

    # What stays in shared memory

    def _how(self, run: StageRun, parameter: int) -> tuple:
        """How a run finds a tensor in shared memory."""
        parts = run.parts(parameter)
        return () if parts is None else (parts, self.launches, run.tiles, run.slots, run.ranks)

    def _near(self, kernel: str, run: StageRun, parameter: int, role: _Role) -> Iterator[Counterexample]:
        """A read that looks for a definition elsewhere than it was written, or too late."""
        held, how = self._find(role), self._how(run, parameter)
        if held is None or (held.near == how and not held.gone):
            return
        why = f"but {held.gone} has used its shared memory" if held.gone else "but not where it was written"
        if held.near != how:
            why = f"{why}: in {_shown(how)}, and it is in {_shown(held.near)}" if not held.gone else why
        element = f"{self._name(role.of)}, which stays in shared memory"
        yield Counterexample(_STALE, kernel, (run.name,), (), (), element, f"{run.name} reads it, {why}")

    def _written_near(self, run: StageRun, footprint: Footprint, parameter: int, role: _Role) -> None:
        """A definition is written where a run has it."""
        if footprint.range_of(parameter, True) is None:
            return
        held, how = self._register(role), self._how(run, parameter)
        if held.near and held.near != how:
            held.doubt = f"{run.name} writes it in {_shown(how)}, and a part of it is in {_shown(held.near)}"
        held.near, held.gone = how, ""
        if how:
            self._take(run, how[0].start, how[0].end, held)
            self.near.append(held)

    def _take(self, run: StageRun, first: int, end: int, but: _Held | None = None) -> None:
        """A run uses bytes of a block's shared memory."""
        for held in self.near:
            if held is not but and held.near and held.near[0].meets(first, end):
                held.gone = run.name
        self.near = [held for held in self.near if held is not but and not held.gone]

    def outputs(self) -> Iterator[Counterexample | Undecided]:
        """After the last launch, each output holds all its elements."""
        if self.program is not None and self.program.begun is not None:
            names = self.program.begun[0].functions[-1][0]
            yield Counterexample(_WRONG, "", names, (), (), names[0], "a stage ends before its last function has run")
        for number, buffer in enumerate(self.buffers):
            if buffer.kind != "output" or not buffer.nbytes:
                continue
            part = self.outer.get(number)
            held = None if part is None else self._find(self._role(number, 0, part))
            if held is not None and held.near:
                why = f"it is in {_shown(held.near)}, an output of the network"
                yield Counterexample(_STALE, "", (), (), (), buffer.label, why)
                continue
            if held is not None and held.full and held.nbytes == buffer.nbytes:
                continue
            if held is not None and held.doubt:
                yield Undecided(f"whether all of the output {buffer.label} is written: {held.doubt}")
                continue
            missing = 0 if held is None or held.full else int(np.argmin(held.some))
            element = f"element {missing} of {buffer.label}"
            yield Counterexample(_STALE, "", (), (), (), element, "no stage writes it, an element of an output")

    # Where definitions lie

    def _parts(
        self, run: StageRun, footprint: Footprint, places: Sequence[tuple[int, int]]
    ) -> tuple[Pointee, ...] | None:
        """What the pointers of a run should point to."""
        if self.program is None:
            return tuple(Pointee(Definition(number), at) for number, at in places)
        read = [
            p
            for p in range(len(places))
            if footprint.range_of(p, False) is not None and footprint.range_of(p, True) is None
        ]

        def fits(parts: tuple[Pointee, ...]) -> bool:
            if len(parts) != len(places):
                return False
            roles = (self._role(*places[p], parts[p]) for p in read)
            return all(role.key in self.held.get(role.space, {}) for role in roles)

        if run.place:
            return self.begun[run.call, run.step]
        found = self.begun[run.call, run.step] = self.program.run(run, tuple(places), fits)
        return found

    def _role(self, number: int, at: int, part: Pointee) -> _Role:
        """Of a pointer to byte `at` of a buffer that should point to this part of a definition."""
        buffer = self.buffers[number]
        shared = buffer.kind == "workspace"
        return _Role(
            "workspace" if shared else str(number),
            part.of,
            (buffer.offset if shared else 0) + at - part.first,
            part.first,
        )

    def _new(self, role: _Role) -> _Held:
        if self.program is not None:
            return _Held(role, self.program.nbytes(role.of), self.program.unit(role.of))
        buffer = self.buffers[role.of.tensor]
        return _Held(role, buffer.nbytes, 1 if buffer.dtype == "bool" else np.dtype(buffer.dtype).itemsize)

    def _register(self, role: _Role) -> _Held:
        inside = self.held.setdefault(role.space, {})
        return inside.setdefault(role.key, inside.get(role.key) or self._new(role))

    def _find(self, role: _Role) -> _Held | None:
        return self.held.get(role.space, {}).get(role.key)

    def _name(self, of: Definition) -> str:
        return self.buffers[of.tensor].name if self.program is None else self.program.name(of)

    def _meet(self, footprint: Footprint, one: int, other: int, writes: bool, roles: Sequence[_Role]) -> bool:
        """Whether a stage writes through one pointer to memory that it reads, or writes, through another."""
        read, written = footprint.range_of(one, writes), footprint.range_of(other, True)
        if read is None or written is None or one == other or roles[one].space != roles[other].space:
            return False
        start, begin = (roles[p].origin + roles[p].start for p in (one, other))
        return written.low + begin <= read.high + start and read.low + start <= written.high + begin

    # Reads

    def _read(
        self, kernel: str, run: StageRun, footprint: Footprint, parameter: int, role: _Role, own: bool
    ) -> Iterator[Counterexample | Undecided]:
        self.reads += 1
        reach, held = footprint.range_of(parameter, False), self._find(role)
        held = held or self._new(role)
        low, high = (role.start + reach.low) // held.unit, (role.start + reach.high) // held.unit
        # What lies outside of a tensor of the plan is another rule's business.
        whole = self.program is None or (low >= 0 and high < held.nbytes // held.unit)
        if whole and (held.full or bool(held.some[max(0, low) : high + 1].all())):
            return
        name = self._name(role.of)
        width = footprint.function.pointers[parameter].unit

        def there(elements: np.ndarray) -> np.ndarray:
            at = (elements * width + role.start) // held.unit
            if self.program is None:
                at = np.clip(at, 0, held.some.size - 1)
            inside = (at >= 0) & (at < held.some.size)
            inside[inside] = held.some[at[inside]]
            return inside

        try:
            missing = missing_read(footprint, parameter, there, own=own)
        except Undecided as reason:
            yield Undecided(f"whether {run.name} reads of {name} only what it holds: {reason}")
            return
        if missing is None:
            return
        if held.doubt:
            yield Undecided(f"whether {name} holds what {run.name} reads: {held.doubt}")
            return
        yield self._found(kernel, run, role, held, missing, missing.element * width + role.start)

    def _found(
        self, kernel: str, run: StageRun, role: _Role, held: _Held, missing: Missing, byte: int
    ) -> Counterexample:
        """The counterexample of a read that does not find byte `byte` of a definition."""
        by = held.overwritten or self.lost.get((role.space, *role.key), "")
        others = [
            one for one in self.held.get(role.space, {}).values() if one is not held and one.has(role.origin + byte)
        ]
        rule, why = _STALE, f"{by} has written over it" if by else "no stage has written it"
        if others and not by:
            rule, why = _WRONG, f"{self._name(others[0].role.of)} lies there"
        return Counterexample(
            rule,
            kernel,
            (run.name,),
            (text_of(missing.statement),),
            (f"tile {missing.tile}, thread {missing.thread}",),
            f"element {byte // held.unit} of {self._name(role.of)}",
            f"{run.name} reads it, but {why}",
        )

    def _lost(
        self, kernel: str, run: StageRun, footprint: Footprint, one: int, other: int, roles: Sequence[_Role]
    ) -> Iterator[Counterexample]:
        """A read through one pointer of what an earlier tile of the same slot has written over through the other."""
        if run.slots is None or run.ranks is None:
            return
        role, theirs = roles[one], roles[other]
        slots, ranks = np.asarray(run.slots), np.asarray(run.ranks)
        units = [footprint.function.pointers[p].unit for p in (one, other)]
        apart = role.origin + role.start - theirs.origin - theirs.start
        with suppress(Undecided):
            owners = footprint.writes(other)
            for touch in footprint.of(one, False):
                for elements, tiles, threads in footprint.elements(touch):
                    at = (elements * units[0] + apart) // units[1] - owners.low
                    inside = (at >= 0) & (at < owners.owner.size)
                    owner = np.where(inside, owners.owner[np.clip(at, 0, owners.owner.size - 1)], -1)
                    writer = np.clip(owner // owners.threads, 0, len(slots) - 1)
                    bad = (owner >= 0) & (slots[writer] == slots[tiles]) & (ranks[writer] < ranks[tiles])
                    if owners.certain and bad.any():
                        i = int(np.argmax(bad))
                        why = f"tile {int(writer[i])} of the same block has written {self._name(theirs.of)} over it"
                        byte = int(elements[i]) * units[0] + role.start
                        element = f"element {byte // self._new(role).unit} of {self._name(role.of)}"
                        who = (f"tile {int(tiles[i])}, thread {int(threads[i])}",)
                        text = (text_of(touch.access.statement),)
                        yield Counterexample(_STALE, kernel, (run.name,), text, who, element, why)
                        return

    # Writes

    def _write(self, run: StageRun, footprint: Footprint, parameter: int, role: _Role) -> None:
        reach = footprint.range_of(parameter, True)
        if reach is None:
            return
        self.writes += 1
        held, own = self._register(role), footprint.function.pointers[parameter].unit
        try:
            owners = footprint.writes(parameter)
        except Undecided as reason:
            held.doubt = str(reason)
            self._destroy(run, role, role.start + reach.low, role.start + reach.high, None, certain=False)
            return
        written, begin, count = owners.written, role.start + owners.low * own, owners.owner.size
        mask = None if written is None else np.repeat(written, own)
        self._destroy(run, role, begin, begin + count * own - 1, mask, certain=owners.certain)
        if own != held.unit or begin % own:
            held.doubt = f"{run.name} writes it as elements of {own} bytes"
            return
        low, size, sure = begin // own, held.nbytes // own, written if owners.certain else owners.sure
        if sure is None and low <= 0 and low + count >= size:
            held.full, held.mask, held.overwritten, held.doubt = True, None, "", ""
        elif not held.full:
            a, b = max(0, low), min(size, low + count)
            if a < b:
                held.some[a:b] |= True if sure is None else sure[a - low : b - low]
            if held.some.all():
                held.full, held.mask = True, None
            elif not owners.certain:
                held.doubt = f"{run.name} writes it where data says so"

    def _destroy(
        self, run: StageRun, role: _Role, low: int, high: int, written: np.ndarray | None, *, certain: bool
    ) -> None:
        """Nothing else is held where a definition's bytes `low` to `high` are, or those of them that `written` says."""
        inside = self.held[role.space]
        for key, held in list(inside.items()):
            shift = role.origin - held.role.origin
            a, b = max(0, low + shift), min(held.nbytes - 1, high + shift)
            if key == role.key or a > b:
                continue
            by = f"{run.name}, writing {self._name(role.of)},"
            self.overwrites += held.full or held.mask is not None
            if written is None and not a and b == held.nbytes - 1 and certain:
                del inside[key]
                self.lost[(role.space, *key)] = by
                continue
            some = held.some
            if written is None:
                some[a // held.unit : b // held.unit + 1] = False
            else:
                some[(np.flatnonzero(written[a - low - shift : b - low - shift + 1]) + a) // held.unit] = False
            held.full, held.overwritten = False, by
            if not certain:
                held.doubt = f"{run.name} may write {self._name(role.of)} over it"


def _shown(how: tuple) -> str:
    """Where a run looks for a definition, for messages."""
    if not how:
        return "global memory"
    parts, launch, tiles, *_ = how
    where = f"bytes {parts.start} to {parts.end} of shared memory in launch {launch}"
    return f"{where}, {parts.turns} parts of {parts.nbytes} bytes of {tiles} tiles"
