"""Searches schedules of stages and writes tuning logs; compilation reads them (``souffle.schedule.log``)."""

from souffle.tuning.arranging import arrange, sets_named
from souffle.tuning.bench import CandidateBench, MeasuringBench, PredictingBench, bench_for, cost_device_for
from souffle.tuning.report import ArrangingReport, TaskReport, TuningReport
from souffle.tuning.session import search
from souffle.tuning.shared_stage import Limits
from souffle.tuning.store import LogWriter, NewRecord
from souffle.tuning.tasks import Task, tasks_of
from souffle.tuning.transfer import recipes_nearby

__all__ = [
    "ArrangingReport",
    "CandidateBench",
    "Limits",
    "LogWriter",
    "MeasuringBench",
    "NewRecord",
    "PredictingBench",
    "Task",
    "TaskReport",
    "TuningReport",
    "arrange",
    "bench_for",
    "cost_device_for",
    "recipes_nearby",
    "search",
    "sets_named",
    "tasks_of",
]
