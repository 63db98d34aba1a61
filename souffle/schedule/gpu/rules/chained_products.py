"""The rule for two products with work on rows between them, on tensor cores (sm_80 and newer), such as attention.

A block computes whole rows of the first product, what reductions of rows and functions of elements make of them, and
the second product's tile of the same rows: all columns at once, in panels of columns that are computed again for each
reduction, or in panels with a running maximum and sum, whichever is estimated to take least. What lies between stays in
registers and shared memory: no element of it is in global memory, and no block waits for another (paper §6.5).
"""

from __future__ import annotations

from functools import partial
from math import prod

from souffle.decision import Refused
from souffle.schedule.gpu.emit.chain_emission import ChainKernel
from souffle.schedule.gpu.emit.running_rows import RunningKernel
from souffle.schedule.gpu.forms.chained_products import ChainedProducts, read_chained_products
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.chain_tiling import (
    ChainTiling,
    assumed_sources,
    chain_knobs,
    choose_chain,
    tile_sources,
)
from souffle.schedule.gpu.tiling.tensor_cores import fragments_of

__all__ = ["CHAINED_PRODUCTS"]


def _apply(form: ChainedProducts, request: GpuRequest) -> Sketch | Refused:
    """Products with fp32 totals of operands that tensor cores multiply, of both alike; values of rows in fp32."""
    if request.threads % 32:
        return form.first.refused(f"{request.threads} threads are not whole warps")
    fragments, of_second = (fragments_of(product, request) for product in (form.first, form.second))
    if isinstance(fragments, Refused) or isinstance(of_second, Refused):
        return fragments if isinstance(fragments, Refused) else of_second
    if fragments is not of_second:
        return form.first.refused(f"its operands are multiplied in {fragments.name}, the second's in {of_second.name}")
    other = next((r for r in form.reductions if str(r.result.ty.dtype) != "float32"), None)
    if other is not None:
        return form.first.refused(f"its rows are reduced in {other.result.ty.dtype} by {other.name}; fp32 is needed")
    assumed = assumed_sources(form, request, fragments)
    unfit = form.first.refused(
        f"rows of {form.first.extents[2]} fit the registers of no block, or {request.max_shared_bytes} bytes of shared "
        "memory no tile"
    )

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = ChainTiling.of(values, form, request.threads, fragments)
        if tiling is None:
            return form.first.refused(f"{request.threads // 32} warps cannot be shared so")
        if tiling.running and isinstance(form.running, Refused):
            return form.first.refused(form.running.reason)
        sources = tile_sources(form, tiling, request)
        refusal = tiling.refusal(form, sources, request)
        if refusal is not None:
            return form.first.refused(refusal.reason)
        kernel = (RunningKernel if tiling.running else ChainKernel)(form, tiling, sources, request.threads)
        tiles = prod(tiling.counts(form))
        name, threads, way = CHAINED_PRODUCTS.name, request.threads, tiling.way(form)
        return GpuSchedule(kernel.func(), name, tiles, threads, tensor_cores=True, way=way)

    best = partial(choose_chain, form, assumed, request)
    return Sketch.of_least(CHAINED_PRODUCTS.name, chain_knobs(form, assumed, request.threads), best, unfit, make)


CHAINED_PRODUCTS = Rule("chained_products", read_chained_products, _apply, whole_rows=True)
