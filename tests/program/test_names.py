"""Names that nothing has yet."""

from __future__ import annotations

from souffle.program.names import NameSupply


def test_a_name_is_handed_out_once() -> None:
    names = NameSupply(["x", "x_1", "y_2"])
    assert [names.fresh(wanted) for wanted in ("x", "x", "y", "y", "y", "x_2")] == [
        "x_2",
        "x_3",
        "y",
        "y_1",
        "y_3",
        "x_2_1",
    ]
