"""What a user calls to search, once, what later compilations take: schedules of stages, and a policy of fusion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from souffle import learning
from souffle.cost import cost_device, device_of_arch
from souffle.errors import OptionError
from souffle.frontend.model_options import ModelOptions
from souffle.options import INTEGERS, LEVELS, Options
from souffle.pipeline import independent_stages_of, stages_of_ways, transform_program
from souffle.program import TEProgram
from souffle.request import Dims, Model, checked_options
from souffle.runtime.detect import gpu_arch
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.log import open_log
from souffle.schedule.lower import cuda_target
from souffle.stitching import graph_of
from souffle.stitching.priority import FusionRules, LearningReport, learn_fusion
from souffle.tuning import (
    ArrangingReport,
    CandidateBench,
    Limits,
    LogWriter,
    MeasuringBench,
    TuningReport,
    arrange,
    bench_for,
    cost_device_for,
    recipes_nearby,
    search,
    sets_named,
    tasks_of,
)
from souffle.tuning.learned import learned_ranking
from souffle.versions import program_of, programs_of
from souffle.workers import Engine, engine_for

__all__ = ["learn", "tune", "tune_side_by_side"]


def tune(
    models: Model | Sequence[Model],
    *,
    trials: int,
    arch: str | None = None,
    log: str | os.PathLike = "tuning_logs",
    level: str = "V4",
    precision: str = "fp32",
    fusion: str = "souffle",
    policy: str | os.PathLike | None = None,
    partition: str = "souffle",
    reductions: str = "ordered",
    disable: Sequence[str] = (),
    batch: int | None = None,
    dims: Dims | None = None,
    constants: Mapping[str, Any] | None = None,
    device: str | None = None,
    tasks: str = "",
    seed: int = 0,
    seconds: float | None = None,
    on: str = "local",
    measure: str = "auto",
    candidate_seconds: float = Limits.seconds,
    candidate_mb: int = Limits.memory_mb,
    cache_dir: str | os.PathLike | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> TuningReport:
    """Search schedules for the stages of models, and append what is found to a tuning log.

    A task is a distinct stage with a compute-intensive TE or a reduction, together with the TEs inlined before and
    after it, as the compiler forms it. Where a GPU of this architecture is at hand, candidates are measured on it;
    otherwise they are compiled, and the cost model predicts their time. This process chooses candidates and keeps the
    log; workers make, compile and measure them, here or on other machines. Equal seeds and equal logs give the same
    log, measured times aside, whichever workers there are and however many.

    Parameters
    ----------
    models : model or sequence of models
        Each as for :func:`compile`; equal stages of several are one task.
    trials : int
        Candidates built for each task, those included that the log holds already: a search that was stopped goes on.
    arch : str, optional
        As for :func:`compile`.
    log : path
        The folder of the logs. The architecture's own is inside; ``tuning_logs/README.md`` describes its files.
    level, precision, fusion, policy, partition, reductions, disable, batch, dims, constants
        As for :func:`compile`; they decide which stages there are.
    device : str, optional
        The product to predict for, such as ``"A100-SXM4-40GB"``. Nothing is measured then.
    tasks : str
        A regular expression: only stages are tuned whose name it is found in.
    seed : int
        Equal seeds and equal logs give equal candidates.
    seconds : float, optional
        After so many no further candidates are built.
    on : str
        Where: ``"local"`` for a process on each core, ``"local:N"`` for N of them, ``"here"`` for this process,
        ``"ray"`` for a Ray cluster of this machine, ``"ray://HOST:PORT"`` for one that runs already.
    measure : str
        ``"auto"`` for what is said above, ``"none"`` to predict in any case, ``"gpu"`` for the GPUs that workers own,
        or ``"rpc://HOST:PORT/KEY"`` for boards behind a tracker of TVM's RPC.
    candidate_seconds : float
        After so many a worker that makes or measures candidates is ended.
    candidate_mb : int
        Memory that it may take for it, in MB.
    cache_dir, progress
        As for :func:`compile`.

    Returns
    -------
    TuningReport
        Also after an interrupt: every finished batch is in the log.

    Raises
    ------
    OptionError
        If an option is not valid, or no GPU of this architecture is described.
    """
    chosen = {"precision": precision, "fusion": fusion, "policy": policy, "partition": partition}
    chosen |= {"level": level, "reductions": reductions, "disable": disable}
    setting = _Setting(trials, arch, cache_dir, chosen, device, ModelOptions(batch, dims, constants))
    options, cost_device = setting.options, setting.cost_device
    with engine_for(on) as engine:
        bench = setting.bench(measure, engine)
        programs = setting.programs(models, progress)
        ways = [stages_of_ways(program, options, progress=progress) for program in programs]
        wanted = tasks_of([best for best, *_ in ways], tasks, others=[other for _, *others in ways for other in others])
        writer = LogWriter(Path(log), options.arch, cuda_target(options.arch))
        known = writer.read()
        ranker, ranking = None, ""
        if bench.figure == "measured":
            progress("learning from the log")
            ranker, judgement = learned_ranking(known, cost_device, bench.device, engine, seed=seed)
            ranking = f"by {'the cost model' if ranker is None else 'what measured records teach'}: {judgement.reason}"
        logs = (known, *(one for one in open_log("auto", options.arch) if one.folder != known.folder))
        report = search(
            wanted,
            trials=trials,
            request=setting.request,
            cost_device=cost_device,
            bench=bench,
            writer=writer,
            engine=engine,
            near=recipes_nearby(logs, wanted, cost_device.product),
            ranker=ranker,
            limits=Limits(candidate_seconds, candidate_mb),
            seed=seed,
            seconds=seconds,
            progress=progress,
        )
    return replace(report, ranking=ranking)


def tune_side_by_side(
    models: Model | Sequence[Model],
    *,
    trials: int,
    arch: str | None = None,
    log: str | os.PathLike = "tuning_logs",
    level: str = "V4",
    precision: str = "fp32",
    fusion: str = "souffle",
    policy: str | os.PathLike | None = None,
    partition: str = "souffle",
    reductions: str = "ordered",
    disable: Sequence[str] = (),
    batch: int | None = None,
    dims: Dims | None = None,
    constants: Mapping[str, Any] | None = None,
    device: str | None = None,
    tasks: str = "",
    seconds: float | None = None,
    on: str = "local",
    measure: str = "auto",
    candidate_seconds: float = Limits.seconds,
    candidate_mb: int = Limits.memory_mb,
    cache_dir: str | os.PathLike | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> ArrangingReport:
    """Measure who had best compute the independent stages of models' kernels, and append it to a tuning log.

    Stages that need nothing of each other between the same two barriers of a kernel may be computed in block space, by
    teams of a block, or by parts of it in steps of 128 threads or of whole warps, at the same time (001, HFuse, Figure
    6). The ways that the cost model thinks best are measured on a GPU, in a kernel of these stages alone with the
    blocks of theirs, beside the same stages one after the other; compilation with the log takes the quickest. Without
    a GPU of this architecture the report has what the cost model predicts, by which compilation chooses without a log.

    Stages have the schedules that the log holds for them, so that those are searched first (:func:`tune`).

    Parameters
    ----------
    models : model or sequence of models
        Each as for :func:`compile`; equal stages of several are measured once.
    trials : int
        Ways that are measured of each set of stages, those included that the log holds already.
    level : str
        One at which stages are computed side by side: ``"V4"``.
    arch, log, precision, fusion, policy, partition, reductions, disable, batch, dims, constants
        As for :func:`tune`.
    tasks : str
        A regular expression: only sets with a stage in whose name it is found.
    device, seconds, on, measure, candidate_seconds, candidate_mb, cache_dir, progress
        As for :func:`tune`.

    Returns
    -------
    ArrangingReport
        Also after an interrupt: what was measured is in the log.

    Raises
    ------
    OptionError
        If an option is not valid, or no GPU of this architecture is described.
    """
    chosen = {"precision": precision, "fusion": fusion, "policy": policy, "partition": partition}
    chosen |= {"level": level, "reductions": reductions, "disable": disable}
    setting = _Setting(trials, arch, cache_dir, chosen, device, ModelOptions(batch, dims, constants))
    options = setting.options
    if not options.waiting.side_by_side:
        raise OptionError(f"level={level} has no stages side by side here; give level='V4', and do not disable hfuse")
    # The stages and schedules that compilation with this log has.
    options = replace(options, tuning_log=log if Path(log).is_dir() else None)
    with engine_for(on) as engine:
        bench = setting.bench(measure, engine)
        programs = setting.programs(models, progress)
        several = [one for own in programs for one in independent_stages_of(own, options, progress=progress)]
        measures = isinstance(bench, MeasuringBench)
        return arrange(
            sets_named(several, tasks),
            trials=trials,
            request=setting.request,
            cost_device=setting.cost_device,
            bench=bench if measures else None,
            writer=LogWriter(Path(log), options.arch, cuda_target(options.arch)) if measures else None,
            engine=engine,
            limits=Limits(candidate_seconds, candidate_mb),
            seconds=seconds,
            progress=progress,
        )


class _Setting:
    """What a search is for.

    Parameters
    ----------
    trials : int
    arch, cache_dir
        As for :func:`tune`.
    chosen : dict
        Options of the compiler, by name.
    device : str or None
        The product to predict for.
    given : ModelOptions
        Of the models; how integers are read is the compiler's option.
    """

    def __init__(
        self,
        trials: int,
        arch: str | None,
        cache_dir: str | os.PathLike | None,
        chosen: Mapping[str, Any],
        device: str | None,
        given: ModelOptions,
    ) -> None:
        if trials < 1:
            raise OptionError(f"trials={trials} is not valid; at least 1")
        options = checked_options(arch, cache_dir, **chosen)
        self.present, self.asked = gpu_arch(), device is not None
        self.options = replace(options, arch=arch or self.present or options.arch)
        self.request = gpu_request(device_for(self.options.arch))
        self.cost_device = cost_device_for(self.options.arch, device)
        self.given = replace(given, integers=INTEGERS not in options.disable)

    def programs(self, models: Model | Sequence[Model], progress: Callable[[str], None]) -> Iterator[TEProgram]:
        """Of all models, with one for each set of values that open dimensions have."""
        for model in models if isinstance(models, (list, tuple)) else (models,):
            progress("importing")
            yield from (program for _, program in programs_of(model, self.given))

    def bench(self, measure: str, engine: Engine) -> CandidateBench:
        """What gives figures."""
        return bench_for(measure, self.cost_device, engine, asked=self.asked, present=self.present)


def learn(
    models: Model | Sequence[Model],
    *,
    out: str | os.PathLike,
    evaluations: int = 1000,
    start: str | os.PathLike | None = None,
    limit: int | None = None,
    level: str = "V0",
    precision: str = "fp32",
    device: str | None = None,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike | None = None,
    curves: str | os.PathLike | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> LearningReport:
    """Train a policy that orders the fusions of networks, for ``compile(fusion="learned", policy=...)`` (002).

    It is trained on all models jointly: a graph network and attention give each TE a priority, priority fusion
    makes kernels of them, and what these are predicted to take is the reward. Nothing is compiled or run. It needs
    ``pip install 'souffle-dl[learn]'``.

    Parameters
    ----------
    models : model or sequence of models
        Each as for :func:`compile`.
    out : path
        For the policy, a file of safetensors.
    evaluations : int
        Of each model's graph.
    start : path, optional
        A policy that is trained further; without, parameters are drawn.
    limit : int, optional
        TEs of a kernel, at most; the planners' own limit without. ``fusion="learned"`` has that of its policy.
    level : str
        ``"V0"``, ``"V1"`` or ``"V2"``, whose TEs are fused.
    precision, batch, dims, constants
        As for :func:`compile`.
    device : str, optional
        The product to predict for, such as ``"A100-SXM4-40GB"``; that of sm_90 without.
    checkpoint : path, optional
        Where training is kept on the way. If it is there, training goes on from it, and ends in the same bits as one
        that was not interrupted. By default the name of `out` with ``.checkpoint`` behind it.
    curves : path, optional
        For a picture of the training, as SVG.
    seed : int
        Equal seeds give equal policies on one machine.
    progress : callable, optional
        Told in a few words what is being done.

    Returns
    -------
    LearningReport

    Raises
    ------
    OptionError
        If an option is not valid.
    PolicyError
        If PyTorch or another library is missing, or a file is none of its kind or cannot be written.
    """
    given = ModelOptions(batch, dims, constants)
    if level not in ("V0", "V1", "V2"):
        raise OptionError(f"level={level!r} is not valid; choose one of V0, V1, V2, which the planners see whole")
    learning.require(*learning.NEEDED, *(("matplotlib",) if curves is not None else ()))
    options = Options(level=level, precision=precision)
    product = device_of_arch(options.arch) if device is None else cost_device(device)
    graphs = {}
    for number, model in enumerate(models if isinstance(models, (list, tuple)) else (models,)):
        progress("importing")
        program, _ = transform_program(program_of(model, given), LEVELS[level], precision)
        named = Path(model).stem if isinstance(model, (str, os.PathLike)) else program.name
        name = named if named not in graphs else f"{named} {number}"
        graphs[name] = graph_of(program)
    out = Path(out)
    return learn_fusion(
        graphs,
        product,
        out,
        rules=FusionRules() if limit is None else FusionRules(limit),
        evaluations=evaluations,
        start=None if start is None else Path(start),
        seed=seed,
        checkpoint=Path(checkpoint) if checkpoint is not None else out.with_name(f"{out.name}.checkpoint"),
        curves=None if curves is None else Path(curves),
        progress=progress,
    )
