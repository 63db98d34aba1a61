"""What a user calls for a report: of a model, which is compiled at several levels, of a network, or of a saved one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import souffle
from souffle.codegen.plan import Plan
from souffle.errors import OptionError
from souffle.options import LEVELS, Hook, LateHook
from souffle.report import Report, TeFacts, page_of, report_of
from souffle.runtime import Network, VersionedNetwork, artifact
from souffle.runtime.plan_versions import PlanVersions
from souffle.wording import did_you_mean

__all__ = ["write_report"]


def write_report(
    model: Any,
    path: str | os.PathLike,
    *,
    levels: Sequence[str] = tuple(LEVELS),
    progress: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> Report:
    """Write a report: one HTML file that shows what was compiled and why, and needs no network (``docs/report.md``).

    Parameters
    ----------
    model : path, bytes, ModelProto, TEProgram or Network
        A model, as :func:`souffle.compile` takes it; or a network that is compiled already, or saved in a ``.souffle``
        file, of which the report shows its level alone, and no TEs.
    path : path
        Of the HTML file.
    levels : sequence of str
        At which a model is compiled, to be compared. The last of ``"V0"`` to ``"V4"`` among them is the one that all
        else is of.
    progress : callable, optional
        Told in a few words what is being done.
    options
        Of a model, those of :func:`souffle.compile`.

    Returns
    -------
    Report
        The data of the page (:mod:`souffle.report.schema`).

    Raises
    ------
    OptionError
        If there is nothing to compile at these levels, what is given has no CUDA kernels, or several versions, or the
        file cannot be written.
    ArtifactError
        If a file cannot be read, or is of before plans kept what a report shows.
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        # Before minutes of compiling.
        raise OptionError(f"{path} cannot be written: {'it is' if path.is_dir() else f'{path.parent} is not'} a folder")
    plans, tes = _plans(model, levels, progress, options)
    progress("writing the report")
    shown = plans[-1]
    report = report_of(shown, plans[:-1], tes)
    page = page_of(report, [module.text for module in shown.modules])
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from error
    return report


def _plans(
    model: Any, levels: Sequence[str], progress: Callable[[str], None], options: dict[str, Any]
) -> tuple[list[Plan], dict[str, TeFacts]]:
    """The plans of a model in the order of their levels, and the TEs of the last one."""
    saved = isinstance(model, (str, os.PathLike)) and Path(model).suffix == ".souffle"
    found = artifact.read(model) if saved else model.plan if isinstance(model, Network) else None
    if isinstance(found, PlanVersions) or isinstance(model, VersionedNetwork):
        raise _several()
    if found is not None:
        if options:
            raise OptionError(f"{next(iter(options))} is for a model; what is given is compiled already")
        return [found], {}
    for level in levels:
        if level not in LEVELS:
            raise OptionError(f"level {level!r} is not one of {', '.join(LEVELS)}{did_you_mean(level, list(LEVELS))}")
    ordered = [name for name in LEVELS if name in levels]
    if not ordered:
        raise OptionError(f"a report needs a level to compile at; choose some of {', '.join(LEVELS)}")
    tes: dict[str, TeFacts] = {}
    hooks = {ordered[-1]: {"hook": LateHook(_seeing(tes))}}
    plans = []
    for name in ordered:
        network = souffle.compile(
            model,
            **{**options, "target": "cuda", "level": name, **hooks.get(name, {})},
            progress=lambda said, name=name: progress(f"{name}: {said}"),
        )
        if not isinstance(network, Network):
            raise _several()
        plans.append(network.plan)
    return plans, tes


def _seeing(tes: dict[str, TeFacts]) -> Hook:
    """A hook that fills `tes` with those of the kernels that are compiled."""
    facts = importlib.import_module("souffle.report.te_facts")

    def hook(stage: str, result: object) -> object:
        if stage == "merge":
            tes.update(facts.te_facts(result))
        return result

    return hook


def _several() -> OptionError:
    return OptionError(
        "a report is of one version of a network; give the model with one value for each of its open dimensions"
    )
