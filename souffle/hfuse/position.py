"""Where in a fused kernel a part is, and the functions that tell its threads so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Position", "prologue"]


@dataclass(frozen=True)
class Position:
    """Where in the fused kernel a part is.

    Attributes
    ----------
    number : int
        From 1; also the number of its barrier.
    first : int
        The first of its threads, in the fused block.
    shape : tuple of int
        Its block along x, y, z.
    whole : bool
        Whether its threads are all of the block, so that ``__syncthreads`` is its barrier.
    pool : int
        Where its dynamic shared memory begins, in bytes of the fused kernel's.
    rank : int
        1 where its grid is one-dimensional, or 3.
    shifted : bool
        Whether its first block is not the first of the fused grid.
    """

    number: int
    first: int
    shape: tuple[int, int, int]
    whole: bool = False
    pool: int = 0
    rank: int = 1
    shifted: bool = False

    @property
    def threads(self) -> int:
        """Of a block of the part."""
        x, y, z = self.shape
        return x * y * z

    @property
    def scope(self) -> str:
        """The namespace of the part."""
        return f"hfuse_{self.number}"


def prologue(position: Position, used: frozenset[str], takes_place: bool) -> Iterator[str]:
    """The functions that take the place of CUDA's names, those that are used (paper Figure 4, lines 2 to 17).

    Parameters
    ----------
    position : Position
    used : frozenset of str
        The names that the part mentions.
    takes_place : bool
        Whether its functions are handed their place in the grid.
    """
    x, y, z = position.shape
    qualifiers = "__device__ __forceinline__"
    if "threadIdx" in used:
        thread = f"threadIdx.x - {position.first}u" if position.first else "threadIdx.x"
        if y == z == 1:
            yield f"{qualifiers} uint3 hfuse_thread() {{ return make_uint3({thread}, 0, 0); }}"
        else:
            yield f"{qualifiers} uint3 hfuse_thread() {{"
            yield f"  const unsigned thread = {thread};"
            last = f"thread / {x * y}u" if z > 1 else "0"
            middle = f"thread / {x}u % {y}u" if z > 1 else f"thread / {x}u"
            yield f"  return make_uint3(thread % {x}u, {middle}, {last});"
            yield "}"
    if "blockDim" in used:
        yield f"{qualifiers} dim3 hfuse_block() {{ return dim3({x}, {y}, {z}); }}"
    if takes_place:
        yield "struct hfuse_place {"
        yield "  dim3 extent;"
        yield "  uint3 index;"
        yield "};"
    number, count = position.number, position.threads
    if "__syncthreads" in used:
        wait = "__syncthreads();" if position.whole else f'asm volatile("bar.sync {number}, {count};" ::: "memory");'
        yield f"{qualifiers} void hfuse_barrier() {{ {wait} }}"
    for vote, instruction in (("count", "popc.u32"), ("and", "and.pred"), ("or", "or.pred")):
        if f"__syncthreads_{vote}" not in used:
            continue
        yield f"{qualifiers} int hfuse_barrier_{vote}(const int holds) {{"
        if position.whole:
            yield f"  return __syncthreads_{vote}(holds);"
        else:
            yield "  int result;"
            yield f'  asm volatile("{_vote(instruction, number, count)}" : "=r"(result) : "r"(holds) : "memory");'
            yield "  return result;"
        yield "}"


def _vote(instruction: str, number: int, count: int) -> str:
    """The PTX of a barrier that counts predicates, or joins them to one."""
    if instruction.startswith("popc"):
        return f"{{ .reg .pred p; setp.ne.s32 p, %1, 0; bar.red.{instruction} %0, {number}, {count}, p; }}"
    vote = f"bar.red.{instruction} q, {number}, {count}, p; selp.s32 %0, 1, 0, q;"
    return f"{{ .reg .pred p, q; setp.ne.s32 p, %1, 0; {vote} }}"
