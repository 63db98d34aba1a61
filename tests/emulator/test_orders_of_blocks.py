"""What a checked run says of the order of blocks: races, all and no others, by flags, counters and grid barriers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from souffle.emulator import CpuModule, Finding, LaunchReport, compile_text

pytestmark = pytest.mark.sampled(2)

_CUDA = Path(__file__).parent / "cuda"
_ELEMENTS, _WORDS = 4, 160
NOTHING, READ, WRITE, STORE, ADD, EXCHANGE, ACQUIRE, WAIT, TELL, HEAR, GRID = range(11)
Operation = tuple[int, int, int]
"""What is done, where, and the value that is stored or waited for."""
Programs = Sequence[Sequence[Operation]]
"""Of each block."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def orders(cache: Path) -> CpuModule:
    return compile_text((_CUDA / "orders.cu").read_text(encoding="utf-8"), cache_dir=cache, checked=True)


def _do(module: CpuModule, programs: Programs, **options: object) -> tuple[LaunchReport, np.ndarray]:
    """Let each block follow its program; also when each operation was done."""
    length = max(map(len, programs))
    table = np.zeros((len(programs), length, 3), np.int32)
    for block, program in enumerate(programs):
        for i, operation in enumerate(program):
            table[block, i] = operation
    when = np.zeros((len(programs), length), np.int32)
    words = [np.zeros(size, kind) for size, kind in [(_ELEMENTS, np.int32)] + [(_WORDS, np.uint32)] * 2]
    report = module.launch(
        "follow",
        grid=(len(programs), 1, 1),
        block=(32, 1, 1),
        args=[table, length, *words, np.zeros(1, np.uint32), when],
        cooperative=True,
        raises=False,
        max_findings=100,
        **options,
    )
    assert report.races_checked
    assert sorted(when.ravel()) == list(range(when.size))
    return report, when


# ---- readers, and a writer that waits for them -------------------------------------------------------------------

SCHEDULES = [{}, {"workers": 2}, *({"order": "shuffled", "seed": seed} for seed in range(6))]


def _read_and_raise(block: int, before: int = 0) -> list[Operation]:
    """A reader whose clock has gone on before, and which says that it has read, with an order and without."""
    own = [(STORE, block, i) for i in range(before)]
    return [*own, (READ, 2, 0), (STORE, block, 100), (TELL, block, 0)]


def _wait_and_write(waits: Sequence[int], hears: Sequence[int] = ()) -> list[Operation]:
    return [*((WAIT, b, 100) for b in waits), *((HEAR, b, 1) for b in hears), (WRITE, 2, 0)]


def _race(report: LaunchReport) -> Finding:
    (finding,) = report.findings
    assert (finding.kind, finding.within_block, finding.buffer) == ("race", False, "argument 2")
    return finding


@pytest.mark.parametrize("readers", [1, 2, 3, 70, 150])
@pytest.mark.parametrize("clocks", [False, True])
def test_a_writer_that_waits_for_all_readers(orders: CpuModule, readers: int, clocks: bool) -> None:
    programs = [_wait_and_write(range(1, readers + 1))]
    programs += [_read_and_raise(b, b * 7 % 5 * clocks) for b in range(1, readers + 1)]
    for options in SCHEDULES[: 8 if readers < 10 else 4]:
        assert _do(orders, programs, **options)[0].findings == (), options


@pytest.mark.parametrize(
    ("readers", "left_out"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 5), (70, 1), (70, 66), (150, 80)]
)
@pytest.mark.parametrize("clocks", [False, True])
def test_a_writer_that_waits_for_all_readers_but_one(
    orders: CpuModule, readers: int, left_out: int, clocks: bool
) -> None:
    others = [b for b in range(1, readers + 1) if b != left_out]
    programs = [_wait_and_write(others, [left_out])]
    programs += [_read_and_raise(b, b * 7 % 5 * clocks) for b in range(1, readers + 1)]
    for options in SCHEDULES[: 8 if readers < 10 else 4]:
        finding = _race(_do(orders, programs, **options)[0])
        assert (finding.write, finding.block, finding.element) == (True, (0, 0, 0), 2)
        assert (finding.other, finding.other_reads) == (f"block ({left_out}, 0, 0)", True)
        assert (
            f"write of element 2 of global argument 2: block ({left_out}, 0, 0) read it, and nothing orders the two, "
            "neither a grid sync nor a flag" in str(finding)
        )
    # Where the writer does not know that the reader has read, either comes first.
    programs[0] = _wait_and_write(others)
    for options in SCHEDULES[: 8 if readers < 10 else 4]:
        finding = _race(_do(orders, programs, **options)[0])
        parties = (finding.block, finding.other, finding.other_reads)
        first, last = (left_out, 0, 0), (0, 0, 0)
        assert parties == ((last, f"block {first}", True) if finding.write else (first, f"block {last}", False))


def test_a_second_read_after_the_release_that_was_acquired(orders: CpuModule) -> None:
    def programs(again: bool, release: bool) -> Programs:
        reader = [(READ, 2, 0), (STORE, 1, 100), (HEAR, 0, 1), *([(READ, 2, 0)] if again else [])]
        reader += [*([(STORE, 1, 200)] if release else []), (TELL, 1, 0)]
        last = [(WAIT, 1, 200)] if release else []
        writer = [(WAIT, 1, 100), (WAIT, 2, 100), (TELL, 0, 0), (HEAR, 1, 1), *last, (WRITE, 2, 0)]
        return [writer, reader, _read_and_raise(2), [(READ, 2, 0), (STORE, 2, 0)]][:3]

    for options in SCHEDULES:
        assert _do(orders, programs(False, False), **options)[0].findings == ()
        finding = _race(_do(orders, programs(True, False), **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (1, 0, 0)", True)
        # Released once more, but not acquired again: the writer knows of the first release alone.
        released = programs(True, True)
        assert _do(orders, released, **options)[0].findings == ()
        released[0].remove((WAIT, 1, 200))
        finding = _race(_do(orders, released, **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (1, 0, 0)", True)


def test_a_reader_that_reads_again_for_others_to_wait_for(orders: CpuModule) -> None:
    """A read with a later clock takes the place of the same block's earlier one."""
    readers = [[(READ, 2, 0), (STORE, b, 1), (READ, 2, 0), (STORE, b, 100), (TELL, b, 0)] for b in (1, 2, 3)]
    for options in SCHEDULES:
        assert _do(orders, [_wait_and_write([1, 2, 3]), *readers], **options)[0].findings == ()
        early = [(WAIT, 2, 1), *_wait_and_write([1, 3], [2])]
        report, when = _do(orders, [early, *readers], **options)
        # The writer saw the first of the flag's values, the second, or both at once.
        if when[0, 0] < when[2, 3]:
            assert _race(report).other == "block (2, 0, 0)"
        else:
            assert report.findings == ()


def test_one_who_knows_of_all_readers_hands_it_on(orders: CpuModule) -> None:
    chain = [[(READ, 2, 0), (STORE, 1, 100)]]
    chain += [[(WAIT, b - 1, 100), (READ, 2, 0), (STORE, b, 100)] for b in range(2, 6)]
    side = [(WAIT, 1, 100), (READ, 2, 0), (STORE, 6, 100), (TELL, 6, 0)]
    for options in SCHEDULES:
        assert _do(orders, [_wait_and_write([5, 6]), *chain, side], **options)[0].findings == ()
        finding = _race(_do(orders, [_wait_and_write([5], [6]), *chain, side], **options)[0])
        assert (finding.other, finding.other_reads) == ("block (6, 0, 0)", True)


def test_a_counter_hands_on_what_each_knew_that_arrived(orders: CpuModule) -> None:
    """Block 1 knows of block 2's read and arrives; block 0, which has arrived too, then knows of it."""
    reader = _read_and_raise(2)
    between = [(WAIT, 2, 100), (ADD, 0, 0), (TELL, 1, 0)]
    writer = [(ADD, 0, 0), (WAIT, 0, 2), (WRITE, 2, 0)]
    for options in SCHEDULES:
        assert _do(orders, [writer, between, reader], **options)[0].findings == ()
        # An arrival of a round that the writer has not taken part in may come later in another run.
        twice = [(ADD, 0, 0), *between]
        finding = _race(_do(orders, [[*writer[:1], (HEAR, 1, 1), *writer[1:]], twice, reader], **options)[0])
        assert (finding.other, finding.other_reads) == ("block (2, 0, 0)", True)


@pytest.mark.parametrize("reads", [False, True])
def test_a_counter_hands_on_what_came_before_an_arrival(orders: CpuModule, reads: bool) -> None:
    """Block 1 has made two arrivals before the first one of block 2, which a third arrival of nobody makes up for."""
    first = [(ADD, 0, 0), (ADD, 0, 0), (TELL, 1, 0)]
    late = [(WAIT, 3, 100), (HEAR, 1, 1), *([(READ, 2, 0)] if reads else []), (ADD, 0, 0), (TELL, 2, 0)]
    for options in SCHEDULES:
        writer = [(ADD, 0, 0), (ADD, 0, 0), (HEAR, 2, 1), (ACQUIRE, 0, 0), (WRITE, 2, 0)]
        assert _do(orders, [writer, first, late, _read_and_raise(3)], **options)[0].findings == ()


def test_a_store_takes_the_place_of_what_others_released_there(orders: CpuModule) -> None:
    readers = [[(READ, 2, 0), (STORE, 9, 5), (TELL, 1, 0)], [(READ, 2, 0), (HEAR, 1, 1), (STORE, 9, 6), (TELL, 2, 0)]]
    for options in SCHEDULES:
        finding = _race(_do(orders, [[(HEAR, 2, 1), (WAIT, 9, 6), (WRITE, 2, 0)], *readers], **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (1, 0, 0)", True)
        # An exchange goes on with it.
        readers_on = [
            readers[0],
            [operation if operation[0] != STORE else (EXCHANGE, 9, 6) for operation in readers[1]],
        ]
        assert _do(orders, [[(HEAR, 2, 1), (WAIT, 9, 6), (WRITE, 2, 0)], *readers_on], **options)[0].findings == ()


def test_what_a_block_knows_of_equal_readers_changes(orders: CpuModule) -> None:
    """Two elements with the same readers, between which a block acquires, or releases."""
    both = [[(READ, 0, 0), (READ, 1, 0), (STORE, b, 100), (TELL, b, 0)] for b in (1, 2)]
    begin = [(HEAR, 1, 1), (HEAR, 2, 1), (READ, 0, 0)]
    knows = [*begin, (WAIT, 1, 100), (WAIT, 2, 100), (READ, 1, 0), (STORE, 3, 100), (TELL, 3, 0)]
    early = [*begin, (STORE, 3, 100), (READ, 1, 0), (TELL, 3, 0)]
    for options in SCHEDULES:
        writer = [(WAIT, 3, 100), (HEAR, 3, 1), (WRITE, 1, 0)]
        assert _do(orders, [writer, *both, knows], **options)[0].findings == ()
        writer = [(WAIT, 1, 100), (WAIT, 2, 100), *writer]
        finding = _race(_do(orders, [writer, *both, early], **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (3, 0, 0)", True)
        # The writer's own: it knows of the readers of the second element, not of the first.
        writer = [(HEAR, 1, 1), (HEAR, 2, 1), (WRITE, 0, 0), (WAIT, 1, 100), (WAIT, 2, 100), (WRITE, 1, 0)]
        assert _race(_do(orders, [writer, *both], **options)[0]).element == 0


def test_a_reader_is_told_to_each_that_writes(orders: CpuModule) -> None:
    reader = [(READ, 2, 0), (TELL, 1, 0)]
    writers = [[(HEAR, 1, 1), (WRITE, 2, 0), (STORE, 0, 1)], [(WAIT, 0, 1), (HEAR, 1, 1), (WRITE, 2, 0)]]
    for options in SCHEDULES:
        finding = _race(_do(orders, [writers[0], reader, writers[1]], **options)[0])
        assert (finding.count, finding.other, finding.other_reads) == (2, "block (1, 0, 0)", True)


def test_grid_barriers_among_flags(orders: CpuModule) -> None:
    before = [[*_read_and_raise(b, b % 3), (GRID, 0, 0)] for b in range(1, 5)]
    after = [[*before[i], *_read_and_raise(i + 1)] if i < 2 else before[i] for i in range(4)]
    for options in SCHEDULES:
        # Those that have read before the barrier need no flag; those that read again do.
        waits = [(GRID, 0, 0), (HEAR, 1, 2), (HEAR, 2, 2), (STORE, 20, 1)]
        tail = [(ACQUIRE, 1, 0), (ACQUIRE, 2, 0), (WRITE, 2, 0)]
        assert _do(orders, [[*waits, *tail], *after], **options)[0].findings == ()
        finding = _race(_do(orders, [[*waits, *tail[1:]], *after], **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (1, 0, 0)", True)
        # Flags before the barrier say nothing of reads after it.
        early = [(WAIT, 1, 100), (WAIT, 2, 100), *waits, (ACQUIRE, 2, 0), (WRITE, 2, 0)]
        finding = _race(_do(orders, [early, *after], **options)[0])
        assert (finding.write, finding.other, finding.other_reads) == (True, "block (1, 0, 0)", True)


def test_after_a_write_readers_are_noted_anew(orders: CpuModule) -> None:
    """Readers, a writer that waits for them, readers that wait for it, and a writer that knows of the last alone."""
    blocks = range(2, 6)
    readers = [[(READ, 2, 0), (STORE, b, 1), (WAIT, 0, 1), (READ, 2, 0), (STORE, b, 2)] for b in blocks]
    first = [*((WAIT, b, 1) for b in blocks), (WRITE, 2, 0), (STORE, 0, 1)]
    last = [*((WAIT, b, 2) for b in blocks), (WRITE, 2, 0)]
    for options in SCHEDULES:
        assert _do(orders, [first, last, *readers], **options)[0].findings == ()
        finding = _race(_do(orders, [first, [*last[:2], *last[3:]], *readers], **options)[0])
        assert finding.block == (4, 0, 0) or finding.other == "block (4, 0, 0)"


# ---- many elements, many workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "elements", "rounds"), [(7, 500, 3), (48, 12000, 1), (40, 3000, 4)])
def test_elements_with_readers_of_their_own(orders: CpuModule, blocks: int, elements: int, rounds: int) -> None:
    """More sets than are kept: exactly the elements that the block read whose flag nobody waits for are found."""
    chosen = np.random.default_rng(elements).integers(0, 2, (blocks, elements)).astype(np.uint8)

    def found(without: int, **options: object) -> tuple[Finding, ...]:
        words = [np.zeros(blocks, np.uint32) for _ in range(2)]
        args = [
            chosen,
            np.zeros(elements, np.int32),
            np.zeros(blocks * 64, np.int32),
            elements,
            *words,
            without,
            rounds,
        ]
        shape = {"grid": (blocks, 1, 1), "block": (64, 1, 1), "cooperative": True}
        report = orders.launch("choose", args=args, raises=False, **shape, **options)
        assert report.races_checked
        return report.findings

    for options in [{}, {"order": "shuffled", "seed": 5}]:
        assert found(-1, **options) == ()
        for without in (1, blocks // 2):
            (finding,) = found(without, **options)
            assert (finding.write, finding.other, finding.other_reads) == (True, f"block ({without}, 0, 0)", True)
            assert finding.count == chosen[without].sum()


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"workers": 5}, {"order": "shuffled", "seed": 1}])
def test_races_by_all_workers(cache: Path, options: dict) -> None:
    """Texts without flags run on several workers, which note their accesses at once."""
    text = (_CUDA / "orders.cu").read_text(encoding="utf-8")
    head = "#include <cooperative_groups.h>\n"
    module = compile_text(
        head + text[text.index('extern "C" __global__ void all_read') :], cache_dir=cache, checked=True
    )
    for writer in (0, 3, 19):
        for sync in (0, 1):
            args = [np.zeros(3000, np.int32), np.zeros(20 * 64, np.int32), 3000, sync, writer]
            shape = {"grid": (20, 1, 1), "block": (64, 1, 1), "cooperative": True}
            report = module.launch("all_read", args=args, raises=False, **shape, **options)
            assert bool(report.findings) != bool(sync)
            reads = sum(finding.count for finding in report.findings if not finding.write)
            for finding in report.findings:
                own = f"block {finding.block}"
                assert finding.other != own and finding.buffer == "argument 0"
                if finding.write:
                    assert (finding.block, finding.other_reads) == ((writer, 0, 0), True)
                else:
                    assert (finding.other, finding.other_reads) == (f"block ({writer}, 0, 0)", False)
            if not sync:
                # Each other block's read of an element comes before the write, and is found there, or after it.
                writes = sum(finding.count for finding in report.findings if finding.write)
                assert writes + reads >= 3000 and writes <= 3000 and reads <= 19 * 3000


def test_one_worker_reads_what_another_writes(cache: Path) -> None:
    """Whichever of two accesses is noted last finds the other."""
    text = (_CUDA / "orders.cu").read_text(encoding="utf-8")
    head = "#include <cooperative_groups.h>\n"
    module = compile_text(
        head + text[text.index('extern "C" __global__ void at_once') :], cache_dir=cache, checked=True
    )
    rounds, elements = 300, 2048
    for _ in range(3):
        args = [np.zeros(elements, np.int32), np.zeros(64, np.int32), elements, rounds]
        shape = {"grid": (2, 1, 1), "block": (32, 1, 1), "cooperative": True, "workers": 2}
        report = module.launch("at_once", args=args, raises=False, **shape)
        assert sum(finding.count for finding in report.findings) == rounds * elements


# ---- random programs, against happens-before over the order in which all was done ----------------------------------


@dataclass
class _Word:
    """What was released at a word: operations as bits."""

    counter: bool = True
    handed: int = 0
    arrivals: dict[int, list[int]] | None = None


def _races(programs: Programs, when: np.ndarray) -> dict[int, tuple[int, bool, set[tuple[int, bool]]]]:
    """Of each element with races the first access that is not ordered with an earlier one.

    Its block, whether it writes, and the blocks of the earlier ones with whether they read. From the relation itself:
    all that comes before an operation.
    """
    done = sorted((when[b, i], b, *program[i]) for b, program in enumerate(programs) for i in range(len(program)))
    last = dict.fromkeys(range(len(programs)), 0)  # all operations up to the block's last
    met: dict[int, int] = {}
    syncs = dict.fromkeys(range(len(programs)), 0)
    words: dict[int, _Word] = {}
    accesses: dict[int, list[tuple[int, int, bool]]] = {}
    found: dict[int, tuple[int, bool, set[tuple[int, bool]]]] = {}
    for number, (_, block, what, at, _value) in enumerate(done):
        before, own = last[block], 1 << number
        if what in (READ, WRITE):
            earlier = accesses.setdefault(at, [])
            open_ones = {
                (other, not writes)
                for bit, other, writes in earlier
                if other != block and (writes or what == WRITE) and not before & bit
            }
            if open_ones and at not in found:
                found[at] = (block, what == WRITE, open_ones)
            earlier.append((own, block, what == WRITE))
        elif what == GRID:
            syncs[block] += 1
            if syncs[block] not in met:
                met[syncs[block]] = 0
                for known in last.values():
                    met[syncs[block]] |= known
            before |= met[syncs[block]]
        word = words.setdefault(at, _Word(arrivals={}))
        if what == STORE:
            word.handed = before | own
            word.counter = False
        elif what in (ADD, EXCHANGE):
            word.handed |= before | own
            word.counter &= what == ADD
            word.arrivals.setdefault(block, []).append(before | own)
        if what in (EXCHANGE, ACQUIRE, WAIT):
            count = len(word.arrivals.get(block, ()))
            if word.counter and count:
                for arrivals in word.arrivals.values():
                    for arrival in arrivals[:count]:
                        before |= arrival
            else:
                before |= word.handed
        last[block] = before | own
    return found


def _random_programs(draw: random.Random) -> list[list[Operation]]:
    """Programs that cannot wait for ever, drawn in an order in which they could be done."""
    blocks = draw.choice([2, 3, 3, 4, 4, 5, 8])
    programs: list[list[Operation]] = [[] for _ in range(blocks)]
    raised, told = [0] * blocks, [0] * blocks
    careful = draw.random() < 0.7  # writers then wait for most of those that have read
    readers: dict[int, set[int]] = {}
    for number in range(draw.randint(6, 14 * blocks)):
        block, element = draw.randrange(blocks), draw.randrange(_ELEMENTS)
        program, what = programs[block], draw.random()
        other = draw.randrange(blocks)
        if what < 0.35:
            program.append((READ, element, 0))
            if careful and draw.random() < 0.9:
                raised[block] += 1
                program.append((STORE, block, raised[block]))
            readers.setdefault(element, set()).add(block)
        elif what < 0.5:
            if careful:
                for reader in sorted(readers.pop(element, set())):
                    if raised[reader] and draw.random() < 0.95:
                        program.append((WAIT, reader, raised[reader]))
            program.append((WRITE, element, 0))
            if careful:
                raised[block] += 1
                program.append((STORE, block, raised[block]))
                readers[element] = {block}
        elif what < 0.6:
            raised[block] += 1
            program.append((STORE, block, raised[block]))
        elif what < 0.75:
            program.append((WAIT, other, draw.randint(0, raised[other])))
        elif what < 0.8:
            # An exchange that changes nothing lets others run before it is noted when it was.
            program.append(
                (draw.choice([ADD, ACQUIRE, ACQUIRE, EXCHANGE, STORE]), 100 + draw.randrange(2), 1000 + number)
            )
        elif what < 0.88:
            program.append((draw.choice([ADD, ADD, ACQUIRE]), 110, 1))
        elif what < 0.92:
            told[block] += 1
            program.append((TELL, block, 0))
        elif what < 0.96:
            program.append((HEAR, other, told[other]))
        elif draw.random() < 0.4:
            for one in programs:
                one.append((GRID, 0, 0))
            readers.clear()
    return programs


@pytest.mark.parametrize("group", range(4))
def test_random_programs_against_happens_before(orders: CpuModule, group: int) -> None:
    clean = found_races = 0
    for seed in range(150):
        draw = random.Random(1000 * group + seed)
        programs = _random_programs(draw)
        report, when = _do(orders, programs, **draw.choice([{}, *[{"order": "shuffled", "seed": seed}] * 4]))
        expected = _races(programs, when)
        told: dict[int, list[Finding]] = {}
        for finding in report.findings:
            assert (finding.kind, finding.buffer) == ("race", "argument 2")
            told.setdefault(finding.element, []).append(finding)
        assert set(told) == set(expected), (group, seed, programs, report.findings)
        for element, (block, writes, others) in expected.items():
            (first,) = [finding for finding in told[element] if finding.write == writes]
            assert first.block == (block, 0, 0), (group, seed, element)
            parties = {(f"block ({other}, 0, 0)", reads) for other, reads in others}
            assert (first.other, first.other_reads) in parties, (group, seed, element)
        found_races += len(expected)
        clean += _ELEMENTS - len(expected)
    assert clean > 100 and found_races > 50, (clean, found_races)
