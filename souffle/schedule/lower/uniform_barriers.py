"""Barriers that all threads come to: a condition that not all meet is put around what stands between them instead.

::

    if tid < 16:              v = if_then_else(tid < 16, a[tid] + a[tid + 16], 0)
        v = a[tid] + ...  →   warp barrier
        warp barrier          if tid < 16: a[tid] = v
        a[tid] = v
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_warp_sync
from tvm.ir.expr import TensorLoad

from souffle.errors import SouffleError
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import Analyzer, PrimExpr, StatementVisitor, dtype_of, sequence

__all__ = ["LoweringError", "Spread", "barrier_scope", "with_whole_warps"]

_BARRIERS = {"tirx.cuda.cta_sync": "block", "tirx.cuda.warp_sync": "warp", "tirx.cuda.grid_sync": "grid"}
"""Barriers of schedules that bring their own instructions."""

_Declaration = (tirx.AllocBuffer, tirx.DeclBuffer)


class LoweringError(SouffleError):
    """A scheduled stage could not be lowered; the message names it and the pass or the rule that it breaks."""


def barrier_scope(call: tvm.ir.Call) -> str | None:
    """Who waits at a call: ``"block"``, ``"warp"`` or ``"grid"``; ``None`` for a call that is no barrier."""
    name = getattr(call.op, "name", "")
    if name == "tirx.tvm_storage_sync":
        scope = str(call.args[0].value)
        return {"shared": "block", "shared.dyn": "block", "warp": "warp"}.get(scope, "grid")
    return _BARRIERS.get(name)


def with_whole_warps(name: str, body: tirx.Stmt, tid: tirx.Var, threads: int) -> tirx.Stmt:
    """A function's body with barriers of warps in its text, none under a condition that some of the warp do not meet.

    Where TVM 0.27 reduces across threads that are no whole warps (48 of a row), it puts ``tvm_storage_sync("warp")``
    between the steps, some under such conditions, and its CUDA generator writes nothing for them: right would be
    ``__syncwarp()``. A body without any is returned as it is.

    Parameters
    ----------
    name : str
        Of the stage, for messages.
    body : Stmt
    tid : Var
        The linear index of the thread.
    threads : int
        Threads that run the body.

    Raises
    ------
    LoweringError
        If a barrier stands in a loop whose turns differ between threads.
    """
    spread = Spread(name, tid, threads)
    if _SomeWarps(spread).found(body):
        body = spread.visit(body, None)
    return structural_map(body, (tirx.Evaluate, _written)) if "warp" in _scopes(body) else body


class Spread(StatementVisitor):
    """Puts conditions around what stands between barriers.

    All threads come to a statement that is visited, and those for which its condition holds run it; ``None`` for all.

    Parameters
    ----------
    name, tid, threads
        As for :func:`with_whole_warps`.
    """

    def __init__(self, name: str, tid: tirx.Var, threads: int) -> None:
        self.name = name
        self.analyzer = Analyzer()
        self.analyzer.bind(tid, tvm.ir.Range(0, threads))
        # Variables that may differ between threads, or that some threads have no value for.
        self.different: list[tirx.Var] = [tid]

    def refuse(self, why: str) -> LoweringError:
        """The error for a barrier that not all threads would come to."""
        return LoweringError(f"stage {self.name}: {why}")

    def visit(self, node: tirx.Stmt, inside: PrimExpr | None) -> tirx.Stmt:
        """The statement with barriers that all threads come to."""
        if isinstance(node, tirx.SeqStmt) or _scopes(node):
            return super().visit(node, inside)
        return _under(inside, node)

    def visit_evaluate(self, node: tirx.Evaluate, inside: PrimExpr | None) -> tirx.Stmt:
        """What is written for a barrier; the same here."""
        return node

    def visit_attr(self, node: tirx.AttrStmt, inside: PrimExpr | None) -> tirx.Stmt:
        return tirx.AttrStmt(node.node, node.attr_key, node.value, self.visit(node.body, inside))

    def visit_for(self, node: tirx.For, inside: PrimExpr | None) -> tirx.Stmt:
        low, extent = (self.same(e, f"the loop over {node.loop_var.name}") for e in (node.min, node.extent))
        return tirx.For(node.loop_var, low, extent, node.kind, self.visit(node.body, inside), None, node.annotations)

    def visit_if_then_else(self, node: tirx.IfThenElse, inside: PrimExpr | None) -> tirx.Stmt:
        condition = self.analyzer.simplify(node.condition) if self.varies(node.condition) else node.condition
        if not self.varies(condition):
            then = self.visit(node.then_case, inside)
            other = None if node.else_case is None else self.visit(node.else_case, inside)
            return tirx.IfThenElse(condition, then, other)
        # A barrier of the block under such a condition is a mistake of the schedule, which is not hidden.
        if _scopes(node) != {"warp"} or _touches(condition):
            raise self.refuse(f"a barrier stands under the condition {condition}, which not all threads meet")
        parts = [self.visit(node.then_case, _both(inside, condition))]
        if node.else_case is not None:
            parts.append(self.visit(node.else_case, _both(inside, tirx.Not(condition))))
        return sequence(*parts)

    def visit_sequence(self, node: tirx.SeqStmt, inside: PrimExpr | None) -> tirx.Stmt:
        parts = list(node.seq)
        done: list[tirx.Stmt] = []
        together: list[tirx.Stmt] = []

        def close() -> None:
            if together:
                done.append(_under(inside, sequence(*together)))
                together.clear()

        for number, part in enumerate(parts):
            if isinstance(part, tirx.Bind) and self.varies(part.value):
                self.different.append(part.var)
            if isinstance(part, _Declaration):
                # A declaration under the condition would end with it.
                close()
                done.append(part)
            elif isinstance(part, tirx.Bind) and (inside is None or _outlives(part.var, parts[number + 1 :])):
                close()
                done.append(self.bind(part, inside))
            elif _scopes(part):
                close()
                done.append(self.visit(part, inside))
            elif inside is None:
                done.append(part)
            else:
                together.append(part)
        close()
        return sequence(*done)

    def visit_other(self, node: tirx.Stmt, inside: PrimExpr | None) -> tirx.Stmt:
        raise self.refuse(f"a barrier stands in a statement of the kind {type(node).__name__}")

    def bind(self, node: tirx.Bind, inside: PrimExpr | None) -> tirx.Stmt:
        """A variable that lives across barriers; where it is not safe to work it out, other threads have 0."""
        dtype = dtype_of(node.value)
        if inside is None or dtype == "handle" or not _touches(node.value) or not self.varies(node.value):
            return node
        return tirx.Bind(node.var, tirx.if_then_else(inside, node.value, tirx.const(0, dtype)))

    def varies(self, node: PrimExpr) -> bool:
        """Whether threads may have different values of an expression."""
        if _names(node, self.different):
            return True
        found = False

        def see_load(load: TensorLoad) -> None:
            nonlocal found
            found = found or str(load.source.scope()) not in ("global", "shared", "shared.dyn")

        def see_call(call: tvm.ir.Call) -> None:
            nonlocal found
            found = found or any(part in str(getattr(call.op, "name", "")) for part in ("shfl", "activemask", "extern"))

        if not isinstance(node, (tirx.Var, tirx.IntImm)):
            structural_walk(node, [(TensorLoad, see_load), (tvm.ir.Call, see_call)])
        return found

    def same(self, node: PrimExpr, where: str) -> PrimExpr:
        """An expression that all threads have one value of."""
        if not self.varies(node):
            return node
        value = self.analyzer.simplify(node)
        if self.varies(value):
            raise self.refuse(f"a barrier stands in {where}, whose turns are not the same for all threads")
        return value


def _written(node: tirx.Evaluate) -> tirx.Evaluate:
    """A barrier of a warp as ``__syncwarp()``."""
    here = isinstance(node.value, tvm.ir.Call) and barrier_scope(node.value) == "warp"
    return tirx.Evaluate(cuda_warp_sync()) if here else node


class _SomeWarps:
    """Looks for barriers of warps under conditions that differ between threads."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread

    def found(self, body: tirx.Stmt) -> bool:
        seen = False

        def see_bind(node: tirx.Bind) -> None:
            if self.spread.varies(node.value):
                self.spread.different.append(node.var)

        def see_branch(node: tirx.IfThenElse) -> None:
            nonlocal seen
            seen = seen or (_scopes(node) == {"warp"} and self.spread.varies(node.condition))

        structural_walk(body, [(tirx.Bind, see_bind), (tirx.IfThenElse, see_branch)])
        return seen


def _scopes(node: tirx.Stmt) -> set[str]:
    """Scopes of the barriers in a statement."""
    found: set[str] = set()

    def see(call: tvm.ir.Call) -> None:
        scope = barrier_scope(call)
        if scope is not None:
            found.add(scope)

    structural_walk(node, (tvm.ir.Call, see))
    return found


def _under(inside: PrimExpr | None, node: tirx.Stmt) -> tirx.Stmt:
    return node if inside is None else tirx.IfThenElse(inside, node, None)


def _both(one: PrimExpr | None, other: PrimExpr) -> PrimExpr:
    return other if one is None else tirx.And(one, other)


def _outlives(var: tirx.Var, later: list[tirx.Stmt]) -> bool:
    """Whether a variable is used beyond the next barrier or declaration."""
    ended = False
    for node in later:
        ended = ended or isinstance(node, _Declaration) or bool(_scopes(node))
        if ended and _names(node, [var]):
            return True
        if isinstance(node, tirx.Bind) and _names(node.value, [var]):
            # The other one may be declared outside.
            return True
    return False


def _names(node: object, variables: Sequence[tirx.Var]) -> bool:
    """Whether any of these variables occurs."""
    if isinstance(node, tirx.Var):
        return any(node.same_as(one) for one in variables)
    found = False

    def see(var: tirx.Var) -> None:
        nonlocal found
        found = found or any(var.same_as(one) for one in variables)

    structural_walk(node, (tirx.Var, see))
    return found


def _touches(node: PrimExpr) -> bool:
    """Whether an expression reads memory or calls something."""
    found = False

    def see(_: object) -> None:
        nonlocal found
        found = True

    if not isinstance(node, (tirx.Var, tirx.IntImm)):
        structural_walk(node, [(TensorLoad, see), (tvm.ir.Call, see)])
    return found
