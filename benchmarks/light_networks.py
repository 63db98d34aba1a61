"""The light networks of the ``onnx`` package (ResNet-50, DenseNet-121, VGG-19, ...), whole and with random weights:
compile seconds, launches, the certificate, and the largest error against ONNX Runtime.

``python -m benchmarks.light_networks [--models resnet50 ...] [--levels cpu V3 V4] [--seconds 600] [--out FILE.json]``.
Level ``cpu`` is LLVM code of V4 for this machine; the others are CUDA text, which runs on the CPU device where a run
ends in ``--seconds``. Each row is printed, and written, when it is there; the same command goes on where it stopped.

The package keeps these networks light: their weights are made by ConstantOfShape, all equal, so that a wrong index
hides. Here each is drawn from a seed. The classifier is scaled so that its softmax is not one-hot, for the same reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import souffle
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.certificate import PROVEN, REFUTED
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cli.output import format_table
from souffle.errors import CertificateError

__all__ = ["NAMES", "light_network", "randomized"]

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

NAMES = (
    "resnet50",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "squeezenet",
    "shufflenet",
    "vgg19",
    "zfnet512",
    "bvlc_alexnet",
)


def light_network(name: str) -> onnx.ModelProto:
    """A light network with random weights."""
    return randomized(onnx.load(FOLDER / f"light_{name}.onnx"))


def randomized(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """The network with every constant float tensor drawn anew, by what reads it.

    Parameters
    ----------
    model : ModelProto
        Its weights are initializers, or made of them by ConstantOfShape.
    seed : int

    Returns
    -------
    ModelProto
        Without ConstantOfShape; its inputs are those that a caller gives.
    """
    generator = np.random.default_rng(seed)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    shapes = {name: value.shape for name, value in values.items() if value.dtype.kind == "f"}
    kept = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(values[node.input[0]])
        else:
            kept.append(node)
    readers: dict[str, tuple[onnx.NodeProto, int]] = {}
    for node in reversed(kept):
        readers.update({name: (node, position) for position, name in enumerate(node.input)})
    values |= {name: _drawn(name, shape, readers, generator) for name, shape in shapes.items() if name in readers}
    graph = model.graph
    read = {name for node in kept for name in node.input}
    inputs = [value for value in graph.input if value.name not in values and value.name in read]
    weights = [numpy_helper.from_array(values[name], name) for name in values if name in read]
    made = helper.make_graph(kept, graph.name, inputs, list(graph.output), weights)
    made = helper.make_model(made, opset_imports=list(model.opset_import), ir_version=model.ir_version + 1)
    _soften(made)
    return made


def _drawn(
    name: str,
    shape: tuple[int, ...],
    readers: Mapping[str, tuple[onnx.NodeProto, int]],
    generator: np.random.Generator,
) -> np.ndarray:
    """Values with which activations neither vanish nor explode."""
    node, position = readers[name]
    while node.op_type in ("Reshape", "Unsqueeze"):
        node, position = readers[node.output[0]]
    match node.op_type, position:
        case "Conv", 1:
            value = generator.standard_normal(shape, np.float32) * np.sqrt(2 / np.prod(shape[1:]))
        case "Gemm", 1:
            value = generator.standard_normal(shape, np.float32) * np.sqrt(2 / shape[-1])
        case ("BatchNormalization", 1 | 4) | ("Mul", _):
            value = generator.uniform(0.5, 1.5, shape)
        case _:
            value = generator.standard_normal(shape, np.float32) * 0.1
    return value.astype(np.float32)


def _soften(model: onnx.ModelProto) -> None:
    """Scale the weights of the layer before a last softmax, in place, so that its inputs have variance 1."""
    producers = {node.output[0]: node for node in model.graph.node}
    last = producers[model.graph.output[0].name]
    if last.op_type != "Softmax":
        return
    layer = producers[last.input[0]]
    while layer.op_type not in ("Gemm", "Conv"):
        layer = producers[layer.input[0]]
    outputs = model.graph.output
    wanted = list(outputs)
    del outputs[:]
    outputs.append(helper.make_tensor_value_info(layer.output[0], onnx.TensorProto.FLOAT, None))
    spread = float(np.std(onnxruntime_outputs(model, models.random_inputs(model))[layer.output[0]]))
    del outputs[:]
    outputs.extend(wanted)
    for tensor in model.graph.initializer:
        if tensor.name in layer.input[1:]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(spread), tensor.name))


def measure(name: str, level: str, run: bool) -> None:
    """Compile one network in this process, prove it, and run it if asked; print what is known as JSON lines."""
    model = light_network(name)
    start, processor = time.perf_counter(), time.process_time()
    program = souffle.import_onnx(model)
    imported = time.perf_counter()
    if level == "cpu":
        network = souffle.compile(program, target="cpu")
    else:
        options = {"arch": "sm_90", "cubin": False, "device": "cpu"}
        try:
            network = souffle.compile(program, target="cuda", level=level, **options)
        except CertificateError as error:
            print(json.dumps({"verdict": REFUTED, "reasons": [str(one) for one in error.certificate.counterexamples]}))
            return
    compiled, used = time.perf_counter(), time.process_time()
    plan, certificate = network.plan, network.certificate
    row = {
        "tes": len(program.tes),
        "import_seconds": round(imported - start, 2),
        "compile_seconds": round(compiled - imported, 2),
        "processor_seconds": round(used - processor, 2),
        "launches": len(plan.launches),
        "kernels": len(plan.kernels),
        "grid_barriers": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
        "verdict": certificate.verdict if certificate else None,
        "reasons": list(certificate.unknown) if certificate else [],
        "ran": "no",
    }
    print(json.dumps(row), flush=True)
    if not run:
        return
    inputs = models.random_inputs(model)
    if level == "cpu":
        network(inputs)
    else:
        network.open()
    start = time.perf_counter()
    outputs = {key: np.asarray(value) for key, value in network(inputs).items()}
    seconds = time.perf_counter() - start
    result = compare(outputs, onnxruntime_outputs(model, inputs), "fp32")
    where = "LLVM code" if level == "cpu" else "CPU device"
    print(json.dumps(row | {"ran": where, "error": result.error, "ok": result.ok, "run_seconds": round(seconds, 2)}))


def measured(name: str, level: str, seconds: float) -> dict:
    """The row of one network at one level, made in a process of its own that is given so many seconds."""
    command = [sys.executable, "-m", "benchmarks.light_networks", "--one", name, level]
    if seconds <= 0:
        command.append("--no-run")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    row = {"model": name, "level": level}
    line = process.stdout.readline()
    if line:
        row |= json.loads(line)
        try:
            rest, _ = process.communicate(timeout=seconds if seconds > 0 else None)
            row |= json.loads(rest) if rest else {}
        except subprocess.TimeoutExpired:
            process.kill()
            row["ran"] = f"not within {seconds:.0f} s"
    status = process.wait()
    if "verdict" not in row or (status and not row["ran"].startswith("not")):
        row["failed"] = f"exit status {status}"
    return row


COLUMNS = (
    ("model", "model"),
    ("level", "level"),
    ("compile_seconds", "compile s"),
    ("processor_seconds", "of a processor"),
    ("launches", "launches"),
    ("kernels", "kernels"),
    ("grid_barriers", "grid barriers"),
    ("verdict", "certificate"),
    ("ran", "ran"),
    ("error", "largest error"),
    ("run_seconds", "run s"),
)


def cells(row: dict) -> list[str]:
    """A row of the table."""
    texts = []
    for key, _ in COLUMNS:
        value = row.get(key)
        texts.append("-" if value is None else f"{value:.1e}" if key == "error" else str(value))
    if row.get("failed") or row.get("ok") is False:
        texts[-1] += " " + row.get("failed", "MISMATCH")
    return texts


def main() -> int:
    """Measure all networks asked for; the exit status is 1 if one fails, differs or is not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--levels", nargs="+", default=["cpu", "V3", "V4"])
    parser.add_argument("--seconds", type=float, default=600, help="for one run; 0: compile and prove only")
    parser.add_argument("--out", help="where to write the results as JSON; rows that it holds are not made again")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LEVEL"), help=argparse.SUPPRESS)
    parser.add_argument("--no-run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.one, not arguments.no_run)
        return 0
    rows = kept_results(arguments.out)
    made = {(row["model"], row["level"]) for row in rows}
    for name in arguments.models:
        for level in arguments.levels:
            if (name, level) in made:
                continue
            row = measured(name, level, arguments.seconds)
            rows.append(row)
            print("  ".join(cells(row)), flush=True)
            for reason in row.get("reasons", ()):
                print(f"    {reason}", flush=True)
            if arguments.out:
                save_results(arguments.out, "benchmarks.light_networks", rows)
    print(format_table([title for _, title in COLUMNS], [cells(row) for row in rows]))
    bad = [r for r in rows if "failed" in r or r.get("ok") is False or r["verdict"] not in (None, PROVEN)]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
