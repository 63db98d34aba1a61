"""What stage functions compute, whatever calls them: each as one that blocks call, and that reads its own constants."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from souffle.verify.kept_memory import without_kept_memory
from souffle.verify.kept_slices import without_slices
from souffle.verify.parts import without_parts
from souffle.verify.prologues import without_prologues
from souffle.verify.shares import without_shares
from souffle.verify.teams import without_teams

__all__ = ["bare_functions"]


def bare_functions(
    kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]
) -> Mapping[str, tirx.PrimFunc]:
    """The functions of some kernels without teams, without memory that is kept and with all of their copies, as far as
    there is such a form.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names.
    """
    alone = without_prologues(kernels, functions)
    parts = without_parts(alone.kernels, alone.functions)
    shares = without_shares(parts.kernels, parts.functions)
    teams = without_teams(shares.kernels, shares.functions)
    slices = without_slices(teams.kernels, teams.functions)
    return without_kept_memory(slices.kernels, slices.functions).functions
