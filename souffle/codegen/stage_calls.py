"""How functions of stages stand in the text of kernels: copied or called, and with what they know of their thread.

What follows from the numbers of a thread, a tile and of blocks alone, a compiler works out once for all stages of a
kernel, before its loops, and keeps it in registers across all of them. What then lacks registers are the loops of
products inside, where it costs most: words are stored and loaded in every step, far away, as shared memory leaves the
L1 cache little. So each stage of a kernel of several begins with numbers that the compiler knows nothing of but their
range (:data:`OWN_TEXT`).

Code that several places call stays one copy. Its arguments take registers of their own, though, so that a function
which needs all that there are is copied to a few places; and so is what finds or leaves constants in the caller's
registers, or at places of shared memory that it knows, and the few copies of a prologue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import tvm
from tvm import tirx

from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.lower.kept_arrays import SCOPES
from souffle.schedule.lower.local_arrays import OWN_REGISTERS, local_words
from souffle.schedule.lower.prologues import PROLOGUE
from souffle.tvm_compat import Analyzer, collect

__all__ = ["OWN_FUNCTION", "OWN_TEXT", "TURNS_FUNCTION", "StageCalls"]

OWN_FUNCTION = "souffle_own_number"
"""``<most>(number)``: the number, which is not negative and no greater than `most`, one less than a power of two."""

TURNS_FUNCTION = "souffle_turns"
"""``(more, workers)``: how often each of some workers has one of ``more + 1`` tiles, at most."""

OWN_TEXT = f"""
template <int most> static __device__ __forceinline__ int {OWN_FUNCTION}(int number) {{
  asm volatile("" : "+r"(number));
  return number & most;
}}
static __device__ __forceinline__ int {TURNS_FUNCTION}(int more, int workers) {{
  asm volatile("" : "+r"(workers));
  return (more + workers) / workers;
}}
"""

_MOST_TILES = 2**30 - 1
"""The greatest number of a tile (:mod:`souffle.schedule.lower.device_function`)."""

_TURNS = re.compile(r"< \(\((\d+) \+ (\w+)\) / \2\);")
"""The end of a loop over tiles, as TVM writes it."""

_FEW_PLACES = 3
"""To which a function is copied."""


class StageCalls:
    """Which functions some kernels call, and how.

    Parameters
    ----------
    kernels : mapping of str to PrimFunc
    functions : mapping of str to PrimFunc
        May hold more than the kernels call.

    Attributes
    ----------
    callees : tuple of GlobalVar
        The functions that are called, in the order of their first calls.
    """

    def __init__(self, kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]) -> None:
        self._functions = functions
        self._counts: Counter[str] = Counter()
        callees: dict[str, tvm.ir.GlobalVar] = {}
        # By function, the greatest number of a thread where there are other stages in the kernel.
        self._beside: dict[str, int] = {}
        for kernel in kernels.values():
            calls = [call for call in collect(kernel.body, tvm.ir.Call) if isinstance(call.op, tvm.ir.GlobalVar)]
            for call in calls:
                callees.setdefault(str(call.op.name_hint), call.op)
            self._counts.update(str(call.op.name_hint) for call in calls)
            if len(calls) > 1:
                self._bound(kernel, calls)
        self.callees = tuple(callees.values())

    def _bound(self, kernel: tirx.PrimFunc, calls: list[tvm.ir.Call]) -> None:
        analyzer = Analyzer()
        for attribute in reversed(collect(kernel.body, tirx.AttrStmt)):
            if attribute.attr_key == "thread_extent":
                analyzer.bind(attribute.node.var, tvm.ir.Range(0, attribute.value))
        for bind in collect(kernel.body, tirx.Bind):
            analyzer.bind(bind.var, bind.value)
        for call in calls:
            name, most = str(call.op.name_hint), int(analyzer.const_int_bound(call.args[1]).max_value)
            self._beside[name] = max(self._beside.get(name, 0), most)

    def written(self, text: str) -> str:
        """A text as TVM writes it, with the functions as they are to be compiled."""
        for name in self._counts:
            few = _takes_kept(self._functions[name]) or PROLOGUE in self._functions[name].attrs
            copied = self._counts[name] == 1 or few or self._is_crowded(name)
            keyword = "__forceinline__" if copied else "__noinline__"
            text = text.replace(f'extern "C" __device__ void {name}(', f"static __device__ {keyword} void {name}(")
            if name in self._beside:
                text = self._with_own_numbers(text, name)
        return _TURNS.sub(rf"< {TURNS_FUNCTION}(\1, \2);", text) if self._beside else text

    def _is_crowded(self, name: str) -> bool:
        """Whether a function of few calls needs all registers that the threads of two blocks leave each other."""
        words = OWN_REGISTERS + local_words(self._functions[name])
        return self._counts[name] <= _FEW_PLACES and words > ASSUMED_REGISTERS

    def _with_own_numbers(self, text: str, name: str) -> str:
        most = (1 << self._beside[name].bit_length()) - 1
        tile, thread, *_ = (parameter.name for parameter in self._functions[name].params)
        pairs = ((tile, _MOST_TILES), (thread, most))
        own = "".join(f"  {number} = {OWN_FUNCTION}<{limit}>({number});\n" for number, limit in pairs)
        return re.sub(rf"(\bvoid {name}\([^;{{]*\) \{{\n)", lambda head: head[1] + own, text, count=1)


def _takes_kept(function: tirx.PrimFunc) -> bool:
    """Whether a function is given arrays of a thread."""
    return any(getattr(parameter.ty, "storage_scope", "") in SCOPES for parameter in function.params)
