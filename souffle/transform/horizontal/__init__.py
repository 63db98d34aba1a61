"""Horizontal transformation: independent isomorphic TEs become one TE (paper §6.1)."""

from souffle.transform.horizontal.horizontal import horizontal

__all__ = ["horizontal"]
