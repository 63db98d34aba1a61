"""Compiling in a process of its own while a network that was compiled sooner runs (FusionStitching, §6).

A process and not a thread: TVM and isl hold Python's lock for seconds at a time, in which no call of the quick network
could begin, and what the compiler keeps between compilations is not made for two of them at once. The process gets the
program (``program/packed.py``) and gives a ``.souffle`` file, which is data: loading it runs nothing of it, and damage
shows.
"""

from __future__ import annotations

from souffle.background.network import BackgroundNetwork, compile_in_background

__all__ = ["BackgroundNetwork", "compile_in_background"]
