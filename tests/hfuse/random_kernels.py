"""Random CUDA kernels whose result does not depend on the order of threads, with their launches.

Each is a file of its own that uses the same names as the others: what fusion has to keep apart. Every thread carries a
word, which statements change: arithmetic, exchanges through shared memory between two barriers, votes, shuffles, loops
of a uniform length with barriers inside, integer atomics.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from souffle.hfuse import Argument, Fill, Launch

__all__ = ["RandomKernel", "random_kernel"]

_BLOCKS = ((32, 1, 1), (64, 1, 1), (16, 4, 1), (8, 4, 3), (96, 1, 1), (8, 2, 6), (128, 1, 1), (32, 5, 1))
_TUNABLE = ((None, 1, 1), (None, 2, 1), (None, 4, 2), (None, 1, 4), (None, 8, 1))
_GRIDS = ((1, 1, 1), (3, 1, 1), (5, 1, 1), (2, 2, 1), (3, 1, 2), (2, 3, 1))

_HELPERS = """
#define N {n}
#define MIX(a, b) (((a) ^ ((b) << 3)) * 2654435761u + N)
#define TID (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define THREADS (blockDim.x * blockDim.y * blockDim.z)
#define WAIT() __syncthreads()
#define EACH(i, from, until) for (unsigned i = (from); i < (until); ++i)

typedef unsigned int word;
enum Kind {{ FIRST = {n}, SECOND = {m} }};
__constant__ word table[4] = {{ {n}u, {m}u, 7u, 11u }};

struct Pair {{
  word left, right;
  __device__ word own() const {{ return left * TID + right; }}
  __device__ void meet(word* s) {{
    s[TID] = left;
    WAIT();
    right ^= s[(TID + {m}) % THREADS];
    WAIT();
  }}
}};
__device__ Pair operator+(Pair a, Pair b) {{ return {{ a.left + b.right, a.right ^ b.left }}; }}

// threadIdx and __syncthreads() in a comment stay what they are.
__device__ __forceinline__ word rotate(word a, int by) {{ return (a << by) | (a >> (32 - by)); }}
__device__ word helper(word a, word b) {{
  if (a % {n}u == 0) return b + SECOND;  // leaves the function, not the kernel
  return rotate(a, {r}) ^ table[b % 4];
}}
__device__ word neighbour(word v) {{
  __shared__ word box[1024];
  box[TID] = v;
  __syncthreads();
  const word got = box[(TID * 3 + {n}) % THREADS];
  __syncthreads();
  return got;
}}
__device__ word grid_word() {{ return gridDim.x * 31 + gridDim.y * 7 + blockIdx.x; }}
__device__ word far_word(word v) {{ return v * grid_word() + blockDim.x; }}
template <typename T, int K> __device__ T scaled(T v) {{ return v * K + T(threadIdx.x); }}
__device__ word never_used(word v) {{ return v + clock(); }}
"""


@dataclass(frozen=True)
class RandomKernel:
    """A text with the launch of its kernel, and what its statements were."""

    text: str
    launch: Launch
    kinds: tuple[str, ...]


def random_kernel(seed: int) -> RandomKernel:
    """The kernel of a seed."""
    return _Maker(random.Random(seed)).kernel()


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._count = 0
        self._kinds: list[str] = []

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def kernel(self) -> RandomKernel:
        draw = self._draw
        # Parts of one seed in two: a template, a pool at the file's level, a host function, a namespace.
        template, of_file, host, named = (draw.random() < p for p in (0.3, 0.3, 0.3, 0.2))
        pooled = draw.random() < 0.6
        pool = (
            "extern __shared__ __align__(16) word pool[];" if draw.random() < 0.5 else "extern __shared__ word pool[];"
        )
        block = draw.choice(_TUNABLE if draw.random() < 0.6 else _BLOCKS)
        grid = draw.choice(_GRIDS)
        blocks = grid[0] * grid[1] * grid[2]
        numbers = {"n": draw.randint(2, 9), "m": draw.randint(2, 9), "r": draw.randint(1, 31)}
        flat = "blockIdx.x" if grid[1:] == (1, 1) else "blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)"
        body = [
            f"const word block = {flat};",
            "word v = MIX(in[(block * 37 + TID) % n], TID);",
            "Pair pair = { v, FIRST };",
            "__shared__ word shared[1024];",
        ]
        if pooled and not of_file:
            body.append(pool)
        if draw.random() < 0.4:
            body.append(draw.choice(["if (n < 3) return;", f"if (blockIdx.x >= {grid[0]}u && n > 2) {{ return; }}",
                                     f"const int last = n - {numbers['n']};\n  if (last < 0) return;",
                                     f"if (blockIdx.x == {draw.randint(0, grid[0])}u) return;"]))  # fmt: skip
        made = [self._statement(pooled, 2) for _ in range(draw.randint(3, 7))]
        # Each kernel waits at barriers, and uses the pool that it asks for.
        for always in (self._exchange, self._pool) if pooled else (self._exchange,):
            made.insert(draw.randint(0, len(made)), always())
        body += [line for statement in made for line in statement]
        body += [
            "out[block * THREADS + TID] = v ^ pair.right;",
            draw.choice(["if (v % 3 == 0) return;", ""]),
            "atomicAdd(&sums[v % 8], v);",
        ]
        word = "T" if template else "word"
        head = "template <typename T, int K = 3>\n" if template else ""
        bounds = draw.choice(["", "__launch_bounds__(1024) ", "__launch_bounds__(1024, 1) "])
        signature = f"__global__ void {bounds}kernel(const {word}* __restrict__ in, {word}* out, word* sums, int n)"
        if not template and not named and draw.random() < 0.3:
            signature = f'extern "C" {signature}'
        text = "\n  ".join([f"{head}{signature} {{", *(line for line in body if line)]) + "\n}\n"
        if named:
            text = f"namespace deep {{\n{text}}}\n"
        before = _HELPERS.format(**numbers)
        if pooled and of_file:
            before += pool + "\n"
        label = ("deep::" if named else "") + "kernel" + (draw.choice(["<word>", "<unsigned, 4>"]) if template else "")
        if host:
            text += f"int main() {{\n  {label}<<<1, 32>>>(nullptr, nullptr, nullptr, 0);\n  return 0;\n}}\n"
        text = "#include <stdint.h>\n" + before + text
        words = {"dtype": "uint32", "fill": Fill("integers", (0, 2**32))}
        arguments = (
            Argument("in", count=997, **words),
            Argument("out", count=blocks * 1024, output=True, **words),
            Argument("sums", dtype="uint32", count=8, output=True),
            Argument("n", value=997),
        )
        launch = Launch(label, grid, block, 4096 if pooled else 0, arguments)
        return RandomKernel(text, launch, tuple(dict.fromkeys(self._kinds)))

    def _statement(self, pooled: bool, depth: int) -> list[str]:
        makers: list[Callable[[], list[str]]] = [
            self._arithmetic, self._arithmetic, self._exchange, self._shuffle, self._vote, self._called, self._atomics,
            self._member, self._floats, self._branch, self._warp, self._lambda, self._strided,
        ]  # fmt: skip
        if pooled:
            makers += [self._pool, self._pool]
        if depth:
            makers += [lambda: self._loop(pooled, depth), lambda: self._loop(pooled, depth)]
        maker = self._draw.choice(makers)
        self._kinds.append(getattr(maker, "__name__", "loop").strip("_").replace("<lambda>", "loop"))
        return maker()

    def _arithmetic(self) -> list[str]:
        number = self._draw.randint(1, 2**31)
        return [
            self._draw.choice([
                f"v = MIX(v, {number}u);",
                f"v += (v >> {number % 31}) * TID;",
                f"v = v % 2 ? v * {number % 97}u : v + SECOND;",
                f"pair = pair + Pair{{ v, {number}u }};",
                "v = ::rotate(v, 5) + N;",
                "v += threadIdx.x * 3 + threadIdx.y * 5 + threadIdx.z * 7;",
                'v += sizeof("__syncthreads() of threadIdx");',
                "#pragma unroll 2\n  for (int i = 0; i < 4; ++i) v += v << i;",
            ])
        ]  # fmt: skip

    def _exchange(self) -> list[str]:
        step = self._draw.randint(1, 200)
        wait = self._draw.choice(["__syncthreads();", "WAIT();", "::__syncthreads();"])
        return ["shared[TID] = v;", wait, f"v ^= shared[(TID + {step}) % THREADS];", wait]

    def _pool(self) -> list[str]:
        return ["pool[TID] = v + 1;", "__syncthreads();", "v += pool[THREADS - 1 - TID];", "WAIT();"]

    def _shuffle(self) -> list[str]:
        mask = self._draw.choice([1, 2, 4, 8, 16])
        return [
            self._draw.choice([
                f"v += __shfl_xor_sync(0xffffffffu, v, {mask});",
                f"v ^= __shfl_down_sync(0xffffffffu, v, {mask});",
                f"v += __shfl_sync(0xffffffffu, v, TID % {mask + 1});",
            ])
        ]  # fmt: skip

    def _warp(self) -> list[str]:
        return [
            self._draw.choice(["v += __popc(__ballot_sync(0xffffffffu, v & 1));", "v ^= TID % warpSize; __syncwarp();"])
        ]

    def _vote(self) -> list[str]:
        condition = self._draw.choice(["v % 3 == 0", "v & 1", "TID < 5", "v != 12345u"])
        return [f"v += __syncthreads_{self._draw.choice(['count', 'and', 'or'])}({condition});"]

    def _called(self) -> list[str]:
        return [
            self._draw.choice([
                "v = helper(v, TID);",
                "v += neighbour(v);",
                "v ^= far_word(v);",
                f"v = scaled<word, {self._draw.randint(2, 9)}>(v);",
                "v += grid_word();",
                "v = helper(neighbour(v), far_word(v));",
            ])
        ]  # fmt: skip

    def _member(self) -> list[str]:
        return [self._draw.choice(["v += pair.own();", "pair.meet(shared); v += pair.right;"])]

    def _atomics(self) -> list[str]:
        operation = self._draw.choice(["atomicAdd", "atomicMax", "atomicXor"])
        name = self._name("bins")
        return [
            f"__shared__ word {name}[8];",
            f"if (TID < 8) {name}[TID] = 0;",
            "__syncthreads();",
            f"{operation}(&{name}[v % 8], v);",
            "__syncthreads();",
            f"v += {name}[TID % 8];",
            "__syncthreads();",
        ]

    def _floats(self) -> list[str]:
        name = self._name("f")
        return [f"float {name} = float(v % 1000u) * 0.37f;", f"v += word({name} * {name} + 1.5f);"]

    def _branch(self) -> list[str]:
        name = self._name("done")
        return self._draw.choice([
            [f"if (v % 5 == 0) goto {name};", "v += 17;", f"{name}:;"],
            ["switch (v % 3) {", "  case 0: v += 5; break;", "  case 1: v ^= 9; break;", "  default: v -= 2;", "}"],
            ["do { v = v * 3 + 1; } while (v % 4 == 1);"],
        ])  # fmt: skip

    def _lambda(self) -> list[str]:
        name = self._name("add")
        return [
            f"auto {name} = [&](word a) {{ if (a == 3) return v; return a + v + threadIdx.x; }};",
            f"v = {name}(TID);",
        ]

    def _strided(self) -> list[str]:
        name = self._name("i")
        return [
            f"for (word {name} = blockIdx.x * THREADS + TID; {name} < n; {name} += THREADS * gridDim.x)",
            f"  v += in[{name}];",
        ]

    def _loop(self, pooled: bool, depth: int) -> list[str]:
        name, turns = self._name("turn"), self._draw.randint(1, 3)
        inner = [line for _ in range(self._draw.randint(1, 2)) for line in self._statement(pooled, depth - 1)]
        head = self._draw.choice([f"for (int {name} = 0; {name} < {turns}; ++{name})", f"EACH({name}, 0u, {turns}u)"])
        return [f"{head} {{", *(f"  {line}" for line in inner), "}"]
