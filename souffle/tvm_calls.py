"""Calls of TVM without what its Python works out anew at each: the numbers of types, and the types of arguments.

The compiler makes some ten thousand walks over small expressions for a network, and as many steps of schedules. What
``tvm_ffi`` and ``tvm.s_tir`` do around such a call takes longer than the call. Results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

__all__ = [
    "PlainSchedule",
    "collect",
    "copied",
    "of_text",
    "structural_map",
    "structural_mutate",
    "structural_walk",
    "to_text",
]

_INNER_FIRST = int(tvm_ffi.structural.WalkOrder.POSTORDER)

Rule = tuple[type | tuple[type, ...], Callable[..., Any]]
"""Types of nodes, and what is called with each node of one of them."""

Rules = Rule | Sequence[Rule]
"""The first of several that has a node's type is called."""


def structural_walk(root: Any, rules: Rules) -> Any:
    """See ``tvm_ffi.structural_walk``: inner nodes before outer ones."""
    return tvm_ffi._ffi_api.StructuralWalk(root, _numbered(rules), [], _INNER_FIRST)


def structural_map(root: Any, rules: Rules) -> Any:
    """See ``tvm_ffi.structural_map``: inner nodes before outer ones."""
    return tvm_ffi._ffi_api.StructuralMap(root, _numbered(rules), [], _INNER_FIRST)


def structural_mutate(root: Any, rules: Rules) -> Any:
    """See ``tvm_ffi.structural_mutate``; what is called has two arguments, a node and the mutator."""
    return tvm_ffi._ffi_api.StructuralMutate(root, [(*rule, False) for rule in _numbered(rules)])


def collect(root: Any, kind: type) -> list[Any]:
    """All nodes of a type in `root`, inner before outer; repeated ones repeat."""
    found: list[Any] = []
    # Asked by the class itself: TVM's classes are abstract ones, and what is no instance of one is slow to tell.
    if type(root) in _LEAVES:
        return [root] if isinstance(root, kind) else found
    tvm_ffi._ffi_api.StructuralWalk(root, [(*_numbers(kind), found.append)], [], _INNER_FIRST)
    return found


def to_text(root: Any) -> str:
    """A node as JSON for this version of TVM alone, as ``tvm.ir.save_json`` gives it."""
    return tvm_ffi.serialization.to_json_graph_str(root)


def of_text(text: str) -> Any:
    """What :func:`to_text` was given. ``tvm.ir.load_json`` would first look for what older versions wrote."""
    return tvm_ffi.serialization.from_json_graph_str(text)


def copied(root: Any) -> Any:
    """A copy that has no node in common with `root`."""
    return of_text(to_text(root))


_LEAVES = (tirx.Var, tirx.IntImm)


def _numbered(rules: Rules) -> list[tuple[int, Callable[..., Any]]]:
    several = [rules] if isinstance(rules, tuple) and len(rules) == 2 and callable(rules[1]) else rules
    return [(number, called) for kinds, called in several for number in _numbers(kinds)]


@cache
def _numbers(kinds: type | tuple[type, ...]) -> tuple[int, ...]:
    each = kinds if isinstance(kinds, tuple) else (kinds,)
    types = (Any if kind is object else kind for kind in each)
    return tuple(tvm_ffi.core.TypeSchema.from_annotation(kind).origin_type_index for kind in types)


class PlainSchedule(s_tir.Schedule):
    """A schedule of TVM whose steps do not look at the Python types of their arguments, which the steps do again."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        # With a seed no device is opened for one; nothing is sampled.
        super().__init__.__wrapped__(self, func, seed=1, debug_mask="none", error_render_level="none")


for _name, _step in vars(s_tir.Schedule).items():
    if isinstance(_step, FunctionType) and hasattr(_step, "__wrapped__") and _name not in vars(PlainSchedule):
        setattr(PlainSchedule, _name, _step.__wrapped__)
