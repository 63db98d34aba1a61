"""What functions do with registers, or slices of shared memory, that they are given (``kept_memory.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Call

from souffle.tvm_compat import collect

__all__ = ["escapes", "fills_registers", "only_fills", "stores_elsewhere", "stores_to", "takes_registers"]


def fills_registers(function: tirx.PrimFunc) -> bool:
    """Whether a function is no stage, but fills the registers that it is given."""
    return stores_to(function, _registers_of(function))


def takes_registers(function: tirx.PrimFunc) -> bool:
    return bool(_registers_of(function))


def _registers_of(function: tirx.PrimFunc) -> list[Any]:
    return [p for p in function.params if getattr(p.ty, "storage_scope", "") in ("local", "shared")]


def _of_pointers(function: tirx.PrimFunc, pointers: Sequence[Any]) -> list[tirx.Buffer]:
    """The memory that a function is given as some of its parameters."""
    return [d.buffer for d in collect(function.body, tirx.DeclBuffer) if any(p.same_as(d.data) for p in pointers)]


def stores_to(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function stores to memory that it is given as some of its parameters."""
    given = _of_pointers(function, pointers)
    return any(any(store.buffer.same_as(one) for one in given) for store in collect(function.body, tirx.BufferStore))


def stores_elsewhere(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function stores to other memory than it is given as some of its parameters."""
    given = _of_pointers(function, pointers)
    return not all(any(s.buffer.same_as(one) for one in given) for s in collect(function.body, tirx.BufferStore))


def only_fills(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether all that a function changes is the memory that it is given as some of its parameters."""
    acts = [one for one in collect(function.body, tirx.Evaluate) if not isinstance(one.value, tirx.IntImm)]
    return not stores_elsewhere(function, pointers) and not acts


def escapes(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function hands on where memory lies that it is given as some of its parameters: to what may store."""
    given = _of_pointers(function, pointers)
    for call in collect(function.body, Call):
        for argument in call.args:
            source = getattr(argument, "source", None)
            taken = source is not None and str(getattr(call.op, "name", "")) == "tirx.address_of"
            if (taken and any(source.same_as(b) for b in given)) or any(argument.same_as(p) for p in pointers):
                return True
    return False
