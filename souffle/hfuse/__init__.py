"""Horizontal fusion of CUDA kernels that are given as CUDA text (HFuse, Li et al., CGO 2022).

``Part.of(Source.read("a.cu"))`` reads a kernel, :func:`fuse` puts several into one, :func:`check` compares that with
the kernels alone on the CPU device, and :func:`search` looks for the fastest partition of a block's threads.
"""

from __future__ import annotations

from souffle.hfuse.check import Check, Difference, check
from souffle.hfuse.errors import FusionError
from souffle.hfuse.fuse import SPACES, FusedKernel, fuse
from souffle.hfuse.fused_text import Bound
from souffle.hfuse.launch import Argument, Fill, Launch
from souffle.hfuse.original import Original, original
from souffle.hfuse.part import Part, even_split
from souffle.hfuse.resources import compiled_usage, multiprocessor_of
from souffle.hfuse.search import RegisterBound, Search, Trial, partitions, register_bound, search
from souffle.hfuse.source import Source
from souffle.multiprocessor import MULTIPROCESSORS, Multiprocessor

__all__ = [
    "MULTIPROCESSORS",
    "SPACES",
    "Argument",
    "Bound",
    "Check",
    "Difference",
    "Fill",
    "FusedKernel",
    "FusionError",
    "Launch",
    "Multiprocessor",
    "Original",
    "Part",
    "RegisterBound",
    "Search",
    "Source",
    "Trial",
    "check",
    "compiled_usage",
    "even_split",
    "fuse",
    "multiprocessor_of",
    "original",
    "partitions",
    "register_bound",
    "search",
]
