"""The data of a report: one plain JSON document, which the page draws and other programs may read.

Stages, waits, tensors and decisions are numbered by their places in their lists. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = [
    "FORMAT",
    "DeviceFacts",
    "KernelFacts",
    "LaunchFacts",
    "LevelFacts",
    "LoopFacts",
    "Report",
    "StageFacts",
    "TeFacts",
    "TensorFacts",
    "TouchFacts",
    "WaitFacts",
]

FORMAT = 1
"""Of the document: a number that rises when something in it changes its meaning."""


class LevelFacts(TypedDict):
    """One network as a whole, at one level.

    `bound_seconds` says of the stages' time how much each term of the cost model decides; what is predicted is None
    where no device is described.
    """

    level: str
    summary: str
    launches: int
    kernels: int
    stages: int
    grid_syncs: int
    arrivals: int
    block_syncs: int
    bytes_read: int
    bytes_written: int
    workspace_bytes: int
    constant_bytes: int
    registers: int | None
    shared_bytes: int
    predicted_seconds: float | None
    launch_seconds: float | None
    wait_seconds: float | None
    code_seconds: float | None
    bound_seconds: dict[str, float]
    certificate: str | None


class DeviceFacts(TypedDict):
    """What a multiprocessor of the GPU has, and the most that a block or a thread may have of it.

    `predicted_on` is the product that times are predicted for, empty where none is described.
    """

    arch: str
    predicted_on: str
    registers: int
    registers_of_thread: int
    shared_bytes: int
    shared_bytes_of_block: int
    threads: int
    threads_of_block: int
    blocks: int


class TensorFacts(TypedDict):
    """A tensor of the program. `read` and `written` are of global memory, in one run of the network.

    `kind` is that of its buffer (input, output, constant, workspace), and ``"chip"`` where it has none. `makers`
    and `readers` are stages; `near` counts the stages that find it in shared memory or registers.
    """

    name: str
    label: str
    kind: str
    shape: list[int] | None
    dtype: str | None
    bytes: int
    read: int
    written: int
    makers: list[int]
    readers: list[int]
    near: int


class TouchFacts(TypedDict):
    """What a stage does with a tensor (:class:`souffle.codegen.plan.Touched`)."""

    tensor: int
    where: str
    written: bool
    bytes: int


class StageFacts(TypedDict):
    """A stage in a launch. Equal stages share a function.

    `runs` is the steps of its loop. `seconds` is its part of what is predicted for its function in a launch of its
    kernel, in all its runs. `needs` are the stages that make what it reads, `needs_before` those that do so in an
    earlier step of its loop. `decisions` are those that name it, or a TE of it.
    """

    name: str
    launch: int
    loop: int | None
    runs: int
    function: str
    functions: list[str]
    tiles: int
    threads: int
    touched: list[TouchFacts]
    needs: list[int]
    needs_before: list[int]
    tes: list[str]
    decisions: list[int]
    seconds: float | None
    bound: str | None
    registers: int | None
    shared_bytes: int | None
    stack_bytes: int | None


class LoopFacts(TypedDict):
    """Stages that a launch runs several times."""

    name: str
    launch: int
    steps: int
    stages: list[int]


class WaitFacts(TypedDict):
    """Why a launch waits (:class:`souffle.decision.Barrier`).

    It stands `place` ``"before"`` the stage `at`, before the ``"loop"`` that begins with it, or between the ``"steps"``
    of that loop. The stages `before` and `after` are those whose dependence demands it. `seconds` is its part of what
    is predicted for all waits of the launch, shared out evenly by their runs.
    """

    launch: int
    scope: str
    place: str
    at: int
    before: int
    after: int
    tensor: int | None
    tensor_name: str
    reason: str
    runs: int
    seconds: float | None


class LaunchFacts(TypedDict):
    """One launch. `like` is the first launch of its kernel: what is known of waits is of that."""

    kernel: int
    like: int
    stages: list[int]
    bytes_read: int
    bytes_written: int


class KernelFacts(TypedDict):
    """One CUDA kernel.

    `room` says how many blocks each resource of a multiprocessor has room for; `blocks_per_sm` what times are predicted
    with.
    """

    name: str
    module: int
    launches: list[int]
    tiles: int
    threads: int
    teams: int
    grid_syncs: int
    arrivals: int
    most_blocks: int | None
    registers: int | None
    shared_bytes: int
    spill_bytes: int | None
    stack_bytes: int | None
    code_bytes: int | None
    room: dict[str, int] | None
    blocks_per_sm: int | None
    seconds: float | None
    launch_seconds: float | None
    wait_seconds: float | None
    code_seconds: float | None


class TeFacts(TypedDict):
    """A TE as text, the ONNX nodes that it is of, and its tensors that stay inside of its stage, with their bytes."""

    text: str
    origin: str
    inside: list[tuple[str, int]]


class Report(TypedDict):
    """Everything that a report shows but the texts of its modules, which stand beside it.

    `levels` are those that were compiled, and `shown` the one that all the rest is of; `merges` says whether its
    kernels may be of several stages. `tes` is empty where the report is of a file, which does not keep them.
    """

    format: int
    souffle: str
    name: str
    shown: str
    merges: bool
    options: dict[str, Any]
    device: DeviceFacts
    levels: list[LevelFacts]
    launches: list[LaunchFacts]
    kernels: list[KernelFacts]
    stages: list[StageFacts]
    loops: list[LoopFacts]
    waits: list[WaitFacts]
    tensors: list[TensorFacts]
    decisions: list[tuple[str, str, bool, str]]
    certificate: dict[str, Any] | None
    tes: dict[str, TeFacts]
