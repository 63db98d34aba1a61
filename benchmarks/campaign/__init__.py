"""Campaigns: named cases in an order, each some jobs for workers (:mod:`souffle.workers`), and a file of records.

A campaign gives its cases as generators that yield jobs, are sent their outcomes and return a record
(:mod:`souffle.workers.cases`). A job's function is one of a module, takes plain data and gives plain data, so that it
makes no difference where it runs; files are written here. The records of equal cases are equal whichever and however
many workers there were, times aside, and the same command goes on with the file where it stopped.
"""

from benchmarks.campaign.options import add_seed_options, add_worker_options, count_of, seeds, where
from benchmarks.campaign.records import Record, RecordFile, read_records, without_times
from benchmarks.campaign.run import Death, More, NamedCase, Workers, death_of, run_cases

__all__ = [
    "Death",
    "More",
    "NamedCase",
    "Record",
    "RecordFile",
    "Workers",
    "add_seed_options",
    "add_worker_options",
    "count_of",
    "death_of",
    "read_records",
    "run_cases",
    "seeds",
    "where",
    "without_times",
]
