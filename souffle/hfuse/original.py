"""A kernel alone, as it was before fusion: what fused kernels are compared with and measured against."""

from __future__ import annotations

import re
from dataclasses import dataclass

from souffle.emulator.text_scan import matching
from souffle.hfuse.edits import applied, device_function, left_out, plain_linkage, squeezed
from souffle.hfuse.parameters import BUILTIN_WORDS, kernel_parameters, template_arguments
from souffle.hfuse.part import Part
from souffle.hfuse.shared_arrays import POOL_DECLARATION, pool_declarations, pool_pointers

__all__ = ["Original", "original"]

_ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__maxnreg__)\s*(?=\()")


@dataclass(frozen=True)
class Original:
    """CUDA text with one kernel to launch.

    Attributes
    ----------
    text : str
    name : str
        The kernel's. In machine code it is mangled, unless the text says ``extern "C"``.
    unchanged : bool
        Whether the text is that of the file.
    """

    text: str
    name: str
    unchanged: bool


def original(part: Part, *, wrapped: bool = False) -> Original:
    """The kernel of a part, alone.

    The file as it is, where the CPU device can compile that. Where it holds functions of the host, or the kernel is a
    template or in a namespace, what the kernel does not need is left out, and it is called by a kernel of the same
    launch bounds that has no template parameters.

    Parameters
    ----------
    part : Part
    wrapped : bool
        Call it so in any case: the name of the calling kernel is not mangled in machine code. The kernel itself is
        inlined, and the code is the same.
    """
    reach, source, kernel = part.reach, part.reach.source, part.reach.kernel
    plain = kernel.template is None and all(function.device and not function.scope for function in source.functions)
    plain = plain and not any("__global__" in macro.mentioned for macro in source.macros)
    if plain and not wrapped:
        return Original(source.text, kernel.name, True)
    template = template_arguments(source, kernel, part.kernel)
    parameters = kernel_parameters(source, kernel, template)
    edits = [*left_out(reach), *device_function(reach), *plain_linkage(reach)]
    scoped = any(function.scope for function in reach.functions)
    if scoped:
        # In a namespace, an array of dynamic shared memory would be a name of its own.
        edits += pool_pointers(reach, 0)
    body = squeezed(applied(source.data, edits))
    head = source.slice(kernel.start, kernel.declarator.start_byte)
    attributes = [head[m.start() : matching(head, m.end()) + 1] for m in _ATTRIBUTE.finditer(head)]
    name = f"alone_{kernel.name}"
    scope = "::".join(kernel.scope)
    given = part.kernel.partition("<")
    arguments = f"<{given[2]}" if given[1] else "<>" if template else ""
    callee = kernel.name + arguments
    lines = [f"using {p.base} = {p.alias};" for p in parameters if p.alias]
    # Arguments of a template may be names of the kernel's namespace.
    if not set(re.findall(r"[A-Za-z_]\w*", arguments)) <= BUILTIN_WORDS:
        declared = ", ".join(p.declared(p.name, "") for p in parameters)
        passed = ", ".join(p.name for p in parameters)
        lines.append(f"__device__ __forceinline__ void hfuse_run({declared}) {{ {callee}({passed}); }}")
        callee = "hfuse_run"
    for inner in reversed(kernel.scope if lines else ()):
        lines = [f"namespace {inner} {{", *lines, "}"]
    declared = ", ".join(p.declared(p.name, scope) for p in parameters)
    called = f"{scope}::{callee}" if scope else callee
    wrapper = [
        f'extern "C" __global__ void {" ".join([*attributes, name])}({declared}) {{',
        f"  {called}({', '.join(p.name for p in parameters)});",
        "}",
    ]
    headers = dict.fromkeys(include.header for include in source.includes)
    pool = [POOL_DECLARATION] if scoped and pool_declarations(reach) else []
    text = "\n".join([*(f"#include {header}" for header in headers), *pool, body, *lines, *wrapper]) + "\n"
    return Original(text, name, False)
