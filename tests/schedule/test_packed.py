"""Functions and traces as short text: what comes back is what went in, and damage is seen."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from souffle.schedule.log import TuningLog, shipped_log
from souffle.schedule.packed import pack, pack_function, pack_graph, unpack, unpack_function, unpack_graph
from tests.thorough import sized, some

PARTS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PARTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


def function(dtype: str = "float32", extent: int = 7) -> tirx.PrimFunc:
    """With what numbers JSON has trouble with: the least and the largest, and one that no decimal ends."""
    a = te.placeholder((extent,), dtype, name="a")
    third = te.compute((extent,), lambda i: a[i] * tirx.const(1 / 3, dtype), name="third")
    k = te.reduce_axis((0, extent), name="k")
    most = te.compute((1,), lambda i: te.max(third[k], axis=k), name="most")
    return te.create_prim_func([a, most])


@pytest.mark.parametrize("func", [function(), function("float16", 1), function("float64", 2**33), function("int64")])
def test_a_function_comes_back_byte_for_byte(func) -> None:
    text = pack_function(func)
    assert tvm.ir.save_json(unpack_function(text)) == tvm.ir.save_json(func)
    assert text.isascii() and not set(text) & set("\"\\ \n") and text == json.loads(json.dumps(text))


ARCHS = sorted(path.name for path in shipped_log().iterdir() if path.is_dir())


@pytest.mark.parametrize("arch", some(ARCHS[-1:], ARCHS[:-1]))
def test_what_is_shipped_comes_back_and_is_short(arch: str) -> None:
    """A tenth of TVM's text for each stage, whether or not the dictionary knows it; half of deflate's alone."""
    packed = deflated = 0
    every = list(TuningLog(shipped_log() / arch, arch).table.workloads.values())
    for count, workload in enumerate(every[:: sized(4, 1)]):
        text = tvm.ir.save_json(workload.func)
        if count % 10 == 0:
            assert tvm.ir.save_json(unpack_function(pack_function(workload.func))) == text
        assert 10 * len(workload.packed) < len(text), workload.where
        packed += len(workload.packed)
        dense = json.dumps(json.loads(text), separators=(",", ":")).encode()
        deflated += len(base64.b85encode(zlib.compress(dense, 9)))
    assert 2 * packed < deflated


@settings(max_examples=sized(20, 60), deadline=None)
@given(VALUES)
def test_any_json_comes_back(value) -> None:
    assert unpack(pack(value)) == value


@settings(max_examples=sized(20, 60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("a", "b", "data")), VALUES), max_size=6))
def test_any_graph_comes_back(nodes) -> None:
    """Also nodes of one type with other fields than the first one had: then nothing is shortened."""
    graph = {"root_index": 0, "nodes": [{"type": kind, "data": data} for kind, data in nodes]}
    assert unpack_graph(pack_graph(graph)) == graph


def test_damage_is_seen() -> None:
    text = pack_function(function())
    for place in range(0, len(text), 7):
        other = "0" if text[place] != "0" else "1"
        with pytest.raises(ValueError):
            unpack_function(text[:place] + other + text[place + 1 :])
        with pytest.raises(ValueError):
            unpack_function(text[:place])
    with pytest.raises(ValueError):
        unpack_function("é" + text)
    with pytest.raises(ValueError, match="not a function"):
        unpack_function(pack(json.loads(tvm.ir.save_json(tvm.IRModule({})))))


def test_what_claims_to_be_endless_is_damaged() -> None:
    deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS)
    data = b"".join(deflate.compress(b" " * 2**20) for _ in range(65)) + deflate.flush()
    assert len(data) < 100_000
    with pytest.raises(ValueError, match="cut off"):
        unpack(base64.b85encode(data).decode())
