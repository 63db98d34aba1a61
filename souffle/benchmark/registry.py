"""The peers by their names. A peer is imported when it is asked for: what its library lacks is its own affair."""

from __future__ import annotations

import importlib

from souffle.benchmark.peer import Peer
from souffle.errors import OptionError

__all__ = ["PEERS", "peer_named"]

PEERS = {
    "eager": ("torch_peer", "TorchPeer"),
    "inductor": ("torch_peer", "TorchPeer"),
    "autotuned": ("torch_peer", "TorchPeer"),
    "xla": ("torch_peer", "TorchPeer"),
    "ort": ("onnxruntime_peer", "OnnxRuntimePeer"),
    "tensorrt": ("onnxruntime_peer", "OnnxRuntimePeer"),
    "tvm": ("tvm_peer", "TvmPeer"),
}
"""The file of each, and the class in it."""


def peer_named(name: str) -> Peer:
    """A peer.

    Raises
    ------
    OptionError
        If there is none of that name.
    """
    if name not in PEERS:
        raise OptionError(f"there is no peer {name!r}; choose from {', '.join(PEERS)}")
    file, kind = PEERS[name]
    return getattr(importlib.import_module(f"souffle.benchmark.{file}"), kind)(name)
