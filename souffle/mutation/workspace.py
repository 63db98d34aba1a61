"""Tensors that a mutant lets share memory: pairs in the workspace, and pairs of a stage's arrays in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.codegen.plan import Plan
from souffle.mutation.statement_paths import Change, Site, replaced, sites
from souffle.tvm_compat import const_int

__all__ = ["Alias", "aliased", "aliases", "shared_changes"]


@dataclass(frozen=True)
class Alias:
    """Two tensors of the workspace that do not overlap.

    Attributes
    ----------
    moved, onto : int
        Buffers of the plan; the first gets the offset of the second.
    meets : bool
        Whether one stage's call touches both, or one is touched between the first and the last touch of the other.
    """

    moved: int
    onto: int
    meets: bool


def aliases(plan: Plan, kernels: Mapping[str, tirx.PrimFunc]) -> tuple[Alias, ...]:
    """All ordered pairs that fit, those whose lives meet first."""
    lives = _lives(plan, kernels)
    found = []
    for moved, (first, last) in lives.items():
        for onto, (begin, end) in lives.items():
            one, other = plan.buffers[moved], plan.buffers[onto]
            apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            if moved != onto and apart and other.offset + one.nbytes <= plan.workspace_bytes:
                found.append(Alias(moved, onto, first <= end and begin <= last))
    return tuple(sorted(found, key=lambda a: not a.meets))


def aliased(plan: Plan, alias: Alias) -> Plan:
    """The plan with the two tensors at one offset."""
    buffers = list(plan.buffers)
    buffers[alias.moved] = replace(buffers[alias.moved], offset=buffers[alias.onto].offset)
    return replace(plan, buffers=tuple(buffers))


def _lives(plan: Plan, kernels: Mapping[str, tirx.PrimFunc]) -> dict[int, tuple[int, int]]:
    """The first and the last call of a stage that is given a workspace tensor, calls counted over all launches."""
    lives: dict[int, tuple[int, int]] = {}
    calls = 0
    for launch in plan.launches:
        kernel = kernels[plan.kernels[launch.kernel].name]
        buffer_of = dict(zip(kernel.params, launch.buffers))

        def see(call: tvm.ir.Call, buffer_of: dict = buffer_of) -> None:
            nonlocal calls
            if not isinstance(call.op, tvm.ir.GlobalVar):
                return
            calls += 1

            def touch(var: tvm.ir.Var) -> None:
                index = buffer_of.get(var)
                if index is not None and plan.buffers[index].kind == "workspace":
                    lives[index] = (lives.get(index, (calls, calls))[0], calls)

            tvm_ffi.structural_walk(list(call.args), (tvm.ir.Var, touch))

        tvm_ffi.structural_walk(kernel.body, (tvm.ir.Call, see))
    return lives


def shared_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Give an array in a stage's pool of shared memory the place of another one."""
    found = [(site, place) for site in sites(func) if (place := _in_pool(site.statement)) is not None]
    for site, (pool, offset) in found:
        buffer = site.statement.buffer
        for _, (other_pool, other) in found:
            if other != offset and other_pool.same_as(pool) and other + _bytes(buffer) <= _bytes(pool):
                what = f"the shared array {buffer.name} begins at byte {other}, not {offset}"
                make = partial(_placed, func, site, pool, other)
                yield Change("alias", "shared arrays", what, site.statement, make)


def _in_pool(statement: tirx.Stmt) -> tuple[tirx.Buffer, int] | None:
    """The pool that a buffer is declared in, and the byte at which it begins."""
    if not isinstance(statement, tirx.DeclBuffer) or not isinstance(statement.data, tvm.ir.Call):
        return None
    if not len(statement.data.args):
        return None
    load = statement.data.args[0]
    if not isinstance(load, TensorLoad) or not str(load.source.scope()).startswith("shared"):
        return None
    index = load.indices[0]
    return (load.source, int(index)) if isinstance(index, tirx.IntImm) else None


def _bytes(buffer: tirx.Buffer) -> int:
    kind = tvm.DataType(str(buffer.dtype))
    count = kind.lanes * max(1, kind.bits // 8)
    for extent in buffer.shape:
        count *= const_int(extent)
    return count


def _placed(func: tirx.PrimFunc, site: Site, pool: tirx.Buffer, offset: int) -> tirx.PrimFunc:
    new = tirx.DeclBuffer(site.statement.buffer, data=tirx.address_of(pool[offset]))
    return func.with_body(replaced(func.body, site.path, new))
