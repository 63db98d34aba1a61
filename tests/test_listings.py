"""Listings: the tiny models before and after the transformations, and two listings side by side."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest
from tvm import te, tirx

import souffle
from souffle import models, transform
from souffle.decision import Decision
from souffle.program import Loop, TEProgram

_TIED = "\N{NO-BREAK SPACE}"


def readable(program: TEProgram) -> str:
    """A listing with its long lines wrapped, but not inside of a range such as ``0 ≤ i < 4``."""
    wrapper = textwrap.TextWrapper(118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    wrapped = []
    for line in str(program).splitlines():
        tied = re.sub(r" (≤|<) ", rf"{_TIED}\1{_TIED}", line)
        wrapped += [part.replace(_TIED, " ") for part in wrapper.wrap(tied)]
    return "\n".join(wrapped) + "\n"


@pytest.mark.parametrize("name", models.NAMES)
def test_listings_of_the_models(name: str, golden: Callable[[str, str], None]) -> None:
    before = souffle.import_onnx(models.build(name, "tiny"))
    golden(f"listing_{name}_before.txt", readable(before))
    merged, _ = transform.horizontal(before)
    after, _ = transform.vertical(merged)
    assert len(after.tes) < len(before.tes)
    golden(f"listing_{name}_after.txt", readable(after))


def test_listing_of_a_rolled_recurrence(golden: Callable[[str, str], None]) -> None:
    """The wavefronts of three layers and nine steps, those on which all layers work as one loop."""
    program = souffle.import_onnx(models.build("lstm", "tiny", steps=9))
    after, _ = transform.vertical(transform.horizontal(program)[0])
    rolled, _ = transform.roll(after)
    (loop,) = (item for item in rolled.tes if isinstance(item, Loop))
    assert loop.steps == 4 and len(loop.body) == 2
    golden("listing_lstm_rolled.txt", readable(rolled))


def sums(name: str, *addends: float) -> TEProgram:
    """``x + addends[0] + ...``, one TE for each sum."""
    result = first = te.placeholder((4,), name="x")
    for number, addend in enumerate(addends):
        result = _plus(result, addend, f"t{number}")
    return souffle.from_te([first], [result], name=name)


def _plus(tensor: te.Tensor, addend: float, name: str) -> te.Tensor:
    return te.compute((4,), lambda i: tensor[i] + tirx.const(addend, "float32"), name=name)


def test_a_difference_in_the_middle() -> None:
    before, after = sums("p", 1, 2, 3, 4, 5), sums("p", 1, 2, 7, 4, 5)
    decision = Decision("mine", "t2", True, "seven is more")
    assert transform.compare(before, after, [decision], context=1).splitlines() == [
        "5 TEs → 5 TEs",
        "  … 3 lines alike",
        "  t1[i] = t0[i] + 2, 0 ≤ i < 4   # te.compute t1",
        "- t2[i] = t1[i] + 3, 0 ≤ i < 4   # te.compute t2",
        "+ t2[i] = t1[i] + 7, 0 ≤ i < 4   # te.compute t2",
        "  t3[i] = t2[i] + 4, 0 ≤ i < 4   # te.compute t3",
        "  … 2 lines alike",
        "[mine] + t2: seven is more",
    ]


def test_without_a_context_every_line_of_both_is_there() -> None:
    before = sums("p", 1, 2, 3)
    after, decisions = transform.vertical(before)
    lines = transform.compare(before, after, decisions).splitlines()
    assert lines[0] == "3 TEs → 1 TE"
    assert [line[2:] for line in lines if line[:2] in ("  ", "- ")] == str(before).splitlines()
    assert [line[2:] for line in lines if line[:2] in ("  ", "+ ")] == str(after).splitlines()
    assert lines[-len(decisions) :] == [str(decision) for decision in decisions]


def test_equal_listings_are_left_out() -> None:
    program = sums("p", 1)
    refused = Decision("mine", "t0", False, "there is one only")
    assert transform.compare(program, program, [refused]) == f"1 TE → 1 TE, unchanged\n{refused}"
