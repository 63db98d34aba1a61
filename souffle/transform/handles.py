"""TE bodies over shared handles, so that the expressions of several TEs can be put into one."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from souffle.program import TE, Tensor
from souffle.tvm_compat import PrimExpr, load_indices, load_tensor, map_bodies, substitute

__all__ = ["Handles", "instantiate", "read"]


def read(handle: te.Tensor, indices: Sequence[PrimExpr]) -> PrimExpr:
    """One element of `handle`; no index for a scalar."""
    return handle[tuple(indices)] if indices else handle()


class Handles:
    """One ``te.Tensor`` for each :class:`Tensor`, made when asked for."""

    def __init__(self) -> None:
        self._handles: dict[Tensor, te.Tensor] = {}

    def of(self, tensor: Tensor) -> te.Tensor:
        """The handle of a tensor."""
        if tensor not in self._handles:
            self._handles[tensor] = te.placeholder(tensor.shape, tensor.dtype, name=f"h{len(self._handles)}")
        return self._handles[tensor]

    def tensors(self) -> list[Tensor]:
        """Those that have handles."""
        return list(self._handles)

    def pairs(self) -> list[tuple[te.Tensor, Tensor]]:
        """What each handle stands for: the ``reads`` of :func:`souffle.program.make_te`."""
        return [(handle, tensor) for tensor, handle in self._handles.items()]

    def opened(self, te_: TE) -> tuple[PrimExpr, ...]:
        """The bodies of a TE, reading handles in place of its own placeholders."""
        table = {id(p): t for p, t in zip(te_.placeholders, te_.inputs, strict=True)}

        def rewrite(load: PrimExpr) -> PrimExpr:
            source = load_tensor(load)
            tensor = table.get(id(source)) or te_.input_of(source)
            return read(self.of(tensor), load_indices(load))

        return tuple(map_bodies(te_.op.body, rewrite))


def instantiate(body: PrimExpr, axes: Sequence[tirx.IterVar], indices: Sequence[PrimExpr]) -> PrimExpr:
    """`body`, an expression over `axes`, at the point `indices`."""
    return substitute(body, {axis.var: index for axis, index in zip(axes, indices, strict=True)})
