"""What ``souffle compile`` says of a network that it has saved: its kernels and what was proven, of each version."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from souffle.cli.output import format_table, human_bytes, write_json
from souffle.dimensions import extents_text
from souffle.runtime import VersionedNetwork
from souffle.runtime.explain import certificate_lines
from souffle.runtime.plan_json import certificate_to_json
from souffle.wording import counted

__all__ = ["named_versions", "print_compiled"]

_COLUMNS = ("kernel", "launches", "tiles", "threads", "registers", "shared B", "syncs", "TEs")


def named_versions(network: Any) -> Iterator[tuple[str, Any]]:
    """Each version with its words, such as ``"batch=1, seq=128"``; a network of one shape with none."""
    if not isinstance(network, VersionedNetwork):
        yield "", network
        return
    for extents, version in network.versions.items():
        yield extents_text(network.dimensions, extents), version


def print_compiled(network: Any, path: Path, arguments: argparse.Namespace) -> None:
    """Print it, as JSON if that is asked for."""
    records = [{**({"version": said} if said else {}), **_record(version)} for said, version in named_versions(network)]
    if arguments.json:
        dumped = {} if arguments.dump is None else {"dump": arguments.dump}
        several = isinstance(network, VersionedNetwork)
        write_json({"file": str(path), **dumped, **({"versions": records} if several else records[0])})
        return
    for said, version in named_versions(network):
        _print_version(said, version, path)
    if isinstance(network, VersionedNetwork):
        print(f"{path}: {counted(len(records), 'version')}, {human_bytes(path.stat().st_size)}")
    if arguments.dump is not None:
        print(f"{arguments.dump}: what each stage of the compiler gave, as text")


def _record(network: Any) -> dict[str, Any]:
    plan = network.plan
    kernels = [
        {
            "name": k.name,
            "grid": k.grid,
            "block": k.block,
            "registers": k.registers,
            "shared_bytes": k.shared_bytes,
            "spill_bytes": k.spill_bytes,
            "stack_bytes": k.stack_bytes,
            "grid_syncs": k.grid_syncs,
            "launches": k.launches,
            "tes": k.tes,
        }
        for k in network.kernels
    ]
    proven = None if plan.certificate is None else certificate_to_json(plan.certificate)
    return {"arch": plan.options.arch, "launches": len(plan.launches), "kernels": kernels, "certificate": proven}


def _print_version(said: str, network: Any, path: Path) -> None:
    plan = network.plan
    if said:
        print(f"version {said}")
    rows = [
        (k.name, k.launches, k.grid[0], k.block[0], _or_dash(k.registers), k.shared_bytes, k.grid_syncs, len(k.tes))
        for k in network.kernels
    ]
    print(format_table(_COLUMNS, rows))
    facts = f"{len(plan.launches)} launches of {len(plan.kernels)} kernels for {plan.options.arch}"
    for other in plan.others:
        facts += f", and for {other.processor}"
    print(facts if said else f"{path}: {facts}, {human_bytes(path.stat().st_size)}")
    for line in certificate_lines(plan):
        print(line.removeprefix("  "))
    if said:
        print()


def _or_dash(value: int | None) -> int | str:
    return "-" if value is None else value
