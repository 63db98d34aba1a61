"""Ensembles of decision trees (``ai.onnx.ml``): every node is compared, and each leaf looks whether its path is taken.

That is more comparisons than going down the trees takes, but none waits for another, and no address depends on data.
"""

from __future__ import annotations

import math
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
_MEMBER = 6
_MODE_NAMES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_AGGREGATES = (b"AVERAGE", b"SUM", b"MIN", b"MAX")
_TRANSFORMS = (b"NONE", b"SOFTMAX", b"LOGISTIC", b"SOFTMAX_ZERO", b"PROBIT")
# Beyond this the paths take more memory than they are worth.
_MOST_STEPS = 1 << 24


@dataclass(frozen=True)
class _Forest:
    """The nodes of all trees as arrays, and the leaves that each leads to.

    Attributes
    ----------
    features, modes : array of int
        What a node compares, and how.
    splits : array
        What it compares with.
    missing : array of bool
        Whether NaN goes where a comparison that holds goes.
    yes, no : list of int
        Where a node leads; leaves are counted on behind the nodes.
    roots : list of int
        Where each tree begins.
    members : array of [node, member], or None
        What a node of mode BRANCH_MEMBER compares with, filled up with NaN.
    votes : array of [leaf, target]
        What a leaf says of each target; the neutral element of the aggregation where it says nothing.
    """

    features: np.ndarray
    modes: np.ndarray
    splits: np.ndarray
    missing: np.ndarray
    yes: list[int]
    no: list[int]
    roots: list[int]
    members: np.ndarray | None
    votes: np.ndarray

    def paths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each way to a leaf its nodes, what each must have found (2: anything), and the leaf.

        Raises
        ------
        Obstacle
            If they are too many, or do not end.
        """
        found: list[tuple[tuple[tuple[int, int], ...], int]] = []
        open_ways: list[tuple[tuple[tuple[int, int], ...], int]] = [((), root) for root in self.roots[::-1]]
        steps, count = 0, len(self.modes)
        while open_ways:
            way, node = open_ways.pop()
            steps += len(way)
            if steps > _MOST_STEPS or len(way) > count:
                raise Obstacle(
                    "the paths through its trees are too many or too long, or do not end",
                    "give it fewer trees, or less deep ones",
                )
            if node >= count:
                found.append((way, node - count))
            else:
                open_ways += [((*way, (node, 0)), self.no[node]), ((*way, (node, 1)), self.yes[node])]
        depth = max((len(way) for way, _ in found), default=0)
        if depth * len(found) > _MOST_STEPS:
            raise Obstacle(
                f"its {len(found)} leaves lie up to {depth} deep, of which each step is kept", "give it fewer trees"
            )
        nodes, wanted = np.zeros((len(found), max(depth, 1)), "int32"), np.full((len(found), max(depth, 1)), 2, "int32")
        for row, (way, _) in enumerate(found):
            for column, (node, taken) in enumerate(way):
                nodes[row, column], wanted[row, column] = node, taken
        return nodes, wanted, np.array([leaf for _, leaf in found])


def _neutral(aggregate: bytes, dtype: np.dtype) -> float:
    kind = np.finfo(dtype)
    return {b"MIN": float(kind.max), b"MAX": float(kind.min)}.get(aggregate, 0.0)


def _array(node: onnx.NodeProto, name: str, default: Sequence | None = None) -> np.ndarray:
    value = attribute(node, name, default)
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _forest(node: onnx.NodeProto, dtype: np.dtype, aggregate: bytes) -> _Forest:
    """Of a ``TreeEnsemble``, whose leaves are numbered apart from its nodes."""
    modes, weights = _array(node, "nodes_modes"), _array(node, "leaf_weights").astype(dtype)
    count = len(modes)
    yes, no = (
        (np.where(_array(node, f"nodes_{side}leafs") != 0, count, 0) + _array(node, f"nodes_{side}nodeids")).tolist()
        for side in ("true", "false")
    )
    votes = np.full((len(weights), attribute(node, "n_targets")), _neutral(aggregate, dtype), dtype)
    votes[np.arange(len(weights)), _array(node, "leaf_targetids")] = weights
    return _Forest(
        _array(node, "nodes_featureids"),
        modes,
        _array(node, "nodes_splits").astype(dtype),
        _array(node, "nodes_missing_value_tracks_true", [0] * count).astype(bool),
        yes,
        no,
        _array(node, "tree_roots").tolist(),
        _members(modes, _array(node, "membership_values", ()).astype(dtype)),
        votes,
    )


def _members(modes: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """The sets of the nodes that have one; `values` names them in the order of the nodes, with NaN behind each."""
    nodes = np.flatnonzero(modes == _MEMBER)
    sets: list[list[float]] = [[]]
    for value in values.tolist():
        if math.isnan(value):
            sets.append([])
        else:
            sets[-1].append(value)
    sets = sets if sets[-1] else sets[:-1]
    if len(nodes) != len(sets):
        raise Obstacle(
            f"{len(nodes)} of its nodes are of mode BRANCH_MEMBER, and membership_values has {len(sets)} sets",
            "give it a set for each, with NaN behind it",
        )
    if not sets:
        return None
    members = np.full((len(modes), max(1, *map(len, sets))), np.nan, values.dtype)
    for place, row in zip(nodes, sets, strict=True):
        members[place, : len(row)] = row
    return members


def _forest_of_regressor(node: onnx.NodeProto, aggregate: bytes) -> _Forest:
    """Of a ``TreeEnsembleRegressor``, which numbers nodes and leaves together, anew in each tree."""
    trees, numbers = _array(node, "nodes_treeids").tolist(), _array(node, "nodes_nodeids").tolist()
    names = [name.decode() for name in attribute(node, "nodes_modes")]
    unknown = sorted(set(names) - {"LEAF", *_MODE_NAMES})
    if unknown:
        raise Obstacle(f"a node is of mode {unknown[0]}", f"the modes are {', '.join(_MODE_NAMES)} and LEAF")
    dtype, inner = np.dtype("float32"), [k for k, name in enumerate(names) if name != "LEAF"]
    leaves = [k for k, name in enumerate(names) if name == "LEAF"]
    place = {(trees[k], numbers[k]): number for number, k in enumerate([*inner, *leaves])}
    yes, no = (
        [place[trees[k], child] for k, child in enumerate(_array(node, name).tolist()) if names[k] != "LEAF"]
        for name in ("nodes_truenodeids", "nodes_falsenodeids")
    )
    votes = np.full((len(leaves), attribute(node, "n_targets", 1)), _neutral(aggregate, dtype), dtype)
    weights = _array(node, _as_tensor(node, "target_weights")).astype(dtype)
    keys = zip(_array(node, "target_treeids").tolist(), _array(node, "target_nodeids").tolist(), strict=True)
    for key, target, weight in zip(keys, _array(node, "target_ids").tolist(), weights, strict=True):
        leaf = place[key] - len(inner)
        if leaf < 0:
            raise Obstacle(
                f"node {key[1]} of tree {key[0]} has a weight and is no leaf", "give weights to leaves alone"
            )
        votes[leaf, target] = weight if aggregate in (b"MIN", b"MAX") else votes[leaf, target] + weight
    led_to = {*yes, *no}
    return _Forest(
        _array(node, "nodes_featureids")[inner],
        np.array([_MODE_NAMES.index(names[k]) for k in inner], "int64"),
        _array(node, _as_tensor(node, "nodes_values")).astype(dtype)[inner],
        _array(node, "nodes_missing_value_tracks_true", [0] * len(names)).astype(bool)[inner],
        yes,
        no,
        [k for k in range(len(names)) if k not in led_to],
        None,
        votes,
    )


def _as_tensor(node: onnx.NodeProto, name: str) -> str:
    """The attribute that holds `name`, as a list or as a tensor."""
    return f"{name}_as_tensor" if attribute(node, f"{name}_as_tensor") is not None else name


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
    (rows, columns), dtype = operands.shape(0), operands.dtype(0)
    default = b"SUM" if node.op_type.endswith("Regressor") else 1
    aggregate = attribute(node, "aggregate_function", default)
    aggregate = aggregate if isinstance(aggregate, bytes) else _AGGREGATES[aggregate]
    wide = "float64" if dtype == "float64" else "float32"
    base = np.zeros(0)
    if node.op_type.endswith("Regressor"):
        forest = _forest_of_regressor(node, aggregate)
        base = _array(node, _as_tensor(node, "base_values"), ())
    else:
        forest = _forest(node, np.dtype(dtype), aggregate)
    if forest.features.max(initial=0) >= columns:
        raise Obstacle(f"a node compares feature {forest.features.max()} of {columns}", "give it all features")
    nodes, wanted, leaves = forest.paths()
    trees, targets = len(forest.roots), forest.votes.shape[1]
    path, taken, votes = (operands.table(a) for a in (nodes, wanted, forest.votes[leaves].astype(wide)))
    tests = _compared(operands, forest, wide) if len(forest.modes) else None

    def reached(n: PrimExpr, leaf: PrimExpr) -> PrimExpr:
        k = te.reduce_axis((0, nodes.shape[1]), name="k")
        follows = tirx.Or(taken(leaf, k) == 2, tests(n, path(leaf, k)) == taken(leaf, k))
        return te.min(tirx.Select(follows, int_imm(1), int_imm(0)), axis=k)

    there = te.compute((rows, len(leaves)), reached, name="reached") if tests is not None else None
    combine = {b"MIN": te.min, b"MAX": te.max}.get(aggregate, te.sum)
    neutral = tirx.const(_neutral(aggregate, np.dtype(wide)), wide)

    def total(n: PrimExpr, target: PrimExpr) -> PrimExpr:
        leaf = te.reduce_axis((0, len(leaves)), name="leaf")
        vote = votes(leaf, target)
        return combine(vote if there is None else tirx.Select(there(n, leaf) == 1, vote, neutral), axis=leaf)

    result = te.compute((rows, targets), total, name="votes")
    share = tirx.const(trees if aggregate == b"AVERAGE" else 1, wide)
    added = operands.table(base.astype(wide)) if base.any() else None
    out = "float32" if node.op_type.endswith("Regressor") else dtype

    def finished(n: PrimExpr, target: PrimExpr) -> PrimExpr:
        value = result(n, target) / share if aggregate == b"AVERAGE" else result(n, target)
        value = value if added is None else value + added(target)
        return value if out == wide else tirx.Cast(out, value)

    return [te.compute((rows, targets), finished, name="ensemble")]


def _compared(operands: NodeOperands, forest: _Forest, wide: str) -> te.Tensor:
    """Of each row and node, 1 where the comparison holds and else 0."""
    data, dtype, rows = operands.tensor(0), operands.dtype(0), operands.shape(0)[0]
    count, modes = len(forest.modes), np.unique(forest.modes)
    features, mode_of = (operands.table(array.astype("int32")) for array in (forest.features, forest.modes))
    splits = operands.table(forest.splits.astype(wide))
    missing = operands.table(forest.missing.astype("int32")) if forest.missing.any() else None

    def value(n: PrimExpr, node: PrimExpr) -> PrimExpr:
        element = data(n, features(node))
        return element if dtype == wide else tirx.Cast(wide, element)

    member = None
    if forest.members is not None:
        table = operands.table(forest.members.astype(wide))

        def among(n: PrimExpr, node: PrimExpr) -> PrimExpr:
            k = te.reduce_axis((0, forest.members.shape[1]), name="k")
            return te.max(tirx.Select(tirx.EQ(value(n, node), table(node, k)), int_imm(1), int_imm(0)), axis=k)

        member = te.compute((rows, count), among, name="member")

    def holds(n: PrimExpr, node: PrimExpr) -> PrimExpr:
        def test(mode: int) -> PrimExpr:
            return member(n, node) == 1 if mode == _MEMBER else _MODES[mode](value(n, node), splits(node))

        found = test(int(modes[-1]))
        for mode in modes[:-1].tolist():
            found = tirx.Select(mode_of(node) == mode, test(mode), found)
        if missing is not None:
            found = tirx.Or(found, tirx.And(missing(node) != 0, tirx.isnan(value(n, node))))
        return tirx.Select(found, int_imm(1), int_imm(0))

    return te.compute((rows, count), holds, name="comparisons")
