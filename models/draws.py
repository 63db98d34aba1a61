"""How inputs of a model are drawn at random where plain noise would make no sense: images, labels, lengths, moments.

The model bears it in its metadata, so that a file on its own says what it expects; whoever ignores it loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from onnx import ModelProto

from souffle.errors import ModelError

__all__ = ["Draw", "integers", "normal", "one_hot", "read_draws", "uniform", "write_draws"]

_KEY = "souffle.inputs"


@dataclass(frozen=True)
class Draw:
    """One input's distribution.

    Attributes
    ----------
    kind
        ``"normal"`` (mean `start`, standard deviation `scale`), ``"uniform"`` (from `start`, `scale` wide),
        ``"integers"`` (`scale` of them from `start`) or ``"one_hot"`` (a one in each last axis, zeros beside it).
    """

    kind: str
    start: float = 0.0
    scale: float = 1.0

    def values(self, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        """Draw an array, float64 or int64.

        Raises
        ------
        ModelError
            If the kind is none of the above.
        """
        match self.kind:
            case "normal":
                return self.start + self.scale * rng.standard_normal(shape)
            case "uniform":
                return self.start + self.scale * rng.random(shape)
            case "integers":
                return rng.integers(int(self.start), int(self.start + self.scale), shape)
            case "one_hot":
                return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]
        raise ModelError(f"the metadata {_KEY!r} name the distribution {self.kind!r}, which is not known")


def normal(std: float) -> Draw:
    """Normal with mean 0."""
    return Draw("normal", 0.0, std)


def uniform(low: float, high: float) -> Draw:
    """Uniform from `low` up to `high`."""
    return Draw("uniform", low, high - low)


def integers(low: int, high: int) -> Draw:
    """Integers from `low` to below `high`."""
    return Draw("integers", low, high - low)


def one_hot() -> Draw:
    """One class of the last axis."""
    return Draw("one_hot")


def write_draws(model: ModelProto, draws: Mapping[str, Draw]) -> None:
    """Put the distributions of some inputs, by name, into the metadata of `model`."""
    if draws:
        text = json.dumps({name: asdict(draw) for name, draw in draws.items()})
        model.metadata_props.add(key=_KEY, value=text)


def read_draws(model: ModelProto) -> dict[str, Draw]:
    """The distributions that the metadata of `model` name.

    Raises
    ------
    ModelError
        If the metadata are there and cannot be read.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), "{}")
    try:
        return {name: Draw(**fields) for name, fields in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"the metadata {_KEY!r} cannot be read: {error}") from error
