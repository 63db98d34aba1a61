"""The CPU device: CUDA text runs as on a GPU, and what is wrong in it shows."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from souffle.errors import CudaCompileError, DeviceError
from souffle.runtime.cpu_device import CpuModule, compile_text
from souffle.runtime.cpu_device.ptx_translation import translate_asm
from souffle.runtime.cpu_device.text_scan import blank_comments, dynamic_shared_names, find_kernels

ORDERS = (("fixed", 0), ("shuffled", 1), ("shuffled", 2))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpu_device")


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
    before, after = "int a; // asm(\"x\")\nchar* s = \"asm()\";\n", "\nint b;\n"
    text = before + 'asm volatile("bar.sync %0, 128;\\n"\n  :: "r"(id) : "memory");' + after
    out = translate_asm(text)
    assert out.startswith(before) and out.endswith(";" + after)
    assert out.count("\n") == text.count("\n")
    assert translate_asm(before + after) == before + after


def test_asm_within_a_macro_keeps_its_line_ends():
    text = '#define COPY(d, s) \\\n  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" \\\n : : "r"(d), "l"(s))\nint a;\n'
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

BASICS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(128) where(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned at = (block * blockDim.x * blockDim.y * blockDim.z + thread) * 2;
  out[at] = blockIdx.x | blockIdx.y << 8 | blockIdx.z << 16;
  out[at + 1] = threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16;
}
__device__ __noinline__ float reversed(float v) {
  __shared__ float row[64];
  row[threadIdx.x] = v;
  __syncthreads();
  float r = row[63 - threadIdx.x];
  __syncthreads();
  return r;
}
extern "C" __global__ void scalars(double* out, float* __restrict__ a, int i, float f, double d, unsigned char c,
                                   long long l, bool b, half h, const int j) {
  out[0] = i; out[1] = f; out[2] = d; out[3] = c; out[4] = l; out[5] = b; out[6] = __half2float(h); out[7] = j;
}
extern "C" __global__ void poison(unsigned* out) {
  __shared__ unsigned row[64];
  out[blockIdx.x * 64 + threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  row[threadIdx.x] = 7;
}
extern "C" __global__ void reverse(float* out, const float* in) {
  extern __shared__ __align__(16) unsigned char pool[];
  __shared__ alignas(64) float one[64];
  float* two = (float*)(pool + 256);
  int i = blockIdx.x * 64 + threadIdx.x;
  one[threadIdx.x] = in[i];
  two[threadIdx.x] = reversed(in[i]);
  __syncthreads();
  out[i] = one[63 - threadIdx.x] * 100.0f + two[63 - threadIdx.x];
}
extern "C" __global__ void fault(float* a, long long far) { if (threadIdx.x == 5 && blockIdx.x == 1) a[far] = 1.0f; }
extern "C" __global__ void divide(int* a) { a[0] = a[1] / a[2]; }
__device__ __noinline__ int deep(int n, volatile int* keep) {
  volatile int room[1024];
  room[n & 1023] = n;
  return n == 0 ? keep[0] : deep(n - 1, room) + room[n & 1023];
}
extern "C" __global__ void overflow(int* a) { a[0] = deep(a[0], a); }
extern "C" __global__ void forever(volatile int* a) { while (a[0] == 0) {} }
extern "C" __global__ void oops(int* a) { if (a[0]) __trap(); }
"""


@pytest.fixture(scope="session")
def basics(cache: Path) -> CpuModule:
    return compile_text(BASICS, cache_dir=cache)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_three_dimensional_blocks(basics: CpuModule, order: str, seed: int):
    grid, block = (3, 2, 2), (5, 4, 3)
    out = np.zeros((2, 2, 3, 3, 4, 5, 2), np.uint32)
    basics.launch("where", grid=grid, block=block, args=[out], order=order, seed=seed)
    z, y, x, c, b, a = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out[..., 0], x | y << 8 | z << 16)
    np.testing.assert_array_equal(out[..., 1], a | b << 8 | c << 16)


def test_scalars_are_converted_to_the_parameter_types(basics: CpuModule):
    assert basics.parameter_kinds("scalars") == "ppiffiiifi"
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
        basics.launch("overflow", grid=(1, 1, 1), block=(1, 1, 1), args=[np.array([1000], np.int32)])
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


BARRIERS = r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void stages(float* out, float* middle, const float* in, int n, int keep) {
  __shared__ float total;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) total = 0.0f;
  middle[i] = in[i] * 2.0f;
  float mine = in[i];
  if (keep) cg::this_grid().sync();
  float other = middle[(i + n / 2) % n];
  cg::thread_block block = cg::this_thread_block();
  block.sync();
  if (threadIdx.x == 0) total += 1.0f;
  if (keep) cg::this_grid().sync();
  out[i] = other + mine + total;
}
extern "C" __global__ void half_exits(int* a) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  a[threadIdx.x] = 1;
}
extern "C" __global__ void two_kinds(int* a) {
  if (threadIdx.x < 32) __syncthreads();
  else cg::this_grid().sync();
}
extern "C" __global__ void one_block_leaves(int* a) { if (blockIdx.x != 3) cg::this_grid().sync(); }
extern "C" __global__ void absent(int* a) { if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;"); }
extern "C" __global__ void counts(int* out) {
  out[threadIdx.x * 3] = __syncthreads_count(threadIdx.x < 5);
  out[threadIdx.x * 3 + 1] = __syncthreads_and(threadIdx.x < 5);
  out[threadIdx.x * 3 + 2] = __syncthreads_or(threadIdx.x < 5);
}
extern "C" __global__ void named(float* out, const float* in) {
  __shared__ float a[64], b[64];
  int half = threadIdx.x / 64, t = threadIdx.x % 64;
  float* mine = half ? b : a;
  for (int turn = 0; turn < 3 + half; ++turn) {
    mine[t] = in[threadIdx.x] + turn;
    asm volatile("bar.sync %0, %1;" :: "r"(1 + half), "r"(64) : "memory");
    out[threadIdx.x] = mine[63 - t];
    asm volatile("barrier.sync %0, 64;" :: "r"(1 + half));
  }
}
extern "C" __global__ void producer(float* out, const float* in) {
  __shared__ float box[32];
  if (threadIdx.x < 32) {
    box[threadIdx.x] = in[threadIdx.x];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x - 32] = box[63 - threadIdx.x];
  }
}
__device__ void counter_barrier(unsigned* counter, unsigned goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(1) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < goal);
  }
  __syncthreads();
}
extern "C" __global__ void software_barrier(float* out, float* middle, unsigned* counter, unsigned goal) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  middle[i] = float(i);
  counter_barrier(counter, goal);
  out[i] = middle[n - 1 - i];
}
extern "C" __global__ void with_lock(int* lock, int* data) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    int v = data[0];
    __threadfence();
    data[0] = v + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
"""


@pytest.fixture(scope="session")
def barriers(cache: Path) -> CpuModule:
    return compile_text(BARRIERS, cache_dir=cache)


def _stages(barriers: CpuModule, keep: int, **options) -> tuple[bool, int]:
    blocks, threads = 33, 64
    n = blocks * threads
    data = np.arange(n, dtype=np.float32)
    out, middle = np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
    report = barriers.launch(
        "stages", grid=(blocks, 1, 1), block=(threads, 1, 1), args=[out, middle, data, n, keep], cooperative=True, **options
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
            r"kernel half_exits, block \(0, 0, 0\): barrier under divergent control: 32 threads wait at __syncthreads "
            r"\(first: thread \(0, 0, 0\)\); 32 threads exited \(first: thread \(32, 0, 0\)\)",
        ),
        ("two_kinds", True, r"divergent control: 32 threads wait at __syncthreads .*; 32 threads wait at grid sync"),
        ("two_kinds", False, r"two_kinds.*grid sync in a launch that is not cooperative"),
        ("one_block_leaves", True, r"grid sync under divergent control.*block \(3, 0, 0\)"),
        ("absent", False, r"32 threads wait at bar\.sync 3 \(32 of 64 arrived\)"),
    ],
)
@pytest.mark.parametrize("order", ["fixed", "shuffled"])
def test_barriers_under_divergent_control(barriers: CpuModule, kernel: str, cooperative: bool, message: str, order: str):
    with pytest.raises(DeviceError, match=message):
        barriers.launch(
            kernel, grid=(4, 1, 1), block=(64, 1, 1), args=[np.zeros(64, np.int32)], cooperative=cooperative, order=order
        ) if order == "fixed" else barriers.launch(
            kernel, grid=(4, 1, 1), block=(64, 1, 1), args=[np.zeros(64, np.int32)], cooperative=cooperative, workers=1
        )


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

WARPS = r"""
#include <cuda_fp16.h>
#include <cooperative_groups.h>
template <class T> __device__ T total(T v) {
  unsigned mask = __activemask();
  for (int d = 16; d > 0; d /= 2) v = v + __shfl_down_sync(mask, v, d, 32);
  return __shfl_sync(mask, v, 0);
}
extern "C" __global__ void totals(float* f, double* d, int* i, unsigned* u, half* h, long long* l) {
  int t = threadIdx.x;
  f[t] = total(f[t]); d[t] = total(d[t]); i[t] = total(i[t]); u[t] = total(u[t]); h[t] = total(h[t]); l[t] = total(l[t]);
}
extern "C" __global__ void moves(int* out) {
  int t = threadIdx.x, n = blockDim.x;
  out[t] = __shfl_up_sync(0xffffffff, t, 3);
  out[n + t] = __shfl_down_sync(0xffffffff, t, 3, 8);
  out[2 * n + t] = __shfl_xor_sync(0xffffffff, t, 5);
  out[3 * n + t] = __shfl_sync(0xffffffff, t, 9, 8);
  auto tile = cooperative_groups::tiled_partition<16>(cooperative_groups::this_thread_block());
  out[4 * n + t] = tile.shfl(t, 2) * 100 + tile.thread_rank();
}
extern "C" __global__ void votes(unsigned* out) {
  int t = threadIdx.x;
  out[t] = __ballot_sync(0xffffffff, t % 3 == 0);
  out[32 + t] = __any_sync(0xffffffff, t == 40) | __all_sync(0xffffffff, t < 40) << 1;
  out[64 + t] = __reduce_add_sync(0xffffffff, (unsigned)t);
  out[96 + t] = __match_any_sync(0xffffffff, t % 5);
  unsigned mask = 0;
  if (t % 2) mask = __activemask();
  out[128 + t] = mask;
  if (t < 8) out[160 + t] = __shfl_xor_sync(0xff, t, 1);
  else out[160 + t] = __shfl_xor_sync(0xffffff00, t, 2);
}
extern "C" __global__ void exchange(int* out) {
  __shared__ int box[32];
  box[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = box[31 - threadIdx.x];
}
extern "C" __global__ void lost_lane(int* out) { if (threadIdx.x != 7) out[threadIdx.x] = __shfl_sync(~(1u << 9), 1, 0); else __syncthreads(); }
extern "C" __global__ void atomics(float* f, int* i, half* h, double* d, unsigned* u) {
  __shared__ int local;
  if (threadIdx.x == 0) local = 0;
  __syncthreads();
  atomicAdd(&local, 1);
  atomicAdd(f, 1.0f); atomicAdd(i, 2); atomicMax(i + 1, (int)threadIdx.x); atomicMin(i + 2, -(int)threadIdx.x);
  atomicAdd(h, __float2half(1.0f)); atomicAdd(d, 0.5); atomicOr(u, 1u << threadIdx.x % 32); atomicInc(u + 1, 9u);
  __syncthreads();
  if (threadIdx.x == 0) { atomicExch(i + 3, local); atomicSub(i + 4, 3); }
}
"""


@pytest.fixture(scope="session")
def warps(cache: Path) -> CpuModule:
    return compile_text(WARPS, cache_dir=cache)


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
    with pytest.raises(DeviceError, match="lane 9, which the mask leaves out|__shfl_sync with mask"):
        warps.launch("lost_lane", grid=(1, 1, 1), block=(32, 1, 1), args=[np.zeros(32, np.int32)])


@pytest.mark.parametrize("options", [{"workers": 2}, {"order": "shuffled", "seed": 1}])
def test_atomics(warps: CpuModule, options: dict):
    f, d, h = np.zeros(1, np.float32), np.zeros(1), np.zeros(1, np.float16)
    i, u = np.zeros(5, np.int32), np.zeros(2, np.uint32)
    warps.launch("atomics", grid=(3, 1, 1), block=(64, 1, 1), args=[f, i, h, d, u], **options)
    assert (f[0], d[0], h[0], i.tolist(), u.tolist()) == (192, 96, 192, [384, 63, -63, 64, -9], [0xFFFFFFFF, 192 % 10])


# ---- numbers -----------------------------------------------------------------------------------------------------

NUMBERS = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <math_constants.h>
template <class T> __device__ void four(T* out, T a, T b, int n) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  out[t] = a + b; out[n + t] = a * b; out[2 * n + t] = a / b; out[3 * n + t] = a - b;
}
extern "C" __global__ void halves(half* out, const half* a, const half* b, int n) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  four(out, a[t], b[t], n);
  half2 p = __hfma2(make_half2(a[t], b[t]), __half2half2(b[t]), __float2half2_rn(1.0f));
  out[4 * n + t] = p.x; out[5 * n + t] = hsqrt(__habs(a[t])); out[6 * n + t] = __hmax(a[t], b[t]);
}
extern "C" __global__ void bfloats(__nv_bfloat16* out, const __nv_bfloat16* a, const __nv_bfloat16* b, int n) {
  four(out, a[blockIdx.x * blockDim.x + threadIdx.x], b[blockIdx.x * blockDim.x + threadIdx.x], n);
}
extern "C" __global__ void convert(const float* in, half* h, __nv_bfloat16* b, float* back, const double* d, half* hd) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  h[t] = __float2half_rn(in[t]); b[t] = __float2bfloat16(in[t]); back[t] = __half2float(h[t]); hd[t] = __half(d[t]);
}
extern "C" __global__ void misc(float* f, int* i) {
  f[0] = rsqrtf(4.0f); f[1] = __expf(1.0f); f[2] = erff(0.5f); f[3] = CUDART_INF_F; f[4] = fmaxf(CUDART_NAN_F, 2.0f);
  f[5] = __int_as_float(0x40490fdb); f[6] = powf(2.0f, 0.5f); f[7] = tanhf(0.3f); f[8] = nearbyintf(2.5f);
  f[9] = max(1.0f, 3.0f); f[10] = (float)exp(1.0); f[11] = __fdividef(1.0f, 4.0f); f[12] = normcdff(0.0f);
  f[13] = erfinvf(0.5f); f[14] = __saturatef(-3.0f); f[15] = __uint2float_rn(4000000000u);
  i[0] = __float_as_int(1.0f); i[1] = __popc(0xF0F0u); i[2] = __clz(1); i[3] = __brev(1u) == 0x80000000u;
  i[4] = __float2int_rn(2.5f); i[5] = __float2int_rz(-2.7f); i[6] = __float2int_rn(1e20f); i[7] = isnan(CUDART_NAN_F);
  i[8] = __dp4a(0x01020304, 0x01010101, 5); i[9] = max(3, -2); i[10] = isinf(f[3]) != 0; i[11] = __umulhi(1u << 31, 4u);
  i[12] = __byte_perm(0x03020100, 0x07060504, 0x7531); i[13] = __half_as_ushort(__float2half(1.0f));
  i[14] = __ffs(8); i[15] = (int)min((long long)7, (long long)9);
  float4 v = make_float4(1, 2, 3, 4); longlong2 w = make_longlong2(5, 6); uchar4 c = make_uchar4(1, 2, 3, 255);
  i[16] = (int)(v.x + v.w) + (int)w.y + c.w; i[17] = sizeof(float4) + alignof(float4) + sizeof(double3) + alignof(half2);
  uint4 packed = make_uint4(0x3C003C00u, 0, 0, 0);
  i[18] = (int)__half2float(((half2*)(&packed.x))->y);
}
"""


@pytest.fixture(scope="session")
def numbers(cache: Path) -> CpuModule:
    return compile_text(NUMBERS, cache_dir=cache)


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
    expected = [a + b, a * b, a / b, a - b, (wide[0] * wide[1] + 1).astype(np.float16), np.sqrt(np.abs(a)), np.maximum(a, b)]
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

MATRICES = r"""
#include <mma.h>
using namespace nvcuda;
template <int m, int n, int k, class T, class A, class LA, class LB> __device__ void product(A* c, const T* a, const T* b) {
  wmma::fragment<wmma::matrix_a, m, n, k, T, LA> fa;
  wmma::fragment<wmma::matrix_b, m, n, k, T, LB> fb;
  wmma::fragment<wmma::accumulator, m, n, k, A> fc;
  wmma::fill_fragment(fc, A(1));
  wmma::load_matrix_sync(fa, a, sizeof(LA) && __is_same(LA, wmma::row_major) ? k : m);
  wmma::load_matrix_sync(fb, b, __is_same(LB, wmma::row_major) ? n : k);
  wmma::mma_sync(fc, fa, fb, fc);
  for (int i = 0; i < fc.num_elements; ++i) fc.x[i] = fc.x[i] * A(2);
  wmma::store_matrix_sync(c, fc, n, wmma::mem_row_major);
}
extern "C" __global__ void a16_rr(float* c, const half* a, const half* b) { product<16, 16, 16, half, float, wmma::row_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void a16_cc(half* c, const half* a, const half* b) { product<16, 16, 16, half, half, wmma::col_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void a8(float* c, const half* a, const half* b) { product<8, 32, 16, half, float, wmma::row_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void a32(float* c, const half* a, const half* b) { product<32, 8, 16, half, float, wmma::col_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void i8(int* c, const signed char* a, const signed char* b) { product<16, 16, 16, signed char, int, wmma::row_major, wmma::col_major>(c, a, b); }
extern "C" __global__ void bf(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b) { product<16, 16, 16, __nv_bfloat16, float, wmma::row_major, wmma::row_major>(c, a, b); }
extern "C" __global__ void half_warp(float* c, const half* a, const half* b) {
  if (threadIdx.x < 16) product<16, 16, 16, half, float, wmma::row_major, wmma::row_major>(c, a, b);
}
extern "C" __global__ void ptx(float* c, half* ch, const half* a, const half* b) {
  __shared__ alignas(16) half sa[16 * 16], sb[16 * 8];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) sa[i] = a[i];
  for (int i = t; i < 128; i += 32) sb[i] = b[i];
  __syncthreads();
  unsigned ra[4], rb[2];
  {
    unsigned int addr = __cvta_generic_to_shared(&sa[t % 16 * 16 + t / 16 * 8]);
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
      : "r"(addr)
    );
  }
  unsigned int addr;
  asm volatile ("{ .reg .u64 smem_int; cvta.to.shared.u64 smem_int, %1; cvt.u32.u64 %0, smem_int; }"
    : "=r"(addr) : "l"(&sb[t % 16 * 8]));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(addr));
  float d[4] = {1, 1, 1, 1};
  __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
  unsigned h[2] = {0, 0};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
      : "+r"(h[0]), "+r"(h[1]) : "r"(ra[0]), "r"(ra[1]), "r"(rb[0]));
  for (int i = 0; i < 4; ++i) {
    int at = (t / 4 + 8 * (i / 2)) * 8 + t % 4 * 2 + i % 2;
    c[at] = d[i];
    ch[at] = ((half*)h)[i];
  }
}
"""


@pytest.fixture(scope="session")
def matrices(cache: Path) -> CpuModule:
    return compile_text(MATRICES, cache_dir=cache)


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


COPIES = r"""
#include <cstdint>
#include <cuda_pipeline.h>
__forceinline__ __device__ void ptx_cp_async_legacy_cg_16_4_4(void* dst, int dst_off, void* src, int src_off) {
  uint8_t* dst_p = (uint8_t*)dst + dst_off * 4;
  uint8_t* src_p = (uint8_t*)src + src_off * 4;
  unsigned int dst_addr = __cvta_generic_to_shared(dst_p);
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
    :: "r"(dst_addr), "l"(src_p), "n"(16));
}
__forceinline__ __device__ void predicated(void* dst, void* src, int predicate) {
  unsigned int dst_addr = __cvta_generic_to_shared(dst);
  __asm__ __volatile__(
    "{\n"
    " .reg .pred p;\n"
    " setp.eq.u32 p, %3, 1;\n"
    " @p cp.async.ca.shared.global [%0], [%1], %2;\n"
    " @!p st.shared.u32 [%0], {%4};\n"
    "}\n"
    :: "r"(dst_addr), "l"(src), "n"(4), "r"(predicate), "r"(0)
  );
}
extern "C" __global__ void staged(float* out, float* in, int wait, int stages) {
  __shared__ alignas(16) float box[2][128];
  int t = threadIdx.x;
  for (int s = 0; s < 2; ++s) {
    ptx_cp_async_legacy_cg_16_4_4(box[s], t * 4, in, s * 128 + t * 4);
    asm volatile("cp.async.commit_group;" :  : );
  }
  for (int s = 0; s < stages; ++s) {
    if (wait && s + 1 < stages) asm volatile("cp.async.wait_group 1;" :  :  : "memory");
    else if (wait) asm volatile("cp.async.wait_group %0;" :: "n"(0) : "memory");
    __syncthreads();
    for (int e = 0; e < 4; ++e) out[s * 128 + t * 4 + e] = box[s % 2][127 - (t * 4 + e)];
    __syncthreads();
    if (s + 2 < stages) ptx_cp_async_legacy_cg_16_4_4(box[s % 2], t * 4, in, (s + 2) * 128 + t * 4);
    asm volatile("cp.async.commit_group;");
  }
}
extern "C" __global__ void guarded(float* out, float* in, int limit) {
  __shared__ alignas(16) float a[32], b[32], c[32];
  int t = threadIdx.x;
  predicated(a + t, in + t, t < limit);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"((unsigned)__cvta_generic_to_shared(b + t)), "l"(in + t), "r"(t < limit ? 4 : 0));
  __pipeline_memcpy_async(c + t, in + t, 4);
  asm volatile("cp.async.wait_all;");
  float v;
  asm volatile (
      "{.reg .pred p;\n"
      " setp.ne.b32 p, %2, 0;\n"
      " @!p mov.b32 %0, 0;\n"
      " @p ld.global.nc.f32 %0, [%1];}\n"
      : "=f"(v) : "l"((void*)(in + t)), "r"((int)(t < limit)));
  out[t] = a[t]; out[32 + t] = b[t]; out[64 + t] = c[t]; out[96 + t] = v;
}
extern "C" __global__ void assorted(unsigned* out, unsigned* memory, float x) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(memory));
  asm volatile("membar.gl;"); asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm("" : "+r"(out[0]) :: "memory");
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(out[1]));
  asm("add.s32 %0, %1, %2;" : "=r"(out[2]) : "r"(5), "r"(-7));
  asm("{ .reg .b32 lo, hi; mov.b64 {lo, hi}, %1; xor.b32 %0, lo, hi; }" : "=r"(out[3]) : "l"(0x0000000100000002ull));
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); out[4] = (unsigned)y;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(out[5]) : "l"(memory), "r"(3u) : "memory");
  asm volatile("st.release.gpu.global.u32 [%0 + 4], %1;" :: "l"(memory), "r"(9u) : "memory");
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(out[6]), "=r"(out[7]) : "l"(memory));
  asm("shr.s32 %0, %1, 31;" : "=r"(out[8]) : "r"(-5));
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(out[9]) : "f"(-3.7f));
  asm("selp.b32 %[d], %[a], 7, p;" : [d] "=r"(out[10]) : [a] "r"(1)) ;
}
""".replace('  asm("selp.b32 %[d], %[a], 7, p;" : [d] "=r"(out[10]) : [a] "r"(1)) ;\n', (
    '  asm("{ .reg .pred p; setp.lt.s32 p, %[a], 0; selp.b32 %[d], %[a], 7, p; }" : [d] "=r"(out[10]) : [a] "r"(1));\n'
))


@pytest.fixture(scope="session")
def copies(cache: Path) -> CpuModule:
    return compile_text(COPIES, cache_dir=cache)


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
