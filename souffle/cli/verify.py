"""``souffle verify``: prove a saved network again, from its file alone (``docs/verification.md``)."""

from __future__ import annotations

import argparse
from typing import Any

from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.cli.output import Progress, write_json
from souffle.codegen.plan import Plan
from souffle.dimensions import extents_text
from souffle.runtime import artifact
from souffle.runtime.plan_json import certificate_to_json
from souffle.runtime.plan_versions import PlanVersions
from souffle.verify.saved import verify_plan

__all__ = ["STATUS", "verify"]

STATUS = {PROVEN: 0, REFUTED: 1, UNKNOWN: 3}
"""Exit statuses; 2 is that of errors, also of a damaged file."""


def verify(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    progress(f"reading {arguments.file}")
    found = artifact.read(arguments.file)
    if not isinstance(found, PlanVersions):
        record, verdict = _verified(found, "", arguments, progress)
        if arguments.json:
            write_json({"file": arguments.file, **record})
        return STATUS[verdict]
    records, verdicts = [], []
    for extents, plan in found.plans.items():
        said = extents_text(found.dimensions.names, extents)
        record, verdict = _verified(plan, said, arguments, progress)
        records.append({"version": said, **record})
        verdicts.append(verdict)
    if arguments.json:
        write_json({"file": arguments.file, "versions": records})
    return STATUS[next(verdict for verdict in (REFUTED, UNKNOWN, PROVEN) if verdict in verdicts)]


def _verified(plan: Plan, said: str, arguments: argparse.Namespace, progress: Progress) -> tuple[dict[str, Any], str]:
    """Prove one plan and print what was found; the same for JSON, and the verdict."""
    progress.prefix = f"{said}: " if said else ""
    certificate = verify_plan(plan, rebuild=arguments.rebuild, values=arguments.values, progress=progress)
    progress.done()
    recorded = plan.certificate
    if not arguments.json:
        if said:
            print(f"version {said}")
        print(certificate)
        if recorded is not None and recorded.verdict != certificate.verdict:
            print(f"\nWhen it was compiled, this was recorded: {recorded.summary}.")
    return {"recorded": recorded and recorded.verdict, **certificate_to_json(certificate)}, certificate.verdict
