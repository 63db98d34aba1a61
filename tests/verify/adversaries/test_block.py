"""Threads of one block: tiles in a row, several stages in a turn, copies under way, lanes together, own arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tvm import tirx

from souffle.codegen.cuda import text_of_functions
from souffle.emulator import CpuModule, compile_text
from souffle.schedule.lower import cuda_target
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from tests.verify.hand_made import THREADS, Memory, Run, barrier, extern, kernel, plan_of, sequence, stage, tensor

pytestmark = pytest.mark.sampled(2)

TILES = 16
SIZE = TILES * THREADS
POOL = SIZE
Body = Callable[[Memory], tirx.Stmt]
ACTIVE = tirx.call_intrin("uint32", "tirx.cuda.__activemask")


def at(m: Memory) -> object:
    return m.tile * THREADS + m.tid


def load(m: Memory) -> object:
    return m.tensors[0][at(m)]


def put(m: Memory, value: object, index: object) -> tirx.Stmt:
    return tirx.BufferStore(m.shared, value, [index])


def keep(m: Memory, value: object) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], value, [at(m)])


def through(slot: Callable[[Memory], object], *, wait: bool = True) -> Body:
    """Values through the pool: each thread leaves one in its slot; a barrier; and takes that of its mirror image."""

    def body(m: Memory) -> tirx.Stmt:
        mirror = replace(m, tid=THREADS - 1 - m.tid) if wait else m
        return sequence(put(m, load(m), slot(m)), *([barrier()] if wait else []), keep(m, m.shared[slot(mirror)]))

    return body


def plain(m: Memory) -> tirx.Stmt:
    return keep(m, load(m))


def only(tiles: Callable[[object], object], body: Body) -> Body:
    """`body` in some tiles, and no shared memory in the others."""
    return lambda m: tirx.IfThenElse(tiles(m.tile), body(m), plain(m))


def copy(m: Memory, index: object, source: object) -> tirx.Stmt:
    return extern("souffle_copy_async<4>", tirx.address_of(m.shared[index]), tirx.address_of(source))


COMMIT, WAIT = extern("souffle_copy_commit"), extern("souffle_copy_wait<0>")


def turns(count: int, body: Callable[[tirx.Var], tirx.Stmt]) -> tirx.Stmt:
    turn = tirx.Var("turn", "int32")
    return tirx.For(turn, 0, count, tirx.ForKind.SERIAL, body(turn))


@dataclass(frozen=True)
class Case:
    """Stages of a kernel, each from tensor to tensor, and what is to be said of it.

    Attributes
    ----------
    name : str
    verdict, rule : str
        Of the certificate; of an UNKNOWN a part of the reason.
    bodies : tuple
        The n-th stage's; it reads the n-th tensor and writes the one after it.
    runs : tuple of Run
        With the stages' numbers as names; one for each body by default.
    finding : str
        What the CPU device says of it on some grid, where it can see it.
    static : bool
        Whether shared memory is a static array of each stage.
    """

    name: str
    verdict: str
    rule: str
    bodies: tuple[Body, ...]
    runs: tuple[Run, ...] = ()
    finding: str = ""
    static: bool = False

    @property
    def calls(self) -> list[Run]:
        given = self.runs or tuple(Run(str(i), TILES, (i, i + 1)) for i in range(len(self.bodies)))
        return [replace(run, name=f"{self.name}_{run.name}") for run in given]

    @property
    def functions(self) -> dict[str, tirx.PrimFunc]:
        names = [f"{self.name}_{i}" for i in range(len(self.bodies))]
        made = [stage(n, (SIZE, SIZE), b, shared=POOL) for n, b in zip(names, self.bodies, strict=True)]
        return dict(zip(names, map(static, made) if self.static else made, strict=True))

    @property
    def tensors(self) -> int:
        return 1 + max(p for run in self.calls for p in run.parameters)

    def certificate(self) -> Certificate:
        kinds = ["input", *["workspace"] * (self.tensors - 1)]
        buffers = [tensor(f"b{i}", SIZE, kind, 4 * SIZE * i) for i, kind in enumerate(kinds)]
        plan = plan_of(buffers, self.calls, 4 * POOL)
        return certify_plan(plan, {"kernel": kernel(self.calls, self.tensors)}, self.functions)

    def findings(self, module: CpuModule) -> set[str]:
        """Kinds of what is wrong on some grid, and ``"values"`` where grids, or orders, differ."""
        kinds, results = set(), []
        for blocks in (TILES, 1, 3, 8):
            arrays = [np.zeros(SIZE, np.float32) for _ in range(self.tensors)]
            arrays[0][:] = np.arange(SIZE)
            report = module.launch(
                f"kernel_{self.name}",
                grid=(blocks, 1, 1),
                block=(THREADS, 1, 1),
                args=[*arrays, blocks],
                shared_bytes=0 if self.static else 4 * POOL,
                order="shuffled",
                seed=blocks,
                raises=False,
            )
            kinds |= {finding.kind for finding in report.findings}
            results.append(np.concatenate(arrays))
        return kinds | ({"values"} if any(not np.array_equal(r, results[0]) for r in results) else set())


def static(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage whose shared memory is an array of its own, of a size that is known."""
    _, *rest = func.body.seq
    own = [tirx.AllocBuffer(s.buffer) if isinstance(s, tirx.DeclBuffer) and s.buffer.name == "s" else s for s in rest]
    return func.with_body(tirx.SeqStmt(own))


def own(m: Memory) -> object:
    return m.tid


def mirror(m: Memory) -> object:
    return THREADS - 1 - m.tid


def moved(m: Memory) -> object:
    return tirx.truncmod(m.tid + m.tile * 32, THREADS)


def turned(m: Memory) -> tirx.Stmt:
    """Threads read of global memory what others of the same tile have written."""
    return keep(m, m.tensors[0][m.tile * THREADS + mirror(m)])


def paired(own_tile: int, thread: Callable[[Memory], object]) -> Body:
    """Reads what a thread has made of the first of two tiles; the first itself, by that thread or by its own."""

    def body(m: Memory) -> tirx.Stmt:
        first = m.tile - tirx.truncmod(m.tile, 2)
        read = keep(m, m.tensors[0][first * THREADS + thread(m)])
        return tirx.IfThenElse(tirx.truncmod(m.tile, 2) >= own_tile, read, plain(m))

    return body


def swapped(m: Memory) -> tirx.Stmt:
    """Reads the other tile of two."""
    other = m.tile + 1 - 2 * tirx.truncmod(m.tile, 2)
    return keep(m, m.tensors[0][other * THREADS + m.tid])


def pooled(which: int) -> Body:
    """Two tiles write, or read, in one place."""

    def body(m: Memory) -> tirx.Stmt:
        index = [m.tile, m.tile]
        index[which] = tirx.truncdiv(m.tile, 2)
        read, written = (i * THREADS + m.tid for i in index)
        return tirx.BufferStore(m.tensors[1], m.tensors[0][read], [written])

    return body


def waiting(count: int) -> Body:
    return lambda m: sequence(extern(f"souffle_named_barrier<1, {count}>"), plain(m))


def waits(*last: tirx.Stmt) -> Body:
    """Three copies into a slot that its thread then reads; it waits for all of them, or for the last too late."""

    def body(m: Memory) -> tirx.Stmt:
        def turn(t: tirx.Var) -> tirx.Stmt:
            wait = WAIT if not last else tirx.IfThenElse(t < 2, WAIT, None)
            add = tirx.BufferStore(m.register, m.register[0] + m.shared[m.tid], [0])
            return sequence(copy(m, m.tid, m.tensors[0][t * THREADS + m.tid]), COMMIT, wait, add)

        start = tirx.BufferStore(m.register, tirx.FloatImm("float32", 0.0), [0])
        return sequence(start, turns(3, turn), *last, keep(m, m.register[0]))

    return body


def copied(*sources: Callable[[Memory], object]) -> Body:
    """Copies to one slot, waited for together."""

    def body(m: Memory) -> tirx.Stmt:
        return sequence(*(copy(m, m.tid, s(m)) for s in sources), COMMIT, WAIT, keep(m, m.shared[m.tid]))

    return body


def overwritten(late: bool) -> Body:
    """A thread writes over what it has copied, before it has waited or after."""

    def body(m: Memory) -> tirx.Stmt:
        zero = keep(m, tirx.FloatImm("float32", 0.0))
        parts = (zero, WAIT) if late else (WAIT, zero)
        return sequence(copy(m, m.tid, load(m)), COMMIT, *parts, keep(m, m.shared[m.tid]))

    return body


def copied_where_it_was_read(m: Memory) -> tirx.Stmt:
    def turn(t: tirx.Var) -> tirx.Stmt:
        add = tirx.BufferStore(m.register, m.register[0] + m.shared[m.tid], [0])
        return sequence(WAIT, add, copy(m, m.tid, m.tensors[0][t * THREADS + m.tid]), COMMIT)

    start = tirx.BufferStore(m.register, tirx.FloatImm("float32", 0.0), [0])
    return sequence(start, put(m, load(m), m.tid), turns(3, turn), WAIT, keep(m, m.register[0] + m.shared[m.tid]))


def ring(first: bool) -> Body:
    """A loop that reads what the turn before has written; the first turn finds something, or nothing."""

    def body(m: Memory) -> tirx.Stmt:
        def turn(t: tirx.Var) -> tirx.Stmt:
            return put(m, m.shared[t * THREADS + m.tid] + load(m), (t + 1) * THREADS + m.tid)

        return sequence(*([put(m, load(m), m.tid)] if first else []), turns(3, turn), keep(m, m.shared[192 + m.tid]))

    return body


def backwards(m: Memory) -> tirx.Stmt:
    """Each turn reads what the other one writes."""

    def turn(t: tirx.Var) -> tirx.Stmt:
        return sequence(put(m, load(m), (1 - t) * THREADS + m.tid), keep(m, m.shared[t * THREADS + m.tid]))

    return turns(2, turn)


def larger(source: Callable[[Memory], tirx.Buffer], scope: str, size: int) -> Body:
    """An array declared again where another one is, and larger."""

    def body(m: Memory) -> tirx.Stmt:
        again = tirx.decl_buffer((size,), "float32", name="again", scope=scope)
        declared = tirx.DeclBuffer(again, data=tirx.address_of(source(m)[0]))
        return sequence(declared, tirx.BufferStore(again, load(m), [size - THREADS + m.tid]), plain(m))

    return body


def shuffle(m: Memory, mask: object) -> object:
    return tirx.call_intrin("float32", "tirx.cuda.__shfl_down_sync", mask, m.register[0], 1, 32)


def held(m: Memory, value: object | None, then: Callable[[object], object]) -> tirx.Stmt:
    """A shuffle with the mask in an array of its own."""
    mask = tirx.decl_buffer((1,), "uint32", name="mask", scope="local")
    stored = [] if value is None else [tirx.BufferStore(mask, value, [0])]
    start = tirx.BufferStore(m.register, load(m), [0])
    return sequence(tirx.AllocBuffer(mask), start, *stored, keep(m, then(mask[0])))


def product(m: Memory) -> tirx.Stmt:
    parts = (tirx.address_of(m.register[i]) for i in (0, 4, 4))
    return sequence(
        *(tirx.BufferStore(m.register, load(m), [i]) for i in range(8)), extern("souffle_add_product", *parts)
    )


def neighbours(m: Memory) -> tirx.Stmt:
    """The first warp hands values on within itself."""
    inside = sequence(put(m, load(m), m.tid), barrier("warp"), keep(m, m.shared[31 - m.tid]))
    return tirx.IfThenElse(m.tid < 32, inside, plain(m))


FIRST, LAST = lambda tile: tile < TILES // 2, lambda tile: tile >= TILES // 2
ONE_BEFORE, ONE_NONE, ONE = (
    Run("0", TILES, (0, 1), False, before=True),
    Run("0", TILES, (0, 1), False),
    Run("0", TILES, (0, 1)),
)
TWO, TWO_NONE = Run("1", TILES, (1, 2)), Run("1", TILES, (1, 2), False)
PLACES = (replace(ONE, places=2), replace(TWO, joined=True))
PLACES_NONE = (replace(ONE_NONE, places=2), replace(TWO_NONE, joined=True))
HALF_PARTED = (PLACES_NONE[0], PLACES[1])
ONE_TILE = (Run("0", 1, (0, 1), False), Run("1", 1, (1, 2), joined=True))
OTHERS = (Run("1", TILES, (1, 2), joined=True), Run("2", TILES, (2, 3), False, joined=True))
BY_OTHERS = (ONE_NONE, *OTHERS, Run("3", TILES, (1, 4), joined=True))
FEW, REST = lambda tile: tile < 4, lambda tile: tile >= 4
FEW_TURNS = Run("1", 4, (0, 2), joined=True)
AGAIN = Run("0", TILES, (1, 2))
IN_PLACE = (ONE, Run("1", TILES, (1, 1)), Run("0", TILES, (1, 2)))
RACE = "race in a block"
IN_A_HURRY = (through(own, wait=False), through(mirror, wait=False))


def groups(half: int, pending: int) -> Body:
    """The first `half` threads close two groups of a copy each, the others one of both; all leave `pending` open."""

    def body(m: Memory) -> tirx.Stmt:
        first = sequence(copy(m, m.tid, m.tensors[0][at(m)]), tirx.IfThenElse(m.tid < half, COMMIT, None))
        second = sequence(copy(m, THREADS + m.tid, m.tensors[0][at(m)]), COMMIT)
        waited = sequence(extern(f"souffle_copy_wait<{pending}>"), barrier())
        return sequence(first, second, waited, keep(m, m.shared[THREADS - 1 - m.tid]), WAIT, barrier())

    return body


CASES = [
    # Different tiles in a row on one block, of two stages and of one.
    Case(
        "late_then_early",
        REFUTED,
        RACE,
        (only(LAST, through(own)), only(FIRST, through(own))),
        (ONE_BEFORE, TWO),
        "race",
    ),
    Case("early_then_late", PROVEN, "", (only(FIRST, through(own)), only(LAST, through(own))), (ONE_BEFORE, TWO)),
    Case("slots_that_move", REFUTED, RACE, (through(moved, wait=False),), (ONE_NONE,), "race"),
    Case("slots_of_each_tile", PROVEN, "", (through(at),), (ONE_NONE,)),
    # Several stages in a turn.
    Case("in_one_turn", REFUTED, RACE, IN_A_HURRY, (ONE_NONE, replace(TWO, joined=True)), "race"),
    Case("into_the_next_turn", REFUTED, RACE, IN_A_HURRY, (ONE, replace(TWO_NONE, joined=True)), "race"),
    Case("parted_turns", PROVEN, "", (through(own), through(mirror)), (ONE, replace(TWO, joined=True))),
    Case("global_in_one_turn", REFUTED, RACE, (plain, turned), (ONE_NONE, replace(TWO, joined=True)), "race"),
    # The second stage's barrier parts as many turns as it has tiles.
    Case("few_turns_parted", PROVEN, "", (only(FEW, through(moved, wait=False)), plain), (ONE_NONE, FEW_TURNS)),
    Case("turns_left", REFUTED, RACE, (only(REST, through(moved, wait=False)), plain), (ONE_NONE, FEW_TURNS), "race"),
    # A stage of one tile has no next turn, and still what comes after it in its own.
    Case("one_turn", REFUTED, RACE, IN_A_HURRY, ONE_TILE, "race"),
    # A barrier of others in the turn.
    Case("parted_by_others", PROVEN, "", (plain, plain, plain, turned), BY_OTHERS),
    # Several stages in turn for each tile of a slot.
    Case("parted_places", PROVEN, "", (through(own), through(mirror)), PLACES),
    Case("again", PROVEN, "", (through(own),), (PLACES[0], replace(ONE, joined=True))),
    Case("again_in_a_hurry", REFUTED, RACE, (through(own),), (PLACES[0], replace(ONE_NONE, joined=True)), "race"),
    Case("places_of_threads", PROVEN, "", (plain, plain), PLACES_NONE),
    Case("place_in_one_turn", REFUTED, RACE, (plain, turned), HALF_PARTED, "race"),
    Case("place_before", PROVEN, "", (plain, paired(0, mirror)), PLACES),
    Case("place_before_next", PROVEN, "", (plain, paired(1, mirror)), HALF_PARTED),
    Case("place_before_thread", PROVEN, "", (plain, paired(0, own)), PLACES_NONE),
    Case("place_before_race", REFUTED, RACE, (plain, paired(1, mirror)), PLACES_NONE, "race"),
    Case("place_after", REFUTED, "stale or undefined read", (plain, swapped), PLACES),
    Case("place_of_both", UNKNOWN, "write one element", (pooled(1), pooled(0)), PLACES),
    # Arrays that are static.
    Case("static_twice", REFUTED, RACE, (through(own),), (ONE_BEFORE, AGAIN), "race", True),
    Case("static_of_two", UNKNOWN, "may be the same", (through(own), through(own)), (ONE_BEFORE, TWO), "", True),
    # Named barriers: the one tile between has a barrier that other blocks do not come to.
    Case(
        "count_that_changes",
        REFUTED,
        "divergent barrier",
        (waiting(32), plain, waiting(64)),
        (replace(ONE_NONE, threads=32), Run("1", 1, (0, 2)), Run("2", TILES, (0, 3))),
    ),
    # Copies under way.
    Case("each_copy_waited_for", PROVEN, "", (waits(),)),
    Case("last_copy_not_waited_for", REFUTED, RACE, (waits(WAIT),), (), "values"),
    Case("copied_to_twice", REFUTED, RACE, (copied(load, lambda m: m.tensors[0][m.tid]),)),
    Case("copied_once", PROVEN, "", (copied(load),)),
    Case("source_written_in_time", PROVEN, "", (plain, overwritten(False)), IN_PLACE),
    Case("source_written_too_early", REFUTED, RACE, (plain, overwritten(True)), IN_PLACE),
    Case(
        "copied_from_shared",
        UNKNOWN,
        "an asynchronous copy of shared",
        (lambda m: sequence(put(m, load(m), m.tid + 64), copied(lambda m: m.shared[m.tid + 64])(m)),),
    ),
    Case("copied_where_it_was_read", PROVEN, "", (copied_where_it_was_read,)),
    # What loops write and read.
    Case("turn_before", PROVEN, "", (ring(True),)),
    Case("no_turn_before", REFUTED, "stale or undefined read", (ring(False),), (), "uninitialized"),
    Case("turn_after", REFUTED, "stale or undefined read", (backwards,), (), "uninitialized"),
    # Arrays declared again.
    Case("larger_register", REFUTED, "out of bounds", (larger(lambda m: m.register, "local", 72),)),
    Case(
        "larger_pool", REFUTED, "out of bounds", (larger(lambda m: m.shared, "shared", POOL + 64),), (), "out_of_bounds"
    ),
    # Lanes together.
    Case(
        "half_a_warp_multiplies",
        REFUTED,
        "divergent shuffle",
        (lambda m: tirx.IfThenElse(m.tid < 16, product(m), None),),
    ),
    Case(
        "data_multiplies",
        UNKNOWN,
        "on data",
        (lambda m: sequence(plain(m), tirx.IfThenElse(load(m) > 0, product(m), None)),),
    ),
    Case("a_warp_waits", PROVEN, "", (neighbours,)),
    Case(
        "half_a_warp_waits",
        REFUTED,
        "divergent barrier",
        (lambda m: tirx.IfThenElse(m.tid < 16, barrier("warp"), None),),
    ),
    Case(
        "warp_of_lanes_beside",
        REFUTED,
        "divergent barrier",
        (lambda m: sequence(barrier("warp"), plain(m)),),
        (replace(ONE, threads=48),),
    ),
    Case("copies_of_groups_of_all_threads", PROVEN, "", (groups(THREADS, 1),)),
    Case("copies_of_groups_of_some_threads", REFUTED, "race in a block", (groups(32, 1),)),
    Case("copies_of_groups_of_some_threads_awaited", PROVEN, "", (groups(32, 0),)),
    Case(
        "mask_not_taken", REFUTED, "stale or undefined read", (lambda m: held(m, None, lambda mask: shuffle(m, mask)),)
    ),
    Case("mask_taken", PROVEN, "", (lambda m: held(m, ACTIVE, lambda mask: shuffle(m, mask)),)),
    Case(
        "mask_taken_before_a_choice",
        UNKNOWN,
        "of a shuffle",
        (lambda m: held(m, ACTIVE, lambda k: tirx.if_then_else(m.tid < 16, shuffle(m, k), load(m))),),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    found = case.certificate()
    assert found.verdict == case.verdict, found
    if case.verdict == REFUTED:
        assert case.rule in {c.rule for c in found.counterexamples}, found
    elif case.verdict == UNKNOWN:
        assert any(case.rule in reason for reason in found.unknown), found


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CpuModule:
    """One text of all cases that are proven, or of which the CPU device has something to say."""
    target, kernels, functions = cuda_target("sm_90"), {}, {}
    for case in CASES:
        if case.finding or case.verdict == PROVEN:
            func = kernel(case.calls, case.tensors, f"kernel_{case.name}").with_attr("target", target)
            kernels[f"kernel_{case.name}"] = func.with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True)
            functions |= {name: func.with_attr("target", target) for name, func in case.functions.items()}
    text = text_of_functions(kernels, functions, target)
    return compile_text(text, cache_dir=tmp_path_factory.mktemp("block"), checked=True)


@pytest.mark.parametrize("case", [c for c in CASES if c.finding or c.verdict == PROVEN], ids=lambda case: case.name)
def test_device(case: Case, module: CpuModule) -> None:
    found = case.findings(module)
    assert (case.finding in found) if case.finding else not found
