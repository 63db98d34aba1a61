"""Masks of shuffles: written down where whole warps come to them, and not asked of the device.

TVM's reductions across threads shuffle among the lanes that ``__activemask()`` names. CUDA does not promise that a warp
is together there, and a lane that is late would be left out without a word::

    mask[0] = __activemask()                             mask[0] = 0xffffffff
    t[0] = __shfl_down_sync(mask[0], x[0], 16, 32)  →    t[0] = __shfl_down_sync(mask[0], x[0], 16, 32)

With all lanes named the device waits for all of them. That is legal where they all come: no condition and no loop
around the mask or a shuffle with it differs between lanes of a warp. Where the threads end within a warp, the mask of
that warp names those that there are. Elsewhere the mask stays what TVM wrote.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import (
    Analyzer,
    PrimExpr,
    StatementVisitor,
    collect,
    is_shuffle,
    only_calculates,
    substitute,
    variables,
)

__all__ = ["with_full_masks"]

_WARP = 32
_ALL_LANES = 2**32 - 1
_ACTIVE = ("tirx.cuda.__activemask", "tirx.tvm_warp_activemask")


def with_full_masks(body: tirx.Stmt, tid: tirx.Var, threads: int) -> tirx.Stmt:
    """A function's body with all lanes in place of the active ones, where all come.

    Parameters
    ----------
    body : Stmt
    tid : Var
        The linear index of the thread.
    threads : int
        Threads that run the body.
    """
    masks = _Masks(tid, threads)
    masks.visit(body, True)
    mask = tirx.const(_ALL_LANES, "uint32")
    if threads % _WARP:
        rest = tirx.const((1 << threads % _WARP) - 1, "uint32")
        mask = rest if threads < _WARP else tirx.Select(tid < threads // _WARP * _WARP, mask, rest)

    def named(store: tirx.BufferStore) -> tirx.BufferStore:
        if not (_is_active(store.value) and masks.is_whole(store.buffer)):
            return store
        return tirx.BufferStore(store.buffer, mask, store.indices)

    return structural_map(body, (tirx.BufferStore, named)) if masks.whole else body


class _Masks(StatementVisitor):
    """Which arrays hold nothing but the mask of active lanes, and are touched only where whole warps come.

    Each statement is visited with whether whole warps come to it.

    Attributes
    ----------
    whole : list of Var
        Arrays that are set to the active lanes where whole warps come.
    """

    def __init__(self, tid: tirx.Var, threads: int) -> None:
        self.whole: list[tirx.Var] = []
        self._broken: list[tirx.Var] = []
        self._lane = tirx.Var("lane", "int32")
        warp = tirx.Var("warp", "int32")
        self._analyzer = Analyzer()
        self._analyzer.bind(self._lane, tvm.ir.Range(0, _WARP))
        self._analyzer.bind(warp, tvm.ir.Range(0, -(-threads // _WARP)))
        self._values: dict[tirx.Var, PrimExpr] = {tid: warp * _WARP + self._lane}
        self._unknown: list[tirx.Var] = []

    def is_whole(self, buffer: tirx.Var) -> bool:
        """Whether an array's mask names all lanes wherever it is used."""
        return _among(buffer, self.whole) and not _among(buffer, self._broken)

    def visit_for(self, node: tirx.For, whole: bool) -> None:
        self.visit(node.body, whole and self._same(node.min) and self._same(node.extent))

    def visit_if_then_else(self, node: tirx.IfThenElse, whole: bool) -> None:
        self._loads(node.condition, whole=whole)
        whole = whole and self._same(node.condition)
        self.visit(node.then_case, whole)
        if node.else_case is not None:
            self.visit(node.else_case, whole)

    def visit_bind(self, node: tirx.Bind, whole: bool) -> None:
        if isinstance(node.value.ty, tvm.ir.PrimType) and only_calculates(node.value):
            self._values[node.var] = substitute(node.value, self._values)
        else:
            self._unknown.append(node.var)
        self._loads(node.value, whole=whole)

    def visit_buffer_store(self, node: tirx.BufferStore, whole: bool) -> None:
        # A mask within a choice, or of which more is known than that it names the active lanes, stays.
        (self.whole if whole and _is_active(node.value) else self._broken).append(node.buffer)
        self._loads(node.value, whole=whole)

    def visit_evaluate(self, node: tirx.Evaluate, whole: bool) -> None:
        self._loads(node.value, whole=whole)

    def visit_other(self, node: tirx.Stmt, whole: bool) -> None:
        """It is not known who comes to what is in it, or where the array is used that is declared in another."""
        self._broken += [load.source for load in collect(node, TensorLoad)]
        self._broken += [store.buffer for store in collect(node, tirx.BufferStore)]

    def _loads(self, node: PrimExpr, *, whole: bool) -> None:
        """Note what is read where parts of warps come, or is more than the mask of a shuffle."""
        masks = [call.args[0] for call in collect(node, tvm.ir.Call) if whole and is_shuffle(call)]
        self._broken += [load.source for load in collect(node, TensorLoad) if not _among(load, masks)]

    def _same(self, node: PrimExpr) -> bool:
        """Whether all lanes of a warp have one value of an expression, whatever memory holds."""
        if not only_calculates(node) or any(_among(var, self._unknown) for var in variables(node)):
            return False
        value = self._analyzer.simplify(substitute(node, self._values))
        return not _among(self._lane, list(variables(value)))


def _is_active(node: PrimExpr) -> bool:
    return isinstance(node, tvm.ir.Call) and str(getattr(node.op, "name", "")) in _ACTIVE


def _among(one: object, others: list) -> bool:
    return any(one.same_as(other) for other in others)
