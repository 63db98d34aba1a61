"""What cannot be fused is refused, with its line, what stands there and what would help."""

from __future__ import annotations

import re

import pytest

from souffle.hfuse import Bound, FusionError, Launch, Part, Source, even_split, fuse, source
from tests.hfuse.pairs import HEAD, OUT, launch_of, pair

BODY = f"{HEAD}\n  {OUT}1;\n}}\n"

REFUSED = [
    ("#include <cooperative_groups.h>\n" + BODY, 1, "cooperative groups"),
    ("#include <stdint.h>\n#include <cub/cub.cuh>\n" + BODY, 2, "the header cub/cub.cuh is not one that is known"),
    ('#include "mine.cuh"\n' + BODY, 1, "put what the kernel needs of it into the file"),
    (f"{HEAD}\n  auto g = cooperative_groups::this_thread_block();\n}}", 2, "cooperative_groups cannot be given"),
    (f"{HEAD}\n  __barrier_sync(1);\n}}", 2, "__barrier_sync cannot be given to one part of a block"),
    (f"{HEAD}\n  {OUT}clusterDim.x;\n}}", 2, "clusterDim cannot be given"),
    (f"{HEAD}\n  {OUT}__clusterRelativeBlockIdx().x;\n}}", 2, "clusters are of the fused kernel's blocks"),
    (f"__global__ void __cluster_dims__(2, 1, 1) {HEAD[16:]}\n}}", 1, "a kernel of clusters"),
    (f'{HEAD}\n  asm volatile("bar.sync 1, 64;");\n}}', 2, r"inline PTX with 'bar\.'; named barriers are those"),
    (f'{HEAD}\n  __asm__ __volatile__("barrier.cta.sync 0;");\n}}', 2, r"inline PTX with 'barrier\.'"),
    (f'#define PTX(s) asm volatile(s)\n{HEAD}\n  PTX("bar.arrive 0, 64;");\n}}', 3, r"inline PTX with 'bar\.'"),
    (f'#define WAIT asm volatile("bar.sync 0;")\n{HEAD}\n  WAIT;\n}}', 1, r"inline PTX with 'bar\.'"),
    (f'{HEAD}\n  int t;\n  asm("mov.u32 %0, %%tid.x;" : "=r"(t));\n}}', 3, "use threadIdx, blockDim, blockIdx or"),
    (f'{HEAD}\n  int t;\n  asm("mov.u32 %0, %%nctaid.x;" : "=r"(t));\n}}', 3, "inline PTX with '%%nctaid'"),
    (f'{HEAD}\n  int t;\n  asm("mov.u32 %0, %%warpid;" : "=r"(t));\n}}', 3, "use threadIdx / 32"),
    (f'{HEAD}\n  int t;\n  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(t));\n}}', 3, "pass the size as an argument"),
    (f'{HEAD}\n  if (n > 5) asm volatile("exit;");\n}}', 2, "use return"),
    (f'{HEAD}\n  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");\n}}', 2, "the register bound is the fused"),
    (f'{HEAD}\n  asm volatile("wgmma.fence.sync.aligned;");\n}}', 2, "launch this kernel alone"),
    (f'{HEAD}\n  asm volatile("griddepcontrol.wait;");\n}}', 2, "programmatic dependent launch"),
    (f"{HEAD}\n  {OUT}1;\n  other<<<1, 32>>>();\n}}\n__global__ void other() {{}}", 3, "a kernel that launches"),
    (f"{HEAD}\n  void* q = &&end;\n  goto *q;\nend:;\n}}", 3, "a computed goto; use a switch"),
    (f"{HEAD}\n  int a = ) 3;\n}}", 2, "the grammar cannot read this"),
    (f"__device__ int f() {{\n  return 1 1;\n}}\n{HEAD}\n  {OUT}f();\n}}", 2, "the grammar cannot read this"),
    (f"template <typename... T>\n{BODY}", 1, "a kernel of any number of parameters"),
    (f"{HEAD}\n  int hfuse_a = 1;\n}}", 2, "the name hfuse_a begins as those that fusion adds"),
    (f"namespace std {{ struct q {{}}; }}\n{BODY}", 1, "the namespace std is extended"),
    (f"#define CAT(a, b) a##b\n{HEAD}\n  {OUT}CAT(thread, Idx).x;\n}}", 1, "may paste thread and Idx to threadIdx"),
    (f"#define POOL extern __shared__ int s[]\n{HEAD}\n  POOL;\n}}", 1, "a dynamic shared array that a macro declares"),
    (f"{HEAD}\n  if (threadIdx.x > n) return;\n  __syncthreads();\n}}", 2, r"before the barrier at a\.cu:3 \(`__sync"),
    (f"#define LEAVE return\n{HEAD}\n  if (n > 3) LEAVE;\n  __syncthreads();\n}}", 3, r"before the barrier at a\.cu:4"),
    (
        f"__device__ void wait() {{ __syncthreads(); }}\n{HEAD}\n  if (x[n]) return;\n  wait();\n}}",
        3,
        r"before the barrier at a\.cu:4 \(`wait\(\);`\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_by_line(text: str, line: int, message: str) -> None:
    with pytest.raises(FusionError, match=message) as caught:
        Part.of(Source("a.cu", text), None if "other" not in text else "k")
    assert str(caught.value).startswith(f"a.cu:{line}: `{text.splitlines()[line - 1].strip()}`: ")


REFUSED_IN_A_GRID = [
    (
        f"struct Z {{\n  __device__ int f(int a) {{ return a + gridDim.x; }}\n}};\n{HEAD}\n  Z z; {OUT}z.f(2);\n}}",
        2,
        "the member f uses gridDim",
    ),
    (
        f"struct Z {{}};\n__device__ int operator+(Z a, int b) {{ return gridDim.x; }}\n{HEAD}\n  {OUT}(Z() + 2);\n}}",
        3,
        "an operator or constructor uses gridDim",
    ),
    (
        f"__device__ int f(int a) {{ return a + gridDim.x; }}\n{HEAD}\n  int (*g)(int) = f;\n  {OUT}g(2);\n}}",
        3,
        "used here other than by a call of its name",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), REFUSED_IN_A_GRID, ids=["member", "operator", "pointer"])
def test_a_grid_that_cannot_be_handed_on(text: str, line: int, message: str) -> None:
    parts = pair(text)
    with pytest.raises(FusionError, match=message) as caught:
        fuse(parts, (64, 64))
    assert str(caught.value).startswith(f"a.cu:{line}: ")


def test_other_functions_of_the_file_may_do_it() -> None:
    text = (
        f'{BODY}__global__ void other() {{ asm volatile("bar.sync 1, 64;"); }}\n'
        "__device__ int unused() { return clusterDim.x; }\n"
        "int main() { k<<<1, 2>>>(0, 0, 0); }\n"
    )
    with pytest.raises(FusionError, match="inline PTX"):
        Part.of(Source("a.cu", text), "other")
    fused = fuse(pair(text, kernel="k"), (64, 64))
    assert not re.search(r"bar\.sync 1, 64|clusterDim|main", fused.text.partition("hfuse_2")[0])


def test_which_kernel() -> None:
    with pytest.raises(FusionError, match=r"a\.cu: no kernel with a body in the file; its kernels are: none"):
        Part.of(Source("a.cu", "__global__ void k(int* y);"))
    two = Source("a.cu", f"{BODY}{BODY.replace(' k(', ' other(')}")
    with pytest.raises(FusionError, match=r"at a\.cu:1, a\.cu:4 \(k, other\); name one as FILE\.cu:KERNEL"):
        Part.of(two)
    with pytest.raises(FusionError, match="no kernel 'third' with a body in the file; its kernels are: k, other"):
        Part.of(two, "third")
    with pytest.raises(FusionError, match="rename all but one"):
        Part.of(Source("a.cu", BODY + BODY.replace("int n", "long n")), "k")


def test_threads_and_blocks() -> None:
    parts = pair(BODY)
    for splits, message in (
        ((64, 100), r"b\.cu:3: kernel k: 100 threads are not whole warps"),
        ((0, 64), "0 threads are not whole warps"),
        ((768, 512), "768 \\+ 512 threads are 1280, and a block has at most 1024"),
        ((64,), "1 numbers of threads were given for 2 kernels"),
    ):
        with pytest.raises(FusionError, match=message):
            fuse(parts, splits)
    with pytest.raises(FusionError, match="1 kernels: two to 15 can be fused"):
        fuse(parts[:1], (64,))
    with pytest.raises(FusionError, match="16 kernels"):
        fuse(parts * 8, (32,) * 16)
    with pytest.raises(FusionError, match="space 'warp' is none of thread, block, sequence"):
        fuse(parts, (64, 64), space="warp")
    with pytest.raises(FusionError, match="96 registers of 1024 threads are more than the 65536"):
        fuse(parts, (512, 512), bound=Bound(registers=96))
    with pytest.raises(FusionError, match="at least 1, not"):
        Bound()
    rows = pair(BODY, launch_of(block=(None, 3, 1)))
    with pytest.raises(FusionError, match="64 threads cannot be a block of '\\*' x 3 x 1; give it a multiple of 3"):
        fuse(rows, (64, 64))
    bounded = pair("#define MOST 128\n" + BODY.replace("void k", "void __launch_bounds__(MOST, 2) k"))
    with pytest.raises(
        FusionError, match=r"a\.cu:2: kernel k: it is declared for at most 128 threads, and would get 256"
    ):
        fuse(bounded, (256, 64))


def test_even_partitions() -> None:
    first, second = pair(BODY)
    assert even_split((first, second), 1024) == (512, 512)
    assert even_split((first, second, first), 1024) == (320, 352, 352)
    fixed = Part.of(first.reach.source, None, launch_of(block=(256, 1, 1)))
    assert even_split((fixed, second), 1024) == (256, 768)
    assert even_split((fixed, fixed), 1024) == (256, 256)
    with pytest.raises(FusionError, match="of a block of 256 threads 0 are left for it"):
        even_split((fixed, second), 256)


def test_memory_of_an_unknown_size() -> None:
    text = f"{HEAD}\n  extern __shared__ int pool[];\n}}"
    part = Part.of(Source("a.cu", text))
    with pytest.raises(
        FusionError, match=r"a\.cu:2: `extern __shared__ int pool\[\];`: the size of this array is a matter"
    ):
        fuse((part, part), (64, 64))


def test_launches_that_do_not_fit() -> None:
    parts = pair(BODY, Launch("k", (1, 1, 1), (None, 1, 1)))
    with pytest.raises(FusionError, match=r"a\.cu:1: kernel k: it has 3 parameters, and its launch gives 0 of them"):
        fuse(parts, (64, 64)).launch()
    unknown = Part.of(Source("a.cu", BODY))
    with pytest.raises(FusionError, match="its launch is not known; give one"):
        fuse((unknown, unknown), (64, 64)).launch()


def test_templates() -> None:
    text = "template <typename T, int M>\n" + BODY
    for name, message in (
        ("k", "its parameter T has no argument; name the kernel as in a.cu:k<...>"),
        ("k<int>", "its parameter M has no argument"),
        ("k<int, 1, 2>", "takes 2 template arguments, and 3 were given"),
    ):
        with pytest.raises(FusionError, match=message):
            fuse(pair(text, kernel=name), (64, 64))
    with pytest.raises(FusionError, match="kernel k is no template; leave <"):
        fuse(pair(BODY, kernel="k<int>"), (64, 64))


def test_without_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "tree_sitter", None)
    with pytest.raises(FusionError, match=r"pip install 'souffle-dl\[hfuse\]'"):
        Source("a.cu", BODY)
