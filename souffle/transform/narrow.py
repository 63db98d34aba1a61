"""Tensors that are read in a narrower type are stored in it (paper §7.1: mixed precision).

::

    P[u] = p(u)                           P'[u] = half(p(u))
    C[v] = c(..., half(P[f(v)]), ...)  →  C[v] = c(..., P'[f(v)], ...)

Legal because a conversion is a function of one element: it gives the same bits before a store as after the load. So a
tensor all of whose readers convert it alike is stored in the narrow type, and read in half the bytes by
every tile. Where some reader needs the wide type (a residual), the one that defines it stores a narrow copy too, as one
statement more of a fused TE: its value is at hand in a register there. Inputs and outputs of the program keep their
types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from tvm import te, tirx

from souffle.alone import one_at_a_time
from souffle.analysis.te_expression import expression_of
from souffle.decision import Decision
from souffle.index.expression import Expression
from souffle.program import TE, FusedTE, Item, Origin, Tensor, TEProgram, fuse, parts_of
from souffle.program.names import NameSupply
from souffle.program.shared import OncePer
from souffle.transform.handles import read
from souffle.transform.vertical.compose import use_of
from souffle.tvm_calls import structural_mutate
from souffle.tvm_compat import (
    PrimExpr,
    choice_like,
    choice_parts,
    compute_op,
    dtype_of,
    fresh_axis,
    is_choice,
    is_load,
    load_indices,
    load_tensor,
    loads,
)

__all__ = ["conversion", "narrow"]

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
"""Types between which a conversion is an arithmetic rounding."""

_SUFFIX = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class _Read:
    """Where a tensor is read: input number `position` of a part of an item; ``part`` is None where that is no TE."""

    item: Item
    part: TE | None
    position: int

    @property
    def dtype(self) -> str | None:
        """The narrower type that every load is converted to; ``None`` if some is not."""
        if self.part is None:
            return None
        op, placeholder = self.part.op, self.part.placeholders[self.position]
        return _converted(op, self.position, placeholder)

    @property
    def key(self) -> tuple[Expression, int]:
        """Equal for the reads of equal layers."""
        return expression_of(self.part), self.position


@dataclass(frozen=True)
class _Plan:
    """What becomes of a tensor.

    Attributes
    ----------
    narrow : Tensor
        What those that convert read from now on.
    how : str
        ``"retype"``: its TE defines `narrow` in its place. ``"instead"``, ``"beside"``: a statement after it converts
        it, and it stays inside or is stored too. ``"alone"``: a TE of its own converts it. ``"constant"``.
    """

    narrow: Tensor
    how: str


@one_at_a_time
def narrow(program: TEProgram, *, alike: bool = False) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Store tensors in the narrower type that their readers convert them to.

    Parameters
    ----------
    program : TEProgram
        Composed, so that conversions stand in the TEs that read; not rolled.
    alike : bool
        Whether equal TEs stay equal, so that repeated layers can be rolled: what one of them stores, the others store
        too, though the first layer may have to convert an input and the last one's copy may not be read.

    Returns
    -------
    program : TEProgram
        The same object where no tensor can be narrower.
    decisions : tuple of Decision
        One for each tensor that some TE converts.
    """
    planner = _Planner(program)
    planner.plan()
    if alike:
        planner.keep_alike()
    return (_Rebuild(program, planner.plans).result() if planner.plans else program), tuple(planner.decisions)


def conversion(tensor: Tensor, to: Tensor, origin: Origin) -> TE:
    """The TE that converts `tensor` element by element; those of equal shapes and types share one expression."""

    def made() -> tuple[te.ComputeOp, te.Tensor]:
        placeholder = te.placeholder(tensor.shape, tensor.dtype, name="p0")
        axes = [fresh_axis(extent, f"i{n}") for n, extent in enumerate(tensor.shape)]
        body = read(placeholder, [axis.var for axis in axes]).astype(to.dtype)
        return compute_op(to.name, axes, [body]), placeholder

    op, placeholder = _conversions((tensor.shape, tensor.dtype, to.dtype), made)
    return TE(to.name, op, (placeholder,), (tensor,), (to,), origin)


_conversions: OncePer[tuple[te.ComputeOp, te.Tensor]] = OncePer()
_narrow_types: OncePer[str | None] = OncePer()
_rewritten: OncePer[tuple[te.ComputeOp, tuple[te.Tensor, ...]]] = OncePer()


class _Planner:
    """Decides for each tensor in what type it is stored."""

    def __init__(self, program: TEProgram) -> None:
        self.program = program
        self.results = set(program.outputs)
        self.reads: dict[Tensor, list[_Read]] = {}
        for item in program.tes:
            for part in parts_of(item):
                for position, tensor in enumerate(part.inputs):
                    self.reads.setdefault(tensor, []).append(
                        _Read(item, part if isinstance(part, TE) else None, position)
                    )
        inner = (tensor for item in program.tes for part in parts_of(item) for tensor in part.outputs)
        self.names = NameSupply(tensor.name for tensor in chain(program.tensors(), inner))
        self.plans: dict[Tensor, _Plan] = {}
        self.decisions: list[Decision] = []
        self._waiting: list[tuple[Tensor, str, list[_Read]]] = []

    def plan(self) -> None:
        """Plan what pays on its own."""
        for tensor in self.program.tensors():
            types = {read.dtype for read in self.reads.get(tensor, ())} - {None}
            if len(types) > 1:
                self._refuse(tensor, f"its readers convert it to {', '.join(sorted(types))}")
            for dtype in types if len(types) == 1 else ():
                self._plan(tensor, dtype)

    def _plan(self, tensor: Tensor, dtype: str) -> None:
        item = self.program.producers.get(tensor)
        outside = [r for r in self.reads[tensor] if r.item is not item]
        converting = [r for r in outside if r.dtype == dtype]
        if not converting:
            return
        names = _names(converting)
        if tensor in self.program.constants:
            if len(converting) == len(outside):
                self._accept(tensor, dtype, "constant", f"{names} read it as {dtype}: converted at compile time")
            return
        if not isinstance(item, (TE, FusedTE)):
            self._waiting.append((tensor, dtype, converting))
            return
        part = next(p for p in parts_of(item) if tensor in p.outputs)
        less = tensor.nbytes - tensor.nbytes * _BITS[dtype] // _BITS[tensor.dtype]
        copy = tensor.nbytes - less
        if len(converting) == len(outside) and tensor not in self.results:
            plain = not part.is_reduction and len(part.outputs) == 1
            plain = plain and all(r.dtype == dtype for r in self.reads[tensor])
            reason = f"{names} read it as {dtype}: {less} bytes less written, and {less} less for each of these reads"
            self._accept(tensor, dtype, "retype" if plain else "instead", reason)
            return
        again = sum(use_of(r.part, tensor).times for r in converting) / tensor.size
        if again <= 1:
            self._refuse(tensor, f"{names} convert it and read it once only, others need {tensor.dtype}: no byte less")
            return
        reason = (
            f"a {dtype} copy beside it, as others need {tensor.dtype}: {copy} bytes more written, {less} less for each "
            f"reading of it by {names}, which read an element {again:.0f} times"
        )
        self._accept(tensor, dtype, "beside", reason)

    def keep_alike(self) -> None:
        """Plan what keeps equal TEs equal: those that read, and those that define."""
        narrowed = {r.key for t, p in self.plans.items() for r in self.reads[t] if r.dtype == p.narrow.dtype}
        for tensor, dtype, converting in self._waiting:
            if any(r.key in narrowed for r in converting):
                reason = f"{_names(converting)} read a {dtype} copy of it, as TEs equal to them do"
                self._accept(tensor, dtype, "alone", reason)
            else:
                self._refuse(tensor, "an input or an operator's result that no TE defines keeps its type")
        copied = {
            (_identity(item), item.outputs.index(tensor)): plan.narrow.dtype
            for tensor, plan in self.plans.items()
            if plan.how == "beside" and (item := self.program.producers[tensor])
        }
        for item in self.program.tes if copied else ():
            for number, tensor in enumerate(item.outputs if isinstance(item, (TE, FusedTE)) else ()):
                dtype = copied.get((_identity(item), number))
                if dtype is not None and tensor not in self.plans:
                    self._accept(tensor, dtype, "beside", f"a {dtype} copy beside it, as TEs equal to it have")

    def _accept(self, tensor: Tensor, dtype: str, how: str, reason: str) -> None:
        name = tensor.name if how == "retype" else self.names.fresh(f"{tensor.name}_{_SUFFIX[dtype]}")
        self.plans[tensor] = _Plan(Tensor(name, tensor.shape, dtype), how)
        self.decisions.append(Decision("narrow", tensor.name, True, reason))

    def _refuse(self, tensor: Tensor, reason: str) -> None:
        self.decisions.append(Decision("narrow", tensor.name, False, reason))


class _Rebuild:
    def __init__(self, program: TEProgram, plans: Mapping[Tensor, _Plan]) -> None:
        self.program = program
        self.plans = plans

    def result(self) -> TEProgram:
        """The program as planned."""
        items: list[Item] = []
        constants: dict[Tensor, np.ndarray] = {}
        for tensor, plan in self.plans.items():
            if plan.how == "constant":
                constants[plan.narrow] = self.program.constants[tensor].astype(plan.narrow.dtype)
            if plan.how == "alone":
                readers = self.program.consumers[tensor]
                items.append(conversion(tensor, plan.narrow, readers[0].origin))
        items += [self._item(item) for item in self.program.tes]
        return self.program.with_tes(items, constants=constants)

    def _item(self, item: Item) -> Item:
        if not isinstance(item, (TE, FusedTE)):
            return item
        before = parts_of(item)
        parts = [self._part(part) for part in before]
        needed: list[Tensor] = []
        for tensor in item.outputs:
            plan = self.plans.get(tensor)
            if plan is None or plan.how == "beside":
                needed.append(tensor)
            if plan is not None:
                needed.append(plan.narrow)
                if plan.how != "retype":
                    origin = next(part.origin for part in before if tensor in part.outputs)
                    parts.append(conversion(tensor, plan.narrow, origin))
        if all(new is old for new, old in zip(parts, before, strict=False)) and len(parts) == len(before):
            return item
        return fuse(parts, needed) if len(parts) > 1 else parts[0]

    def _part(self, part: TE) -> TE:
        changed: dict[int, Tensor] = {}
        for position, tensor in enumerate(part.inputs):
            plan = self.plans.get(tensor)
            if plan is not None and _Read(part, part, position).dtype == plan.narrow.dtype:
                if plan.how in ("instead", "beside") and self._defines(part, tensor):
                    continue
                changed[position] = plan.narrow
        plan = self.plans.get(part.outputs[0])
        retyped = plan.narrow if plan is not None and plan.how == "retype" else None
        if not changed and retyped is None:
            return part
        types = {position: tensor.dtype for position, tensor in changed.items()}
        stored = None if retyped is None else retyped.dtype
        key = (part.op, tuple(types.items()), stored)
        op, placeholders = _rewritten(key, lambda: _rewrite(part.op, part.placeholders, types, stored))
        inputs = tuple(changed.get(position, tensor) for position, tensor in enumerate(part.inputs))
        outputs = part.outputs if retyped is None else (retyped,)
        return replace(part, op=op, placeholders=placeholders, inputs=inputs, outputs=outputs)

    def _defines(self, part: TE, tensor: Tensor) -> bool:
        """Whether the item of a part defines a tensor, which it then reads before it is converted."""
        return part in parts_of(self.program.producers[tensor])


def _identity(item: Item) -> object:
    """Equal for items that compute the same, where they are TEs."""
    if isinstance(item, FusedTE):
        *steps, outputs = item.wiring
        return (*((expression_of(p), reads) for p, (_, reads) in zip(item.parts, steps, strict=True)), outputs)
    return expression_of(item) if isinstance(item, TE) else item


def _converted(op: te.ComputeOp, position: int, placeholder: te.Tensor) -> str | None:
    """The one narrower type to which an expression converts all that it reads of an input."""

    def find() -> str | None:
        wide = str(placeholder.dtype)
        if wide not in _BITS or len(op.body) != 1:
            return None
        found: set[str] = set()
        for dtype in _SUFFIX:
            if _BITS[dtype] < _BITS[wide]:
                stand_in = te.placeholder(placeholder.shape, dtype, name=placeholder.op.name)
                body = _narrowed(op.body[0], [(placeholder, stand_in)])
                if not any(load_tensor(load).same_as(placeholder) for load in loads(body)):
                    found.add(dtype)
        return found.pop() if len(found) == 1 else None

    return _narrow_types((op, position), find)


def _rewrite(
    op: te.ComputeOp, placeholders: Sequence[te.Tensor], types: Mapping[int, str], stored: str | None
) -> tuple[te.ComputeOp, tuple[te.Tensor, ...]]:
    """An expression that reads some inputs in other types, and is converted to `stored` where that is given."""
    new = tuple(
        te.placeholder(old.shape, types[position], name=old.op.name) if position in types else old
        for position, old in enumerate(placeholders)
    )
    pairs = [(old, now) for old, now in zip(placeholders, new, strict=True) if old is not now]
    body = _narrowed(op.body[0], pairs)
    bodies = [body if stored is None else body.astype(stored)]
    return compute_op(op.name, list(op.axis), bodies, op.tag), new


def _narrowed(body: PrimExpr, pairs: Iterable[tuple[te.Tensor, te.Tensor]]) -> PrimExpr:
    """`body` with each conversion of a load, or of a choice among loads, in the place where the load is."""
    table = [(old, new, str(new.dtype)) for old, new in pairs]

    def push(value: PrimExpr, dtype: str) -> PrimExpr | None:
        """The converted value, reading a narrow input; ``None`` if no such input is in it."""
        if is_load(value):
            for old, new, narrow_type in table:
                if narrow_type == dtype and load_tensor(value).same_as(old):
                    return read(new, load_indices(value))
        if is_choice(value):
            condition, yes, no = choice_parts(value)
            sides = [push(side, dtype) for side in (yes, no)]
            if any(side is not None for side in sides):
                yes, no = (
                    _constant_as(old, dtype) if side is None else side
                    for old, side in zip((yes, no), sides, strict=True)
                )
                return choice_like(value, condition, yes, no)
        return None

    def convert(node: tirx.Cast, mutator: object) -> PrimExpr:
        made = push(node.value, dtype_of(node))
        return mutator.default_mutate(node) if made is None else made

    return structural_mutate(body, [(tirx.Cast, convert)])


def _constant_as(value: PrimExpr, dtype: str) -> PrimExpr:
    if isinstance(value, tirx.FloatImm):
        # Rounded as the conversion at run time does, to the nearest even one.
        return tirx.const(float(np.dtype(dtype).type(value.value)) if dtype != "bfloat16" else value.value, dtype)
    return value.astype(dtype)


def _names(reads: Sequence[_Read]) -> str:
    names = list(dict.fromkeys(r.part.name for r in reads))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
