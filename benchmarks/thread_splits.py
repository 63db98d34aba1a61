"""What parts of a block's threads in steps of 128 could gain over whole teams of 256, by the cost model.

001's search (Figure 6) divides the threads of a block between two kernels in steps of 128, each split without a bound
of the registers and with r0, so that as many blocks fit as of either kernel. Here a stage is scheduled for blocks of
128, 256, 384 and 512 threads; a block is `k` teams of the one beside `l` teams of the other, with their threads and
shared memory in all, and the registers of the more demanding one. What r0 takes from a thread is spilled.

``python -m benchmarks.thread_splits ways --out docs/results/thread_splits_ways.json`` does so for the pairs of TEs of
``benchmarks.side_by_side ways``, which have a kernel for themselves; ``... pairs --out
docs/results/thread_splits.json`` for the pairs of networks, in the block that their kernel has. Beside the best of one
after the other, block space, and thread space with teams of 256 threads stands the best of the same ways with teams of
one other size, so that it is seen what is gained by parts of different sizes, and what by other schedules.

``python -m benchmarks.thread_splits networks --out docs/results/thread_splits_networks.json`` compiles networks with
parts (:mod:`souffle.kernel.block_parts`), with parts in steps of 128 threads alone, and without, and says what is taken
and with that which predicted times.

Each result is kept as it is made: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.side_by_side import PROGRAMS, in_one_kernel, pairs_of_order, with_listed
from souffle import models
from souffle.cost.kernel import KernelForecast
from souffle.cost.predict import estimated_registers, tile_clocks
from souffle.cost.side_by_side import clocks_side_by_side, multiprocessor_queues
from souffle.cost.work import work_of
from souffle.kernel import merged_program
from souffle.kernel.block_parts import Divisions, scheduled_for
from souffle.kernel.calls import CallPlan
from souffle.kernel.side_by_side import side_by_side
from souffle.pipeline import compile_cuda
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.lower.shares import Share
from souffle.schedule.resources import StageResources, aligned
from souffle.schedule.stage import Stage, flat_stages

__all__ = ["main"]

_STEP = 128
_THREADS = (128, 256, 384, 512)
_MOST_THREADS = 1024
_MOST_RESIDENT = 4
"""Blocks of the kernel on a multiprocessor that are tried: the most that fit, and no more than these."""

_MODELS = ("nmt", "resnext", "bi-rnn", "var-encoder", "crnn", "dien", "swin", "efficientnet", "bert", "mmoe", "lstm")
_SHOWN = 6


@dataclass(frozen=True)
class _Form:
    """A stage as it is scheduled for teams of so many threads."""

    stage: Stage
    function: DeviceFunction
    registers: int

    @property
    def threads(self) -> int:
        return self.function.threads

    @property
    def shared(self) -> int:
        return aligned(self.function.shared_bytes)


def _forms(stage: Stage, forecast: KernelForecast, arch: str) -> dict[int, _Form]:
    """A stage by the threads of a team, as far as the rules have a schedule of one function for it."""
    (function,) = stage.functions
    found = {function.threads: _Form(stage, function, forecast.alone(stage).registers)}
    for threads in _THREADS:
        own = scheduled_for(stage, threads, arch) if threads not in found else None
        if own is not None:
            found[threads] = _Form(stage, own, estimated_registers(own))
    return {n: form for n, form in sorted(found.items()) if n % _STEP == 0}


@dataclass(frozen=True)
class _Block:
    """A block that two stages have in common, and how many of it are on a multiprocessor."""

    threads: int
    shared: int
    registers: int
    resident: int
    waits: bool = False


class _Pair:
    """Two independent stages in all their forms."""

    def __init__(self, pair: tuple[Stage, Stage], forecast: KernelForecast, arch: str) -> None:
        self.forecast, self.device = forecast, forecast.device
        self.forms = [_forms(stage, forecast, arch) for stage in pair]
        self.bytes = [forecast.moved_bytes[stage] for stage in pair]
        self.known: dict[object, float] = {}

    def seconds(self, parts: Sequence[tuple[int, _Form, Share]], teams: int, block: _Block) -> float:
        """Of stages at the same time: each by its number, its form, and which of a block's `teams` it has."""
        key = (tuple((n, form.threads, share) for n, form, share in parts), teams, block)
        if key in self.known:
            return self.known[key]
        sms, tiles, had = self.device.sm_count, [], []
        workers = teams * block.resident
        for number, form, share in parts:
            spilled = 4 * max(0, form.registers - block.registers)
            # As many workers as there are, each with its part of all shared memory; the L1 cache has the rest.
            own = StageResources(32, 0, block.shared * block.resident // workers, 32, spilled, True)
            cold, every = self.bytes[number]
            work, count = work_of(form.function), form.function.tiles
            tiles.append(tile_clocks(work, count, own, self.device, cold or every, warm=not cold, most=workers * sms))
            had.append(share.tiles_of(count, block.resident * sms, teams))
        first = self.device.crowded_multiprocessors if block.waits else 0
        queues = multiprocessor_queues(had, sms, first)
        slowest = max(clocks_side_by_side(tiles, one) for one in queues)
        moved = sum(own.l2_seconds for own in tiles), sum(own.memory_seconds for own in tiles)
        self.known[key] = max(slowest / self.device.clock_hz, *moved)
        return self.known[key]

    # What blocks there are

    def alone(self, threads: int, shared: int, registers: Sequence[int], bound: bool) -> Iterator[_Block]:
        """Blocks of a kernel that has these two stages alone."""
        most, limits = max(registers), self.device.limits
        if shared > limits.shared_per_block or threads > _MOST_THREADS:
            return
        if bound:
            fits = min(limits.resident_blocks(threads, shared, 32).values())
            each = [limits.registers_per_sm // (threads * own) for own in registers]
            # 001, Figure 6, with the threads of the whole block for each: what either would have alone.
            wanted = min(max(each), fits)
            most = min(most, limits.registers_per_sm // (threads * max(1, wanted)) // 8 * 8)
        fits = min(limits.resident_blocks(threads, shared, most).values())
        for resident in range(1, min(fits, _MOST_RESIDENT) + 1):
            yield _Block(threads, shared, most, resident)

    def apart(self, first: _Form, second: _Form, block: _Block) -> float:
        """One after the other, each with all the teams that the block has of its size."""
        total = 0.0
        for number, form in enumerate((first, second)):
            teams = block.threads // form.threads
            total += self.seconds([(number, form, Share())], teams, block)
        return total

    def equal(self, first: _Form, second: _Form, block: _Block) -> Iterator[tuple[str, float]]:
        """With teams of one size: one after the other, block space, thread space."""
        teams = block.threads // first.threads
        yield "apart", self.apart(first, second, block)
        behind = Share(shift=first.function.tiles)
        yield "blocks", self.seconds([(0, first, Share()), (1, second, behind)], teams, block)
        for own in range(1, teams):
            shares = [(0, first, Share(0, own)), (1, second, Share(own, teams - own))]
            yield f"{own} x {first.threads} | {teams - own} x {second.threads}", self.seconds(shares, teams, block)

    def unequal(self, first: _Form, second: _Form, own: int, other: int, block: _Block) -> float:
        """So many teams of the one beside so many of the other."""
        teams = own + other
        return self.seconds([(0, first, Share(0, own)), (1, second, Share(own, other))], teams, block)


_Found = dict[str, tuple[float, str]]
"""The least seconds of each kind of way, and what it is."""


def _better(found: _Found, kind: str, seconds: float, way: str) -> None:
    if seconds < found.get(kind, (float("inf"), ""))[0]:
        found[kind] = seconds, way


def _alone(pair: _Pair) -> _Found:
    """The best ways of two stages that have a kernel for themselves."""
    found: _Found = {}
    for first, second in product(*(forms.values() for forms in pair.forms)):
        registers = (first.registers, second.registers)
        for bound in (False, True):
            note = ", r0" if bound else ""
            if first.threads == second.threads:
                for teams in range(1, _MOST_THREADS // first.threads + 1):
                    shared = teams * max(first.shared, second.shared)
                    for block in pair.alone(teams * first.threads, shared, registers, bound):
                        for way, seconds in pair.equal(first, second, block):
                            text = f"{way} of {block.threads} threads, {block.resident} resident{note}"
                            if not bound and first.threads == 256:
                                _better(found, "teams of 256", seconds, text)
                            _better(found, "teams of one size" + (" with r0" if bound else ""), seconds, text)
            for own in range(1, _MOST_THREADS // first.threads + 1):
                for other in range(1, (_MOST_THREADS - own * first.threads) // second.threads + 1):
                    threads = own * first.threads + other * second.threads
                    shared = own * first.shared + other * second.shared
                    for block in pair.alone(threads, shared, registers, bound):
                        seconds = pair.unequal(first, second, own, other, block)
                        text = f"{own} x {first.threads} | {other} x {second.threads}, {block.resident} resident{note}"
                        _better(found, "parts of any size" + (" with r0" if bound else ""), seconds, text)
    return found


def _within(pair: _Pair, given: _Block, pool: int) -> _Found:
    """The best ways of two stages in the block of a kernel whose strands of 128 threads have `pool` bytes each.

    Where a block has more memory than its stages ask for, strands may have more, too: that is tried as well.
    """
    found: _Found = {}
    for first, second in product(*(forms.values() for forms in pair.forms)):
        needed = max(-(-form.shared // (form.threads // _STEP)) for form in (first, second))
        fitting = first.registers <= given.registers and second.registers <= given.registers
        strands = given.threads // _STEP
        grown = max(pool, aligned(needed))
        if grown * strands * given.resident > pair.device.limits.shared_for(given.resident) * given.resident:
            continue
        block = replace(given, shared=grown * strands)
        label = "" if needed <= pool and fitting else ", more asked for"
        if given.threads % first.threads == 0 and given.threads % second.threads == 0:
            _better(found, "apart in any form" + label, pair.apart(first, second, block), _sizes(first, second))
        if first.threads == second.threads and given.threads % first.threads == 0:
            for way, seconds in pair.equal(first, second, block):
                if first.threads == 256:
                    _better(found, "teams of 256", seconds, way)
                _better(found, "teams of one size" + label, seconds, way)
        for own in range(1, given.threads // first.threads + 1):
            other = (given.threads - own * first.threads) // second.threads
            if other:
                seconds = pair.unequal(first, second, own, other, block)
                way = f"{own} x {first.threads} | {other} x {second.threads}"
                _better(found, "parts of any size" + label, seconds, way)
    return found


def _sizes(first: _Form, second: _Form) -> str:
    return f"{first.threads}, then {second.threads}"


def _shown(found: _Found) -> dict[str, list[Any]]:
    return {kind: [round(seconds * 1e6, 2), way] for kind, (seconds, way) in found.items()}


def ways_of(label: str, arch: str, precision: str) -> dict[str, Any]:
    """Predicted µs of two independent stages of one kernel in all ways."""

    def told(stages: tuple[Stage, Stage], now: dict[str, Any], forecast: KernelForecast) -> dict[str, Any]:
        pair = _Pair(stages, forecast, arch)
        forms = [{n: [f.function.tiles, f.registers, f.shared] for n, f in own.items()} for own in pair.forms]
        return {"now": min(now["apart"], *now["ways"].values()), "forms": forms, "best": _shown(_alone(pair))}

    row = in_one_kernel(label, arch, precision, told)
    return {"program": label, "arch": arch, "precision": precision, **row}


def pairs_of(model: str, arch: str, precision: str) -> dict[str, Any]:
    """What finer parts gain for the pairs of independent stages of a network, in the blocks that its kernels have."""
    program = souffle.import_onnx(models.build(model, size="paper"))
    options = {"level": "V4", "precision": precision, "arch": arch, "verify": "off", "cubin": False}
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def listed(
        plan: CallPlan, forecast: KernelForecast, teams: int, planned: Callable[..., CallPlan], **parts: bool
    ) -> CallPlan:
        block = forecast.together(flat_stages(plan.stages))
        waits = plan.shape.grid_syncs, plan.shape.flag_waits
        times = forecast.times(plan.stages, block, plan.shape.tiles, *waits, fewer=True, teams=teams)
        for order in plan.orders:
            for one in pairs_of_order(order):
                if not times.blocks:
                    continue
                resident = max(1, times.blocks // teams // forecast.device.sm_count)
                pool = aligned(block.shared_bytes) * _STEP // block.threads
                strands = teams * block.threads // _STEP
                own = _Block(teams * block.threads, pool * strands, block.registers, resident, times.grid > 0)
                best = _within(_Pair(one, forecast, arch), own, pool)
                found[one[0].name, one[1].name] = {
                    "stages": [stage.name for stage in one], "runs": order.runs, "teams": teams,
                    "threads": own.threads, "resident": resident, "pool": pool, "best": _shown(best),
                }  # fmt: skip
        return side_by_side(plan, forecast, teams, planned, **parts)

    with mock.patch.object(merged_program, "plan_kernel", partial(with_listed, listed)):
        plan = compile_cuda(program, **options).plan
    rows = sorted(found.values(), key=_gain)
    us = round(predicted_seconds(plan) * 1e6, 2)
    return {"model": model, "arch": arch, "precision": precision, "us": us, "pairs": len(rows), "best": rows[:_SHOWN]}


def network_of(model: str, arch: str, precision: str) -> dict[str, Any]:
    """A network with parts, with parts in steps of 128 threads alone, and without, and whether it is proven."""
    program = souffle.import_onnx(models.build(model, size="paper"))
    options = {"level": "V4", "precision": precision, "arch": arch, "cubin": False}
    plan = compile_cuda(program, verify="memory", **options).plan
    others = {}
    for way in ("near", "of"):
        with mock.patch.object(Divisions, way, lambda *_: iter(())):
            others[way] = compile_cuda(program, verify="off", **options).plan
    taken = [d for d in plan.decisions if d.stage == "hfuse" and d.accepted and "(threads " in d.subject]
    us, in_steps, without = (
        round(predicted_seconds(one) * 1e6, 2) for one in (plan, others["near"], others["of"])
    )
    return {
        "model": model, "arch": arch, "precision": precision, "us": us, "us_in_steps": in_steps, "us_without": without,
        "verdict": plan.certificate.verdict,
        "same_text": [m.text for m in plan.modules] == [m.text for m in others["of"].modules],
        "taken": [f"{d.subject}: {d.reason.partition(';')[0]}" for d in taken],
    }  # fmt: skip


def _gain(row: dict[str, Any]) -> float:
    best = row["best"]
    now = best.get("teams of 256", [float("inf")])[0]
    return row["runs"] * (min(us for us, _ in best.values()) - now)


def main() -> int:
    """Run what is not kept yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ways", "pairs", "networks"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(_MODELS))
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--precision", nargs="+", default=["fp32", "mixed"])
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    jobs = {"ways": ways_of, "pairs": pairs_of, "networks": network_of}
    kind, job = "program" if arguments.what == "ways" else "model", jobs[arguments.what]
    names = list(PROGRAMS) if arguments.what == "ways" else arguments.models
    known = {(r[kind], r["arch"], r["precision"]) for r in results}
    for way in product(names, arguments.arch, arguments.precision):
        if way not in known:
            results.append(job(*way))
            save_results(str(arguments.out), "benchmarks.thread_splits", results)
            print(results[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
