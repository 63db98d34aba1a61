"""What is asked into the L2 cache: all of a range but less than 16 bytes, once, by whatever grid."""

from __future__ import annotations

import re

import numpy as np
import pytest

from souffle.codegen.device_functions import with_device_functions
from souffle.emulator import compile_text

_KERNEL = """
static __device__ void souffle_asked(unsigned char* seen, size_t at, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) seen[at + i] += 1;
}
extern "C" __global__ void ask(unsigned char* seen, const float* data, int bytes, int num_blocks) {
  souffle_prefetch_l2(data, (int64_t)bytes, (int)blockIdx.x, (int)threadIdx.x, num_blocks);
}
"""


def _counting() -> str:
    """The text in which each request is a count of the bytes that are asked for."""
    request = r'asm volatile\("cp\.async\.bulk\.prefetch[^:]*:\s*:\s*"l"\((.*?)\), "r"\((.*?)\)\);'
    counted = r"souffle_asked(seen, (\1) - (size_t)data, \2);"
    text, count = re.subn(request, counted, with_device_functions(_KERNEL), flags=re.DOTALL)
    assert count == 1
    text = re.sub(r"(int souffle_prefetch_l2\()const void", r"\1unsigned char* seen, const void", text)
    text = text.replace("souffle_prefetch_l2(data,", "souffle_prefetch_l2(seen, data,")
    first = text.index("static __device__ __forceinline__ int souffle_prefetch_l2")
    head, own, rest = text[:first], *text[first:].split("static __device__ void souffle_asked", 1)
    body, _, tail = rest.partition("\n}\n")
    return f"{head}static __device__ void souffle_asked{body}\n}}\n{own}{tail}"


@pytest.mark.parametrize("blocks", [1, 7, 132, 500])
def test_each_byte_is_asked_for_once(blocks: int) -> None:
    """Of few bytes too, which are no block's part of 128: a request of none would be made for ever."""
    module = compile_text(_counting())
    for nbytes in (4, 16, 60, 64, 100, 128, 129, 4096, 16384, 16400, 30001):
        seen, data = np.zeros(nbytes + 16, np.uint8), np.zeros(nbytes // 4 + 8, np.float32)
        data = data[-data.ctypes.data % 16 // 4 :]
        arguments = [seen, data, nbytes, blocks]
        module.launch("ask", grid=(blocks, 1, 1), block=(32, 1, 1), args=arguments, timeout_seconds=10)
        whole = nbytes & ~15
        assert (seen[:whole] == 1).all() and not seen[whole:].any(), nbytes
