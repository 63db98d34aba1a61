"""The nine kernels of HFuse's evaluation (§IV-A), their launches by size, and the pairs that are fused.

A size is a number from 1 on that the time of a kernel grows with. Size 1 runs on the CPU device within milliseconds.
:data:`GPU_SIZES` are for a GPU of an H100's class. The deep-learning kernels move there 1.1 GB (Hist), 1.8 (Batchnorm),
2.0 (Im2Col), 2.6 (Upsample) and 2.9 (Maxpool), Ethash 18 GB out of 1 GiB; at 2 TB/s these are 0.5 to 1.5 ms, and 9. The
other three calculate 43 (SHA-256), 52 (BLAKE2b) and 87 million hashes (BLAKE-256), by a count of instructions some 10
ms. These are estimates: ``gpu.py`` measures, and changes sizes by what it has measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from souffle.hfuse import Argument, Fill, Launch, Part, Source

__all__ = [
    "BLOCK",
    "DEEP_LEARNING",
    "GPU_SIZES",
    "GROUPS",
    "HASHES",
    "KERNELS",
    "PAIRS",
    "TRIPLE",
    "Pair",
    "batchnorm",
    "ethash",
    "hist",
    "im2col",
    "launch_of",
    "maxpool",
    "parts_of",
    "search",
    "source_of",
    "upsample",
]

DEEP_LEARNING = ("batchnorm", "hist", "im2col", "maxpool", "upsample")
"""With blocks of any number of threads."""

HASHES = ("blake256", "blake2b", "ethash", "sha256")
"""With blocks of 256 threads, as miners launch them."""

KERNELS = (*DEEP_LEARNING, *HASHES)


@dataclass(frozen=True)
class Pair:
    """Two kernels that are fused.

    Attributes
    ----------
    first, second : str
    starred : str
        The one whose size is changed in the paper's Figure 7 to get several ratios of execution times. Where the
        paper's text does not tell which it is, the first.
    """

    first: str
    second: str
    starred: str

    @property
    def name(self) -> str:
        """As the paper writes it: ``"batchnorm+hist"``."""
        return f"{self.first}+{self.second}"


PAIRS = (
    Pair("batchnorm", "upsample", "batchnorm"),
    Pair("batchnorm", "hist", "batchnorm"),
    Pair("batchnorm", "im2col", "batchnorm"),
    Pair("batchnorm", "maxpool", "batchnorm"),
    Pair("hist", "im2col", "hist"),
    Pair("hist", "maxpool", "maxpool"),
    Pair("hist", "upsample", "upsample"),
    Pair("im2col", "maxpool", "im2col"),
    Pair("im2col", "upsample", "im2col"),
    Pair("maxpool", "upsample", "upsample"),
    Pair("blake2b", "ethash", "blake2b"),
    Pair("blake256", "ethash", "blake256"),
    Pair("ethash", "sha256", "ethash"),
    Pair("blake256", "blake2b", "blake256"),
    Pair("blake256", "sha256", "blake256"),
    Pair("blake2b", "sha256", "blake2b"),
)
"""In the order of the paper's Figure 9."""

TRIPLE = ("batchnorm", "hist", "maxpool")
"""Three kernels in one (§IV-B)."""

GROUPS: dict[str, tuple[str, ...]] = {pair.name: (pair.first, pair.second) for pair in PAIRS} | {
    "+".join(TRIPLE): TRIPLE
}
"""What is fused, by name: the sixteen pairs and the triple."""

BLOCK = 1024
"""Threads of a fused block (d0) of kernels with tunable blocks."""

GPU_SIZES = {
    "batchnorm": 16384,
    "hist": 131072,
    "im2col": 3070,
    "maxpool": 32766,
    "upsample": 1998,
    "blake256": 1056 * 320,
    "blake2b": 1056 * 192,
    "ethash": 1056 * 8,
    "sha256": 1056 * 160,
}

_MOST_BLOCKS = 1056
"""Eight for each of an H100's 132 multiprocessors."""

_HASH_THREADS = 256
_KEPT = 4096
"""The most digests that a launch writes."""

_SMALL_ROWS, _LARGE_ROWS = 1009, 8388593
"""Of Ethash's data set, primes as there: 126 KB, and 1 GiB, which no cache holds."""

_NONE_YET = Fill("constant", (2**64 - 1,))


def source_of(kernel: str) -> Path:
    """The CUDA file of one of :data:`KERNELS`."""
    return Path(__file__).resolve().parent / "kernels" / f"{kernel}.cu"


def _blocks(work: int) -> int:
    """A grid for so many independent items: more than one for each thread of the largest part of a block."""
    return max(2, min(_MOST_BLOCKS, work // 1024))


def _scalars(**values: int | float) -> tuple[Argument, ...]:
    return tuple(Argument(name, value=value) for name, value in values.items())


def _reached(extent: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """How many windows lie along a dimension."""
    return (extent + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1


def maxpool(
    planes: int,
    height: int,
    width: int,
    *,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    pad: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
) -> Launch:
    """Max pooling of `planes` planes; the values and their places."""
    out_height = _reached(height, kernel[0], stride[0], pad[0], dilation[0])
    out_width = _reached(width, kernel[1], stride[1], pad[1], dilation[1])
    total = planes * out_height * out_width
    arguments = (
        Argument("input", dtype="float32", count=planes * height * width, fill=Fill("uniform", (-1, 1))),
        Argument("output", dtype="float32", count=total, output=True),
        Argument("places", dtype="int64", count=total, output=True),
        *_scalars(planes=planes, in_height=height, in_width=width, out_height=out_height, out_width=out_width),
        *_scalars(kernel_height=kernel[0], kernel_width=kernel[1], stride_height=stride[0], stride_width=stride[1]),
        *_scalars(pad_height=pad[0], pad_width=pad[1], dilation_height=dilation[0], dilation_width=dilation[1]),
    )
    return Launch("max_pool2d", (_blocks(total), 1, 1), (None, 1, 1), arguments=arguments)


def batchnorm(batch: int, channels: int, positions: int) -> Launch:
    """Mean and variance of each channel; a block of 16 rows for each."""
    arguments = (
        Argument("input", dtype="float32", count=batch * channels * positions, fill=Fill("uniform", (-1, 3))),
        Argument("means", dtype="float32", count=channels, output=True),
        Argument("variances", dtype="float32", count=channels, output=True),
        *_scalars(batch=batch, channels=channels, positions=positions),
    )
    return Launch("batch_norm_statistics", (channels, 1, 1), (None, 16, 1), arguments=arguments)


def upsample(planes: int, height: int, width: int, out_height: int, out_width: int, *, align_corners: bool) -> Launch:
    """Bilinear upsampling of `planes` planes."""

    def scale(extent: int, out: int) -> float:
        if align_corners:
            return float(np.float32(extent - 1) / np.float32(out - 1)) if out > 1 else 0.0
        return float(np.float32(extent) / np.float32(out))

    arguments = (
        Argument("input", dtype="float32", count=planes * height * width, fill=Fill("uniform", (-1, 1))),
        Argument("output", dtype="float32", count=planes * out_height * out_width, output=True),
        *_scalars(planes=planes, in_height=height, in_width=width, out_height=out_height, out_width=out_width),
        *_scalars(scale_height=scale(height, out_height), scale_width=scale(width, out_width)),
        *_scalars(align_corners=int(align_corners)),
    )
    return Launch("upsample_bilinear2d", (_blocks(out_height * out_width), 1, 1), (None, 1, 1), arguments=arguments)


def im2col(
    channels: int,
    height: int,
    width: int,
    *,
    kernel: tuple[int, int] = (3, 3),
    pad: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
) -> Launch:
    """The columns of an image."""
    out_height = _reached(height, kernel[0], stride[0], pad[0], dilation[0])
    out_width = _reached(width, kernel[1], stride[1], pad[1], dilation[1])
    windows = channels * out_height * out_width
    arguments = (
        Argument("image", dtype="float32", count=channels * height * width, fill=Fill("uniform", (-1, 1))),
        Argument("columns", dtype="float32", count=windows * math.prod(kernel), output=True),
        *_scalars(channels=channels, height=height, width=width, out_height=out_height, out_width=out_width),
        *_scalars(kernel_height=kernel[0], kernel_width=kernel[1], pad_height=pad[0], pad_width=pad[1]),
        *_scalars(stride_height=stride[0], stride_width=stride[1]),
        *_scalars(dilation_height=dilation[0], dilation_width=dilation[1]),
    )
    return Launch("im2col", (_blocks(windows), 1, 1), (None, 1, 1), arguments=arguments)


def hist(total: int, bins: int, low: float, high: float) -> Launch:
    """A histogram of normally distributed values."""
    arguments = (
        Argument("values", dtype="float32", count=total, fill=Fill("normal", (0, 1))),
        Argument("counts", dtype="uint32", count=bins, output=True),
        *_scalars(total=total, bins=bins, low=low, high=high),
    )
    return Launch("histogram", (_blocks(total), 1, 1), (None, 1, 1), shared_bytes=4 * bins, arguments=arguments)


def search(kernel: str, blocks: int, tries: int, first_nonce: int = 0x1000) -> Launch:
    """The search for a nonce with one of the three hashes that need no data set."""
    name, dtype, words = {
        "sha256": ("sha256d_search", "uint32", 20),
        "blake256": ("blake256_search", "uint32", 20),
        "blake2b": ("blake2b_search", "uint64", 10),
    }[kernel]
    kept = min(_KEPT, blocks * _HASH_THREADS * tries)
    digest_words = 8 if dtype == "uint32" else 4
    arguments = (
        Argument("header", dtype=dtype, count=words, fill=Fill("integers", (0, 2 ** (8 * np.dtype(dtype).itemsize)))),
        Argument("best", dtype="uint64", count=1, fill=_NONE_YET, output=True),
        Argument("digests", dtype=dtype, count=kept * digest_words, output=True),
        *_scalars(first_nonce=first_nonce, tries=tries, kept=kept),
    )
    return Launch(name, (blocks, 1, 1), (_HASH_THREADS, 1, 1), arguments=arguments)


def ethash(blocks: int, tries: int, rows: int, first_nonce: int = 0x1000) -> Launch:
    """The search for a nonce with Ethash over a data set of `rows` rows of 128 bytes."""
    kept = min(_KEPT, blocks * _HASH_THREADS * tries)
    arguments = (
        Argument("header", dtype="uint64", count=4, fill=Fill("integers", (0, 2**64))),
        Argument("rows", dtype="uint32", count=rows * 32, fill=Fill("integers", (0, 2**32))),
        Argument("best", dtype="uint64", count=1, fill=_NONE_YET, output=True),
        Argument("digests", dtype="uint64", count=kept * 4, output=True),
        *_scalars(first_nonce=first_nonce, row_count=rows, tries=tries, kept=kept),
    )
    return Launch("ethash_search", (blocks, 1, 1), (_HASH_THREADS, 1, 1), arguments=arguments)


def _hash_extent(size: int) -> tuple[int, int]:
    """Blocks and tries: a full grid first, then more hashes for each thread."""
    return min(1 + size, _MOST_BLOCKS), -(-size // _MOST_BLOCKS)


_LAUNCHES: dict[str, Callable[[int], Launch]] = {
    "batchnorm": lambda size: batchnorm(17 + size // 32, min(1056, 2 + size), min(784, 72 + size)),
    "hist": lambda size: hist(2048 * size + 1, 100, -3.0, 3.0),
    "im2col": lambda size: im2col(2 + size, *[min(128, 31 + size)] * 2),
    "maxpool": lambda size: maxpool(11 + size, *[min(112, 26 + size)] * 2),
    "upsample": lambda size: upsample(
        2 + size, *[min(256, 31 + size)] * 2, *[2 * min(256, 31 + size)] * 2, align_corners=False
    ),
    "blake256": lambda size: search("blake256", *_hash_extent(size)),
    "blake2b": lambda size: search("blake2b", *_hash_extent(size)),
    "ethash": lambda size: ethash(*_hash_extent(size), _SMALL_ROWS if size < _MOST_BLOCKS else _LARGE_ROWS),
    "sha256": lambda size: search("sha256", *_hash_extent(size)),
}


def launch_of(kernel: str, size: int) -> Launch:
    """The launch of one of :data:`KERNELS` at a size of at least 1.

    Parameters
    ----------
    kernel : str
    size : int
        See the top of this file. The shapes of Maxpool, Upsample and Im2Col grow in width and in number up to those of
        networks for images, then in number alone; those of the hash functions in blocks up to a full grid, then in
        hashes for each thread (the paper's iterations). At any size each block of a deep-learning kernel has more to
        do than it has threads, so that its loops turn.
    """
    return _LAUNCHES[kernel](size)


def parts_of(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """The parts of a fusion: kernels, each at a size."""
    return tuple(Part.of(Source.read(source_of(kernel)), launch=launch_of(kernel, n)) for kernel, n in sizes.items())
