"""What an engine raises when there is nobody left to do its work."""

from __future__ import annotations

from concurrent.futures import CancelledError

from souffle.errors import SouffleError

__all__ = ["WorkersLostError"]


class WorkersLostError(SouffleError, CancelledError):
    """All workers are gone and will not come back, as when the head of a Ray cluster ends.

    Futures that are not done raise it, and so does :meth:`~souffle.workers.job.Engine.submit` from then on. It says
    nothing of the jobs: each may be given to another engine as it is. To who does not tell it apart, the future was
    cancelled.
    """
