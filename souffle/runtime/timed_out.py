"""What a run says that has ended because a wait in a kernel was over."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.codegen.plan import Kernel, Plan
from souffle.errors import KernelTimeoutError
from souffle.watchdog import TimedOutWait, timed_out_wait

__all__ = ["timeout_error"]

_HELP = (
    "if others were only late, as with other work on the device, give a larger watchdog_ms; if it happens again, "
    'device="cpu" with checked=True runs the same text and looks at every access and barrier'
)


def timeout_error(plan: Plan, words: Sequence[int]) -> KernelTimeoutError | None:
    """The error of a run whose record holds these words; None where no wait was over.

    Parameters
    ----------
    plan : Plan
    words : sequence of int
        The record (:mod:`souffle.watchdog`).
    """
    wait = timed_out_wait(words)
    if wait is None:
        return None
    if wait.kernel >= len(plan.kernels):
        return KernelTimeoutError(f"{plan.name}: a wait was over, and its record {list(words)} names no kernel", wait)
    kernel = plan.kernels[wait.kernel]
    message = (
        f"kernel {kernel.name} of {plan.name} has ended, and its results are lost: block {wait.block} waited more than "
        f"{plan.options.watchdog_ms:g} ms (watchdog_ms) {_where(wait, kernel)}, for {_what(wait)}; {_HELP}"
    )
    return KernelTimeoutError(message, wait)


def _where(wait: TimedOutWait, kernel: Kernel) -> str:
    # The same stage may be called at several places.
    name = f" ({kernel.stages[wait.stage]})" if wait.stage < len(kernel.stages) else ""
    where = [f"before its stage {wait.stage}{name}"]
    if wait.step is not None:
        where.append(f"step {wait.step} of its loop")
    if wait.tile is not None:
        where.append(f"tile {wait.tile}")
    return ", ".join(where)


def _what(wait: TimedOutWait) -> str:
    if wait.kind != "grid barrier":
        return f"the {wait.kind} of block {wait.index} to be {wait.wanted} or more, and found {wait.found}"
    if wait.arrived is None:
        return f"the grid barrier of {wait.wanted} blocks, whose counter {wait.found:#010x} no such grid leaves"
    count, first = wait.arrived
    missing = "" if first else ", block 0 not among them"
    return f"the grid barrier, at which {count} of {wait.wanted} blocks had arrived{missing}"
