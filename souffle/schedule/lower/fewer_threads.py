"""Stages with fewer threads than the kernel that calls them: barriers of those threads alone (paper §6.4).

A stage's barriers were made for blocks of its own size. In a kernel with more threads, the others do not call it, and a
barrier of the whole block would wait for them forever. So a second form of the stage waits at a named barrier of PTX,
``bar.sync id, count``, which lets its threads go when so many have come (the technique of HFuse). The count is in whole
warps. Where the stage's threads end within a warp, the rest of that warp calls it too: it comes to each barrier, and
everything between barriers is under the condition that the thread is one of the stage's own.

One barrier number serves all stages. A number may be used with another count as soon as nobody waits or arrives there
under the old one, and a kernel has a barrier of the whole block after each call of such a stage, which none of the
stage's threads reaches before its last named barrier has let it go. Number 0 is that of the whole block's barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import tvm
from tvm import tirx

from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.uniform_barriers import LoweringError, Spread, barrier_scope
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr

__all__ = ["BARRIER_FUNCTION", "fit_functions", "partial_function"]

BARRIER_FUNCTION = "souffle_named_barrier"
"""``bar.sync`` with a number and a count as template arguments (:mod:`souffle.codegen.device_functions`)."""

_SUFFIX = "_partial"
"""What is added to a stage's name for the form with barriers of its own threads."""

_NUMBER = 1
_WARP = 32
_ALL_LANES = 2**32 - 1
_WHOLE_WARPS = ("mma", "matrix_sync", "matrices", "add_product")
"""Parts of the names of instructions that all threads of a warp make together."""

_parts: WeakKeyDictionary[DeviceFunction, DeviceFunction] = WeakKeyDictionary()


def fit_functions(functions: Sequence[DeviceFunction]) -> dict[DeviceFunction, DeviceFunction]:
    """The form of each function in a kernel that calls all of these: its own, or :func:`partial_function`.

    Raises
    ------
    LoweringError
        If a function has no such form.
    """
    threads = max(function.threads for function in functions)
    while True:
        fitted = {f: partial_function(f) if f.has_barrier and f.threads < threads else f for f in functions}
        # Threads that fill up a warp may make the block larger, and a stage of the old size smaller than that.
        widest = max(function.threads for function in fitted.values())
        if widest == threads:
            return fitted
        threads = widest


def partial_function(function: DeviceFunction) -> DeviceFunction:
    """A function for kernels with more threads, in which its barriers wait for its own threads only; made once.

    Its `threads` are whole warps. One without barriers is as it was.

    Raises
    ------
    LoweringError
        If the function's threads end within a warp, and it has tensor-core instructions, which need whole warps, or a
        barrier under a condition or in a loop that is not the same for all threads.
    """
    if function.partial or not function.has_barrier:
        return function
    found = _parts.get(function)
    if found is None:
        func = function.func
        threads = -(-function.threads // _WARP) * _WARP
        if threads == function.threads:
            body = structural_map(func.body, (tirx.Evaluate, lambda node: _named(node, threads)))
        else:
            body = _Guard(function, threads).body()
        named = f"{function.name}{_SUFFIX}"
        found = replace(function, func=func.with_body(body), threads=threads, name=named, partial=True)
        _parts[function] = found
    return found


def _named(node: tirx.Evaluate, threads: int) -> tirx.Evaluate:
    """A block barrier as one of so many threads; anything else as it is."""
    if not isinstance(node.value, tvm.ir.Call) or barrier_scope(node.value) != "block":
        return node
    return tirx.Evaluate(tirx.call_extern("int32", f"{BARRIER_FUNCTION}<{_NUMBER}, {threads}>"))


class _Guard(Spread):
    """Puts what stands between barriers under the condition that the thread is one of the stage's own."""

    def __init__(self, function: DeviceFunction, threads: int) -> None:
        self.func = function.func
        self.own = function.threads
        self.threads = threads
        super().__init__(str(self.func.attrs["global_symbol"]), self.func.params[1], self.own)

    def body(self) -> tirx.Stmt:
        """The function's body for whole warps."""
        self.check_warps()
        return self.visit(self.func.body, self.func.params[1] < tirx.IntImm("int32", self.own))

    def refuse(self, why: str) -> LoweringError:
        return LoweringError(
            f"stage {self.name} has {self.own} threads, which end within a warp, and shares a kernel with stages of "
            f"more threads, but {why}; schedule it with a multiple of {_WARP} threads"
        )

    def visit_evaluate(self, node: tirx.Evaluate, inside: PrimExpr | None) -> tirx.Stmt:
        return _named(node, self.threads)

    def check_warps(self) -> None:
        """Instructions of whole warps are not for a warp of which only some threads are the stage's own."""

        found: dict[str, None] = {}

        def see(call: tvm.ir.Call) -> None:
            name = getattr(call.op, "name", "")
            if name == "tirx.call_extern":
                name = str(call.args[0].value)
            every = any(isinstance(a, tirx.IntImm) and int(a) % 2**32 == _ALL_LANES for a in call.args)
            if any(part in name for part in _WHOLE_WARPS) or ("shfl" in name and every):
                found[name] = None

        structural_walk(self.func.body, (tvm.ir.Call, see))
        if found:
            raise self.refuse(f"its instructions {', '.join(found)} need whole warps")
