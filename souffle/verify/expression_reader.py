"""Read the expressions of a stage function: what they are as whole numbers, what they read, where they point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import const_int, dtype_of
from souffle.verify.accesses import Address, Claim, Item, Memory, MemoryAccess, WarpMeeting
from souffle.verify.data_addresses import uniform
from souffle.verify.device_effects import NO_MEMORY, SHUFFLES
from souffle.verify.expressions import Axis, Expr, Undecided, add, const, operation, variable
from souffle.verify.indices import (
    BINARY,
    Claims,
    bytes_of,
    index_of,
    is_float,
    is_hoisted,
    lanes_of,
    operator_name,
    unknown_of,
)
from souffle.verify.lane_masks import ACTIVE, LaneMasks
from souffle.verify.vocabulary import only_calculates

__all__ = ["ExpressionReader"]

_LEAVES = (tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm)
_WIDEST = 16
"""Bytes of the widest access of a thread."""


_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Of a shuffle (CUDA C++ Programming Guide, "Warp Shuffle Functions")."""


class ExpressionReader:
    """What is known where an expression stands, and what was noted of those that were read.

    Parameters
    ----------
    tile, thread : Axis
        Who calculates it.

    Attributes
    ----------
    env : dict of Var to Expr
        Whole numbers that variables stand for.
    places : dict of Var or Buffer to Address
        Where pointers and buffers lie.
    problems : dict of str to None
        What could not be read, in order.
    items : list of Item
        Accesses and meetings of lanes, in the order of the text.
    statement : Stmt
        The one that is read.
    known : dict
        Elements that were read since something may have been written: reading one again gives the same number.
    alike : set of Var
        Variables that have one value for all threads of a tile.
    masks : LaneMasks
    claims : Claims
    claimed : dict of tuple to Claim
        What was claimed, each once.
    around : tuple of Expr
        The conditions of the branches around the statement.
    """

    def __init__(self, tile: Axis, thread: Axis) -> None:
        self.tile, self.thread = tile, thread
        self.env: dict[Any, Expr] = {}
        self.places: dict[Any, Address] = {}
        self.problems: dict[str, None] = {}
        self.items: list[Item] = []
        self.statement: Any = None
        self.known: dict[tuple[Memory, Expr, str], Expr] = {}
        self.alike: set[Any] = set()
        self.masks = LaneMasks(self.places, self.thread, self.index)
        self.claims = Claims()
        self.claimed: dict[tuple, Claim] = {}
        self.around: tuple[Expr, ...] = ()

    def problem(self, text: str) -> None:
        """Note what cannot be read."""
        self.problems[text] = None

    def index(self, node: Any, lane: Expr | None = None, *, address: bool = False, names: Any = None) -> Expr:
        """A whole number, what is claimed of it noted.

        Data may divide by zero or not, which matters only for an `address`; `names` is the variable that stands for it.
        """
        outer, self.claims.found = self.claims.found, []
        try:
            found = index_of(node, self.env, self.loaded, lane, self.claims)
        except Undecided as reason:
            self.problem(str(reason))
            found = unknown_of(node)
        claims, self.claims.found = self.claims.found, outer
        if names is not None:
            self.claims.of_names[names] = tuple(claim for claim in claims if claim.value.opaque)
        for claim in claims:
            if address or not claim.value.opaque:
                conditions = (*self.around, *claim.conditions)
                key = (claim.value, conditions, claim.otherwise)
                self.claimed.setdefault(key, replace(claim, conditions=conditions, statement=self.statement))
        return found

    def shuffle_width(self, node: Call) -> None:
        """Claim that the lanes that shuffle among themselves are a power of two, and no more than a warp has."""
        width = self.index(node.args[3])
        if width.op != "const":
            self.problem(f"the width {node.args[3]} of a shuffle")
        elif width.value not in _WIDTHS:
            conditions = (*self.around, *self.claims.choices, *self.claims.shortcuts)
            why = "shuffles among a number of lanes that is none of 1, 2, 4, 8, 16 and 32"
            self.claimed.setdefault((node, conditions, why), Claim(width, 32, 32, conditions, why, self.statement))

    def uniform(self, node: Any) -> bool:
        return uniform(node, self.env, self.places, self.thread, self.alike)

    def loaded(self, load: TensorLoad) -> Expr | None:
        """The number that an element is, of a buffer of integers."""
        place = self.places.get(load.source)
        if place is None or len(load.indices) != 1 or isinstance(load.indices[0], tirx.Ramp):
            return None
        unit = bytes_of(str(load.source.dtype))
        at = add(place.offset, operation("mul", self.index(load.indices[0], address=True), const(unit)))
        return self.known.setdefault((place.memory, at, dtype_of(load)), unknown_of(load))

    def loads(self, node: Any, *, covered: bool = False) -> None:
        """Record the reads of an expression; those that a choice or a short cut leaves out have its condition.

        The generator writes ``if_then_else`` as statements ahead of the one that it stands in: what is in it no short
        cut around it leaves out (:func:`souffle.verify.indices.is_hoisted`). Nor does ``and`` of vectors, which is
        written lane by lane. ``Select`` is C's choice, a short cut.

        What is claimed of whole numbers that are no index is noted too, but where `covered`, being a part of one that
        :meth:`index` is asked about.
        """
        kind = type(node)
        if kind in _LEAVES or (kind not in BINARY and isinstance(node, tvm.ir.Var)):
            return
        if self.claims.shortcuts and is_hoisted(node):
            with self.claims.under(shortcuts=()):
                self.loads(node, covered=covered)
            return
        if kind in BINARY:
            whole = not is_float(node.a)
            if whole and not covered:
                self.index(node)
            self.loads(node.a, covered=whole)
            if isinstance(node, (tirx.And, tirx.Or)) and lanes_of(node) == 1:
                self.beyond(node)
            else:
                self.loads(node.b, covered=whole)
        elif isinstance(node, TensorLoad):
            for index in node.indices:
                self.loads(index, covered=True)
            self.element(node.source, node.indices, False, dtype_of(node))
        elif isinstance(node, (tirx.Cast, tirx.Broadcast)):
            self.loads(node.value, covered=covered and not is_float(node) and not is_float(node.value))
        elif isinstance(node, (tirx.Not, tirx.BitwiseNot)):
            self.loads(node.a, covered=covered and isinstance(node, tirx.Not))
        elif isinstance(node, tirx.Select):
            self.loads(node.condition, covered=covered)
            condition, shortcuts = self.index(node.condition), self.claims.shortcuts
            with self.claims.under(shortcuts=(*shortcuts, condition)):
                self.loads(node.true_value, covered=covered)
            with self.claims.under(shortcuts=(*shortcuts, operation("not", condition))):
                self.loads(node.false_value, covered=covered)
        elif isinstance(node, tirx.Ramp):
            self.loads(node.base)
            self.loads(node.stride)
        elif isinstance(node, tirx.Shuffle):
            for part in (*node.vectors, *node.indices):
                self.loads(part)
        elif isinstance(node, tirx.Let):
            with self.claims.under(shortcuts=()):
                self.loads(node.value, covered=True)
                self.env[node.var] = self.index(node.value, names=node.var)
            self.loads(node.body, covered=covered)
        elif isinstance(node, Call):
            self.call(node, covered)
        else:
            self.problem(f"an expression of the kind {type(node).__name__}")

    def beyond(self, node: tirx.And | tirx.Or) -> None:
        """The right side of ``and`` and ``or``, which is left out where the left side decides."""
        first = self.index(node.a)
        reached = first if isinstance(node, tirx.And) else operation("not", first)
        with self.claims.under(shortcuts=(*self.claims.shortcuts, reached)):
            self.loads(node.b, covered=True)

    def call(self, node: Call, covered: bool) -> None:
        name = operator_name(node)
        if name == "prim.if_then_else":
            condition = self.index(node.args[0])
            self.loads(node.args[0], covered=True)
            with self.claims.under((condition,)):
                self.loads(node.args[1], covered=covered)
            with self.claims.under((operation("not", condition),)):
                self.loads(node.args[2], covered=covered)
            return
        if name in ("tirx.address_of", "tirx.buffer_data"):
            # What happens to memory through a pointer is the business of who is given it.
            return
        arguments = (
            node.args[1:] if isinstance(node.args[0] if len(node.args) else None, tvm.ir.StringImm) else node.args
        )
        if name in SHUFFLES:
            self.shuffle_width(node)
            mask, around = self.masks.mask(node.args[0]), (*self.claims.choices, *self.claims.shortcuts)
            if mask is ACTIVE and isinstance(node.args[0], TensorLoad):
                # It was taken before the lanes parted.
                mask = None if any(c.opaque or self.thread in c.axes for c in around) else mask
            if mask is None:
                self.problem(f"the mask {node.args[0]} of a shuffle")
            else:
                self.items.append(WarpMeeting(None if mask is ACTIVE else mask, around, self.statement))
        if not only_calculates(name) and name not in NO_MEMORY:
            self.problem(f"a call of {name} in an expression")
        if any(self.pointer(a) is not None for a in arguments):
            self.problem(f"a pointer handed to {name}")
        for argument in arguments:
            self.loads(argument, covered=covered and name == "prim.likely")

    def pointer(self, node: Any) -> Address | None:
        """What an expression points to; ``None`` where it is no pointer that the checker can follow."""
        if isinstance(node, tvm.ir.Var):
            return self.places.get(node)
        if not isinstance(node, Call):
            return None
        name = operator_name(node)
        if name == "tirx.buffer_data":
            return self.places.get(node.args[0])
        if name == "tirx.address_of" and isinstance(node.args[0], TensorLoad):
            load = node.args[0]
            base = self.places.get(load.source)
            if base is None or len(load.indices) != 1:
                return None
            self.loads(load.indices[0], covered=True)
            unit = bytes_of(str(load.source.dtype))
            offset = add(base.offset, operation("mul", self.index(load.indices[0], address=True), const(unit)))
            return Address(base.memory, offset, base.within)
        return None

    def element(self, buffer: Any, indices: Any, writes: bool, dtype: str) -> None:
        """Record an access of a buffer's element, or of one element for each lane."""
        place = self.places.get(buffer)
        if place is None or len(indices) != 1:
            self.problem(f"an access of the buffer {buffer.name}")
            return
        index = indices[0]
        unit = bytes_of(str(buffer.dtype))
        width = unit
        if isinstance(index, tirx.Ramp):
            lanes, stride = const_int(index.lanes), self.index(index.stride)
            if stride.op == "const" and stride.value == 1:
                offset, width = self.index(index.base, address=True), unit * lanes
            else:
                offset = self.index(index, variable(Axis("lane", lanes)), address=True)
        elif bytes_of(dtype) == unit * lanes_of(index) != unit:
            offset = self.index(index, variable(Axis("lane", lanes_of(index))), address=True)
        elif bytes_of(dtype) != unit:
            self.problem(f"an access of {dtype} in the buffer {buffer.name}")
            return
        else:
            offset = self.index(index, address=True)
        where = Address(place.memory, add(place.offset, operation("mul", offset, const(unit))), place.within)
        # Vectors of CUDA are aligned to their size, but for those of three elements.
        alignment = width if width & (width - 1) == 0 and width <= _WIDEST else 1
        conditions = (*self.claims.choices, *self.claims.shortcuts)
        self.items.append(MemoryAccess(where, width, writes, conditions, "thread", self.statement, alignment))
