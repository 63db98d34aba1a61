"""Kernels with a clock: their text once more, with a line before each statement that writes the time to memory.

What such a twin computes is the same; what it takes is a little more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CYCLES", "NANOSECONDS", "Twin", "stamped"]

CYCLES = "unsigned long long now = clock64();"
"""A clock of the multiprocessor: the finest there is, and no two of them agree."""
NANOSECONDS = """unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");"""
"""The device's clock, one for all blocks, in steps that the device chooses."""

_STAMP = """
static __device__ __forceinline__ void souffle_stamp(unsigned long long* stamps, int num_blocks, int* place) {
  if (threadIdx.x == 0) {
    %s
    *(volatile unsigned long long*)(stamps + (size_t)*place * num_blocks + blockIdx.x) = now;
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
_ARRIVAL = "souffle_grid_arrival"
"""A wait for the grid in two halves begins with what it declares."""
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


def stamped(text: str, clock: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """A module's text with clocks, and the labels of its kernels; each has one parameter more, before ``num_blocks``.

    Parameters
    ----------
    text : str
    clock : str
        What reads the time into ``now``: :data:`CYCLES` or :data:`NANOSECONDS`.

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
    return text[:at] + _STAMP.replace("%s", clock) + text[at:], labels


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
    """What a statement is: its stage, or what it calls; empty for one that only declares.

    A loop over tiles may call what reads or copies ahead of its stage, which stands last.
    """
    stages = _STAGE.findall(text)
    if stages:
        return stages[-1]
    names = [name for name in _NAME.findall(text) if name not in ("if", "for", "int", "sizeof", "alignas")]
    if _ARRIVAL in names:
        return _ARRIVAL
    declares = re.match(r"\s*(alignas|int|float|half|bool|uint|uchar|int64_t)\b", text)
    return "" if declares or not names else names[0]
