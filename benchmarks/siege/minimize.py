"""Makes a case that is proven and wrong as small as it gets: statements and calls are left out, loops run once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import tvm_ffi
from tvm import tirx

from benchmarks.siege.case import Case
from benchmarks.siege.judge import UNDEFINED, Judge
from souffle.mutation.statement_paths import nothing, replaced, sites
from souffle.tvm_compat import sequence
from souffle.verify import PROVEN

__all__ = ["minimized"]

_TRIES = 150


def minimized(case: Case, judge: Judge, most: int = _TRIES) -> Case:
    """A smaller case that is proven and wrong, too, after at most so many tries."""
    tries, went_on = 0, True
    # What other bits show needs no text with checks, which takes long to compile.
    checked = judge.outcome(case, checked=False).kind != UNDEFINED
    while went_on and tries < most:
        went_on = False
        for smaller in _smaller(case):
            tries += 1
            if tries > most:
                break
            if _still(smaller, judge, checked):
                case, went_on = smaller, True
                break
    return case


def _still(case: Case, judge: Judge, checked: bool) -> bool:
    try:
        if judge.judgement(case, values=False).memory != PROVEN:
            return False
        return judge.outcome(case, checked=checked).kind == UNDEFINED
    except (ValueError, TypeError, RuntimeError):
        return False


def _smaller(case: Case) -> Iterator[Case]:
    for held in ("kernels", "functions"):
        for name, func in getattr(case, held).items():
            for body in _bodies(func):
                yield _without_unused(replace(case, **{held: {**getattr(case, held), name: func.with_body(body)}}))


def _bodies(func: tirx.PrimFunc) -> Iterator[tirx.Stmt]:
    for site in sites(func):
        s = site.statement
        if isinstance(s, tirx.SeqStmt):
            yield from _shorter(func.body, site.path, list(s.seq))
        elif isinstance(s, tirx.For) and site.path and int(getattr(s.extent, "value", 0)) > 1:
            once = tirx.For(s.loop_var, s.min, s.extent - s.extent + 1, s.kind, s.body)
            yield replaced(func.body, site.path, once)
        elif isinstance(s, tirx.IfThenElse) and s.else_case is None:
            yield replaced(func.body, site.path, s.then_case)
        elif isinstance(s, (tirx.BufferStore, tirx.Evaluate)) and site.path and not _empty(s):
            yield replaced(func.body, site.path, nothing())


def _shorter(root: tirx.Stmt, path: tuple[int, ...], parts: list[tirx.Stmt]) -> Iterator[tirx.Stmt]:
    """Without some neighbours at a time, more first."""
    size = len(parts) // 2
    while size:
        for first in range(0, len(parts), size):
            rest = parts[:first] + parts[first + size :]
            declared = any(isinstance(p, (tirx.AllocBuffer, tirx.DeclBuffer)) for p in parts[first : first + size])
            if rest and not declared:
                yield replaced(root, path, sequence(*rest))
        size //= 2


def _empty(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tirx.IntImm)


def _without_unused(case: Case) -> Case:
    """Without the functions that nobody calls."""
    called: set[str] = set()
    for kernel in case.kernels.values():
        tvm_ffi.structural_walk(kernel.body, (tirx.Evaluate, lambda s: called.add(_callee(s))))
    kernels = tuple(replace(k, stages=tuple(s for s in k.stages if s in called)) for k in case.plan.kernels)
    functions = {name: func for name, func in case.functions.items() if name in called}
    return replace(case, functions=functions, plan=replace(case.plan, kernels=kernels), definitions={})


def _callee(statement: tirx.Evaluate) -> str:
    return str(getattr(getattr(statement.value, "op", None), "name_hint", ""))
