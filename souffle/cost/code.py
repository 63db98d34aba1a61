"""Which runs of a kernel's stages find their machine code in the instruction cache of a multiprocessor.

A kernel executes the code of its stages one after another. What a run executes is still there if all that was executed
since, with itself, is no more than the cache holds (least recently used goes first); a kernel of one pass over more
code than that fetches all of it. Functions that several stages share are one piece of code; so are the steps of a loop.

Around the kernel is its network, which runs again and again. If all its code together fits, nothing is ever fetched.
Otherwise a kernel begins with none of its own: as one kernel, or as many that follow one another, the code is as much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = ["fetching_runs", "fits"]


def fits(code: Mapping[Hashable, float], cache_bytes: float) -> bool:
    """Whether some pieces of code are in the cache together.

    Parameters
    ----------
    code : mapping of piece to float
        Bytes of each.
    cache_bytes : float
    """
    return sum(code.values()) <= cache_bytes


def fetching_runs(
    units: Iterable[tuple[Sequence[Hashable], int]], code: Mapping[Hashable, float], cache_bytes: float
) -> list[list[int]]:
    """How many runs of each piece of code fetch it, in a kernel that begins with none.

    Parameters
    ----------
    units : iterable of (sequence of piece, int)
        What is executed in this order, and how often one after another: the steps of a loop.
    code : mapping of piece to float
        Bytes of each.
    cache_bytes : float

    Returns
    -------
    list of list of int
        For each unit, one number for each of its pieces.
    """
    recent: OrderedDict[Hashable, float] = OrderedDict()

    def fetched(piece: Hashable) -> bool:
        held = 0.0
        for other in reversed(recent):
            held += recent[other]
            if other == piece:
                break
        found = piece in recent and held <= cache_bytes
        recent[piece] = code[piece]
        recent.move_to_end(piece)
        return not found

    found = []
    for pieces, runs in units:
        counts = [int(fetched(piece)) for piece in pieces]
        if runs > 1:
            # Between two runs of a piece stands one step's code, in the second step as in all later ones.
            again = [fetched(piece) for piece in pieces]
            counts = [first + (runs - 1) * later for first, later in zip(counts, again, strict=True)]
        found.append(counts)
    return found
