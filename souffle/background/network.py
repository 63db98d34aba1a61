"""A network that runs at once and gets faster: calls take the quick one until the optimized one takes its place."""

from __future__ import annotations

import contextlib
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from souffle.background.exchange import Exchange
from souffle.certificate import Certificate
from souffle.codegen.plan import Plan
from souffle.loading import network_of
from souffle.options import quiet
from souffle.request import CompileRequest
from souffle.runtime import BoundNetwork, KernelInfo, Network, Signature, TensorSpec
from souffle.runtime.host_network import HostNetwork
from souffle.runtime.stage_table import StageTable

__all__ = ["BackgroundNetwork", "BoundUntilExchanged", "compile_in_background"]

_WIDTH = 120


class BackgroundNetwork:
    """What ``souffle.compile(..., background=True)`` gives: a quick network now, the optimized one when it is ready.

    It is called as :class:`souffle.runtime.Network`, from any number of threads. A call takes one of the two networks
    as it begins, and all its outputs are of that one. The optimized network takes the quick one's place when

    - its process has compiled it, and its certificate does not refute it, as for :func:`souffle.compile`;
    - it has the same inputs and outputs: names, shapes, types;
    - its code is loaded, and for one random input its outputs are those of the quick one, within the tolerance of
      ``souffle check`` (not with ``verify="off"``, nor where no network for that device can run).

    If that fails, the quick network goes on: the next call warns once, :meth:`wait` raises the error, :attr:`error` is
    it. The quick network's memory is given back when the last call that took it has returned.

    :attr:`plan`, :attr:`certificate`, :attr:`kernels`, :attr:`stages` and :meth:`explain` show the network that the
    next call takes. What outlives this object, :meth:`save`, a copy and a pickle, is the optimized network, and is
    waited for.

    The compiler's process ends with this object, at the end of the interpreter and when this process is killed, and
    leaves no files. Ctrl-C does not reach it. In a fork of this process the quick network goes on.

    Parameters
    ----------
    exchange : Exchange or None
        ``None`` where there is nothing to wait for.
    network : Network or HostNetwork
        The one to begin with.
    """

    def __init__(self, exchange: Exchange | None, network: Network | HostNetwork) -> None:
        self._exchange = exchange
        # The exchange lets go of the first one.
        self._only = network if exchange is None else None
        if exchange is not None:
            exchange.begin_with(network)
            # The interpreter's end is seen to by the exchange, which waits for its files to be gone.
            weakref.finalize(self, exchange.cancel).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()
        return BackgroundNetwork, (None, self.network)

    def __repr__(self) -> str:
        return f"BackgroundNetwork({self.network!r}{'' if self.ready else f', {self._state()}'})"

    def __call__(self, /, *args: Any, out: Any = None, **named: Any) -> dict[str, Any]:
        """Run once (:meth:`souffle.runtime.Network.__call__`).

        Raises
        ------
        InputError, NoGpuError, CompilerNotFoundError, DeviceError
            As :class:`souffle.runtime.Network`.
        """
        network = self.network
        if self._exchange is not None and self._exchange.failed:
            self._exchange.warn()
        return network(*args, out=out, **named)

    def bind(self, inputs: Any = None, outputs: Any = None) -> BoundNetwork:
        """Settle the buffers of calls (:meth:`souffle.runtime.Network.bind`), which are those of both networks.

        A call takes the network that is there as it begins, as a call of this object does.
        """
        exchange = self._exchange
        network = self.network
        bound = network.bind(inputs, outputs)
        return bound if exchange is None else BoundUntilExchanged(exchange, network, bound)

    @property
    def network(self) -> Network | HostNetwork:
        """The network that a call would take now, which stays what it is: for ``on``, ``capture`` and ``time``."""
        exchange = self._exchange
        return self._only if exchange is None else exchange.network

    @property
    def ready(self) -> bool:
        """Whether the optimized network has taken the place; it stays True."""
        exchange = self._exchange
        return exchange is None or (exchange.done.is_set() and exchange.error is None)

    @property
    def error(self) -> BaseException | None:
        """Why there will be no optimized network; None while it is compiled, and when it is ready."""
        return None if self._exchange is None else self._exchange.error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the optimized network is ready.

        Parameters
        ----------
        timeout : float, optional
            Seconds; for ever where not given.

        Returns
        -------
        bool
            Whether it is; False after the timeout.

        Raises
        ------
        SouffleError
            What the compiler raised; :class:`~souffle.errors.BackgroundError` where its process ended in another way,
            the two networks do not compute the same, or it was cancelled.
        """
        return self._exchange is None or self._exchange.wait(timeout)

    def cancel(self) -> None:
        """End the compilation: the network that runs now goes on for good. Nothing happens where there is none."""
        if self._exchange is not None:
            self._exchange.cancel()

    @property
    def plan(self) -> Plan:
        """What was compiled of the network that a call would take now."""
        return self.network.plan

    @property
    def certificate(self) -> Certificate | None:
        """What was proven of the network that a call would take now."""
        return self.network.certificate

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``; ``"host"`` while LLVM code runs."""
        return self.network.device

    @property
    def signature(self) -> Signature:
        """The inputs and outputs, of both."""
        return self.network.signature

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the inputs, of both."""
        return self.network.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the outputs, of both."""
        return self.network.outputs

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """The kernels of the network that a call would take now."""
        return self.network.kernels

    @property
    def stages(self) -> StageTable:
        """The stages of the network that a call would take now."""
        return self.network.stages

    def explain(self) -> str:
        """Where the compilation in the background stands; then what was decided of the network that a call takes."""
        network, state = self.network, self._state()
        lines = textwrap.wrap(f"in the background: {state}", _WIDTH, subsequent_indent="  ") if state else []
        return "\n".join([*lines, network.explain()])

    def _state(self) -> str:
        exchange = self._exchange
        if exchange is None:
            return ""
        level = exchange.options.level
        if not exchange.done.is_set():
            return f"{level} is being compiled ({exchange.doing})"
        if exchange.error is None:
            return f"{level} was compiled; {exchange.comparison}"
        return f"{level} is not to be had: {type(exchange.error).__name__}: {exchange.error}"

    def open(self) -> None:
        """Load the code and the constants of the network that a call would take now."""
        self.network.open()

    def save(self, path: str | Path, *, constants: str = "stored") -> None:
        """Wait for the optimized network and write its ``.souffle`` file (:func:`souffle.runtime.artifact.save`).

        Raises
        ------
        SouffleError
            As :meth:`wait`; ``net.network.save`` writes the network that runs.
        """
        self.wait()
        self.network.save(path, constants=constants)


class BoundUntilExchanged(BoundNetwork):
    """Buffers that are bound to the network that runs now, and to the optimized one from when it is there."""

    def __init__(self, exchange: Exchange, network: Network | HostNetwork, bound: BoundNetwork) -> None:
        self._exchange, self._to, self._bound = exchange, network, bound
        super().__init__(bound.buffers, self._run_newest)

    def _run_newest(self) -> None:
        network = self._exchange.network
        if network is not self._to:
            self._to, self._bound = network, network.bind(dict(self.inputs), dict(self.outputs))
        self._bound()


def compile_in_background(
    request: CompileRequest,
    *,
    device: str,
    on_host: bool = False,
    progress: Callable[[str], None] = quiet,
    ready: Callable[[Plan], None] | None = None,
) -> BackgroundNetwork:
    """Start to compile, and give what runs meanwhile: the same program at V0, whose compilation is waited for.

    Parameters
    ----------
    request : CompileRequest
    device : str
        Where a CUDA network runs.
    on_host : bool
        Whether LLVM code runs meanwhile, whatever the request is for.
    progress : callable, optional
        Told of the first network's compilation.
    ready : callable, optional
        Given the plan of what was asked for when its network has taken the place.

    Raises
    ------
    SouffleError
        If the first network cannot be compiled.
    """
    first = request.first(on_host=on_host)
    if (request.options.level, request.on_host) == (first.options.level, first.on_host):
        plan = request.plan(progress=progress)
        if ready is not None:
            ready(plan)
        return BackgroundNetwork(None, network_of(plan, device=device))
    with contextlib.ExitStack() as unless_made:
        exchange = Exchange(request, device, ready)
        unless_made.callback(exchange.cancel)
        plan = first.plan(progress=progress)
        network = BackgroundNetwork(exchange, network_of(plan, device=device))
        unless_made.pop_all()
    return network
