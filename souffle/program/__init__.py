"""TE programs: the data that the compiler works on."""

from souffle.program.te import TE, ExternTE, Origin, ProgramError, Tensor, make_te
from souffle.program.te_program import TEProgram

__all__ = ["TE", "ExternTE", "Origin", "ProgramError", "TEProgram", "Tensor", "make_te"]
