"""Rankings of candidates by what was learnt from others, beside the cost model's: rank correlations on held-out data.

::

    python -m benchmarks.learned_ranking [--out FILE.json] [--parts measured made-up others] [--count 24]
        [--others a100-ansor-best-us.json]

``measured``
    Products of halves on tensor cores in about 60 tilings each, as an H100 measured them. Rankings are trained on all
    products but one and order that one's tilings; then on half of the tilings of all, and order the rest. The
    cost model has seen these measurements: its law of copies was changed after them.
``made-up``
    Random candidates of many TEs, whose times are another product's predictions with noise. It shows that a ranking
    learns what the cost model of one GPU has to say of another, over all rules, and how many records that takes; no
    more, since a cost model makes both the features and the times.
``others``
    Kernels of which other tuners measured their best schedule on an A100, one time for each. Features are of our
    schedules, and kernels of all sizes are compared, so it says nothing of how candidates of one stage are ranked.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBModel
from tvm.s_tir.meta_schedule.runner import RunnerResult

from benchmarks.learned_ranking_data import Known, best_of_others, made_up, measured_tilings, workloads
from benchmarks.ranks import rank_correlation
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import cost_device
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.lower import cuda_target
from souffle.tuning.learned import FEATURES, Ranker, Sample, judge
from souffle.tuning.learned.features import PREDICTED
from souffle.tuning.learned.judge import rank_figures
from souffle.tuning.learned.ranker import Table, table_of
from souffle.tuning.sketches import native_context

_MEASURED_ON, _SCHEDULED_FOR, _HIDDEN = "H100-SXM5-80GB", "A100-SXM4-40GB", "V100-PCIE-16GB"
_TILINGS = Path(__file__).parents[1] / "docs" / "results" / "gpu-h100-2026-11-27.json"
_FOLDS, _HALVES = 5, 2
"""Of workloads, and of candidates: enough of one workload are to be ranked by the same training."""
_FEWEST = 8

Ranking = Callable[[Sequence[Known], Sequence[Known]], np.ndarray]
"""Scores of the second candidates, lower is better, by what the first teach."""


def by_cost_model(train: Sequence[Known], test: Sequence[Known]) -> np.ndarray:
    """Nothing is learnt."""
    return np.array([one.sample.features[PREDICTED] for one in test])


def by_terms(train: Sequence[Known], test: Sequence[Known]) -> np.ndarray:
    """As a search would."""
    return Ranker.trained([one.sample for one in train]).scores([one.sample.features for one in test])


def by_terms_alone(train: Sequence[Known], test: Sequence[Known]) -> np.ndarray:
    """The same, from nothing: without the predicted time."""

    def unpredicted(one: Known) -> Sample:
        features = list(one.sample.features)
        features[PREDICTED] = 0.0
        return replace(one.sample, features=tuple(features))

    ranker = Ranker.trained([unpredicted(one) for one in train])
    return ranker.scores([unpredicted(one).features for one in test])


class StoreFeatures:
    """Rankings by MetaSchedule's features of schedules.

    Parameters
    ----------
    product : str
    """

    def __init__(self, product: str) -> None:
        device = cost_device(product)
        self.request, self.target = gpu_request(device.limits), cuda_target(device.arch)
        self.extractor = ms.feature_extractor.PerStoreFeature()
        self.contexts: dict[str, ms.TuneContext] = {}
        self.found: dict[int, np.ndarray] = {}

    def context(self, one: Known) -> ms.TuneContext:
        """Of the candidate's workload."""
        name = one.sample.workload
        if name not in self.contexts:
            self.contexts[name] = native_context(one.func, self.request, self.target, seed=1)
        return self.contexts[name]

    def candidate(self, one: Known) -> ms.MeasureCandidate:
        """As MetaSchedule sees it."""
        module = tvm.IRModule({"main": one.schedule.func.with_attr("global_symbol", "main")})
        return ms.MeasureCandidate(s_tir.Schedule(module, debug_mask="none", error_render_level="none"), [])

    def of(self, one: Known) -> np.ndarray:
        """The sum and the maximum over a candidate's stores."""
        if id(one) not in self.found:
            (stores,) = self.extractor.extract_from(self.context(one), [self.candidate(one)])
            rows = stores.numpy()
            self.found[id(one)] = np.concatenate([rows.sum(0), rows.max(0)])
        return self.found[id(one)]

    def ranking(self, kept: Sequence[int]) -> Ranking:
        """By these features and some of ours, which have that of the predicted time, as it is or 0, in front."""

        def rank(train: Sequence[Known], test: Sequence[Known]) -> np.ndarray:
            def rows(of: Sequence[Known]) -> np.ndarray:
                own = np.array([one.sample.features for one in of])
                front = own[:, kept] if kept else np.zeros((len(of), 1))
                return np.hstack([front, [self.of(one) for one in of]])

            names = sorted({one.sample.workload for one in train})
            seconds = np.array([one.sample.seconds for one in train])
            groups = np.array([names.index(one.sample.workload) for one in train])
            return Ranker.trained(Table(rows(train), seconds, groups, tuple(names))).scores(rows(test))

        return rank

    def xgb_model(self, train: Sequence[Known], test: Sequence[Known]) -> np.ndarray:
        """MetaSchedule's own learnt cost model, as its search has it."""
        model = XGBModel(num_warmup_samples=0, num_tuning_cores=1)
        names = sorted({one.sample.workload for one in train})
        for name in names:
            own = [one for one in train if one.sample.workload == name]
            # It trains with each update that brings enough; here once, with the last.
            model.last_train_size = 0 if name == names[-1] else sys.maxsize
            results = [RunnerResult([one.sample.seconds], None) for one in own]
            model.update(self.context(own[0]), [self.candidate(one) for one in own], results)
        scores = np.empty(len(test))
        for name in {one.sample.workload for one in test}:
            places = [place for place, one in enumerate(test) if one.sample.workload == name]
            own = [test[place] for place in places]
            scores[places] = -model.predict(self.context(own[0]), [self.candidate(one) for one in own])
        return scores


def rankings(product: str) -> dict[str, Ranking]:
    """What is compared, by name."""
    stores = StoreFeatures(product)
    return {
        "cost model": by_cost_model,
        "learnt: its terms": by_terms,
        "terms, not the predicted time": by_terms_alone,
        "stores and the predicted time": stores.ranking([PREDICTED]),
        "stores and terms": stores.ranking(range(len(FEATURES))),
        "stores alone": stores.ranking([]),
        "MetaSchedule's XGBModel": stores.xgb_model,
    }


def _folds(known: Sequence[Known], of_workloads: bool) -> list[int]:
    """The fold of each candidate."""
    if of_workloads:
        names = sorted({one.sample.workload for one in known})
        random.Random(0).shuffle(names)
        return [names.index(one.sample.workload) % _FOLDS for one in known]
    order = random.Random(0).sample(range(len(known)), len(known))
    return [int(place) % _HALVES for place in np.argsort(order)]


def compared(known: Sequence[Known], product: str) -> list[dict[str, Any]]:
    """How each ranking orders the candidates of workloads, or candidates, that were held out."""
    rows = []
    for of_workloads in (True, False):
        folds = np.array(_folds(known, of_workloads))
        for name, ranking in rankings(product).items():
            sys.stderr.write(f"{name}, held-out {'workloads' if of_workloads else 'candidates'}\n")
            scores = np.empty(len(known))
            for fold in range(folds.max() + 1):
                test = np.flatnonzero(folds == fold)
                train = np.flatnonzero(folds != fold)
                scores[test] = ranking([known[place] for place in train], [known[place] for place in test])
            groups: dict[tuple[str, int], list[int]] = {}
            for place, one in enumerate(known):
                # Scores of different trainings are not compared.
                groups.setdefault((one.sample.workload, folds[place]), []).append(place)
            seconds = np.array([one.sample.seconds for one in known])
            enough = [places for places in groups.values() if len(places) >= _FEWEST]
            figures = [rank_figures(scores[places], seconds[places]) for places in enough]
            means = np.mean([[one.correlation, one.recall, one.slowdown] for one in figures], axis=0)
            worst = min(one.correlation for one in figures)
            rows.append(
                {
                    "held out": "workloads" if of_workloads else "candidates",
                    "ranking": name,
                    "spearman": round(float(means[0]), 3),
                    "worst": round(worst, 3),
                    "of the best quarter": round(float(means[1]), 3),
                    "first by best": round(float(means[2]), 3),
                }
            )
    return rows


def judged(known: Sequence[Known]) -> dict[str, Any]:
    """What a search would say."""
    return asdict(judge([one.sample for one in known]))


def measured_part(path: Path) -> dict[str, Any]:
    """Tilings that an H100 measured."""
    known, left_out = measured_tilings(path, cost_device(_MEASURED_ON))
    if not known:
        raise SystemExit(f"no tiling of {path} is scheduled and predicted today as it was when it was measured")
    return {
        "part": "measured", "product": _MEASURED_ON, "candidates": len(known), "left_out": left_out,
        "rankings": compared(known, _MEASURED_ON), "judgement": judged(known),
    }  # fmt: skip


def made_up_part(count: int, noise: float, seed: int) -> dict[str, Any]:
    """Candidates of many kinds, with times of another product's model."""
    device, truth = cost_device(_SCHEDULED_FOR), cost_device(_HIDDEN)
    known = []
    for case in workloads():
        known += made_up([case], device, truth, count, noise, seed)
        sys.stderr.write(f"{case.name}: {len(known)} candidates so far\n")
    return {
        "part": "made-up", "product": _SCHEDULED_FOR, "truth": _HIDDEN, "noise": noise, "candidates": len(known),
        "rankings": compared(known, _SCHEDULED_FOR), "judgement": judged(known),
    }  # fmt: skip


def others_part(path: Path) -> dict[str, Any]:
    """Kernels of other tuners, each held out once: with others at random, and with all of its kind."""
    found = best_of_others(path, cost_device(_SCHEDULED_FOR))
    table = table_of(sample for _, sample in found)
    kinds = {sample.candidate: kind for kind, sample in found}
    names = sorted(kinds)
    order = random.Random(0).sample(range(len(names)), len(names))
    folds = {
        "at random": np.argsort(order) % (2 * _FOLDS),
        "all of a kind": np.array([sorted(set(kinds.values())).index(kinds[name]) for name in names]),
    }
    rows = []
    for way, of in folds.items():
        scores = np.empty(len(names))
        for fold in sorted(set(of.tolist())):
            ranker = Ranker.trained(table.part(of != fold))
            scores[of == fold] = ranker.scores(table.features[of == fold])
        learned, predicted = (rank_correlation(one, table.seconds) for one in (scores, table.predicted))
        rows.append({"held out": way, "learnt": round(learned, 3), "cost model": round(predicted, 3)})
    return {"part": "others", "product": _SCHEDULED_FOR, "candidates": len(names), "rankings": rows}


def main() -> int:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["measured", "made-up", "others"]
    parser.add_argument("--parts", nargs="+", default=parts[:2], choices=parts)
    parser.add_argument("--measured", type=Path, default=_TILINGS, help="tilings that an H100 measured")
    parser.add_argument("--others", type=Path, help="the best times of other tuners")
    parser.add_argument("--count", type=int, default=24, help="candidates of each TE with a made-up time, at most")
    parser.add_argument("--noise", type=float, default=0.05, help="of the logarithm of a made-up time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where to write the results as JSON")
    options = parser.parse_args()
    if "others" in options.parts and options.others is None:
        parser.error("the part others needs --others FILE")
    makers = {
        "measured": lambda: measured_part(options.measured),
        "made-up": lambda: made_up_part(options.count, options.noise, options.seed),
        "others": lambda: others_part(options.others),
    }
    results = []
    for name in options.parts:
        result = makers[name]()
        results.append(result)
        print(f"{name}: {result['candidates']} candidates, {result['product']}")
        print(format_table(list(result["rankings"][0]), [list(row.values()) for row in result["rankings"]]))
        if "judgement" in result:
            judgement = result["judgement"]
            print(f"{'used' if judgement['use'] else 'not used'}: {judgement['reason']}")
            if judgement["curve"]:
                points = [[round(value, 4) for value in point.values()] for point in judgement["curve"]]
                print(format_table(list(judgement["curve"][0]), points))
    if options.out:
        save_results(options.out, "benchmarks.learned_ranking", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
