"""The rules in the order of preference. Another one is a :class:`Rule` in a file of its own, and is named here.

They go from the most to the least particular, and the last one takes everything that can run without a grid barrier
inside.
"""

from __future__ import annotations

from tvm import tirx

from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, Rule, Sketch
from souffle.schedule.gpu.rules.chained_products import CHAINED_PRODUCTS
from souffle.schedule.gpu.rules.channel_owned import CHANNEL_OWNED
from souffle.schedule.gpu.rules.contraction import CONTRACTION
from souffle.schedule.gpu.rules.elementwise import ELEMENTWISE
from souffle.schedule.gpu.rules.fallback import FALLBACK
from souffle.schedule.gpu.rules.interleaved_sums import INTERLEAVED_SUMS
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.rules.reduction import REDUCTION
from souffle.schedule.gpu.rules.rowwise import ROWWISE
from souffle.schedule.gpu.rules.tensor_core_contraction import TENSOR_CORE_CONTRACTION
from souffle.schedule.gpu.rules.window import WINDOW

__all__ = ["RULES", "register_rule", "sketch_of"]

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        CHANNEL_OWNED,
        MMA_CONTRACTION,
        TENSOR_CORE_CONTRACTION,
        WINDOW,
        CONTRACTION,
        CHAINED_PRODUCTS,
        INTERLEAVED_SUMS,
        ROWWISE,
        REDUCTION,
        ELEMENTWISE,
        FALLBACK,
    )
}
"""By name; a rule comes before those that it is preferred to."""


def register_rule(rule: Rule, *, before: str) -> None:
    """Add a rule that is not Souffle's own; ``del RULES[rule.name]`` takes it out again.

    Parameters
    ----------
    rule : Rule
    before : str
        The name of the rule that it is preferred to.

    Raises
    ------
    OptionError
        If there is no rule called `before`, or one of the new name already.
    """
    if before not in RULES:
        raise OptionError(f"before={before!r} is no rule; the rules are {', '.join(RULES)}")
    if rule.name in RULES:
        raise OptionError(f"there is a rule {rule.name!r} already; choose another name")
    rules = list(RULES.values())
    rules.insert(list(RULES).index(before), rule)
    RULES.clear()
    RULES.update({one.name: one for one in rules})


def sketch_of(name: str, func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
    """What the rule of a name offers for a stage; a name that no rule has is refused."""
    if name not in RULES:
        return Refused(f"there is no rule {name!r} (any more)")
    return RULES[name].sketch(StageForms(func), request)
