"""Compiling in a process of its own while a network that was compiled sooner runs (FusionStitching, §6).

A process and not a thread: the compiler holds Python's lock, which calls of the quick network need, and what it keeps
between compilations has no locks for two of them at once. The process gets the program (``program/packed.py``) and
gives a ``.souffle`` file, which is data: loading it runs nothing of it, and damage shows.
"""

from __future__ import annotations

from souffle.background.network import BackgroundNetwork, BoundUntilExchanged, compile_in_background

__all__ = ["BackgroundNetwork", "BoundUntilExchanged", "compile_in_background"]
