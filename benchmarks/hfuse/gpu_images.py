"""Machine code of the texts that a GPU is to run: made by nvcc, once, and carried where a folder is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.hfuse.workloads import BLOCK
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Resources
from souffle.hfuse import (
    Bound,
    FusedKernel,
    Part,
    even_split,
    fuse,
    multiprocessor_of,
    original,
    partitions,
    register_bound,
)

__all__ = ["Images", "candidates", "native_splits"]

_NATIVE = 512
"""Threads of a tunable kernel alone, and in the vertically fused one."""


@dataclass(frozen=True, eq=False)
class Images:
    """A compiler of CUDA texts that keeps what it has made.

    Attributes
    ----------
    folder : Path or None
        Where machine code is kept between processes, by a hash of text and architecture; what is there needs no nvcc.
    played : bool
        Give the text itself as machine code, with made-up resources, as the played GPU takes it.
    made : dict
        By text and architecture.
    """

    folder: Path | None = None
    played: bool = False
    made: dict[tuple[str, str], tuple[bytes, dict[str, Resources]]] = field(default_factory=dict)

    def compile(self, text: str, arch: str) -> tuple[bytes, dict[str, Resources]]:
        """Machine code and what its kernels use."""
        if (text, arch) not in self.made:
            self.made[text, arch] = self._played(text) if self.played else self._compiled(text, arch)
        return self.made[text, arch]

    def usage(self, arch: str, text: str, name: str) -> Resources:
        """What one kernel of a text uses."""
        resources = self.compile(text, arch)[1]
        return next(iter(resources.values())) if self.played else resources[name]

    def _played(self, text: str) -> tuple[bytes, dict[str, Resources]]:
        return text.encode(), {"kernel": Resources(32, 0, 0, 0)}

    def _compiled(self, text: str, arch: str) -> tuple[bytes, dict[str, Resources]]:
        if self.folder is None:
            return compile_cubin(text, arch)
        key = hashlib.sha256(f"{arch}\0{text}".encode()).hexdigest()[:24]
        image, words = self.folder / f"{key}.cubin", self.folder / f"{key}.json"
        if not (image.exists() and words.exists()):
            self.folder.mkdir(parents=True, exist_ok=True)
            code, resources = compile_cubin(text, arch)
            image.write_bytes(code)
            words.write_text(json.dumps({name: asdict(used) for name, used in resources.items()}))
        held = json.loads(words.read_text())
        return image.read_bytes(), {name: Resources(**used) for name, used in held.items()}


def native_splits(parts: Sequence[Part]) -> tuple[int, ...]:
    """Threads of each part where it runs alone, and where it is fused vertically."""
    return tuple(part.threads or _NATIVE for part in parts)


def candidates(parts: Sequence[Part], arch: str, images: Images) -> dict[str, list[FusedKernel]]:
    """All fused kernels that are measured, by kind.

    ``"hfuse"`` are those of the paper's Figure 6, each partition without and with its register bound, ``"vfuse"`` the
    vertical fusion, ``"naive"`` the even partition without a bound (of kernels with tunable blocks alone).
    """
    alone = [original(part, wrapped=True) for part in parts]
    registers = [images.usage(arch, text.text, text.name).registers for text in alone]
    horizontal = []
    for splits in partitions(parts, BLOCK):
        free = fuse(parts, splits)
        shared = images.usage(arch, free.text, free.name).static_shared_bytes + free.shared_bytes
        bound = register_bound(splits, registers, shared, multiprocessor_of(arch))
        horizontal += [free, fuse(parts, splits, bound=Bound(blocks=bound.blocks))]
    tunable = any(part.threads is None for part in parts)
    return {
        "hfuse": horizontal,
        "vfuse": [fuse(parts, native_splits(parts), space="sequence")],
        "naive": [fuse(parts, even_split(parts, BLOCK))] if tunable else [],
    }
