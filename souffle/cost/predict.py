"""How long a stage takes on a GPU that is not at hand: one formula for every stage, of its work and the device.

Let a tile's work be as :mod:`souffle.cost.work` counts it, ``R`` tiles be on a multiprocessor at once (occupancy), and
``t(u)`` be the clocks for which unit ``u`` of a multiprocessor is busy with one tile: its schedulers, fp32, int32,
special-function and tensor units, the data path of shared memory and L1, the port to the L2. Then

    busy  = max over u of t(u)                          one tile, all latencies hidden
    own   = on-chip waits + barriers + turns            one tile, none of its latencies hidden by another
    turns = max(busy, t(tensor) + t(shared) if tensor cores are used)     whose warps wait for each other: all load,
                                                                          then all multiply
    chain = loads waited for + max(own, loads made ahead)
    first = chain + max(0, code that is not in the instruction cache / its rate - issue of that code, once)
    wave(R) = max(R x busy, chain)                      R tiles side by side
    multiprocessors = full waves x wave(R) + wave(tiles of the last wave on one multiprocessor), `first` in place of the
                      first wave's chain; there, where the first copies of constants were made before the start, the
                      first loads that are waited for are only of what the L2 has
    seconds = start + max(multiprocessors / clock, L2 bytes / L2 bandwidth, memory bytes / memory bandwidth)

where ``start`` is a launch or a grid sync. Bytes from the L2 lie between the distinct sectors of a tile and all that it
asks for, by how much of them the L1 cache holds; what all tiles read is fetched once by each multiprocessor. Nothing is
fitted to a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx

from souffle.cost.counting import INSTRUCTION_BYTES, WARP, Work
from souffle.cost.device import CostDevice
from souffle.cost.per_function import OncePerFunction
from souffle.cost.work import work_of
from souffle.errors import OptionError
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, GpuDevice, taken_registers
from souffle.schedule.lower import DeviceFunction, KeptLoads
from souffle.schedule.lower.local_arrays import OWN_REGISTERS, local_words
from souffle.schedule.resources import StageResources
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import const_int

__all__ = [
    "CountedFunction",
    "Prediction",
    "Terms",
    "TileClocks",
    "count_stage",
    "estimated_registers",
    "predict_counted",
    "predict_stage",
    "predict_work",
    "registers_with_constants",
    "resources_in_kernel",
    "tile_clocks",
]

_FEWEST_REGISTERS, _MOST_REGISTERS = 32, 255

_SPARED_REGISTERS = 12
"""Of these, what nvcc does without where that leaves room for a second block, as it is asked to: of 12 products on
tensor cores for sm_80 and sm_90 none spilled with up to 116 registers of arrays, and three of five with 130 did."""


@dataclass(frozen=True)
class Terms:
    """What a prediction is made of, in seconds where nothing else is said.

    Attributes
    ----------
    start : float
        The launch or grid sync.
    issue, fp32, int32, special, tensor, shared, l2_port : float
        For which each unit of a multiprocessor is busy if tiles are spread evenly and no latency shows.
    chain : float
        Of one tile alone, one wave after another: latencies, barriers and its own arithmetic.
    code : float
        By which the waves take longer for code that is fetched.
    l2, memory : float
        Of all bytes at the bandwidth of the L2 cache and of device memory.
    multiprocessors : float
        Of the waves; the larger of this, `l2` and `memory` counts.
    l2_bytes, memory_bytes, shared_bytes : float
        Bytes moved at each level.
    tiles, resident, waves : int
        Of the grid, on one multiprocessor at once, and rounds.
    """

    start: float
    issue: float
    fp32: float
    int32: float
    special: float
    tensor: float
    shared: float
    l2_port: float
    chain: float
    code: float
    l2: float
    memory: float
    multiprocessors: float
    l2_bytes: float
    memory_bytes: float
    shared_bytes: float
    tiles: int
    resident: int
    waves: int

    @property
    def bound(self) -> str:
        """The term that decides."""
        if max(self.l2, self.memory) >= self.multiprocessors:
            return "memory" if self.memory >= self.l2 else "l2"
        units = ("issue", "fp32", "int32", "special", "tensor", "shared", "l2_port")
        unit = max(units, key=lambda name: getattr(self, name))
        return unit if getattr(self, unit) > self.chain else "chain"


@dataclass(frozen=True)
class TileClocks:
    """For how long one tile keeps the units of a multiprocessor busy, and what all tiles move.

    Attributes
    ----------
    units : mapping of str to float
        Clocks of each unit, by the names that :class:`Terms` has for them.
    chain : float
        Clocks of a tile alone, of which no latency is hidden by another.
    at_once, resident : int
        Tiles on the device, and on one multiprocessor.
    l2_seconds, memory_seconds : float
        Of all bytes at the bandwidth of the L2 cache and of device memory.
    l2_bytes, memory_bytes, shared_bytes : float
        That all tiles move at each level.
    nearer : float
        Clocks by which the chain is shorter where what is waited for first comes from the L2 cache.
    """

    units: Mapping[str, float]
    chain: float
    at_once: int
    resident: int
    l2_seconds: float
    memory_seconds: float
    l2_bytes: float
    memory_bytes: float
    shared_bytes: float
    nearer: float = 0.0

    @property
    def busy(self) -> float:
        """Clocks of a tile with all latencies hidden."""
        return max(self.units.values())


@dataclass(frozen=True)
class Prediction:
    """A stage's predicted time.

    Attributes
    ----------
    seconds : float
    terms : tuple of Terms
        One for each of the stage's functions, which run one after another.
    """

    seconds: float
    terms: tuple[Terms, ...]


@dataclass(frozen=True)
class CountedFunction:
    """What the cost model has to know of a lowered function: numbers alone, which travel between processes.

    Attributes
    ----------
    work : Work
        Of one tile.
    tiles : int
    tensor_bytes : float
        Of all tensors that it takes.
    resources : StageResources
        Of a block.
    """

    work: Work
    tiles: int
    tensor_bytes: float
    resources: StageResources


def count_stage(
    functions: Sequence[DeviceFunction], resources: StageResources | None = None
) -> tuple[CountedFunction, ...]:
    """What :func:`predict_counted` has to know of a lowered stage.

    Parameters
    ----------
    functions : sequence of DeviceFunction
        See :func:`souffle.kernel.lower_stage`.
    resources : StageResources, optional
        As for :func:`predict_stage`.
    """
    counted = []
    for function in functions:
        own = resources
        if own is None or not own.measured:
            own = StageResources(estimated_registers(function), 0, function.shared_bytes, function.threads, 0, False)
        size = sum(_bytes_of_parameters(function))
        counted.append(CountedFunction(work_of(function), function.tiles, size, own))
    return tuple(counted)


def predict_stage(
    functions: Sequence[DeviceFunction],
    device: CostDevice,
    resources: StageResources | None = None,
    *,
    start: str = "launch",
    warm: bool = False,
) -> Prediction:
    """Predict the time of a lowered stage.

    Parameters
    ----------
    functions : sequence of DeviceFunction
        See :func:`souffle.kernel.lower_stage`.
    device : CostDevice
    resources : StageResources, optional
        As ptxas reports them. Without, or where they are assumed, registers are estimated from the function's arrays.
    start : str
        ``"launch"`` if the stage is a kernel of its own, ``"node"`` if it is one of a CUDA graph, ``"sync"`` if a grid
        sync comes before it, in a kernel of as many blocks as stages leave each other, ``"none"``.
    warm : bool
        Whether what it reads and writes is in the L2 cache already, as far as it fits, as when one kernel is measured
        by running it again and again.

    Raises
    ------
    OptionError
        If `start` is none of these, or a block does not fit on the device.
    """
    return predict_counted(count_stage(functions, resources), device, start=start, warm=warm)


def predict_counted(
    counted: Sequence[CountedFunction], device: CostDevice, *, start: str = "launch", warm: bool = False
) -> Prediction:
    """As :func:`predict_stage`, of what :func:`count_stage` found."""
    starts = {
        "launch": device.launch_seconds,
        "node": device.graph_node_seconds,
        "sync": device.shared_sync_seconds,
        "none": 0.0,
    }
    if start not in starts:
        raise OptionError(f"start={start!r} is not valid; choose one of {', '.join(starts)}")
    terms = []
    for number, one in enumerate(counted):
        first = starts[start] if number == 0 else 0.0
        terms.append(predict_work(one.work, one.tiles, one.resources, device, one.tensor_bytes, first, warm=warm))
    seconds = sum(one.start + max(one.multiprocessors, one.l2, one.memory) for one in terms)
    return Prediction(seconds, tuple(terms))


def predict_work(
    work: Work,
    tiles: int,
    resources: StageResources,
    device: CostDevice,
    tensor_bytes: float,
    start: float = 0.0,
    *,
    warm: bool = False,
    most: int | None = None,
    fetched_code: float = 0.0,
    grid: int = 0,
    teams: int = 1,
    begun: bool = False,
) -> Terms:
    """The terms of `tiles` tiles of some work.

    Parameters
    ----------
    work : Work
        Of one tile.
    tiles : int
    resources : StageResources
    device : CostDevice
    tensor_bytes : float
        Of all tensors that the stage reads and writes, each once: what device memory moves at most.
    start : float
        Seconds of the launch or grid sync.
    warm : bool
        See :func:`predict_stage`.
    most : int, optional
        Blocks with which the kernel is launched, where fewer than fit.
    fetched_code : float
        Bytes of machine code that the first tiles do not find in the instruction cache.
    grid : int
        Blocks of a cooperative launch; 0 for another launch, whose blocks the device spreads evenly.
    teams : int
        Of each of them, which are blocks here.
    begun : bool
        Whether the first copies of what comes from memory were made before the start
        (:mod:`souffle.schedule.lower.prologues`).

    Raises
    ------
    OptionError
        If a block does not fit on the device.
    """
    own = tile_clocks(work, tiles, resources, device, tensor_bytes, warm=warm, most=most)
    clocks, busy, chain, at_once, resident = own.units, own.busy, own.chain, own.at_once, own.resident
    full, rest = divmod(tiles, at_once)
    last = _most_together(rest, grid, teams, device) if grid else -(-rest // device.sm_count)
    spent = full * max(resident * busy, chain) + (max(last * busy, chain) if rest else 0.0)
    side_by_side = resident if full else last
    begins = chain - own.nearer if begun else chain
    first = begins + _fetch_clocks(fetched_code, resources.threads, device)
    spent -= max(side_by_side * busy, chain) - max(side_by_side * busy, begins)
    late = max(side_by_side * busy, first) - max(side_by_side * busy, begins)
    waves = full + (rest > 0)
    evenly = tiles / device.sm_count / device.clock_hz
    return Terms(
        start=start,
        **{name: value * evenly for name, value in clocks.items()},
        chain=(chain * waves - chain + begins) / device.clock_hz,
        code=late / device.clock_hz,
        l2=own.l2_seconds,
        memory=own.memory_seconds,
        multiprocessors=(spent + late) / device.clock_hz,
        l2_bytes=own.l2_bytes,
        memory_bytes=own.memory_bytes,
        shared_bytes=own.shared_bytes,
        tiles=tiles,
        resident=resident,
        waves=waves,
    )


def tile_clocks(
    work: Work,
    tiles: int,
    resources: StageResources,
    device: CostDevice,
    tensor_bytes: float,
    *,
    warm: bool = False,
    most: int | None = None,
) -> TileClocks:
    """For how long a tile of some work keeps what busy, beside as many others as are on a multiprocessor at once.

    Parameters, and what is raised, as for :func:`predict_work`.
    """
    fits = device.limits.resident_blocks(resources.threads, resources.shared_bytes, resources.registers)
    resident = min(fits.values())
    if resident < 1:
        lacking = min(fits, key=fits.__getitem__)
        raise OptionError(f"{device.product} has not enough {lacking} for one block of {resources}")
    at_once = min(device.sm_count * resident, device.sm_count * resident if most is None else most)
    resident = -(-at_once // device.sm_count)
    work = _with_spills(work, resources)
    read = _l2_bytes(work, device, resident * resources.shared_bytes, resident, -(-tiles // device.sm_count))
    through_l2 = read + work.written_bytes
    clocks = {
        "issue": work.warp_instructions / device.warp_instructions_per_clock_per_sm,
        "fp32": work.fp32 / device.fp32_per_clock_per_sm,
        "int32": work.int32 / device.int32_per_clock_per_sm,
        "special": work.special / device.special_per_clock_per_sm,
        "tensor": (work.tensor_fma + work.tf32_fma / device.tf32_share)
        / (device.tensor_fma_per_clock_per_sm * device.tensor_reach),
        "shared": work.shared_bytes / device.shared_bytes_per_clock_per_sm,
        "l2_port": through_l2 / device.l2_bytes_per_clock_per_sm,
    }
    busy = max(clocks.values())
    moved = min(tensor_bytes, tiles * (work.distinct_bytes + work.written_bytes))
    in_cache = warm and moved <= device.l2_bytes
    latency = device.l2_latency_clocks if in_cache else device.memory_latency_clocks
    turns = max(busy, clocks["tensor"] + clocks["shared"]) if clocks["tensor"] else busy
    own = (
        work.shared_waits * device.shared_latency_clocks
        + work.arithmetic_waits * device.arithmetic_latency_clocks
        + work.barriers * device.barrier_clocks
        + turns
    )
    chain = work.global_waits * latency + max(own, work.prefetched_waits * latency)
    from_memory = max(0.0, moved - device.l2_bytes) if warm else moved
    return TileClocks(
        units=clocks,
        chain=chain,
        at_once=at_once,
        resident=resident,
        l2_seconds=tiles * through_l2 / device.l2_bytes_per_clock / device.clock_hz,
        memory_seconds=from_memory / device.memory_bytes_per_second,
        l2_bytes=tiles * through_l2,
        memory_bytes=from_memory,
        shared_bytes=tiles * work.shared_bytes,
        nearer=(latency - device.l2_latency_clocks) * (work.global_waits > 0),
    )


def _most_together(tiles: int, grid: int, teams: int, device: CostDevice) -> int:
    """Tiles of the fullest multiprocessor, where the blocks of a cooperative launch have one each, then their teams.

    Where there are several blocks for each multiprocessor, the first ones lie on a few of these.
    """
    each = -(-grid // device.sm_count)
    crowded = min(each, -(-min(tiles, grid) // device.crowded_multiprocessors))
    return crowded * min(teams, -(-tiles // grid))


def resources_in_kernel(functions: Sequence[DeviceFunction]) -> StageResources:
    """What a stage asks for as one of several of its kernel: at least the registers that stages leave each other."""
    return StageResources(
        max(ASSUMED_REGISTERS, *map(estimated_registers, functions)),
        0,
        max(function.shared_bytes for function in functions),
        max(function.threads for function in functions),
        0,
        False,
    )


def estimated_registers(function: DeviceFunction) -> int:
    """Registers of a thread, from the arrays that it declares; for where no compiler says."""
    wanted = int(min(max(OWN_REGISTERS + _local_words(function), _FEWEST_REGISTERS), _MOST_REGISTERS))
    return taken_registers(wanted, _SPARED_REGISTERS)


_local_words: OncePerFunction[float] = OncePerFunction(lambda function: local_words(function.func))


def registers_with_constants(kept: KeptLoads, device: GpuDevice) -> int:
    """Registers of a thread of a stage that keeps constants in some of them; for where no compiler says.

    Parameters
    ----------
    kept : KeptLoads
    device : GpuDevice
        On which a block of it is to fit. Of 24 such functions for sm_90, of 320 threads with 128 to 132 registers of
        constants and of 640 with 64 to 68, nvcc put all into what a block leaves each thread (168 and 96), which is up
        to 9 and 17 fewer than estimated, and one spilled 8 bytes.
    """
    wanted = estimated_registers(kept.use) - kept.working_copies + kept.registers
    return taken_registers(wanted, _SPARED_REGISTERS, device.most_registers(kept.use.threads))


def _with_spills(work: Work, resources: StageResources) -> Work:
    """The work with what spills add: each word is stored once and loaded once, through the L1 cache."""
    if not resources.spill_bytes:
        return work
    words = resources.spill_bytes / 4
    warps = -(-resources.threads // WARP)
    return work + Work(
        warp_instructions=2 * words * warps, shared_bytes=2 * words * warps * WARP * 4, shared_waits=words
    )


def _fetch_clocks(code_bytes: float, threads: int, device: CostDevice) -> float:
    """By which a tile takes longer whose code is fetched: less the time in which its warps issue it in any case.

    The tiles beside it execute the same code at the same time.
    """
    warps = -(-threads // WARP)
    issued = code_bytes / INSTRUCTION_BYTES * warps / device.warp_instructions_per_clock_per_sm
    return max(0.0, code_bytes / device.code_bytes_per_clock - issued)


def _l2_bytes(work: Work, device: CostDevice, shared_bytes: int, resident: int, turns: int) -> float:
    """Bytes that a tile reads from the L2 cache, with `turns` tiles on the multiprocessor, `resident` at once.

    What it asks for again comes from the L1 cache as far as that holds it, and what its tiles have in common is fetched
    once if they fit together.
    """
    cache = max(device.l1_bytes - shared_bytes, 0)
    if not work.distinct_bytes:
        return max(work.requested_bytes, 0.0)
    held = min(1.0, cache / (resident * work.distinct_bytes))
    own = work.distinct_bytes - work.common_bytes * held * (1 - 1 / turns)
    return own + max(work.requested_bytes - work.distinct_bytes, 0.0) * (1.0 - held)


def _bytes_of_parameters(function: DeviceFunction) -> list[float]:
    """Bytes of each tensor that the function touches."""
    sizes: dict[str, float] = {}
    pointers = list(function.func.params)[2:]

    def see(decl: tirx.DeclBuffer) -> None:
        if decl.data is not None and any(decl.data.same_as(pointer) for pointer in pointers):
            elements = 1
            for extent in decl.buffer.shape:
                elements *= const_int(extent)
            sizes[str(decl.data.name)] = elements * tvm.DataType(str(decl.buffer.dtype)).itemsize

    structural_walk(function.func.body, (tirx.DeclBuffer, see))
    return list(sizes.values())
