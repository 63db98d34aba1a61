"""Semantic-preserving transformations of TE programs."""

from souffle.transform.horizontal import horizontal
from souffle.transform.listing import compare
from souffle.transform.masks import masks_by_index
from souffle.transform.narrow import narrow
from souffle.transform.precision import mixed_precision, tensor_float
from souffle.transform.ramps import absorb_ramps
from souffle.transform.roll import roll
from souffle.transform.spread_reads import spread_reads
from souffle.transform.vertical import vertical

__all__ = [
    "absorb_ramps",
    "compare",
    "horizontal",
    "masks_by_index",
    "mixed_precision",
    "narrow",
    "roll",
    "spread_reads",
    "tensor_float",
    "vertical",
]
