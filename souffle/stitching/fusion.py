"""Stages by a planner of patterns, in the place of Souffle's own rules of what joins a stage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from souffle.cost.device import CostDevice, device_of_arch
from souffle.errors import OptionError
from souffle.options import ON_CHIP, SOUFFLE, Options
from souffle.program import TEProgram
from souffle.schedule.form_stages import JoinPolicy
from souffle.stitching.compose import Composer
from souffle.stitching.patterned import PatternedProgram, patterned
from souffle.stitching.planner import FusionPlanner
from souffle.stitching.registry import fusion_planner_for

__all__ = ["Fusion", "fusion_of"]

_BETWEEN_STAGES = frozenset(["resident", "weights"])
"""Of :data:`souffle.options.ON_CHIP` what leaves stages as they are."""


@dataclass(frozen=True)
class Fusion:
    """A planner, and what it plans for.

    Attributes
    ----------
    planner : FusionPlanner
    device : CostDevice
    options : Options
    """

    planner: FusionPlanner
    device: CostDevice
    options: Options

    @property
    def on_chip(self) -> frozenset[str]:
        """What of :data:`souffle.options.ON_CHIP` stages and kernels may have.

        All within the patterns of a planner that has block composition, at any level; else what the level allows
        between stages.
        """
        within = frozenset(ON_CHIP) if self.stitches else self.options.on_chip & _BETWEEN_STAGES
        return within.difference(self.options.disable)

    @property
    def stitches(self) -> bool:
        """Whether the planner has block composition."""
        return getattr(self.planner, "block_composition", True)

    @cached_property
    def composer(self) -> Composer:
        """What joins the stages of its patterns; equal patterns are searched once, however often stages are formed."""
        return Composer(self.device, stitches=self.stitches, owns="channels" in self.on_chip)

    def patterned(self, program: TEProgram) -> PatternedProgram:
        """See :func:`souffle.stitching.patterned.patterned`."""
        policy = self.options.policy
        return patterned(program, self.planner, self.device, None if policy is None else os.fspath(policy))

    def policy(self, patterns: PatternedProgram) -> JoinPolicy:
        """How stages are formed of patterns."""
        return JoinPolicy(False, self.on_chip - _BETWEEN_STAGES, patterns.pattern_of, self.composer)


def fusion_of(options: Options) -> Fusion | None:
    """What the options name; ``None`` for Souffle's own rules.

    Raises
    ------
    OptionError
        If there is no planner of that name, or no product of the architecture is described to plan for.
    """
    if options.fusion == SOUFFLE:
        return None
    planner, device = fusion_planner_for(options.fusion), device_of_arch(options.arch)
    if device is None:
        raise OptionError(
            f"fusion={options.fusion!r} plans by predicted times, and no GPU of {options.arch} is described; "
            "arch='sm_80' or 'sm_90' has one, and souffle measure-device describes the one at hand"
        )
    return Fusion(planner, device, options)
