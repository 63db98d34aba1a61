"""The GPU's scheduler, as the formation of stages asks it: the preferred rule that gives code, or a cheaper one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tvm
from tvm import tirx

from souffle.decision import Refused
from souffle.program.shared import OncePer
from souffle.schedule.drafts import Answer
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.gpu.offers import Offers
from souffle.schedule.gpu.registry import RULES
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.tvm_compat import named_key, structural_digest

__all__ = ["ANSWERS", "LEAST", "THREADS", "GpuScheduler", "Prices", "gpu_request"]

THREADS = 256
"""Of a block, the same for all stages, so that any of them can be merged."""


ANSWERS: OncePer[Answer] = OncePer(limit=1024)
"""Of all networks that a process compiles, at several levels or in several shapes. By all that an answer comes of, so
that a network has one text whatever was compiled before it."""

LEAST: OncePer[float] = OncePer()
"""Clocks, as for :meth:`GpuScheduler.least_seconds`; kept as answers are."""


class Prices(Protocol):
    """Predicted seconds of stages in a kernel, each with the grid sync before it."""

    error: float
    """The factor by which two must differ to be told apart."""

    def __call__(self, functions: Sequence[DeviceFunction]) -> float:
        """Of a lowered stage."""
        ...

    def of_clocks(self, clocks: float) -> float:
        """Of a stage by the estimate of its rule."""
        ...


def gpu_request(device: GpuDevice, threads: int = THREADS) -> GpuRequest:
    """What schedules for a device are made for: what one block may have of it."""
    return GpuRequest(device.arch, threads, device.sm_count, device.shared_per_block)


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A rule's schedule and the code that it gives."""

    rule: Rule
    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]


class GpuScheduler:
    """Schedules and lowers stages for one device, each distinct one once in a process.

    Of the rules that apply it takes the most preferred one, unless another's schedule is predicted to take less time by
    more than the cost model's error.

    Parameters
    ----------
    device : GpuDevice
    price : Prices, optional
        Without it the order of the rules decides.
    threads : int
        Of a block.

    Attributes
    ----------
    request : GpuRequest
    target : Target
        TVM's for the device.
    error : float
        See :class:`souffle.schedule.drafts.Scheduler`.
    """

    def __init__(self, device: GpuDevice, price: Prices | None = None, threads: int = THREADS) -> None:
        self.request = gpu_request(device, threads)
        self.target: tvm.target.Target = cuda_target(device.arch)
        self.error = 1.0 if price is None else price.error
        self._price = price
        self._answers: dict[str, Answer] = {}
        self._least: dict[str, float] = {}
        self._keys: dict[str, Hashable] = {}
        self._offered: tuple[str, Offers] | None = None

    def __call__(self, func: tirx.PrimFunc) -> Answer:
        """See :class:`souffle.schedule.drafts.Scheduler`."""
        digest = structural_digest(func)
        if digest not in self._answers:
            made_of = self._made_of(func, digest)
            self._answers[digest] = ANSWERS(made_of, lambda: self._answer(self._offers(func, digest)))
        return self._answers[digest]

    def least_seconds(self, func: tirx.PrimFunc) -> float | None:
        """See :class:`souffle.schedule.drafts.Scheduler`: by the first rule that offers something."""
        if self._price is None:
            return None
        digest = structural_digest(func)
        if digest not in self._least:
            self._least[digest] = LEAST(self._made_of(func, digest), lambda: self._offers(func, digest).least_clocks())
        return self._price.of_clocks(self._least[digest])

    def seconds(self, answer: Answer) -> float | None:
        """See :class:`souffle.schedule.drafts.Scheduler`."""
        return None if self._price is None else self._price(answer.functions)

    def _made_of(self, func: tirx.PrimFunc, digest: str) -> Hashable:
        """All that what is said of a stage comes of; names too, which texts have."""
        if digest not in self._keys:
            self._keys[digest] = named_key(func)
        return self._keys[digest], self.request, self._price, tuple(RULES.values())

    def _offers(self, func: tirx.PrimFunc, digest: str) -> Offers:
        """What rules offer for a stage: one that is not refused for the least that it takes is asked about next."""
        if self._offered is None or self._offered[0] != digest:
            self._offered = (digest, Offers(func, self.request))
        return self._offered[1]

    def _answer(self, offers: Offers) -> Answer:
        rules = offers.preferred()
        reasons: list[str] = []
        for rule in rules:
            first = self._lowered(offers, rule)
            if isinstance(first, Refused):
                reasons.append(first.reason)
                continue
            chosen, reason = self._cheaper(offers, first, rules)
            schedule = chosen.schedule
            # As good as the preferred rule's, at least.
            rank = list(RULES).index(first.rule.name)
            why = "; ".join([*reasons, reason] if reason else reasons)
            rowwise = chosen.rule.whole_rows
            return Answer(schedule, schedule.rule, rank, rowwise, schedule.tiles, why, chosen.functions)
        return Answer(None, "none", len(RULES), False, 0, "; ".join(reasons))

    def _lowered(self, offers: Offers, rule: Rule) -> _Lowered | Refused:
        schedule = offers.schedule(rule)
        if isinstance(schedule, Refused):
            return schedule
        try:
            return _Lowered(rule, schedule, lower_stage("stage", schedule, self.target))
        except LoweringError as error:
            return Refused(f"{rule.name}: {error}")

    def _cheaper(self, offers: Offers, first: _Lowered, rest: Iterable[Rule]) -> tuple[_Lowered, str]:
        """The cheapest of a schedule and those of other rules, and why it is another one.

        A prediction takes as long as the lowering before it, so it is asked for only where a rule's own estimate says
        that it may be the cheapest: not more than the first's by their estimates, and less than it by the prediction.
        """
        price = self._price
        if price is None or not offers.estimates(first.rule):
            return first, ""
        others = list(rest)
        bound = price.error * offers.clocks(first.rule)
        clocks = {rule: offers.clocks(rule, below=bound) for rule in others}
        near = sorted((rule for rule in others if clocks[rule] < bound), key=clocks.__getitem__)
        if not near:
            return first, ""
        own = price(first.functions)
        best, least = first, own / price.error
        for rule in near:
            if price.of_clocks(clocks[rule]) >= least:
                break
            other = self._lowered(offers, rule)
            if isinstance(other, _Lowered) and price(other.functions) < least:
                best, least = other, price(other.functions)
        if best is first:
            return first, ""
        return best, f"{first.rule.name}: {own * 1e6:.1f} µs predicted, {least * 1e6:.1f} by {best.rule.name}"
