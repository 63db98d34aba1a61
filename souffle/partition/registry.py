"""The planners by name, and those that stand elsewhere.

Another planner is a class with the attributes of :class:`souffle.partition.planner.Planner`. In here it is one more
name in ``PLANNERS``. Outside of the package it is named by where it stands, ``"mypackage.module:planner"``, or an
installed package declares it under a short name, as an entry point of the group ``souffle.planners``
(``docs/extending.md``).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from souffle.errors import OptionError
from souffle.partition.persistent import Persistent
from souffle.partition.planner import Partition, PartitionRequest, Planner, Subprogram
from souffle.partition.souffle_rule import SouffleRule

__all__ = ["ENTRY_POINTS", "ONE_KERNEL_PER_STAGE", "PLANNERS", "planner_for"]

ENTRY_POINTS = "souffle.planners"
"""The group of entry points in which installed packages name planners."""

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (SouffleRule(), Persistent())}
"""By the name that the option ``partition`` takes."""


class _OneKernelPerStage:
    """The partition of levels V0 to V2: every stage is a kernel."""

    name = "none"
    measures = False

    def plan(self, request: PartitionRequest) -> Partition:
        """See :meth:`souffle.partition.planner.Planner.plan`."""
        return Partition(tuple(Subprogram((stage,)) for stage in request.stages))


ONE_KERNEL_PER_STAGE: Planner = _OneKernelPerStage()


def planner_for(name: str) -> Planner:
    """The planner of a name.

    Parameters
    ----------
    name : str
        One of ``PLANNERS``, ``"module:attribute"``, or an entry point of the group ``souffle.planners``.

    Raises
    ------
    OptionError
        If there is none: listing the names, or saying what is wrong with the module.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    if ":" in name:
        return _checked(name, _imported(name))
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        return _checked(name, _imported(installed[name].value))
    known = ", ".join((*PLANNERS, *installed))
    raise OptionError(f"partition={name!r} is not valid; choose one of {known}, or name your own as module:attribute")


def _imported(place: str) -> object:
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"partition={place!r} cannot be had: {error}") from error


def _checked(name: str, found: object) -> Planner:
    planner = found() if isinstance(found, type) else found
    missing = [one for one in ("name", "measures", "plan") if not hasattr(planner, one)]
    if missing:
        raise OptionError(f"partition={name!r} is no planner: it lacks {', '.join(missing)}; see docs/extending.md")
    return planner
