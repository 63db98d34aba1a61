"""The CPU device: CUDA text runs as on a GPU, and what is wrong in it shows."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import s_tir, te

from souffle.emulator import CpuModule, compile_text
from souffle.emulator.ptx_translation import translate_asm
from souffle.emulator.text_scan import blank_comments, dynamic_shared_names, find_kernels
from souffle.errors import CudaCompileError, DeviceError

ORDERS = (("fixed", 0), ("shuffled", 1), ("shuffled", 2))
_CUDA = Path(__file__).parent / "cuda"  # every file there is accepted by nvcc as it is


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpu_device")


def _compile(name: str, cache: Path) -> CpuModule:
    return compile_text((_CUDA / f"{name}.cu").read_text(encoding="utf-8"), cache_dir=cache)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def _to_bits(values: np.ndarray) -> np.ndarray:
    return (_bfloat16(values).view(np.uint32) >> 16).astype(np.uint16)


# ---- text --------------------------------------------------------------------------------------------------------


def test_kernels_are_found_once_and_not_in_comments_or_templates():
    text = """
    // __global__ void no(int);
    template <int n> __global__ void generic(float* a);
    extern "C" __global__ void __launch_bounds__(64) one(float* a);
    extern "C" __global__ void __launch_bounds__(64) one(float* a) { /* __global__ void never() */ }
    __global__ __launch_bounds__(LIMIT, 2) void two() { extern __shared__ __align__(64) unsigned char pool[]; }
    """
    code = blank_comments(text)
    assert [(k.name, k.launch_bounds) for k in find_kernels(code)] == [("one", 64), ("two", None)]
    assert dynamic_shared_names(code) == ("pool",)
    assert len(code) == len(text)


def test_only_asm_statements_change():
    before, after = 'int a; // asm("x")\nchar* s = "asm()";\n', "\nint b;\n"
    text = before + 'asm volatile("bar.sync %0, 128;\\n"\n  :: "r"(id) : "memory");' + after
    out = translate_asm(text)
    assert out.startswith(before) and out.endswith(";" + after)
    assert out.count("\n") == text.count("\n")
    assert translate_asm(before + after) == before + after


def test_asm_within_a_macro_keeps_its_line_ends():
    text = (
        '#define COPY(d, s) \\\n  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" \\\n'
        ' : : "r"(d), "l"(s))\nint a;\n'
    )
    lines = translate_asm(text).split("\n")
    assert len(lines) == len(text.split("\n"))
    assert all(line.endswith("\\") for line in lines[:2])
    assert "asm" not in "".join(lines)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0}, {%0}, {%0}, {%0};", "mma.sync.aligned.m8n8k4"),
        ("mov.u32 %0, %nosuchregister;", "nosuchregister"),
        ("AGAIN: bra AGAIN;", "AGAIN"),
    ],
)
def test_unknown_ptx_is_named_with_its_line(cache: Path, template: str, named: str):
    text = '\n__global__ void k(int x) {\n  asm volatile("' + template.replace("%n", "%%n") + '" : "+r"(x));\n}\n'
    with pytest.raises(CudaCompileError, match=r"line 3.*" + named):
        compile_text(text, cache_dir=cache)


def test_errors_of_the_compiler_carry_the_lines_of_the_text(cache: Path):
    with pytest.raises(CudaCompileError, match=r"kernels\.cu:3:.*undeclared_thing"):
        compile_text("\n__global__ void k(float* a) {\n  a[0] = undeclared_thing;\n}\n", cache_dir=cache)
    with pytest.raises(CudaCompileError, match="no __global__"):
        compile_text("int x;", cache_dir=cache)


# ---- geometry, arguments, shared memory --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def basics(cache: Path) -> CpuModule:
    return _compile("basics", cache)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_three_dimensional_blocks(basics: CpuModule, order: str, seed: int):
    grid, block = (3, 2, 2), (5, 4, 3)
    out = np.zeros((2, 2, 3, 3, 4, 5, 2), np.uint32)
    basics.launch("where", grid=grid, block=block, args=[out], order=order, seed=seed)
    z, y, x, c, b, a = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out[..., 0], x | y << 8 | z << 16)
    np.testing.assert_array_equal(out[..., 1], a | b << 8 | c << 16)


def test_scalars_are_converted_to_the_parameter_types(basics: CpuModule):
    out = np.zeros(8)
    args = [out, np.zeros(1, np.float32), -3, 0.1, 0.1, 300, -(2**40), True, 0.1, np.int64(9)]
    basics.launch("scalars", grid=(1, 1, 1), block=(1, 1, 1), args=args)
    expected = [-3, np.float32(0.1), 0.1, 300 % 256, -(2**40), 1, np.float16(0.1), 9]
    np.testing.assert_array_equal(out, np.array(expected, np.float64))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "1 parameters, 0 arguments"),
        ([np.zeros(4, np.float32), 1], "1 parameters, 2 arguments"),
        ([1.5], "pointer parameter"),
        ([np.zeros((4, 4), np.float32).T], "not C-contiguous"),
    ],
)
def test_wrong_arguments(basics: CpuModule, args: list, message: str):
    with pytest.raises(DeviceError, match=message):
        basics.launch("where", grid=(1, 1, 1), block=(1, 1, 1), args=args)


def test_invalid_launches(basics: CpuModule):
    out = np.zeros(4096, np.uint32)
    for kernel, grid, block, shared, message in (
        ("nothing", (1, 1, 1), (1, 1, 1), 0, "no kernel 'nothing'"),
        ("where", (1, 1, 1), (256, 1, 1), 0, "__launch_bounds__"),
        ("poison", (1, 1, 1), (1024, 2, 1), 0, "2048 threads"),
        ("poison", (0, 1, 1), (1, 1, 1), 0, "grid"),
        ("poison", (1, 1, 1), (1, 1, 1), 1 << 20, "dynamic shared memory"),
    ):
        with pytest.raises(DeviceError, match=message):
            basics.launch(kernel, grid=grid, block=block, args=[out], shared_bytes=shared)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_static_and_dynamic_shared_memory(basics: CpuModule, order: str, seed: int):
    data = np.arange(64 * 7, dtype=np.float32)
    out = np.zeros_like(data)
    report = basics.launch(
        "reverse", grid=(7, 1, 1), block=(64, 1, 1), args=[out, data], shared_bytes=512, order=order, seed=seed
    )
    rows = data.reshape(7, 64)
    np.testing.assert_array_equal(out, (rows[:, ::-1] * 100 + rows).ravel())
    assert (report.grid_syncs, report.block_barriers) == (0, 21)


def test_shared_memory_of_a_new_block_is_poisoned(basics: CpuModule):
    out = np.zeros(64 * 3, np.uint32)
    basics.launch("poison", grid=(3, 1, 1), block=(64, 1, 1), args=[out], workers=1)
    assert (out == 0xFFFFFFFF).all()


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_fault_names_kernel_block_thread_and_array(basics: CpuModule):
    a = np.zeros(1024, np.float32)
    with pytest.raises(DeviceError, match=r"kernel fault, block \(1, 0, 0\), thread \(5, 0, 0\): segmentation fault"):
        basics.launch("fault", grid=(2, 1, 1), block=(32, 1, 1), args=[a, 1 << 45])
    with pytest.raises(DeviceError, match="integer division by zero"):
        basics.launch("divide", grid=(1, 1, 1), block=(1, 1, 1), args=[np.zeros(3, np.int32)])
    with pytest.raises(DeviceError, match="stack overflow"):
        basics.launch("overflow", grid=(1, 1, 1), block=(1, 1, 1), args=[np.array([2000], np.int32)])
    with pytest.raises(DeviceError, match="trap"):
        basics.launch("oops", grid=(1, 1, 1), block=(1, 1, 1), args=[np.array([1], np.int32)])
    # And the device still works.
    basics.launch("fault", grid=(2, 1, 1), block=(32, 1, 1), args=[a, 1000])
    assert a[1000] == 1.0


def test_a_kernel_that_never_ends_is_stopped(basics: CpuModule):
    with pytest.raises(DeviceError, match=r"forever.*time limit"):
        basics.launch("forever", grid=(1, 1, 1), block=(32, 1, 1), args=[np.zeros(1, np.int32)], timeout_seconds=0.3)


def test_launches_from_several_threads(basics: CpuModule):
    results: list[np.ndarray] = []

    def one() -> None:
        data = np.arange(64 * 20, dtype=np.float32)
        out = np.zeros_like(data)
        basics.launch("reverse", grid=(20, 1, 1), block=(64, 1, 1), args=[out, data], shared_bytes=512)
        results.append(out)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all((r == results[0]).all() for r in results)


@pytest.fixture(scope="session")
def barriers(cache: Path) -> CpuModule:
    return _compile("barriers", cache)


def _stages(barriers: CpuModule, keep: int, **options) -> tuple[bool, int]:
    blocks, threads = 33, 64
    n = blocks * threads
    data = np.arange(n, dtype=np.float32)
    out, middle = np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
    report = barriers.launch(
        "stages",
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        args=[out, middle, data, n, keep],
        cooperative=True,
        **options,
    )
    expected = 2 * np.roll(data, -(n // 2)) + data + 1
    return bool((out == expected).all()), report.grid_syncs


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"order": "shuffled", "seed": 3}])
def test_grid_sync(barriers: CpuModule, options: dict):
    assert _stages(barriers, 1, **options) == (True, 2)
    assert _stages(barriers, 0, **options) == (False, 0)


def test_a_seed_repeats_a_run(barriers: CpuModule):
    def run(seed: int) -> np.ndarray:
        n = 8 * 64
        out, middle = np.full(n, -1, np.float32), np.full(n, -1, np.float32)
        args = [out, middle, np.zeros(n, np.float32), n, 0]
        options = {"cooperative": True, "order": "shuffled", "seed": seed}
        barriers.launch("stages", grid=(8, 1, 1), block=(64, 1, 1), args=args, **options)
        return out

    np.testing.assert_array_equal(run(5), run(5))
    assert any((run(5) != run(seed)).any() for seed in range(6, 10))


def test_a_large_cooperative_grid(barriers: CpuModule):
    n = 1056 * 128
    data = np.zeros(n, np.float32)
    out, middle = np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
    options = {"grid": (1056, 1, 1), "block": (128, 1, 1), "cooperative": True}
    assert barriers.launch("stages", args=[out, middle, data, n, 1], **options).grid_syncs == 2
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("kernel", "cooperative", "message"),
    [
        (
            "half_exits",
            False,
            r"kernel half_exits, block \(\d, 0, 0\): barrier under divergent control: 32 threads wait at __syncthreads "
            r"\(first: thread \(0, 0, 0\), half_exits line \d+\); 32 threads exited \(first: thread \(32, 0, 0\)\)",
        ),
        ("two_kinds", True, r"divergent control: 32 threads wait at __syncthreads .*; 32 threads wait at grid sync"),
        ("two_kinds", False, r"two_kinds.*grid sync in a launch that is not cooperative"),
        ("one_block_leaves", True, r"grid sync under divergent control.*block \(3, 0, 0\)"),
        ("absent", False, r"32 threads wait at bar\.sync 3 \(32 of 64 arrived\)"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_barriers_under_divergent_control(
    barriers: CpuModule, kernel: str, cooperative: bool, message: str, workers: int
):
    options = {"grid": (4, 1, 1), "block": (64, 1, 1), "cooperative": cooperative, "workers": workers}
    with pytest.raises(DeviceError, match=message):
        barriers.launch(kernel, args=[np.zeros(64, np.int32)], **options)


def test_counting_barriers(barriers: CpuModule):
    out = np.zeros((64, 3), np.int32)
    barriers.launch("counts", grid=(1, 1, 1), block=(64, 1, 1), args=[out])
    assert (out == [5, 0, 1]).all()


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_named_barriers(barriers: CpuModule, order: str, seed: int):
    data = np.arange(128, dtype=np.float32)
    out = np.zeros_like(data)
    barriers.launch("named", grid=(1, 1, 1), block=(128, 1, 1), args=[out, data], order=order, seed=seed)
    np.testing.assert_array_equal(out, np.concatenate([data[:64][::-1] + 2, data[64:][::-1] + 3]))
    barriers.launch("producer", grid=(1, 1, 1), block=(64, 1, 1), args=[out, data], order=order, seed=seed)
    np.testing.assert_array_equal(out[:32], data[:32][::-1])


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"order": "shuffled", "seed": 4}])
def test_barriers_and_locks_made_of_memory(barriers: CpuModule, options: dict):
    n = 12 * 64
    out, middle, counter = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(1, np.uint32)
    launch = {"grid": (12, 1, 1), "block": (64, 1, 1), "cooperative": True, **options}
    barriers.launch("software_barrier", args=[out, middle, counter, 12], **launch)
    np.testing.assert_array_equal(out, np.arange(n)[::-1])
    data = np.zeros(1, np.int32)
    barriers.launch("with_lock", args=[np.zeros(1, np.int32), data], **launch)
    assert data[0] == 12


def test_polling_for_what_nobody_writes_is_a_deadlock(barriers: CpuModule):
    n = 2 * 64
    args = [np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(1, np.uint32), 99]
    with pytest.raises(DeviceError, match=r"deadlock.*poll"):
        barriers.launch(
            "software_barrier", grid=(2, 1, 1), block=(64, 1, 1), args=args, cooperative=True, timeout_seconds=0.5
        )


# ---- warps -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def warps(cache: Path) -> CpuModule:
    return _compile("warps", cache)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_shuffles_of_every_type(warps: CpuModule, order: str, seed: int):
    types = (np.float32, np.float64, np.int32, np.uint32, np.float16, np.int64)
    arrays = [np.arange(96).astype(t) for t in types]
    warps.launch("totals", grid=(1, 1, 1), block=(96, 1, 1), args=arrays, order=order, seed=seed)
    for array in arrays:
        expected = np.arange(96).reshape(3, 32).sum(1).repeat(32)
        np.testing.assert_array_equal(array, expected.astype(array.dtype))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_moves_votes_and_syncwarp(warps: CpuModule, order: str, seed: int):
    options = {"grid": (1, 1, 1), "order": order, "seed": seed}
    t = np.arange(64)
    lane, base = t % 32, t - t % 32
    out = np.zeros((5, 64), np.int32)
    warps.launch("moves", block=(64, 1, 1), args=[out], **options)
    np.testing.assert_array_equal(out[0], np.where(lane < 3, t, t - 3))
    np.testing.assert_array_equal(out[1], np.where(t % 8 < 5, t + 3, t))
    np.testing.assert_array_equal(out[2], base + (lane ^ 5))
    np.testing.assert_array_equal(out[3], t - t % 8 + 1)
    np.testing.assert_array_equal(out[4], (t - t % 16 + 2) * 100 + t % 16)
    votes = np.zeros((6, 32), np.uint32)
    warps.launch("votes", block=(32, 1, 1), args=[votes], **options)
    one = np.arange(32)
    assert (votes[0] == sum(1 << i for i in range(0, 32, 3))).all()
    assert (votes[1] == 2).all() and (votes[2] == 496).all()
    np.testing.assert_array_equal(votes[3], [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)])
    np.testing.assert_array_equal(votes[4], np.where(one % 2, 0xAAAAAAAA, 0))
    np.testing.assert_array_equal(votes[5], np.where(one < 8, one ^ 1, one ^ 2))
    swapped = np.zeros(32, np.int32)
    warps.launch("exchange", block=(32, 1, 1), args=[swapped], **options)
    np.testing.assert_array_equal(swapped, one[::-1])


def test_a_shuffle_without_all_its_lanes(warps: CpuModule):
    with pytest.raises(DeviceError, match=r"lane 9, which the mask leaves out|__shfl_sync with mask"):
        warps.launch("lost_lane", grid=(1, 1, 1), block=(32, 1, 1), args=[np.zeros(32, np.int32)])


@pytest.mark.parametrize("options", [{"workers": 2}, {"order": "shuffled", "seed": 1}])
def test_atomics(warps: CpuModule, options: dict):
    f, d, h = np.zeros(1, np.float32), np.zeros(1), np.zeros(1, np.float16)
    i, u = np.zeros(5, np.int32), np.zeros(2, np.uint32)
    warps.launch("atomics", grid=(3, 1, 1), block=(64, 1, 1), args=[f, i, h, d, u], **options)
    assert (f[0], d[0], h[0], i.tolist(), u.tolist()) == (192, 96, 192, [384, 63, -63, 64, -9], [0xFFFFFFFF, 192 % 10])


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def numbers(cache: Path) -> CpuModule:
    return _compile("numbers", cache)


def test_half_conversion_rounds_to_nearest_even(numbers: CpuModule):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, np.uint32)
    edges = np.array([65519.9, 65520.0, 6e-8, 2.98e-8, 2.99e-8, 1 + 2**-11, 1 + 3 * 2**-11, np.inf, -0.0], np.float32)
    values = np.concatenate([bits.view(np.float32), rng.standard_normal(4087).astype(np.float32), edges])
    values = values[~np.isnan(values)][:8064]
    doubles = values.astype(np.float64) * (1 + 2**-40)
    n = len(values)
    h, b, back, hd = np.zeros(n, np.float16), np.zeros(n, np.uint16), np.zeros(n, np.float32), np.zeros(n, np.float16)
    numbers.launch("convert", grid=(n // 64, 1, 1), block=(64, 1, 1), args=[values, h, b, back, doubles, hd])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(h.view(np.uint16), values.astype(np.float16).view(np.uint16))
        np.testing.assert_array_equal(hd, doubles.astype(np.float16))
    np.testing.assert_array_equal(b, _to_bits(values))
    np.testing.assert_array_equal(back, h.astype(np.float32))


def test_half_and_bfloat16_arithmetic(numbers: CpuModule):
    rng = np.random.default_rng(1)
    n = 512
    a, b = (rng.standard_normal(n).astype(np.float16) for _ in range(2))
    out = np.zeros((7, n), np.float16)
    numbers.launch("halves", grid=(8, 1, 1), block=(64, 1, 1), args=[out, a, b, n])
    wide = a.astype(np.float64), b.astype(np.float64)
    expected = [
        a + b,
        a * b,
        a / b,
        a - b,
        (wide[0] * wide[1] + 1).astype(np.float16),
        np.sqrt(np.abs(a)),
        np.maximum(a, b),
    ]
    np.testing.assert_array_equal(out, expected)
    x, y = _bfloat16(a.astype(np.float32)), _bfloat16(b.astype(np.float32))
    result = np.zeros((4, n), np.uint16)
    numbers.launch("bfloats", grid=(8, 1, 1), block=(64, 1, 1), args=[result, _to_bits(x), _to_bits(y), n])
    np.testing.assert_array_equal(result, [_to_bits(v) for v in (x + y, x * y, x / y, x - y)])


def test_math_and_integer_functions(numbers: CpuModule):
    f, i = np.zeros(16, np.float32), np.zeros(19, np.int32)
    numbers.launch("misc", grid=(1, 1, 1), block=(1, 1, 1), args=[f, i])
    expected = [0.5, np.e, 0.5204999, np.inf, 2, np.pi, 2**0.5, np.tanh(0.3), 2, 3, np.e, 0.25, 0.5, 0.4769363, 0, 4e9]
    np.testing.assert_allclose(f, np.array(expected, np.float32), rtol=1e-6)
    integers = [0x3F800000, 8, 31, 1, 2, -2, 2**31 - 1, 1, 15, 3, 1, 2, 0x07050301, 0x3C00, 4, 7, 266, 60, 1]
    assert i.tolist() == integers


# ---- matrices and asynchronous copies ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def matrices(cache: Path) -> CpuModule:
    return _compile("matrices", cache)


@pytest.mark.parametrize(
    ("kernel", "shape", "layout", "type_", "out"),
    [
        ("a16_rr", (16, 16, 16), "rr", "float16", "float32"),
        ("a16_cc", (16, 16, 16), "cc", "float16", "float16"),
        ("a8", (8, 32, 16), "rc", "float16", "float32"),
        ("a32", (32, 8, 16), "cr", "float16", "float32"),
        ("i8", (16, 16, 16), "rc", "int8", "int32"),
        ("bf", (16, 16, 16), "rr", "bfloat16", "float32"),
    ],
)
def test_wmma(matrices: CpuModule, kernel: str, shape: tuple[int, int, int], layout: str, type_: str, out: str):
    m, n, k = shape
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-8, 8, s).astype(np.float64) for s in ((m, k), (k, n)))
    stored = [np.ascontiguousarray(v if order == "r" else v.T) for v, order in zip((a, b), layout)]
    stored = [_to_bits(v) if type_ == "bfloat16" else v.astype(type_) for v in stored]
    c = np.zeros((m, n), out)
    for order, seed in ORDERS:
        c[:] = 0
        matrices.launch(kernel, grid=(1, 1, 1), block=(32, 1, 1), args=[c, *stored], order=order, seed=seed)
        np.testing.assert_array_equal(c, (a @ b + 1) * 2)


def test_wmma_by_half_a_warp(matrices: CpuModule):
    args = [np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float16)]
    with pytest.raises(DeviceError, match="all 32 lanes"):
        matrices.launch("half_warp", grid=(1, 1, 1), block=(32, 1, 1), args=args)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_ldmatrix_and_mma(matrices: CpuModule, order: str, seed: int):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-8, 8, (16, 16)).astype(np.float16), rng.integers(-8, 8, (16, 8)).astype(np.float16)
    c, ch = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float16)
    matrices.launch("ptx", grid=(1, 1, 1), block=(32, 1, 1), args=[c, ch, a, b], order=order, seed=seed)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32) + 1)
    np.testing.assert_array_equal(ch, a[:, :8].astype(np.float32) @ b[:8].astype(np.float32))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_words_are_rounded_to_tf32_and_multiplied(matrices: CpuModule, order: str, seed: int):
    """To 11 bits, of two as near the one further from zero; what is no number stays what it is."""
    near = np.array(
        [1, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 1 + 0.9 * 2.0**-11, 3e38, 2.0**-130, 0], np.float32
    )
    exact = np.array([1, 1 + 2.0**-10, 1 + 2.0**-9, -1 - 2.0**-10, 1, 3e38, 2.0**-130, 0])
    a, b = np.tile(near, (16, 1)), np.eye(8, dtype=np.float32)
    a[3, 2], a[5, 4], a[7, 1] = np.nan, np.inf, 3.4028e38
    c, rounded = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    matrices.launch("tf32", grid=(1, 1, 1), block=(32, 1, 1), args=[c, rounded, a, b], order=order, seed=seed)
    plain = [0, 1, 2, 4, *range(8, 16)]
    np.testing.assert_allclose(rounded[plain], np.tile(exact, (12, 1)), rtol=2.0**-11)
    np.testing.assert_array_equal(rounded[plain][:, :5], np.tile(exact[:5], (12, 1)))
    assert not (rounded[plain].view(np.uint32) & 0x1FFF).any()
    assert np.isnan(rounded[3, 2]) and np.isinf(rounded[5, 4]) and np.isinf(rounded[7, 1])
    # With ones on the diagonal a product is what was rounded.
    np.testing.assert_array_equal(c[plain], rounded[plain])


@pytest.fixture(scope="session")
def copies(cache: Path) -> CpuModule:
    return _compile("copies", cache)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_asynchronous_copies_arrive_at_the_wait(copies: CpuModule, order: str, seed: int):
    stages = 5
    data = np.arange(stages * 128, dtype=np.float32)
    for wait in (1, 0):
        out = np.zeros_like(data)
        options = {"grid": (1, 1, 1), "block": (32, 1, 1), "order": order, "seed": seed}
        copies.launch("staged", args=[out, data, wait, stages], **options)
        same = (out.reshape(stages, 128) == data.reshape(stages, 128)[:, ::-1]).all()
        assert same == bool(wait)


def test_guarded_copies_and_loads(copies: CpuModule):
    data = np.arange(1, 33, dtype=np.float32)
    out = np.zeros((4, 32), np.float32)
    copies.launch("guarded", grid=(1, 1, 1), block=(32, 1, 1), args=[out, data, 20])
    cut = np.where(np.arange(32) < 20, data, 0)
    np.testing.assert_array_equal(out, [cut, cut, data, cut])


def test_assorted_ptx(copies: CpuModule):
    out, memory = np.zeros(11, np.uint32), np.array([40, 0], np.uint32)
    copies.launch("assorted", grid=(1, 1, 1), block=(1, 1, 1), args=[out, memory, 3.0])
    assert out.view(np.int32).tolist() == [0, 0, -2, 3, 8, 40, 43, 9, -1, -3, 7]


# ---- text that TVM emits -----------------------------------------------------------------------------------------

_TARGET = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


def _emit(module: tvm.IRModule) -> str:
    built = tvm.compile(module, target=tvm.target.Target(_TARGET, host="llvm"))
    return getattr(built, "mod", built).imports[0].inspect_source()


@pytest.mark.parametrize("kind", ["float32", "float16", "float64"])
def test_a_reduction_of_tvm_over_threads(cache: Path, kind: str):
    a = te.placeholder((16, 600), kind, name="a")
    k = te.reduce_axis((0, 600))
    c = te.compute((16,), lambda i: te.max(a[i, k], axis=k), name="c")
    schedule = s_tir.Schedule(te.create_prim_func([a, c]))
    row, column = schedule.get_loops(schedule.get_sblock("c"))
    _, lane = schedule.split(column, [None, 96])
    schedule.bind(row, "blockIdx.x")
    schedule.bind(lane, "threadIdx.x")
    text = _emit(schedule.mod)
    assert "__shfl_down_sync" in text
    x = np.random.default_rng(5).standard_normal((16, 600)).astype(kind)
    module = compile_text(text, cache_dir=cache)
    for order, seed in ORDERS:
        result = np.zeros(16, kind)
        module.launch("main_kernel", grid=(16, 1, 1), block=(96, 1, 1), args=[x, result], order=order, seed=seed)
        np.testing.assert_array_equal(result, x.max(1))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_elementwise_functions_of_tvm(cache: Path, kind: str):
    a = te.placeholder((1024,), kind, name="a")
    one = tvm.tirx.const(1, kind)
    c = te.compute(
        (1024,), lambda i: te.tanh(a[i]) * te.sqrt(te.abs(a[i]) + one) + te.max(a[i], one) + te.exp(a[i]), name="c"
    )
    schedule = s_tir.Schedule(te.create_prim_func([a, c]))
    (loop,) = schedule.get_loops(schedule.get_sblock("c"))
    block, lane, vector = schedule.split(loop, [None, 64, 4])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(lane, "threadIdx.x")
    schedule.vectorize(vector)
    values = _bfloat16(np.random.default_rng(6).standard_normal(1024).astype(np.float32))
    x = _to_bits(values) if kind == "bfloat16" else values.astype(kind)
    result = np.zeros_like(x)
    module = compile_text(_emit(schedule.mod), cache_dir=cache)
    module.launch("main_kernel", grid=(4, 1, 1), block=(64, 1, 1), args=[x, result])
    got = (result.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else result
    v = (values if kind == "bfloat16" else x).astype(np.float64)
    expected = np.tanh(v) * np.sqrt(np.abs(v) + 1) + np.maximum(v, 1) + np.exp(v)
    tolerance = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[kind]
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
