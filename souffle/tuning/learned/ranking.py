"""The ranking that a log's measured records give, if it is good enough."""

from __future__ import annotations

import logging

from souffle.cost import CostDevice
from souffle.schedule.log import TuningLog
from souffle.tuning.learned.judge import FEWEST_RECORDS, Judgement, judge, not_judged
from souffle.tuning.learned.ranker import Ranker
from souffle.tuning.learned.samples import measured_records, measured_samples
from souffle.workers import Engine

__all__ = ["learned_ranking"]

_LOGGER = logging.getLogger("souffle.tuning")


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
    counts = [len({one.recipe.key for one in records}) for *_, records in measured_records(log, measured_on)]
    enough = [count for count in counts if count >= FEWEST_RECORDS]
    # Features of records take long; they are not made where nothing can come of it.
    hopeless = not_judged(sum(enough), len(enough))
    if hopeless is not None:
        return None, hopeless
    samples, left_out = measured_samples(log, device, measured_on, engine)
    if left_out:
        _LOGGER.info("measured records of %s that teach nothing: %s", log.name, dict(left_out))
    judgement = judge(samples, seed=seed)
    return (Ranker.trained(samples) if judgement.use else None), judgement
