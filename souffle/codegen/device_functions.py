"""CUDA texts of the device functions that lowered stages call by name; only those that a text calls are put into it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from souffle.codegen.extrema import EXTREMA_TEXTS
from souffle.codegen.stage_calls import OWN_FUNCTION, OWN_TEXT, TURNS_FUNCTION
from souffle.kernel.block_flags import FLAG_FUNCTIONS, FLAGS_TEXT, WATCHED_WAIT_FUNCTION, WATCHED_WAIT_TEXT
from souffle.kernel.grid_barrier import ARRIVAL_FUNCTION, GRID_BARRIERS, HALVES_TEXT, WATCHED_COUNTER
from souffle.kernel.merge import (
    CHOICE_FUNCTION,
    KEPT_FUNCTION,
    OFFSET_FUNCTION,
    PREFETCH_FUNCTION,
    WINDOW_FUNCTION,
)
from souffle.kernel.watchdog import OVERDUE_TEXT
from souffle.schedule.gpu.emit.async_copy import COMMIT_FUNCTION, COPY_FUNCTION, COPY_OR_ZERO_FUNCTION, WAIT_FUNCTION
from souffle.schedule.gpu.emit.mma_instructions import (
    BEGIN_TF32_PRODUCT_FUNCTION,
    BYTE_PRODUCT_FUNCTION,
    BYTE_TYPES,
    DOT_FUNCTION,
    LOAD_FUNCTION,
    LOAD_TRANSPOSED_FUNCTION,
    LOAD_WORD_MATRICES_FUNCTION,
    LOAD_WORDS_FUNCTION,
    PRODUCT_FUNCTION,
    PUT_FUNCTION,
    ROUND_FUNCTION,
    SCALE_FUNCTION,
    SPLIT_FUNCTION,
    TAKE_FUNCTION,
    TF32_PRODUCT_FUNCTION,
)
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.schedule.lower.teams import TEAM_BARRIER_FUNCTION

__all__ = ["with_device_functions"]

# From sm_90 on, one request of a block takes the place of one for each of its lines, which a multiprocessor passes one
# a clock: of 768 threads that is 0.4 µs at each barrier. As bytes are a number in the text, so is a block's part of
# them, in 128 parts; a request is for whole 16 bytes, and what is left over is not worth another.
_PREFETCH_TEXT = f"""
static __device__ __forceinline__ int {PREFETCH_FUNCTION}(const void* data, int64_t bytes, int block, int tid,
                                                           int num_blocks) {{
#if __CUDA_ARCH__ >= 900
  if (tid != 0) return 0;
  unsigned all = bytes < 0x40000000 ? bytes : 0x40000000, each = (((all + 127) >> 7) + 127) & ~127u;
#pragma unroll 1
  for (unsigned at = block * each; at + 16 <= all; at += num_blocks * each) {{
    unsigned left = (all - at) & ~15u;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 : : "l"(((size_t)data & ~(size_t)15) + at), "r"(left < each ? left : each));
  }}
#else
  int64_t step = (int64_t)num_blocks * blockDim.x * 128;
  for (int64_t at = ((int64_t)block * blockDim.x + tid) * 128; at < bytes; at += step) {{
    asm volatile("prefetch.global.L2 [%0];" : : "l"((const char*)data + at));
  }}
#endif
  return 0;
}}
"""

_STEP_TEXT = f"""
template <typename T> static __device__ __forceinline__ T* {OFFSET_FUNCTION}(T* data, int64_t elements) {{
  return data + elements;
}}
template <typename T> static __device__ __forceinline__ T* {CHOICE_FUNCTION}(bool condition, T* one, T* other) {{
  return condition ? one : other;
}}
"""

_WINDOW_TEXT = f"""
template <typename T> static __device__ __forceinline__ T* {WINDOW_FUNCTION}(T* data, int start, int turns, int bytes,
                                                                             int turn, int tile) {{
  extern __shared__ __align__(64) unsigned char souffle_windows[];
  int64_t part = (int64_t)(size_t)souffle_windows + start + ((int64_t)turn - tile) * bytes;
  return turn < turns ? (T*)(size_t)part : data;
}}
"""

_KEPT_TEXT = f"""
static __device__ __forceinline__ void* {KEPT_FUNCTION}(int start) {{
  extern __shared__ __align__(64) unsigned char souffle_windows[];
  return souffle_windows + start;
}}
"""

_NAMED_BARRIER_TEXT = f"""
template <int barrier, int threads> static __device__ __forceinline__ int {BARRIER_FUNCTION}() {{
  asm volatile("bar.sync %0, %1;" : : "n"(barrier), "n"(threads) : "memory");
  return 0;
}}
"""

_TEAM_TEXT = f"""
template <int first, int threads> static __device__ __forceinline__ int {TEAM_BARRIER_FUNCTION}(int team) {{
  asm volatile("bar.sync %0, %1;" : : "r"(first + team), "n"(threads) : "memory");
  return 0;
}}
"""

_COPY_TEXT = f"""
template <int bytes> static __device__ __forceinline__ int {COPY_FUNCTION}(void* shared, const void* global) {{
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (bytes == 16) {{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
  }} else {{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(global), "n"(bytes) : "memory");
  }}
  return 0;
}}
template <int bytes>
static __device__ __forceinline__ int {COPY_OR_ZERO_FUNCTION}(void* shared, const void* global, int whether) {{
  unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  int size = whether ? bytes : 0;
  if constexpr (bytes == 16) {{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(global), "r"(size) : "memory");
  }} else {{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 : : "r"(to), "l"(global), "n"(bytes), "r"(size) : "memory");
  }}
  return 0;
}}
static __device__ __forceinline__ int {COMMIT_FUNCTION}() {{
  asm volatile("cp.async.commit_group;" : : : "memory");
  return 0;
}}
template <int groups> static __device__ __forceinline__ int {WAIT_FUNCTION}() {{
  asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory");
  return 0;
}}
"""

_MMA_TEXT = f"""
static __device__ __forceinline__ int {LOAD_FUNCTION}(unsigned* part, const void* shared) {{
  unsigned from = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(from));
  return 0;
}}
static __device__ __forceinline__ int {LOAD_TRANSPOSED_FUNCTION}(unsigned* part, const void* shared) {{
  unsigned from = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(from));
  return 0;
}}
static __device__ __forceinline__ int {PRODUCT_FUNCTION}(float* total, const unsigned* left, const unsigned* right) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
      "{{%0, %1, %2, %3}};"
      : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  return 0;
}}
"""


def _totals_text(kind: str) -> str:
    """Totals of a fragment put into shared memory and taken from it, of ``float`` or ``int``."""
    return f"""
static __device__ __forceinline__ int {PUT_FUNCTION}(void* shared, const {kind}* total) {{
  *({kind}2*)shared = make_{kind}2(total[0], total[1]);
  return 0;
}}
template <int lanes, int planes>
static __device__ __forceinline__ int {TAKE_FUNCTION}({kind}* result, const void* shared, int plane) {{
#pragma unroll
  for (int p = 0; p < planes; ++p) {{
    const {kind}* from = (const {kind}*)shared + p * plane;
#pragma unroll
    for (int lane = 0; lane < lanes; lane += lanes % 4 ? lanes : 4) {{
      {kind} some[4];
      if constexpr (lanes % 4 == 0) {{
        *({kind}4*)some = *(const {kind}4*)(from + lane);
      }} else if constexpr (lanes == 2) {{
        *({kind}2*)some = *(const {kind}2*)from;
      }} else {{
        some[0] = from[0];
      }}
#pragma unroll
      for (int i = 0; i < (lanes % 4 ? lanes : 4); ++i) result[lane + i] = p ? result[lane + i] + some[i] : some[i];
    }}
  }}
  return 0;
}}
"""


def _words_text(kind: str, register: str) -> str:
    """Words of ``float`` or ``int`` brought from shared memory to fragments, by PTX's letter for their register."""
    parts = ", ".join(f'"={register}"(part[{number}])' for number in range(4))
    return f"""
static __device__ __forceinline__ int {LOAD_WORD_MATRICES_FUNCTION}({kind}* part, const void* shared) {{
  unsigned from = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : {parts} : "r"(from));
  return 0;
}}
static __device__ __forceinline__ int {LOAD_WORDS_FUNCTION}({kind}* part, const {kind}* shared, int distance) {{
  part[0] = shared[0];
  part[1] = shared[distance];
  return 0;
}}
"""


# A difference of an infinity and itself is NaN: see souffle.program.products.
_TF32_TEXT = f"""{_words_text("float", "f")}static __device__ __forceinline__ float souffle_tf32(float value) {{
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}}
static __device__ __forceinline__ int {ROUND_FUNCTION}(float* part) {{
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = souffle_tf32(part[i]);
  return 0;
}}
static __device__ __forceinline__ int {SPLIT_FUNCTION}(float* part, float* rest) {{
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    float rounded = souffle_tf32(part[i]);
    rest[i] = souffle_tf32(part[i] - rounded);
    part[i] = rounded;
  }}
  return 0;
}}
static __device__ __forceinline__ int {TF32_PRODUCT_FUNCTION}(float* total, const float* left, const float* right) {{
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
      "{{%0, %1, %2, %3}};"
      : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
      : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),
        "r"(__float_as_uint(left[3])), "r"(__float_as_uint(right[0])), "r"(__float_as_uint(right[1])));
  return 0;
}}
static __device__ __forceinline__ int {BEGIN_TF32_PRODUCT_FUNCTION}(float* total, const float* left,
                                                                    const float* right) {{
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
      "{{%10, %10, %10, %10}};"
      : "=f"(total[0]), "=f"(total[1]), "=f"(total[2]), "=f"(total[3])
      : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),
        "r"(__float_as_uint(left[3])), "r"(__float_as_uint(right[0])), "r"(__float_as_uint(right[1])), "f"(0.0f));
  return 0;
}}
"""


def _byte_texts(left: str, right: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Products of words of 8-bit integers of two types of PTX: of fragments, and of two words."""
    product, dot = BYTE_PRODUCT_FUNCTION.format(left, right), DOT_FUNCTION.format(left, right)
    yield (
        (product,),
        f"""
static __device__ __forceinline__ int {product}(int* total, const int* left, const int* right) {{
  asm("mma.sync.aligned.m16n8k32.row.col.s32.{left}.{right}.s32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
      "{{%0, %1, %2, %3}};"
      : "+r"(total[0]), "+r"(total[1]), "+r"(total[2]), "+r"(total[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  return 0;
}}
""",
    )
    wide = {"s8": "s32", "u8": "u32"}
    yield (
        (dot,),
        f"""
static __device__ __forceinline__ int {dot}(int left, int right, int total) {{
  asm("dp4a.{wide[left]}.{wide[right]} %0, %1, %2, %0;" : "+r"(total) : "r"(left), "r"(right));
  return total;
}}
""",
    )


_BYTE_PAIRS = tuple(itertools.product(BYTE_TYPES.values(), repeat=2))

_SCALE_TEXT = f"""
static __device__ __forceinline__ int {SCALE_FUNCTION}(unsigned* part, const half* factors) {{
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    __half2 elements;
    memcpy(&elements, part + i, 4);
    elements = __hfma2(elements, __half2half2(factors[i % 2 * 2]), __half2half2(factors[i % 2 * 2 + 1]));
    memcpy(part + i, &elements, 4);
  }}
  return 0;
}}
"""

_TEXTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((OWN_FUNCTION, TURNS_FUNCTION), OWN_TEXT),
    ((PREFETCH_FUNCTION,), _PREFETCH_TEXT),
    ((OFFSET_FUNCTION, CHOICE_FUNCTION), _STEP_TEXT),
    ((WINDOW_FUNCTION,), _WINDOW_TEXT),
    ((KEPT_FUNCTION,), _KEPT_TEXT),
    ((BARRIER_FUNCTION,), _NAMED_BARRIER_TEXT),
    ((TEAM_BARRIER_FUNCTION,), _TEAM_TEXT),
    ((COPY_FUNCTION, COMMIT_FUNCTION, WAIT_FUNCTION), _COPY_TEXT),
    ((LOAD_FUNCTION, LOAD_TRANSPOSED_FUNCTION, PRODUCT_FUNCTION), _MMA_TEXT),
    ((TF32_PRODUCT_FUNCTION, BEGIN_TF32_PRODUCT_FUNCTION), _TF32_TEXT),
    ((PUT_FUNCTION, TAKE_FUNCTION), _totals_text("float")),
    ((SCALE_FUNCTION,), _SCALE_TEXT),
    (tuple(BYTE_PRODUCT_FUNCTION.format(*pair) for pair in _BYTE_PAIRS), _words_text("int", "r") + _totals_text("int")),
    *(text for pair in _BYTE_PAIRS for text in _byte_texts(*pair)),
    *EXTREMA_TEXTS,
    (FLAG_FUNCTIONS, FLAGS_TEXT),
    *(((barrier.function,), barrier.text) for barrier in GRID_BARRIERS.values() if barrier.function),
    ((ARRIVAL_FUNCTION,), HALVES_TEXT),
    ((WATCHED_COUNTER.function, WATCHED_WAIT_FUNCTION), OVERDUE_TEXT),
    ((WATCHED_COUNTER.function,), WATCHED_COUNTER.text),
    ((WATCHED_WAIT_FUNCTION,), WATCHED_WAIT_TEXT),
)


def with_device_functions(text: str) -> str:
    """A CUDA text with the functions that it calls, before its first function."""
    used = [own.lstrip() for names, own in _TEXTS if any(name in text for name in names)]
    if not used:
        return text
    first = re.search(r"^static __device__|^template", text, re.MULTILINE)
    at = first.start() if first else 0
    return text[:at] + "".join(used) + text[at:]
