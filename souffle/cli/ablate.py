"""``souffle ablate``: the table V0 to V4 of one optimization at a time (paper, Tables 4 and 5), of V4 without each of
those that keep tensors on chip, and of other fusion planners."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import souffle
from souffle.cli.ablation_table import ABLATION_HEADER, ablation_cells
from souffle.cli.compare import onnxruntime_outputs, random_inputs
from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import import_options
from souffle.cli.output import Progress, print_table, write_json
from souffle.cli.overwriting import PICTURE, check_output
from souffle.errors import CertificateError, SouffleError
from souffle.evaluation.ablation import Expected, Variant, measured_row, variants
from souffle.evaluation.model_digest import model_digest
from souffle.evaluation.result_file import ResultFile, device_name, result_header, write_whole
from souffle.evaluation.stage_bars import stage_bars
from souffle.options import LEVELS, SOUFFLE
from souffle.runtime.detect import gpu_arch
from souffle.stitching import FUSION_PLANNERS

__all__ = ["ablate"]

_OF_ROWS = ("disable", "fusion")
"""Options that rows differ in; the others hold for the whole file."""


def ablate(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if any output differs too much, or a planner made no network."""
    check_output(arguments.plot, PICTURE, arguments.force)
    gpu = gpu_arch()
    rows: list[dict[str, Any]] = []
    digests = {model: model_digest(model) for model in arguments.models}
    file = _file(arguments, digests, gpu, progress)
    try:
        for model, digest in digests.items():
            for row in _model(model, digest, arguments, progress, gpu, file):
                rows.append(row)
    except KeyboardInterrupt:
        if rows:
            _report(arguments, progress, rows, gpu)
        raise
    _report(arguments, progress, rows, gpu)
    return 0 if all(row["ok"] is not False and "failed" not in row for row in rows) else 1


def _file(arguments: argparse.Namespace, digests: dict[str, str], gpu: str | None, progress: Progress) -> ResultFile:
    """Where rows are kept, with what an earlier call has made of the same; one that cannot be written ends it now."""
    options = compiler_options(arguments) | import_options(arguments)
    options |= {"seed": arguments.seed, "run": not arguments.no_run, "cubin": not arguments.no_cubin}
    shown = {name: _plain(value) for name, value in sorted(options.items()) if name not in _OF_ROWS}
    header = result_header(shown, device_name() if gpu else None)
    path = Path(arguments.out) if arguments.out else None
    file = ResultFile(path, header, digests, arguments.force)
    if file.anew:
        progress.note(f"souffle: {path} held rows {file.anew}; they are in {path}.before, and are made anew")
    elif file.rows:
        progress.note(f"souffle: {len(file.rows)} rows of {path} are taken over")
    file.save()
    return file


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _model(
    model: str, digest: str, arguments: argparse.Namespace, progress: Progress, gpu: str | None, file: ResultFile
) -> Iterator[dict[str, Any]]:
    given = import_options(arguments)
    program: Any = None
    known: list[Expected] = []

    def expected(network: souffle.Network) -> Expected:
        if not known:
            inputs = random_inputs(network.signature.inputs, arguments.seed)
            known.append(Expected(inputs, onnxruntime_outputs(model, inputs, given["constants"])))
        return known[0]

    for variant in _variants(arguments):
        progress.prefix = f"{Path(model).stem} {variant.label}: "
        key = f"{model}: {variant.label}"
        row = file.row(key)
        if row is None:
            if program is None:
                progress("reading the model")
                program = souffle.import_onnx(model, **given)
            try:
                made = measured_row(
                    program,
                    variant,
                    compiler_options(arguments) | {"cubin": not arguments.no_cubin},
                    expected=None if arguments.no_run else expected,
                    gpu=gpu is not None,
                    progress=progress,
                )
            except SouffleError as error:
                # What another planner lacks, or makes that does not fit, says nothing of the rows beside it.
                if variant.fusion == arguments.fusion or isinstance(error, CertificateError):
                    raise
                yield {"model": model, "label": variant.label, "ok": None, "failed": str(error)}
                continue
            row = file.add(key, {"model": model, "sha256": digest, **made})
        yield row


def _variants(arguments: argparse.Namespace) -> tuple[Variant, ...]:
    planners = tuple(FUSION_PLANNERS) if "all" in arguments.planners else arguments.planners
    return variants(disable=arguments.disable, each=arguments.each, planners=planners, fusion=arguments.fusion)


def _report(arguments: argparse.Namespace, progress: Progress, rows: Sequence[dict[str, Any]], gpu: str | None) -> None:
    progress.done()
    if arguments.plot:
        write_whole(Path(arguments.plot), stage_bars([row for row in rows if "failed" not in row], _title(arguments)))
    if arguments.json:
        write_json(rows)
        return
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        print()
        made = [ablation_cells(row) for row in own if "failed" not in row]
        print_table(ABLATION_HEADER, made, _heading(model, arguments))
        for row in own:
            if "failed" in row:
                print(f"{row['label']}: {row['failed']}")
    print()
    print("\n".join(f"{level.name}: {level.summary}" for level in LEVELS.values()))
    print("grid, flags, block: waits of a run: of all blocks, of tiles for tiles, of a block's threads between stages.")
    print("read, written: bytes of global memory, each tensor that a stage touches counted once for that stage.")
    on = {row["predicted_on"] for row in rows if row.get("predicted_on")}
    if on:
        print(f"predicted: by the cost model, on {', '.join(sorted(on))}.")
    if gpu is None:
        print("No GPU is usable here: errors are of the emitted CUDA text run on the CPU; there is no latency.")


def _title(arguments: argparse.Namespace) -> str:
    return f"{', '.join(Path(model).stem for model in arguments.models)}, {arguments.precision}: predicted µs by stage"


def _heading(model: str, arguments: argparse.Namespace) -> str:
    fusion = "" if arguments.fusion == SOUFFLE else f"fusion {arguments.fusion}, "
    return f"{Path(model).stem}, {arguments.precision}, {fusion}partition {arguments.partition}"
