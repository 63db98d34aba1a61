"""Tensors whose parts stay in shared memory over stages: what is proven of them, and every way to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.cuda import text_of_functions
from souffle.codegen.plan import CudaModule
from souffle.program.evaluate import evaluate
from souffle.verify import PROVEN, REFUTED, Certificate, certify_plan
from souffle.verify.certify import functions_of
from souffle.verify.values.agreement import Mismatch, values_agree
from tests.kernel.residents import compiled, residual
from tests.testlib import inputs_for, run_on_cpu_device
from tests.verify.hand_made import (
    THREADS,
    Memory,
    Run,
    Window,
    barrier,
    certificate,
    extern,
    sequence,
    stage,
    tensor,
)

SIZE = 4 * THREADS
PART = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))
NEAR = Window(2048, 2, PART)
"""Room for the parts of two of a block's tiles."""


def at(m: Memory) -> object:
    return m.tile * THREADS + m.tid


def copy(m: Memory) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at(m)], [at(m)])


def turned(m: Memory) -> tirx.Stmt:
    """Threads read what other threads of the same tile have written."""
    return tirx.BufferStore(m.tensors[1], m.tensors[0][m.tile * THREADS + (THREADS - 1 - m.tid)], [at(m)])


def mirrored(m: Memory) -> tirx.Stmt:
    """Tiles read what other tiles have written."""
    return tirx.BufferStore(m.tensors[1], m.tensors[0][SIZE - 1 - at(m)], [at(m)])


def across(m: Memory) -> tirx.Stmt:
    """The last thread of a tile reads the first element of the next tile's part."""
    return tirx.BufferStore(m.tensors[1], m.tensors[0][(at(m) + 1) % SIZE], [at(m)])


def chain(
    second: Callable[[Memory], tirx.Stmt] = turned,
    written: Window | None = NEAR,
    read: Window | None = NEAR,
    *,
    after: bool = True,
    grid: bool = False,
    between: tuple[Run, ...] = (),
    pool: int = 256,
    shared: int = 4096,
    tiles: int = 4,
) -> Certificate:
    """`h`, written in parts by the tiles of one stage and read by those of another; `pool` is of stages between."""

    def busy(m: Memory) -> tirx.Stmt:
        return sequence(
            tirx.BufferStore(m.shared, m.tensors[0][at(m)], [pool - 1 - m.tid]),
            barrier(),
            tirx.BufferStore(m.tensors[1], m.shared[pool - THREADS + m.tid], [at(m)]),
        )

    functions = [
        stage("one", (SIZE, SIZE), copy),
        stage("two", (SIZE, SIZE), second),
        stage("busy", (SIZE, SIZE), busy, shared=pool),
    ]
    runs = [
        Run("one", tiles, (0, 1), after, windows=(None, written)),
        *between,
        Run("two", tiles, (1, 2), after, grid, windows=(read, None)),
    ]
    return certificate(runs, functions, BUFFERS, shared=shared)


def refuted(found: Certificate, rule: str, words: str) -> None:
    assert found.verdict == REFUTED, found
    reasons = [f"{c.rule}: {c.element} {c.reason}" for c in found.counterexamples]
    assert any(c.rule == rule and words in f"{c.element} {c.reason}" for c in found.counterexamples), reasons


def test_parts_that_stay_are_proven_with_a_barrier_of_the_block_or_of_the_grid() -> None:
    assert chain().verdict == PROVEN, chain()
    assert chain(copy, after=False).verdict == PROVEN
    assert chain(grid=True, after=False).verdict == PROVEN


def test_without_a_barrier_threads_race() -> None:
    refuted(chain(after=False), "race in a block", "")


@pytest.mark.parametrize(
    "other",
    [
        None,
        Window(2304, 2, PART),
        Window(2048, 1, PART),
        Window(2048, 2, PART, turn=1),
        Window(2048, 2, PART, tile=1),
        Window(2048, 2, PART, turn=-1),
    ],
    ids=["global", "elsewhere", "fewer", "later", "other tile", "earlier"],
)
def test_what_is_read_elsewhere_than_it_was_written(other: Window | None) -> None:
    refuted(chain(written=NEAR, read=other), "stale or undefined read", "not where it was written")
    refuted(chain(written=other, read=NEAR), "stale or undefined read", "not where it was written")


def test_turns_and_tiles_may_be_counted_from_anywhere_if_all_do() -> None:
    assert chain(written=replace(NEAR, turn=1), read=replace(NEAR, turn=1)).verdict == PROVEN
    moved = Window(2048 + PART, 2, PART, tile=1)
    assert chain(written=moved, read=moved).verdict == PROVEN
    # And are the same where they come to the same.
    assert chain(written=moved, read=NEAR).verdict == PROVEN


def test_a_reader_with_other_tiles() -> None:
    found = chain(mirrored, grid=True)
    refuted(found, "out of bounds", "a tile touches byte")
    refuted(chain(across, grid=True), "out of bounds", "a tile touches byte")
    refuted(chain(tiles=4, read=replace(NEAR, nbytes=PART // 2)), "out of bounds", "which has 128")


def test_tiles_that_are_given_to_blocks_in_another_way() -> None:
    functions = [stage("one", (SIZE, SIZE), copy), stage("two", (SIZE, SIZE), copy)]
    near = Window(2048, 4, PART)
    writer = Run("one", 4, (0, 1), windows=(None, near), places=2)
    reader = Run("two", 4, (1, 2), grid_before=True, windows=(near, None))
    refuted(certificate([writer, reader], functions, BUFFERS, shared=4096), "stale or undefined read", "")
    same = [writer, replace(reader, places=2)]
    assert certificate(same, functions, BUFFERS, shared=4096).verdict == PROVEN


def test_room_and_alignment() -> None:
    refuted(chain(shared=2559), "does not fit", "bytes 2048 to 2560")
    refuted(chain(written=Window(-256, 2, PART), read=Window(-256, 2, PART)), "does not fit", "bytes -256")

    def wide(m: Memory) -> tirx.Stmt:
        four = tirx.Ramp(m.tile * THREADS + (m.tid % 16) * 4, 1, 4)
        return tirx.IfThenElse(m.tid < 16, tirx.BufferStore(m.tensors[1], m.tensors[0][four], [four]), None)

    assert chain(wide).verdict == PROVEN, chain(wide)
    odd = Window(2052, 2, PART)
    refuted(chain(wide, odd, odd), "misaligned", "16 bytes are touched at once")


def test_memory_that_is_used_between() -> None:
    between = Run("busy", 4, (0, 2))
    assert chain(between=(between,)).verdict == PROVEN
    refuted(chain(between=(between,), pool=576), "stale or undefined read", "busy has used its shared memory")


def test_a_stage_s_own_memory_does_not_lie_in_its_window() -> None:
    low = Window(512, 2, PART)
    refuted(chain(between=(Run("busy", 4, (0, 1), windows=(None, low)),)), "race in a block", "for itself")


def test_other_memory_is_used_after_a_barrier_of_all_that_read() -> None:
    def found(after: bool, last_tiles: int = 4) -> Certificate:
        size = last_tiles * THREADS
        buffers = (*BUFFERS, tensor("v", size, "input"), tensor("z", size, "output"))
        functions = [stage("one", (SIZE, SIZE), copy), stage("two", (SIZE, SIZE), turned)]
        functions.append(stage("last", (size, size), lambda m: staged(m, 576), shared=576))
        runs = [
            Run("one", 4, (0, 1), windows=(None, NEAR)),
            Run("two", 4, (1, 2), after, windows=(NEAR, None)),
            Run("last", last_tiles, (3, 4)),
        ]
        return certificate(runs, functions, buffers, shared=4096)

    assert found(True).verdict == PROVEN, found(True)
    refuted(found(False), "race in a block", "no block barrier stands between")
    # Blocks without a tile of the readers have nothing there.
    assert found(True, 9).verdict == PROVEN


def staged(m: Memory, pool: int) -> tirx.Stmt:
    """Through the last elements of the pool."""
    return sequence(
        tirx.BufferStore(m.shared, m.tensors[0][at(m)], [pool - 1 - m.tid]),
        barrier(),
        tirx.BufferStore(m.tensors[1], m.shared[pool - THREADS + m.tid], [at(m)]),
    )


def test_an_output_is_in_global_memory() -> None:
    functions = [stage("one", (SIZE, SIZE), copy), stage("two", (SIZE, SIZE), turned)]
    runs = [Run("one", 4, (0, 1)), Run("two", 4, (1, 2), windows=(None, NEAR))]
    refuted(certificate(runs, functions, BUFFERS, shared=4096), "stale or undefined read", "an output of the network")


def test_copies_under_way_do_not_read_parts() -> None:
    def copied(m: Memory) -> tirx.Stmt:
        into, source = tirx.address_of(m.shared[m.tid]), tirx.address_of(m.tensors[0][at(m)])
        return sequence(
            extern("souffle_copy_async<4>", into, source),
            extern("souffle_copy_commit"),
            extern("souffle_copy_wait<0>"),
            tirx.BufferStore(m.tensors[1], m.shared[m.tid], [at(m)]),
        )

    refuted(chain(copied), "out of bounds", "asynchronous copies")


# A kernel that the compiler made


@pytest.fixture(scope="module")
def net() -> CompiledKernels:
    return compiled(residual())


def edited(net: CompiledKernels, which: int, edit: Callable[[list], list]) -> dict[str, tirx.PrimFunc]:
    """The kernels with the arguments of one window changed: start, turns, bytes, turn, tile."""
    seen = -1

    def see(call: tvm.ir.Call) -> object:
        nonlocal seen
        if not (call.args and str(getattr(call.args[0], "value", "")) == "souffle_window"):
            return call
        seen += 1
        if seen != which:
            return call
        return tirx.call_extern(call.ty, "souffle_window", call.args[1], *edit(list(call.args[2:])))

    (merged,) = net.merged
    body = tvm_ffi.structural_map(merged.func.body, (tvm.ir.Call, see))
    assert seen == 1  # The writer's and the reader's.
    return {merged.name: merged.func.with_body(body)}


def number(value: int) -> tirx.IntImm:
    return tirx.IntImm("int32", value)


EDITS: dict[str, Callable[[list], list]] = {
    "start": lambda a: [number(int(a[0]) - 1024), *a[1:]],
    "turns": lambda a: [a[0], number(0), *a[2:]],
    "bytes": lambda a: [*a[:2], number(int(a[2]) // 2), *a[3:]],
    "turn": lambda a: [*a[:3], a[3] + 1, a[4]],
    "tile": lambda a: [*a[:4], a[4] + 1],
}


@pytest.mark.parametrize("which", [0, 1], ids=["writer", "reader"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_mutants_of_a_window_are_refuted(net: CompiledKernels, which: int, edit: Callable[[list], list]) -> None:
    found = certify_plan(net.plan, edited(net, which, edit), functions_of(net))
    assert found.verdict == REFUTED, found


def played(net: CompiledKernels, kernels: dict[str, tirx.PrimFunc]) -> bool:
    """Whether the changed text gives another result, on the CPU device."""
    functions = functions_of(net)
    text = text_of_functions(kernels, functions, next(iter(functions.values())).attrs["target"])
    plan = replace(net.plan, modules=(CudaModule(text, b"", False),))
    program = residual()
    inputs = inputs_for(program)
    expected, found = evaluate(program, inputs), run_on_cpu_device(plan, inputs)
    return any(not np.array_equal(found[name], expected[name]) for name in expected)


def test_mutants_change_results_and_the_kernel_does_not(net: CompiledKernels) -> None:
    assert not played(net, {m.name: m.func for m in net.merged})
    assert played(net, edited(net, 1, EDITS["turns"])) and played(net, edited(net, 1, EDITS["start"]))


def test_a_reader_that_takes_another_element_of_its_part_is_refuted_by_values(net: CompiledKernels) -> None:
    functions = functions_of(net)
    reader = next(name for name in functions if "plus6" in name)
    func, changed = functions[reader], []

    def see(load: tvm.ir.expr.TensorLoad) -> object:
        if not str(load.source.name).endswith("_parts"):
            return load
        changed.append(load)
        index = load.indices[0]
        base = index.base if isinstance(index, tirx.Ramp) else index
        turned_ = base + 4 - 8 * tirx.truncmod(tirx.truncdiv(base, 4), 2)
        return tirx.BufferLoad(load.source, [tirx.Ramp(turned_, 1, index.lanes) if base is not index else turned_])

    functions[reader] = func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.expr.TensorLoad, see)))
    assert changed
    kernels = {m.name: m.func for m in net.merged}
    assert certify_plan(net.plan, kernels, functions).verdict == PROVEN  # It keeps to its part.
    of_reader = [d for d in net.definitions if d.functions[0][0] == reader]
    ((name, tiles, threads),) = of_reader[0].functions
    agree = values_agree(of_reader[0].func, [(functions[name], tiles, threads)])
    assert isinstance(agree, Mismatch), agree
