"""Semantic-preserving transformations of TE programs."""

from souffle.transform.horizontal import horizontal
from souffle.transform.precision import mixed_precision
from souffle.transform.vertical import vertical

__all__ = ["horizontal", "mixed_precision", "vertical"]
