"""The page of the host's memory in which kernels write a wait that was over."""

from __future__ import annotations

import weakref

from souffle.codegen.plan import Plan
from souffle.runtime.cuda import Cuda
from souffle.runtime.timed_out import timeout_error
from souffle.watchdog import timed_out_wait

__all__ = ["RecordPage"]


class RecordPage:
    """Memory of the host that kernels write a record into, and that is read without asking the device.

    Attributes
    ----------
    address : int
        For kernels.
    reported : bool
        Whether an error has been made of it.
    """

    def __init__(self, plan: Plan, cuda: Cuda, nbytes: int) -> None:
        self._plan = plan
        host, self.address, self._words = cuda.map_host_memory(nbytes, "the watchdog's record")
        # Whoever holds the page may still read it: it goes when nobody does, and its kernels have ended by then.
        weakref.finalize(self, cuda.unmap_host_memory, host).atexit = False
        self.reported = False

    @property
    def written(self) -> bool:
        """Whether a wait was over."""
        return timed_out_wait(self._words) is not None

    def check(self) -> None:
        """Raise KernelTimeoutError if a wait was over in what has run so far."""
        error = timeout_error(self._plan, self._words)
        if error is not None:
            self.reported = True
            raise error
