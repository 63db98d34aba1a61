"""Instructions of a tile: those that the cost model counts, against those in nvcc's machine code.

``python -m benchmarks.tile_sass [--arch sm_80 sm_90] [--out FILE.json]`` takes ResNeXt's grouped convolutions by the
two rules that compete for them. Each is compiled as a kernel of its own, in which the tiles are one loop and the steps
of the sum another. A warp executes the tile's own instructions once and those of a step as often as there are steps;
what stands between a jump and its meeting point may be jumped over, so that there is a most and a least of both. The
two counts share no code.
"""

from __future__ import annotations

import argparse
import sys

from tvm import te, tirx, topi

from benchmarks.record import save_results
from benchmarks.sass import loops_of, self_test
from souffle.cli.output import format_table
from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin
from souffle.cost import work_of
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.schedule.gpu import RULES, GpuSchedule, StageForms
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.tvm_compat import collect, const_int, primfunc_from_tensors

_LAYERS = {"layer 1": (4, 56), "layer 2": (8, 28), "layer 3": (16, 14)}
"""Channels of each of 64 groups, and the side of the image."""


def grouped(channels: int, size: int) -> tirx.PrimFunc:
    """A grouped 3 x 3 convolution of fp16 with fp32 sums."""
    x = te.placeholder((1, 64 * channels, size + 2, size + 2), "float16", "x")
    w = te.placeholder((64 * channels, channels, 3, 3), "float16", "w")
    return primfunc_from_tensors([x, w, topi.nn.group_conv2d_nchw(x, w, 1, 0, 1, 64, "float32")], "conv")


def examined(schedule: GpuSchedule, arch: str) -> dict:
    """What a warp executes for a tile, as counted, and at most and at least by the machine code."""
    target = cuda_target(arch)
    functions = lower_stage("stage", schedule, target)
    shape = kernel_of_stage(functions, [(str(one.ty.dtype), 0) for one in schedule.func.params], "stage")
    code = loops_of(compile_cubin(emit_cuda([("alone", shape)], target)[0], arch)[0], arch)["alone"]
    (function,) = functions
    warps, steps = function.threads // 32, _steps(function)
    around, tile, *inner = code
    if len(inner) > 1:
        raise SystemExit(f"{arch}: {len(inner)} loops within a tile, where one is expected")
    most = tile.instructions + sum(steps * one.instructions for one in inner)
    least = tile.instructions - tile.guarded + sum(steps * (one.instructions - one.guarded) for one in inner)
    return {
        "arch": arch,
        "rule": schedule.rule,
        "steps": steps,
        "counted": round(work_of(function).warp_instructions / warps),
        "sass_most": most,
        "sass_least": least,
        "before_the_tiles": around.instructions,
    }


def _steps(function: DeviceFunction) -> int:
    """Turns of the one loop that stays a loop."""
    loops = [loop for loop in collect(function.func.body, tirx.For) if loop.kind != tirx.ForKind.UNROLLED]
    return max((const_int(loop.extent) for loop in loops), default=1)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = []
    for arch in arguments.arch:
        problem = self_test(arch)
        if problem is not None:
            raise SystemExit(problem)
        for layer, extents in _LAYERS.items():
            for rule in ("mma_contraction", "window"):
                sketch = RULES[rule].sketch(StageForms(grouped(*extents)), gpu_request(device_for(arch)))
                results.append({"layer": layer, **examined(sketch.make(dict(sketch.choose())), arch)})
    print(format_table(list(results[0]), [list(one.values()) for one in results]))
    if arguments.out:
        save_results(arguments.out, "benchmarks.tile_sass", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
