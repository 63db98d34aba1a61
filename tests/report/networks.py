"""Small networks for reports: one with a loop and grid barriers, one of a kernel, and that with one for each stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import souffle
from souffle import models
from souffle.codegen.plan import Plan
from souffle.models import bert


@cache
def plan_of(name: str, level: str) -> Plan:
    """A network compiled without nvcc: ``"deep"`` has layers that become a loop from V3 on."""
    model = bert.build_bert(replace(bert.SIZES["tiny"], layers=4), 0) if name == "deep" else models.build(name, "tiny")
    return souffle.compile(model, level=level, target="cuda", arch="sm_90", cubin=False, device="cpu").plan
