"""What the functions and instructions that stages call do to memory. What is not listed here is not proven.

Stated anew from the CUDA and PTX manuals, not imported from the rules that emit them: a name that changes there becomes
an UNKNOWN here until somebody says what it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "ACTIVE_MASKS",
    "BYTE_DOT",
    "BYTE_PRODUCT",
    "COPY",
    "IGNORED",
    "NO_MEMORY",
    "SHUFFLES",
    "TAKE",
    "WHOLE_WARPS",
    "Effect",
    "effect_of",
]


@dataclass(frozen=True)
class Effect:
    """What one argument's memory goes through.

    Attributes
    ----------
    argument : int
        Position among the arguments, the function's name not counted.
    width : int
        Bytes.
    writes, reads : bool
    by : str
        As in :class:`souffle.verify.accesses.MemoryAccess`.
    condition : int or None
        The argument without which it does not happen.
    repeats : int
    distance : tuple of (int, int) or None
        From one repeat to the next: the argument that says so, and the bytes that it counts in.
    alignment : int
        Bytes of which the address must be a multiple.
    """

    argument: int
    width: int
    writes: bool = False
    reads: bool = False
    by: str = "thread"
    condition: int | None = None
    repeats: int = 1
    distance: tuple[int, int] | None = None
    alignment: int = 1


ACTIVE_MASKS = frozenset({"tirx.cuda.__activemask", "tirx.tvm_warp_activemask"})
"""Operations that name the lanes of the warp that come to them together."""

SHUFFLES = frozenset(
    {
        *("tirx.cuda.__shfl_sync", "tirx.cuda.__shfl_down_sync", "tirx.cuda.__shfl_up_sync"),
        *("tirx.cuda.__shfl_xor_sync", "tirx.tvm_warp_shuffle", "tirx.tvm_warp_shuffle_up"),
        "tirx.tvm_warp_shuffle_down",
    }
)
"""Operations by which the lanes of a warp that the first argument names give each other a register."""

NO_MEMORY = (
    ACTIVE_MASKS
    | SHUFFLES
    | {"tirx.reinterpret", "prim.likely", "tirx.isnan", "tirx.isinf", "tirx.isfinite"}
    | {f"souffle_add_dot_{left}_{right}" for left in ("s8", "u8") for right in ("s8", "u8")}
)
"""Operations on registers, beside the functions of :func:`souffle.verify.vocabulary.only_calculates`."""

WHOLE_WARPS = frozenset(
    {
        *("tirx.tvm_fill_fragment", "tirx.tvm_load_matrix_sync", "tirx.tvm_store_matrix_sync", "tirx.tvm_mma_sync"),
        *("souffle_load_matrices", "souffle_load_transposed_matrices", "souffle_add_product"),
        *("souffle_load_word_matrices", "souffle_add_tf32_product", "souffle_begin_tf32_product"),
        *(f"souffle_add_byte_product_{left}_{right}" for left in ("s8", "u8") for right in ("s8", "u8")),
    }
)
"""Instructions that all lanes of a warp make together (``.sync.aligned`` of PTX)."""

# souffle_wait_for_grid and souffle_watched_wait_for_grid have no entry: no stage may call them. ``grid_barriers.py``
# restates their texts for kernels.

IGNORED = frozenset({"souffle_prefetch_l2"})
"""Functions that neither read nor write as far as a program can tell; the kernel's reader bounds what they touch."""

COPY = re.compile(r"souffle_copy_async(_or_zero)?<(\d+)>")
BYTE_PRODUCT = re.compile(r"souffle_add_byte_product_(s8|u8)_(s8|u8)")
"""``mma.m16n8k32``"""

BYTE_DOT = re.compile(r"souffle_add_dot_(s8|u8)_(s8|u8)")
"""``dp4a``, which touches no memory."""

TAKE = re.compile(r"souffle_take_totals<(\d+), *(\d+)>")


def effect_of(name: str) -> tuple[Effect, ...] | None:
    """The effects of a function that a stage calls by name; ``None`` for one that is not known."""
    copy = COPY.fullmatch(name)
    if copy:
        width, condition = int(copy.group(2)), 2 if copy.group(1) else None
        # Where the condition does not hold zeros are written, in the same way.
        into = Effect(0, width, writes=True, by="copy", alignment=width)
        return into, Effect(1, width, reads=True, by="copy", condition=condition, alignment=width)
    take = TAKE.fullmatch(name)
    if take:
        lanes, planes = int(take.group(1)), int(take.group(2))
        wide = 16 if lanes % 4 == 0 else 8 if lanes == 2 else 4
        sums = Effect(1, 4 * lanes, reads=True, repeats=planes, distance=(2, 4), alignment=wide)
        return Effect(0, 4 * lanes, writes=True), sums
    if name in ("souffle_load_matrices", "souffle_load_transposed_matrices", "souffle_load_word_matrices"):
        # Each thread points to one row of 16 bytes; the instruction hands rows to other threads of the warp.
        return Effect(0, 16, writes=True), Effect(1, 16, reads=True, by="warp", alignment=16)
    if name == "souffle_load_words":
        words = Effect(1, 4, reads=True, repeats=2, distance=(2, 4), alignment=4)
        return Effect(0, 8, writes=True), words
    if name == "souffle_round_to_tf32":
        return (Effect(0, 16, reads=True, writes=True),)
    if name == "souffle_split_to_tf32":
        return Effect(0, 16, reads=True, writes=True), Effect(1, 16, writes=True)
    if name == "souffle_begin_tf32_product":
        return Effect(0, 16, writes=True), Effect(1, 16, reads=True), Effect(2, 8, reads=True)
    if name in ("souffle_add_product", "souffle_add_tf32_product") or BYTE_PRODUCT.fullmatch(name):
        return Effect(0, 16, reads=True, writes=True), Effect(1, 16, reads=True), Effect(2, 8, reads=True)
    if name == "souffle_scale_part":
        return Effect(0, 16, reads=True, writes=True), Effect(1, 8, reads=True)
    if name == "souffle_put_totals":
        return Effect(0, 8, writes=True, alignment=8), Effect(1, 8, reads=True)
    return None
