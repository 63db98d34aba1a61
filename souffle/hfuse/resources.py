"""What kernels take of a multiprocessor, and what one has: the constants of the paper's Figure 6."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Resources
from souffle.hfuse.errors import FusionError
from souffle.multiprocessor import MULTIPROCESSORS, Multiprocessor

__all__ = ["Usage", "compiled_usage", "multiprocessor_of"]

Usage = Callable[[str, str], Resources]
"""What a kernel uses, by its text and its name there."""


def multiprocessor_of(arch: str) -> Multiprocessor:
    """That of an architecture, such as ``sm_90`` or ``sm_90a``; raises FusionError where it is not known."""
    plain = arch.rstrip("af")
    if plain not in MULTIPROCESSORS:
        raise FusionError(f"the architecture {arch!r} is not known; known are {', '.join(MULTIPROCESSORS)}")
    return MULTIPROCESSORS[plain]


def compiled_usage(arch: str, cache_dir: Path | None = None) -> Usage:
    """What nvcc says for an architecture.

    The kernel's name must not be mangled: those of fused kernels and of wrapped originals are not.
    """

    def usage(text: str, name: str) -> Resources:
        _, resources = compile_cubin(text, arch, cache_dir=cache_dir)
        if name not in resources:
            raise FusionError(f"nvcc made no kernel {name!r} of the text; it made {', '.join(resources) or 'none'}")
        return resources[name]

    return usage
