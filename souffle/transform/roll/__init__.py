"""Rolled repetition: equal consecutive pieces of a program become one loop."""

from souffle.transform.roll.repetition import signature
from souffle.transform.roll.roll import roll

__all__ = ["roll", "signature"]
