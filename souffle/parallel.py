"""The cores that a process may use, and work in several threads that an interrupt ends.

Compilers run outside of Python's lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = ["map_in_threads", "physical_cores", "processor_quota", "usable_cores"]

_Result = TypeVar("_Result")
_PROC = Path("/proc/self")


def map_in_threads(workers: int, work: Callable[..., _Result], *items: Iterable[Any]) -> list[_Result]:
    """What `work` gives for each item, in their order; the first error is raised.

    After an interrupt nothing further is begun, and what runs is not waited for.
    """
    pool = ThreadPoolExecutor(workers)
    wait = True
    try:
        return list(pool.map(work, *items))
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def physical_cores() -> list[int]:
    """One processor number for each core that this process may use: two threads of a core share its vector units."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(path.read_text().strip() if path.is_file() else str(cpu), cpu)
    return list(cores.values())


def usable_cores() -> int:
    """How many threads this process can keep busy: its cores, or what a container's quota gives if that is less.

    A part of a core counts as one, as for the JVM and for Go. The variable ``SOUFFLE_CORES`` asks for fewer, as where
    several processes share the cores.
    """
    quota = processor_quota()
    cores = len(physical_cores())
    asked = os.environ.get("SOUFFLE_CORES", "")
    if asked.isdecimal():
        cores = max(1, min(cores, int(asked)))
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def processor_quota(proc: Path = _PROC) -> float | None:
    """How many processors' time control groups (cgroup v1 and v2) give this process; None for no limit.

    A group has no more than those around it, as far as they can be seen from here.

    Parameters
    ----------
    proc : Path
        The folder of the process in ``/proc``.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for mount in filter(None, map(_cgroup_mount, mounts)):
        for group in groups:
            _, controllers, path = (*group.split(":", 2), "", "")[:3]
            if controllers == "" if mount.unified else "cpu" in controllers.split(","):
                folder = mount.folder_of(path)
                quotas += [_quota(each, mount.unified) for each in (folder, *folder.parents) if mount.holds(each)]
    return min((quota for quota in quotas if quota is not None), default=None)


class _CgroupMount(NamedTuple):
    """Where a hierarchy of control groups that rules processors is seen, from which of its groups on."""

    root: str
    point: Path
    unified: bool

    def folder_of(self, path: str) -> Path:
        """The folder of a group; in a container, paths may be those of the machine, of which a part is seen."""
        root = "" if self.root == "/" else self.root
        if path == root or path.startswith(f"{root}/"):
            inside = self.point / path[len(root) :].strip("/")
            if inside.is_dir():
                return inside
        return self.point

    def holds(self, folder: Path) -> bool:
        return folder == self.point or self.point in folder.parents


def _cgroup_mount(line: str) -> _CgroupMount | None:
    """Of a line of ``mountinfo``: number, parent, device, root, point, options, ... - type, source, options."""
    before, _, after = line.partition(" - ")
    fields, (kind, *rest) = before.split(), after.split() or [""]
    unified = kind == "cgroup2"
    if len(fields) < 5 or not (unified or (kind == "cgroup" and rest and "cpu" in rest[-1].split(","))):
        return None
    return _CgroupMount(fields[3], Path(fields[4]), unified)


def _quota(group: Path, unified: bool) -> float | None:
    names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = (word for name in names for word in (group / name).read_text().split())
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max", and groups without a limit
