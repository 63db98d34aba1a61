"""Masks of shuffles, as the text leaves them in a thread's own arrays: numbers, or the lanes active at one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.verify.accesses import Address, Memory
from souffle.verify.device_effects import ACTIVE_MASKS
from souffle.verify.expressions import Axis, Expr, const, operation
from souffle.verify.indices import bytes_of, operator_name

__all__ = ["ACTIVE", "ALL_LANES", "LaneMasks"]

ACTIVE = "active"
"""The mask of the lanes that have come to ``__activemask()`` together, on the same way as to the shuffle."""

_LANES, _MASK_BYTES = 2**32, 4
ALL_LANES = _LANES - 1
"""The mask of a whole warp."""


class LaneMasks:
    """What is known of masks where the reader of a function stands.

    Parameters
    ----------
    places : mapping
        The memory of each array, kept up by the reader.
    thread : Axis
    index : callable
        The reader's, of whole numbers.
    held : mapping, optional
        The masks, by memory and byte.
    """

    def __init__(
        self,
        places: Mapping[Any, Address],
        thread: Axis,
        index: Callable[[Any], Expr],
        held: Mapping[tuple[Memory, int], Expr | str] | None = None,
    ) -> None:
        self.places = places
        self.thread = thread
        self.index = index
        self.held = dict(held or {})

    def copy(self) -> LaneMasks:
        """The same, to go on from by itself."""
        return self._with(self.held)

    def mask(self, node: Any) -> Expr | str | None:
        """What a mask is: a number for each thread, `ACTIVE`, or None where it is not known."""
        if isinstance(node, tirx.IntImm):
            return const(int(node.value) % _LANES)
        if isinstance(node, tirx.Select):
            parts = [self.mask(node.true_value), self.mask(node.false_value)]
            condition = self.index(node.condition)
            known = all(isinstance(part, Expr) for part in parts) and condition.axes <= {self.thread}
            return operation("select", condition, *parts) if known and not condition.opaque else None
        if isinstance(node, Call) and operator_name(node) in ACTIVE_MASKS:
            return ACTIVE
        if isinstance(node, TensorLoad):
            return self.held.get(self._key(node.source, node.indices))
        return None

    def store(self, node: tirx.BufferStore) -> None:
        """An array is written."""
        place, key = self.places.get(node.buffer), self._key(node.buffer, node.indices)
        if place is None or place.memory.kind != "local":
            return
        if key is None:
            self.forget(place.memory)
            return
        value = self.mask(node.value)
        # Declared elsewhere, an array may be written across its elements.
        self.held = {k: v for k, v in self.held.items() if k[0] is not key[0] or abs(k[1] - key[1]) >= _MASK_BYTES}
        if value is not None:
            self.held[key] = value

    def forget(self, memory: Memory) -> None:
        """An array is written in a way that is not followed."""
        self.held = {key: value for key, value in self.held.items() if key[0] is not memory}

    def divided(self, condition: Expr) -> LaneMasks:
        """What is left of these where the threads part for which a condition holds."""
        if self.thread not in condition.axes and not condition.opaque:
            return self.copy()
        return self._with({key: value for key, value in self.held.items() if value is not ACTIVE})

    def both(self, one: LaneMasks, other: LaneMasks) -> LaneMasks:
        """What is left of these after one or the other branch: what both leave as it was."""
        same = {k: v for k, v in self.held.items() if one.held.get(k) is v and other.held.get(k) is v}
        return self._with(same)

    def around(self, body: Any) -> LaneMasks:
        """What is left of these in and after a loop: numbers that its turns do not change."""
        if not self.held:
            return self.copy()
        written: list[Memory] = []

        def see(store: tirx.BufferStore) -> None:
            place = self.places.get(store.buffer)
            if place is not None:
                written.append(place.memory)

        structural_walk(body, (tirx.BufferStore, see))
        kept = {k: v for k, v in self.held.items() if v is not ACTIVE and not any(k[0] is memory for memory in written)}
        return self._with(kept)

    def _with(self, held: Mapping[tuple[Memory, int], Expr | str]) -> LaneMasks:
        return LaneMasks(self.places, self.thread, self.index, held)

    def _key(self, buffer: Any, indices: Any) -> tuple[Memory, int] | None:
        place = self.places.get(buffer)
        plain = place is not None and len(indices) == 1 and isinstance(indices[0], tirx.IntImm)
        unit = bytes_of(str(buffer.dtype))
        if not plain or unit != _MASK_BYTES or place.memory.kind != "local" or place.offset.op != "const":
            return None
        return place.memory, place.offset.value + unit * int(indices[0].value)
