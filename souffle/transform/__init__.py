"""Semantic-preserving transformations of TE programs."""

from souffle.transform.horizontal import horizontal
from souffle.transform.listing import compare
from souffle.transform.narrow import narrow
from souffle.transform.precision import mixed_precision
from souffle.transform.propagate import propagate
from souffle.transform.roll import roll
from souffle.transform.two_phase import two_phase
from souffle.transform.vertical import vertical

__all__ = ["compare", "horizontal", "mixed_precision", "narrow", "propagate", "roll", "two_phase", "vertical"]
