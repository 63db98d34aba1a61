"""The rule for chains within channels: expansion, depthwise convolution and pooling, squeeze and excitation.

Each tile owns some units of an axis (see ``forms/owned_chain.py``), such as channels: it computes them one operation
after another, with all their pixels in shared memory between, and needs nothing of other tiles.
"""

from __future__ import annotations

from functools import cache

from souffle.decision import Refused
from souffle.schedule.gpu.emit.owned_emission import emit_owned
from souffle.schedule.gpu.forms.owned_chain import OwnedChain, read_owned_chain
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Knob, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.owned_tiling import OwnedTiling, choose_width, least_clocks, tiling_of_width, widths

__all__ = ["CHANNEL_OWNED"]


def _apply(chain: OwnedChain, request: GpuRequest) -> Sketch | Refused:
    """A chain of which each tile owns some units, where all that a tile keeps fits on chip."""
    known: dict[int, OwnedTiling | Refused] = {}

    def of(width: int) -> OwnedTiling | Refused:
        if width not in known:
            known[width] = tiling_of_width(chain, width, request)
        return known[width]

    @cache
    def best() -> OwnedTiling | Refused:
        chosen = choose_width(chain, request)
        if isinstance(chosen, OwnedTiling):
            known[chosen.tile.width] = chosen
        return chosen

    def choose() -> Values | Refused:
        chosen = best()
        return chosen if isinstance(chosen, Refused) else {"width": chosen.tile.width}

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = of(values["width"])
        if isinstance(tiling, Refused):
            return tiling
        kernel, tiles = emit_owned(tiling, request)
        return GpuSchedule(kernel, CHANNEL_OWNED.name, tiles, request.threads, tensor_cores=tiling.on_tensor_cores)

    knobs = (Knob("width", widths(chain)),)
    return Sketch(CHANNEL_OWNED.name, knobs, choose, make, least=least_clocks(chain, request))


CHANNEL_OWNED = Rule("channel_owned", read_owned_chain, _apply, whole_rows=True)
