"""All tables by their names: what has to be made for each, and the table of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from souffle.evaluation import other_tables, souffle_figures, souffle_tables, stitching_tables
from souffle.evaluation.cells import PaperTable
from souffle.evaluation.network_rows import Task
from souffle.evaluation.setting import Setting
from souffle.evaluation.souffle_rows import Rows

__all__ = ["TABLES", "TableMaker"]


@dataclass(frozen=True)
class TableMaker:
    """How a table comes about.

    Attributes
    ----------
    tasks : callable
        What has to be made for it, under a setting.
    table : callable
        The table, of a setting and what was made.
    """

    tasks: Callable[[Setting], list[Task]]
    table: Callable[[Setting, Rows], PaperTable]


TABLES = {
    "table3": TableMaker(souffle_tables.table3_tasks, souffle_tables.table3),
    "table4": TableMaker(souffle_tables.table4_tasks, souffle_tables.table4),
    "table5": TableMaker(souffle_tables.table5_tasks, souffle_tables.table5),
    "table6": TableMaker(souffle_tables.table6_tasks, souffle_tables.table6),
    "figure1": TableMaker(souffle_figures.figure1_tasks, souffle_figures.figure1),
    "figure6": TableMaker(souffle_figures.figure6_tasks, souffle_figures.figure6),
    "stitching-2021-table2": TableMaker(stitching_tables.breakdown_tasks, stitching_tables.breakdown),
    "stitching-2019-table2": TableMaker(stitching_tables.workload_tasks, stitching_tables.characteristics),
    "stitching-2019-table3": TableMaker(stitching_tables.workload_tasks, stitching_tables.ratios),
    "stitching-2019-table4": TableMaker(stitching_tables.workload_tasks, stitching_tables.shared_memory),
    "hfuse-figure7": TableMaker(other_tables.no_tasks, other_tables.pairs),
    "hfuse-figure8": TableMaker(other_tables.no_tasks, other_tables.kernels_alone),
    "hfuse-figure9": TableMaker(other_tables.no_tasks, other_tables.pairs_in_detail),
    "learning-table1": TableMaker(other_tables.learned_tasks, other_tables.learned),
}
"""In the order of the papers; names are those of :func:`souffle.evaluation.published.table_names`."""
