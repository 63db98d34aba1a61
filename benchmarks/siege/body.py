"""Writes the TensorIR of a stage function, statement by statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_warp_sync

from souffle.schedule.lower import cuda_target
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["ARCH", "FULL_MASK", "Body", "as_kernel", "as_stage", "call", "number", "pointer", "shuffle"]

ARCH = "sm_90"
FULL_MASK = 2**32 - 1
_ALIGNMENT = 16
_KINDS = {"serial": tirx.ForKind.SERIAL, "unrolled": tirx.ForKind.UNROLLED}


def pointer(name: str, dtype: str = "float32") -> tirx.Var:
    """A parameter that points to global memory."""
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))


def number(value: int, dtype: str = "int32") -> PrimExpr:
    """A literal."""
    return tirx.const(value, dtype)


def call(name: str, *arguments: object) -> tirx.Stmt:
    """A call of a device function by name."""
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))


def shuffle(kind: str, mask: object, value: PrimExpr, other: object, width: int = 32) -> PrimExpr:
    """What another lane of the warp holds; `kind` as in ``__shfl_xor_sync``."""
    return tirx.call_intrin("float32", f"tirx.cuda.__shfl{kind}_sync", mask, value, other, width)


def as_stage(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the attributes of a stage's, which become ``__device__`` and ``__restrict__``."""
    return func.with_attr("tirx.noalias", True).with_attr("calling_conv", 0).with_attr("target", cuda_target(ARCH))


def as_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the attributes of a kernel's."""
    func = func.with_attr("target", cuda_target(ARCH)).with_attr("calling_conv", 2)
    return func.with_attr("tirx.is_global_func", True)


class Body:
    """A stage function that is being written.

    Parameters
    ----------
    name : str
    tensors : sequence of (elements, dtype)
        What its pointers point to.

    Attributes
    ----------
    tile, tid : Var
    tensors : tuple of Buffer
    shared_bytes, static_bytes : int
        Of the pool and of static arrays, so far.
    """

    def __init__(self, name: str, tensors: Sequence[tuple[int, str]]) -> None:
        self.name = name
        self.tile, self.tid = tirx.Var("tile", "int32"), tirx.Var("tid", "int32")
        self.pointers = [pointer(f"p{i}", dtype) for i, (_, dtype) in enumerate(tensors)]
        self.tensors = tuple(tirx.decl_buffer((n,), dtype, name=f"t{i}") for i, (n, dtype) in enumerate(tensors))
        self.shared_bytes = self.static_bytes = 0
        self._arrays: list[tuple[tirx.Buffer, int | None]] = []
        self._blocks: list[list[tirx.Stmt]] = [[]]
        self._names = 0

    # Memory

    def shared(
        self, count: int, dtype: str = "float32", *, static: bool = False, over: tirx.Buffer | None = None
    ) -> tirx.Buffer:
        """An array in the pool that all stages of a kernel share, over another one there, or of the function's own."""
        buffer = tirx.decl_buffer((count,), dtype, name=self.named("s"), scope="shared")
        offset, nbytes = None, count * tvm.DataType(dtype).bits // 8
        if over is not None:
            offset = next(place for array, place in self._arrays if array.same_as(over))
            self.shared_bytes = max(self.shared_bytes, offset + nbytes)
        elif static:
            self.static_bytes += nbytes
        else:
            offset = -(-self.shared_bytes // _ALIGNMENT) * _ALIGNMENT
            self.shared_bytes = offset + nbytes
        self._arrays.append((buffer, offset))
        return buffer

    def registers(self, count: int, dtype: str = "float32") -> tirx.Buffer:
        """An array of each thread's own."""
        buffer = tirx.decl_buffer((count,), dtype, name=self.named("r"), scope="local")
        self._arrays.append((buffer, None))
        return buffer

    def named(self, stem: str) -> str:
        """A name that the function has not yet."""
        self._names += 1
        return f"{stem}{self._names}"

    # Statements

    def do(self, *statements: tirx.Stmt) -> None:
        """The next statements."""
        self._blocks[-1] += statements

    def store(self, buffer: tirx.Buffer, index: object, value: PrimExpr) -> None:
        """Write an element, or several at a ramp."""
        self.do(tirx.BufferStore(buffer, value, [index]))

    def bind(self, value: PrimExpr) -> tirx.Var:
        """A number with a name."""
        var = tirx.Var(self.named("v"), str(value.ty.dtype))
        self.do(tirx.Bind(var, value))
        return var

    def barrier(self, scope: str = "block", count: int = 0) -> None:
        """All threads of the block wait, those of the warp, or the first `count` of the block (``"part"``)."""
        if scope == "part":
            self.do(call(f"souffle_named_barrier<1, {count}>"))
        elif scope == "warp":
            self.do(tirx.Evaluate(cuda_warp_sync()))
        else:
            self.do(tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared")))

    def copy(self, width: int, into: PrimExpr, source: PrimExpr, whether: PrimExpr | None = None) -> None:
        """An asynchronous copy of so many bytes between two elements, or of zeros."""
        name = f"souffle_copy_async<{width}>" if whether is None else f"souffle_copy_async_or_zero<{width}>"
        more = () if whether is None else (whether,)
        self.do(call(name, tirx.address_of(into), tirx.address_of(source), *more))

    def commit(self) -> None:
        """Close a group of copies."""
        self.do(call("souffle_copy_commit"))

    def wait(self, pending: int) -> None:
        """Wait for all but so many groups."""
        self.do(call(f"souffle_copy_wait<{pending}>"))

    @contextmanager
    def loop(self, extent: object, kind: str = "serial", first: int = 0) -> Iterator[PrimExpr]:
        """What follows, so many times; the loop's own variable begins at `first`, what is given at 0."""
        var = tirx.Var(self.named("k"), "int32")
        self._blocks.append([])
        yield var - first if first else var
        self.do_popped(lambda inner: tirx.For(var, first, extent, _KINDS[kind], inner))

    @contextmanager
    def when(self, condition: object) -> Iterator[None]:
        """What follows, where the condition holds; ``True`` for always."""
        if condition is True:
            yield
            return
        self._blocks.append([])
        yield
        self.do_popped(lambda inner: tirx.IfThenElse(condition, inner, None))

    def do_popped(self, around) -> None:
        """Close the innermost block with a statement around it."""
        inner = self._blocks.pop()
        self.do(around(_sequence(inner)))

    def function(self) -> tirx.PrimFunc:
        """The whole."""
        before: list[tirx.Stmt] = []
        pool = tirx.decl_buffer((max(1, self.shared_bytes),), "uint8", name="pool", scope="shared.dyn")
        if self.shared_bytes:
            before.append(tirx.AllocBuffer(pool))
        before += [tirx.DeclBuffer(t, data=p) for t, p in zip(self.tensors, self.pointers, strict=True)]
        for buffer, offset in self._arrays:
            own = tirx.AllocBuffer(buffer)
            before.append(own if offset is None else tirx.DeclBuffer(buffer, data=tirx.address_of(pool[offset])))
        body = _sequence([*before, *self._blocks[0]])
        func = tirx.PrimFunc([self.tile, self.tid, *self.pointers], body)
        return as_stage(func.with_attr("global_symbol", self.name))


def _sequence(statements: list[tirx.Stmt]) -> tirx.Stmt:
    return sequence(*statements) if statements else tirx.Evaluate(number(0))
