"""What attention of some forms becomes, one line each. Nothing is run here, and nothing proven.

All forms, proven: ``python -m benchmarks.attention``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.attention import outcome
from benchmarks.attentions import AttentionCase

LONG = AttentionCase(4096, 4096, 64, 2, 2)
CASES = (
    *((AttentionCase(length, length, 64, 12, 12), form, "sm_90") for length, form in ((1, "operator"), (17, "te"))),
    (AttentionCase(1000, 1000, 64, 2, 2), "exported", "sm_90"),
    (LONG, "exported", "sm_90"),
    (AttentionCase(384, 384, 64, 12, 12, causal=True), "exported", "sm_90"),
    *((AttentionCase(128, 128, head, 4, 4), "exported", "sm_90") for head in (32, 256)),
    (AttentionCase(128, 128, 64, 4, 4, 3), "operator", "sm_90"),
    (AttentionCase(64, 200, 64, 4, 4), "te", "sm_90"),
    (AttentionCase(1, 384, 64, 8, 2), "exported", "sm_90"),
    (AttentionCase(128, 128, 64, 8, 2, 2, causal=True), "operator", "sm_90"),
    (AttentionCase(384, 384, 64, 12, 12), "te", "sm_80"),
)


@pytest.mark.thorough("that they are one stage is in tests/test_attention.py")
def test_outcomes(golden: Callable[[str, str], None]) -> None:
    golden("attention.txt", "".join(f"{outcome(*case)}\n" for case in CASES))
