"""The workloads of FusionStitching's papers at odd sizes, on every target, against ONNX Runtime.

``python -m benchmarks.workload_sizes --count 200 --out build/workloads.jsonl``: each seed draws a workload, a size for
each of its dimensions (batches and sequences of 1, primes, one beside a power of two), weights and inputs; compiled
and run as :mod:`benchmarks.fuzz` does, also with threads shuffled and, for a share, with every access looked at.
Goes on where the file stops. Failures lie beside it as cases that ``python -m benchmarks.fuzz --case`` runs again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto

from benchmarks.campaign import (
    Record,
    RecordFile,
    Workers,
    add_seed_options,
    add_worker_options,
    count_of,
    run_cases,
    seeds,
    where,
)
from benchmarks.fuzz.case import Case, case_data
from benchmarks.fuzz.targets import FAILURES, SWITCHES, TARGETS
from benchmarks.fuzz.trying import Limits, failures_of, try_case
from souffle import models
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress
from souffle.models import asr, crnn, dien, nmt, patterns, perceptron, recurrent, transformer, variational, word2vec
from souffle.workers.cases import Asking

__all__ = ["BUILDERS", "draw", "main"]

_ODD = (1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 31, 33)
_FEW = (1, 1, 2, 3, 4, 5)
_CUDA = (*(name for name in TARGETS if name != "cpu"), *SWITCHES)

Sizes = Callable[..., int]


def _logistic(odd: Sizes) -> dict:
    return {"batch": odd(), "features": odd(), "classes": odd(2)}


def _two_layers(odd: Sizes) -> dict:
    return {**_logistic(odd), "hidden": (odd(), odd())}


def _word2vec(odd: Sizes) -> dict:
    # An embedding of one number has the cosine 1 or -1 with every other.
    return {"words": odd(2), "width": odd(2), "batch": odd(), "samples": odd(), "asked": odd(few=True)}


def _recurrent(odd: Sizes) -> dict:
    return {"batch": odd(), "steps": odd(few=True), "features": odd(), "hidden": odd(), "classes": odd()}


def _crnn(odd: Sizes) -> dict:
    channels = tuple(odd() for _ in range(7))
    return {"batch": odd(few=True), "width": odd(4), "channels": channels, "hidden": odd(), "classes": odd(2)}


def _nmt(odd: Sizes) -> dict:
    widths = {key: odd() for key in ("embedding", "hidden", "alignment", "maxout")}
    return {"hypotheses": odd(few=True), "source": odd(), "words": odd(2), **widths}


def _heads(odd: Sizes) -> dict:
    # Rows of one or two numbers are normalized to nothing but their rounding.
    heads = odd(few=True)
    return {"heads": heads, "hidden": heads * max(odd(), -(-3 // heads)), "inner": odd()}


def _transformer(odd: Sizes) -> dict:
    return {"layers": odd(few=True), "batch": odd(few=True), "source": odd(), "target": odd(), **_heads(odd)}


def _asr(odd: Sizes) -> dict:
    images = {"frames": odd(7), "features": odd(7), "characters": odd(2)}
    sizes = _heads(odd)
    # Sines and cosines are pairs.
    sizes["hidden"] += sizes["hidden"] % 2 * sizes["hidden"]
    return {"layers": odd(few=True), "batch": odd(few=True), **images, **sizes}


def _dien(odd: Sizes) -> dict:
    tables = {key: odd() for key in ("users", "goods", "categories")}
    units = {"attention": (odd(), odd()), "classifier": (odd(), odd())}
    # Dice takes moments over the batch, which of one or two are their rounding.
    return {"batch": odd(3), "history": odd(few=True), "embedding": odd(few=True), **tables, **units}


BUILDERS: dict[str, tuple[Callable[..., ModelProto], object, Callable[[Sizes], dict]]] = {
    "layer-norm": (
        patterns.build_layer_norm,
        patterns.LAYER_NORM_SIZES["tiny"],
        lambda odd: {"rows": odd(), "width": odd(3)},
    ),
    "multi-interests": (
        patterns.build_multi_interests,
        patterns.INTERESTS_SIZES["tiny"],
        lambda odd: {"batch": odd(), "behaviours": odd(), "width": odd()},
    ),
    "logistic": (perceptron.build_logistic, perceptron.LOGISTIC_SIZES["tiny"], _logistic),
    "logistic-train": (perceptron.build_logistic_step, perceptron.LOGISTIC_SIZES["tiny"], _logistic),
    "perceptron": (perceptron.build_perceptron, perceptron.PERCEPTRON_SIZES["tiny"], _two_layers),
    "perceptron-train": (perceptron.build_perceptron_step, perceptron.PERCEPTRON_SIZES["tiny"], _two_layers),
    "word2vec": (word2vec.build_word2vec, word2vec.SIZES["tiny"], _word2vec),
    "word2vec-train": (word2vec.build_word2vec_step, word2vec.SIZES["tiny"], _word2vec),
    "var-encoder": (
        variational.build_variational,
        variational.SIZES["tiny"],
        lambda odd: {"batch": odd(), "pixels": odd(), "hidden": odd(), "latent": odd(few=True)},
    ),
    "bi-rnn": (recurrent.build_bidirectional, recurrent.BIDIRECTIONAL_SIZES["tiny"], _recurrent),
    "dyn-rnn": (recurrent.build_dynamic, recurrent.DYNAMIC_SIZES["tiny"], _recurrent),
    "crnn": (crnn.build_crnn, crnn.SIZES["tiny"], _crnn),
    "nmt": (nmt.build_nmt, nmt.SIZES["tiny"], _nmt),
    "transformer": (transformer.build_transformer, transformer.SIZES["tiny"], _transformer),
    "dien": (dien.build_dien, dien.SIZES["tiny"], _dien),
    "asr": (asr.build_asr, asr.SIZES["tiny"], _asr),
}
"""Of each workload its builder, a configuration, and the sizes that are drawn in it."""


def draw(seed: int, only: tuple[str, ...] = ()) -> Case:
    """The workload of a seed, or one of some, with random sizes, weights and inputs."""
    generator = np.random.default_rng(seed)
    name = (only or tuple(BUILDERS))[seed % len(only or BUILDERS)]
    build, config, sizes = BUILDERS[name]

    def odd(least: int = 1, *, few: bool = False) -> int:
        return int(generator.choice([size for size in (_FEW if few else _ODD) if size >= least]))

    config = replace(config, **sizes(odd))
    model = build(config, seed)
    return Case(model, models.random_inputs(model, seed), f"{name}: {config}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 where anything failed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.workload_sizes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_seed_options(parser, "case")
    add_worker_options(parser)
    parser.add_argument("--models", nargs="+", default=[], choices=tuple(BUILDERS), help="default: all in turn")
    parser.add_argument("--targets", nargs="+", choices=_CUDA, help="default: one for each seed, in turn")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one case on one target")
    parser.add_argument("--checked", type=float, default=0.3, metavar="P", help="share run in checked mode, too")
    arguments = parser.parse_args(argv)
    progress = Progress()
    return interruptible(lambda: status_of(lambda: _run(arguments, progress), progress), progress)


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    with RecordFile(arguments.out, lambda record: record["seed"]) as file:
        try:
            run_cases(
                (
                    (f"seed {seed}", _try(seed, arguments, progress))
                    for seed in seeds(arguments.seeds, arguments.count, set(file.records))
                ),
                file,
                Workers(where(arguments)),
                progress,
                noun="cases",
                total=count_of(arguments.seeds, arguments.count, file.records),
                minutes=arguments.minutes,
            )
        finally:
            progress.done()
            outcomes = [outcome for record in file.records.values() for outcome in record["outcomes"].values()]
            print(f"{len(file.records)} cases:", dict(Counter(outcome["kind"] for outcome in outcomes)))
            print("certificates:", dict(Counter(outcome.get("verdict", "") for outcome in outcomes)))
    return int(any(outcome["kind"] in FAILURES for outcome in outcomes))


def _try(seed: int, arguments: argparse.Namespace, progress: Progress) -> Asking[Record]:
    case = draw(seed, tuple(arguments.models))
    # All workloads on one target, then all on the next.
    targets = arguments.targets or [_CUDA[seed // len(arguments.models or BUILDERS) % len(_CUDA)]]
    failures = None if arguments.out is None else failures_of(arguments.out)
    limits = Limits(arguments.timeout, arguments.memory_mb, arguments.checked, failures)
    record = yield from try_case(case_data(case), seed, targets, limits, f"seed {seed}")
    for target, outcome in record["outcomes"].items():
        if outcome["kind"] in (*FAILURES, "refused") or outcome.get("verdict") == "UNKNOWN":
            detail = outcome["detail"] or "; ".join(outcome["undecided"])
            progress.note(f"{seed} {case.note}\n  {target}: {outcome['kind']}: {detail[:400]}")
    return {"seed": seed, "note": case.note, **record}


if __name__ == "__main__":
    run_process(main)
