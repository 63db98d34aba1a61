"""A function's pool of shared memory at another place of its block's, for who has a part of a block alone."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, collect, const_int

__all__ = ["with_pool_at"]


def with_pool_at(
    func: tirx.PrimFunc, start: PrimExpr | int, room: int, waits: Callable[[tirx.Evaluate], tirx.Stmt]
) -> tirx.Stmt:
    """The body of a function whose pool begins at a byte of its block's.

    Parameters
    ----------
    func : PrimFunc
    start : PrimExpr or int
        The byte.
    room : int
        The most that `start` can be.
    waits : callable
        Gives what stands in the place of an evaluation, such as that of a barrier.
    """
    pools = {
        alloc.buffer: tirx.decl_buffer(
            (room + const_int(alloc.buffer.shape[0]),), alloc.buffer.dtype, name=alloc.buffer.name, scope="shared.dyn"
        )
        for alloc in collect(func.body, tirx.AllocBuffer)
        if str(alloc.buffer.scope()) == "shared.dyn"
    }

    def allocated(node: tirx.AllocBuffer) -> tirx.AllocBuffer:
        return tirx.AllocBuffer(pools[node.buffer]) if node.buffer in pools else node

    def declared(node: tirx.DeclBuffer) -> tirx.DeclBuffer:
        data = node.data
        if not isinstance(data, tvm.ir.Call) or str(getattr(data.op, "name", "")) != "tirx.address_of":
            return node
        load = data.args[0]
        if load.source not in pools:
            return node
        return tirx.DeclBuffer(node.buffer, data=tirx.address_of(pools[load.source][load.indices[0] + start]))

    changes = [(tirx.AllocBuffer, allocated), (tirx.DeclBuffer, declared), (tirx.Evaluate, waits)]
    return structural_map(func.body, changes)
