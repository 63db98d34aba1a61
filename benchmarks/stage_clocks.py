"""Where the time of kernels goes on a GPU: a clock read by every block before each stage and each wait.

The text of a network's kernels is compiled once more, with a line before each statement of a kernel's body that writes
the multiprocessor's clock to memory. What such a twin computes is the same; what it takes is a little more.

Here, with nvcc, for networks that ``benchmarks.gpu_host build`` has built::

    python -m benchmarks.stage_clocks build --in ARTIFACTS

The twins travel with the networks, and ``benchmarks.gpu_host`` runs them in its phase ``stages``. To read what it has
found::

    python -m benchmarks.stage_clocks table results.json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import write_json
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Plan
from souffle.runtime import load
from souffle.runtime.cuda import Cuda, PreparedLaunch
from souffle.runtime.cuda_workspace import CudaCode

__all__ = ["Twin", "clocked", "main", "measure", "predictions", "read_twin", "table"]

_LEVELS = ("V2", "V3", "V4")
"""Stages of V2 are V3's in kernels of their own."""
_STAMP = """
static __device__ __forceinline__ void souffle_stamp(unsigned long long* stamps, int num_blocks, int* place) {
  if (threadIdx.x == 0) {
    *(volatile unsigned long long*)(stamps + (size_t)*place * num_blocks + blockIdx.x) = clock64();
  }
  ++*place;
}
"""
_CALL = "souffle_stamp(souffle_stamps, num_blocks, &souffle_place);"
_KERNEL = re.compile(
    r'extern "C" __global__ [^;{]*?\b(\w+)\((?P<parameters>[^)]*)\) \{\n(?P<body>.*?)\n\}\n', re.DOTALL
)
_STEPS = re.compile(r"for \(int s\d+ = 0; s\d+ < (\d+); \+\+s\d+\) \{")
_STAGE = re.compile(r"\b(stage\w+)\(")
_FORM = re.compile(r"_\d+x\d+x\d+$")
"""Behind the name of a stage whose blocks have several teams."""
_NAME = re.compile(r"\b([A-Za-z_]\w*)\(")


@dataclass(frozen=True)
class Twin:
    """A network's kernels with clocks.

    Attributes
    ----------
    cubins : tuple of bytes
        Of the plan's modules.
    labels : dict of str to tuple of str
        By kernel, what stands between a stamp and the next one, in the order in which they are written: a stage's name,
        or the function that is called. There is one stamp more than labels.
    """

    cubins: tuple[bytes, ...]
    labels: dict[str, tuple[str, ...]]


def clocked(text: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """A module's text with clocks, and the labels of its kernels; each has one parameter more, before ``num_blocks``.

    Raises
    ------
    ValueError
        If a kernel has no parameter ``num_blocks`` at its end.
    """
    labels: dict[str, tuple[str, ...]] = {}

    def kernel(match: re.Match[str]) -> str:
        name, parameters, body = match[1], match["parameters"], match["body"]
        head = match[0][: match.start("parameters") - match.start()]
        if not parameters.endswith("int num_blocks"):
            raise ValueError(f"kernel {name} does not end with num_blocks: {parameters}")
        lines, labels[name] = _statements(body.split("\n"), 2)
        inside = "\n".join(["  int souffle_place = 0;", *lines, f"  {_CALL}"])
        start = parameters[: -len("int num_blocks")]
        return f"{head}{start}unsigned long long* souffle_stamps, int num_blocks) {{\n{inside}\n}}\n"

    # Declarations ahead of definitions would have other parameters.
    text = re.sub(r'extern "C" __global__ [^;{]*;\n', "", text)
    first = text.index('extern "C" __global__')
    text = _KERNEL.sub(kernel, text)
    at = text.rfind("\n\n", 0, first) + 1
    return text[:at] + _STAMP + text[at:], labels


def _statements(lines: Sequence[str], indent: int) -> tuple[list[str], tuple[str, ...]]:
    """Statements with a stamp before each, and what they are; those of a loop over steps once for each step."""
    margin = " " * indent
    starts = [
        number for number, line in enumerate(lines) if line.startswith(margin) and line[indent] not in " }#"
    ]  # fmt: skip
    found: list[str] = list(lines[: starts[0]] if starts else lines)
    labels: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        part = list(lines[start:end])
        steps = _STEPS.match(part[0].strip())
        text = "\n".join(part)
        if steps:
            close = next(number for number in range(1, len(part)) if part[number] == f"{margin}}}")
            inside, inner = _statements(part[1:close], indent + 2)
            found += [part[0], *inside, *part[close:]]
            labels += [*inner] * int(steps[1])
        elif label := _label(text):
            found += [f"{margin}{_CALL}", *part]
            labels.append(label)
        else:
            found += part
    return found, tuple(labels)


def _label(text: str) -> str:
    """What a statement is: its stage, or what it calls; empty for one that only declares."""
    stage = _STAGE.search(text)
    if stage:
        return stage[1]
    names = [name for name in _NAME.findall(text) if name not in ("if", "for", "int", "sizeof", "alignas")]
    declares = re.match(r"\s*(alignas|int|float|half|bool|uint|uchar|int64_t)\b", text)
    return "" if declares or not names else names[0]


# build


def _twin_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.clocks.npz"


def _build_one(folder: Path, name: str) -> None:
    plan = load(folder / f"{name}.souffle")
    labels: dict[str, tuple[str, ...]] = {}
    cubins = {}
    for number, module in enumerate(plan.modules):
        text, found = clocked(module.text)
        labels |= found
        image = compile_cubin(text, plan.options.arch)[0]
        cubins[f"cubin{number}"] = np.frombuffer(image, np.uint8)
    np.savez_compressed(_twin_path(folder, name), labels=np.array(json.dumps(labels)), **cubins)


def read_twin(path: Path) -> Twin:
    """What ``build`` has written."""
    with np.load(path, allow_pickle=False) as file:
        labels = {name: tuple(found) for name, found in json.loads(str(file["labels"])).items()}
        count = sum(key.startswith("cubin") for key in file.files)
        return Twin(tuple(file[f"cubin{number}"].tobytes() for number in range(count)), labels)


def _build(options: argparse.Namespace) -> int:
    path = options.input / "index.json"
    index = json.loads(path.read_text())
    wanted = [
        name
        for name, case in index["cases"].items()
        if case["level"] in options.levels and case["size"] in options.sizes
        and (not options.models or case["model"] in options.models)
    ]  # fmt: skip
    missing = [name for name in wanted if options.force or not _is_new(options.input, name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: _build_one(options.input, name), missing))
    for name in wanted:
        index["cases"][name]["clocks"] = _twin_path(options.input, name).name
    write_json(path, index)
    sys.stdout.write(f"{len(missing)} of {len(wanted)} twins compiled\n")
    return 0


def _is_new(folder: Path, name: str) -> bool:
    twin, network = _twin_path(folder, name), folder / f"{name}.souffle"
    return twin.exists() and twin.stat().st_mtime >= network.stat().st_mtime


# run


def measure(
    plan: Plan, twin: Twin, inputs: dict[str, np.ndarray], cuda: Cuda, *, runs: int, spin: float = 0.0
) -> dict[str, Any]:
    """Clocks of each label of each launch: a JSON object.

    Parameters
    ----------
    plan : Plan
    twin : Twin
    inputs : dict of str to array
        By the model's names.
    cuda : Cuda
    runs : int
        Of the whole network; medians over them are given.
    spin : float
        Seconds of runs before, that do not count; one at least.

    Returns
    -------
    dict
        ``"launches"``: for each kernel and number of blocks, how often it is launched, and ``"segments"``, of which
        each is ``[label, times, clocks of the quickest block, of the mean, of the slowest]``, summed over all of its
        runs; of a wait, the quickest is the block that came last. ``"us"``: a whole run, between events.
    """
    modules = tuple(replace(module, cubin=cubin) for module, cubin in zip(plan.modules, twin.cubins, strict=True))
    plan = replace(plan, modules=modules)
    with cuda.current():
        code = CudaCode(plan, cuda)
        owned: list[int] = []
        stream = cuda.stream()
        try:
            launches, stamps = _prepared(code, twin, inputs, owned, stream)
            end = time.monotonic() + spin
            _one_run(cuda, stream, launches, stamps)
            while time.monotonic() < end:
                _one_run(cuda, stream, launches, stamps)
            samples = [_one_run(cuda, stream, launches, stamps) for _ in range(runs)]
        finally:
            cuda.settle(stream)
            for address in owned:
                cuda.free(address)
            cuda.destroy_stream(stream)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for number, launch in enumerate(plan.launches):
        name, blocks = plan.kernels[launch.kernel].name, code.grids[launch.kernel]
        entry = found.setdefault((name, blocks), {"kernel": name, "blocks": blocks, "runs": 0, "segments": {}})
        entry["runs"] += 1
        clocks = np.stack([sample[1][number] for sample in samples])
        over_blocks = np.stack([np.median(part(clocks, axis=2), axis=0) for part in (np.min, np.mean, np.max)], axis=1)
        for label, row in zip(twin.labels[name], over_blocks, strict=True):
            total = entry["segments"].setdefault(label, np.zeros(4))
            total += [1, *row]
    for entry in found.values():
        entry["segments"] = [
            [label, *np.rint(total).astype(int).tolist()] for label, total in entry["segments"].items()
        ]
    return {"us": statistics.median(sample[0] for sample in samples), "launches": list(found.values())}


def _prepared(
    code: CudaCode, twin: Twin, inputs: dict[str, np.ndarray], owned: list[int], stream: Any
) -> tuple[list[PreparedLaunch], list[tuple[int, np.ndarray]]]:
    """The launches, and of each where its stamps go on the device and on the host."""
    cuda, plan = code.cuda, code.plan

    def zeros(nbytes: int) -> int:
        owned.append(cuda.alloc(nbytes))
        cuda.fill(owned[-1], 0, nbytes, stream)
        return owned[-1]

    scratch = zeros(plan.workspace_bytes)
    addresses, arrays = [], []
    for number, buffer in enumerate(plan.buffers):
        if buffer.kind == "constant":
            addresses.append(code.constants[number])
        elif buffer.kind == "workspace":
            addresses.append(scratch + buffer.offset)
        else:
            addresses.append(zeros(buffer.nbytes))
        if buffer.kind == "input":
            arrays.append(np.ascontiguousarray(inputs[buffer.label], buffer.dtype))
            cuda.to_device(addresses[-1], arrays[-1], stream)
    cuda.synchronize(stream, "inputs")
    launches, stamps = [], []
    for launch in plan.launches:
        labels, grid = twin.labels[plan.kernels[launch.kernel].name], code.grids[launch.kernel]
        array = np.zeros((len(labels) + 1, grid), np.uint64)
        stamps.append((zeros(array.nbytes), array))
        pointers = [*(addresses[number] for number in launch.buffers), stamps[-1][0]]
        launches.append(code.prepare(launch.kernel, pointers))
    return launches, stamps


def _one_run(
    cuda: Cuda, stream: Any, launches: Sequence[PreparedLaunch], stamps: Sequence[tuple[int, np.ndarray]]
) -> tuple[float, list[np.ndarray]]:
    """µs between events, and for each launch the clocks of each label and block."""
    begin, end = cuda.event(timing=True), cuda.event(timing=True)
    try:
        cuda.record(begin, stream)
        for launch in launches:
            cuda.launch(launch, stream)
        cuda.record(end, stream)
        for address, array in stamps:
            cuda.to_host(array, address, stream)
        cuda.synchronize(stream, "kernels with clocks")
        # The host's arrays are written again by the next run.
        return cuda.microseconds(begin, end), [np.diff(array.astype(np.int64), axis=0) for _, array in stamps]
    finally:
        cuda.destroy_event(begin)
        cuda.destroy_event(end)


# table


def table(result: dict[str, Any], predicted: dict[str, float], clock_hz: float) -> str:
    """One network's stages and waits, those that take longest first.

    Parameters
    ----------
    result : dict
        Of :func:`measure`.
    predicted : dict of str to float
        Seconds of all runs of a stage, by its name.
    clock_hz : float
    """
    rows: dict[str, list[float]] = {}
    for launch in result["launches"]:
        for label, times, low, mean, high in launch["segments"]:
            row = rows.setdefault(label, [0, 0.0, 0.0, 0.0])
            for place, value in enumerate((times, low, mean, high)):
                row[place] += value
    micro = 1e6 / clock_hz
    lines = [f"{'µs in all':60} {'times':>6} {'quickest':>9} {'mean':>9} {'slowest':>9} {'predicted':>9}"]
    for label, (times, low, mean, high) in sorted(rows.items(), key=lambda item: -item[1][2]):
        seconds = predicted.get(_FORM.sub("", label))
        of_model = f"{'':>9}" if seconds is None else f"{seconds * 1e6:9.1f}"
        lines.append(f"{label:60.60} {times:6} {low * micro:9.1f} {mean * micro:9.1f} {high * micro:9.1f} {of_model}")
    inside = sum(row[2] for row in rows.values()) * micro
    lines.append(f"{'all':60} {'':6} {'':9} {inside:9.1f}; launched, between events: {result['us']:.1f}")
    return "\n".join(lines) + "\n"


def predictions(plan: Plan) -> dict[str, float]:
    """Seconds of all runs of each stage, as the cost model has them."""
    found: dict[str, float] = {}
    for launch in plan.launches:
        kernel = plan.kernels[launch.kernel]
        for stage in kernel.predicted.stages if kernel.predicted else ():
            found[stage.name] = found.get(stage.name, 0.0) + stage.seconds
    return found


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stage_clocks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the twins of networks that are built")
    build.add_argument("--in", dest="input", type=Path, required=True)
    build.add_argument("--models", nargs="*", default=[], help="only these")
    build.add_argument("--levels", nargs="+", default=list(_LEVELS))
    build.add_argument("--sizes", nargs="+", default=["paper"])
    build.add_argument("--jobs", type=int, default=2)
    build.add_argument("--force", action="store_true", help="compile again what is there")
    shown = commands.add_parser("table", help="show what the phase `stages` has found")
    shown.add_argument("results", type=Path)
    shown.add_argument("--clock-mhz", type=float, required=True, help="of the multiprocessors, while it ran")
    options = parser.parse_args(argv)
    if options.command == "build":
        return _build(options)
    for name, entry in json.loads(options.results.read_text())["steps"].items():
        if name.startswith("stages ") and entry["status"] == "ok":
            result = entry["result"]
            sys.stdout.write(f"{name}\n{table(result, result['predicted'], options.clock_mhz * 1e6)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
