"""Which loops nvcc unrolls that do not ask for it: instructions of machine code, by turns and length of a body.

``python -m benchmarks.unrolling [--arch sm_90]`` compiles one kernel for each case and runs nothing. What the cost
model counts as written (``souffle/cost/work.py``) rests on it.
"""

from __future__ import annotations

import argparse
import sys

from souffle.cli.output import format_table
from souffle.codegen.nvcc import compile_cubin
from souffle.cost.counting import INSTRUCTION_BYTES

TURNS = (2, 4, 8, 16, 32)

BODIES = {
    "multiply-add": ("x = x * x + {0}.5f;", 1, (4, 8, 16, 32, 64, 128, 256)),
    "erff": ("x = erff(x * {0}.25f);", 24, (1, 2, 4)),
}
"""A statement, the instructions that the cost model takes it for, and how many of it follow each other."""


def kernel(name: str, turns: int, statement: str, count: int) -> str:
    """A kernel whose threads pass through a loop, each statement of which needs the last."""
    body = " ".join(statement.format(number + 1) for number in range(count))
    return (
        f'extern "C" __global__ void {name}(const float* __restrict__ a, float* __restrict__ b) {{\n'
        f"  for (int t = 0; t < {turns}; ++t) {{\n"
        f"    float x = a[threadIdx.x * {turns} + t];\n"
        f"    {body}\n"
        f"    b[threadIdx.x + t * 1024] = x;\n"
        f"  }}\n}}\n"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    arguments = parser.parse_args()
    cases = [
        (f"loop{number}", body, turns, count)
        for number, (body, turns, count) in enumerate(
            (body, turns, count) for body, (_, _, counts) in BODIES.items() for turns in TURNS for count in counts
        )
    ]
    text = "".join(kernel(name, turns, BODIES[body][0], count) for name, body, turns, count in cases)
    used = compile_cubin(text, arguments.arch)[1]
    rows = []
    for name, body, turns, count in cases:
        once = count * BODIES[body][1]
        written = (used[name].code_bytes or 0) // INSTRUCTION_BYTES
        rows.append([body, turns, once, turns * once, written, f"{written / once:.1f}"])
    print(format_table(["body", "turns", "of a turn", "of all", "machine code", "over a turn's"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
