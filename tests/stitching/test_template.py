"""The grammar of templates, what their numbers mean, and how many there are."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from math import prod

import pytest

from souffle.errors import SouffleError
from souffle.stitching import (
    Attribute,
    Kind,
    OpSchedule,
    Part,
    Template,
    TemplateError,
    TemplateOp,
    enumerate_schedules,
    tiling_of,
)

ROWS = TemplateOp("t", (7, 33), (False, True), Kind.ROW)
PLAIN = TemplateOp("t", (7, 33), (False, False), Kind.LIGHT)


def random_template(rng: random.Random) -> Template:
    def dimension() -> tuple[Part, ...]:
        count = rng.randint(0, 3)
        if not count:
            return (Part(rng.choice(list(Attribute))),)
        return tuple(Part(rng.choice(list(Attribute)), rng.randint(1, 300)) for _ in range(count))

    names = rng.sample(["reduce_1", "dot_1", "add", "S", "GRID", "x.2", "_y"], rng.randint(1, 4))
    if len(names) == 1 and rng.random() < 0.5:
        names = [""]
    return Template.of(
        OpSchedule(name, tuple(dimension() for _ in range(rng.randint(1, 4))), rng.random() < 0.5) for name in names
    )


def test_what_is_printed_is_read_again() -> None:
    rng = random.Random(0)
    for _ in range(500):
        template = random_template(rng)
        text = str(template)
        assert Template(text) == template and hash(Template(text)) == hash(template)
        spaced = "".join(c if c.isalnum() or c == "." else f" {c} " for c in text.replace("_", "\0"))
        # A name ends at a space, and a count may stand apart from its attribute.
        if "\0" not in spaced:
            assert Template(spaced) == template


def test_the_examples_of_the_paper_are_read() -> None:
    (one,) = Template("[GRID_128-WARP_2,WARP,WARP,CTA]S").schedules
    warp = (Part(Attribute.WARP),)
    assert one.dimensions == (
        (Part(Attribute.GRID, 128), Part(Attribute.WARP, 2)),
        warp,
        warp,
        (Part(Attribute.CTA),),
    )
    assert one.shared and not one.name
    whole = Template("reduce_1[GRID,WARP,WARP,CTA]S; dot_1 [ GRID , CTA,CTA,THREAD ]")
    assert str(whole) == "reduce_1[GRID,WARP,WARP,CTA]S; dot_1[GRID,CTA,CTA,THREAD];"
    assert whole.of_te("dot_1") == whole.schedules[1] and whole.of_te("add") is None


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", 1, "the name of a TE or"),
        ("a", 2, "'['"),
        ("a[GRID", 7, "'_', ',' or ']'"),
        ("a[BLOCK]", 3, "GRID, WARP, CTA, THREAD"),
        ("a[GRID,]", 8, "GRID, WARP, CTA, THREAD"),
        ("a[GRID-WARP_2]", 7, "a count behind GRID"),
        ("a[GRID_2-WARP]", 14, "a count behind WARP"),
        ("a[GRID_0]", 8, "a whole number from 1"),
        ("a[GRID_x]", 8, "a whole number from 1"),
        ("a[WARP_2*CTA]", 9, "'-', ',' or ']'"),
        ("a[GRID]S b[CTA]", 10, "';' or the end"),
        ("a[GRID]; [CTA]", 10, "the name of a TE"),
        ("[GRID]; b[CTA]", 1, "several schedules"),
    ],
)
def test_errors_say_where_and_what_could_stand_there(text: str, place: int, expected: str) -> None:
    with pytest.raises(SouffleError) as error:
        Template(text)
    message = str(error.value)
    assert expected in message
    if place:
        assert message.splitlines()[-1] == "  " + " " * (place - 1) + "^"


def test_one_te_has_one_schedule() -> None:
    with pytest.raises(TemplateError, match="two schedules are of a"):
        Template("a[GRID]; a[CTA];")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[GRID]", "1 dimensions, t 2"),
        ("[GRID_3-WARP_2,CTA]", "for which GRID_4-WARP_2 would do"),
        ("[GRID_8-WARP_1,CTA]", "for which GRID_7-WARP_1 would do"),
        ("[CTA,GRID]", "which would have to wait for each other"),
        ("[CTA,GRID_17-CTA_2]", "which would have to wait for each other"),
        ("[CTA,WARP_33]", "33 warps by its counts of WARP, and has 8"),
        ("[WARP,CTA_33]", "33 threads by its counts of CTA, and has 32"),
        ("[CTA_7,CTA_33]", "none divide into 33 and 7"),
    ],
)
def test_what_does_not_go_with_an_operation_is_refused(text: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says.replace("(", r"\(")):
        tiling_of(Template(text).schedules[0], ROWS, 256)


def test_cta_size_is_that_of_a_block() -> None:
    for size in (0, 1025):
        with pytest.raises(TemplateError, match="1 to 1024 threads"):
            tiling_of(Template("[GRID,CTA]").schedules[0], ROWS, size)
    with pytest.raises(TemplateError, match="no multiple of 32"):
        tiling_of(Template("[WARP,CTA]").schedules[0], ROWS, 48)


def test_threads_of_a_block_are_all_given_out() -> None:
    """Whatever the template: the groups' threads multiply to the block, lanes of a warp next to each other."""
    for op, size in itertools.product((ROWS, PLAIN), (1, 32, 96, 256)):
        for schedule in enumerate_schedules(op, size):
            tiling = tiling_of(schedule, op, size)
            assert prod(group.threads for group in tiling.groups) == size
            if schedule.has(Attribute.WARP):
                lanes = prod(g.threads for g in tiling.groups if g.attribute is Attribute.CTA)
                assert lanes == 32 and [g.attribute for g in tiling.groups][-1] is Attribute.WARP
            covered = [prod(extents) for extents in tiling.extents]
            assert all(found >= whole for found, whole in zip(covered, op.extents, strict=True))


def brute_force(op: TemplateOp, size: int, levels: int) -> set[str]:
    """Every text of the grammar over counts up to the largest extent, of which those that are valid are kept."""
    order = [attribute.value for attribute in Attribute]
    found: list[list[str]] = []
    for extent in op.extents:
        here = list(order) if extent > 1 else ["THREAD"]
        for count in range(2, levels + 1):
            for names in itertools.combinations(order, count):
                powers = [2**n for n in range(1, extent.bit_length())]
                for inner in itertools.product(powers, repeat=count - 1):
                    for outer in range(2, extent + 1):
                        here.append("-".join(f"{a}_{n}" for a, n in zip(names, (outer, *inner), strict=True)))
        found.append(here)
    kept = set()
    for dimensions in itertools.product(*found):
        schedule = Template(f"t[{','.join(dimensions)}]").schedules[0]
        try:
            tiling_of(schedule, op, size)
        except TemplateError:
            continue
        if not any(r and parts[0].attribute is Attribute.GRID for r, parts in zip(op.reduced, schedule.dimensions)):
            kept.add(str(schedule))
    return kept


@pytest.mark.parametrize("extents", [(5,), (1, 6), (3, 4)])
@pytest.mark.parametrize("reduced", [False, True])
def test_all_templates_are_enumerated_once(extents: tuple[int, ...], reduced: bool) -> None:
    op = TemplateOp("t", extents, (*(False for _ in extents[1:]), reduced), Kind.ROW if reduced else Kind.EXPENSIVE)
    listed = Counter(str(one) for one in enumerate_schedules(op, 64, shared=False))
    assert max(listed.values()) == 1
    assert set(listed) == brute_force(op, 64, 2)
    both = list(enumerate_schedules(op, 64))
    assert len(both) == 2 * len(listed) and sum(one.shared for one in both) == len(listed)


def test_kinds_differ_in_their_templates() -> None:
    light = list(enumerate_schedules(PLAIN, 256))
    assert light and not any(one.shared for one in light)
    product = TemplateOp("t", (7, 33, 13), (False, False, True), Kind.GEMM)
    texts = {str(one) for one in enumerate_schedules(product, 256, shared=False)}
    assert texts == {f"t[{a},{b},{k}];" for a in ("GRID", "CTA") for b in ("GRID", "CTA") for k in ("CTA", "THREAD")}
