"""From the network that runs to the one that is compiled meanwhile: what is asked of that, and when it takes over."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType

import numpy as np

from souffle.background.process import CompileProcess
from souffle.certificate import REFUTED
from souffle.codegen.plan import Plan
from souffle.errors import BackgroundError, CertificateError, CompilerNotFoundError, NoGpuError
from souffle.loading import network_of
from souffle.options import Options
from souffle.request import CompileRequest
from souffle.runtime import Network
from souffle.runtime.comparison import compare, random_inputs
from souffle.runtime.host_network import HostNetwork

__all__ = ["Exchange", "check_alike", "compared"]

_GRACE_SECONDS = 1.0
"""For a thread that looks at a network while the interpreter ends."""

_LIVE: weakref.WeakSet[Exchange] = weakref.WeakSet()


class Exchange:
    """The network that the next call takes, and the thread that waits for a better one.

    Parameters
    ----------
    request : CompileRequest
        What is compiled in the background, which begins now.
    device : str
        See :class:`souffle.runtime.Network`.
    ready : callable, optional
        Given the plan of the better network when that has taken the place.

    Attributes
    ----------
    network : Network or HostNetwork
        What the next call takes. It is read once for each call and set once, in one step: there is no call that two
        networks answer.
    error : BaseException or None
        Why there is no other network.
    done : threading.Event
        Whether there will be no further change.
    doing : str
        What is being done.
    comparison : str
        What was found of the two networks, in words.
    """

    network: Network | HostNetwork

    def __init__(self, request: CompileRequest, device: str, ready: Callable[[Plan], None] | None = None) -> None:
        self.options, self.done = request.options, threading.Event()
        self.error: BaseException | None = None
        self.doing, self.comparison = "starting", ""
        self._device, self._ready = device, ready
        self._cancelled = self._changed = False
        self._first_there = threading.Event()
        self._unsaid: list[str] = []
        self.process = CompileProcess(request)
        # A daemon: the interpreter would wait for any other thread before it calls what is registered for its end.
        self._thread = threading.Thread(target=self._run, name="souffle-background", daemon=True)
        _LIVE.add(self)
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self.process.give_up)
            self._thread.start()
            unless_started.pop_all()

    def begin_with(self, network: Network | HostNetwork) -> None:
        """The network that runs until then."""
        self.network = network
        self._first_there.set()

    def _run(self) -> None:
        with _Surfacing(self):
            self._change()

    def _change(self) -> None:
        plan = self.process.plan(self._tell)
        self._first_there.wait()
        if self._cancelled:
            return
        self._tell("comparing")
        check_alike(plan, self.network.plan, self.options)
        network = network_of(plan, device=self._device)
        self.comparison = compared(network, self.network, self.options)
        if not self._cancelled:
            self.network, self._changed = network, True
            if self._ready is not None:
                self._ready(plan)

    def _tell(self, what: str) -> None:
        self.doing = what

    def settle(self, error: BaseException | None) -> None:
        """There will be no further change."""
        level = self.options.level
        if self._changed:
            error = None
        elif self._cancelled:
            error = BackgroundError(f"the compilation of {level} in the background was cancelled")
        else:
            self._unsaid.append(
                f"the network that was compiled in the background ({level}) is not to be had, and V0 goes on: "
                f"{type(error).__name__}: {error}"
            )
        self.error = error
        self.done.set()

    def cancel(self) -> None:
        """End the compilation; nothing is said of it. May be called at any time, from a finalizer too."""
        if not self.done.is_set():
            self._cancelled = True
            self.process.kill()
            self._first_there.set()

    def warn(self) -> None:
        """Say, once, that there will be no other network, unless that was raised already."""
        with contextlib.suppress(IndexError):
            warnings.warn(self._unsaid.pop(), RuntimeWarning, stacklevel=3)

    @property
    def failed(self) -> bool:
        """Whether there is something to warn of."""
        return bool(self._unsaid)

    def wait(self, timeout: float | None) -> bool:
        """Whether the change was made within so many seconds.

        Raises
        ------
        SouffleError
            If it will never be made: why.
        """
        if not self.done.wait(timeout):
            return False
        if self.error is not None:
            self._unsaid.clear()
            raise self.error
        return True

    def end_with_the_interpreter(self) -> None:
        """As :meth:`cancel`, and wait for the thread, which takes away the process and its files."""
        self.cancel()
        self._thread.join(_GRACE_SECONDS)

    def forget(self) -> None:
        """In a fork of this process, where the thread is not: the compilation is the parent's."""
        if not self.done.is_set():
            self.process.forget()
            self.done = threading.Event()
            self.settle(
                BackgroundError(
                    "this process was forked from the one that compiles; wait for the network before the fork, or "
                    "give the new process a file of it"
                )
            )


class _Surfacing(contextlib.AbstractContextManager[None]):
    """Hands whatever ends the thread's work to who waits for it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        if error is not None:
            # Its frames would keep the network that was refused.
            traceback.clear_frames(where)
        self._exchange.settle(error)
        return True


def check_alike(plan: Plan, first: Plan, options: Options) -> None:
    """Refuse a plan that cannot take the place of the one that runs.

    Parameters
    ----------
    plan, first : Plan
        The one from the background, and the one that runs.
    options : Options
        What was asked for.

    Raises
    ------
    BackgroundError
        If inputs or outputs have other names, shapes, types or another order, it was compiled with other options, or
        its certificate is missing.
    CertificateError
        If it is refuted.
    """

    def interface(plan: Plan) -> list[tuple[object, ...]]:
        edges = [b for b in plan.buffers if b.kind in ("input", "output")]
        return [(b.kind, b.label, b.shape, b.dtype) for b in sorted(edges, key=lambda b: b.kind)]

    if interface(plan) != interface(first):
        raise BackgroundError(
            f"what was compiled in the background of {first.name} has other inputs and outputs: {interface(plan)} and "
            f"not {interface(first)}"
        )
    for name in ("level", "precision"):
        asked, found = getattr(options, name), getattr(plan.options, name)
        if asked != found:
            raise BackgroundError(f"what was compiled in the background has {name} {found}, and {asked} was asked for")
    if options.verify == "off" or plan.options.arch.startswith("llvm"):
        return
    if plan.certificate is None:
        raise BackgroundError(f"what was compiled in the background of {first.name} comes without a certificate")
    if plan.certificate.verdict == REFUTED:
        raise CertificateError(f"what was compiled in the background of {first.name} is refuted", plan.certificate)


def compared(network: Network | HostNetwork, first: Network | HostNetwork, options: Options) -> str:
    """Run both once, with the same random inputs, unless nothing is to be verified.

    Returns
    -------
    str
        What was found, in words. A GPU's network is not looked at where not even the first one can run, as on a
        machine without a GPU that compiles for others.

    Raises
    ------
    BackgroundError
        If an output is not the same within the tolerance of :func:`souffle.runtime.comparison.compare`.
    NoGpuError, CompilerNotFoundError, DeviceError
        If the network cannot run here while the first one can, or fails.
    """
    if options.verify == "off":
        return 'their outputs were not compared, as verify="off" asks for'
    inputs = random_inputs(first.signature.inputs)
    try:
        expected = first(inputs)
    except (NoGpuError, CompilerNotFoundError) as error:
        return f"their outputs were not compared, since neither runs here: {error}"
    found = network(inputs)
    result = compare(
        {name: np.asarray(value) for name, value in found.items()},
        {name: np.asarray(value) for name, value in expected.items()},
        options.precision,
    )
    if not result.ok:
        raise BackgroundError(
            f"{first.plan.options.level} and {options.level} of {first.plan.name} do not compute the same: for random "
            f"inputs, outputs are {result.error:.2g} of their largest magnitude apart, more than {options.precision} "
            'allows; verify="off" compares nothing'
        )
    return f"for random inputs, outputs of both are at most {result.error:.2g} of their largest magnitude apart"


def _end_all() -> None:
    for exchange in list(_LIVE):
        exchange.end_with_the_interpreter()


def _forget_all() -> None:
    for exchange in list(_LIVE):
        exchange.forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
