"""Vertical transformation: chains of one-relies-on-one TEs become one TE (paper §6.2, Figure 4).

::

    P[u] = p(u)                 C[v] = c(..., p(f(v)), ...)
    C[v] = c(..., P[f(v)], ...)   →

Legal because a TE without reduction is a function of its indices: an element of P can be computed wherever it is read.
The arithmetic stays the same where every element of P is read at most once. So P is put into its readers when that
holds, or when P does no arithmetic at all and only moves data (reshape, transpose, slice, pad, concat).
"""

from __future__ import annotations

from collections.abc import Sequence

from souffle.analysis import Analysis, analyze
from souffle.decision import Decision
from souffle.program import TE, Tensor, TEProgram, make_te
from souffle.transform.handles import Handles, instantiate, read
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    load_indices,
    load_tensor,
    loads,
    map_bodies,
)

__all__ = ["vertical"]

_LARGEST_BODY = 64
"""Loads in one TE's body; composing past this gains nothing and makes expressions that are slow to simplify."""


def vertical(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Compose chains of one-relies-on-one TEs, to a fixed point.

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    program : TEProgram
        The same object where nothing could be composed.
    decisions : tuple of Decision
        One for each TE that was put into its readers, and for each that was kept although it is one-relies-on-one.
    """
    accepted: list[Decision] = []
    while True:
        composed, done, refused = _compose_once(program)
        if composed is program:
            return program, (*accepted, *refused)
        accepted.extend(done)
        program = composed


def _compose_once(program: TEProgram) -> tuple[TEProgram, list[Decision], list[Decision]]:
    analysis = analyze(program)
    done: list[Decision] = []
    refused: list[Decision] = []
    inlined: dict[Tensor, TE] = {}
    replaced: dict[Tensor, TE] = {}
    tes = []
    for te_ in program.tes:
        current = te_
        if isinstance(te_, TE) and any(t in inlined for t in te_.inputs):
            current = _with_producers(te_, {t: replaced[t] for t in te_.inputs if t in inlined})
        tes.append(current)
        if current is not te_ or not isinstance(te_, TE) or len(te_.outputs) != 1:
            continue  # what has just taken in its producers is judged anew in the next round
        replaced[te_.output] = te_
        reason = _why_keep(te_, program, analysis)
        if reason is None:
            inlined[current.output] = te_
            readers = ", ".join(c.name for c in program.consumers[te_.output])
            reason = "its elements are computed where they are read"
            done.append(Decision("vertical", f"{te_.name} into {readers}", True, reason))
        elif reason:
            refused.append(Decision("vertical", te_.name, False, reason))
    if not inlined:
        return program, [], refused
    return program.with_tes(tes), done, refused


def _why_keep(te_: TE, program: TEProgram, analysis: Analysis) -> str | None:
    """Why a TE is not put into its readers: ``None`` if it is, "" where the question does not arise."""
    if te_.is_reduction or len(te_.outputs) != 1:
        return ""
    consumers = program.consumers[te_.output]
    if not consumers or te_.output in program.outputs:
        return ""
    if not all(isinstance(c, TE) for c in consumers):
        return "an operator that is no TE reads it"
    work = analysis.arithmetic(te_)
    own_loads = len(loads(te_.body))
    for consumer in consumers:
        occurrences = _occurrences(consumer, te_.output)
        if own_loads * len(occurrences) + len(loads(consumer.body)) > _LARGEST_BODY:
            return f"{consumer.name} would read {own_loads * len(occurrences)} more elements for each of its own"
    if work.operations == 0:
        return None
    reads = 0
    for consumer in consumers:
        access = analysis.access(consumer, consumer.inputs.index(te_.output))
        reads += access.times
        if work.expensive and len(_occurrences(consumer, te_.output)) > 1:
            return f"{consumer.name} would hold its expensive expression several times"
    if reads > te_.output.size:
        kind = "expensive " if work.expensive else ""
        return f"its {te_.output.size} elements are read {reads} times, which would repeat {kind}arithmetic"
    return None


def _occurrences(consumer: TE, tensor: Tensor) -> list[PrimExpr]:
    placeholder = consumer.placeholder_of(tensor)
    return [load for body in consumer.op.body for load in loads(body) if load_tensor(load).same_as(placeholder)]


def _with_producers(te_: TE, producers: dict[Tensor, TE]) -> TE:
    """`te_` with the expressions of some producers in the place of reads of them."""
    handles = Handles()
    bodies = handles.opened(te_)
    opened = {handles.of(t): (producer, handles.opened(producer)[0]) for t, producer in producers.items()}

    def rewrite(load: PrimExpr) -> PrimExpr:
        for handle, (producer, body) in opened.items():
            if load_tensor(load).same_as(handle):
                return instantiate(body, producer.axes, load_indices(load))
        return load

    composed = simplified(map_bodies(bodies, rewrite), te_)
    origin = te_.origin.merged(*(p.origin for p in producers.values()))
    return make_te(te_.name, te_.axes, composed, handles.pairs(), origin, te_.outputs)


def simplified(bodies: Sequence[PrimExpr], te_: TE) -> list[PrimExpr]:
    """The index arithmetic of some bodies simplified under the bounds of the TE's axes."""
    analyzer = bounded_analyzer((*te_.axes, *te_.reduce_axes))

    def tidy(index: PrimExpr) -> PrimExpr:
        # TVM simplifies no index that depends on data.
        return index if loads(index) else analyzer.simplify(index)

    return map_bodies(bodies, lambda load: read(load_tensor(load), [tidy(i) for i in load_indices(load)]))
