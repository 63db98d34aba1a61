"""Place the intermediate tensors of a network in one workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from souffle.codegen.plan import Buffer
from souffle.kernel import MergedKernel
from souffle.kernel.grid_barrier import STATE_DTYPE
from souffle.program import Tensor, TEProgram
from souffle.watchdog import RECORD_WORDS

__all__ = ["ALIGNMENT", "BARRIER_STATE", "Lifetime", "place", "place_buffers", "with_barrier_state", "RECORD"]

ALIGNMENT = 256
"""Bytes; what cudaMalloc guarantees, so that vector loads stay aligned."""

BARRIER_STATE = "grid barrier"
"""The name of the buffer that grid barriers keep between launches; with a blank, as no tensor's."""

RECORD = "watchdog record"
"""The name of the buffer in which a wait that is over is written down."""


@dataclass(frozen=True)
class Lifetime:
    """When a tensor's memory is in use.

    Attributes
    ----------
    nbytes : int
    first, last : int
        Epochs, inclusive. An epoch ends at a grid sync or at the end of a kernel. Two tensors may share memory only if
        a whole barrier lies between their lifetimes, since blocks of one epoch run in any order.
    """

    nbytes: int
    first: int
    last: int


def place(lifetimes: Sequence[Lifetime]) -> tuple[tuple[int, ...], int]:
    """Offsets in bytes such that tensors whose lifetimes meet do not overlap, and the bytes needed in all.

    Greedy best fit by size: large tensors first, each at the lowest offset that is free over its lifetime.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, i)):
        life = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + _rounded(lifetimes[other].nbytes))
            for other in placed
            if lifetimes[other].first <= life.last and life.first <= lifetimes[other].last
        )
        at = 0
        for start, end in taken:
            if at + _rounded(life.nbytes) <= start:
                break
            at = max(at, end)
        offsets[index] = at
        placed.append(index)
        total = max(total, at + _rounded(life.nbytes))
    return tuple(offsets), total


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def place_buffers(
    program: TEProgram,
    first: Mapping[Tensor, int],
    last: Mapping[Tensor, int],
    within: Mapping[Tensor, tuple[Tensor, int]] | None = None,
) -> tuple[tuple[Buffer, ...], dict[Tensor, int], int]:
    """All buffers of a network: inputs, outputs, constants, then the workspace.

    Parameters
    ----------
    program : TEProgram
    first, last : mapping of Tensor to int
        The first and last epoch of what stages define.
    within : mapping of Tensor to (Tensor, int), optional
        Tensors that lie in another one, which lies in none, and at which of its bytes.

    Returns
    -------
    buffers : tuple of Buffer
    index : dict of Tensor to int
        Each tensor's position in `buffers`.
    workspace : int
        Bytes of the workspace.
    """
    inputs = zip(program.input_names, program.inputs, strict=True)
    small = program.small_types
    buffers = [Buffer(t.name, t.shape, t.dtype, "input", n, stands_for=small.get(n, "")) for n, t in inputs]
    outputs = zip(program.output_names, program.outputs, strict=True)
    counts = program.counts
    buffers += [
        Buffer(t.name, t.shape, t.dtype, "output", n, stands_for=small.get(n, ""), counts=counts.get(n, ()))
        for n, t in outputs
    ]
    buffers += [Buffer(t.name, t.shape, t.dtype, "constant", t.name) for t in program.constants]
    outer = dict.fromkeys((*program.inputs, *program.outputs, *program.constants))
    inner = [t for t in first if t not in outer]
    home = {t: (within or {}).get(t, (t, 0)) for t in inner}
    begins: dict[Tensor, int] = {}
    ends: dict[Tensor, int] = {}
    for t, (whole, _) in home.items():
        begins[whole] = min(first[t], begins.get(whole, first[t]))
        ends[whole] = max(last[t], ends.get(whole, last[t]))
    offsets, total = place([Lifetime(whole.nbytes, begins[whole], ends[whole]) for whole in begins])
    start = dict(zip(begins, offsets, strict=True))
    buffers += [
        Buffer(t.name, t.shape, t.dtype, "workspace", t.name, start[whole] + at) for t, (whole, at) in home.items()
    ]
    return tuple(buffers), {t: i for i, t in enumerate([*outer, *inner])}, total


def with_barrier_state(
    buffers: Sequence[Buffer], kernels: Sequence[MergedKernel]
) -> tuple[tuple[Buffer, ...], dict[str, tuple[int, ...]]]:
    """The buffers with what grid barriers keep, and the record of a wait that is over, where any kernel has them.

    One of each serves all kernels: the launches of a network run one after the other.

    Parameters
    ----------
    buffers : sequence of Buffer
    kernels : sequence of MergedKernel

    Returns
    -------
    buffers : tuple of Buffer
    arguments : dict of str to tuple of int
        By name of kernel, what its launches are given after their tensors: nothing, or the buffers' positions.
    """
    words = max((kernel.state_words for kernel in kernels), default=0)
    added: list[Buffer] = []
    if words:
        added.append(Buffer(BARRIER_STATE, (words,), STATE_DTYPE, "state", BARRIER_STATE))
    if any(kernel.watched for kernel in kernels):
        added.append(Buffer(RECORD, (RECORD_WORDS,), STATE_DTYPE, "record", RECORD))
    state, record = len(buffers), len(buffers) + 1
    arguments = {
        kernel.name: (*((state,) if kernel.state_words else ()), *((record,) if kernel.watched else ()))
        for kernel in kernels
    }
    return (*buffers, *added), arguments
