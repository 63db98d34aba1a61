"""Multi-gate mixture of experts: shared experts, and for each task a softmax gate over them and a tower."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, gemm

__all__ = ["SIZES", "MmoeConfig", "build_mmoe"]


@dataclass(frozen=True)
class MmoeConfig:
    """Input features, experts, units of each expert, tasks, units of a tower's hidden layer, and rows of a batch."""

    features: int
    experts: int
    units: int
    tasks: int
    tower: int
    batch: int = 1


SIZES = {
    "paper": MmoeConfig(features=100, experts=8, units=16, tasks=2, tower=8),
    "tiny": MmoeConfig(features=10, experts=4, units=4, tasks=2, tower=4),
}


def build_mmoe(config: MmoeConfig, seed: int) -> ModelProto:
    """Build the network: ``input`` (batch, features); ``task_0``, ``task_1``, ... (batch, 1), each a probability."""
    b = GraphBuilder("mmoe", seed)
    x = b.input("input", (config.batch, config.features))
    experts = []
    for expert in range(config.experts):
        with b.scope("experts", f"experts.{expert}"):
            with b.scope(f"experts.{expert}.0"):
                y = gemm(b, x, config.features, config.units)
            with b.scope(f"experts.{expert}.1"):
                experts.append(b.node("Relu", y))
    stacked = b.node("Concat", *(b.node("Unsqueeze", y, b.constant([1])) for y in experts), axis=1)
    for task in range(config.tasks):
        with b.scope("gates", f"gates.{task}"):
            gate = _gate(b, x, config)
        weighted = b.node("Mul", b.node("Unsqueeze", gate, b.constant([-1])), stacked)
        mixture = b.node("ReduceSum", weighted, b.constant([1]), keepdims=0)
        with b.scope("towers", f"towers.{task}"):
            result = _tower(b, mixture, config, f"towers.{task}")
        b.output(result, f"task_{task}", (config.batch, 1))
    return b.model()


def _gate(b: GraphBuilder, x: str, config: MmoeConfig) -> str:
    kernel = b.parameter("kernel", b.normal((config.features, config.experts), 1.0 / math.sqrt(config.features)))
    bias = b.parameter("bias", b.normal((config.experts,), 0.1))
    return b.node("Softmax", b.node("Add", b.node("MatMul", x, kernel), bias), axis=-1)


def _tower(b: GraphBuilder, x: str, config: MmoeConfig, module: str) -> str:
    with b.scope(f"{module}.0"):
        # Averaging over the experts shrinks their outputs; the gain makes up for it.
        x = gemm(b, x, config.units, config.tower, gain=2.0 * AFTER_RELU)
    with b.scope(f"{module}.1"):
        x = b.node("Relu", x)
    with b.scope(f"{module}.2"):
        x = gemm(b, x, config.tower, 1, gain=AFTER_RELU)
    with b.scope(f"{module}.3"):
        return b.node("Sigmoid", x)
