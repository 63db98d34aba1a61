"""From a seed to a network: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.fuzz import elementwise, heavy, movers, patterns, rare, selections
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.draft import Draft, Refused, Settings, Value
from benchmarks.fuzz.grammar import RECIPES

__all__ = ["RECIPE_MODULES", "Generated", "generate"]

RECIPE_MODULES = (elementwise, movers, heavy, patterns, rare, selections)
"""Importing them fills the register."""

_OPSETS = (13, 13, 14, 15, 16, 17, 17, 17, 18, 18, 19, 20, 20, 21, 21, 22, 23, 23, 24)
_MOST_OUTPUTS = 5
_WIDE = 30


@dataclass(frozen=True)
class Generated:
    """A network, and how many nodes the oracle refused on the way to it."""

    case: Case
    refused: int


def generate(seed: int, settings: Settings | None = None) -> Generated:
    """The network of a seed.

    Parameters
    ----------
    seed : int
        With equal settings, equal seeds give equal networks and inputs.
    settings : Settings, optional
    """
    settings = settings or Settings()
    rng = np.random.default_rng(seed)
    draft = Draft(rng, settings)
    draft.opset = draft.choice(_OPSETS)
    draft.float_dtype = draft.choice(settings.dtypes)
    draft.special = draft.chance(settings.specials)
    draft.zero_size = draft.chance(settings.zero_size)
    draft.odd_names = draft.chance(0.06)
    draft.large = draft.chance(settings.large)
    recipes = [
        recipe
        for name, recipe in sorted(RECIPES.items())
        if recipe.since <= draft.opset and name not in settings.without and (not settings.only or name in settings.only)
    ]
    weights = np.array([recipe.weight for recipe in recipes])
    draft.wide = draft.chance(settings.wide)
    wanted = min(draft.choice((1, 1, 2, 3, 4, 5, 6, 8, 10, settings.most_nodes)), settings.most_nodes)
    if draft.wide:
        wanted = draft.integer(_WIDE // 2, _WIDE)
    refused = attempts = 0
    while len(draft.nodes) < wanted and attempts < 12 * wanted + 20:
        attempts += 1
        chosen = recipes[int(rng.choice(len(recipes), p=weights / weights.sum()))]
        try:
            chosen.add(draft)
        except Refused:
            refused += 1
    if not any(node.op_type != "Constant" for node in draft.nodes):
        draft.emit("Identity", [draft.fresh(draft.float_dtype, (2, 3), constant=0)])
    return Generated(_finished(draft, seed), refused)


def _finished(draft: Draft, seed: int) -> Case:
    """The draft as a model: what nothing reads is an output, and now and then something else is too."""
    made = {name for node in draft.nodes if node.op_type != "Constant" for name in node.output}
    produced = [value for value in (*draft.values, *draft.selected) if value.name in made]
    outputs = [value for value in produced if value.name not in draft.read][-(_WIDE if draft.wide else _MOST_OUTPUTS) :]
    for value in produced:
        if value not in outputs and draft.chance(0.08):
            outputs.append(value)
    inputs = [value for value in draft.values if value.name in draft.inputs]
    if inputs and draft.chance(0.03):
        outputs.append(draft.choice(inputs))
    if draft.chance(0.03):
        draft.input(np.zeros(draft.shape(0, 2), np.float32))
    order = [outputs[i] for i in draft.rng.permutation(len(outputs))]
    used = _needed(draft.nodes, {value.name for value in order}) if draft.chance(0.9) else draft.nodes
    read = {name for node in used for name in node.input} | {value.name for value in order} | _captured(used)
    constants = {name for node in used if node.op_type == "Constant" for name in node.output}
    graph = helper.make_graph(
        used,
        f"seed{seed}",
        [_info(name, array) for name, array in draft.inputs.items() if name in read or draft.chance(0.02)],
        [_info(value.name, value.array) for value in order],
        [numpy_helper.from_array(a, n) for n, a in draft.initializers.items() if n in read and n not in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", draft.opset)], ir_version=10)
    kept = {info.name for info in graph.input}
    return Case(model, {name: array for name, array in draft.inputs.items() if name in kept}, f"seed {seed}")


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _captured(nodes: list[onnx.NodeProto]) -> set[str]:
    bodies = [a.g for node in nodes for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {name for body in bodies for node in body.node for name in node.input}


def _needed(nodes: list[onnx.NodeProto], names: set[str]) -> list[onnx.NodeProto]:
    """The nodes that make these tensors."""
    needed, kept = set(names), []
    for node in reversed(nodes):
        if needed & {*node.output}:
            kept.append(node)
            needed |= {*node.input} | _captured([node])
    return kept[::-1]


def described(values: list[Value]) -> str:
    """For people."""
    return ", ".join(f"{value.name} {value.dtype}{list(value.shape)}" for value in values)
