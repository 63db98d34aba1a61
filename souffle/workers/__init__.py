"""Work in other processes and on other machines; knows nothing of the compiler."""

from souffle.workers.errors import WorkersLostError
from souffle.workers.job import Check, Engine, Job, Outcome, Places
from souffle.workers.registry import ENGINES, EngineKind, engine_for

__all__ = ["ENGINES", "Check", "Engine", "EngineKind", "Job", "Outcome", "Places", "WorkersLostError", "engine_for"]
