"""Names that are valid in C and CUDA."""

from __future__ import annotations

import re

__all__ = ["identifier"]

_WORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const
consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long main
mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
reinterpret_cast requires restrict return short signed sizeof static static_assert static_cast struct switch
template this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
wchar_t xor xor_eq half uint int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t
threadIdx blockIdx blockDim gridDim warpSize abs acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh erf
erfc exp exp2 expm1 fabs floor fma fmax fmin fmod isfinite isinf isnan log log10 log1p log2 max min pow rint
round rsqrt select sin sinh sqrt tan tanh trunc where
"""
_RESERVED = frozenset(_WORDS.split())


def identifier(name: str) -> str:
    """`name` as a C identifier that is no keyword; different names may give the same one."""
    cleaned = re.sub(r"_+", "_", re.sub(r"[^0-9A-Za-z]", "_", name)).strip("_")
    if not cleaned or cleaned[0].isdigit() or cleaned in _RESERVED:
        cleaned = f"t_{cleaned}" if cleaned else "t"
    return cleaned
