"""Threads that leave a kernel before a barrier: which returns are refused, and which are the same for a whole block."""

from __future__ import annotations

import pytest

from souffle.hfuse.reach import Reach
from souffle.hfuse.returns import early_return
from souffle.hfuse.source import Source

WAIT = "__syncthreads();"


def refused(body: str, before: str = "") -> bool:
    text = f"struct P {{ int q; }};\n{before}\n__global__ void k(const float* x, int n, P p) {{\n{body}\n}}\n"
    source = Source("k.cu", text)
    early = early_return(Reach(source, source.kernel()))
    return early is not None


UNIFORM = [
    ("if (blockIdx.x > n) return;\n__syncthreads();", ""),
    ("if (blockIdx.x > n && p.q == 3) { return; }\n__syncthreads();", ""),
    ("__syncthreads();if (threadIdx.x > n) return;", ""),
    ("const int m = n * 3; if (m > 3) return;__syncthreads();", ""),
    ("if (threadIdx.x > n) return; R r; r.reduce();", "struct R { __device__ void reduce() { __syncwarp(); } };"),
    (
        "LOOP(i, n) { x[i]; } if (n > 3) return; __syncthreads();",
        "#define LOOP(i, n) for (int i = threadIdx.x; i < n; ++i)",
    ),
    ("if (n > M) return; __syncthreads();", "#define M (3*4)"),
    ("auto f = [&](int a) { if (a > threadIdx.x) return 1; return 2; }; f(1);__syncthreads();", ""),
    ("if (n > C) return; __syncthreads();", "constexpr int C = 4;"),
    ("if (p.q > 3) return; S s;", "struct S { __device__ S() { __syncthreads(); } };"),
    ("if (n > 3) return; if (x[0]) goto e; p.q = 1; e: __syncthreads();", ""),
    ("if constexpr (3 > 2) { if (n > 3) return; } __syncthreads();", ""),
    ("const bool far = blockIdx.x >= gridDim.x - 1 || !(n & 1); if (far) return; __syncthreads();", ""),
    ("if (static_cast<unsigned>(n) > blockDim.x * 2u ? true : false) return; __syncthreads();", ""),
    ("__syncthreads(); for (int i = 0; i < n; ++i) { if (x[i]) return; }", ""),
    (
        "if (f(threadIdx.x)) x[0]; __syncthreads();",
        "__device__ bool f(int a) { if (a > 3) return true; return false; }",
    ),
]

DIVERGENT = [
    ("if (threadIdx.x > n) return;\n__syncthreads();", ""),
    ("for (int i = 0; i < n; ++i) {__syncthreads(); if (threadIdx.x > n) return; }", ""),
    ("n = threadIdx.x; if (n > 3) return;__syncthreads();", ""),
    ("f(n); if (n > 3) return;__syncthreads();", "__device__ void f(int& q) {q=threadIdx.x;}"),
    ("int m = n * 3; if (m > 3) return;__syncthreads();", ""),
    ("RET(n); __syncthreads();", "#define RET(n) if (threadIdx.x > n) return"),
    ("if (threadIdx.x > n) return; bar();", "__device__ void bar() { __syncthreads(); }"),
    ("if (threadIdx.x > n) return; SYNC", "#define SYNC __syncthreads();"),
    ("if (threadIdx.x > n) return; R r; r.reduce();", "struct R { __device__ void reduce() { __syncthreads(); } };"),
    ("LOOP(i, n) { if (n > 3) return; }__syncthreads();", "#define LOOP(i, n) for (int i = threadIdx.x; i < n; ++i)"),
    ("INC(n); if (n > 3) return; __syncthreads();", "#define INC(n) n += threadIdx.x"),
    ("if (x[0] > 3) return; __syncthreads();", ""),
    ("if (n > M) return; __syncthreads();", "#define M (3*threadIdx.x)"),
    ("switch (n) { case 1: if (threadIdx.x) break; return; } __syncthreads();", ""),
    ("top: if (n > 3) return; __syncthreads(); if (x[0]) goto top;", ""),
    ("if (n > threadIdx.x) { if (n > 3) return; }__syncthreads();", ""),
    ("int& m = n; m = threadIdx.x; if (n > 3) return;__syncthreads();", ""),
    ("{ int n = threadIdx.x; if (n > 3) return; }__syncthreads();", ""),
    ("if (x[0]) goto e; if (p.q > 3) return; n = 1; e: __syncthreads();", ""),
    ("if (x[0] > 3) return; S s;", "struct S { __device__ S() { __syncthreads(); } };"),
    (
        "if (x[0]) goto e; __syncthreads(); e: if (x[1]) return; goto q; q: s.meet();",
        "struct S { __device__ void meet() { __syncthreads(); } };",
    ),
    ("while (n > 3) { if (n > 4) return; __syncthreads(); }", ""),
    ("if (x[0] > 1) { __syncthreads(); } else return; __syncthreads();", ""),
    ("swap(n, p.q); if (n > 3) return; __syncthreads();", ""),
    ('asm("mov.u32 %0, 1;" : "=r"(n)); if (n > 3) return; __syncthreads();', ""),
    ("int* q = &n; *q = threadIdx.x; if (n > 3) return; __syncthreads();", ""),
    ("p.q = threadIdx.x; if (p.q) return; __syncthreads();", ""),
    ("if (n > f()) return; __syncthreads();", "__device__ int f() { return threadIdx.x; }"),
    (
        "EACH(i, n) { x[0]; } __syncthreads();",
        "#define EACH(i, n) if (threadIdx.x > n) return; for (int i = 0; i < n; ++i)",
    ),
    (
        "if (threadIdx.x > 3) return; EACH(i, n) { x[0]; }",
        "#define EACH(i, n) for (int i = 0; __syncthreads(), i < n; ++i)",
    ),
    (
        "EACH(i, n) { x[0]; } if (n > 3) return; __syncthreads();",
        "#define EACH(i, n) for (int i = n = threadIdx.x; i < 9; ++i)",
    ),
    (
        "if (a + b) return; S a, b; a + b; ",
        "struct S {}; __device__ int operator+(S a, S b) { __syncthreads(); return 1; }",
    ),
]


@pytest.mark.parametrize(("body", "before"), UNIFORM)
def test_what_is_allowed(body: str, before: str) -> None:
    assert not refused(body, before)


@pytest.mark.parametrize(("body", "before"), DIVERGENT)
def test_what_is_refused(body: str, before: str) -> None:
    assert refused(body, before)
