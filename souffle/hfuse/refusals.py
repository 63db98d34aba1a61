"""What a kernel must not do to be fused, each with its place in the text and what would help.

A fused kernel's parts share one block, one grid and one pool of shared memory. What asks the hardware for these, past
the names that are rewritten (:mod:`souffle.hfuse.rewrite`), would get those of the fused kernel in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from souffle.emulator.text_scan import blank_comments
from souffle.hfuse.errors import FusionError
from souffle.hfuse.reach import Reach
from souffle.hfuse.returns import early_return
from souffle.hfuse.source import BARRIERS

__all__ = ["HEADERS", "demand_fusible"]

_REWRITTEN = ("threadIdx", "blockDim", "blockIdx", "gridDim", *sorted(BARRIERS))

HEADERS = frozenset(
    {
        *("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "device_launch_parameters.h", "device_functions.h"),
        *("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "math_constants.h", "vector_types.h"),
        *("vector_functions.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h", "sm_30_intrinsics.h"),
        *("sm_60_atomic_functions.h", "sm_61_intrinsics.h", "math_functions.h", "cuComplex.h"),
        *("assert.h", "float.h", "inttypes.h", "limits.h", "math.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h"),
        *("stdlib.h", "string.h", "time.h", "cassert", "cfloat", "cinttypes", "climits", "cmath", "cstddef", "cstdint"),
        *("cstdio", "cstdlib", "cstring", "algorithm", "array", "chrono", "fstream", "functional", "iomanip"),
        *("iostream", "limits", "memory", "numeric", "random", "sstream", "string", "tuple", "type_traits", "utility"),
        *("vector", "map", "stdexcept", "cuda_runtime_api"),
    }
)
"""Headers whose device functions neither wait nor ask which thread or block they run in."""

_NAMES = {
    "cooperative_groups": "groups of threads are told by the hardware's block; use __syncthreads(), warp shuffles and "
    "threadIdx instead",
    "this_thread_block": "it is the fused block; use __syncthreads() and threadIdx instead",
    "this_grid": "it is the fused grid; a kernel that waits for its whole grid is launched alone",
    "clusterDim": "clusters are of the fused kernel's blocks; launch this kernel alone",
    "clusterIdx": "clusters are of the fused kernel's blocks; launch this kernel alone",
    "__barrier_sync": "named barriers are those of the parts; use __syncthreads() instead",
    "__barrier_sync_count": "named barriers are those of the parts; use __syncthreads() instead",
    "cudaGridDependencySynchronize": "programmatic dependent launch is of the fused kernel; leave it out",
    "cudaTriggerProgrammaticLaunchCompletion": "programmatic dependent launch is of the fused kernel; leave it out",
}

_PTX = (
    (r"\bbar(?:rier)?\.(?!warp\b)", "named barriers are those of the parts; use __syncthreads() instead"),
    (r"%(?:%)?(?:n?tid|n?ctaid)\b", "it is the fused kernel's; use threadIdx, blockDim, blockIdx or gridDim instead"),
    (r"%(?:%)?n?warpid\b", "it is the fused kernel's; use threadIdx / 32 instead"),
    (r"%(?:%)?(?:dynamic|total|aggr)_smem_size\b", "it is the fused kernel's; pass the size as an argument"),
    (r"\bsetmaxnreg\b", "the register bound is the fused kernel's; leave it out"),
    (r"(?:^|[;{\s\"])exit\s*;", "a barrier of a part waits for threads that have left; use return"),
    (r"cluster|\bmapa\b", "clusters are of the fused kernel's blocks; launch this kernel alone"),
    (r"\bgriddepcontrol\b", "programmatic dependent launch is of the fused kernel; leave it out"),
    (r"\b(?:wgmma|tcgen05)\b", "a group of four warps begins where the part begins; launch this kernel alone"),
)


def demand_fusible(reach: Reach) -> None:
    """Refuse a kernel that cannot be one part of a fused kernel.

    Raises
    ------
    FusionError
        With file, line, the text there, and what would help.
    """
    source = reach.source
    for offset, what, why in _reasons(reach):
        raise FusionError(f"{source.place(offset)}: `{source.excerpt(offset)}`: {what}; {why}")


def _reasons(reach: Reach) -> Iterator[tuple[int, str, str]]:
    """Place, what stands there, and what would help, the gravest kind first."""
    yield from _statements(reach)
    yield from _unread(reach)
    yield from _headers(reach)
    yield from _names(reach)
    yield from _macros(reach)
    yield from _assembly(reach)
    yield from _signature(reach)
    early = early_return(reach)
    if early is not None:
        source = reach.source
        barrier = f"{source.place(early.barrier)} (`{source.excerpt(early.barrier)}`)"
        yield (
            early.start,
            f"some threads may leave the kernel here, before the barrier at {barrier}",
            "a barrier of some of a block's threads waits for those that have left: let all stay to the end and do "
            "nothing, under the opposite condition with the barrier outside of it, or return under a condition made "
            "of parameters, constants, blockIdx, gridDim and blockDim only",
        )


def _unread(reach: Reach) -> Iterator[tuple[int, str, str]]:
    for node in reach.nodes():
        if node.type == "ERROR" or node.is_missing:
            yield (
                node.start_byte,
                "the grammar cannot read this",
                "write it in a form that stands without the preprocessor: a macro that is part of a statement in full, "
                "a loop's body in braces",
            )


def _headers(reach: Reach) -> Iterator[tuple[int, str, str]]:
    for include in reach.source.includes:
        header = include.header.strip('<>"')
        if header.startswith("cooperative_groups"):
            yield include.start, "cooperative groups", _NAMES["cooperative_groups"]
        elif header not in HEADERS:
            yield (
                include.start,
                f"the header {header} is not one that is known to be free of barriers and thread indices",
                "what a header holds is not rewritten; put what the kernel needs of it into the file",
            )


def _names(reach: Reach) -> Iterator[tuple[int, str, str]]:
    for occurrence in reach.occurrences:
        if occurrence.node is None and not _in_used_macro(reach, occurrence.start):
            continue
        name = occurrence.name
        if name in _NAMES:
            yield occurrence.start, f"{name} cannot be given to one part of a block", _NAMES[name]
        elif name.startswith("__cluster"):
            yield occurrence.start, f"{name} cannot be given to one part of a block", _NAMES["clusterDim"]
        elif name.startswith("hfuse_"):
            yield occurrence.start, f"the name {name} begins as those that fusion adds", "give it another name"
        elif name == "std" and occurrence.node is not None and occurrence.node.parent.type == "namespace_definition":
            yield occurrence.start, "the namespace std is extended", "each part stands in a namespace of its own"


def _in_used_macro(reach: Reach, offset: int) -> bool:
    return any(m.start <= offset < m.end and m.name in reach.used for m in reach.source.macros)


def _statements(reach: Reach) -> Iterator[tuple[int, str, str]]:
    for node in reach.nodes():
        if node.type == "kernel_call_syntax":
            yield node.start_byte, "a kernel that launches kernels", "launch them from the host"
        elif node.type == "goto_statement" and re.match(rb"goto\s*\*", node.text):
            yield node.start_byte, "a computed goto", "use a switch"


def _assembly(reach: Reach) -> Iterator[tuple[int, str, str]]:
    # A string may come to its asm statement through a macro: where there is one, all strings are looked at.
    if not re.search(r"\b(?:asm|__asm__|__asm)\b", blank_comments(reach.source.text)):
        return
    texts = [(node.start_byte, node.text.decode()) for node in reach.nodes() if node.type == "string_literal"]
    texts += [
        (macro.start, " ".join(re.findall(r'"((?:\\.|[^"\\])*)"', macro.body)))
        for macro in reach.source.macros
        if macro.name in reach.used
    ]
    for offset, text in texts:
        for pattern, why in _PTX:
            match = re.search(pattern, text)
            if match is not None:
                yield offset, f"inline PTX with {match[0].strip(' ;{')!r}", why


def _macros(reach: Reach) -> Iterator[tuple[int, str, str]]:
    used = [macro for macro in reach.source.macros if macro.name in reach.used]
    for macro in used:
        if {"extern", "__shared__"} <= macro.mentioned:
            yield macro.start, "a dynamic shared array that a macro declares", "declare it where it is used"
    pasting = [macro for macro in used if "##" in macro.body]
    words = reach.used | {name for macro in pasting for name in macro.mentioned}
    for name in (*_REWRITTEN, *_NAMES) if pasting else ():
        pieces = [(name[:i], name[i:]) for i in range(1, len(name))]
        made = next((pair for pair in pieces if set(pair) <= words), None)
        if made is not None:
            yield (
                pasting[0].start,
                f"a macro that may paste {made[0]} and {made[1]} to {name}",
                f"write {name} out, or give {made[0]} or {made[1]} another name",
            )


def _signature(reach: Reach) -> Iterator[tuple[int, str, str]]:
    kernel, source = reach.kernel, reach.source
    head = source.slice(kernel.start, kernel.parameters.start_byte)
    if "__cluster_dims__" in head:
        yield kernel.start, "a kernel of clusters", "clusters are of the fused kernel's blocks; launch it alone"
    given = source.slice(kernel.parameters.start_byte, kernel.parameters.end_byte)
    templates = "" if kernel.template is None else source.slice(kernel.template.start_byte, kernel.template.end_byte)
    if "..." in given + templates:
        yield kernel.start, "a kernel of any number of parameters", "write the parameters out"
    types = {node.type for node in kernel.parameters.children if node.is_named and node.type != "comment"}
    if not types <= {"parameter_declaration"}:
        yield kernel.start, "parameters that are not plain declarations", "write a type and a name for each"
