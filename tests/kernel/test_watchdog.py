"""Waits with a limit: what is emitted, what is proven of it, what a file keeps, and that it changes no result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

import souffle
from souffle import models
from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.codegen.plan import Plan
from souffle.errors import KernelTimeoutError, OptionError
from souffle.kernel.grid_barrier import (
    ARRIVAL_FUNCTION,
    COMPLETION_FUNCTION,
    GRID_BARRIERS,
    HALVES_TEXT,
    WATCHED_COUNTER,
    WATCHED_FUNCTION,
    barrier_for,
)
from souffle.kernel.watchdog import OVERDUE_FUNCTION, OVERDUE_TEXT
from souffle.mutation.barriers import barrier_changes, barrier_kind
from souffle.options import Options
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.runtime.artifact import load, save
from souffle.runtime.explain import explain
from souffle.runtime.timed_out import timeout_error
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from souffle.verify.saved import verify_plan
from souffle.watchdog import FIELDS, RECORD_WORDS, TimedOutWait, timed_out_wait
from tests.kernel.test_grid_barrier import ptx_of
from tests.testlib import inputs_for
from tests.watched import CALL, looped, watched

pytestmark = pytest.mark.sampled(2)

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")


@cache
def program() -> TEProgram:
    return looped()


@cache
def compiled(level: str = "V3", watchdog_ms: float | None = 5.0) -> CompiledKernels:
    return watched(level, watchdog_ms)


# ---- the text ----


@pytest.mark.parametrize("level", ["V3", "V4"])
def test_without_it_the_text_is_that_of_the_counter(level: str) -> None:
    """Byte for byte, but for the functions, a parameter and what each wait is told."""
    off, on = (compiled(level, limit).plan for limit in (None, 5.0))
    text = on.modules[0].text
    for name in (OVERDUE_FUNCTION, WATCHED_FUNCTION, "grid_record", "globaltimer"):
        assert name in text and name not in off.modules[0].text
    assert text.count(OVERDUE_TEXT.lstrip()) == text.count(WATCHED_COUNTER.text.lstrip()) == 1
    text = text.replace(OVERDUE_TEXT.lstrip(), "").replace(", uint* grid_record", "")
    text = text.replace(WATCHED_COUNTER.text.lstrip(), GRID_BARRIERS["counter"].text.lstrip())
    wait = "souffle_wait_for_grid(grid_state, num_blocks);"
    text = re.sub(rf"{re.escape(CALL)}[^;]*;", wait, text)
    # Without a limit a wait before which memory is asked for is in two halves.
    plain = re.sub(rf" *uint found\w* = {ARRIVAL_FUNCTION}\([^;]*;\n", "", off.modules[0].text)
    plain = re.sub(rf"\b{COMPLETION_FUNCTION}\(grid_state[^;]*;", wait, plain)
    halves, whole = HALVES_TEXT.lstrip(), GRID_BARRIERS["counter"].text.lstrip()
    plain = plain.replace(halves, "" if whole in plain else whole)
    assert text == plain
    assert on.buffers[: len(off.buffers) - 1] == off.buffers[:-1] and on.workspace_bytes == off.workspace_bytes
    assert [(b.kind, b.nbytes) for b in on.buffers[-2:]] == [("state", 256), ("record", 4 * RECORD_WORDS)]
    assert on.launches[0].buffers == (*off.launches[0].buffers, len(off.buffers))


def test_each_wait_says_where_it_stands() -> None:
    """The second kernel call of a stage is another place; in a loop the step is told."""
    text = compiled().plan.modules[0].text
    assert re.findall(rf"{re.escape(CALL)} (.*)\);", text) == ["(int64_t)5000000, 0, 1, s0"]
    lstm = souffle.compile(models.build("lstm"), target="cuda", arch="sm_90", cubin=False, level="V3", watchdog_ms=0.5)
    (kernel,) = lstm.plan.kernels
    told = re.findall(rf"{re.escape(CALL)} \(int64_t\)500000, 0, (\d+), -1\);", lstm.plan.modules[0].text)
    assert len(told) == kernel.grid_syncs == 4
    ahead = [lstm.plan.modules[0].text.split(CALL)[number + 1] for number in range(4)]
    for number, text in zip(told, ahead, strict=True):
        called = re.search(r"\b(stage\d+_\w+)\(", text).group(1)
        assert kernel.stages[int(number)] == called


def test_kernels_that_do_not_wait_have_none() -> None:
    plan = compiled("V0").plan
    assert plan.options.watchdog_ms == 5.0
    assert {buffer.kind for buffer in plan.buffers} <= {"input", "output", "constant", "workspace"}
    assert all(OVERDUE_FUNCTION not in module.text for module in plan.modules)


# ---- the option ----


def test_which_barrier_is_chosen() -> None:
    assert Options().grid_barrier == "counter"
    for given in ({}, {"grid_barrier": "counter"}):
        assert Options(watchdog_ms=3, **given).grid_barrier == "counter"
    with pytest.raises(OptionError, match=r'watchdog_ms=3 needs grid_barrier="counter"'):
        Options(watchdog_ms=3, grid_barrier="cooperative")
    with pytest.raises(OptionError, match="the barrier cooperative has no limit"):
        barrier_for("cooperative", 3)
    assert barrier_for("counter", 0.25).limit == 250_000


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "5", True, 1e-7, 1e12])
def test_limits_that_are_none(limit: object) -> None:
    with pytest.raises(OptionError, match=r"watchdog_ms=.* is not valid; give milliseconds from 0\.001 to 1e\+09"):
        souffle.compile(models.build("lstm"), target="cuda", arch="sm_90", cubin=False, watchdog_ms=limit)


# ---- results ----


@pytest.mark.parametrize("checked", [False, True])
def test_results_are_the_same_bits(checked: bool) -> None:
    """Also with the least limit: on the CPU device no time passes while a block works."""
    inputs = inputs_for(program())
    expected = Network(compiled("V3", None).plan, device="cpu")(inputs)
    network = Network(compiled("V3", 1e-3).plan, device="cpu", checked=checked)
    for blocks, options in ((4, {}), (1, {}), (8, {"order": "shuffled", "seed": 2})):
        run = network.on("cpu", blocks=blocks, **options)
        for _ in range(2):
            for key, value in run(inputs).items():
                assert value.tobytes() == expected[key].tobytes()
        if checked:
            (report,) = run.counts
            assert (report.findings, report.races_checked) == ((), True)
            assert report.grid_syncs == network.plan.kernels[0].grid_syncs
            assert "watchdog record" not in dict(report.buffers)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    made = compiled().plan
    save(made, tmp_path / "looped.souffle")
    plan = load(tmp_path / "looped.souffle")
    assert (plan.options.watchdog_ms, plan.options.grid_barrier) == (5.0, "counter")
    assert (plan.buffers, plan.launches, plan.modules[0].text) == (made.buffers, made.launches, made.modules[0].text)
    assert plan.certificate.verdict == verify_plan(plan).verdict == PROVEN
    assert "sm_90, waits limited to 5 ms" in explain(plan) and "waits limited" not in explain(compiled("V3", None).plan)
    inputs = inputs_for(program())
    for key, value in Network(plan, device="cpu")(inputs).items():
        np.testing.assert_array_equal(value, Network(made, device="cpu")(inputs)[key])


# ---- the certificate ----


def verdict(kernels: CompiledKernels, plan: Plan, edit: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> Certificate:
    names = {kernel.name: kernel.stages for kernel in plan.kernels}
    functions = {n: f.func for k in kernels.merged for n, f in zip(names[k.name], k.shape.functions, strict=True)}
    return certify_plan(plan, {k.name: edit(k.func) for k in kernels.merged}, functions)


def waits(edit: Callable[..., tirx.Stmt]) -> Callable[[tirx.PrimFunc], tirx.PrimFunc]:
    """Every wait replaced by what `edit` makes of the kernel and the wait's arguments."""

    def of(func: tirx.PrimFunc) -> tirx.PrimFunc:
        def see(node: tirx.Evaluate) -> tirx.Stmt:
            call = node.value
            if not isinstance(call, tvm.ir.Call) or str(getattr(call.args[0], "value", "")) != WATCHED_FUNCTION:
                return node
            made = edit(func, *call.args[1:])
            return made if isinstance(made, tirx.Stmt) else tirx.Evaluate(tirx.call_extern("int32", *made))

        return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Evaluate, see)))

    return of


@pytest.mark.parametrize("level", ["V3", "V4"])
def test_it_is_proven(level: str) -> None:
    kernels = compiled(level)
    found = verdict(kernels, kernels.plan, lambda func: func)
    assert kernels.plan.certificate.verdict == found.verdict == PROVEN
    assert dict(found.kernels[0].facts)["grid barriers"] == kernels.plan.kernels[0].grid_syncs == 6


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda func, *args: tirx.Evaluate(tirx.IntImm("int32", 0)), None),
        (lambda func, state, n, *rest: (WATCHED_FUNCTION, state, n + 1, *rest), "not the grid that is launched"),
        (lambda func, state, *rest: (WATCHED_FUNCTION, func.params[0], *rest), "not memory that begins as zero"),
        (lambda func, s, n, record, *rest: (WATCHED_FUNCTION, s, n, s, *rest), "which the host does not read"),
        (lambda func, s, n, r, *rest: (WATCHED_FUNCTION, s, n, func.params[0], *rest), "which the host does not read"),
    ],
)
def test_what_is_wrong_with_it_is_refuted(edit: Callable[..., object], reason: str | None) -> None:
    kernels = compiled()
    found = verdict(kernels, kernels.plan, waits(edit))
    assert found.verdict == REFUTED
    if reason is None:
        assert "race between blocks" in {c.rule for c in found.counterexamples}
    else:
        assert any(reason in c.reason for c in found.counterexamples)


def test_its_memory_is_enough_and_its_own() -> None:
    kernels = compiled()
    plan, (launch,) = kernels.plan, kernels.plan.launches
    for kind, shape, reason in (("state", (32,), "not memory that begins"), ("record", (8,), "the host does not read")):
        buffers = tuple(replace(b, shape=shape) if b.kind == kind else b for b in plan.buffers)
        found = verdict(kernels, replace(plan, buffers=buffers), lambda func: func)
        assert found.verdict == REFUTED and any(reason in c.reason for c in found.counterexamples)
    given = replace(plan, launches=(replace(launch, buffers=(launch.buffers[-1], *launch.buffers[1:])),))
    found = verdict(kernels, given, lambda func: func)
    assert any("is given the memory of a grid barrier" in c.reason for c in found.counterexamples)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (__syncthreads_or(over))", "if (over)"),
        ("if (__syncthreads_or(over)) asm volatile", "if (__syncthreads_or(over)) return 0;\n  asm volatile"),
        ("acq_rel.gpu.global.u32", "relaxed.gpu.global.u32"),
        ("words[0] = (unsigned)kind;", ";"),
        ("if (before == 0 && *left > 0) return 0;", "if (*left > 0) return 0;"),
    ],
)
def test_only_the_text_that_is_known_counts(old: str, new: str) -> None:
    kernels = compiled()
    (module,) = kernels.plan.modules
    assert old in module.text
    plan = replace(kernels.plan, modules=(replace(module, text=module.text.replace(old, new)),))
    found = verdict(kernels, plan, lambda func: func)
    assert found.verdict == UNKNOWN and WATCHED_FUNCTION in found.unknown[0]


def test_a_wait_that_is_moved_names_no_step_of_a_loop_that_it_is_not_in() -> None:
    (merged,) = compiled().merged
    changes = [c for c in barrier_changes(merged.func) if c.kind in ("grid barrier", "block barrier")]
    moved = {change.action for change in changes}
    assert {"delete", "swap", "move out of its loop, earlier"} <= moved
    for change in changes:
        func = change.make()
        assert not tvm.tirx.analysis.undefined_vars(func.body, func.params), change.what
    kinds = [barrier_kind(change.statement) for change in changes]
    assert kinds.count("grid barrier") >= 4


# ---- the record ----


def words(**fields: int) -> np.ndarray:
    return np.array([fields.get(name, 0) % 2**32 for name in FIELDS] + [0] * (RECORD_WORDS - len(FIELDS)), np.uint32)


def test_a_record_is_read_as_it_is_written() -> None:
    text = OVERDUE_TEXT
    for number, name in enumerate(FIELDS):
        assert f"words[{number}] = {'blockIdx.x' if name == 'block' else f'(unsigned){name}'};" in text
    assert timed_out_wait(words()) is None
    flag = words(kind=2, block=3, kernel=0, stage=1, step=4, tile=6, index=9, found=2, wanted=5)
    assert timed_out_wait(flag) == TimedOutWait("flag", 3, 0, 1, 4, 6, 9, 2, 5)
    outside = timed_out_wait(words(kind=1, step=-1, tile=-1, wanted=4))
    assert (outside.kind, outside.step, outside.tile) == ("grid barrier", None, None)


def test_what_an_error_says_of_a_flag() -> None:
    """A record of a flag, as the reader tells it."""
    plan = compiled().plan
    found = timeout_error(plan, words(kind=2, block=3, stage=1, step=4, tile=6, index=9, found=2, wanted=5))
    assert isinstance(found, KernelTimeoutError)
    assert (
        f"block 3 waited more than 5 ms (watchdog_ms) before its stage 1 ({plan.kernels[0].stages[1]}), step 4 of its "
        "loop, tile 6, for the flag of block 9 to be 5 or more, and found 2;"
    ) in str(found)
    assert timeout_error(plan, words()) is None
    assert "names no kernel" in str(timeout_error(plan, words(kind=1, kernel=7)))


@pytest.mark.parametrize("blocks", [1, 2, 5, 2**20])
def test_how_many_have_arrived_is_read_from_the_counter(blocks: int) -> None:
    for top in (0, 2**31):
        for others in {0, 1, blocks // 2, blocks - 1} - {blocks}:
            for first in (False, True):
                added = others + (2**31 - (blocks - 1) if first else 0)
                if others > blocks - 1 or (first and others == blocks - 1):
                    continue  # there are no so many, or nobody is missing
                wait = timed_out_wait(words(kind=1, found=top + added, wanted=blocks))
                assert wait.arrived == (others + first, first)
    assert timed_out_wait(words(kind=1, found=77, wanted=5)).arrived is None


# ---- what nvcc makes of it ----


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_a_poll_is_one_load_and_all_threads_leave_together(arch: str, tmp_path: Path) -> None:
    kernel = 'extern "C" __global__ void wait(unsigned* s, unsigned* r, int n) { '
    kernel += f"{WATCHED_FUNCTION}(s, n, r, 1000000, 0, 1, 2); }}"
    ptx = ptx_of(OVERDUE_TEXT + WATCHED_COUNTER.text + kernel, arch, tmp_path)
    words = "bar|atom|red|ld.acquire|ld.relaxed|fence|membar|nanosleep|exit".replace(".", r"\.")
    code = re.findall(rf"^\s+(?:@!?%p\d+ )?((?:{words})[\w.]*)", ptx, re.MULTILINE)
    arrival, poll = "atom.add.acq_rel.gpu.global.u32", "ld.acquire.gpu.global.u32"
    looks = [poll, "atom.cas.acq_rel.gpu.global.b32", "membar.sys"]
    assert sorted(code) == sorted(["bar.sync", arrival, poll, *looks, "bar.red.or.pred", "exit"])
    assert code[:2] == ["bar.sync", arrival] and ptx.count("%globaltimer") == 1
    # What is written is written past all caches of this multiprocessor.
    assert len(re.findall(r"st\.volatile\.(?:global\.)?u32", ptx)) == len(FIELDS)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_takes_it(arch: str) -> None:
    """And the limit takes no registers from the stages."""
    used = []
    for limit in (None, 5.0):
        image, resources = compile_cubin(compiled("V3", limit).plan.modules[0].text, arch)
        assert image.startswith(b"\x7fELF")
        used += [one.registers for one in resources.values()]
    assert used[1] <= used[0] + 8
