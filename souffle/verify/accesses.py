"""What a stage function does to memory, as a tree: loops, branches, accesses, and where threads wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from souffle.verify.expressions import Axis, Expr, operation

__all__ = [
    "Address",
    "BarrierWait",
    "Branch",
    "Claim",
    "Function",
    "Item",
    "Memory",
    "MemoryAccess",
    "SerialLoop",
    "Transfer",
    "WarpMeeting",
    "accesses_of",
    "all_of",
    "always_waits",
    "leaves",
    "orders",
    "waits_of",
]


@dataclass(frozen=True, eq=False)
class Memory:
    """A piece of memory that a function can name.

    Attributes
    ----------
    kind : str
        ``"global"`` (behind a pointer parameter), ``"shared"``, or ``"local"`` (registers of a thread, or fragments of
        a warp).
    name : str
    nbytes : int
        What is allocated; what is declared, for global memory, whose true size only the caller knows.
    unit : int
        Bytes of one element.
    parameter : int
        For global memory, which pointer parameter of the function, from 0; otherwise -1.
    pool : bool
        Whether it is shared memory whose size the launch says: one piece, from its start, for all functions.
    loops : tuple of Axis
        Around its declaration.
    """

    kind: str
    name: str
    nbytes: int
    unit: int
    parameter: int = -1
    pool: bool = False
    loops: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Address:
    """An address: so many bytes from the start of a memory.

    Attributes
    ----------
    memory : Memory
    offset : Expr
    within : tuple of (int, int) or None
        First byte, and the one behind the last, of the buffer through which the address was made; ``None`` if not
        known.
    """

    memory: Memory
    offset: Expr
    within: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class MemoryAccess:
    """Reads or writes of `width` neighbouring bytes.

    Attributes
    ----------
    place : Address
    width : int
    writes : bool
    conditions : tuple of Expr
        Beside those of the branches around it: under which a part of an expression is evaluated.
    by : str
        ``"thread"``; ``"warp"`` where the threads of a warp make it together and which of them touches which byte is
        not known; ``"copy"`` for what is under way until the thread waits for it.
    statement : object
        The TensorIR that makes it, for messages.
    alignment : int
        Bytes of which its address must be a multiple, for instructions that touch several elements at once.
    """

    place: Address
    width: int
    writes: bool
    conditions: tuple[Expr, ...]
    by: str
    statement: object
    alignment: int = 1


@dataclass(frozen=True, eq=False)
class BarrierWait:
    """Where threads wait for each other.

    Attributes
    ----------
    scope : str
        ``"block"``, ``"warp"``, ``"grid"``, or ``"part"`` for a named barrier of some of a block's threads.
    statement : object
    number, count : int
        Of a named barrier: which it is, and how many threads it waits for.
    """

    scope: str
    statement: object
    number: int = 0
    count: int = 0


@dataclass(frozen=True, eq=False)
class Transfer:
    """Close a group of asynchronous copies (`pending` is ``None``), or wait for all but so many of the newest."""

    pending: int | None
    statement: object


@dataclass(frozen=True, eq=False)
class WarpMeeting:
    """What lanes of a warp do together: those that the mask names have to come to it, and no others.

    Attributes
    ----------
    mask : Expr or None
        Of each thread, a bit for each lane; None for the lanes that ``__activemask()`` found together.
    conditions : tuple of Expr
        As of :class:`MemoryAccess`.
    statement : object
    """

    mask: Expr | None
    conditions: tuple[Expr, ...]
    statement: object


@dataclass(frozen=True, eq=False)
class SerialLoop:
    """`body`, for each value of `axis` in turn."""

    axis: Axis
    body: tuple[Item, ...]


@dataclass(frozen=True, eq=False)
class Branch:
    """`then` where `condition` holds, else `otherwise`.

    `uniform` says that where data decides it, it does so for all threads of a tile alike
    (:func:`souffle.verify.data_addresses.uniform`).
    """

    condition: Expr
    then: tuple[Item, ...]
    otherwise: tuple[Item, ...]
    statement: object
    uniform: bool = False


@dataclass(frozen=True)
class Claim:
    """What a number must be where it is calculated, for the text to calculate what the whole numbers say.

    Attributes
    ----------
    value : Expr
    low, high : int
        Between which it lies.
    conditions : tuple of Expr
        Under which it is calculated.
    otherwise : str
        What the text does if it does not.
    statement : object
        The TensorIR that calculates it.
    """

    value: Expr
    low: int
    high: int
    conditions: tuple[Expr, ...]
    otherwise: str
    statement: object


_Kind = TypeVar("_Kind", MemoryAccess, BarrierWait, Transfer, WarpMeeting)
Leaf = MemoryAccess | BarrierWait | Transfer | WarpMeeting
Item = Leaf | SerialLoop | Branch


@dataclass(frozen=True, eq=False)
class Function:
    """A stage function.

    Attributes
    ----------
    name : str
    tile, thread : Axis
        Its first two parameters; the extents are those that the caller uses.
    body : tuple of Item
    memories : tuple of Memory
        All but those of pointer parameters.
    pointers : tuple of Memory
        For each pointer parameter.
    problems : tuple of str
        What could not be read; nothing is proven of a function with problems.
    claims : tuple of Claim
        About its whole numbers.
    """

    name: str
    tile: Axis
    thread: Axis
    body: tuple[Item, ...]
    memories: tuple[Memory, ...]
    pointers: tuple[Memory, ...]
    problems: tuple[str, ...] = field(default=())
    claims: tuple[Claim, ...] = field(default=())


def leaves(
    items: Sequence[Item], conditions: tuple[Expr, ...] = (), loops: tuple[Axis, ...] = ()
) -> Iterator[tuple[Leaf, tuple[Expr, ...], tuple[Axis, ...]]]:
    """All but loops and branches in the order of the text, each with the conditions and the loops around it."""
    for item in items:
        if isinstance(item, SerialLoop):
            yield from leaves(item.body, conditions, (*loops, item.axis))
        elif isinstance(item, Branch):
            yield from leaves(item.then, (*conditions, item.condition), loops)
            if item.otherwise:
                yield from leaves(item.otherwise, (*conditions, operation("not", item.condition)), loops)
        else:
            yield item, conditions, loops


def accesses_of(items: Sequence[Item]) -> Iterator[tuple[MemoryAccess, tuple[Expr, ...]]]:
    """All accesses in the order of the text, each with all conditions under which it is made."""
    for item, conditions, _ in leaves(items):
        if isinstance(item, MemoryAccess):
            yield item, (*conditions, *item.conditions)


def all_of(items: Sequence[Item], kind: type[_Kind]) -> list[_Kind]:
    """All items of a kind in the order of the text, whatever their conditions."""
    return [item for item, _, _ in leaves(items) if isinstance(item, kind)]


def waits_of(items: Sequence[Item], scopes: Sequence[str] = ("block", "grid", "part")) -> bool:
    """Whether there are barriers of these scopes anywhere in these."""
    return any(wait.scope in scopes for wait in all_of(items, BarrierWait))


def always_waits(items: Sequence[Item]) -> bool:
    """Whether all threads of a block wait for each other in these, whatever conditions hold."""
    return any(
        (isinstance(item, BarrierWait) and item.scope == "block")
        or (isinstance(item, SerialLoop) and always_waits(item.body))
        or (isinstance(item, Branch) and always_waits(item.then) and always_waits(item.otherwise))
        for item in items
    )


def orders(items: Sequence[Item]) -> bool:
    """Whether the order matters in which these run: they hold a barrier or a group of copies."""
    return bool(all_of(items, BarrierWait) or all_of(items, Transfer))
