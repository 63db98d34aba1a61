"""All mutations of a compiled network, and the mutants that they make of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import tirx

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.cuda import module_text
from souffle.codegen.definitions import StageDefinition
from souffle.codegen.plan import CudaModule, Plan
from souffle.codegen.tensor_ir import called_names
from souffle.kernel import MergedKernel
from souffle.mutation.barriers import barrier_changes
from souffle.mutation.comparisons import comparison_changes
from souffle.mutation.expression_changes import index_changes, predicate_changes
from souffle.mutation.flags import flag_changes
from souffle.mutation.numbers import number_changes
from souffle.mutation.parts import part_changes
from souffle.mutation.prologues import prologue_changes
from souffle.mutation.shares import share_changes
from souffle.mutation.statement_paths import Change
from souffle.mutation.structure import structure_changes
from souffle.mutation.teams import team_changes
from souffle.mutation.workspace import Alias, aliased, aliases, shared_changes
from souffle.schedule.lower import cuda_target
from souffle.verify import Certificate, certify_plan
from souffle.verify.bare import bare_functions
from souffle.verify.expressions import Undecided
from souffle.verify.stage_functions import text_of
from souffle.verify.values import Agreement, Mismatch, values_agree

__all__ = ["Mutant", "Mutation", "Mutations"]

_WAITS = (barrier_changes, flag_changes, team_changes, share_changes, part_changes, prologue_changes)
_CHANGES = (*_WAITS, predicate_changes, comparison_changes, index_changes, shared_changes)
_THOROUGH = (number_changes, structure_changes)

_SEEDS = 16
"""Random points at which values are compared. A maximum hides a wrong operand at some of them: with a threshold, where
both the right and the wrong value are below it, at about one of four."""

_MOST_LANES = 1 << 16
"""Threads of all tiles of a stage, up to which all of them are run to compare values; beyond, some tiles."""


@dataclass(frozen=True)
class Mutation:
    """One change of a network.

    Attributes
    ----------
    kind : str
        ``"grid barrier"``, ``"block barrier"``, ``"warp barrier"``, ``"copy wait"``, ``"arrival"``, ``"flag wait"``,
        ``"flags left"``, ``"team"``, ``"share"``, ``"part"``, ``"predicate"``, ``"comparison"``, ``"index"`` or
        ``"alias"``; thorough ones are ``"number"``, ``"mask"``, ``"order"``, ``"statement"``, ``"condition"``,
        ``"array"`` and ``"tensor"``, too.
    action : str
        What is done, such as ``"delete"``.
    kernel : str
        Where; empty for tensors of the workspace. Of a stage function that several kernels call, the first.
    stage : str or None
        The stage function, which changes for all who call it; ``None`` where the kernel itself, or the plan, changes.
    number : int
        Among the changes of its kind of this function.
    what : str
        In words.
    text : str
        The statement as it was.
    """

    kind: str
    action: str
    kernel: str
    stage: str | None
    number: int
    what: str
    text: str

    @property
    def identity(self) -> str:
        """The same in every enumeration of the same network."""
        return f"{self.kind}/{self.action}/{self.kernel}/{self.stage or ''}/{self.number}"


@dataclass(frozen=True, eq=False)
class Mutant:
    """A network with one change.

    Attributes
    ----------
    mutation : Mutation
    plan : Plan
        Its texts are those of the network; see :meth:`emitted`.
    kernels, functions : mapping of str to PrimFunc
        The final TensorIR.
    merged : tuple of MergedKernel
        The kernels, changed or not.
    changed : str or None
        The kernel or stage function that differs.
    definition : StageDefinition or None
        Of the stage function that differs, where it is known.
    """

    mutation: Mutation
    plan: Plan
    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    merged: tuple[MergedKernel, ...]
    changed: str | None
    definition: StageDefinition | None = None

    def certificate(self) -> Certificate:
        """What the memory certificate says."""
        return certify_plan(self.plan, dict(self.kernels), dict(self.functions))

    def values(self) -> Agreement | Mismatch | Undecided | None:
        """Whether the stage function that differs computes what its stage is defined to; ``None`` for other changes."""
        if self.definition is None:
            return None
        functions = bare_functions(self.kernels, self.functions)
        lacking = next((name for name, _, _ in self.definition.functions if name not in functions), None)
        if lacking is not None:
            return Undecided(f"{lacking}, of which it is not known what its registers hold")
        listed = [(functions[name], tiles, threads) for name, tiles, threads in self.definition.functions]
        lanes = sum(tiles * threads for _, tiles, threads in listed)
        tiles = "all" if lanes <= _MOST_LANES else None
        found: Agreement | Mismatch | Undecided | None = None
        for seed in range(_SEEDS):
            found = values_agree(self.definition.func, listed, seed=seed, tiles=tiles)
            if not isinstance(found, Agreement):
                break
        return found

    def emitted(self) -> Plan:
        """The plan with the text of what changed.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            From TVM, if no text can be made of it.
        """
        plan, target = self.plan, cuda_target(self.plan.options.arch)
        callers = {k.module for k in plan.kernels if self.changed in (k.name, *called_names(self.kernels[k.name]))}
        modules = list(plan.modules)
        for number in callers:
            inside = {k.name for k in plan.kernels if k.module == number}
            own = [replace(k, func=self.kernels[k.name]) for k in self.merged if k.name in inside]
            modules[number] = CudaModule(module_text(own, self.functions, target), b"")
        return replace(plan, modules=tuple(modules))


@dataclass(frozen=True, eq=False)
class _Place:
    """A change and where it is, without its text, which takes time to write."""

    kernel: str
    stage: str | None
    number: int
    change: Change | Alias

    @property
    def group(self) -> tuple[str, str]:
        if isinstance(self.change, Change):
            return self.change.kind, self.change.action
        return "alias", "lives meet" if self.change.meets else "lives apart"


class Mutations:
    """The mutations of a compiled network, in the same order each time.

    Parameters
    ----------
    compiled : CompiledKernels
        From :func:`souffle.pipeline.compile_cuda`.
    thorough : bool
        Also change any number and any statement, of which there are many more.
    """

    def __init__(self, compiled: CompiledKernels, *, thorough: bool = False) -> None:
        self.compiled = compiled
        self.changes = _CHANGES + (_THOROUGH if thorough else ())
        self.definitions = {name: one for one in compiled.definitions for name, _, _ in one.functions}
        self.kernels = {kernel.name: kernel.func for kernel in compiled.merged}
        self.functions: dict[str, tirx.PrimFunc] = {}
        self._caller: dict[str, str] = {}
        for merged in compiled.merged:
            for function in merged.shape.called:
                self.functions.setdefault(function.name, function.func)
                self._caller.setdefault(function.name, merged.name)
            for call in merged.shape.stage_calls:
                # What fills registers is a part of what the stage computes.
                if call.kept:
                    self.definitions[call.kept.fill.name] = self.definitions[call.functions[0].name]
                # And so are the copies that are made before it.
                if call.prologue:
                    self.definitions[call.prologue.copies.name] = self.definitions[call.functions[0].name]

    @cached_property
    def _places(self) -> tuple[_Place, ...]:
        return tuple(self._enumerated())

    def _enumerated(self) -> Iterator[_Place]:
        where: list[tuple[str, str | None, tirx.PrimFunc]] = [(n, None, f) for n, f in self.kernels.items()]
        where += [(self._caller[name], name, func) for name, func in self.functions.items()]
        for kernel, stage, func in where:
            counts: dict[str, int] = {}
            for changes in self.changes:
                for change in changes(func):
                    number = counts[change.kind] = counts.get(change.kind, -1) + 1
                    yield _Place(kernel, stage, number, change)
        for number, alias in enumerate(aliases(self.compiled.plan, self.kernels)):
            yield _Place("", None, number, alias)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Mutation]:
        return (self._mutation(place) for place in self._places)

    def _mutation(self, place: _Place) -> Mutation:
        kind, action = place.group
        if isinstance(place.change, Alias):
            one, other = (self.compiled.plan.buffers[i] for i in (place.change.moved, place.change.onto))
            what = f"{one.name} lies where {other.name} does, at byte {other.offset} of the workspace"
            return Mutation(kind, action, "", None, place.number, f"{what}; {action}", "")
        text = text_of(place.change.statement)
        return Mutation(kind, action, place.kernel, place.stage, place.number, place.change.what, text)

    def sample(
        self,
        count: int,
        seed: int = 0,
        kinds: Sequence[str] = (),
        where: Callable[[str | None, Change], bool] | None = None,
    ) -> tuple[Mutation, ...]:
        """Some mutations, spread over kinds, what is done, kernels and stages.

        Parameters
        ----------
        count : int
            Fewer are given where there are not so many.
        seed : int
        kinds : sequence of str
            Only these; all where empty.
        where : callable, optional
            Whether a change of a stage function, or of a kernel where that is ``None``, is one of them.
        """
        draw = random.Random(seed)
        kinded: dict[str, dict[tuple, list[_Place]]] = {}
        for place in self._places:
            kind, action = place.group
            chosen = where is None or (isinstance(place.change, Change) and where(place.stage, place.change))
            if chosen and (not kinds or kind in kinds):
                kinded.setdefault(kind, {}).setdefault((action, place.kernel, place.stage), []).append(place)
        # Turns go to kinds, in each to what is done, and there to a function that had none yet.
        turns: list[list[_Place]] = []
        for groups in kinded.values():
            by_action: dict[str, list[list[_Place]]] = {}
            for (action, *_), places in groups.items():
                draw.shuffle(places)
                by_action.setdefault(action, []).append(places)
            columns = []
            for places in by_action.values():
                draw.shuffle(places)
                columns.append(_alternating(places))
            draw.shuffle(columns)
            turns.append(_alternating(columns))
        draw.shuffle(turns)
        return tuple(self._mutation(place) for place in _alternating(turns)[:count])

    def mutant(self, mutation: Mutation) -> Mutant:
        """The network with a mutation.

        Raises
        ------
        KeyError
            If it is none of this network.
        """
        place = self._by_identity[mutation.identity]
        plan, kernels, functions = self.compiled.plan, self.kernels, self.functions
        if isinstance(place.change, Alias):
            return Mutant(mutation, aliased(plan, place.change), kernels, functions, self.compiled.merged, None)
        func = place.change.make()
        if place.stage is None:
            kernels = {**kernels, place.kernel: func}
        else:
            functions = {**functions, place.stage: func}
        changed = place.stage or place.kernel
        definition = self.definitions.get(place.stage)
        return Mutant(mutation, plan, kernels, functions, self.compiled.merged, changed, definition)

    @cached_property
    def _by_identity(self) -> dict[str, _Place]:
        found = {}
        for place in self._places:
            kind, action = place.group
            found[f"{kind}/{action}/{place.kernel}/{place.stage or ''}/{place.number}"] = place
        return found


def _alternating(lists: Sequence[Sequence[_Place]]) -> list[_Place]:
    """The first of each, then the second of each, and so on."""
    longest = max((len(items) for items in lists), default=0)
    return [items[i] for i in range(longest) for items in lists if i < len(items)]
