"""A stage's candidate as a network of one kernel, so that the runtime can run it."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan, Resources
from souffle.options import Options
from souffle.tuning.candidate import Candidate

__all__ = ["trial_plan"]

_Ends = Sequence[tuple[Sequence[int], str]]


def trial_plan(
    candidate: Candidate,
    stage: str,
    inputs: _Ends,
    outputs: _Ends,
    module: CudaModule,
    used: Resources,
    arch: str,
) -> Plan:
    """The plan of a candidate.

    Parameters
    ----------
    candidate : Candidate
    stage : str
        Its name.
    inputs, outputs : sequence of (shape, dtype)
        They are called ``input0``, ``input1``, ... and ``output0``, ...
    module : CudaModule
        With the kernel.
    used : Resources
    arch : str
    """
    buffers = tuple(
        Buffer(f"{kind}{number}", tuple(extents), dtype, kind, f"{kind}{number}")
        for kind, ends in (("input", inputs), ("output", outputs))
        for number, (extents, dtype) in enumerate(ends)
    )
    name = candidate.name
    kernel = Kernel(name, 0, candidate.tiles, candidate.threads, candidate.shared_bytes, 0, used, (name,), (stage,))
    launch = Launch(0, tuple(range(len(buffers))), (stage,))
    return Plan(name, Options(level="V3", arch=arch), buffers, {}, (module,), (kernel,), (launch,), 0, ())
