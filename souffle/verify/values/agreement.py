"""Whether a stage's functions compute what its definition says, at random points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import numpy as np
from tvm import s_tir, tirx
from tvm.ir import Call

from souffle.tvm_calls import structural_walk
from souffle.verify.bounds import calculated
from souffle.verify.expressions import Undecided
from souffle.verify.function_reader import read_function
from souffle.verify.indices import operator_name
from souffle.verify.stage_functions import text_of
from souffle.verify.values.coverage import mark_written
from souffle.verify.values.exponentials import paired_numbers_at
from souffle.verify.values.function import FunctionRun
from souffle.verify.values.infinities import DIVISIONS, divides_by_places, leaves_numbers
from souffle.verify.values.inputs import blank, elements_of, integer_ranges, random_tensors
from souffle.verify.values.intrinsics import intrinsic
from souffle.verify.values.memory import Lanes
from souffle.verify.values.points import (
    CUT,
    FURTHER,
    KINDS,
    SEARCH,
    WITHOUT_REDUCTIONS,
    Kind,
    Literals,
    Numbers,
    literals_of,
    numbers_at,
)
from souffle.verify.values.reference import DefinitionRun
from souffle.verify.values.results import Agreement, FunctionComparison, Mismatch
from souffle.verify.values.scalars import Fault, ZeroDivisor, is_float
from souffle.verify.values.sightings import Sighting, TextSightings
from souffle.verify.vocabulary import function_name

__all__ = ["Result", "StageFunction", "values_agree"]

StageFunction = tuple[tirx.PrimFunc, int, int]
"""A function ``f(tile, tid, pointers...)`` with its tiles and its threads."""

_WORK = 1 << 21
"""Numbers assigned, up to which more tiles of a function are run."""

_LANES_FURTHER = 1 << 16
"""Of the tiles that are then run together."""

_TILES = 5
"""Of a function, if nothing else is asked for: the first, the last, and some between."""

_TRIED = 256
"""Elements of a definition that show whether integers choose elements that there are."""

_MOST_POINTS = 16
"""Of stages that take little work, while some comparison of theirs was not seen to come out in all ways."""

_FEWER_TILES = 2
"""Of a function, at all points but the first."""

_MOST_SEARCHED = 64
"""Points of stages that do not take each term of a maximum once, to see whether it matters."""

_LANES = 2048
"""Of all tiles that are run; fewer tiles are chosen where they have many threads."""


Result = Agreement | Mismatch | Undecided

NumbersAt = Callable[..., Numbers]
"""From a kind of points, a seed, literals, and whether fields should be the smallest, to the numbers of a point."""


def values_agree(
    reference: tirx.PrimFunc,
    functions: Sequence[StageFunction],
    *,
    seed: int = 0,
    tiles: int | Literal["all"] | None = None,
    points: int | None = None,
) -> Result:
    """Compare a stage's lowered functions with its definition on random inputs from a finite field.

    Parameters
    ----------
    reference : tirx.PrimFunc
        The definition: TensorIR that is not scheduled; parameters are inputs, then outputs.
    functions : sequence of (PrimFunc, tiles, threads)
        ``f(tile, tid, pointers...)`` with the same parameters; together they make the outputs.
    seed : int
        Of the inputs, of functions such as ``exp``, and of the choice of tiles.
    tiles : int, "all" or None
        How many tiles of each function are run. Where the others write is looked at too, without values.
    points : int, optional
        How many random inputs are tried. If not given, one where the definition and the functions are made of sums and
        products and functions, and those of :data:`souffle.verify.values.points.KINDS` where they compare numbers: a
        comparison can hide a wrong number. Then more, where that is little work, until each comparison came out in all
        ways.

    Returns
    -------
    Agreement, Mismatch or Undecided
        The last is returned, not raised: it names what this check does not know the meaning of.
    """
    if points is not None and points < 1:
        raise ValueError("values are compared at one point at least")
    result, tried = _compared(reference, functions, seed, tiles, points, numbers_at)
    # What differs at the first point, where nothing is equal by chance, may be equal by a rule that fields have not.
    if isinstance(result, Mismatch) and not tried and _has_exponentials(reference):
        again, _ = _compared(reference, functions, seed, tiles, points, paired_numbers_at)
        if isinstance(again, Agreement):
            return replace(again, exponentials=True)
    return result


def _compared(
    reference: tirx.PrimFunc,
    functions: Sequence[StageFunction],
    seed: int,
    tiles: int | Literal["all"] | None,
    points: int | None,
    numbers_of: NumbersAt,
) -> tuple[Result, int]:
    """The result with numbers of one sort, and at which point it was found."""
    sightings = _Sightings(functions)
    literals = literals_of([reference, *(func for func, _, _ in functions)])
    terms = _compares_terms(reference)
    found: list[Agreement] = []
    doubt: Undecided | None = None
    unsafe = _beyond_types(functions)
    cut = len(reference.params) if numbers_of is paired_numbers_at else 0
    tried = work = 0
    with np.errstate(all="ignore"):
        while True:
            if tried >= (_wanted(tried, work, sightings, terms, doubt, cut) if points is None else points):
                if points is not None or doubt is not None or unsafe is None:
                    break
                # Where data decide whether a number leaves its type, some of them may show that it matters.
                doubt = unsafe
                continue
            own = tiles if tiles is not None or not tried or doubt is not None else _FEWER_TILES
            kind = _kind(tried, doubt, cut)
            check = _Check(reference, functions, seed, tried, kind, literals, sightings, own, numbers_of)
            here = check.result()
            if isinstance(here, Mismatch) and check.kind.sums:
                doubt = Undecided(f"{here}, if each term of a maximum counts; whether it matters was not seen")
            elif isinstance(here, Agreement):
                found.append(here)
            elif not (tried and check.beyond):
                # Else small numbers, made into integers, choose what the definition does not have.
                return here, tried
            work += check.all_work if tried else 0
            tried += 1
    beyond = doubt or unsafe or _beyond_numbers(reference, functions)
    if beyond is not None:
        return beyond, tried
    together = tuple(
        reduce(FunctionComparison.with_, own) for own in zip(*(one.functions for one in found), strict=True)
    )
    seen = sightings.all
    return Agreement(together, len(found), found[0].covered, len(seen), tuple(s for s in seen if s.open)), tried


def _has_exponentials(reference: tirx.PrimFunc) -> bool:
    """Whether a definition calls ``exp``."""
    found: list[str] = []
    structural_walk(reference.body, (Call, lambda call: found.append(operator_name(call))))
    return any(function_name(name) == "exp" for name in found)


def _divides_by_places(reference: tirx.PrimFunc) -> bool:
    """Whether a definition has quotients by what is calculated of places, which may be zero in it, too."""
    found: list[bool] = []
    structural_walk(reference.body, (DIVISIONS, lambda node: found.append(divides_by_places(node))))
    return any(found)


def _beyond_types(functions: Sequence[StageFunction]) -> Undecided | None:
    """Why whole numbers of functions, which are exact here, may be others in the text; ``None`` if they are those."""
    for number, (func, tiles, threads) in enumerate(functions):
        for finding in calculated("", read_function(f"function {number}", func, tiles, threads)):
            return finding if isinstance(finding, Undecided) else Undecided(f"{finding.reason}: {finding.element}")
    return None


def _beyond_numbers(reference: tirx.PrimFunc, functions: Sequence[StageFunction]) -> Mismatch | None:
    """What a function makes that is no number, where its definition has nothing of the kind."""
    if leaves_numbers(reference.body) is not None:
        return None
    output = str(reference.params[-1].name)
    for number, (func, _, _) in enumerate(functions):
        what = leaves_numbers(func.body)
        if what is not None:
            return Mismatch(number, None, None, output, (), "", f"{what}, and nowhere in its definition")
    return None


def _kind(point: int, doubt: Undecided | None, cut: int) -> Kind:
    """How a point is made, with `cut` of them behind the usual ones in which a tensor is cut."""
    if point < len(KINDS):
        return KINDS[point]
    if point < len(KINDS) + cut:
        return CUT
    further = FURTHER if doubt is None else SEARCH
    return further[point % len(further)]


def _wanted(tried: int, work: int, sightings: _Sightings, terms: bool, doubt: Undecided | None, cut: int) -> int:
    """How many points there should be, when some were tried; `terms`: whether a reduction compares its terms."""
    if not tried:
        return 1
    if doubt is not None:
        return _MOST_SEARCHED if work < _WORK else 0
    seen = sightings.all
    least = len(KINDS) + cut if terms else WITHOUT_REDUCTIONS
    if tried < least:
        return least if seen or terms else 1
    return _MOST_POINTS if work < _WORK and any(one.open for one in seen) else 0


def _compares_terms(reference: tirx.PrimFunc) -> bool:
    """Whether a reduction of the definition is not a sum or a product."""
    found: list[bool] = []

    def see(block: s_tir.SBlock) -> None:
        if block.init is not None:
            sums = isinstance(block.body, tirx.BufferStore) and isinstance(block.body.value, (tirx.Add, tirx.Mul))
            found.append(not sums)

    structural_walk(reference.body, (s_tir.SBlock, see))
    return any(found)


class _Sightings:
    """How comparisons came out: of each function, and of each block of the definition."""

    def __init__(self, functions: Sequence[StageFunction]) -> None:
        self.functions = [TextSightings() for _ in functions]
        self.definition: dict[int, TextSightings] = {}

    @property
    def all(self) -> list[Sighting]:
        """All that were come to."""
        texts = (*self.definition.values(), *self.functions)
        return [one for text in texts for one in text.all if one.evaluated]


class _Check:
    """One random input."""

    def __init__(
        self,
        reference: tirx.PrimFunc,
        functions: Sequence[StageFunction],
        seed: int,
        point: int,
        kind: Kind,
        literals: Literals,
        sightings: _Sightings,
        tiles: int | Literal["all"] | None,
        numbers_of: NumbersAt,
    ) -> None:
        self.reference = reference
        self.functions = functions
        self.point = point
        self.seed = seed * _MOST_SEARCHED + point
        self.literals = literals
        self.kind = kind
        self.numbers = numbers_of(self.kind, self.seed, literals, smallest=point >= len(KINDS))
        self.sightings = sightings
        self.tiles = tiles
        self.work = self.all_work = 0
        self.beyond = False
        self.buffers = list(reference.params)

    def result(self) -> Result:
        """With the widest range of integers that the definition allows."""
        ranges = integer_ranges(self.reference, beyond=self.point > 0)
        for number, integers in enumerate(ranges):
            try:
                return self._compare(integers)
            except Fault as fault:
                if number == len(ranges) - 1:
                    self.beyond = True
                    return Undecided(f"{fault.reason}, whatever integers it is given")
            except Undecided as reason:
                return reason
        raise AssertionError("a range decides")

    def _compare(self, integers: tuple[int, int]) -> Result:
        """Compare.

        Raises
        ------
        Fault
            If the definition reads beyond a tensor.
        Undecided
        """
        values = random_tensors(self.buffers, integers, self.numbers, self.kind.inputs, self.literals)
        probe = DefinitionRun(self.reference, {}, self.numbers, {})
        outputs = [i for i, b in enumerate(self.buffers) if b in probe.blocks]
        given = {b: values[i] for i, b in enumerate(self.buffers) if i not in outputs}
        definition = DefinitionRun(self.reference, given, self.numbers, self.sightings.definition)
        if any(not is_float(str(b.dtype)) for b in given):
            self._tried(definition)
        compared = []
        written = {i: np.zeros(elements_of(self.buffers[i]), bool) for i in outputs}
        for number, (func, count, threads) in enumerate(self.functions):
            compared.append(FunctionComparison((), count, ()))
            chosen = self._chosen(count, threads)
            while chosen:
                found = self._function(number, func, Lanes(chosen, threads), values, definition, written)
                if isinstance(found, Mismatch):
                    return found
                compared[-1] = compared[-1].with_(FunctionComparison(chosen, count, found))
                chosen = self._further(compared[-1], threads)
        complete = all(len(c.tiles) == c.of for c in compared)
        covered = complete or (not self.point and self._marked(written))
        if covered:
            for i, known in written.items():
                if not known.all():
                    return self._unwritten(i, int(np.flatnonzero(~known)[0]))
        return Agreement(tuple(compared), 1, covered)

    def _marked(self, written: dict[int, np.ndarray]) -> bool:
        """Whether it can be said what all tiles write, which is then marked."""
        try:
            for func, count, threads in self.functions:
                mark_written(func, count, threads, written)
        except (Undecided, Fault):
            return False
        return True

    def _tried(self, definition: DefinitionRun) -> None:
        """Evaluate a part of the definition, to see whether integers choose elements that there are.

        Of what is between inputs and outputs too: a function may work out elements of it that no output needs.
        """
        random = np.random.default_rng(self.seed)
        for buffer in definition.blocks:
            count = elements_of(buffer)
            places = np.arange(count) if count <= _TRIED else random.integers(0, count, _TRIED)
            definition.elements(buffer, places)

    def _chosen(self, count: int, threads: int) -> tuple[int, ...]:
        most = count if self.tiles == "all" else self.tiles or max(2, min(_TILES, _LANES // threads))
        if most >= count:
            return tuple(range(count))
        random = np.random.default_rng((self.seed, count))
        if self.point:
            # The ends were run at the first point.
            return tuple(sorted(int(t) for t in random.choice(count, most, replace=False)))
        between = random.choice(np.arange(1, count - 1), max(0, most - 2), replace=False)
        return tuple(sorted({0, count - 1, *(int(t) for t in between)}))[-most:]

    def _further(self, compared: FunctionComparison, threads: int) -> tuple[int, ...]:
        """Tiles that are run too, where those that were run took little work."""
        left = sorted(set(range(compared.of)) - set(compared.tiles))
        most = (_WORK - self.work) * len(compared.tiles) // max(self.work, 1)
        if self.tiles is not None or not left or most < len(compared.tiles):
            self.work = 0
            return ()
        random = np.random.default_rng((self.seed, len(left)))
        most = min(most, len(left), max(1, _LANES_FURTHER // threads))
        return tuple(sorted(int(t) for t in random.choice(left, most, replace=False)))

    def _function(
        self,
        number: int,
        func: tirx.PrimFunc,
        lanes: Lanes,
        values: Sequence[np.ndarray],
        definition: DefinitionRun,
        written: dict[int, np.ndarray],
    ) -> Mismatch | tuple[tuple[str, int], ...]:
        tensors = [blank(self.buffers[i], self.numbers) if i in written else v for i, v in enumerate(values)]
        run = FunctionRun(func, lanes, tensors, self.numbers, self.sightings.functions[number].again(), intrinsic)
        try:
            run.run()
        except Fault as fault:
            divides = isinstance(fault, ZeroDivisor)
            if divides and _divides_by_places(self.reference):
                raise Undecided(f"{fault.reason}, as its definition may") from None
            tile, thread = lanes.named(fault.lane)
            text = text_of(run.statements[run.current]) if run.statements else ""
            return Mismatch(number, tile, thread, "arithmetic" if divides else "memory", (), text, fault.reason)
        self.work += run.work
        self.all_work += run.work
        elements = []
        for i, tensor in enumerate(run.tensors):
            if tensor.writes and i not in written:
                return self._wrong(number, run, i, int(tensor.writes[0].elements[0]), "it writes an input")
            if not tensor.writes:
                continue
            places = np.unique(np.concatenate([w.elements for w in tensor.writes]))
            written[i][places] = True
            expected = definition.elements(self.buffers[i], places)
            wrong = np.flatnonzero(self.numbers.differ(expected, tensor.values[places]))
            if len(wrong):
                why = f"{len(wrong)} of {len(places)} elements that were compared are not what the definition says"
                return self._wrong(number, run, i, int(places[wrong[0]]), why)
            elements.append((str(self.buffers[i].name), len(places)))
        if run.unsure and not definition.unsure:
            raise Undecided("an integer or a comparison that depends on how nvcc rounds, and not so in the definition")
        return tuple(elements)

    def _index(self, parameter: int, place: int) -> tuple[int, ...]:
        shape = tuple(int(e) for e in self.buffers[parameter].shape)
        return tuple(int(i) for i in np.unravel_index(place, shape)) if shape else ()

    def _wrong(self, number: int, run: FunctionRun, parameter: int, place: int, reason: str) -> Mismatch:
        """What is known of an element: who wrote it last."""
        for write in reversed(run.tensors[parameter].writes):
            at = np.flatnonzero(write.elements == place)
            if len(at):
                tile, thread = run.lanes.named(int(write.lanes[at[-1]]))
                text = text_of(run.statements[write.statement])
                name, index = str(self.buffers[parameter].name), self._index(parameter, place)
                return Mismatch(number, tile, thread, name, index, text, reason)
        raise AssertionError("an element that was written has a writer")

    def _unwritten(self, parameter: int, place: int) -> Mismatch:
        name, index = str(self.buffers[parameter].name), self._index(parameter, place)
        return Mismatch(0, None, None, name, index, "", "no tile writes it")
