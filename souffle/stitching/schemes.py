"""By which scheme each TE of a pattern is attached to its readers, as its layout says (003 §5.1, 000 §4.1).

    no member reads it                             packing
    kept for other threads, one element of a unit  warp       (a shuffle)
    kept for other threads, more of a unit         block      (shared memory)
    all other                                      thread     (registers; computed again where several threads need it)

The latency-evaluator may find a block faster than a warp for a whole unit; then what is single is attached by block,
too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from souffle.stitching.graph import OpGraph
from souffle.stitching.layout import Component, layout_of
from souffle.stitching.plan import Scheme

__all__ = ["schemes_in", "schemes_of"]


def schemes_of(graph: OpGraph, members: Sequence[int]) -> dict[int, Scheme]:
    """The scheme of each vertex of a pattern.

    Parameters
    ----------
    graph : OpGraph
    members : sequence of int
        Rising.
    """
    found = dict.fromkeys(members, Scheme.THREAD)
    for component in layout_of(graph, members).components:
        found |= schemes_in(graph, component, component.single)
    return found


def schemes_in(graph: OpGraph, component: Component, in_warp: Collection[int]) -> dict[int, Scheme]:
    """The scheme of each member of a component, of which those of `in_warp` need no shared memory."""
    members = set(component.members)
    found = {}
    for number in component.members:
        if not members.intersection(graph.consumers[number]):
            found[number] = Scheme.PACKING
        elif number in component.shared:
            found[number] = Scheme.WARP if number in in_warp else Scheme.BLOCK
        else:
            found[number] = Scheme.THREAD
    return found
