"""Flags in place of grid barriers: tiles wait for what they need, on every grid, proven, each error found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import te

import souffle
from benchmarks.recurrent import recurrent
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.codegen.assemble import CompiledKernels
from souffle.errors import KernelTimeoutError
from souffle.kernel.block_flags import flag_words
from souffle.kernel.tile_bands import band_around
from souffle.kernel.tile_waits import Crossing, WaitPrices, crossed_sites, place_flags
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.runtime.cpu_runner import CpuRunner
from souffle.verify import PROVEN, REFUTED, UNKNOWN, certify_plan
from souffle.verify.certify import functions_of
from souffle.verify.saved import verify_plan
from tests.testlib import ORDERS, Builder, inputs_for, random_program, run_on_cpu_device
from tests.thorough import sized, some

pytestmark = pytest.mark.sampled(2)


def compiled(program: TEProgram, waits: str = "flags", **options: object) -> CompiledKernels:
    given = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", **options}
    return compile_cuda(program, waits=waits, **given)


def rows_apart(groups: int = 6, size: int = 64) -> TEProgram:
    """Products of each group's rows alone: a tile needs the tiles of its group, of all columns."""
    b = Builder()
    x = b.input(groups, 40, size)
    for number in range(3):
        w = b.constant(np.random.default_rng(number).integers(-2, 3, (groups, size, size)).astype(np.float32))
        x = b.map(lambda v: te.round(v * 0.125), b.add(_products, x, w, name="products"))
    return b.program(x)


def _products(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[2]), "k")
    shape = (x.shape[0], x.shape[1], w.shape[2])
    return te.compute(shape, lambda g, i, j: te.sum(x[g, i, k] * w[g, k, j], k))


def same_on_all_grids(net: CompiledKernels, inputs: dict, expected: dict) -> None:
    for options in ({}, *ORDERS):
        found = run_on_cpu_device(net.plan, inputs, **options)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=str(options))


def test_tiles_wait_for_those_of_their_rows() -> None:
    program = rows_apart()
    net = compiled(program)
    (kernel,) = net.plan.kernels
    assert kernel.grid_syncs == 0 and kernel.cooperative
    assert kernel.flag_waits and all(0 < blocks < kernel.tiles for _, blocks, _ in kernel.flag_waits)
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    inputs = inputs_for(program)
    same_on_all_grids(net, inputs, evaluate(program, inputs))


@pytest.mark.parametrize(
    "model",
    some([recurrent("LSTM both ways", 24, 40, steps=5)], [recurrent("LSTM", 48, 48, 48, steps=7)]),
    ids=some(["both ways"], ["LSTM"]),
)
def test_steps_of_a_loop_wait_for_tiles(model) -> None:
    net = compiled(souffle.import_onnx(model))
    assert sum(kernel.arrivals for kernel in net.plan.kernels) >= 3, net.plan.kernels
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    found = run_on_cpu_device(net.plan, inputs)
    assert compare(found, onnxruntime_outputs(model, inputs), "fp32").ok
    same_on_all_grids(net, inputs, found)


@pytest.mark.parametrize("seed", range(5))
def test_random_programs(seed: int) -> None:
    """Checked runs know which accesses releases and acquires order, and nothing of bands or of isl."""
    draw = random.Random(seed)
    program = random_program(draw.choice, 9, seed)
    net = compiled(program, verify="memory", precision="fp32", disable=["reuse", "resident"])
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    inputs = inputs_for(program)
    same_on_all_grids(net, inputs, run_on_cpu_device(net.plan, inputs))


def test_a_saved_network_is_proven_again(tmp_path) -> None:
    net = souffle.compile(rows_apart(3), level="V4", device="cpu", target="cuda", cubin=False, waits="flags")
    net.save(tmp_path / "net.souffle")
    loaded = souffle.load(tmp_path / "net.souffle", device="cpu")
    assert loaded.plan.options.waits == "flags" and loaded.plan.kernels == net.plan.kernels
    assert verify_plan(loaded.plan).verdict == PROVEN


def test_levels_below_have_barriers_unless_asked() -> None:
    program = rows_apart(2)
    assert compiled(program, "auto", level="V3").plan.kernels[0].arrivals == 0
    assert compiled(program, level="V3").plan.kernels[0].arrivals > 0


def test_flags_go_on_from_launch_to_launch_and_begin_anew_in_time() -> None:
    """One network object: on grids that change, and at the number where flags are set back."""
    program = rows_apart(4, 64)
    net = compiled(program, verify="off")
    runner, inputs = CpuRunner(net.plan), list(inputs_for(program).values())
    (expected,) = runner.run(inputs)
    index, state = next((n, buffer) for n, buffer in enumerate(net.plan.buffers) if buffer.kind == "state")
    assert state.shape == (flag_words(net.plan.kernels[0].tiles),)
    flags = runner._idle[0].kept[index]
    before = int(flags[64])
    assert before == net.plan.kernels[0].arrivals
    # As after many launches, the last of which had one block.
    flags[64] = flags[96] = 0x40000000 - before
    for seed in range(4):
        (found,) = runner.reordered(seed=seed, blocks=(1, 5, 2, 40)[seed]).run(inputs)
        np.testing.assert_array_equal(found, expected)
        assert int(flags[64]) == before * seed
    assert flags[96:].max() == 3 * before


# Where flags are placed


def _crossing(later: str, sites: tuple, known: bool = True, width: int = 2) -> Crossing:
    first = np.arange(8) // width * width
    return Crossing("earlier", later, sites, (first, first + width - 1) if known else None, 8)


def _prices(saved: float = 0.1) -> WaitPrices:
    def barrier(blocks: int) -> float:
        return 1.0 + saved * blocks / 100

    return WaitPrices(100, barrier, lambda others, blocks: barrier(min(others, blocks)), 0.5, lambda stage: 1)


def test_a_dependence_that_nobody_knows_keeps_one_barrier() -> None:
    crossings = [_crossing("a", ((1, 0), (2, 0)), known=False), _crossing("b", ((2, 0),))]
    always = place_flags({1: 1, 2: 1}, crossings, _prices(), always=True)
    assert always.sites == {1} and not always.waits
    assert place_flags({1: 1, 2: 1}, crossings[1:], _prices(), always=True).sites == {1, 2}


def test_flags_are_where_they_take_less() -> None:
    one, two = _crossing("a", ((1, 0),)), _crossing("b", ((1, 0),))
    assert place_flags({1: 1}, [one], _prices(), always=False).sites == {1}
    assert not place_flags({1: 1}, [one], _prices(0.0), always=False).sites
    # A second stage looks at flags, which takes longer than the one barrier for both.
    assert not place_flags({1: 1}, [one, two], _prices(), always=False).sites
    assert place_flags({1: 1}, [one, two], _prices(0.6), always=False).sites == {1}


def test_sites_between_steps() -> None:
    assert crossed_sites(0, 0, 1, 0, between=True) == ((0, 0),)
    assert crossed_sites(1, 0, 1, 2, between=True) == ((2, 1), (0, 0))
    assert crossed_sites(2, 1, 2, 2, between=False) == ((1, 1), (2, 1), (1, 0))


@pytest.mark.parametrize("seed", range(40))
def test_a_band_holds_what_is_needed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        count, slots = (int(n) for n in rng.integers(1, 60, 2))
        first = rng.integers(0, slots, count)
        if seed % 2:
            first = np.minimum(np.arange(count) // max(1, count // 7) * int(rng.integers(1, 9)), slots - 1)
        last = np.minimum(first + rng.integers(-1, 6, count), slots - 1)
        band = band_around(first, last, slots)
        needs = first <= last
        assert (band is None) == (not needs.any())
        if band is not None:
            low, high = band.ends(np.arange(count))
            assert (low >= 0).all() and (high < slots).all() and (high - low < band.width).all()
            assert (low[needs] <= first[needs]).all() and (last[needs] <= high[needs]).all()


def test_bands_of_equal_rows_are_exact() -> None:
    slot = np.arange(288)
    band = band_around(slot // 24 * 8, slot // 24 * 8 + 7, 96)
    assert band.width == 8 and str(band) == "the tiles n / 24 * 8 to n / 24 * 8 + 7"


# Errors


@pytest.mark.parametrize("watchdog_ms", some([20.0], [None]))
def test_each_change_that_matters_is_refuted(watchdog_ms: float | None) -> None:
    """Some of each kind, and most of what can be done; all networks and runs are in ``benchmarks.waits_and_residence``.

    A wait in vain takes the CPU device ten seconds where it has no limit: there only what is not refuted is run.
    """
    program = rows_apart(3, 40)
    net = compiled(program, watchdog_ms=watchdog_ms)
    mutations = Mutations(net)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        # No run shows that flags are left wrongly: what is said of them is asked without a limit.
        kinds = ("arrival", "flag wait", *(() if watchdog_ms else ("flags left",)))
        chosen = mutations.sample(sized(7, 16), seed=3, kinds=kinds)
        found = [trials.run(mutation, refuted=watchdog_ms is not None) for mutation in chosen]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert sum(trial.verdict == REFUTED for trial in found) >= sized(4, 9)
    assert watchdog_ms is None or sum(trial.changed for trial in found) >= sized(2, 5)


def test_flags_of_another_text_are_not_taken_for_granted() -> None:
    net = compiled(rows_apart(4, 64))
    kernels = {merged.name: merged.func for merged in net.merged}
    for old, new in (
        ("st.release.gpu", "st.relaxed.gpu"),
        ("ld.acquire.gpu", "ld.relaxed.gpu"),
        ("found < tick", "found < tick - 1"),
        ("(first + other) % num_blocks", "(first + other + 1) % num_blocks"),
    ):
        module = net.plan.modules[0]
        assert old in module.text
        weak = souffle.codegen.plan.CudaModule(module.text.replace(old, new), module.cubin)
        plan = net.plan.__class__(**{**vars(net.plan), "modules": (weak,)})
        assert certify_plan(plan, kernels, functions_of(net)).verdict == UNKNOWN, new


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 3}], ids=["in order", "shuffled"])
def test_a_wait_for_what_never_comes_ends_and_says_where(options: dict[str, object]) -> None:
    """Nobody arrives: the error names the stage, the slot, and the flag with what it says and what is waited for."""
    net = compiled(rows_apart(4, 64), watchdog_ms=20.0)
    mutations = Mutations(net)
    chosen = next(m for m in mutations if m.kind == "arrival" and m.action == "delete")
    plan = mutations.mutant(chosen).emitted()
    with pytest.raises(KernelTimeoutError) as caught:
        run_on_cpu_device(plan, inputs_for(rows_apart(4, 64)), **options)
    wait = caught.value.wait
    assert (wait.kind, wait.step, wait.found, wait.wanted) == ("flag", 0, 0, 1)
    said = f"({net.plan.kernels[0].stages[0]}), step 0 of its loop, tile {wait.tile}, for the flag of block "
    assert f"{said}{wait.index}" in str(caught.value)


def test_a_limit_changes_nothing_of_what_is_computed_and_proven() -> None:
    program = rows_apart(4, 64)
    plain, net = compiled(program), compiled(program, watchdog_ms=0.001)
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    inputs = inputs_for(program)
    same_on_all_grids(net, inputs, run_on_cpu_device(plain.plan, inputs))
