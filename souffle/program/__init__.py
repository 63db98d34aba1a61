"""TE programs: the data that the compiler works on."""

from souffle.program.te_program import TE, ExternTE, Origin, ProgramError, Tensor, TEProgram, make_te

__all__ = ["TE", "ExternTE", "Origin", "ProgramError", "TEProgram", "Tensor", "make_te"]
