"""The machine code of matrix products on tensor cores: their instructions, ldmatrix and asynchronous copies, registers,
spills, and predicted times.

``python -m benchmarks.gemm_sass [--arch sm_80 sm_90] [--tokens 384] [--hidden 768] [--factors fp16] [--out FILE.json]``
takes BERT's four products, by the mma rule and by the wmma rule that it stands before; with ``--factors tf32`` or
``tf32x3`` those of fp32, by the mma rule and on CUDA cores. With ``--model FILE.onnx --log DIR`` it takes
every stage of a model that runs on tensor cores, as it is compiled with a tuning log.

Instructions are counted in the cubin itself (:mod:`benchmarks.sass`), since nvcc comes without a disassembler in the
registry's wheels; the counter is first tried on kernels whose instructions are known.
"""

from __future__ import annotations

import argparse
import sys

from tvm import te, topi

import souffle
from benchmarks.record import save_results
from benchmarks.sass import KINDS, count_instructions, self_test
from souffle.cli.output import format_table
from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin
from souffle.cost import predict_stage
from souffle.cost.device import cost_device, product_names
from souffle.decision import Refused
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.pipeline import stages_of
from souffle.program.products import TF32, TF32X3
from souffle.schedule.gpu import GpuSchedule, Rule, StageForms
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.rule import MULTIPLIES
from souffle.schedule.gpu.rules.contraction import CONTRACTION
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.rules.tensor_core_contraction import TENSOR_CORE_CONTRACTION
from souffle.schedule.gpu.scheduler import THREADS, gpu_request
from souffle.schedule.log import open_log
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import flat_stages
from souffle.schedule.tuned import tuned_stages
from souffle.tvm_compat import primfunc_from_tensors

RULES = {
    "fp16": (MMA_CONTRACTION, TENSOR_CORE_CONTRACTION),
    **dict.fromkeys((TF32, TF32X3), (MMA_CONTRACTION, CONTRACTION)),
}
"""By how factors are multiplied."""

_PREDICTED = ("A100-SXM4-40GB", "H200-SXM5-141GB")


def products(tokens: int, hidden: int, dtype: str = "float16") -> dict[str, list[te.Tensor]]:
    """The four products by name, each with what follows it in its stage.

    Parameters
    ----------
    tokens, hidden : int
        Rows of the activations, and their features; the inner layer has four times as many.
    dtype : str
        Of factors, and of activations in memory.
    """
    found = {}
    a, b = te.placeholder((tokens, hidden), dtype, "x"), te.placeholder((3, hidden, hidden), dtype, "w")
    bias, k = te.placeholder((3, hidden), "float32", "bias"), te.reduce_axis((0, hidden), "k")
    total = te.compute(
        (3, tokens, hidden),
        lambda s, i, j: te.sum(a[i, k].astype("float32") * b[s, k, j].astype("float32"), k),
        "product",
    )
    stored = te.compute((3, tokens, hidden), lambda s, i, j: (total[s, i, j] + bias[s, j]).astype(dtype), "stored")
    found["query, key, value"] = [a, b, bias, stored]
    for name, inner, columns in (
        ("projection", hidden, hidden),
        ("inner layer, GELU", hidden, 4 * hidden),
        ("outer layer", 4 * hidden, hidden),
    ):
        found[name] = _dense(tokens, columns, inner, dtype, gelu="GELU" in name)
    return found


def _dense(rows: int, columns: int, inner: int, dtype: str, *, gelu: bool) -> list[te.Tensor]:
    a, b = te.placeholder((rows, inner), dtype, "x"), te.placeholder((inner, columns), dtype, "w")
    bias, k = te.placeholder((columns,), "float32", "bias"), te.reduce_axis((0, inner), "k")
    total = te.compute(
        (rows, columns), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), k), "product"
    )
    biased = topi.add(total, bias)
    if not gelu:
        return [a, b, bias, biased]
    half = topi.multiply(biased, topi.multiply(topi.add(topi.erf(topi.multiply(biased, 0.5**0.5)), 1.0), 0.5))
    return [a, b, bias, topi.cast(half, dtype)]


def measure(tensors: list[te.Tensor], rule: Rule, arch: str, factors: str = "fp16") -> dict:
    """What one product takes by one rule, compiled for an architecture."""
    device = device_for(arch)
    request = gpu_request(device)
    func = primfunc_from_tensors(tensors, "stage")
    sketch = rule.sketch(StageForms(func if factors == "fp16" else func.with_attr(MULTIPLIES, factors)), request)
    if isinstance(sketch, Refused):
        raise SystemExit(f"{arch}: {rule.name} refuses: {sketch.reason}")
    values = dict(sketch.choose())
    return {"values": values, **examined(sketch.make(values), arch)}


def logged(model: str, log: str, arch: str) -> list[dict]:
    """What each distinct stage on tensor cores takes in a model that is compiled with a log."""
    program = souffle.import_onnx(model)
    units, analysis = stages_of(program, level="V4", arch=arch, precision="mixed")
    found, _ = tuned_stages(units, analysis, open_log(log, arch), device_for(arch), merged=True)
    distinct = {stage.draft.digest: stage for stage in flat_stages(found) if stage.schedule.tensor_cores}
    own = {stage.draft.digest: stage.schedule for stage in flat_stages(units)}
    return [
        {
            "product": stage.name,
            "values": {"from": "log" if stage.schedule is not own[digest] else "rule"},
            **examined(stage.schedule, arch),
        }
        for digest, stage in distinct.items()
    ]


def examined(schedule: GpuSchedule, arch: str) -> dict:
    """What a schedule is compiled to, as a kernel of its own."""
    target = cuda_target(arch)
    functions = lower_stage("stage", schedule, target)
    shape = kernel_of_stage(functions, [(str(one.ty.dtype), 0) for one in schedule.func.params], "stage")
    image, report = compile_cubin(emit_cuda([("alone", shape)], target)[0], arch)
    used, counted = report["alone"], count_instructions(image)["alone"]
    pool = max(function.shared_bytes for function in functions)
    resources = StageResources(used.registers, used.static_shared_bytes, pool, THREADS, used.spill_store_bytes, True)
    described = [cost_device(name) for name in product_names() if name in _PREDICTED]
    return {
        "arch": arch,
        "rule": schedule.rule,
        "tiles": schedule.tiles,
        "shared_bytes": pool,
        "registers": used.registers,
        "spill_bytes": used.spill_store_bytes + used.spill_load_bytes,
        "instructions": {kind: counted[kind] for kind in KINDS},
        "predicted_us": {
            one.product: 1e6 * predict_stage(functions, one, resources).seconds for one in described if one.arch == arch
        },
    }


def main() -> int:
    """Print the table; the exit status is 1 if a kernel of the mma rule spills or lacks an instruction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--factors", choices=RULES, default="fp16", help="what the four products multiply")
    parser.add_argument("--model", metavar="FILE", help="an ONNX file")
    parser.add_argument("--log", metavar="DIR", default="auto", help="the tuning logs for --model")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        problem = self_test(arch)
        if problem is not None:
            print(f"instructions cannot be counted: {problem}", file=sys.stderr)
            return 1
    results = []
    for arch in arguments.arch:
        if arguments.model:
            results += logged(arguments.model, arguments.log, arch)
            continue
        factors, dtype = arguments.factors, "float16" if arguments.factors == "fp16" else "float32"
        for name, tensors in products(arguments.tokens, arguments.hidden, dtype).items():
            results += [{"product": name, **measure(tensors, rule, arch, factors)} for rule in RULES[factors]]
    if arguments.out:
        save_results(arguments.out, "benchmarks.gemm_sass", results)
    multiplied = "HMMA.16816" if arguments.model or arguments.factors == "fp16" else "HMMA"
    kinds = (multiplied, "LDSM", "LDGSTS.BYPASS.128", "LDG.128", "LDG", "STG.128", "BAR")
    header = ["product", "arch", "rule", "values", "tiles", "shared", "registers", "spills", *kinds, "predicted us"]
    rows = [
        (
            r["product"],
            r["arch"],
            r["rule"].removesuffix("_contraction"),
            " ".join(str(value) for value in r["values"].values()),
            r["tiles"],
            r["shared_bytes"],
            r["registers"],
            r["spill_bytes"],
            *(r["instructions"][kind] for kind in kinds),
            " ".join(f"{us:.1f}" for us in r["predicted_us"].values()),
        )
        for r in results
    ]
    print(format_table(header, rows))
    needed = (multiplied, "LDSM", "LDGSTS.BYPASS.128")
    ours = [r for r in results if r["rule"] == "mma_contraction"]
    return 0 if all(r["spill_bytes"] == 0 and all(r["instructions"][k] for k in needed) for r in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
