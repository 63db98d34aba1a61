"""Counting machine instructions in a cubin, where no disassembler is at hand.

NVIDIA documents no encoding. What is used here, for sm_80 to sm_90: an instruction has 16 bytes, its low 12 bits say
what it does, and the fields below say of which kind. :func:`self_test` compiles kernels of one known inline instruction
each and checks that each is found, once and as what it is, before anything is counted.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

from souffle.codegen.machine_code import sections
from souffle.codegen.nvcc import compile_cubin

__all__ = ["KINDS", "Code", "count_instructions", "loops_of", "self_test"]

_INSTRUCTION_BYTES = 16

_OPCODES = {
    0x23C: "HMMA",
    0x83B: "LDSM",
    0xFAE: "LDGSTS",
    0x381: "LDG",
    0x981: "LDG",
    0x386: "STG",
    0x986: "STG",
    0x387: "STL",
    0x983: "LDL",
    0xB1D: "BAR",
}

KINDS = (
    "HMMA.16816",
    "HMMA",
    "LDSM",
    "LDGSTS.BYPASS.128",
    "LDGSTS",
    "LDG.128",
    "LDG",
    "STG.128",
    "STG",
    "LDL",
    "STL",
    "BAR",
)
"""What is counted; a name without a suffix is what is left of its kind."""

_SIZE_SHIFT, _SIZE_MASK, _SIZE_128 = 9, 7, 6
"""In the upper 8 bytes, of loads and stores: 4, 5 and 6 stand for 32, 64 and 128 bits."""

_NO_BYPASS = 1 << 17
"""In the upper 8 bytes of LDGSTS: through the L1 cache."""

_K16 = 1 << 11
"""In the upper 8 bytes of HMMA: sixteen products, not eight."""


def _kind(low: int, high: int) -> str | None:
    name = _OPCODES.get(low & 0xFFF)
    wide = high >> _SIZE_SHIFT & _SIZE_MASK == _SIZE_128
    if name == "HMMA" and high & _K16:
        return "HMMA.16816"
    if name == "LDGSTS" and wide and not high & _NO_BYPASS:
        return "LDGSTS.BYPASS.128"
    return f"{name}.128" if name in ("LDG", "STG") and wide else name


def count_instructions(image: bytes) -> dict[str, Counter[str]]:
    """By kernel, how often each of :data:`KINDS` stands in its code.

    Parameters
    ----------
    image : bytes
        A cubin.
    """
    found = {}
    for name, code in sections(image):
        if name.startswith(".text."):
            words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code), _INSTRUCTION_BYTES)]
            found[name.removeprefix(".text.")] = Counter(kind for kind in (_kind(*w) for w in words) if kind)
    return found


_BRANCH, _DIVERGE, _MEET, _IDLE = 0x947, 0x945, 0x941, 0x918
"""BRA, BSSY, BSYNC, NOP."""


@dataclass(frozen=True)
class Code:
    """A kernel or a loop of it, without its inner loops.

    Attributes
    ----------
    depth : int
        0 for a kernel.
    instructions : int
        That stand in it.
    guarded : int
        Those of them that threads may jump over, to where they meet again (from BSSY to BSYNC).
    kinds : Counter of str
        How many are of each of :data:`KINDS`.
    """

    depth: int
    instructions: int
    guarded: int
    kinds: Counter[str]


def loops_of(image: bytes, arch: str) -> dict[str, tuple[Code, ...]]:
    """By kernel, its code and that of its loops, which end in a jump back, in the order of their beginnings."""
    found = {}
    for name, code in sections(image):
        if not name.startswith(".text."):
            continue
        words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code), _INSTRUCTION_BYTES)]
        operations = [low & 0xFFF for low, _ in words]
        jumps = [(at + 1 + _target(*words[at], arch), at) for at, one in enumerate(operations) if one == _BRANCH]
        # Behind the last EXIT stands a jump to itself.
        ranges = [(0, len(words) - 1), *sorted((to, at) for to, at in jumps if to < at)]
        rows = []
        for first, last in ranges:
            inner = [one for one in ranges if one != (first, last) and first <= one[0] and one[1] <= last]
            own = [at for at in range(first, last + 1) if not any(a <= at <= b for a, b in inner)]
            own = [at for at in own if operations[at] != _IDLE]
            guarded = sum(_is_guarded(operations, at) for at in own)
            depth = sum(a <= first and last <= b for a, b in ranges) - 1
            kinds = Counter(kind for kind in (_kind(*words[at]) for at in own) if kind)
            rows.append(Code(depth, len(own), guarded, kinds))
        found[name.removeprefix(".text.")] = tuple(rows)
    return found


def _target(low: int, high: int, arch: str) -> int:
    """By how many instructions a BRA goes on from the next one: a count of words of 4 bytes, on sm_90 in two fields."""
    words = low >> 34 | (high & 0x3FFFF) << 30
    words -= words >> 47 << 48
    return (words if arch == "sm_80" else words * 256 + (low >> 16 & 0xFF)) * 4 // _INSTRUCTION_BYTES


def _is_guarded(operations: list[int], at: int) -> bool:
    before = operations[:at]
    return before.count(_DIVERGE) > before.count(_MEET)


_COPY = (
    'extern "C" __global__ void {name}(const float* g, float* o) {{ extern __shared__ float s[]; '
    "unsigned a = (unsigned)__cvta_generic_to_shared(s + threadIdx.x * 4); "
    'asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size};" : : '
    '"r"(a), "l"(g + threadIdx.x * 4) : "memory"); '
    'asm volatile("cp.async.wait_all;" : : : "memory"); __syncthreads(); o[threadIdx.x] = s[threadIdx.x ^ 5]; }}\n'
)

_REST = """
extern "C" __global__ void product16(const uint4* g, float4* o) {
  float4 d = make_float4(0, 0, 0, 0); uint4 a = g[threadIdx.x], b = g[threadIdx.x + 32];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  o[threadIdx.x] = d;
}
extern "C" __global__ void product8(const uint4* g, float4* o) {
  float4 d = make_float4(0, 0, 0, 0); uint4 a = g[threadIdx.x];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w) : "r"(a.x), "r"(a.y), "r"(a.z));
  o[threadIdx.x] = d;
}
extern "C" __global__ void matrices(const float* g, unsigned* o) {
  __shared__ float s[512]; s[threadIdx.x] = g[threadIdx.x]; __syncthreads();
  unsigned a[4], p = (unsigned)__cvta_generic_to_shared(s + threadIdx.x % 32 * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(p));
  o[threadIdx.x] = a[0] ^ a[1] ^ a[2] ^ a[3];
}
extern "C" __global__ void local(const int* g, int* o, int from, int to) {
  volatile int a[8]; a[to] = g[threadIdx.x]; o[threadIdx.x] = a[from];
}
"""

_LOOPS = """
extern "C" __global__ void nested(const int* g, int* o, int n, int m) {
  int x = g[threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    asm volatile("prmt.b32 %0, %0, %0, 0x3210;" : "+r"(x));
#pragma unroll 1
    for (int j = 0; j < m; ++j) {
      TEN
    }
  }
  o[threadIdx.x] = x;
}
""".replace("TEN", 'asm volatile("lop3.b32 %0, %0, %0, %1, 0x96;" : "+r"(x) : "r"(m));\n' * 10)

_EXPECTED = {
    "copy_cg_16": {"LDGSTS.BYPASS.128": 1, "BAR": 1, "STG": 1},
    "copy_ca_16": {"LDGSTS": 1, "BAR": 1, "STG": 1},
    "copy_ca_8": {"LDGSTS": 1, "BAR": 1, "STG": 1},
    "product16": {"HMMA.16816": 1, "LDG.128": 2, "STG.128": 1},
    "product8": {"HMMA": 1, "LDG.128": 1, "STG.128": 1},
    "matrices": {"LDSM": 1, "LDG": 1, "BAR": 1, "STG": 1},
    "local": {"LDL": 1, "STL": 1, "LDG": 1, "STG": 1},
}


def self_test(arch: str) -> str | None:
    """What is not as expected in kernels whose instructions are known, or ``None``.

    Raises
    ------
    CompilerNotFoundError
        If there is no nvcc.
    """
    copies = (("cg", 16), ("ca", 16), ("ca", 8))
    text = "".join(_COPY.format(name=f"copy_{cache}_{size}", cache=cache, size=size) for cache, size in copies) + _REST
    found = count_instructions(compile_cubin(text, arch)[0])
    nested = loops_of(compile_cubin(_LOOPS, arch)[0], arch)["nested"]
    depths = [one.depth for one in nested]
    # Ten operations, a counter, a comparison and the jump.
    if depths != [0, 1, 2] or not 12 <= nested[2].instructions <= 14 or nested[1].instructions > 10:
        return f"{arch}, kernel nested: expected two loops, the inner of some 13 instructions, found {nested}"
    if [sum(one.kinds.values()) for one in nested] != [2, 0, 0]:
        return f"{arch}, kernel nested: expected a load and a store outside of its loops, found {nested}"
    for name, expected in _EXPECTED.items():
        # Two words of b are enough for a product, so a load may be shorter than it is written.
        own = dict(found[name])
        if name == "product16":
            own["LDG.128"] = own.get("LDG.128", 0) + own.pop("LDG", 0)
        if own != expected:
            return f"{arch}, kernel {name}: expected {expected}, found {own}"
    return None
