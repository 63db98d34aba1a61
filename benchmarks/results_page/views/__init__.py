"""Ways of showing figures: of each its function from files to a table, and the kinds of its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results_page.tables import Table
from benchmarks.results_page.views import compiled, gpu, hfuse, papers, peers, predicted, proofs, recurrent, searching
from benchmarks.results_page.views.typed import typed

__all__ = ["VIEWS", "View"]


@dataclass(frozen=True)
class View:
    """A way of showing figures.

    Attributes
    ----------
    make : callable
        From the files that a chapter names to the table.
    kinds : tuple of str or None
        The kinds of its figures, as changes.json lists them; None where the file itself says them.
    """

    make: Callable[..., Table]
    kinds: tuple[str, ...] | None


_PREDICTED = ("predicted-fp32", "predicted-mixed", "launches")
_LATENCY = ("latency-fp32", "latency-mixed")

VIEWS = {
    "typed": View(typed, None),
    # what programs and machine code are
    "transformations": View(compiled.transformations, ("programs",)),
    "growth": View(compiled.growth, ("programs",)),
    "levels": View(compiled.levels, ("launches",)),
    "compilations": View(compiled.compilations, ("launches", "code")),
    "compiled-before": View(compiled.compiled_before, ("compile-seconds",)),
    "launches-beside-paper": View(compiled.launches_beside_paper, ("launches",)),
    "product-instructions": View(compiled.product_instructions, ("code", "predicted-mixed")),
    "product-errors": View(compiled.product_errors, ()),
    "network-errors": View(compiled.network_errors, ()),
    "code-of-tiles": View(compiled.code_of_tiles, ("code",)),
    "light-networks": View(compiled.light_networks, ("launches",)),
    # what is predicted
    "precisions": View(predicted.precisions, (*_PREDICTED, "predicted-V2")),
    "on-chip": View(predicted.levels_on_chip, (*_PREDICTED, "code")),
    "left-out": View(predicted.left_out, _PREDICTED),
    "normalization": View(predicted.normalization, ("predicted-mixed", "launches")),
    "channels": View(predicted.channels, _PREDICTED),
    "cells-of-lstm": View(predicted.cells_of_lstm, ("predicted-fp32", "launches")),
    "waits": View(predicted.waits, ("predicted-fp32", "launches")),
    "prices": View(predicted.prices, _PREDICTED),
    "changed-rules": View(predicted.changed_rules, ("predicted-mixed",)),
    "attention": View(predicted.attention, ("predicted-mixed",)),
    "measured-kernels": View(predicted.measured_kernels, ("ranks",)),
    "loops-of-cells": View(recurrent.loops_of_cells, ("predicted-fp32", "launches")),
    "weights-that-stay": View(recurrent.weights_that_stay, ("predicted-fp32", "launches")),
    # what is proven
    "certificates": View(proofs.certificates, ("certificate", "launches")),
    "mutants": View(proofs.mutants, ("certificate",)),
    "mutants-of-flags": View(proofs.mutants_of_flags, ("certificate",)),
    "mutants-of-prologues": View(proofs.mutants_of_prologues, ("certificate",)),
    "mutants-of-residence": View(proofs.mutants_of_residence, ("certificate",)),
    "mutants-of-teams": View(proofs.mutants_of_teams, ("certificate",)),
    "switches": View(proofs.switches, ("certificate", "code")),
    # searches
    "search-workers": View(searching.workers, ()),
    "search-clusters": View(searching.played_clusters, ()),
    "searched": View(searching.searched, ("predicted-fp32", "predicted-mixed")),
    # beside others
    "host-speed": View(peers.host_speed, ("host",)),
    "calls": View(peers.calls, ("host",)),
    "host-ratios": View(peers.host_ratios, ("host",)),
    "host-throughput": View(peers.host_throughput, ("host",)),
    "bench": View(peers.bench, ("host",)),
    "torch-models": View(peers.torch_models, ("host",)),
    "onnx-suite": View(peers.onnx_suite, ("operators",)),
    "quantized": View(peers.quantized, ("quantized",)),
    "quantized-speed": View(peers.quantized_speed, ("host",)),
    # beside what papers report
    "plans": View(papers.plans, ("plans",)),
    "plans-in-memory": View(papers.plans_in_memory, ("plans",)),
    "plans-beside-papers": View(papers.plans_beside_papers, ("plans",)),
    "planners-tiny": View(papers.planners_compiled, ("predicted-fp32", "launches")),
    "planners-paper": View(papers.planners_of_paper_size, ("predicted-fp32", "launches")),
    "learned": View(papers.learned, ("plans",)),
    "learned-compiled": View(papers.learned_compiled, ("predicted-fp32",)),
    "workloads-tiny": View(papers.workloads, ("predicted-fp32", "launches")),
    "workloads-paper": View(papers.workloads_of_paper_size, ("predicted-fp32", "launches")),
    "template-patterns": View(papers.template_patterns, ("predicted-fp32",)),
    "paper-table": View(papers.paper_table, ("predicted-fp32",)),
    "paper-table-4": View(papers.paper_table_4, (*_LATENCY, "latency-V2")),
    # what GPUs measured
    "gpu-first-run": View(gpu.first_run, (*_LATENCY, "latency-V2")),
    "gpu-first-run-after": View(gpu.first_run_after, (*_LATENCY, "latency-V2")),
    "gpu-second-run": View(gpu.second_run, ("latency-fp32", "latency-V2")),
    "gpu-second-run-crossed": View(gpu.second_run_crossed, ("latency-mixed", "latency-V2", "predicted-mixed")),
    "gpu-tilings": View(gpu.tilings, ("latency-mixed",)),
    "gpu-tiling-choice": View(gpu.tiling_choice, ()),
    "gpu-third-run": View(gpu.third_run, _LATENCY),
    # stages side by side
    "side-by-side": View(hfuse.side_by_side, _PREDICTED),
    "independent-stages": View(hfuse.independent_stages, _PREDICTED),
    "splits-of-stages": View(hfuse.splits_of_stages, _PREDICTED),
    "side-by-side-compiled": View(hfuse.side_by_side_compiled, (*_PREDICTED, "code")),
    "parts-of-blocks": View(hfuse.parts_of_blocks, _PREDICTED),
    "fused-kernels": View(hfuse.fused_kernels, ()),
    "fused-speed": View(hfuse.fused_speed, ()),
}
