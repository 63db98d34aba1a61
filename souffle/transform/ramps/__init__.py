"""Partial steps before and after a repeated piece become steps of it, in which some rows idle."""

from souffle.transform.ramps.absorb import absorb_ramps

__all__ = ["absorb_ramps"]
