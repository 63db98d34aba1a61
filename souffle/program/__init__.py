"""TE programs: the data that the compiler works on."""

from souffle.program.fused import FusedTE, fuse, parts_of, with_parts
from souffle.program.loop import Carried, Collected, Indexed, Loop
from souffle.program.te import ELEMENT_TYPES, TE, ExternTE, InTiles, Origin, ProgramError, Tensor, make_te
from souffle.program.te_program import Item, TEProgram
from souffle.program.together import together

__all__ = [
    "ELEMENT_TYPES",
    "TE",
    "Carried",
    "Collected",
    "ExternTE",
    "FusedTE",
    "InTiles",
    "Indexed",
    "Item",
    "Loop",
    "Origin",
    "ProgramError",
    "TEProgram",
    "Tensor",
    "fuse",
    "make_te",
    "parts_of",
    "together",
    "with_parts",
]
