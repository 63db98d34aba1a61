"""One name for each function of numbers, called in a definition or in what was lowered for CUDA."""

from __future__ import annotations

__all__ = ["OF_INTEGERS", "function_name", "only_calculates"]

_FUNCTIONS = frozenset(
    {
        *("exp", "exp2", "exp10", "expm1", "log", "log2", "log10", "log1p", "erf", "tanh", "tan", "sin", "cos"),
        *("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "sqrt", "rsqrt", "cbrt", "pow"),
        *("floor", "ceil", "trunc", "round", "nearbyint", "rint", "fabs", "fmod", "copysign", "hypot", "nextafter"),
        *("ldexp", "lgamma", "tgamma", "erfc", "popcount", "clz"),
    }
)
"""Functions that are taken for random ones."""

OF_INTEGERS = ("popcount", "clz")
"""Those that are given integers."""

_ARITHMETIC = frozenset({"fmaf", "fma", "__fmaf_rn", "fmaxf", "fmax", "__hmax", "fminf", "fmin", "__hmin", "sigmoid"})
"""Functions that are no random ones, being sums, products or choices."""

_SAME = {"nearbyint": "round", "rint": "round", "abs": "fabs", "popc": "popcount", "popcll": "popcount", "clzll": "clz"}
"""What CUDA calls otherwise than TensorIR (TVM's rules for CUDA, ``intrin_rule_cuda.cc``)."""


def function_name(name: str) -> str | None:
    """One name for a function of TensorIR and what stands for it in CUDA: ``tirx.exp``, ``expf``, ``__expf``, ``hexp``.

    ``None`` if it is none of those.
    """
    bare = name.removeprefix("tirx.").removeprefix("prim.").removeprefix("__")
    for candidate in (bare, bare.removesuffix("f"), bare.removeprefix("h"), bare.removeprefix("h").removeprefix("2")):
        known = _SAME.get(candidate, candidate)
        if known in _FUNCTIONS:
            return known
    return None


def only_calculates(name: str) -> bool:
    """Whether a function that the text calls by this name is one of CUDA's that touch no memory."""
    bare = name.removeprefix("tirx.").removeprefix("cuda.")
    return bare in _ARITHMETIC or function_name(name) is not None
