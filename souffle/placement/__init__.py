"""Where reductions are computed: in the tiles of what they reduce, in two phases, or as they stand (paper §6.3)."""

from souffle.placement.gathered_products import gathered_products
from souffle.placement.in_tiles import propagate
from souffle.placement.reductions import place_reductions
from souffle.placement.tile_parts import reduce_in_tiles
from souffle.placement.two_phase import two_phase

__all__ = ["gathered_products", "place_reductions", "propagate", "reduce_in_tiles", "two_phase"]
