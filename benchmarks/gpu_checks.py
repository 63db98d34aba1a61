"""Whether a network is right on a GPU: against ONNX Runtime, and bit by bit, run after run, in each way to call it."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_artifacts import Task, network_of, values_of, versions_of, with_weights
from benchmarks.gpu_figures import compare
from souffle.runtime import DeviceArray, Network
from souffle.runtime.artifact import read
from souffle.runtime.comparison import compare as compare_outputs
from souffle.runtime.plan_versions import PlanVersions

__all__ = ["checked"]

_Way = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def _host(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, DeviceArray) else np.asarray(value)


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Which output's bits are not the same, in words; empty where all are."""
    for name in first:
        one, other = _host(first[name]), _host(second[name])
        if one.tobytes() != other.tobytes():
            bits = [np.frombuffer(array.tobytes(), np.uint8).reshape(one.size, -1) for array in (one, other)]
            where = np.flatnonzero(np.any(bits[0] != bits[1], axis=1))
            at = tuple(int(i) for i in np.unravel_index(where[0], one.shape))
            found = f"{len(where)} of {one.size} elements of output {name} differ"
            return f"{found}, the first at {at}: {other[at]} for {one[at]}"
    return ""


def _digest(outputs: dict[str, Any]) -> str:
    """Of all bits of all outputs, to compare with another case's."""
    digest = hashlib.sha256()
    for name in sorted(outputs):
        digest.update(name.encode() + b"\0" + _host(outputs[name]).tobytes())
    return digest.hexdigest()


def _kernels(network: Network) -> dict[str, Any]:
    """What the device made of the kernels; one by one only those with grid syncs, of which there are few."""
    kernels = network.kernels
    return {
        "kernels": len(kernels),
        "launches": sum(kernel.launches for kernel in kernels),
        "registers": max((kernel.registers or 0 for kernel in kernels), default=0),
        "shared_bytes": max((kernel.shared_bytes for kernel in kernels), default=0),
        "spill_bytes": max((kernel.spill_bytes or 0 for kernel in kernels), default=0),
        "merged": [
            {"name": kernel.name, "grid": kernel.grid[0], "block": kernel.block[0], "syncs": kernel.grid_syncs,
             "registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "launches": kernel.launches}
            for kernel in kernels if kernel.grid_syncs
        ][:40],
    }  # fmt: skip


def _through_torch(torch: Any, network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(value.copy()).cuda() for name, value in inputs.items()}
    outputs = {name: torch.from_dlpack(value) for name, value in network(tensors).items()}
    return {name: value.cpu().numpy() for name, value in outputs.items()}


def _beside_a_capture(torch: Any, network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of a call while PyTorch records a CUDA graph, into which an earlier call's outputs are given back.

    Raises
    ------
    RuntimeError
        If PyTorch's graph became invalid, or holds something else than it was to record.
    """
    tensors = {name: torch.from_numpy(value.copy()).cuda() for name, value in inputs.items()}
    lent = [torch.from_dlpack(value) for value in network(tensors).values()]
    x = torch.ones(1 << 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x + 1
        lent.clear()
        found = {name: _host(value) for name, value in network(inputs).items()}
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    if not bool((y == 3).all()):
        raise RuntimeError("the graph that PyTorch recorded meanwhile gives another result")
    return found


def _repeated(
    run: Callable[[], dict[str, Any]], first: dict[str, Any], repeats: int, seconds: float
) -> tuple[int, int, str]:
    """Runs, how many gave the same bits as the first, and how the first that did not differs."""
    runs, same, error, end = 0, 0, "", time.monotonic() + seconds
    while runs < repeats and (runs == 0 or time.monotonic() < end):
        difference = _difference(first, run())
        runs, same = runs + 1, same + (not difference)
        error = error or (f"run {runs}: {difference}" if difference else "")
    return runs, same, error


def _into_given(network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs in arrays that the caller gives."""
    given = {spec.name: np.empty(spec.shape, spec.dtype) for spec in network.outputs}
    return network(inputs, out=given)


def _into_tensors(torch: Any, network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in PyTorch's tensors on the GPU."""
    given = {spec.name: np.empty(spec.shape, spec.dtype) for spec in network.outputs}
    tensors = {name: torch.from_numpy(value).cuda() for name, value in given.items()}
    network(inputs, out=tensors)
    return {name: value.cpu().numpy() for name, value in tensors.items()}


def _bound(network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of a call whose buffers were settled before."""
    bound = network.bind()
    for name, value in bound.inputs.items():
        value[...] = inputs[name]
    return dict(bound())


def _ways(network: Network, torch: Any) -> dict[str, tuple[_Way | None, str]]:
    """Other ways to call a network: what a result calls each, None where it is not to be had, and its name in words."""
    lengths_known = not any(spec.counted for spec in network.outputs)
    on_gpu = torch is not None and torch.cuda.is_available() and bool(network.inputs)

    def by_torch(way: Callable[..., dict[str, np.ndarray]], usable: bool = True) -> _Way | None:
        return partial(way, torch, network) if on_gpu and usable else None

    return {
        "out_identical": (partial(_into_given, network) if lengths_known else None, "into arrays that are given"),
        "bound_identical": (partial(_bound, network) if lengths_known else None, "with bound buffers"),
        "dlpack_identical": (by_torch(_through_torch), "through PyTorch's tensors"),
        "dlpack_out_identical": (by_torch(_into_tensors, lengths_known), "into PyTorch's tensors"),
        "capture_identical": (by_torch(_beside_a_capture), "while PyTorch records a graph"),
    }


def _checked_versions(saved: PlanVersions, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """Whether a network of several versions takes the right one, again and again, in turn."""
    network, (inputs, expected) = versions_of(saved, options), values_of(task.io)
    result: dict[str, Any] = {"constants": "stored", "outputs": {}, "runs": 0, "identical_runs": 0}
    errors, firsts = [], {}
    for _ in range(max(2, options.repeats)):
        for number, extents in enumerate(saved.plans):
            before = f"{number}/"
            given = {key.removeprefix(before): value for key, value in inputs.items() if key.startswith(before)}
            found = network(given)
            first = firsts.setdefault(extents, found)
            error = _difference(first, found)
            result["runs"], result["identical_runs"] = result["runs"] + 1, result["identical_runs"] + (not error)
            errors += [f"version {extents}, again: {error}"] if error else []
    for number, (extents, outputs) in enumerate(firsts.items() if options.execute else ()):
        precision = saved.plans[extents].options.precision
        for name, value in outputs.items():
            entry = compare(_host(value), expected[f"{number}/{name}"], precision)
            result["outputs"][f"{number}/{name}"] = entry
            errors += [] if entry["ok"] else [f"output {name} of version {extents} is wrong: {entry}"]
    return result | {"ok": not errors} | ({"error": "; ".join(errors)[:1500]} if errors else {})


def checked(task: Task, options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """Whether one network is right.

    Parameters
    ----------
    task : Task
    options
        ``repeats``, ``seconds``, ``execute`` and ``rehearse`` of the step.
    torch : module or None
        PyTorch, where it is there.

    Returns
    -------
    dict
        ``ok``, and ``error`` where that is false; ``outputs`` by name and the ``difference`` that ``souffle check``
        gives; how many ``runs`` there were and how many gave the same bits; for each other way to call it whether it
        does, or None; what the device made of the kernels.
    """
    saved = read(task.artifact)
    if isinstance(saved, PlanVersions):
        return _checked_versions(saved, task, options)
    plan, constants = with_weights(saved, task)
    inputs, expected = values_of(task.io)
    network = network_of(plan, options, poison=True)
    first = network(inputs)
    precision = plan.options.precision
    result: dict[str, Any] = {"constants": constants, "precision": precision, "outputs": {}}
    if constants != "synthetic" and options.execute:
        found = {name: _host(value) for name, value in first.items()}
        result["outputs"] = {name: compare(found[name], value, precision) for name, value in expected.items()}
        result["difference"] = compare_outputs(found, expected, precision).error
    errors = []
    for name, entry in result["outputs"].items():
        if not entry["ok"]:
            wrong = entry.get("error") or f"{entry.get('of_tolerance', 0):.3g} times the tolerance"
            wrong = f"{entry['wrong_elements']} elements" if "wrong_elements" in entry else wrong
            errors.append(f"output {name} is wrong: {wrong}")
    repeats, seconds = max(1, options.repeats - 1), options.seconds / 2
    runs, same, error = _repeated(lambda: network(inputs), first, repeats, seconds)
    result["identical_runs"], result["runs"], result["digest"] = same + 1, runs + 1, _digest(first)
    errors += [f"launched again, {error}"] if error else []
    graph = network.capture()
    runs, same, error = _repeated(lambda: graph(inputs), first, repeats, seconds)
    result["identical_graph_runs"], result["graph_runs"] = same, runs
    errors += [f"as a CUDA graph, {error}"] if error else []
    for key, (way, words) in _ways(network, torch).items():
        result[key] = None
        if way is not None:
            try:
                _, same, error = _repeated(lambda way=way: way(inputs), first, 1, seconds)
            except RuntimeError as problem:  # of PyTorch
                same, error = 0, str(problem)
            result[key] = bool(same)
            errors += [f"{words}, {error}"] if error else []
    result |= _kernels(network) | {"ok": not errors}
    return result | ({"error": "; ".join(errors)[:1500]} if errors else {})
