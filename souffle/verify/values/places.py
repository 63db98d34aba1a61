"""Buffers, and pointers into them, as places in memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.verify.expressions import Undecided
from souffle.verify.indices import bytes_of, operator_name
from souffle.verify.values.inputs import elements_of
from souffle.verify.values.memory import ElementMemory, Lanes, PerBlock, PerThread, PerWarp, TensorMemory
from souffle.verify.values.points import Numbers
from souffle.verify.values.scalars import Evaluator, Frame, Mask
from souffle.verify.values.sightings import TextSightings
from souffle.verify.values.statements import Statement, Statements, nothing

__all__ = ["Places", "Pointer"]

_PAIRS = {
    "souffle_load_matrices": (0,),
    "souffle_load_transposed_matrices": (0,),
    "souffle_add_product": (1, 2),
    "souffle_scale_part": (0,),
}
"""Which arguments of an instruction are 32-bit registers that hold two 16-bit numbers."""


def _element_size(dtype: str) -> int:
    kind = tvm.DataType(dtype)
    return max(1, kind.bits // 8)


@dataclass(frozen=True)
class Pointer:
    """A place in a memory, or a buffer there.

    Attributes
    ----------
    memory : ElementMemory
    at : callable
        Its unit.
    size : int
        Bytes of the elements of the buffer, or of the one that it was taken of.
    lanes : int
        How many of them each index is.
    """

    memory: ElementMemory
    at: Evaluator
    size: int
    lanes: int = 1


class Places(Statements):
    """Translates accesses of memory; each allocation is a memory of its own.

    Parameters
    ----------
    func : tirx.PrimFunc
    lanes : Lanes
    tensors : sequence of array
        What the function's pointers point to.
    numbers : Numbers
    sightings : TextSightings
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        lanes: Lanes,
        tensors: Sequence[np.ndarray],
        numbers: Numbers,
        sightings: TextSightings,
    ) -> None:
        super().__init__(numbers, sightings)
        self.lanes = lanes
        self.places: dict[Any, Pointer] = {}
        self.pointers: dict[Any, Pointer] = {}
        self.tensors = []
        for pointer, values in zip(func.params[2:], tensors, strict=True):
            memory = TensorMemory(str(pointer.name), values, bytes_of(str(pointer.ty.element_type.dtype)), lanes.count)
            self.pointers[pointer] = Pointer(memory, _start, memory.unit)
            self.tensors.append(memory)
        self._plan_memories(func)

    def _plan_memories(self, func: tirx.PrimFunc) -> None:
        """Find the unit of each memory: the smallest element in it."""
        views: list[tirx.DeclBuffer] = []
        pairs: list[Any] = []

        def called(node: Call) -> None:
            pairs.extend(node.args[argument + 1] for argument in _PAIRS.get(operator_name(node), ()))

        structural_walk(func.body, [(tirx.DeclBuffer, views.append), (Call, called)])
        within = {view.buffer: _named(view.data) for view in views}

        def memory_of(data: Any) -> Any:
            """What is allocated, through views of views: what has no more use gives its place to others of any type."""
            found = _named(data)
            while found in within:
                found = within[found]
            return found

        self.views: dict[Any, set[int]] = {}
        for view in views:
            self.views.setdefault(memory_of(view.data), set()).add(_element_size(str(view.buffer.dtype)))
        self.halves = set(map(memory_of, pairs))

    def visit_alloc_buffer(self, node: tirx.AllocBuffer) -> Statement:
        """A memory for a buffer."""
        buffer, scope, dtype = node.buffer, str(node.buffer.scope()), str(node.buffer.dtype)
        lanes, own = tvm.DataType(dtype).lanes, _element_size(dtype)
        elements = elements_of(buffer) * lanes
        name, noise = str(buffer.name), partial(self.numbers.noise, name=f"unwritten {len(self.places)}")
        memory: ElementMemory
        if scope in ("shared", "shared.dyn"):
            sizes = self.views.get(buffer, set()) or {own}
            memory = PerBlock(name, elements * own, min(sizes), len(sizes) > 1, self.lanes, noise)
        elif scope == "local":
            # Registers that hold pairs of 16-bit numbers.
            unit = own // 2 if buffer in self.halves else own
            memory = PerThread(name, elements * own, unit, self.lanes, noise)
        elif scope.startswith("wmma."):
            memory = PerWarp(name, elements, own, self.lanes, noise)
        else:
            raise Undecided(f"memory of the scope {scope}")
        self.places[buffer] = Pointer(memory, _start, own, lanes)
        return nothing

    def visit_decl_buffer(self, node: tirx.DeclBuffer) -> Statement:
        """A buffer at a place in a memory."""
        pointer = self.pointer(node.data)
        if pointer is None:
            raise Undecided(f"the memory of the buffer {node.buffer.name}")
        dtype = str(node.buffer.dtype)
        self.places[node.buffer] = Pointer(pointer.memory, pointer.at, _element_size(dtype), tvm.DataType(dtype).lanes)
        return nothing

    def pointer(self, node: Any) -> Pointer | None:
        """What an expression points to; ``None`` where it is no pointer."""
        if isinstance(node, tvm.ir.Var):
            return self.pointers.get(node)
        if not isinstance(node, Call):
            return None
        name = operator_name(node)
        if name == "tirx.buffer_data" and node.args[0] in self.places:
            return self.places[node.args[0]]
        if name == "tirx.address_of" and isinstance(node.args[0], TensorLoad):
            load = node.args[0]
            if load.source not in self.places or len(load.indices) != 1:
                return None
            place = self.places[load.source]
            return Pointer(place.memory, self._unit(place, load.indices[0]), place.size)
        return None

    def _unit(self, place: Pointer, index: Any) -> Evaluator:
        """Where an element of a buffer begins, in units."""
        at, start = self.of(index), place.at
        nbytes, unit = place.size * place.lanes, place.memory.unit
        if nbytes % unit:
            if isinstance(index, tirx.IntImm) and int(index.value) * nbytes % unit == 0:
                first = int(index.value) * nbytes // unit
                return lambda f, m: start(f, m) + first
            # The pool counts bytes; what is put into it begins at multiples of its unit.
            return lambda f, m: start(f, m) + at(f, m) * nbytes // unit
        scale = nbytes // unit
        if place.lanes > 1:
            step = place.size // unit * np.arange(place.lanes)[:, None]
            return lambda f, m: start(f, m) + at(f, m) * scale + step
        if isinstance(place.memory, TensorMemory):
            return at if scale == 1 else lambda f, m: at(f, m) * scale
        if scale == 1:
            return lambda f, m: start(f, m) + at(f, m)
        return lambda f, m: start(f, m) + at(f, m) * scale

    def _element(self, buffer: Any, indices: Any) -> tuple[ElementMemory, Evaluator, int]:
        if buffer not in self.places or len(indices) != 1:
            raise Undecided(f"an access of the buffer {buffer.name}")
        place = self.places[buffer]
        return place.memory, self._unit(place, indices[0]), place.size

    def load(self, node: TensorLoad) -> Evaluator:
        """An element, or those of a vector."""
        memory, at, size = self._element(node.source, node.indices)
        return lambda f, m: memory.read(at(f, m), size, m)


def _named(data: Any) -> Any:
    """The variable, or the buffer, that a pointer points into."""
    if isinstance(data, Call) and operator_name(data) in ("tirx.address_of", "tirx.buffer_data"):
        taken = data.args[0]
        return taken.source if isinstance(taken, TensorLoad) else taken
    return data


def _start(f: Frame, m: Mask) -> int:
    return 0
