"""Rolled repetition: equal consecutive pieces of a program become one loop."""

from souffle.transform.roll.roll import roll
from souffle.transform.roll.step_numbers import signature_of_step

__all__ = ["roll", "signature_of_step"]
