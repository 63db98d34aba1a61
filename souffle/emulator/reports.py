"""What a launch on the CPU device tells: barriers, traffic, and what is wrong with the text, all as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from souffle.errors import DeviceError

__all__ = [
    "FINDING_KINDS",
    "BarrierError",
    "CheckError",
    "Finding",
    "LaunchReport",
    "TextPlace",
    "Traffic",
    "WaitingThreads",
    "describe_waits",
]

FINDING_KINDS = (
    "out_of_bounds",
    "uninitialized",
    "foreign",
    "race",
    "misaligned",
    "read_only",
    "divergent_barrier",
    "divergent_grid_sync",
    "partial_warp",
    "divergent_shuffle",
)
"""Kinds of findings, in the numbering of ``souffle_check.h``:

- ``out_of_bounds``: outside the buffer that the address was computed from, or outside the block's shared memory;
- ``uninitialized``: an element is read that nothing has written: in workspace and outputs since the run began, in
  shared memory since the block began (or whose asynchronous copy has not been waited for);
- ``foreign``: a workspace element is read that another tensor sharing its memory has written last;
- ``race``: two blocks access an element with nothing between that orders them, or two warps of a block an element or
  shared memory with no barrier of both between, and one of them writes;
- ``misaligned``: the address is no multiple of what the access needs on a GPU;
- ``read_only``: an input or a constant is written;
- ``divergent_barrier``, ``divergent_grid_sync``: threads of a block, or blocks, meet at barriers of different lines;
- ``partial_warp``: lanes of a warp come to ``__activemask()`` while others that are alive do not, or to a shuffle
  without lanes that its mask names; what a GPU does then is not defined, or by chance;
- ``divergent_shuffle``: lanes of a warp meet at shuffles of different lines.
"""


@dataclass(frozen=True)
class TextPlace:
    """A place of the CUDA text.

    Attributes
    ----------
    function : str
        The compiled function, which is a stage or the kernel itself; empty where it is not known.
    line : int
        Of the text, from 1; 0 where it is not known.
    inlined : tuple of (str, int)
        Functions of the text inlined there with their lines, the innermost first.
    """

    function: str
    line: int
    inlined: tuple[tuple[str, int], ...] = ()

    @property
    def lines(self) -> tuple[int, ...]:
        """The lines alone, the innermost first."""
        return (*(line for _, line in self.inlined), self.line)

    def inner(self, kernel: str) -> str:
        """The function that the kernel calls there, which is a stage in emitted text; empty in the kernel itself."""
        if self.function != kernel:
            return self.function
        return next((name for name, _ in reversed(self.inlined) if name != kernel), "")

    def __str__(self) -> str:
        if not self.function:
            return "an unknown place"
        inner = "".join(f", inlined {name} line {line}" for name, line in self.inlined)
        return f"{self.function} line {self.line}{inner}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong at one place of the text: the first time that it happened, and how often it did.

    Attributes
    ----------
    kind : str
        One of :data:`FINDING_KINDS`.
    kernel : str
    place, other_place : TextPlace
        ``other_place`` of the other barrier, for findings about barriers; None otherwise.
    block, thread : tuple of int
        Indices along x, y, z. For a warp-wide matrix instruction, the thread is the one that came last.
    space : str
        ``"global"``, ``"shared"``, or empty where no memory is concerned or none of the launch.
    buffer : str
        Name of the buffer, of the shared array where the text shows it, or of the kernel's parameter.
    element : int
        Of the buffer, in its own type, which may be negative. Of shared memory, in bytes from the start of the array.
    size : int
        Elements of the buffer; bytes of shared memory.
    bytes : int
        Of the access.
    write : bool
    count : int
        Occurrences at this place.
    other : str
        The other party: the block or warp of a race, the tensor that owns an element, the thread or block at the other
        barrier or shuffle, or the thread that does not come.
    within_block : bool
        Whether a race is one of warps of the same block.
    lanes : int
        A bit for each lane that comes, where others do not.
    other_reads : bool
        Whether the other block of a race reads.
    """

    kind: str
    kernel: str
    place: TextPlace
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    space: str = ""
    buffer: str = ""
    element: int = 0
    size: int = 0
    bytes: int = 0
    write: bool = False
    count: int = 1
    other: str = ""
    other_place: TextPlace | None = None
    within_block: bool = False
    lanes: int = 0
    other_reads: bool = False

    @property
    def stage(self) -> str:
        """The stage, or other function that the kernel calls; empty in the kernel itself or where it is not known."""
        return self.place.inner(self.kernel)

    def __str__(self) -> str:
        access = "write" if self.write else "read"
        unit = "byte" if self.space == "shared" else "element"
        target = f"{unit} {self.element} of {self.space} {self.buffer}" if self.space else f"address {self.element:#x}"
        waits = f", which waits at {self.other_place}" if self.other_place and self.other_place.function else ""
        race = f" without a block barrier since {self.other} accessed it"
        if not self.within_block:
            did = "read" if self.other_reads else "wrote"
            race = f": {self.other} {did} it, and nothing orders the two, neither a grid sync nor a flag"
        what = {
            "out_of_bounds": f"{access} out of bounds: {target}" + (f", which has {self.size}" if self.size else ""),
            "uninitialized": f"read of what nothing has written: {target}",
            "foreign": f"read of {target}, which holds what {self.other} has written in the same memory",
            "race": f"{access} of {target}{race}",
            "misaligned": f"{access} of {self.bytes} bytes at an address that is not aligned to them: {target}",
            "read_only": f"write to what a kernel must not change: {target}",
            "divergent_barrier": f"barrier under divergent control: {self.other} waits at {self.other_place}",
            "divergent_grid_sync": f"grid sync under divergent control: {self.other} waits at {self.other_place}",
            "partial_warp": f"lanes {self.lanes:#010x} of a warp come, {self.other} does not" + waits,
            "divergent_shuffle": f"shuffle under divergent control: {self.other} waits at {self.other_place}",
        }[self.kind]
        times = f" ({self.count} times there)" if self.count > 1 else ""
        return f"kernel {self.kernel}, {self.place}, block {self.block}, thread {self.thread}: {what}{times}"


@dataclass(frozen=True)
class WaitingThreads:
    """Threads of one block in one state where nothing could go on; for a grid sync that not all reach, whole blocks.

    Attributes
    ----------
    state : str
        ``"block barrier"``, ``"grid sync"``, ``"warp operation"``, ``"poll"`` (of memory), ``"exited"``, or ``"ready"``
        (nothing keeps them).
    block : tuple of int
    threads : int
        How many.
    first : tuple of int
        The first of them.
    operation : str
        ``"__syncthreads"``, ``"bar.sync"``, ``"__shfl_sync"``, ...; empty for threads that wait for nothing.
    barrier : int
        Number of a block barrier.
    arrived, expected : int
        Threads at that barrier, and those that it waits for.
    mask : int
        Lanes of a warp operation.
    place : TextPlace or None
        None for threads that have exited.
    """

    state: str
    block: tuple[int, int, int]
    threads: int
    first: tuple[int, int, int]
    operation: str = ""
    barrier: int = 0
    arrived: int = 0
    expected: int = 0
    mask: int = 0
    place: TextPlace | None = None

    def __str__(self) -> str:
        if self.state == "exited":
            what = "exited"
        elif self.state == "poll":
            what = "poll memory"
        elif self.state == "ready":
            what = "could go on"
        else:
            what = f"wait at {self.operation}"
            if self.state == "block barrier" and self.barrier:
                what += f" {self.barrier} ({self.arrived} of {self.expected} arrived)"
            elif self.state == "warp operation":
                what += f" with mask {self.mask:#010x}"
        at = f", {self.place}" if self.place and self.place.function else ""
        return f"{self.threads} thread{'s' * (self.threads > 1)} {what} (first: thread {self.first}{at})"


def describe_waits(waits: Sequence[WaitingThreads]) -> str:
    """Give waits as text: by threads where they are of one block, by blocks otherwise."""
    if len({wait.block for wait in waits}) <= 1:
        return "; ".join(map(str, waits))
    groups: dict[tuple[str, TextPlace | None], list[WaitingThreads]] = {}
    for wait in waits:
        groups.setdefault((wait.state, wait.place), []).append(wait)
    parts = []
    for (state, place), members in groups.items():
        if state not in ("exited", "grid sync"):
            # Of the one block that the message names.
            parts += map(str, members)
            continue
        what = "exited" if state == "exited" else f"wait at {members[0].operation}"
        at = f", {place}" if place and place.function else ""
        parts.append(f"{len(members)} block{'s' * (len(members) > 1)} {what} (first: block {members[0].block}{at})")
    return "; ".join(parts)


@dataclass(frozen=True)
class Traffic:
    """Accesses to one buffer or to shared memory, as threads make them: nothing is coalesced or cached.

    Attributes
    ----------
    read, written : int
        Bytes.
    atomics : int
        Atomic operations, whose bytes are not among the other two.
    """

    read: int = 0
    written: int = 0
    atomics: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.atomics + other.atomics)


@dataclass(frozen=True)
class LaunchReport:
    """What one launch did.

    Attributes
    ----------
    kernel : str
    grid_syncs : int
        Grid-wide barriers, each counted once.
    block_barriers : int
        Barriers of blocks (``__syncthreads``, ``bar.sync``), added up over all blocks.
    seconds : float
        Wall time of the launch.
    buffers : tuple of (str, Traffic)
        Of a checked launch, the traffic of each buffer that was accessed. Empty otherwise, as the rest.
    shared : Traffic
        Of shared memory, over all blocks.
    findings : tuple of Finding
        What is wrong, at most as many as the launch asked for, one for each place of the text.
    findings_left_out : int
        Occurrences at places beyond those.
    races_checked : bool
        False where the text orders its blocks by atomics, so that grid barriers alone do not tell what a race is.
    """

    kernel: str
    grid_syncs: int
    block_barriers: int
    seconds: float
    buffers: tuple[tuple[str, Traffic], ...] = ()
    shared: Traffic = Traffic()
    findings: tuple[Finding, ...] = ()
    findings_left_out: int = 0
    races_checked: bool = False

    @property
    def total(self) -> Traffic:
        """Traffic of global memory."""
        return sum((traffic for _, traffic in self.buffers), Traffic())


class CheckError(DeviceError):
    """Something is wrong with the text of a checked launch.

    Attributes
    ----------
    findings : tuple of Finding
    report : LaunchReport
    stopped : str
        What ended the launch early, such as a fault; empty where it ran to its end.
    """

    def __init__(self, report: LaunchReport, stopped: str = "") -> None:
        self.report, self.findings, self.stopped = report, report.findings, stopped
        lines = [str(finding) for finding in report.findings]
        if report.findings_left_out:
            lines.append(f"... and {report.findings_left_out} times elsewhere")
        super().__init__("\n".join([*lines, stopped] if stopped else lines))


class BarrierError(DeviceError):
    """Threads wait for what cannot happen: a barrier under divergent control, or a deadlock.

    Attributes
    ----------
    waits : tuple of WaitingThreads
        Where all threads of the block are, or all blocks of the grid.
    findings : tuple of Finding
        What a checked launch had found before.
    """

    def __init__(self, message: str, waits: tuple[WaitingThreads, ...], findings: tuple[Finding, ...] = ()) -> None:
        self.waits, self.findings = waits, findings
        super().__init__("\n".join([f"{message}: {describe_waits(waits)}", *map(str, findings)]))
