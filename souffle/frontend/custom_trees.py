"""Ensembles of decision trees (``ai.onnx.ml``): all trees go down one level with each TE."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines, int_imm
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Scope, Value
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

# The modes of a node by their numbers in ONNX.
_MODES = (tirx.LE, tirx.LT, tirx.GE, tirx.GT, tirx.EQ, tirx.NE)
_EQUAL, _MEMBER = 4, 6
_MODE_NAMES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_AGGREGATES = (b"AVERAGE", b"SUM", b"MIN", b"MAX")
_TRANSFORMS = (b"NONE", b"SOFTMAX", b"LOGISTIC", b"SOFTMAX_ZERO", b"PROBIT")
# Each level of the deepest tree is a step of its own.
_MOST_LEVELS = 256


@dataclass(frozen=True)
class _Forest:
    """Trees as arrays over the nodes of all of them; a leaf is its own child.

    Attributes
    ----------
    features, modes, yes, no : array of int
        What a node compares, how, and where it leads.
    splits : array
        What it compares with.
    missing : array of bool
        Whether NaN goes where a comparison that holds goes.
    roots : array of int
        Where each tree begins.
    votes : array of [node, target]
        What a leaf says of each target; the neutral element of the aggregation where it says nothing.
    """

    features: np.ndarray
    modes: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    splits: np.ndarray
    missing: np.ndarray
    roots: np.ndarray
    votes: np.ndarray

    def levels(self) -> int:
        """How many comparisons there are from a root to a leaf, at most.

        Raises
        ------
        Obstacle
            If a path does not end.
        """
        front, levels = np.unique(self.roots), 0
        while True:
            onward = np.unique(np.concatenate([self.yes[front], self.no[front]]))
            onward = onward[(self.yes[onward] != onward) | (self.no[onward] != onward)]
            inner = front[(self.yes[front] != front) | (self.no[front] != front)]
            if not inner.size:
                return levels
            levels += 1
            if levels > _MOST_LEVELS:
                raise Obstacle(
                    f"a path through its trees is of more than {_MOST_LEVELS} comparisons, each a step of its own",
                    "give it trees that are less deep, and whose nodes do not lead back",
                )
            front = onward


def _neutral(aggregate: bytes, dtype: np.dtype) -> float:
    kind = np.finfo(dtype)
    return {b"MIN": float(kind.max), b"MAX": float(kind.min)}.get(aggregate, 0.0)


def _array(node: onnx.NodeProto, name: str, default: Sequence | None = None) -> np.ndarray:
    value = attribute(node, name, default)
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _forest(node: onnx.NodeProto, dtype: np.dtype, aggregate: bytes) -> _Forest:
    """Of a ``TreeEnsemble``, whose leaves are numbered apart from its nodes."""
    modes, splits = _array(node, "nodes_modes"), _array(node, "nodes_splits").astype(dtype)
    count, weights = len(modes), _array(node, "leaf_weights").astype(dtype)
    features, missing = _array(node, "nodes_featureids"), _array(node, "nodes_missing_value_tracks_true", [0] * count)
    yes, no = (
        np.where(_array(node, f"nodes_{side}leafs") != 0, count, 0) + _array(node, f"nodes_{side}nodeids")
        for side in ("true", "false")
    )
    votes = np.full((count + len(weights), attribute(node, "n_targets")), _neutral(aggregate, dtype), dtype)
    votes[count + np.arange(len(weights)), _array(node, "leaf_targetids")] = weights
    own, none = count + np.arange(len(weights)), np.zeros(len(weights), "int64")
    forest = _Forest(
        np.concatenate([features, none]),
        np.concatenate([modes, none]),
        np.concatenate([yes, own]),
        np.concatenate([no, own]),
        np.concatenate([splits, none.astype(dtype)]),
        np.concatenate([missing.astype(bool), none.astype(bool)]),
        _array(node, "tree_roots"),
        votes,
    )
    return _without_sets(forest, _array(node, "membership_values", ()).astype(dtype))


def _without_sets(forest: _Forest, members: np.ndarray) -> _Forest:
    """Membership in a set as equality with one member after the other."""
    nodes = np.flatnonzero(forest.modes == _MEMBER)
    sets = [list(group) for end, group in itertools.groupby(members.tolist(), key=np.isnan) if not end]
    if len(nodes) != len(sets):
        raise Obstacle(
            f"{len(nodes)} of its nodes are of mode BRANCH_MEMBER, and membership_values has {len(sets)} sets",
            "give it a set for each, with NaN behind it",
        )
    columns = [list(getattr(forest, name)) for name in ("features", "modes", "yes", "no", "splits", "missing")]
    _, modes, _, no, splits, _ = columns
    votes = [forest.votes]
    for place, values in zip(nodes, sets, strict=True):
        modes[place], splits[place], last = _EQUAL, values[0], no[place]
        for value in values[1:]:
            for column in columns:
                column.append(column[place])
            no[place] = place = len(modes) - 1
            splits[place] = value
            votes.append(np.zeros_like(forest.votes[:1]))
        no[place] = last
    arrays = [np.asarray(column, before.dtype) for column, before in zip(columns, _columns(forest), strict=True)]
    return _Forest(*arrays, forest.roots, np.concatenate(votes))


def _columns(forest: _Forest) -> tuple[np.ndarray, ...]:
    return (forest.features, forest.modes, forest.yes, forest.no, forest.splits, forest.missing)


def _forest_of_regressor(node: onnx.NodeProto, aggregate: bytes) -> _Forest:
    """Of a ``TreeEnsembleRegressor``, whose nodes are numbered anew in each tree."""
    trees, numbers = _array(node, "nodes_treeids").tolist(), _array(node, "nodes_nodeids").tolist()
    place = {key: k for k, key in enumerate(zip(trees, numbers, strict=True))}
    names = [name.decode() for name in attribute(node, "nodes_modes")]
    dtype = np.dtype("float32")
    leaf = np.array([name == "LEAF" for name in names])
    unknown = sorted(set(names) - {"LEAF", *_MODE_NAMES})
    if unknown:
        raise Obstacle(f"a node is of mode {unknown[0]}", f"the modes are {', '.join(_MODE_NAMES)} and LEAF")
    yes, no = (
        np.array([k if leaf[k] else place[trees[k], child] for k, child in enumerate(_array(node, name).tolist())])
        for name in ("nodes_truenodeids", "nodes_falsenodeids")
    )
    given = "target_weights_as_tensor" if attribute(node, "target_weights_as_tensor") is not None else "target_weights"
    weights = _array(node, given).astype(dtype)
    votes = np.full((len(names), attribute(node, "n_targets", 1)), _neutral(aggregate, dtype), dtype)
    keys = zip(_array(node, "target_treeids").tolist(), _array(node, "target_nodeids").tolist(), strict=True)
    for key, target, weight in zip(keys, _array(node, "target_ids").tolist(), weights, strict=True):
        before = votes[place[key], target]
        votes[place[key], target] = weight if aggregate in (b"MIN", b"MAX") else before + weight
    splits = "nodes_values_as_tensor" if attribute(node, "nodes_values_as_tensor") is not None else "nodes_values"
    led_to = set(yes[~leaf].tolist()) | set(no[~leaf].tolist())
    return _Forest(
        np.where(leaf, 0, _array(node, "nodes_featureids")),
        np.array([0 if name == "LEAF" else _MODE_NAMES.index(name) for name in names]),
        yes,
        no,
        _array(node, splits).astype(dtype),
        _array(node, "nodes_missing_value_tracks_true", [0] * len(names)).astype(bool),
        np.array([k for k in range(len(names)) if k not in led_to]),
        votes,
    )


@special("ai.onnx.ml::TreeEnsemble", "ai.onnx.ml::TreeEnsembleRegressor")
def _transformed(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    kind = attribute(node, "post_transform", b"NONE")
    kind = kind if isinstance(kind, bytes) else _TRANSFORMS[kind]
    if kind == b"NONE":
        return None
    if kind not in (b"SOFTMAX", b"LOGISTIC"):
        raise Obstacle(f"its attribute post_transform is {kind.decode()}", "NONE, SOFTMAX and LOGISTIC are supported")
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    plain.attribute.remove(next(a for a in plain.attribute if a.name == "post_transform"))
    (scores,) = interpreter.primitive(plain, inputs, scope.opsets)
    write = NodeWriter(interpreter, node)
    return [write("Softmax", scores, axis=-1) if kind == b"SOFTMAX" else write("Sigmoid", scores)]


@defines("ai.onnx.ml::TreeEnsemble", "ai.onnx.ml::TreeEnsembleRegressor")
def _tree_ensemble(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, (rows, columns), dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    default = b"SUM" if node.op_type.endswith("Regressor") else 1
    aggregate = attribute(node, "aggregate_function", default)
    aggregate = aggregate if isinstance(aggregate, bytes) else _AGGREGATES[aggregate]
    wide = "float64" if dtype == "float64" else "float32"
    base = np.zeros(0)
    if node.op_type.endswith("Regressor"):
        forest = _forest_of_regressor(node, aggregate)
        given = "base_values_as_tensor" if attribute(node, "base_values_as_tensor") is not None else "base_values"
        base = _array(node, given, ())
    else:
        forest = _forest(node, np.dtype(dtype), aggregate)
    if forest.features.max(initial=0) >= columns:
        raise Obstacle(
            f"a node compares feature {forest.features.max()}, and the input has {columns}", "give it all features"
        )
    trees, targets = len(forest.roots), forest.votes.shape[1]
    features, yes, no, roots = (
        operands.table(array.astype("int32")) for array in (forest.features, forest.yes, forest.no, forest.roots)
    )
    splits = operands.table(forest.splits.astype(wide))
    modes = np.unique(forest.modes)
    mode_of = operands.table(forest.modes.astype("int32")) if len(modes) > 1 else None
    missing = operands.table(forest.missing.astype("int32")) if forest.missing.any() else None

    def beginning(n: PrimExpr, t: PrimExpr) -> PrimExpr:
        return roots(t)

    place = te.compute((rows, trees), beginning, name="roots")
    for level in range(forest.levels()):
        place = _one_level_down(place, data, features, splits, mode_of, modes, missing, yes, no, wide, level)
    votes = operands.table(forest.votes.astype(wide))
    combine = {b"MIN": te.min, b"MAX": te.max}.get(aggregate, te.sum)

    def total(n: PrimExpr, target: PrimExpr) -> PrimExpr:
        t = te.reduce_axis((0, trees), name="t")
        return combine(votes(place(n, t), target), axis=t)

    result = te.compute((rows, targets), total, name="votes")
    share = tirx.const(trees if aggregate == b"AVERAGE" else 1, wide)
    added = operands.table(base.astype(wide)) if base.any() else None

    def finished(n: PrimExpr, target: PrimExpr) -> PrimExpr:
        value = result(n, target) / share if aggregate == b"AVERAGE" else result(n, target)
        value = value if added is None else value + added(target)
        out = "float32" if node.op_type.endswith("Regressor") else dtype
        return value if out == wide else tirx.Cast(out, value)

    return [te.compute((rows, targets), finished, name="ensemble")]


def _one_level_down(
    place: te.Tensor,
    data: te.Tensor,
    features: te.Tensor,
    splits: te.Tensor,
    mode_of: te.Tensor | None,
    modes: np.ndarray,
    missing: te.Tensor | None,
    yes: te.Tensor,
    no: te.Tensor,
    wide: str,
    level: int,
) -> te.Tensor:
    dtype = str(data.dtype)

    def holds(n: PrimExpr, t: PrimExpr) -> PrimExpr:
        at = place(n, t)
        value = data(n, features(at))
        value = value if dtype == wide else tirx.Cast(wide, value)
        split = splits(at)
        test = _MODES[modes[-1]](value, split)
        for mode in modes[:-1][::-1]:
            test = tirx.Select(mode_of(at) == int(mode), _MODES[mode](value, split), test)
        if missing is not None:
            test = tirx.Or(test, tirx.And(missing(at) != 0, tirx.isnan(value)))
        return tirx.Select(test, int_imm(1), int_imm(0))

    test = te.compute(place.shape, holds, name=f"test{level}")
    return te.compute(
        place.shape,
        lambda n, t: tirx.Select(test(n, t) != 0, yes(place(n, t)), no(place(n, t))),
        name=f"level{level}",
    )
