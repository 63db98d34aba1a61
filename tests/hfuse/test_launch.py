"""Launches of kernels as data: JSON there and back, arrays from a seed, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from souffle.errors import SouffleError
from souffle.hfuse import Argument, Fill, FusionError, Launch

LAUNCH = Launch(
    "pool<float>",
    (4, 2, 1),
    (None, 16, 1),
    1024,
    (
        Argument("input", dtype="float32", count=64, fill=Fill("normal", (0, 1))),
        Argument("output", dtype="float64", count=64, output=True),
        Argument("bins", dtype="uint64", count=8, fill=Fill("integers", (0, 2**64))),
        Argument("low", dtype="float16", count=8, fill=Fill("uniform", (-1, 1))),
        Argument("best", dtype="uint32", count=2, fill=Fill("constant", (2**32 - 1,))),
        Argument("n", value=64),
        Argument("scale", value=0.5),
    ),
)


def test_json_there_and_back(tmp_path: Path) -> None:
    LAUNCH.write(tmp_path / "a.json")
    assert Launch.read(tmp_path / "a.json") == LAUNCH
    assert json.loads((tmp_path / "a.json").read_text())["block"] == ["*", 16, 1]


def test_arrays_are_those_of_the_seed() -> None:
    first, again, other = LAUNCH.arrays(3), LAUNCH.arrays(3), LAUNCH.arrays(4)
    kinds = [value.dtype.name if isinstance(value, np.ndarray) else value for value in first]
    assert kinds == ["float32", "float64", "uint64", "float16", "uint32", 64, 0.5]
    for left, right in zip(first, again):
        np.testing.assert_array_equal(left, right)
    assert (first[0] != other[0]).any() and not first[1].any()
    assert (first[4] == 2**32 - 1).all() and (abs(first[3]) <= 1).all() and first[2].max() > 2**60
    shorter = Launch("k", (1, 1, 1), (32, 1, 1), 0, LAUNCH.arguments[:1])
    np.testing.assert_array_equal(shorter.arrays(3)[0], first[0])


def test_blocks_of_so_many_threads() -> None:
    assert LAUNCH.block_of(896) == (56, 16, 1) and LAUNCH.threads is None
    with pytest.raises(FusionError, match="100 threads cannot be a block of '\\*' x 16 x 1"):
        LAUNCH.block_of(100)
    fixed = Launch("sha", (1, 1, 1), (256, 1, 1))
    assert fixed.threads == 256 and fixed.block_of(256) == (256, 1, 1)
    with pytest.raises(FusionError, match="kernel sha: its launch has a fixed block of"):
        fixed.block_of(512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": [1, 2]}, "grid: expected three numbers"),
        ({"grid": [1, 2, "*"]}, "grid: expected three numbers"),
        ({"grid": [0, 1, 1]}, "grid is three numbers of at least 1"),
        ({"block": [1, "*", 1]}, "block: expected three numbers"),
        ({"block": [2048, 1, 1]}, "more than 1024 threads"),
        ({"kernel": 3}, "kernel: expected the kernel's name, not 3"),
        ({"shared_bytes": True}, "shared_bytes: expected a number of bytes, not True"),
        ({"shared_bytes": -1}, "shared_bytes is at least 0"),
        ({"threads": 3}, "the key 'threads' is not known"),
        ({"arguments": {}}, "arguments: expected a list"),
        ({"arguments": [3]}, r"arguments\[0\]: expected an object"),
        ({"arguments": [{"value": 3}]}, "the key 'name' is missing"),
        ({"arguments": [{"name": "n"}]}, "give a value for a scalar or a dtype for a buffer"),
        ({"arguments": [{"name": "n", "value": 1, "dtype": "int32", "count": 1}]}, "one of them"),
        ({"arguments": [{"name": "n", "value": "1"}]}, "value: expected a number, not '1'"),
        ({"arguments": [{"name": "x", "dtype": "float33", "count": 1}]}, "'float33' is not a type of NumPy"),
        ({"arguments": [{"name": "x", "dtype": "object", "count": 1}]}, "not a type of numbers"),
        ({"arguments": [{"name": "x", "dtype": "int32"}]}, "a count of at least 1, not 0"),
        ({"arguments": [{"name": "x", "dtype": "int32", "count": 4, "fill": "ones"}]}, 'fill: expected "zeros" or one'),
        ({"arguments": [{"name": "x", "dtype": "int32", "count": 4, "fill": {"normal": [1]}}]}, "fill: expected"),
        ({"arguments": [{"name": "x", "dtype": "int32", "count": 4, "fill": {"integers": [3, 3]}}]}, "not below"),
        ({"arguments": [{"name": "x", "dtype": "int32", "count": 4, "fill": {"integers": [0, 2.5]}}]}, "two integers"),
    ],
)
def test_damaged_json(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"kernel": "k", "grid": [1, 1, 1], "block": [32, 1, 1]} | change))
    with pytest.raises(SouffleError, match=message) as caught:
        Launch.read(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text('{\n"kernel": }')
    with pytest.raises(FusionError, match=r"launch\.json:2: not JSON"):
        Launch.read(path)
    path.write_text('{"kernel": "k", "grid": [1, 1, 1]}')
    with pytest.raises(FusionError, match="the key 'block' is missing"):
        Launch.read(path)
    with pytest.raises(FusionError, match="cannot be read"):
        Launch.read(tmp_path / "none.json")
