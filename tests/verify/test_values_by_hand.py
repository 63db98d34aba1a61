"""Values of stage functions written by hand: what is reported, and what threads hand to each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from tvm import te, tirx
from tvm.ir import TensorLoad

from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.mutation.statement_paths import mapped
from souffle.verify.expressions import Undecided
from souffle.verify.values import Agreement, Mismatch, StageText, compare_stages, values_agree, values_section
from souffle.verify.values.scalars import Scalars
from tests.verify.hand_made import THREADS, Memory, barrier, extern, sequence, stage


def definition(compute: Callable[..., te.Tensor], *sizes: int) -> tirx.PrimFunc:
    inputs = [te.placeholder((n,), "float32", name=f"in{i}") for i, n in enumerate(sizes)]
    return te.create_prim_func([*inputs, compute(*inputs)])


SIZE = 2 * THREADS


def doubled(x: te.Tensor) -> te.Tensor:
    return te.compute((SIZE,), lambda i: x[i] + x[i])


def by_hand(compute: Callable[..., te.Tensor], body: Callable[[Memory], tirx.Stmt], **options: object):
    func = stage("hand", [SIZE, SIZE], body)
    return values_agree(definition(compute, SIZE), [(func, SIZE // THREADS, THREADS)], **options)


def at(memory: Memory) -> object:
    return memory.tile * THREADS + memory.tid


def test_the_element_and_who_wrote_it_are_named() -> None:
    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        value = x + tirx.if_then_else(at(memory) == 70, x + 1.0, x)
        return tirx.BufferStore(memory.tensors[1], value, [at(memory)])

    found = by_hand(doubled, body)
    assert isinstance(found, Mismatch)
    assert (found.element, found.tile, found.thread) == ((70,), 1, 6)
    assert "t1[" in found.statement
    assert "1 of 128 elements" in found.reason


def test_what_no_tile_writes_is_missed_where_all_are_run() -> None:
    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        return tirx.IfThenElse(at(memory) != 5, tirx.BufferStore(memory.tensors[1], x * 2.0, [at(memory)]), None)

    found = by_hand(doubled, body, tiles="all")
    assert isinstance(found, Mismatch)
    assert (found.element, found.tile) == ((5,), None)


def test_shared_memory_that_was_not_written_is_noise() -> None:
    def body(memory: Memory, written: int) -> tirx.Stmt:
        put = tirx.BufferStore(memory.shared, memory.tensors[0][at(memory)], [memory.tid])
        value = memory.shared[THREADS - 1 - memory.tid]
        own = tirx.BufferStore(memory.tensors[1], value, [memory.tile * THREADS + THREADS - 1 - memory.tid])
        own = tirx.BufferStore(memory.tensors[1], value + value, list(own.indices))
        return sequence(tirx.IfThenElse(memory.tid < written, put, None), barrier(), own)

    assert isinstance(by_hand(doubled, lambda memory: body(memory, THREADS)), Agreement)
    assert isinstance(by_hand(doubled, lambda memory: body(memory, THREADS - 1)), Mismatch)


def test_a_lane_beyond_a_tensor_is_named() -> None:
    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory) + 1]
        return tirx.BufferStore(memory.tensors[1], x, [at(memory)])

    found = by_hand(doubled, body)
    assert isinstance(found, Mismatch)
    assert found.reason == f"it touches element {SIZE} of the tensor p0, which has {SIZE}"
    assert (found.tile, found.thread) == (1, THREADS - 1)


@pytest.mark.parametrize(
    ("kind", "other", "giver"),
    [
        ("__shfl_sync", 5, lambda lane: lane // 16 * 16 + 5),
        ("__shfl_xor_sync", 3, lambda lane: lane ^ 3),
        ("__shfl_up_sync", 4, lambda lane: lane - 4 if lane % 16 >= 4 else lane),
        ("__shfl_down_sync", 4, lambda lane: lane + 4 if lane % 16 < 12 else lane),
    ],
)
def test_threads_of_a_warp_hand_values_to_each_other(kind: str, other: int, giver: Callable[[int], int]) -> None:
    """Segments of 16 lanes, as the CUDA manual says."""

    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        mask = tirx.call_intrin("uint32", "tirx.cuda.__activemask")
        given = tirx.call_intrin("float32", f"tirx.cuda.{kind}", mask, x, other, 16)
        return tirx.BufferStore(memory.tensors[1], given, [at(memory)])

    def handed(x: te.Tensor) -> te.Tensor:
        def element(i: object) -> object:
            lane = tirx.floormod(i, 32)
            place = tirx.IntImm("int32", 0)
            for number in range(32):
                place = tirx.Select(lane == number, tirx.IntImm("int32", giver(number)), place)
            return x[tirx.floordiv(i, 32) * 32 + place]

        return te.compute((SIZE,), element)

    found = by_hand(handed, body)
    assert isinstance(found, Agreement), str(found)


def test_a_number_that_zero_hides_is_seen() -> None:
    """``max(x, 0)`` hides a wrong x where zero is larger; at other points it is not."""

    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        wrong = tirx.if_then_else(at(memory) == 3, x + 1.0, x)
        return tirx.BufferStore(memory.tensors[1], tirx.max(wrong, tirx.FloatImm("float32", 0.0)), [at(memory)])

    def relu(x: te.Tensor) -> te.Tensor:
        return te.compute((SIZE,), lambda i: tirx.max(x[i], tirx.FloatImm("float32", 0.0)))

    for seed in range(8):
        assert isinstance(by_hand(relu, body, seed=seed), Mismatch)


def test_sums_in_any_order_are_the_same() -> None:
    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        value = (x * 0.5 + 3.0) / 7.0 - (x - 6.0) / 14.0 + x * 2.0
        return tirx.BufferStore(memory.tensors[1], value - 6.0 / seventh(x, 7.0), [at(memory)])

    def seventh(x: object, divisor: float) -> object:
        # A quotient of literals is rounded before anybody sees it; one with an input stays exact.
        return x * divisor / x

    assert isinstance(by_hand(doubled, body), Agreement)


def test_named_barriers_are_barriers_of_all_threads_of_the_stage() -> None:
    def body(memory: Memory) -> tirx.Stmt:
        put = tirx.BufferStore(memory.shared, memory.tensors[0][at(memory)] * 2.0, [memory.tid])
        wait = extern(f"souffle_named_barrier<1, {THREADS}>")
        return sequence(put, wait, tirx.BufferStore(memory.tensors[1], memory.shared[memory.tid], [at(memory)]))

    assert isinstance(by_hand(doubled, body), Agreement)


def copied(count: int, **options: object) -> object:
    """A stage that copies, with so many tiles."""
    func = stage("hand", [count * THREADS] * 2, lambda m: tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)]))
    same = definition(lambda x: te.compute((count * THREADS,), lambda i: x[i]), count * THREADS)
    return values_agree(same, [(func, count, THREADS)], **options)


def test_the_first_and_the_last_tile_are_run_and_the_seed_chooses_others() -> None:
    found = [copied(50, tiles=5, seed=seed) for seed in (0, 0, 1)]
    chosen = [agreement.functions[0].tiles for agreement in found]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(c[0] == 0 and c[-1] == 49 and len(c) == 5 for c in chosen)
    assert found[0].functions[0].elements == (("compute", 5 * THREADS),)
    assert not found[0].complete


def test_all_tiles_are_run_where_that_is_little_work() -> None:
    assert copied(50).complete
    assert not copied(40_000).complete


@pytest.mark.parametrize("options", [{"tiles": "all"}, {"tiles": 3}])
def test_what_no_tile_writes_is_found_though_few_are_run(options: dict) -> None:
    def body(memory: Memory) -> tirx.Stmt:
        turn = tirx.Var("turn", "int32")
        place = memory.tile * (2 * THREADS) + turn * THREADS + memory.tid
        put = tirx.BufferStore(memory.tensors[1], memory.tensors[0][place], [place])
        whole = tirx.IfThenElse(tirx.any(memory.tile != 7, memory.tid < THREADS - 1), put, None)
        return tirx.For(turn, 0, 2, tirx.ForKind.SERIAL, whole)

    size = 40 * THREADS
    func = stage("hand", [size, size], body)
    found = values_agree(
        definition(lambda x: te.compute((size,), lambda i: x[i]), size), [(func, 20, THREADS)], **options
    )
    assert isinstance(found, Mismatch)
    assert found.reason == "no tile writes it"
    assert found.element == (7 * 2 * THREADS + THREADS - 1,)


def test_where_a_stage_writes_may_depend_on_data() -> None:
    """Then it is not known that it writes everything, but for tiles that are run."""

    def body(memory: Memory) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        put = [tirx.BufferStore(memory.tensors[1], x + x, [at(memory)]) for _ in range(2)]
        return tirx.IfThenElse(x < 1.0, put[0], put[1])

    found = by_hand(doubled, body, tiles=1)
    assert isinstance(found, Agreement)
    assert not found.covered
    assert by_hand(doubled, body, tiles="all").covered


def test_elements_that_no_output_needs_may_be_computed() -> None:
    """Their indices are data as any other: such as the definition allows for each of its tensors are drawn."""
    x, chosen = te.placeholder((SIZE,), "int32", name="x"), te.placeholder((THREADS,), "int32", name="chosen")
    gathered = te.compute((THREADS,), lambda i: x[chosen[i]], name="gathered")
    first = te.compute((SIZE,), lambda i: gathered[0] + i, name="first")

    def body(memory: Memory) -> tirx.Stmt:
        values, places, result = memory.tensors
        put = tirx.BufferStore(memory.shared, values[places[memory.tid]], [memory.tid])
        return sequence(put, barrier(), tirx.BufferStore(result, memory.shared[0] + at(memory), [at(memory)]))

    func = stage("hand", [SIZE, THREADS, SIZE], body, dtype="int32")
    defined = te.create_prim_func([x, chosen, first])
    for seed in range(8):
        assert isinstance(values_agree(defined, [(func, SIZE // THREADS, THREADS)], seed=seed), Agreement)


def test_what_is_not_known_is_undecided_and_named() -> None:
    found = by_hand(doubled, lambda memory: extern("some_function", memory.tid))
    assert isinstance(found, Undecided)
    assert "some_function" in str(found)

    def divided(memory: Memory) -> tirx.Stmt:
        return tirx.IfThenElse(memory.tid < 7, barrier(), None)

    assert "a part of the threads" in str(by_hand(doubled, divided))


def test_a_section_of_the_certificate() -> None:
    def body(memory: Memory, factor: float) -> tirx.Stmt:
        return tirx.BufferStore(memory.tensors[1], memory.tensors[0][at(memory)] * factor, [at(memory)])

    def section(*bodies: Callable[[Memory], tirx.Stmt]):
        texts = []
        for number, made in enumerate(bodies):
            func = stage(f"hand{number}", [SIZE, SIZE], made)
            texts.append(StageText((f"hand{number}",), definition(doubled, SIZE), ((func, 2, THREADS),)))
        return values_section(compare_stages(texts))

    right = section(lambda m: body(m, 2.0), lambda m: body(m, 2.0))
    assert right.verdict == PROVEN
    assert dict(right.facts)["distinct stages"] == 1
    wrong = section(lambda m: body(m, 2.0), lambda m: body(m, 3.0))
    assert wrong.verdict == REFUTED
    assert wrong.counterexamples[0].rule == "wrong value"
    assert wrong.counterexamples[0].stages == ("hand1",)
    assert section(lambda m: extern("some_function", m.tid)).verdict == UNKNOWN


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_short_integers_wrap_around(dtype: str) -> None:
    """What is calculated in a longer type, as C does, is another number; the same sum in another order is not."""

    def half(x: object, long: str) -> object:
        wide = tirx.Cast(long, x)
        return tirx.Cast(dtype, tirx.truncdiv(wide * wide + wide, tirx.const(2, long)))

    def hand(value: Callable[[object], object]):
        def body(memory: Memory) -> tirx.Stmt:
            return tirx.BufferStore(memory.tensors[1], value(memory.tensors[0][at(memory)]), [at(memory)])

        x = te.placeholder((SIZE,), dtype, name="x")
        wanted = te.create_prim_func([x, te.compute((SIZE,), lambda i: half(x[i], dtype), name="y")])
        stages = [(stage("hand", [SIZE, SIZE], body, dtype=dtype), SIZE // THREADS, THREADS)]
        return values_agree(wanted, stages)

    assert isinstance(hand(lambda x: half(x, dtype)), Agreement)
    in_another_order = hand(lambda x: tirx.truncdiv(x + x * x, tirx.const(2, dtype)))
    assert isinstance(in_another_order, Agreement)
    assert isinstance(hand(lambda x: half(x, "int32")), Mismatch)


def test_what_is_divided_by_zero_does_not_cancel() -> None:
    """In ``x - (x / 0 - x / 0)`` it would, as the mean of a normalization does in the sum of squares around it."""

    def body(memory: Memory, divisor: float, factor: float) -> tirx.Stmt:
        x = memory.tensors[0][at(memory)]
        quotient = tirx.Div(x, tirx.const(divisor, "float32")) * tirx.const(factor, "float32")
        value = x + x + (quotient - quotient)
        return tirx.BufferStore(memory.tensors[1], value, [at(memory)])

    assert isinstance(by_hand(doubled, lambda memory: body(memory, 3.0, 2.0)), Agreement)
    for divisor, factor in ((0.0, 1.0), (3.0, float("inf")), (float("-inf"), 1.0)):
        found = by_hand(doubled, lambda memory, d=divisor, f=factor: body(memory, d, f))
        assert isinstance(found, Mismatch)
        assert "literal" in found.reason
        assert "nowhere in its definition" in found.reason

    def none(x: te.Tensor) -> te.Tensor:
        return te.compute((SIZE,), lambda i: x[i] + x[i] + x[i] * tirx.const(float("inf"), "float32") * 0.0)

    assert not isinstance(by_hand(none, lambda memory: body(memory, 0.0, 1.0)), Agreement)


def test_the_last_turn_of_a_loop_is_what_a_register_holds() -> None:
    """Turns that depend on nothing are run together, whatever they write."""

    def body(memory: Memory, turns: int) -> tirx.Stmt:
        turn = tirx.Var("turn", "int32")
        x = memory.tensors[0][memory.tile * THREADS + tirx.floormod(memory.tid + turn, THREADS)]
        loop = tirx.For(turn, 0, turns, tirx.ForKind.SERIAL, tirx.BufferStore(memory.register, x, [0]))
        held = memory.register[0]
        return sequence(loop, tirx.BufferStore(memory.tensors[1], held + held, [at(memory)]))

    def turned(x: te.Tensor) -> te.Tensor:
        return te.compute(
            (SIZE,),
            lambda i: x[i // THREADS * THREADS + (i + 2) % THREADS] + x[i // THREADS * THREADS + (i + 2) % THREADS],
        )

    assert isinstance(by_hand(turned, lambda memory: body(memory, 3)), Agreement)
    assert isinstance(by_hand(turned, lambda memory: body(memory, 2)), Mismatch)


@pytest.mark.parametrize("outer", [lambda product, x: product, lambda product, x: product + x], ids=["product", "sum"])
def test_vectors_of_two_sizes_are_undecided(outer: Callable[[object, object], object]) -> None:
    """As a mutant makes them of a vector's length: no type of a node says what it holds."""

    def body(memory: Memory) -> tirx.Stmt:
        wide = tirx.Ramp(memory.tid * 2, 1, 2)
        x = memory.tensors[0]
        loaded = x[wide]
        product = tirx.Mul(loaded, loaded)
        short = tirx.BufferLoad(x, [tirx.Ramp(memory.tid * 4, 1, 4)])
        value = mapped(outer(product, loaded), (TensorLoad,), 1, lambda load: short)
        return tirx.BufferStore(memory.tensors[1], value, [wide])

    assert isinstance(by_hand(doubled, body), Undecided)


def test_memory_of_vectors_holds_vectors() -> None:
    """An element of it is as wide as a vector of neighbours elsewhere."""
    x, pairs = tirx.decl_buffer((8,), "float32", name="x"), tirx.decl_buffer((4,), "float32x2", name="pairs")
    zero = tirx.const(0, "int32")
    vector = tirx.Add(x[tirx.Ramp(zero, 1, 2)], tirx.BufferLoad(pairs, [zero]))
    reasons = []
    for expression in (vector, tirx.Add(vector, vector)):
        with pytest.raises(Undecided) as refused:
            Scalars(SimpleNamespace(add=None)).of(expression)
        reasons.append(str(refused.value))
    # Memory is no part of expressions of numbers alone; that the widths agree is said before.
    assert all(reason.startswith("an element of") for reason in reasons), reasons


@pytest.mark.parametrize(("exponent", "agrees"), [(2, True), (3, False)])
def test_a_power_of_vectors_is_that_of_their_elements(exponent: int, agrees: bool) -> None:
    """The exponent of a vector is a literal for all lanes; found by a random GlobalLpPool."""

    def body(memory: Memory) -> tirx.Stmt:
        lanes = tirx.Ramp(memory.tile * THREADS + memory.tid * 2, 1, 2)
        power = tirx.pow(memory.tensors[0][lanes], tirx.Broadcast(tirx.const(float(exponent), "float32"), 2))
        return tirx.IfThenElse(memory.tid < THREADS // 2, tirx.BufferStore(memory.tensors[1], power, [lanes]), None)

    def squared(x: te.Tensor) -> te.Tensor:
        return te.compute((SIZE,), lambda i: tirx.pow(x[i], tirx.const(2.0, "float32")))

    assert isinstance(by_hand(squared, body), Agreement if agrees else Mismatch)


def test_a_division_by_zero_in_a_branch_that_data_decides_is_found() -> None:
    """By a point at which the branch is taken in the one tile of which the divisor is zero."""
    tiles = 7

    def chosen(x: te.Tensor, place: Callable[[object], object] = lambda i: i) -> te.Tensor:
        def element(i: object) -> object:
            # What is chosen for other data is not evaluated.
            return tirx.if_then_else(x[0] != 0.0, x[i] * x[i], x[place(i)] + 1.0)

        return te.compute((tiles * THREADS,), element)

    def body(memory: Memory, place: object) -> tirx.Stmt:
        x, i = memory.tensors[0], at(memory)
        return tirx.BufferStore(memory.tensors[1], tirx.if_then_else(x[0] != 0.0, x[i] * x[i], x[place] + 1.0), [i])

    def compared(place: Callable[[Memory], object], of: Callable[..., te.Tensor] = chosen):
        func = stage("hand", [tiles * THREADS] * 2, lambda memory: body(memory, place(memory)))
        return values_agree(definition(of, tiles * THREADS), [(func, tiles, THREADS)])

    def quotient(memory: Memory, divisor: object) -> object:
        return tirx.truncdiv(at(memory) * divisor, divisor)

    assert isinstance(compared(lambda memory: quotient(memory, memory.tile + 1)), Agreement)
    assert isinstance(compared(lambda memory: quotient(memory, memory.tile - tiles)), Agreement)
    for wrong in range(tiles):
        found = compared(lambda memory, wrong=wrong: quotient(memory, memory.tile - wrong))
        assert isinstance(found, Mismatch)
        assert (found.tensor, found.tile, found.reason) == ("arithmetic", wrong, "it divides by zero")
    defined = partial(chosen, place=lambda i: tirx.truncmod(i, tirx.truncdiv(i, tirx.const(THREADS)) - 3))
    same = compared(lambda memory: tirx.truncmod(at(memory), memory.tile - 3), defined)
    assert isinstance(same, Undecided)
    assert "divides by zero" in str(same)
