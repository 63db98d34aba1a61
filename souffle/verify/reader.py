"""Read the TensorIR of a stage function into the checker's own form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import const_int, dtype_of
from souffle.verify.accesses import Access, Branch, Claim, Function, Item, Loop, Meeting, Memory, Place, Transfer, Wait
from souffle.verify.by_data import settled, uniform
from souffle.verify.effects import IGNORED, NO_MEMORY, SHUFFLES, WHOLE_WARPS, Effect, effect_of
from souffle.verify.expressions import Axis, Expr, Undecided, add, const, interval, operation, variable
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
from souffle.verify.lane_masks import ACTIVE, ALL_LANES, LaneMasks
from souffle.verify.vocabulary import only_calculates

__all__ = ["read_function"]

_LEAVES = (tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm, tvm.ir.Var)
_WIDEST = 16
"""Bytes of the widest access of a thread."""

_COMMIT, _WAIT = "souffle_copy_commit", re.compile(r"souffle_copy_wait<(\d+)>")
_NAMED = re.compile(r"souffle_named_barrier<(\d+), *(\d+)>")
"""``bar.sync number, count``."""


def _bytes_in(buffer: Any) -> int:
    count = bytes_of(str(buffer.dtype))
    for extent in buffer.shape:
        count *= const_int(extent)
    return count


def read_function(name: str, func: tirx.PrimFunc, tiles: int, threads: int) -> Function:
    """A stage function ``f(tile, tid, pointers...)`` that is called for so many tiles by so many threads each.

    What cannot be read is noted in the result's `problems`; it never raises.
    """
    return _Reader(name, func, tiles, threads).read()


class _Reader:
    def __init__(self, name: str, func: tirx.PrimFunc, tiles: int, threads: int) -> None:
        self.name = name
        self.func = func
        self.tile, self.thread = Axis("tile", tiles), Axis("tid", threads)
        self.env: dict[Any, Expr] = {}
        self.places: dict[Any, Place] = {}
        self.sizes: dict[Any, int] = {}
        self.memories: list[Memory] = []
        self.problems: dict[str, None] = {}
        self.items: list[Item] = []
        self.statement: Any = None
        # Elements of each fragment in an array of them.
        self.fragments: dict[Memory, int] = {}
        # Elements that were read since something may have been written: reading one again gives the same number.
        self.known: dict[tuple[Memory, Expr, str], Expr] = {}
        # Variables that have one value for all threads of a tile.
        self.alike: set[Any] = set()
        self.masks = LaneMasks(self.places, self.thread, self.index)
        self.claims = Claims()
        # What was claimed, and the conditions of the branches around the statement that is read.
        self.claimed: dict[tuple, Claim] = {}
        self.around: tuple[Expr, ...] = ()

    def read(self) -> Function:
        first, second, *pointers = self.func.params
        self.env[first], self.env[second] = variable(self.tile), variable(self.thread)
        parameters = []
        for number, pointer in enumerate(pointers):
            unit = bytes_of(str(pointer.ty.element_type.dtype))
            memory = Memory("global", str(pointer.name), 0, unit, number)
            self.places[pointer] = Place(memory, const(0))
            parameters.append(memory)
        body = settled(self.inside(self.func.body))
        problems = tuple(self.problems)
        axes = (self.tile, self.thread)
        memories, claims = tuple(self.memories), tuple(self.claimed.values())
        return Function(self.name, *axes, body, memories, tuple(parameters), problems, claims)

    def problem(self, text: str) -> None:
        self.problems[text] = None

    # Statements

    def inside(self, body: Any, *conditions: Expr) -> tuple[Item, ...]:
        """The items of a statement, apart, which is reached where `conditions` hold."""
        outer, around = self.items, self.around
        self.items, self.around = [], (*around, *conditions)
        if body is not None:
            self.visit(body)
        found, self.items, self.around = tuple(self.items), outer, around
        return found

    def visit(self, node: Any) -> None:
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                self.visit(part)
            return
        self.statement = node
        if isinstance(node, tirx.AttrStmt):
            if node.attr_key not in ("extern_scope", "reduce_scope", "fragment_shape", "fragment_layout"):
                self.problem(f"the attribute {node.attr_key}")
            self.visit(node.body)
        elif isinstance(node, tirx.For):
            self.loop(node)
        elif isinstance(node, tirx.IfThenElse):
            self.loads(node.condition, covered=True)
            condition, alike = self.index(node.condition), self.uniform(node.condition)
            known, masks = dict(self.known), self.masks.divided(condition)
            self.masks = masks.copy()
            then = self.inside(node.then_case, condition)
            self.known, after = known, self.masks
            self.masks = masks.copy()
            otherwise = self.inside(node.else_case, operation("not", condition))
            self.masks = masks.both(after, self.masks)
            self.known.clear()
            if condition.op == "const":
                self.items += then if condition.value else otherwise
            elif then or otherwise:
                self.items.append(Branch(condition, then, otherwise, node, alike))
        elif isinstance(node, tirx.Bind):
            self.loads(node.value, covered=True)
            place = self.pointer(node.value)
            if place is not None:
                self.places[node.var] = place
            else:
                self.env[node.var] = self.index(node.value, names=node.var)
                if self.uniform(node.value):
                    self.alike.add(node.var)
        elif isinstance(node, tirx.AllocBuffer):
            self.allocate(node.buffer)
        elif isinstance(node, tirx.DeclBuffer):
            place = self.pointer(node.data)
            if place is None:
                self.problem(f"the memory of the buffer {node.buffer.name}")
            else:
                self.places[node.buffer] = self.declared(place, node.buffer)
        elif isinstance(node, tirx.BufferStore):
            self.loads(node.value)
            for index in node.indices:
                self.loads(index, covered=True)
            self.element(node.buffer, node.indices, True, dtype_of(node.value))
            self.masks.store(node)
            self.known.clear()
        elif isinstance(node, tirx.Evaluate):
            self.known.clear()
            self.effect(node.value)
            self.known.clear()
        else:
            self.problem(f"a statement of the kind {type(node).__name__}")

    def loop(self, node: tirx.For) -> None:
        low, extent = self.index(node.min), self.index(node.extent)
        most = interval(extent)[1]
        kinds = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED)
        if node.kind not in kinds or node.step is not None or extent.opaque or low.opaque or most > 2**31:
            self.problem(f"the loop over {node.loop_var.name}")
            return
        if most <= 0:
            return
        axis = Axis(str(node.loop_var.name), most)
        self.env[node.loop_var] = add(low, variable(axis))
        self.known.clear()
        masks = self.masks.around(node.body)
        self.masks = masks.copy()
        turned = () if extent.op == "const" else (operation("lt", variable(axis), extent),)
        body = self.inside(node.body, *turned)
        self.masks = masks
        self.known.clear()
        if turned:
            body = (Branch(turned[0], body, (), node),)
        if body:
            self.items.append(Loop(axis, body))

    def allocate(self, buffer: Any) -> None:
        scope = str(buffer.scope())
        kind = "shared" if scope in ("shared", "shared.dyn") else "local"
        if kind == "local" and scope != "local" and not scope.startswith("wmma."):
            self.problem(f"memory of the scope {scope}")
        nbytes = _bytes_in(buffer)
        memory = Memory(kind, str(buffer.name), nbytes, bytes_of(str(buffer.dtype)), pool=scope == "shared.dyn")
        self.memories.append(memory)
        self.places[buffer] = Place(memory, const(0), (0, nbytes))

    def declared(self, place: Place, buffer: Any) -> Place:
        """A buffer at a place; its accesses stay in what it declares, and in what is allocated."""
        if place.offset.op != "const":
            return Place(place.memory, place.offset)
        first, last = place.offset.value, place.offset.value + _bytes_in(buffer)
        if place.memory.kind != "global":
            first, last = max(0, first), min(last, place.memory.nbytes)
        return Place(place.memory, place.offset, (first, last))

    # Expressions

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
        if isinstance(node, _LEAVES):
            return
        if self.claims.shortcuts and is_hoisted(node):
            with self.claims.under(shortcuts=()):
                self.loads(node, covered=covered)
            return
        if type(node) in BINARY:
            whole = not is_float(node.a)
            if whole and not covered:
                self.index(node)
            self.loads(node.a, covered=whole)
            with self.beyond(node):
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

    @contextmanager
    def beyond(self, node: Any) -> Iterator[None]:
        """The right side of an operation: of ``and`` and ``or`` it is left out where the left side decides."""
        shortcuts = self.claims.shortcuts
        if isinstance(node, (tirx.And, tirx.Or)) and lanes_of(node) == 1:
            first = self.index(node.a)
            shortcuts = (*shortcuts, first if isinstance(node, tirx.And) else operation("not", first))
        with self.claims.under(shortcuts=shortcuts):
            yield

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
            mask, around = self.masks.mask(node.args[0]), (*self.claims.choices, *self.claims.shortcuts)
            if mask is ACTIVE and isinstance(node.args[0], TensorLoad):
                # It was taken before the lanes parted.
                mask = None if any(c.opaque or self.thread in c.axes for c in around) else mask
            if mask is None:
                self.problem(f"the mask {node.args[0]} of a shuffle")
            else:
                self.items.append(Meeting(None if mask is ACTIVE else mask, around, self.statement))
        if not only_calculates(name) and name not in NO_MEMORY:
            self.problem(f"a call of {name} in an expression")
        if any(self.pointer(a) is not None for a in arguments):
            self.problem(f"a pointer handed to {name}")
        for argument in arguments:
            self.loads(argument, covered=covered and name == "prim.likely")

    def pointer(self, node: Any) -> Place | None:
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
            return Place(base.memory, offset, base.within)
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
        where = Place(place.memory, add(place.offset, operation("mul", offset, const(unit))), place.within)
        # Vectors of CUDA are aligned to their size, but for those of three elements.
        alignment = width if width & (width - 1) == 0 and width <= _WIDEST else 1
        conditions = (*self.claims.choices, *self.claims.shortcuts)
        self.items.append(Access(where, width, writes, conditions, "thread", self.statement, alignment))

    # Calls as statements

    def effect(self, call: Any) -> None:
        if not isinstance(call, Call):
            self.loads(call)
            return
        name = operator_name(call)
        wait, named = _WAIT.fullmatch(name), _NAMED.fullmatch(name)
        if name in WHOLE_WARPS:
            self.items.append(Meeting(const(ALL_LANES), (), self.statement))
        if name == "tirx.tvm_storage_sync":
            scope = str(call.args[0].value)
            # TVM's CUDA generator writes nothing for that of a warp: it orders nothing.
            if scope not in ("shared", "shared.dyn", "warp") or len(call.args) > 1:
                self.problem(f"the barrier {call}")
            elif scope != "warp":
                self.items.append(Wait("block", self.statement))
        elif name in ("tirx.cuda.grid_sync", "souffle_wait_for_grid"):
            self.items.append(Wait("grid", self.statement))
        elif name == "tirx.cuda.warp_sync":
            self.items.append(Wait("warp", self.statement))
        elif name == "tirx.cuda.cta_sync":
            self.items.append(Wait("block", self.statement))
        elif named:
            self.items.append(Wait("part", self.statement, int(named.group(1)), int(named.group(2))))
        elif name == _COMMIT or wait:
            self.items.append(Transfer(int(wait.group(1)) if wait else None, self.statement))
        elif name == "tirx.tvm_fill_fragment":
            self.fragment(*call.args[:5])
        elif name == "tirx.tvm_mma_sync":
            for data, index in zip(call.args[0::2], call.args[1::2], strict=True):
                place = self.pointer(data)
                self.held(place, index, 0 if place is None else self.fragments.get(place.memory, 0))
        elif name in ("tirx.tvm_load_matrix_sync", "tirx.tvm_store_matrix_sync"):
            self.matrix(call, writes=name == "tirx.tvm_store_matrix_sync")
        elif name in IGNORED:
            pass
        elif str(getattr(call.op, "name", "")) == "tirx.call_extern":
            self.external(name, call.args[1:])
        else:
            self.loads(call)

    def matrix(self, call: Call, *, writes: bool) -> None:
        """A fragment to or from memory: rows of the matrix, or columns, `stride` elements apart."""
        fragment, m, n, k, index, pointer, stride, layout = call.args
        place, shape = self.pointer(pointer), self.fragment(fragment, m, n, k, index)
        load = pointer.args[0] if isinstance(pointer, Call) and len(pointer.args) else None
        layouts = ("row_major", "col_major", "mem_row_major", "mem_col_major")
        if place is None or shape is None or not isinstance(load, TensorLoad) or str(layout.value) not in layouts:
            self.problem(f"the fragment's memory in {call}")
            return
        rows, columns = shape
        if "col" in str(layout.value):
            rows, columns = columns, rows
        unit = bytes_of(str(load.source.dtype))
        row = variable(Axis("row", rows))
        apart = operation("mul", operation("mul", row, self.index(stride)), const(unit))
        where = Place(place.memory, add(place.offset, apart), place.within)
        self.items.append(Access(where, columns * unit, writes, (), "warp", self.statement))

    def fragment(self, data: Any, m: Any, n: Any, k: Any, index: Any) -> tuple[int, int] | None:
        """Rows and columns of a fragment, which is one of those that its array holds."""
        m, n, k = const_int(m), const_int(n), const_int(k)
        shapes = {"wmma.matrix_a": (m, k), "wmma.matrix_b": (k, n), "wmma.accumulator": (m, n)}
        shape = shapes.get(str(data.args[0].scope()) if isinstance(data, Call) else "")
        place = self.pointer(data)
        if place is not None and shape is not None:
            self.fragments[place.memory] = shape[0] * shape[1]
        self.held(place, index, 0 if shape is None else shape[0] * shape[1])
        return shape

    def held(self, place: Place | None, index: Any, elements: int) -> None:
        """The fragment of a number, of so many elements each."""
        if place is None or not elements or place.memory.kind != "local":
            self.problem("a fragment of a shape that is not known")
            return
        nbytes = elements * place.memory.unit
        where = add(place.offset, operation("mul", self.index(index), const(nbytes)))
        self.items.append(Access(Place(place.memory, where, place.within), nbytes, False, (), "thread", self.statement))

    def external(self, name: str, arguments: Any) -> None:
        effects = effect_of(name)
        pointers = {i: self.pointer(a) for i, a in enumerate(arguments)}
        if effects is None:
            self.problem(f"a call of {name}")
            return
        named = {e.argument for e in effects}
        if any(p is not None and i not in named for i, p in pointers.items()) or any(
            pointers.get(i) is None for i in named
        ):
            self.problem(f"the pointers handed to {name}")
            return
        for i, argument in enumerate(arguments):
            if i not in named:
                self.loads(argument)
        for effect in effects:
            self.touch(effect, pointers[effect.argument], arguments)

    def touch(self, effect: Effect, place: Place, arguments: Any) -> None:
        conditions = ()
        if effect.condition is not None:
            conditions = (operation("ne", self.index(arguments[effect.condition]), const(0)),)
        if effect.distance is not None:
            apart = operation("mul", self.index(arguments[effect.distance[0]]), const(effect.distance[1]))
            step = operation("mul", variable(Axis("part", effect.repeats)), apart)
            place = Place(place.memory, add(place.offset, step), place.within)
        if effect.writes:
            self.masks.forget(place.memory)
        if effect.by == "copy" and place.memory.kind != ("shared" if effect.writes else "global"):
            self.problem(f"an asynchronous copy of {place.memory.kind} memory")
        for writes, wanted in ((False, effect.reads), (True, effect.writes)):
            if wanted:
                by = effect.by if place.memory.kind != "local" else "thread"
                access = Access(place, effect.width, writes, conditions, by, self.statement, effect.alignment)
                self.items.append(access)
