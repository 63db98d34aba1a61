"""Read the TensorIR of a stage function into the checker's own form."""

from __future__ import annotations

import re
from typing import Any

from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import StatementVisitor, const_int, dtype_of
from souffle.verify.accesses import (
    Address,
    BarrierWait,
    Branch,
    Function,
    Item,
    Memory,
    MemoryAccess,
    SerialLoop,
    Transfer,
    WarpMeeting,
)
from souffle.verify.data_addresses import settled
from souffle.verify.device_effects import IGNORED, WHOLE_WARPS, Effect, effect_of
from souffle.verify.expression_reader import ExpressionReader
from souffle.verify.expressions import Axis, Expr, add, const, interval, operation, variable
from souffle.verify.indices import bytes_of, operator_name
from souffle.verify.lane_masks import ALL_LANES

__all__ = ["read_function"]

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


class _Reader(StatementVisitor, ExpressionReader):
    def __init__(self, name: str, func: tirx.PrimFunc, tiles: int, threads: int) -> None:
        super().__init__(Axis("tile", tiles), Axis("tid", threads))
        self.name = name
        self.func = func
        self.memories: list[Memory] = []
        self.loops: tuple[Axis, ...] = ()
        # Elements of each fragment in an array of them.
        self.fragments: dict[Memory, int] = {}

    def read(self) -> Function:
        first, second, *pointers = self.func.params
        self.env[first], self.env[second] = variable(self.tile), variable(self.thread)
        parameters = []
        for number, pointer in enumerate(pointers):
            unit = bytes_of(str(pointer.ty.element_type.dtype))
            memory = Memory("global", str(pointer.name), 0, unit, number)
            self.places[pointer] = Address(memory, const(0))
            parameters.append(memory)
        body = settled(self.inside(self.func.body))
        problems = tuple(self.problems)
        axes = (self.tile, self.thread)
        memories, claims = tuple(self.memories), tuple(self.claimed.values())
        return Function(self.name, *axes, body, memories, tuple(parameters), problems, claims)

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
        self.statement = node
        super().visit(node)

    def visit_attr(self, node: tirx.AttrStmt) -> None:
        if node.attr_key not in ("extern_scope", "reduce_scope", "fragment_shape", "fragment_layout"):
            self.problem(f"the attribute {node.attr_key}")
        self.visit(node.body)

    def visit_if_then_else(self, node: tirx.IfThenElse) -> None:
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

    def visit_bind(self, node: tirx.Bind) -> None:
        self.loads(node.value, covered=True)
        place = self.pointer(node.value)
        if place is not None:
            self.places[node.var] = place
        else:
            self.env[node.var] = self.index(node.value, names=node.var)
            if self.uniform(node.value):
                self.alike.add(node.var)

    def visit_decl_buffer(self, node: tirx.DeclBuffer) -> None:
        place = self.pointer(node.data)
        if place is None:
            self.problem(f"the memory of the buffer {node.buffer.name}")
        else:
            self.places[node.buffer] = self.declared(place, node.buffer)

    def visit_buffer_store(self, node: tirx.BufferStore) -> None:
        self.loads(node.value)
        for index in node.indices:
            self.loads(index, covered=True)
        self.element(node.buffer, node.indices, True, dtype_of(node.value))
        self.masks.store(node)
        self.known.clear()

    def visit_evaluate(self, node: tirx.Evaluate) -> None:
        self.known.clear()
        self.effect(node.value)
        self.known.clear()

    def visit_other(self, node: Any) -> None:
        self.problem(f"a statement of the kind {type(node).__name__}")

    def visit_for(self, node: tirx.For) -> None:
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
        outer, self.loops = self.loops, (*self.loops, axis)
        body = self.inside(node.body, *turned)
        self.masks, self.loops = masks, outer
        self.known.clear()
        if turned:
            body = (Branch(turned[0], body, (), node),)
        if body:
            self.items.append(SerialLoop(axis, body))

    def visit_alloc_buffer(self, node: tirx.AllocBuffer) -> None:
        buffer, scope = node.buffer, str(node.buffer.scope())
        kind = "shared" if scope in ("shared", "shared.dyn") else "local"
        if kind == "local" and scope != "local" and not scope.startswith("wmma."):
            self.problem(f"memory of the scope {scope}")
        nbytes = _bytes_in(buffer)
        unit = bytes_of(str(buffer.dtype))
        memory = Memory(kind, str(buffer.name), nbytes, unit, pool=scope == "shared.dyn", loops=self.loops)
        self.memories.append(memory)
        self.places[buffer] = Address(memory, const(0), (0, nbytes))

    def declared(self, place: Address, buffer: Any) -> Address:
        """A buffer at a place; its accesses stay in what it declares, and in what is allocated."""
        if place.offset.op != "const":
            return Address(place.memory, place.offset)
        first, last = place.offset.value, place.offset.value + _bytes_in(buffer)
        if place.memory.kind != "global":
            first, last = max(0, first), min(last, place.memory.nbytes)
        return Address(place.memory, place.offset, (first, last))

    # Calls as statements

    def effect(self, call: Any) -> None:
        if not isinstance(call, Call):
            self.loads(call)
            return
        name = operator_name(call)
        wait, named = _WAIT.fullmatch(name), _NAMED.fullmatch(name)
        if name in WHOLE_WARPS:
            self.items.append(WarpMeeting(const(ALL_LANES), (), self.statement))
        if name == "tirx.tvm_storage_sync":
            scope = str(call.args[0].value)
            # TVM's CUDA generator writes nothing for that of a warp: it orders nothing.
            if scope not in ("shared", "shared.dyn", "warp") or len(call.args) > 1:
                self.problem(f"the barrier {call}")
            elif scope != "warp":
                self.items.append(BarrierWait("block", self.statement))
        elif name in ("tirx.cuda.grid_sync", "souffle_wait_for_grid", "souffle_watched_wait_for_grid"):
            self.items.append(BarrierWait("grid", self.statement))
        elif name == "tirx.cuda.warp_sync":
            self.items.append(BarrierWait("warp", self.statement))
        elif name == "tirx.cuda.cta_sync":
            self.items.append(BarrierWait("block", self.statement))
        elif named:
            self.items.append(BarrierWait("part", self.statement, int(named.group(1)), int(named.group(2))))
        elif name == _COMMIT or wait:
            self.items.append(Transfer(int(wait.group(1)) if wait else None, self.statement))
        elif name == "tirx.tvm_fill_fragment":
            self.fragment(*call.args[:5], writes=True)
        elif name == "tirx.tvm_mma_sync":
            result, *factors = zip(call.args[0::2], call.args[1::2], strict=True)
            for data, index in (*factors, result):
                place = self.pointer(data)
                elements = 0 if place is None else self.fragments.get(place.memory, 0)
                self.held(place, index, elements, writes=data is result[0])
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
        place, shape = self.pointer(pointer), self.fragment(fragment, m, n, k, index, writes=not writes)
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
        where = Address(place.memory, add(place.offset, apart), place.within)
        self.items.append(MemoryAccess(where, columns * unit, writes, (), "warp", self.statement))

    def fragment(self, data: Any, m: Any, n: Any, k: Any, index: Any, *, writes: bool) -> tuple[int, int] | None:
        """Rows and columns of a fragment, which is one of those that its array holds."""
        m, n, k = const_int(m), const_int(n), const_int(k)
        shapes = {"wmma.matrix_a": (m, k), "wmma.matrix_b": (k, n), "wmma.accumulator": (m, n)}
        shape = shapes.get(str(data.args[0].scope()) if isinstance(data, Call) else "")
        place = self.pointer(data)
        if place is not None and shape is not None:
            self.fragments[place.memory] = shape[0] * shape[1]
        self.held(place, index, 0 if shape is None else shape[0] * shape[1], writes=writes)
        return shape

    def held(self, place: Address | None, index: Any, elements: int, *, writes: bool) -> None:
        """The fragment of a number, of so many elements each."""
        if place is None or not elements or place.memory.kind != "local":
            self.problem("a fragment of a shape that is not known")
            return
        nbytes = elements * place.memory.unit
        where = add(place.offset, operation("mul", self.index(index), const(nbytes)))
        there = Address(place.memory, where, place.within)
        self.items.append(MemoryAccess(there, nbytes, writes, (), "thread", self.statement))

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

    def touch(self, effect: Effect, place: Address, arguments: Any) -> None:
        conditions = ()
        if effect.condition is not None:
            conditions = (operation("ne", self.index(arguments[effect.condition]), const(0)),)
        if effect.distance is not None:
            apart = operation("mul", self.index(arguments[effect.distance[0]]), const(effect.distance[1]))
            step = operation("mul", variable(Axis("part", effect.repeats)), apart)
            place = Address(place.memory, add(place.offset, step), place.within)
        if effect.writes:
            self.masks.forget(place.memory)
        if effect.by == "copy" and place.memory.kind != ("shared" if effect.writes else "global"):
            self.problem(f"an asynchronous copy of {place.memory.kind} memory")
        for writes, wanted in ((False, effect.reads), (True, effect.writes)):
            if wanted:
                by = effect.by if place.memory.kind != "local" else "thread"
                access = MemoryAccess(place, effect.width, writes, conditions, by, self.statement, effect.alignment)
                self.items.append(access)
