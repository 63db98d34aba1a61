"""Functions and traces as one line of text each, some kilobytes short, for tuning logs.

TVM writes a function as JSON: a list of nodes that refer to each other by number, 40 kB for a small stage and nearly
all of it the same from stage to stage. Here the names of a node's fields are written once for each type, a reference
says how far back the node is, what then recurs is in a dictionary that comes with Souffle, and the rest is compressed.
Whatever JSON it is, it comes back as it was.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

__all__ = ["pack", "pack_function", "pack_graph", "unpack", "unpack_function", "unpack_graph"]

_DICTIONARY = Path(__file__).with_name("packed_dictionary.txt")
"""Text as it recurs: two traces of MetaSchedule's, and the functions of the stages with which those of the other stages
of six networks become shortest. It is part of the format: what was packed with another one cannot be read.
"""

_MOST_BYTES = 2**26
"""Of one function or trace: what claims to be longer is damaged."""

_NUMBERS = frozenset(("data_alignment", "iter_type", "kind", "ndim", "offset_factor", "span", "value"))
"""Fields of nodes whose whole numbers are mostly no references. Written as one or the other, they are read alike."""


@cache
def _dictionary() -> bytes:
    return _DICTIONARY.read_bytes()


def pack(value: Any) -> str:
    """JSON data as short text without quotes, backslashes and spaces."""
    text = json.dumps(value, separators=(",", ":")).encode()
    deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_DEFAULT_STRATEGY, _dictionary())
    return base64.b85encode(deflate.compress(text) + deflate.flush()).decode()


def unpack(text: str) -> Any:
    """What :func:`pack` packed.

    Raises
    ------
    ValueError
        If it is damaged; a checksum is part of it.
    """
    inflate = zlib.decompressobj(zlib.MAX_WBITS, _dictionary())
    try:
        data = inflate.decompress(base64.b85decode(text), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"its packed text is damaged ({error})") from error
    if not inflate.eof:
        raise ValueError("its packed text is cut off")
    return json.loads(data)


def pack_function(func: tirx.PrimFunc) -> str:
    """A function as short text."""
    return pack_graph(json.loads(tvm.ir.save_json(func)))


def unpack_function(text: str) -> tirx.PrimFunc:
    """The function that :func:`pack_function` packed.

    Raises
    ------
    ValueError, TypeError, RuntimeError, LookupError, AttributeError
        If it is damaged, or of a TVM whose nodes this one does not know.
    """
    func = tvm.ir.load_json(json.dumps(unpack_graph(text)))
    if not isinstance(func, tirx.PrimFunc):
        raise ValueError(f"it holds a {type(func).__name__}, not a function")
    return func


def pack_graph(graph: dict[str, Any]) -> str:
    """TVM's JSON of a graph as short text; of another shape than TVM's is today, as it is."""
    short = _shortened(graph)
    try:
        as_it_was = _restored(short) == graph
    except ValueError:
        as_it_was = False
    return pack(short if as_it_was else graph)


def unpack_graph(text: str) -> dict[str, Any]:
    """What :func:`pack_graph` packed, or the same errors as of :func:`unpack_function`."""
    data = unpack(text)
    return data if "nodes" in data else _restored(data)


def _shortened(graph: dict[str, Any]) -> dict[str, Any]:
    """TVM's JSON of a graph with fields by position and references counted backwards."""
    fields: dict[str, list[str]] = {}
    nodes = []
    for number, node in enumerate(graph["nodes"]):
        data = node.get("data")
        if isinstance(data, dict):
            names = fields.setdefault(node["type"], list(data))
            node_data = [_turned(number, name, data.get(name)) for name in names]
            nodes.append([node["type"], *node_data])
        elif isinstance(data, list):
            nodes.append([node["type"], [_turned(number, "", part) for part in data]])
        else:
            nodes.append([node["type"], data] if "data" in node else [node["type"]])
    others = {name: value for name, value in graph.items() if name != "nodes"}
    return {"fields": fields, "graph": others, "short": nodes}


def _restored(short: dict[str, Any]) -> dict[str, Any]:
    nodes = []
    for number, (kind, *data) in enumerate(short["short"]):
        names = short["fields"].get(kind)
        if names is not None:
            values = zip(names, data, strict=True)
            nodes.append({"type": kind, "data": {name: _turned(number, name, value) for name, value in values}})
        elif data and isinstance(data[0], list):
            nodes.append({"type": kind, "data": [_turned(number, "", part) for part in data[0]]})
        else:
            nodes.append({"type": kind, "data": data[0]} if data else {"type": kind})
    return {**short["graph"], "nodes": nodes}


def _turned(number: int, field: str, value: Any) -> Any:
    """From the number of a node to how far it is behind `number`, and back: it is its own inverse."""
    if type(value) is not int or field in _NUMBERS or value in (0, number):
        return value
    return number - value
