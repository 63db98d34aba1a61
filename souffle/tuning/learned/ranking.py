"""The ranking that a log's measured records give, if it is good enough."""

from __future__ import annotations

from souffle.cost import CostDevice
from souffle.schedule.log import TuningLog
from souffle.tuning.learned.judge import Judgement, judge
from souffle.tuning.learned.ranker import Ranker
from souffle.tuning.learned.samples import measured_samples
from souffle.workers import Engine

__all__ = ["learned_ranking"]


def learned_ranking(
    log: TuningLog, device: CostDevice, measured_on: str, engine: Engine, *, seed: int = 0
) -> tuple[Ranker | None, Judgement]:
    """Learn from what a log holds of a GPU, and judge it.

    Parameters
    ----------
    log : TuningLog
        Of the GPU's architecture.
    device : CostDevice
        The GPU's cost model.
    measured_on : str
        The GPU, as records name it.
    engine : Engine
        Makes the features of the records.
    seed : int
        Of the folds.

    Returns
    -------
    ranker : Ranker or None
        Trained on all records; ``None`` where it is not to be used.
    judgement : Judgement
    """
    samples, _ = measured_samples(log, device, measured_on, engine)
    judgement = judge(samples, seed=seed)
    return (Ranker.trained(samples) if judgement.use else None), judgement
