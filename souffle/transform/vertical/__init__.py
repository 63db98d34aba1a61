"""Vertical transformation: chains of one-relies-on-one TEs become one TE (paper §6.2)."""

from souffle.transform.vertical.vertical import vertical

__all__ = ["vertical"]
