"""Shorten a tuning log for shipping: of each workload the best records, in the files' own format.

``python -m benchmarks.compact_log FROM TO [--keep 2]``. FROM and TO are folders of one architecture, such as
``tuning_logs/sm_90``. Trials that were slower than the rules' own choice are left out, so a search that goes on from
the result tries them again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from souffle.schedule.gpu.device import SHARING, device_for
from souffle.schedule.log import RECORDS, WORKLOADS, TuningLog


def main() -> int:
    """Write the shorter log and say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("target", type=Path, metavar="TO")
    parser.add_argument("--keep", type=int, default=2, help="records of each workload")
    arguments = parser.parse_args()
    log = TuningLog(arguments.source, arguments.source.name)
    device = device_for(log.arch)
    chosen: dict[int, list] = {}
    for record in sorted(log.records, key=lambda one: one.rank(device.name)):
        # What a kernel of several stages has no room for is worth keeping only if nothing else is there.
        shares = device.resident_blocks(256, record.origin.shared_bytes, max(record.origin.registers, 1))
        if record.useful and min(shares.values()) >= SHARING:
            chosen.setdefault(record.workload, []).append(record)
    kept = {workload: records[: arguments.keep] for workload, records in sorted(chosen.items())}
    place = {workload: number for number, workload in enumerate(kept)}
    lines = (arguments.source / RECORDS).read_text().splitlines()
    arguments.target.mkdir(parents=True, exist_ok=True)
    (arguments.target / WORKLOADS).write_text("".join(log.workload_lines[workload] + "\n" for workload in kept))
    with (arguments.target / RECORDS).open("w") as file:
        for records in kept.values():
            for record in records:
                whole = json.loads(lines[int(record.where.rpartition(":")[2]) - 1])
                file.write(json.dumps([place[record.workload], *whole[1:]], separators=(",", ":")) + "\n")
    size = sum(path.stat().st_size for path in arguments.target.iterdir())
    print(
        f"{len(log.records)} records of {len(log.workload_lines)} workloads -> "
        f"{sum(map(len, kept.values()))} of {len(kept)}, {size / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
