"""``souffle verify``: prove a saved network again, from its file alone (``docs/verification.md``)."""

from __future__ import annotations

import argparse

from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.cli.output import Progress, write_json
from souffle.runtime import artifact
from souffle.runtime.plan_json import certificate_to_json
from souffle.verify.saved import verify_plan

__all__ = ["STATUS", "verify"]

STATUS = {PROVEN: 0, REFUTED: 1, UNKNOWN: 3}
"""Exit statuses; 2 is that of errors, also of a damaged file."""


def verify(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    progress(f"reading {arguments.file}")
    plan = artifact.load(arguments.file)
    certificate = verify_plan(plan, rebuild=arguments.rebuild, values=arguments.values, progress=progress)
    progress.done()
    recorded = plan.certificate
    if arguments.json:
        found = certificate_to_json(certificate)
        write_json({"file": arguments.file, "recorded": recorded and recorded.verdict, **found})
    else:
        print(certificate)
        if recorded is not None and recorded.verdict != certificate.verdict:
            print(f"\nWhen it was compiled, this was recorded: {recorded.summary}.")
    return STATUS[certificate.verdict]
