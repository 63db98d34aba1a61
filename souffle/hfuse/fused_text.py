"""The text of a fused kernel: its parts, the kernel that calls them, and a function of the host (paper Figure 4)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from souffle.hfuse.errors import FusionError
from souffle.hfuse.part import Part
from souffle.hfuse.position import Position
from souffle.hfuse.rewrite import Rewritten
from souffle.hfuse.shared_arrays import POOL_DECLARATION

__all__ = ["Bound", "FusedText", "grid_names"]

_STATIC_SHARED = 48 * 1024
"""Bytes that a kernel gets without being asked for more."""


@dataclass(frozen=True)
class Bound:
    """A register bound: at least `blocks` on a multiprocessor, or at most `registers` of a thread.

    The bound r0 of the paper's Figure 6 is what so many blocks leave to each thread, and that is what
    ``__launch_bounds__(threads, blocks)`` tells the compiler; the hardware gives registers in eights, and the compiler
    rounds as it does. Any other number is told by ``__maxnreg__``. Both are of the one kernel, and in its text: the
    option ``-maxrregcount`` would be of all that is compiled with it, and lost when the text is handed on.
    """

    blocks: int | None = None
    registers: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.blocks, self.registers) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise FusionError(f"a register bound is a number of blocks or of registers, at least 1, not {given}")


def grid_names(number: int, rank: int) -> list[str]:
    """The names of the arguments that say the extents of a part's grid."""
    return [f"hfuse_blocks_{number}"] if rank == 1 else [f"hfuse_grid_{number}_{axis}" for axis in "xyz"]


@dataclass(frozen=True)
class FusedText:
    """What the text of a fused kernel is made of.

    Attributes
    ----------
    name : str
        Of the fused kernel.
    parts : tuple of Part
    positions : tuple of Position
    written : tuple of Rewritten
    space : str
        ``thread``, ``block`` or ``sequence``.
    block : int
        Threads.
    pool : int
        Bytes of dynamic shared memory.
    bound : Bound or None
    """

    name: str
    parts: tuple[Part, ...]
    positions: tuple[Position, ...]
    written: tuple[Rewritten, ...]
    space: str
    block: int
    pool: int
    bound: Bound | None

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Of each part's parameters: with the part's number, so that none is there twice."""
        return tuple(
            tuple(f"{parameter.name}_{position.number}" for parameter in written.parameters)
            for position, written in zip(self.positions, self.written, strict=True)
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """What the host has to fill."""
        return tuple(
            f"{position.scope}::{symbol}"
            for position, written in zip(self.positions, self.written, strict=True)
            for symbol in written.symbols
        )

    def text(self) -> str:
        """The whole file."""
        headers = dict.fromkeys(header for written in self.written for header in written.includes)
        sections = ["\n".join(self._heading())]
        if headers:
            sections.append("\n".join(f"#include {header}" for header in headers))
        if self.pool:
            sections.append(POOL_DECLARATION)
        sections += [written.text for written in self.written]
        sections += ["\n".join(self._kernel()), "\n".join(self._host())]
        return "\n\n".join(sections) + "\n"

    def _heading(self) -> list[str]:
        lines = [f"// {self.name}: kernels fused in the {self.space} space of blocks of {self.block} threads."]
        for part, position in zip(self.parts, self.positions, strict=True):
            last = position.first + position.threads - 1
            shape = " x ".join(str(extent) for extent in position.shape)
            memory = f", dynamic shared memory from byte {position.pool}" if part.shared_bytes else ""
            lines.append(f"// {position.number}. {part.kernel}: threads {position.first} to {last} ({shape}){memory}")
        lines += [f"// The host fills {symbol}." for symbol in self.symbols]
        return lines

    def _declared(self) -> list[str]:
        declared = []
        for written, names in zip(self.written, self.names, strict=True):
            pairs = zip(written.parameters, names, strict=True)
            declared += [parameter.declared(name, written.scope) for parameter, name in pairs]
        for position in self.positions:
            declared += [f"const unsigned {name}" for name in grid_names(position.number, position.rank)]
        return declared

    def _kernel(self) -> list[str]:
        attribute = f"__launch_bounds__({self.block})"
        if self.bound is not None:
            blocks, registers = self.bound.blocks, self.bound.registers
            attribute = f"__maxnreg__({registers})" if blocks is None else f"__launch_bounds__({self.block}, {blocks})"
        lines = [f'extern "C" __global__ void {attribute} {self.name}(']
        lines += [f"    {declared}," for declared in self._declared()]
        lines[-1] = lines[-1][:-1] + ") {"
        body = {"thread": self._in_threads, "block": self._in_blocks, "sequence": self._in_sequence}[self.space]()
        return [*lines, *(f"  {line}" for line in body), "}"]

    def _blocks(self, position: Position) -> str:
        return " * ".join(grid_names(position.number, position.rank))

    def _call(self, index: int, block: str = "blockIdx.x") -> list[str]:
        """The call of a part in a block of its grid."""
        position, written = self.positions[index], self.written[index]
        arguments, before = list(self.names[index]), []
        if written.takes_place:
            names, place = grid_names(position.number, position.rank), f"hfuse_place_{position.number}"
            if position.rank == 1:
                value = f"{{dim3({names[0]}, 1, 1), make_uint3({block}, 0, 0)}}"
            else:
                x, y = names[:2]
                indices = f"{block} % {x}, {block} / {x} % {y}, {block} / {x} / {y}"
                value = f"{{dim3({', '.join(names)}), make_uint3({indices})}}"
            before = [f"const {position.scope}::hfuse_place {place} = {value};"]
            arguments.insert(0, place)
        return [*before, f"{written.scope}::{written.callee}({', '.join(arguments)});"]

    def _in_threads(self) -> list[str]:
        lines = []
        for index, position in enumerate(self.positions):
            last = index == len(self.positions) - 1
            condition = "" if last else f"if (threadIdx.x < {position.first + position.threads}u) "
            lines.append(f"{'} else ' if index else ''}{condition}{{")
            lines.append(f"  if (blockIdx.x < {self._blocks(position)}) {{")
            lines += [f"    {line}" for line in self._call(index)]
            lines.append("  }")
        return [*lines, "}"]

    def _in_blocks(self) -> list[str]:
        lines = ["unsigned block = blockIdx.x;"]
        for index, position in enumerate(self.positions):
            if index:
                lines.append(f"block -= {self._blocks(self.positions[index - 1])};")
            lines.append(f"if (block < {self._blocks(position)}) {{")
            guarded = position.threads < self.block
            call = self._call(index, "block")
            if guarded:
                call = [f"if (threadIdx.x < {position.threads}u) {{", *(f"  {line}" for line in call), "}"]
            lines += [f"  {line}" for line in call] + ["  return;", "}"]
        return lines

    def _in_sequence(self) -> list[str]:
        lines = []
        for index, position in enumerate(self.positions):
            if index:
                lines.append("__syncthreads();")
            threads = "" if position.threads == self.block else f"threadIdx.x < {position.threads}u && "
            lines.append(f"if ({threads}blockIdx.x < {self._blocks(position)}) {{")
            lines += [f"  {line}" for line in self._call(index)] + ["}"]
        return lines

    def _host(self) -> list[str]:
        """A function of the host that launches the kernel; what compiles for a device leaves it out."""
        counts = [f"({self._blocks(position)})" for position in self.positions]
        names = [name for part in self.names for name in part]
        names += [name for p in self.positions for name in grid_names(p.number, p.rank)]
        lines = ["#if !defined(__CUDA_ARCH__)", f"// Starts {self.name} on a stream; the grids are those of its parts."]
        lines.append(f"inline cudaError_t launch_{self.name}(")
        lines += [f"    {re.sub(r'__grid_constant__ ?', '', declared)}," for declared in self._declared()]
        lines.append("    cudaStream_t stream = 0) {")
        if self.space == "block":
            lines.append(f"  const unsigned blocks = {' + '.join(counts)};")
        else:
            lines.append("  unsigned blocks = 0;")
            lines += [f"  if (blocks < {count}) blocks = {count};" for count in counts]
        if self.pool > _STATIC_SHARED:
            lines.append("  const cudaError_t allowed = cudaFuncSetAttribute(")
            lines.append(f"      {self.name}, cudaFuncAttributeMaxDynamicSharedMemorySize, {self.pool});")
            lines.append("  if (allowed != cudaSuccess) return allowed;")
        lines.append(f"  {self.name}<<<blocks, {self.block}, {self.pool}, stream>>>({', '.join(names)});")
        return [*lines, "  return cudaGetLastError();", "}", "#endif"]
