"""Read the control structure of a merged kernel: which stage is called for which tiles with which pointers, and waits.

The kernel's own loops are unrolled: what is proven is proven of the sequence of calls that a launch makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.verify.expressions import Axis, Expr, Undecided, conjuncts, const, evaluate, operation, variable
from souffle.verify.indices import bytes_of, index_of, operator_name

__all__ = ["KernelText", "Prefetch", "StageRun", "Sync", "read_kernel"]

_MANY = 1 << 20
"""More blocks than any device holds at once."""


@dataclass(frozen=True)
class StageRun:
    """A stage, for all its tiles.

    Attributes
    ----------
    name : str
        Of the function.
    tiles, threads : int
        Tiles ``0 .. tiles - 1`` are computed, by the first so many threads of a block.
    pointers : tuple of (int, int)
        The kernel's parameter, and bytes from its start, for each pointer parameter.
    before, after : bool
        Whether a block barrier stands before or after the call in each tile's turn.
    step : tuple of int
        The values of the kernel's loops around it.
    """

    name: str
    tiles: int
    threads: int
    pointers: tuple[tuple[int, int], ...]
    before: bool
    after: bool
    step: tuple[int, ...]


@dataclass(frozen=True)
class Sync:
    """All blocks wait (``"grid"``), or all threads of each block."""

    scope: str


@dataclass(frozen=True)
class Prefetch:
    """Bytes that are asked into the cache."""

    pointer: tuple[int, int]
    nbytes: int


@dataclass(frozen=True, eq=False)
class KernelText:
    """A kernel as it runs.

    Attributes
    ----------
    events : tuple of StageRun, Sync or Prefetch
        In order.
    threads : int
        Of a block.
    problems : tuple of str
        What could not be read.
    refuted : tuple of str
        What is wrong whatever the stages do: barriers that not all reach, tiles that some grid leaves out.
    """

    events: tuple[StageRun | Sync | Prefetch, ...]
    threads: int
    problems: tuple[str, ...]
    refuted: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Pointer:
    parameter: int
    unit: int
    offset: Expr


@dataclass(frozen=True, eq=False)
class _Choice:
    condition: Expr
    one: _Pointer | _Choice
    other: _Pointer | _Choice


@dataclass(frozen=True, eq=False)
class _Run:
    name: str
    tiles: int
    threads: int
    pointers: tuple[_Pointer | _Choice, ...]
    before: bool
    after: bool


@dataclass(frozen=True, eq=False)
class _Ahead:
    pointer: _Pointer | _Choice
    nbytes: Expr


@dataclass(frozen=True, eq=False)
class _Loop:
    axis: Axis
    low: Expr
    body: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _If:
    condition: Expr
    then: tuple[Any, ...]
    otherwise: tuple[Any, ...]


def read_kernel(func: tirx.PrimFunc) -> KernelText:
    """The run of a merged kernel ``kernel(pointers..., num_blocks)``; what cannot be read is in its `problems`."""
    return _Reader(func).read()


class _Reader:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.blocks, self.block, self.thread = Axis("num_blocks", _MANY), Axis("block", _MANY), Axis("tid", 1024)
        self.env: dict[Any, Expr] = {}
        self.pointers: dict[Any, _Pointer] = {}
        self.threads = 0
        self.problems: dict[str, None] = {}
        self.refuted: dict[str, None] = {}

    def read(self) -> KernelText:
        *pointers, count = self.func.params
        for number, pointer in enumerate(pointers):
            self.pointers[pointer] = _Pointer(number, bytes_of(str(pointer.ty.element_type.dtype)), const(0))
        # The number of blocks is an axis from 0; nothing below reads its value 0 as a grid.
        self.env[count] = variable(self.blocks)
        events: tuple[StageRun | Sync | Prefetch, ...] = ()
        try:
            events = tuple(_unrolled(self.items(self.func.body), {}, ()))
        except Undecided as reason:
            self.problems[str(reason)] = None
        return KernelText(events, self.threads, tuple(self.problems), tuple(self.refuted))

    def items(self, node: Any) -> tuple[Any, ...]:
        if node is None:
            return ()
        if isinstance(node, tirx.SeqStmt):
            return tuple(item for part in node.seq for item in self.items(part))
        if isinstance(node, tirx.AttrStmt):
            return self.launch(node)
        if isinstance(node, tirx.Bind):
            self.env[node.var] = index_of(node.value, self.env)
            return ()
        if isinstance(node, tirx.For):
            return self.loop(node)
        if isinstance(node, tirx.IfThenElse):
            condition = index_of(node.condition, self.env)
            then, otherwise = self.items(node.then_case), self.items(node.else_case)
            if condition.opaque or condition.axes & {self.block, self.thread, self.blocks}:
                if any(_waits(item) for item in (*then, *otherwise)):
                    self.refuted[f"a barrier under the condition {node.condition}, which not all threads meet"] = None
                raise Undecided(f"a stage under the condition {node.condition}")
            return (_If(condition, then, otherwise),)
        if isinstance(node, tirx.Evaluate):
            return self.call(node.value) if isinstance(node.value, Call) else ()
        raise Undecided(f"a statement of the kind {type(node).__name__} in a kernel")

    def launch(self, node: tirx.AttrStmt) -> tuple[Any, ...]:
        if node.attr_key != "thread_extent":
            raise Undecided(f"the attribute {node.attr_key} in a kernel")
        tag = str(node.node.thread_tag)
        if tag == "blockIdx.x" and index_of(node.value, self.env) is variable(self.blocks):
            self.env[node.node.var] = variable(self.block)
        elif tag == "threadIdx.x" and isinstance(node.value, tirx.IntImm):
            self.threads = int(node.value.value)
            self.thread = Axis("tid", self.threads)
            self.env[node.node.var] = variable(self.thread)
        else:
            raise Undecided(f"a kernel over {tag} of {node.value}")
        return self.items(node.body)

    def loop(self, node: tirx.For) -> tuple[Any, ...]:
        low, extent = index_of(node.min, self.env), index_of(node.extent, self.env)
        if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) or node.step is not None:
            raise Undecided(f"the loop over {node.loop_var.name}")
        if extent.op == "const":
            axis = Axis(str(node.loop_var.name), max(1, extent.value))
            self.env[node.loop_var] = operation("add", low, variable(axis))
            body = self.items(node.body)
            return (_Loop(axis, low, body),) if extent.value > 0 else ()
        if extent.opaque or extent.axes != {self.blocks} or low is not const(0):
            raise Undecided(f"the loop over {node.loop_var.name} of {node.extent} turns")
        return self.tile_loop(node, extent)

    # The tiles of a stage

    def tile_loop(self, node: tirx.For, turns: Expr) -> tuple[Any, ...]:
        """``for it: tile = it * num_blocks + block; if tile < tiles: barrier?; stage(tile, ...); barrier?``"""
        turn = variable(Axis("it", _MANY))
        blocks, block = variable(self.blocks), variable(self.block)
        products = (operation("mul", turn, blocks), operation("mul", blocks, turn))
        sums = [f for p in products for f in (operation("add", p, block), operation("add", block, p))]
        self.env[node.loop_var] = turn
        runs: list[_Run] = []
        self.turn(node.body, sums, None, self.threads, runs)
        for run in runs:
            self.cover(run, turns)
        return tuple(runs)

    def turn(self, node: Any, tile: list[Expr], tiles: int | None, threads: int, runs: list[_Run]) -> None:
        """One turn: its calls, each with the barriers around it in the turn."""
        if isinstance(node, tirx.SeqStmt):
            parts = list(node.seq)
        else:
            parts = [node]
        pending = False
        first = len(runs)
        for part in parts:
            if isinstance(part, tirx.IfThenElse) and part.else_case is None:
                most, fewer = self.guard(part.condition, tile, tiles, threads)
                before = len(runs)
                self.turn(part.then_case, tile, most, fewer, runs)
                if pending:
                    runs[before:] = [_with(run, before=True) for run in runs[before:]]
                continue
            if isinstance(part, tirx.Bind):
                self.env[part.var] = index_of(part.value, self.env)
                continue
            if isinstance(part, tirx.Evaluate) and isinstance(part.value, tirx.IntImm):
                continue
            if not (isinstance(part, tirx.Evaluate) and isinstance(part.value, Call)):
                raise Undecided(f"a statement of the kind {type(part).__name__} in a loop over tiles")
            name = operator_name(part.value)
            if name == "tirx.tvm_storage_sync":
                self.block_barrier(part.value)
                if threads < self.threads:
                    self.refuted["a block barrier that only some threads of a block reach"] = None
                pending = True
                runs[first:] = [_with(run, after=True) for run in runs[first:]]
            elif name == "tirx.cuda.grid_sync":
                self.refuted["a grid barrier in a loop over tiles, which not all blocks reach equally often"] = None
            elif isinstance(part.value.op, tvm.ir.GlobalVar):
                runs.append(self.run(part.value, tile, tiles, threads, pending))
            else:
                raise Undecided(f"a call of {name} in a loop over tiles")

    def guard(self, node: Any, tile: list[Expr], tiles: int | None, threads: int) -> tuple[int | None, int]:
        for condition in conjuncts([index_of(node, self.env)]):
            bound = condition.args[1].value if len(condition.args) == 2 and condition.args[1].op == "const" else None
            subject = condition.args[0] if condition.args else None
            if bound is None or condition.op not in ("lt", "le"):
                raise Undecided(f"the condition {node} in a loop over tiles")
            bound += condition.op == "le"
            if any(subject is t for t in tile):
                tiles = bound if tiles is None else min(tiles, bound)
            elif subject is variable(self.thread):
                threads = min(threads, bound)
            else:
                raise Undecided(f"the condition {node} in a loop over tiles")
        return tiles, threads

    def run(self, call: Call, tile: list[Expr], tiles: int | None, threads: int, before: bool) -> _Run:
        name = str(call.op.name_hint)
        own = index_of(call.args[0], self.env)
        if not any(own is t for t in tile):
            raise Undecided(f"the tile {call.args[0]} of {name}")
        if index_of(call.args[1], self.env) is not variable(self.thread):
            raise Undecided(f"the thread {call.args[1]} of {name}")
        if tiles is None:
            raise Undecided(f"the tiles of {name}, which have no bound")
        return _Run(name, max(0, tiles), threads, tuple(self.pointer(a) for a in call.args[2:]), before, False)

    def cover(self, run: _Run, turns: Expr) -> None:
        """Whether each grid, of any number of blocks, computes all the tiles."""
        grids = np.arange(1, max(run.tiles, 1) + 4097, dtype=np.int64)
        done = np.broadcast_to(evaluate(turns, {self.blocks: grids}, {}), grids.shape) * grids
        short = np.flatnonzero(done < run.tiles)
        if short.size:
            grid = int(grids[short[0]])
            self.refuted[f"{run.name}: a grid of {grid} blocks leaves out tile {int(done[short[0]])}"] = None

    # Pointers and calls

    def pointer(self, node: Any) -> _Pointer | _Choice:
        if isinstance(node, tvm.ir.Var) and node in self.pointers:
            return self.pointers[node]
        if isinstance(node, Call):
            name = operator_name(node)
            if name == "souffle_at":
                base = self.pointer(node.args[1])
                offset = index_of(node.args[2], self.env)
                return _moved(base, offset)
            if name == "souffle_choose":
                condition = index_of(node.args[1], self.env)
                return _Choice(condition, self.pointer(node.args[2]), self.pointer(node.args[3]))
        raise Undecided(f"the pointer {node}")

    def call(self, call: Call) -> tuple[Any, ...]:
        name = operator_name(call)
        if name == "tirx.cuda.grid_sync":
            return (Sync("grid"),)
        if name == "tirx.tvm_storage_sync":
            self.block_barrier(call)
            return (Sync("block"),)
        if name == "souffle_prefetch_l2":
            return (_Ahead(self.pointer(call.args[1]), index_of(call.args[2], self.env)),)
        raise Undecided(f"a call of {name} outside of a loop over tiles")

    def block_barrier(self, call: Call) -> None:
        if len(call.args) != 1 or str(call.args[0].value) not in ("shared", "shared.dyn"):
            raise Undecided(f"the barrier {call}")


def _moved(pointer: _Pointer | _Choice, offset: Expr) -> _Pointer | _Choice:
    if isinstance(pointer, _Choice):
        return _Choice(pointer.condition, _moved(pointer.one, offset), _moved(pointer.other, offset))
    scaled = operation("mul", offset, const(pointer.unit))
    return _Pointer(pointer.parameter, pointer.unit, operation("add", pointer.offset, scaled))


def _with(run: _Run, *, before: bool = False, after: bool = False) -> _Run:
    return _Run(run.name, run.tiles, run.threads, run.pointers, run.before or before, run.after or after)


def _waits(item: Any) -> bool:
    if isinstance(item, _Loop):
        return any(_waits(i) for i in item.body)
    if isinstance(item, _If):
        return any(_waits(i) for i in (*item.then, *item.otherwise))
    return isinstance(item, Sync) or (isinstance(item, _Run) and (item.before or item.after))


def _number(expr: Expr, values: dict[Axis, np.int64]) -> int:
    if expr.opaque or not all(a in values for a in expr.axes):
        raise Undecided(f"the value of {expr} in a kernel")
    return expr.value if expr.op == "const" else int(evaluate(expr, values, {}))


def _unrolled(
    items: tuple[Any, ...], values: dict[Axis, np.int64], step: tuple[int, ...]
) -> Iterator[StageRun | Sync | Prefetch]:
    for item in items:
        if isinstance(item, _Loop):
            for turn in range(item.axis.extent):
                yield from _unrolled(item.body, {**values, item.axis: np.int64(turn)}, (*step, turn))
        elif isinstance(item, _If):
            yield from _unrolled(item.then if _number(item.condition, values) else item.otherwise, values, step)
        elif isinstance(item, _Run):
            pointers = tuple(_resolved(p, values) for p in item.pointers)
            yield StageRun(item.name, item.tiles, item.threads, pointers, item.before, item.after, step)
        elif isinstance(item, _Ahead):
            yield Prefetch(_resolved(item.pointer, values), _number(item.nbytes, values))
        else:
            yield item


def _resolved(pointer: _Pointer | _Choice, values: dict[Axis, np.int64]) -> tuple[int, int]:
    while isinstance(pointer, _Choice):
        pointer = pointer.one if _number(pointer.condition, values) else pointer.other
    return pointer.parameter, _number(pointer.offset, values)
