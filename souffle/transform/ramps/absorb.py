"""Ramps become steps: what stands before and after a repeated piece, computing some of its rows only, is absorbed.

::

    v_0[r] = F(v_-1)[r]  for some rows r                      v'_s[r] = where(m_s[r] != 0, F(v'_s-1)[r], v'_s-1[r])
    v_s = F(v_s-1)       for s in 1 .. n              →          for s in 0 .. n + 1; m_s[r] = 0 where r idles
    v_n+1[r] = F(v_n)[r] for other rows r                     and v'_-1 = what the rows hold at first, 0 for none

Legal where, in each partial step, each element of a row that is computed (``m_s[r] = 1``) is what F makes of the
elements that F reads there: the same operators in the same order, of equal constants and of values that are, by
induction over the steps, in the rows that ``v'_s-1`` has (:mod:`souffle.transform.ramps.unify`). A row that idles
keeps what it holds: before its first step what that step starts from, after its last one what nobody reads there any
more. F may add to a sum a product with rows that are zeros, which the partial step leaves out: it is exactly zero,
because the other factor is finite: a constant all of whose elements are, or a function that is bounded. So every value
is the same but for the sign of a zero, and where infinite or undefined inputs make a bounded function undefined. What F
computes in rows that idle is chosen by nobody, so it may be anything.

What all steps read, and what a row holds at first, is computed as it was, and so is all that this depends on: the new
steps depend on nothing that depends on them. What other TEs read of absorbed rows they read of the new steps. Where
steps read, for rows that idle, outside of a tensor, they read a copy with elements around it, or the tensor itself has
them (:mod:`souffle.transform.ramps.outer_elements`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from souffle.alone import one_at_a_time
from souffle.decision import Decision, Refused
from souffle.program import TE, ExternTE, FusedTE, Item, Loop, Tensor, TEProgram
from souffle.transform.ramps.outer_elements import with_outer_elements
from souffle.transform.ramps.row_reads import Cover, copied_rows, through_rows
from souffle.transform.ramps.search import Ramps, ancestors, find_ramps
from souffle.transform.ramps.steps import Steps, make_steps
from souffle.transform.ramps.template import Row, Template, template_of
from souffle.transform.roll.repetition import BrokenRepeat, Piece, read_piece
from souffle.transform.roll.roll import repeated_pieces

__all__ = ["absorb_ramps"]


@one_at_a_time
def absorb_ramps(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Make partial steps before and after the repeated pieces of a program steps of them.

    Parameters
    ----------
    program : TEProgram
        Without loops, as :func:`souffle.transform.roll` receives it.

    Returns
    -------
    program : TEProgram
        Flat, with the steps of each piece after each other, so that ``roll`` makes one loop of them; it may hold steps
        of which nothing is read, to be the steps of that loop. The same object where nothing is absorbed.
    decisions : tuple of Decision
        One for each piece.
    """
    decisions: list[Decision] = []
    seen: set[str] = set()
    while True:
        absorbed = None
        # What is refused becomes known on the way, so that the other ways to roll the same TEs are passed over.
        for order, piece in repeated_pieces(program, seen):
            names = {item.name for item in piece.items(order)}
            if names & seen:
                continue
            subject = order.tes[piece.start + piece.period - 1].name
            absorbed = _absorbed(order, piece)
            if isinstance(absorbed, Refused):
                decisions.append(Decision("ramps", subject, False, absorbed.reason))
                seen |= names
                continue
            program, steps, reason = absorbed
            decisions.append(Decision("ramps", subject, True, reason))
            seen |= {item.name for item in steps.items}
            break
        if absorbed is None or isinstance(absorbed, Refused):
            return program, tuple(decisions)


def _absorbed(program: TEProgram, piece: Piece) -> tuple[TEProgram, Steps, str] | Refused:
    """A program in which the ramps of a piece are steps of it, these steps, and what was done."""
    template = template_of(program, piece)
    if isinstance(template, Refused):
        return template
    ramps = find_ramps(program, piece, template)
    if not ramps.before and not ramps.after:
        return Refused("no step before or after those that repeat computes some of their rows")
    held = [source.tensor for source in ramps.sources.values() if isinstance(source, Row)]
    above = ancestors(program, (*template.outer, *held))
    steps = make_steps(program, piece, template, ramps)
    if isinstance(steps, Refused):
        return steps
    made = _assembled(program, piece, steps, _covers(template, ramps, steps), above)
    beside = len(made.tes) - len(steps.items) - len(steps.starts)
    if beside >= len(program.tes) - len(piece.items(program)):
        return Refused("with partial steps absorbed as many TEs would stand beside the steps")
    made = with_outer_elements(made, steps.pads)
    start = made.tes.index(steps.items[0])
    count = piece.steps + len(ramps.before) + len(ramps.after)
    loop = read_piece(made, start, piece.period, count)
    if isinstance(loop, BrokenRepeat):
        return Refused(f"with partial steps it would be no loop: {loop.reason}")
    rows = sum(template.rows[value] for value in template.initial)
    idle = max(rows - len(step.active) for step in (*ramps.before, *ramps.after))
    reason = (
        f"{len(ramps.before)} steps before and {len(ramps.after)} after the {piece.steps} that repeat are steps of the "
        f"loop; of the {rows} rows that it carries {idle} idle at most"
    )
    return made, steps, reason


def _covers(template: Template, ramps: Ramps, steps: Steps) -> dict[Tensor, Cover]:
    """Where the new steps compute rows of the program's tensors."""
    visible = {value for item in template.items for value in item.outputs}
    covers: dict[Tensor, Cover] = {}
    for step in (*ramps.before, *ramps.after):
        for (value, row), found in step.covers.items():
            size = template.size(value)
            cover = covers.setdefault(found.tensor, Cover(size, {}))
            if value in visible and cover.size == size:
                cover.rows.setdefault(found.start // size, (steps.values[step.number, value], row))
    return {tensor: cover for tensor, cover in covers.items() if cover.rows}


def _assembled(
    program: TEProgram, piece: Piece, steps: Steps, covers: dict[Tensor, Cover], above: set[Item]
) -> TEProgram:
    """The program with the new steps in the place of the piece, and of what is read no more."""
    replaced = set(piece.items(program))
    rest: list[Item] = []
    for item in program.tes:
        if item not in replaced:
            rest += [item] if item in above else _rewritten(program, item, covers)
    new = {tensor for item in steps.items for tensor in item.outputs}
    late: list[Item] = []
    for item in rest:
        if any(tensor in new for tensor in item.inputs):
            late.append(item)
            new.update(item.outputs)
    behind = set(late)
    items: list[Item] = [*(item for item in rest if item not in behind), *steps.starts, *steps.items, *late]
    # The steps are kept whole, also where nothing is read of a row any more: they are to be equal.
    needed = {*program.outputs, *(tensor for item in steps.items for tensor in item.inputs)}
    own = set(steps.items)
    kept: list[Item] = []
    for item in reversed(items):
        if item in own or any(tensor in needed for tensor in item.outputs):
            kept.insert(0, item)
            needed.update(item.inputs)
    known = {**program.constants, **steps.constants}
    constants = {tensor: array for tensor, array in known.items() if tensor in needed}
    made = replace(program, tes=tuple(kept), constants=constants)
    made.check()
    return made


def _rewritten(program: TEProgram, item: Item, covers: dict[Tensor, Cover]) -> Iterator[Item]:
    """An item outside of the piece, reading what the new steps compute; copies of what is needed as it is."""
    if not isinstance(item, TE | FusedTE):
        yield item
        return
    whole = [tensor for tensor in item.outputs if tensor in covers and covers[tensor].whole(tensor)]
    if len(whole) == len(item.outputs):
        for tensor in whole:
            readers = program.consumers[tensor]
            if tensor in program.outputs or any(isinstance(reader, ExternTE | Loop) for reader in readers):
                yield copied_rows(tensor, covers[tensor])
        return
    yield through_rows(item, covers)
