"""Normalizations that disappear into the products around them (paper §2.3, §6.3).

::

    x    = product ...                       x    = product ..., and S, M = moments of x in its tiles       one stage
    s, v = moments of the rows of x     →
    y    = f(x, s, v)                        for each product that reads y:
    z    = product of y ...                  s, v = moments of S, M;  y = f(x, s, v);  z = product of y     one stage

A stage and its grid sync vanish: what is left of the normalization is a few values a row, which each reader's tile
works out for its rows (:mod:`souffle.schedule.gpu.forms.row_values`), and an expression of an element, which it works
out where it reads it: the left operand of a product as it is brought into shared memory, a residual as results are
written. A reader that needs y for its results alone, such as a residual, may read s and v from memory instead, which a
small stage makes of S and M while the products before it run: nothing is ahead of its sum then, which can be shared
among more blocks (:mod:`souffle.placement.two_phase`), with y in its second phase. Legal because each TE has the same
value wherever it is computed; that moments of rows are made of those of chunks is the theorem of
:mod:`souffle.placement.moments`. The mean is taken from an element before anything is multiplied by it: folding both
into the weights instead, ``rstd * (x W - mean * sum of W)``, would subtract numbers as large as the mean is against the
deviation, of which nothing is known at compile time.

:func:`normalize_in_products` rewrites what it is told to; :mod:`souffle.placement.normalizing_by_cost` says what pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from souffle.decision import Decision, Refused
from souffle.placement.centred import centred
from souffle.placement.folded_weights import FoldedProduct, folded_product
from souffle.placement.moments import Moment, chunked_square, chunked_sum, is_sum, second_moment, sums_elements
from souffle.placement.stage_trial import reduction_of
from souffle.placement.two_phase import free_suffix
from souffle.program import TE, FusedTE, InTiles, Item, Tensor, TEProgram, fuse, parts_of
from souffle.transform.vertical.compose import composed

__all__ = ["Chosen", "Normalization", "Product", "Rewritten", "normalize_in_products", "rewritten"]

Computing = TE | FusedTE


@dataclass(frozen=True, eq=False)
class Normalization:
    """A normalization between products.

    Attributes
    ----------
    producer : TE or FusedTE
        The product whose rows are normalized.
    of_rows : tuple of TE or FusedTE
        Moments of its rows, which are reductions, and what is made of these for a row alone, in order.
    elements : tuple of TE or FusedTE
        What is made of an element and the moments of its row.
    readers : tuple of TE or FusedTE
        The products that read that, and nobody else does.
    """

    producer: Computing
    of_rows: tuple[Computing, ...]
    elements: tuple[Computing, ...]
    readers: tuple[Computing, ...]

    @property
    def moments(self) -> tuple[Computing, ...]:
        """The reductions of rows."""
        return tuple(item for item in self.of_rows if item.is_reduction)

    @property
    def rows(self) -> Tensor:
        """What is normalized."""
        return next(t for t in reduction_of(self.moments[0]).inputs if t in self.producer.outputs)


@dataclass(frozen=True, eq=False)
class Product:
    """A product as it stands so far: with what is ahead of it for its rows, and with moments in its tiles."""

    item: Computing
    ahead: tuple[TE, ...] = ()
    inside: tuple[TE, ...] = ()

    @property
    def items(self) -> tuple[Computing, ...]:
        """All of them, in order."""
        return (*self.ahead, self.item, *self.inside)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """What became of the producer and the readers of a normalization, and which products have other constants.

    Where readers take values of rows from memory, ``of_rows`` is what makes these, of what chunks have, in the place
    of the moments of the normalization.
    """

    producer: Product
    readers: tuple[Product, ...]
    folded: tuple[FoldedProduct, ...] = ()
    of_rows: tuple[Computing, ...] = ()

    def constants(self, known: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray] | Refused:
        """The new constants, of those that are known; or why they would not be as good."""
        made: dict[Tensor, np.ndarray] = {}
        for product in self.folded:
            own = product.constants(known)
            if isinstance(own, Refused):
                return own
            made |= own
        return made


class Chosen(NamedTuple):
    """How a normalization becomes part of products, and why.

    Attributes
    ----------
    size : int
        Elements of a chunk.
    copies : bool
        Whether products multiply 16-bit copies.
    reason : str
    stored : bool
        Whether the values of rows are a stage of their own for the readers that normalize results alone, such as a
        residual: then nothing is ahead of their sums, which can be split.
    """

    size: int
    copies: bool
    reason: str
    stored: bool = False


Choose = Callable[[Normalization, dict[Item, Product]], Chosen | Refused]
"""Of a normalization, and of what products stand as so far."""


def normalize_in_products(program: TEProgram, choose: Choose) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Let products begin and finish the normalizations between them.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.
    choose : callable
        As :func:`souffle.placement.normalizing_by_cost.normalize_by_cost` does. Asked once for equal layers, so that
        they stay equal.

    Returns
    -------
    program : TEProgram
        The same object where nothing changed.
    decisions : tuple of Decision
        One for each normalization asked about.
    """
    products: dict[Item, Product] = {}
    totals: dict[Item, Computing] = {}
    answers: dict[object, Chosen | Refused] = {}
    constants: dict[Tensor, np.ndarray] = {}
    decisions: list[Decision] = []
    suffix = free_suffix(program, "_rows")
    for item in program.tes:
        found = normalization_of(program, item)
        if found is None:
            continue
        if isinstance(found, Refused):
            decisions.append(Decision("normalization", f"rows of {item.name}", False, found.reason))
            continue
        subject = f"rows of {found.producer.name}"
        key = _key(found, products)
        if key not in answers:
            answers[key] = choose(found, products)
        answer = answers[key]
        made = answer if isinstance(answer, Refused) else rewritten(program, found, products, answer, suffix)
        folded = made if isinstance(made, Refused) else made.constants(program.constants)
        if isinstance(folded, Refused):
            decisions.append(Decision("normalization", subject, False, folded.reason))
            continue
        decisions.append(Decision("normalization", subject, True, answer.reason))
        constants |= folded
        products[found.producer] = made.producer
        products |= dict(zip(found.readers, made.readers, strict=True))
        totals |= dict(zip(found.of_rows, made.of_rows, strict=bool(made.of_rows)))
    if not products:
        return program, tuple(decisions)
    stands = {item: product.items for item, product in products.items()} | {old: (new,) for old, new in totals.items()}
    items = [part for item in program.tes for part in stands.get(item, (item,))]
    return program.with_tes(items, constants=constants), tuple(decisions)


def normalization_of(program: TEProgram, producer: Item) -> Normalization | Refused | None:
    """The normalization of a product's rows: ``None`` if there is none, or why it cannot become part of its readers."""
    if not _is_product(producer):
        return None
    of_rows = _of_rows(program, producer)
    if not of_rows:
        return None
    results = [tensor for item in of_rows for tensor in item.outputs]
    elements = [item for item in _readers(program, results) if item not in of_rows]
    if any(tensor in program.outputs for tensor in results):
        return Refused("its moments are outputs of the network")
    for item in elements:
        if not isinstance(item, (TE, FusedTE)) or item.is_reduction:
            return Refused(f"{item.name} reads its moments, and is no function of an element")
    made = [tensor for element in elements for tensor in element.outputs]
    if any(tensor in program.outputs for tensor in made):
        return Refused("what it makes is an output of the network")
    readers = _readers(program, made)
    other = next((reader for reader in readers if not _is_product(reader)), None)
    if other is not None:
        return Refused(f"{other.name}, which is no product, reads it")
    return Normalization(producer, tuple(of_rows), tuple(elements), tuple(readers)) if readers else None


def _of_rows(program: TEProgram, producer: Computing) -> list[Computing]:
    """Moments of a product's rows, and what is made of them for a row alone; none without a moment."""
    found: list[Computing] = []
    known = set(producer.outputs)
    pending = _readers(program, producer.outputs)
    while pending:
        item = pending.pop(0)
        rows = {tensor.size for one in found for tensor in one.outputs}
        if item in found or not (_is_moment(item, producer, known) or _is_of_rows(program, item, found, rows)):
            continue
        found.append(item)
        known.update(item.outputs)
        pending += [reader for reader in _readers(program, item.outputs) if reader not in pending]
    return found


def _is_of_rows(program: TEProgram, item: Item, found: Sequence[Computing], rows: set[int]) -> bool:
    """Whether it makes something of moments that were found, and of constants, for each row."""
    if not isinstance(item, (TE, FusedTE)) or item.is_reduction or {t.size for t in item.outputs} != rows:
        return False
    made = {tensor for one in found for tensor in one.outputs}
    return all(tensor in made or tensor in program.constants for tensor in item.inputs)


def _readers(program: TEProgram, tensors: Sequence[Tensor]) -> list[Item]:
    """The items that read some of the tensors, in the program's order."""
    readers = {item for tensor in tensors for item in program.consumers[tensor]}
    return [item for item in program.tes if item in readers]


def _is_product(item: Item) -> bool:
    """Whether it sums up products of several tensors, and nothing says where."""
    if not isinstance(item, (TE, FusedTE)) or not item.is_reduction or item.placement is not None:
        return False
    reduction = reduction_of(item)
    # A second moment reads two tensors, too.
    return len(reduction.inputs) > 1 and len(reduction.outputs) == 1 and second_moment(item) is None


def _is_moment(item: Item, producer: Computing, known: set[Tensor]) -> bool:
    """Whether it sums up rows of the producer, reading nothing else but what is known of these."""
    if not isinstance(item, (TE, FusedTE)) or not item.is_reduction or item.placement is not None:
        return False
    reduction = reduction_of(item)
    values = reduction.outputs[0].size * prod(reduction.reduction_shape)
    elements = [t for t in reduction.inputs if t in producer.outputs and t.size == values]
    return len(elements) == 1 and all(t in known for t in item.inputs) and is_sum(item)


def _key(found: Normalization, products: dict[Item, Product]) -> tuple[object, ...]:
    """Equal for equal layers: what all of it computes, and where one part reads another."""
    key: list[object] = []
    number: dict[Tensor, int] = {}
    for item in (found.producer, *found.of_rows, *found.elements, *found.readers):
        key.append(item.wiring if isinstance(item, FusedTE) else item.op)
        key.append(tuple(number.get(tensor, -1) for tensor in item.inputs))
        number.update((tensor, len(number) + n) for n, tensor in enumerate(item.outputs))
        before = products.get(item)
        parts = () if before is None else (*before.ahead, *before.inside)
        key.append(tuple((part.op, part.outputs[0].shape) for part in parts))
    return tuple(key)


def rewritten(
    program: TEProgram, found: Normalization, products: dict[Item, Product], chosen: Chosen, suffix: str = "_rows"
) -> Rewritten | Refused:
    """The producer with moments of chunks, and the readers with the normalization ahead of them.

    Parameters
    ----------
    program : TEProgram
    found : Normalization
    products : dict
        What products stand as so far.
    chosen : Chosen
    suffix : str
        Of the names of what is worked out for rows.
    """
    chunked = _chunked(found, chosen.size)
    if isinstance(chunked, Refused):
        return chunked
    totals = dict(zip(found.moments, (moment.total for moment in chunked), strict=True))
    inside = [moment.inside for moment in chunked]
    parts = [part for item in found.of_rows for part in parts_of(totals.get(item, item))]
    copied = None
    if chosen.copies:
        rows, contraction = found.rows, reduction_of(found.producer).name
        copied = centred(found.moments, chunked, found.of_rows, found.elements, rows, chosen.size, contraction)
        if isinstance(copied, Refused):
            return copied
        inside.append(copied.copy)
        parts += [*copied.of_chunks, copied.normal]
    elements = [part for item in found.elements for part in parts_of(item)]
    parts += elements
    producer = products.get(found.producer, Product(found.producer))
    readers: list[Product] = []
    folded: list[FoldedProduct] = []
    stored = False
    for number, reader in enumerate(found.readers):
        before = products.get(reader, Product(reader))
        if chosen.stored and (item := _with_elements(before.item, elements)) is not None:
            readers.append(replace(before, item=item))
            stored = True
            continue
        if copied is not None and copied.target in reduction_of(before.item).inputs:
            product = folded_product(before.item, copied, program.constants, suffix)
            if isinstance(product, Refused):
                return product
            folded.append(product)
            before = replace(before, item=product.item)
        readers.append(_with_rows(before, parts, f"{suffix}{number}"))
    if copied is not None and not folded:
        return Refused("none of its readers multiplies 16 bits of it")
    if chosen.stored and not stored:
        return Refused("each of its readers multiplies it")
    of_rows = tuple(totals.get(item, item) for item in found.of_rows) if stored else ()
    return Rewritten(replace(producer, inside=(*producer.inside, *inside)), tuple(readers), tuple(folded), of_rows)


def _chunked(found: Normalization, size: int) -> list[Moment] | Refused:
    """All moments in chunks."""
    chunked: list[Moment] = []
    contraction = reduction_of(found.producer).name
    for moment in found.moments:
        if second_moment(moment) is None:
            made = chunked_sum(moment, contraction, size, "_chunk")
        else:
            pairs = zip(found.moments, chunked, strict=False)
            sums = next((own.inside for other, own in pairs if sums_elements(other, moment)), None)
            if sums is None:
                return Refused(f"nothing sums up the elements of {moment.name}")
            made = chunked_square(moment, sums, contraction, size, "_chunk")
        if isinstance(made, Refused):
            return made
        chunked.append(made)
    return chunked


def _with_elements(reader: Computing, elements: Sequence[TE]) -> Computing | None:
    """A reader that makes elements of a normalization itself, of values of rows; ``None`` if its sum reads some."""
    made: dict[Tensor, TE] = {}
    for part in elements:
        made |= dict.fromkeys(part.outputs, composed(part, {t: made[t] for t in part.inputs if t in made}))
    parts = parts_of(reader)
    end = parts.index(reduction_of(reader)) + 1
    if any(tensor in made for part in parts[:end] for tensor in part.inputs):
        return None
    after = [composed(part, {t: made[t] for t in part.inputs if t in made}) for part in parts[end:]]
    return fuse((*parts[:end], *after), reader.outputs)


def _with_rows(reader: Product, parts: Sequence[TE], suffix: str) -> Product:
    """A reader with its own copy of what it needs of a normalization, whose parts from chunks on are given."""
    wanted = set(reader.item.inputs)
    needed: list[TE] = []
    for part in reversed(parts):
        if wanted.intersection(part.outputs):
            needed.insert(0, part)
            wanted.update(part.inputs)
    placement = InTiles(reduction_of(reader.item).name, "rows")
    own: dict[Tensor, Tensor] = {}
    ahead = []
    for part in needed:
        own |= {tensor: replace(tensor, name=f"{tensor.name}{suffix}") for tensor in part.outputs}
        ahead.append(
            replace(
                part,
                name=f"{part.name}{suffix}",
                inputs=tuple(own.get(tensor, tensor) for tensor in part.inputs),
                outputs=tuple(own[tensor] for tensor in part.outputs),
                placement=placement,
            )
        )
    made = [part.with_inputs([own.get(t, t) for t in part.inputs]) for part in parts_of(reader.item)]
    item = fuse(made, reader.item.outputs) if isinstance(reader.item, FusedTE) else made[0]
    return replace(reader, item=item, ahead=(*reader.ahead, *ahead))
