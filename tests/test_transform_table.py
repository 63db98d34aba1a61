"""The figures of the benchmarks of analysis and transformations, on small models."""

from __future__ import annotations

import pytest
from tvm import te

import souffle
from benchmarks import analysis_scaling, transform_table
from souffle.models import bert


@pytest.mark.parametrize("name", ["bert", "mmoe"])
def test_every_te_and_every_access_map_is_counted(name: str) -> None:
    result = transform_table.measure(name, "tiny")
    for found in (result["before"], result["after"]):
        assert found["one"] + found["many"] == found["tes"] <= found["statements"]
        assert found["exact"] + found["over_approximated"] == found["access_maps"] > found["tes"]
    assert result["before"]["tes"] > result["horizontal"]["tes"] > result["vertical"]["tes"] == result["after"]["tes"]
    assert result["operations_ratio"] == pytest.approx(1, abs=0.01)


def test_what_is_not_exact_is_counted_with_its_reason() -> None:
    table, ids = te.placeholder((5, 2), name="table"), te.placeholder((3,), "int32", name="ids")
    rows = te.compute((3, 2), lambda i, j: table[ids[i], j], name="rows")
    found = transform_table.analyzed(souffle.from_te([table, ids], [rows]))[1]
    assert (found["access_maps"], found["exact"], found["over_approximated"]) == (2, 1, 1)
    assert found["over_approximated_because"] == {"an index depends on data": 1}
    assert (found["one"], found["many"], found["tensors"]) == (1, 0, 3)


def test_a_point_of_the_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bert.SIZES, "paper", bert.SIZES["tiny"])
    points = [analysis_scaling.measure("bert", layers) for layers in (1, 3)]
    assert points[1]["tes"] == 3 * points[0]["tes"]
    rows = analysis_scaling._rows(points)
    assert rows[0][-1] == "-" and float(rows[1][-1]) > 0
