"""A fused kernel against its parts alone, on the CPU device, bit for bit.

Both run from the same random arrays, in shuffled orders of threads and blocks. Around each array lie bytes that no
kernel may write, which are compared too. A barrier that waits for too few or too many, a thread index or an offset of
shared memory that is off by anything, shows as other bits or as a :class:`~souffle.emulator.BarrierError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from souffle.emulator import CpuModule, compile_text
from souffle.errors import DeviceError
from souffle.hfuse.errors import FusionError
from souffle.hfuse.fuse import FusedKernel
from souffle.hfuse.launch import Launch
from souffle.hfuse.original import original
from souffle.hfuse.part import Part

__all__ = ["Check", "Difference", "check"]

_MARGIN = 4096
"""Bytes before and behind an array."""

_UNTOUCHED = np.random.default_rng(0).integers(0, 256, _MARGIN, np.uint8)
"""What they hold: no two elements alike, for a kernel may well copy, or take a mean of, what it reads there."""

Values = list[np.ndarray | int | float]


@dataclass(frozen=True)
class Difference:
    """Where a fused kernel and a part alone differ.

    Attributes
    ----------
    order : int
        The seed of the order and of the arrays.
    kernel : str
        The part's.
    argument : str
        The buffer; empty where a kernel failed.
    elements : int
        That differ.
    first : int
        The first of them, counted through the whole buffer; -1 where only what lies around it differs.
    message : str
    """

    order: int
    kernel: str
    argument: str
    elements: int
    first: int
    message: str

    def __str__(self) -> str:
        return f"order {self.order}: {self.kernel}: {self.message}"


@dataclass(frozen=True)
class Check:
    """What a check found.

    Attributes
    ----------
    orders : int
        That both ran in.
    buffers : int
        That were compared in each.
    differences : tuple of Difference
    """

    orders: int
    buffers: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def check(
    fused: FusedKernel,
    *,
    orders: int = 3,
    seed: int = 0,
    checked: bool = False,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Check:
    """Run a fused kernel and its parts alone, and compare all buffers.

    Parameters
    ----------
    fused : FusedKernel
        With the launches of its parts.
    orders : int
        How many shuffled orders, each with arrays of its own.
    seed : int
        Of the first order and of its arrays.
    checked : bool
        Also look at each memory access of the fused kernel, in the first order: accesses out of bounds, reads of what
        nothing has written, and races, of threads of two parts too. Nothing is said where a kernel alone shows such a
        thing; of kernels with atomics, which may order threads, no races are told.
    cache_dir : Path, optional
        Of compiled texts.
    progress : callable, optional
        Told what is done.

    Raises
    ------
    FusionError
        A part has no launch, or gives other bits in another order of its own threads: there is nothing to compare with.
    CudaCompileError
        The CPU device cannot compile a text.
    """
    launch = fused.launch()
    if orders < 1:
        raise FusionError(f"a check runs in at least one order, not {orders}")
    module = compile_text(fused.text, cache_dir=cache_dir)
    singles = []
    for part in fused.parts:
        text = original(part)
        singles.append((compile_text(text.text, cache_dir=cache_dir), text.name))
    differences: list[Difference] = []
    for order in range(seed, seed + orders):
        if progress is not None:
            progress(f"order {order - seed + 1} of {orders}")
        begun, expected = [], []
        for index, (part, threads, single) in enumerate(zip(fused.parts, fused.splits, singles, strict=True)):
            # One kernel may be several parts of a fused kernel: each gets arrays of its own.
            begun.append(part.launch.arrays(order * len(fused.parts) + index))
            expected.append(_alone(part, threads, single, begun[-1], order))
        given = [_Buffers.of(values) for values in begun]
        arguments = [value for buffers in given for value in buffers.values] + [value for _, value in fused.grids()]
        try:
            module.launch(
                fused.name,
                grid=launch.grid,
                block=(fused.block, 1, 1),
                args=arguments,
                shared_bytes=fused.shared_bytes,
                order="shuffled",
                seed=order,
            )
        except DeviceError as error:
            differences.append(Difference(order, fused.name, "", 0, 0, str(error)))
            continue
        for part, wanted, result in zip(fused.parts, expected, given, strict=True):
            differences += _different(part, wanted, result, order)
    if checked:
        differences += _findings(fused, seed, cache_dir)
    count = sum(argument.dtype is not None for part in fused.parts for argument in part.launch.arguments)
    return Check(orders, count, tuple(differences))


@dataclass(frozen=True)
class _Buffers:
    """Arguments of a launch, with the memory that the arrays lie in; None for scalars."""

    values: Values
    memory: list[np.ndarray | None]

    @staticmethod
    def of(values: Values) -> _Buffers:
        """Copies of arrays, with a margin before and behind."""
        copies: Values = []
        memory: list[np.ndarray | None] = []
        for value in values:
            held = None
            if isinstance(value, np.ndarray):
                held = np.concatenate([_UNTOUCHED, np.empty(value.nbytes, np.uint8), _UNTOUCHED])
                copy = held[_MARGIN : _MARGIN + value.nbytes].view(value.dtype)
                copy[...] = value
                value = copy
            copies.append(value)
            memory.append(held)
        return _Buffers(copies, memory)


def _alone(part: Part, threads: int, single: tuple[CpuModule, str], values: Values, order: int) -> _Buffers:
    """What a part gives by itself: in the order of its threads, and the same in a shuffled one."""
    module, name = single
    results = []
    for options in ({}, {"order": "shuffled", "seed": order}):
        buffers = _Buffers.of(values)
        module.launch(
            name,
            grid=part.launch.grid,
            block=part.launch.block_of(threads),
            args=buffers.values,
            shared_bytes=part.launch.shared_bytes,
            **options,
        )
        results.append(buffers)
    unlike = _different(part, results[0], results[1], order)
    if unlike:
        raise FusionError(
            f"{part.place}: it gives other results in another order of its threads, in {unlike[0].argument}: "
            f"{unlike[0].message}; only kernels whose result is one can be compared bit for bit"
        )
    return results[0]


def _different(part: Part, wanted: _Buffers, result: _Buffers, order: int) -> list[Difference]:
    """The buffers of which any bit differs, around them too; not-a-numbers are bits as others are."""
    differences = []
    for argument, left, right in zip(part.launch.arguments, wanted.memory, result.memory, strict=True):
        if left is None or right is None or (left == right).all():
            continue
        name, dtype = argument.name, np.dtype(argument.dtype)
        inside = slice(_MARGIN, len(left) - _MARGIN)
        unequal = (left != right)[inside].reshape(-1, dtype.itemsize).any(axis=1)
        if unequal.any():
            first = int(np.argmax(unequal))
            values = (memory[inside].view(dtype)[first] for memory in (right, left))
            message = (
                f"{name}: {int(unequal.sum())} of {len(unequal)} elements differ, the first at {first}: "
                "{!r} where the kernel alone gives {!r}".format(*values)
            )
        else:
            first = -1
            message = f"outside of {name}: {int((left != right).sum())} bytes differ, which no kernel may write"
        differences.append(Difference(order, part.kernel, name, int(unequal.sum()), first, message))
    return differences


def _findings(fused: FusedKernel, seed: int, cache_dir: Path | None) -> list[Difference]:
    """What is wrong with a fused kernel's accesses to memory, and not with those of its parts alone."""
    arrays = [part.launch.arrays(index) for index, part in enumerate(fused.parts)]
    for part, threads, values in zip(fused.parts, fused.splits, arrays, strict=True):
        text = original(part)
        alone = replace(part.launch, kernel=text.name, block=part.launch.block_of(threads))
        if _messages_of(text.text, alone, values, seed, cache_dir):
            return []
    arguments = [value for values in arrays for value in values] + [value for _, value in fused.grids()]
    messages = _messages_of(fused.text, fused.launch(), arguments, seed, cache_dir)
    return [Difference(seed, fused.name, "", 0, 0, message) for message in messages]


def _messages_of(text: str, launch: Launch, values: Values, seed: int, cache_dir: Path | None) -> list[str]:
    module = compile_text(text, cache_dir=cache_dir, checked=True)
    try:
        report = module.launch(
            launch.kernel,
            grid=launch.grid,
            block=launch.block_of(launch.threads or 0),
            args=[value.copy() if isinstance(value, np.ndarray) else value for value in values],
            shared_bytes=launch.shared_bytes,
            order="shuffled",
            seed=seed,
            raises=False,
        )
    except DeviceError as error:
        return [str(error)]
    return [str(finding) for finding in report.findings]
