"""Work in other processes and on other machines; knows nothing of the compiler."""

from souffle.workers.job import Check, Engine, Job, Outcome

__all__ = ["Check", "Engine", "Job", "Outcome"]
