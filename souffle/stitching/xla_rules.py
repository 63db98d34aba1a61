"""The baseline: XLA's own rules for GPUs, as its source has them (000 §1, §2.1).

From ``tensorflow/compiler/xla/service``: ``instruction_fusion.cc`` (the order, duplication, expensive producers),
``gpu/instruction_fusion.cc`` (what is no producer), ``fusion_node_indexing_evaluation.cc`` (how often code stands in a
kernel), ``gpu/fusion_merger.cc`` (bytes), ``gpu/gpu_fusible.cc`` (reductions, shapes, the most operands),
``gpu/multi_output_fusion.cc`` (siblings, and producers of reductions). In reverse topological order each kernel takes
in the producers of what it reads, where

    the producer is element-wise                     (no reduction inside: it is always a root; products are calls)
    the reader is element-wise or a reduction
    an expensive producer has no other reader, and no element of it would be computed twice
    no more operands and outputs than 64 come together
    no TE's code would stand in it more than 15 times

first those that nothing else reads, then light ones that others read too, which are computed again in each reader
(thread composition). A light kernel of several TEs is then merged into all its readers, if these move no more bytes for
it, and its code stands in none of them too often. Last come several outputs: a producer of a reduction that others read
too joins it, and siblings that read one tensor join where both are element-wise of one shape or both reduce one shape
along the same axes, and neither needs the other.

What is computed for one index is computed once in a thread, however many read it; what is read at another index, as by
a broadcast or a slice, has its code there once more for each index of its reader.

What is left out: XLA's bound on shared memory, and what it does for layouts.
A division of floats is light there as here; a reciprocal root is expensive, as in 000 Figure 1 (XLA counts it
as light since 2020).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from souffle.stitching.graph import Op, OpGraph, Read
from souffle.stitching.kinds import ELEMENTWISE, REDUCTIONS, Kind
from souffle.stitching.plan import FusionPlan, Scheme, plan_of
from souffle.stitching.planner import FusionRequest

__all__ = ["XlaRules"]

_MOST_OPERANDS_AND_OUTPUTS = 64
"""``kMaxOperandsAndOutputsPerFusion`` of gpu_fusible.cc."""

_MOST_CODE = 15
"""``kAllowedCodeDuplication`` of fusion_node_indexing_evaluation.h."""

_Indices = dict[tuple[int, int] | None, tuple[int, float]]
"""At which indices a kernel computes a TE, each by the read that makes it, ``None`` for that of the roots.

With each, how often the code for it stands there, and how often an element is computed by it.
"""


@dataclass
class _Kernel:
    """Roots, and at which indices each TE of it is computed."""

    roots: list[int]
    indices: dict[int, _Indices]


class XlaRules:
    """See the module."""

    name = "xla-rules"
    block_composition = False

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        return _Rules(request.graph).plan(self.name)


class _Rules:
    """The kernels of one graph while they grow."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.kernels = {n: _Kernel([n], {n: {None: (1, 1.0)}}) for n in range(len(graph.ops))}
        # The kernels that read each vertex, by their first roots.
        self.readers: list[set[int]] = [set(consumers) for consumers in graph.consumers]
        self.needing: dict[int, int] = {}  # of each kernel those that need it, directly or not, as bits

    def plan(self, name: str) -> FusionPlan:
        self._take_producers(again=False)
        self._take_producers(again=True)
        self._merge_into_readers()
        self._find_needing()
        self._join_producers_of_reductions()
        self._join_siblings()
        ops = self.graph.ops
        order = sorted(self.kernels.values(), key=lambda kernel: kernel.roots)
        owner = {root: place for place, kernel in enumerate(order) for root in kernel.roots}
        for place, kernel in enumerate(order):
            for number in kernel.indices:
                owner.setdefault(number, place)
        groups = [[n for n in kernel.indices if owner[n] == place] for place, kernel in enumerate(order)]
        again = [[n for n in kernel.indices if owner[n] != place] for place, kernel in enumerate(order)]
        schemes = {n: Scheme.PACKING if n in order[owner[n]].roots else Scheme.THREAD for n in range(len(ops))}
        recomputed = {frozenset(group): extra for group, extra in zip(groups, again, strict=True)}
        return plan_of(self.graph, groups, name, schemes=schemes, recomputed=recomputed)

    # A kernel takes in what it reads

    def _take_producers(self, *, again: bool) -> None:
        for root in reversed(range(len(self.graph.ops))):
            kernel = self.kernels.get(root)
            if kernel is None or self.graph.ops[root].kind not in ELEMENTWISE | REDUCTIONS:
                continue
            while (
                producer := next((p for p in self._read_by(kernel) if self._fits(p, kernel, again)), None)
            ) is not None:
                self._take(producer, kernel)

    def _read_by(self, kernel: _Kernel) -> list[int]:
        """Vertices that a kernel reads from others, from the last to the first."""
        read = {p for number in kernel.indices for p in self.graph.producers[number]}
        return sorted(read - kernel.indices.keys(), reverse=True)

    def _fits(self, producer: int, kernel: _Kernel, again: bool) -> bool:
        op = self.graph.ops[producer]
        if op.kind not in ELEMENTWISE or producer not in self.kernels or len(self.kernels[producer].indices) > 1:
            return False
        shared = op.needed or len(self.readers[producer]) > 1
        if shared and not again:
            return False
        code, times = _sums(self._indices(producer, kernel))
        if code > _MOST_CODE or (op.kind is Kind.EXPENSIVE and (shared or times > 1)):
            return False
        return self._operands({*kernel.indices, producer}) + len(kernel.roots) <= _MOST_OPERANDS_AND_OUTPUTS

    def _indices(self, producer: int, kernel: _Kernel) -> _Indices:
        """The indices at which a kernel would compute a producer."""
        found: _Indices = {}
        for consumer in self.graph.consumers[producer]:
            known = kernel.indices.get(consumer, {})
            for place, read in enumerate(self.graph.ops[consumer].reads if known else ()):
                if read.producer == producer:
                    code, times = _sums(known)
                    own = _at_its_index(read, self.graph.ops[consumer])
                    found |= known if own else {(consumer, place): (code * read.indices, times * read.times)}
        return found

    def _operands(self, members: set[int]) -> int:
        return len({r.tensor for n in members for r in self.graph.ops[n].reads if r.producer not in members})

    def _take(self, producer: int, kernel: _Kernel) -> None:
        kernel.indices[producer] = self._indices(producer, kernel)
        first = kernel.roots[0]
        self.readers[producer].discard(first)
        for further in self.graph.producers[producer]:
            if further not in kernel.indices:
                self.readers[further].add(first)
        if not self.readers[producer] and not self.graph.ops[producer].needed:
            for further in self.graph.producers[producer]:
                self.readers[further].discard(producer)
            del self.kernels[producer]

    def _merge_into_readers(self) -> None:
        for root in reversed(range(len(self.graph.ops))):
            merged = self.kernels.get(root)
            readers = sorted(self.readers[root]) if merged is not None else []
            if len(merged.indices if merged else ()) < 2 or not readers or not self._merges(merged, readers):
                continue
            for reader in readers:
                kernel = self.kernels[reader]
                for number in sorted(merged.indices, reverse=True):
                    kernel.indices[number] = self._indices(number, kernel)
                for further in self._read_by(kernel):
                    self.readers[further].add(reader)
            for further in self._read_by(merged):
                self.readers[further].discard(root)
            self.readers[root].clear()
            del self.kernels[root]

    def _merges(self, merged: _Kernel, readers: Sequence[int]) -> bool:
        ops = self.graph.ops
        root = merged.roots[0]
        if ops[root].needed or any(ops[number].kind is not Kind.LIGHT for number in merged.indices):
            return False
        if any(ops[reader].kind not in ELEMENTWISE | REDUCTIONS for reader in readers):
            return False
        if any(_sums(self._indices(root, self.kernels[reader]))[0] > _MOST_CODE for reader in readers):
            return False
        own = self._operand_bytes(merged.indices)
        alone = sum(own.values()) + (1 + len(readers)) * ops[root].written
        together = 0
        for reader in readers:
            known = self._operand_bytes(self.kernels[reader].indices)
            together += sum(size for tensor, size in own.items() if tensor not in known)
        return together <= alone

    def _operand_bytes(self, members: Collection[int]) -> dict[object, int]:
        reads = [r for n in members for r in self.graph.ops[n].reads if r.producer not in members]
        return {read.tensor: read.bytes for read in reads}

    # Several outputs

    def _join_producers_of_reductions(self) -> None:
        for producer in reversed(range(len(self.graph.ops))):
            if producer not in self.kernels or self.graph.ops[producer].kind not in ELEMENTWISE:
                continue
            for first in sorted(self.readers[producer]):
                reduction = self.graph.ops[first]
                if reduction.kind in REDUCTIONS and _loop(reduction) == self.graph.ops[producer].shape:
                    others = self.readers[producer] - {first}
                    if not any(self.needing[reader] >> first & 1 for reader in others):
                        self._join(first, producer)
                        break

    def _join_siblings(self) -> None:
        reading: dict[object, dict[int, None]] = {}
        for first, kernel in self.kernels.items():
            for number in kernel.indices:
                for read in self.graph.ops[number].reads:
                    # ``IsProfitableOperand``: reading a constant or a scalar once more costs nothing.
                    if read.producer not in kernel.indices and not read.constant and max(read.shape, default=1) > 1:
                        reading.setdefault(read.tensor, {})[first] = None
        for siblings in reading.values():
            for one in siblings:
                for other in siblings:
                    if one < other and self._are_siblings(one, other):
                        self._join(one, other)

    def _are_siblings(self, one: int, other: int) -> bool:
        if one not in self.kernels or other not in self.kernels:
            return False
        left, right = self.kernels[one], self.kernels[other]
        if len(left.indices) == len(right.indices) == 1:
            return False  # one of the two is a fusion already
        if self.needing[one] >> other & 1 or self.needing[other] >> one & 1:
            return False
        kinds = {self.graph.ops[root].kind for root in (*left.roots, *right.roots)}
        ops = [self.graph.ops[root] for root in (*left.roots, *right.roots)]
        loops = {(_loop(op), _along(op)) for op in ops if kinds <= REDUCTIONS} or {op.shape for op in ops}
        alike = len(loops) == 1 and (kinds <= ELEMENTWISE or (len(kinds) == 1 and kinds <= REDUCTIONS))
        if not alike:
            return False
        both = {*left.indices, *right.indices}
        return self._operands(both) + len(left.roots) + len(right.roots) <= _MOST_OPERANDS_AND_OUTPUTS

    def _find_needing(self) -> None:
        # Before kernels have several roots, each has a larger number than what it reads.
        for first in sorted(self.kernels, reverse=True):
            self.needing[first] = 0
            for reader in self.readers[first]:
                self.needing[first] |= 1 << reader | self.needing[reader]

    def _join(self, one: int, other: int) -> None:
        """A kernel takes in all of another one, with its outputs."""
        kernel, joined = self.kernels[one], self.kernels.pop(other)
        theirs = self.needing.pop(other)
        self.needing[one] = (self.needing[one] | theirs) & ~(1 << one)
        # What either needs, both need now.
        pair, all_theirs = 1 << one | 1 << other, 1 << one | self.needing[one]
        for first, needing in self.needing.items():
            if first != one and needing & pair:
                self.needing[first] = (needing | all_theirs) & ~(1 << other)
        kernel.roots += joined.roots
        for number, indices in joined.indices.items():
            kernel.indices[number] = kernel.indices.get(number, {}) | indices
        for readers in self.readers:
            if other in readers:
                readers.discard(other)
                readers.add(one)
        for root in kernel.roots:
            self.readers[root].discard(one)


def _sums(indices: _Indices) -> tuple[int, float]:
    """How often its code stands in a kernel, and how often an element is computed."""
    return sum(code for code, _ in indices.values()), sum(times for _, times in indices.values())


def _at_its_index(read: Read, reader: Op) -> bool:
    """Whether a vertex reads one element for each of its own, in any order of the axes."""
    extents = (*reader.shape, *reader.reduced)
    whole = [a for a in read.alignments if a.parts == read.shape[a.dimension] == extents[a.axis]]
    dimensions, axes = {a.dimension for a in whole}, {a.axis for a in whole}
    return all(e == 1 or d in dimensions for d, e in enumerate(read.shape)) and all(
        e == 1 or a in axes for a, e in enumerate(extents)
    )


def _loop(op: Op) -> tuple[int, ...]:
    """The shape of the loop of a root: that of what it reduces, or of its result."""
    return op.reads[0].shape if op.reduced and op.reads else op.shape


def _along(op: Op) -> tuple[int, ...]:
    """The axes of what it reads that a root reduces."""
    aligned = op.reads[0].alignments if op.reads else ()
    return tuple(a.dimension for a in aligned if a.axis >= len(op.shape))
