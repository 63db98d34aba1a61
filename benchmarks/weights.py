"""How a network's large constants are drawn again on a host that has NumPy and nothing else.

Weights are too large to travel. So a model's large initializers are replaced by random ones of the same mean and
standard deviation, row by row; what is compiled, and what ONNX Runtime expects, is of these. An artifact then leaves
its large constants out and takes along, for each, the draws that it is made of: one of them, a part of one, its
transpose, one whose rows are scaled (by the weights of a normalization before), or several stacked (as horizontal
transformation stacks them, and gates of a cell that lie side by side). What is none of these travels as numbers.

A model travels in the same way, as what others run there: its graph without the numbers that are drawn. Its file has
the draws, for all levels and precisions of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = ["Draw", "Pieces", "read_graph", "read_weights", "redrawn", "write_graph", "write_weights"]

_SMALL = 4 << 10
"""Bytes; smaller constants are in every artifact."""
_MOST_PARTS = 64
"""Along one axis; embedding tables are not looked at row by row."""
_GATES = (3, 4)
"""Of a recurrent cell, one under the other in its weights."""
_CONTENT = "content"
_GRAPH = "graph"


@dataclass(frozen=True, eq=False)
class Draw:
    """A random initializer.

    Attributes
    ----------
    seed : int
    shape : tuple of int
    mean, std : array of float32
        Of each row along the first axis.
    """

    seed: int
    shape: tuple[int, ...]
    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def like(cls, array: np.ndarray, seed: int) -> Draw:
        """A draw with the rows' statistics of `array`."""
        rows = array.reshape(array.shape[0], -1).astype(np.float64)
        return cls(seed, array.shape, rows.mean(1).astype(np.float32), rows.std(1).astype(np.float32))

    def values(self) -> np.ndarray:
        """The numbers, the same bits on every machine: no sum is taken."""
        rows = (-1, *[1] * (len(self.shape) - 1))
        values = np.random.default_rng(self.seed).standard_normal(self.shape, dtype=np.float32)
        values *= self.std.reshape(rows)
        values += self.mean.reshape(rows)
        return values


def redrawn(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Draw]]:
    """A model whose large weights can be drawn again, and the draws by the initializers' names.

    What has few different values, such as a mask, is no weight and stays.
    """
    from onnx import ModelProto, TensorProto, numpy_helper

    changed, draws = ModelProto(), {}
    changed.CopyFrom(model)
    for initializer in changed.graph.initializer:
        if initializer.data_type != TensorProto.FLOAT:
            continue
        array = numpy_helper.to_array(initializer)
        if array.nbytes < _SMALL or 2 * len(np.unique(array)) < array.size:
            continue
        draw = draws[initializer.name] = Draw.like(array, len(draws))
        initializer.CopyFrom(numpy_helper.from_array(draw.values(), initializer.name))
    return changed, draws


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


_Path = tuple["int | tuple[int, int]", ...]
"""From an array to a part of it: along the first axis an index, or which of how many equal parts."""


def _views(array: np.ndarray, path: _Path = ()) -> Iterator[tuple[np.ndarray, _Path, bool]]:
    """An array and its parts along the first axes, each as it is and transposed."""
    if array.nbytes < _SMALL:
        return
    yield array, path, False
    if array.ndim == 2:
        yield array.T, path, True
    if array.ndim >= 2 and array.shape[0] <= _MOST_PARTS:
        for index in range(array.shape[0]):
            yield from _views(array[index], (*path, index))
    elif array.ndim >= 2:
        for count in _GATES:
            for part in range(count if array.shape[0] % count == 0 else 0):
                yield from _views(_along(array, [(part, count)]), (*path, (part, count)))


def _along(array: np.ndarray, path: Iterable[int | tuple[int, int]]) -> np.ndarray:
    """The part of an array that a path leads to."""
    for step in path:
        if isinstance(step, int):
            array = array[step]
        else:
            part, count = step
            size = array.shape[0] // count
            array = array[part * size : (part + 1) * size]
    return array


class Pieces:
    """Where to find an array among a model's draws, by its content.

    It is kept for all of a model's levels and precisions, for it takes seconds to draw and to look through them.

    Parameters
    ----------
    draws : mapping of str to Draw
    scales : iterable of array of float32
        Vectors by which the rows of a draw may be scaled.
    """

    def __init__(self, draws: Mapping[str, Draw], scales: Iterable[np.ndarray] = ()) -> None:
        self._initializers = {name: draw.values() for name, draw in draws.items()}
        self._tables: dict[np.dtype, dict[str, list[Any]]] = {}
        self._scales: dict[int, list[np.ndarray]] = {}
        for scale in scales:
            self._scales.setdefault(len(scale), []).append(scale)

    def find(self, array: np.ndarray) -> list[Any] | None:
        """Name, path (whose pairs become lists in a file) and whether transposed; or None."""
        if array.dtype not in self._tables:
            table: dict[str, list[Any]] = {}
            for name, initializer in self._initializers.items():
                if initializer.dtype.kind == array.dtype.kind:
                    cast = initializer.astype(array.dtype, copy=False)
                    for view, path, transposed in _views(cast):
                        table.setdefault(_digest(view), [name, list(path), transposed])
            self._tables[array.dtype] = table
        return self._tables[array.dtype].get(_digest(array))

    def recipe(self, array: np.ndarray) -> Any:
        """A piece, a list of recipes to be stacked along the first axis or the last, or None."""
        piece = self.find(array)
        if piece is not None:
            return {"piece": piece}
        scaled = self._scaled(array)
        if scaled is not None:
            return scaled
        for how, axis in (("stack", 0), ("beside", -1)):
            parts = self._recipes(array, axis)
            if parts:
                return {how: parts}
        return None

    def _scaled(self, array: np.ndarray) -> Any:
        """A piece whose rows are scaled, or None."""
        if array.ndim != 2 or array.shape[0] not in self._scales:
            return None
        wide = array.astype(np.float32)
        for name, initializer in self._initializers.items():
            for view, path, transposed in _views(initializer):
                if view.shape != array.shape:
                    continue
                view = view.astype(array.dtype).astype(np.float32)
                # By how much each row is scaled, were it this one; of a row of another, next to nothing.
                found = (wide * view).sum(1) / np.maximum((view * view).sum(1), 1e-30)
                for scale in self._scales[array.shape[0]]:
                    if np.abs(found - scale).max() < 1e-2 * np.abs(scale).max():
                        made = (view * scale[:, None]).astype(array.dtype)
                        if made.tobytes() == array.tobytes():
                            return {"scaled": [name, list(path), transposed], "by": scale.tolist()}
        return None

    def _recipes(self, array: np.ndarray, axis: int) -> list[Any]:
        """Of the parts along an axis; empty where one has none."""
        count = array.shape[axis] if array.ndim >= 2 else 0
        if count > (_MOST_PARTS if axis == 0 else max(_GATES)) or not count or array.nbytes // count < _SMALL:
            return []
        found = []
        for part in np.moveaxis(array, axis, 0):
            found.append(self.recipe(part))
            if found[-1] is None:
                return []
        return found


def write_weights(path: Path, constants: Mapping[str, np.ndarray], pieces: Pieces) -> tuple[int, int]:
    """Write recipes for all large constants, and the numbers of those that have none; the model's file has the draws.

    Parameters
    ----------
    path
        The ``.npz`` file.
    constants
        A plan's, by buffer name.
    pieces
        Of the model's draws.

    Returns
    -------
    found, carried : int
        Bytes of the constants that are made of draws, and of those whose numbers are in the file.
    """
    recipes: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    found = carried = 0
    for name, array in constants.items():
        if array.nbytes < _SMALL or array.dtype.kind != "f":
            continue
        recipe = pieces.recipe(array)
        if recipe is None:
            carried += array.nbytes
            arrays[f"value/{name}"] = array
        else:
            found += array.nbytes
            recipes[name] = {**recipe, "sha256": _digest(array), "shape": list(array.shape), "dtype": str(array.dtype)}
    _write(path, recipes, arrays)
    return found, carried


def _write(path: Path, content: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write JSON and arrays; a file cut short is never there."""
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **{_CONTENT: np.frombuffer(json.dumps(content).encode(), np.uint8)}, **arrays)
    part.replace(path)


def _content(file: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(file[_CONTENT].tobytes())


def _drawn(graph: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The initializers of a model's file drawn again."""
    return {
        name: Draw(of["seed"], tuple(of["shape"]), graph[f"mean/{name}"], graph[f"std/{name}"]).values()
        for name, of in _content(graph).items()
    }


@lru_cache(maxsize=1)
def _drawn_of(path: Path, changed: int) -> dict[str, np.ndarray]:
    """The same of a file, which takes a second, for all networks of a model in a row; by when it changed."""
    with np.load(path, allow_pickle=False) as file:
        return _drawn(file)


def _compare(array: np.ndarray, digest: str, name: str, path: Path) -> None:
    if _digest(array) != digest:
        raise ValueError(
            f"{name} of {path.name} is not what it was: NumPy {np.__version__} draws other numbers, "
            "or the model's file is of another build"
        )


def _made(
    recipe: Mapping[str, Any], initializers: Mapping[str, np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    if "stack" in recipe:
        return np.stack([_made(part, initializers, shape[1:], dtype) for part in recipe["stack"]])
    if "beside" in recipe:
        return np.stack([_made(part, initializers, shape[:-1], dtype) for part in recipe["beside"]], axis=-1)
    name, path, transposed = recipe["scaled" if "scaled" in recipe else "piece"]
    array = _along(initializers[name], path)
    # Pieces are found by their content: the filter of a 1x1 convolution is found for the matrix that it became.
    array = np.ascontiguousarray(array.T if transposed else array).astype(dtype, copy=False).reshape(shape)
    if "scaled" not in recipe:
        return array
    # The arithmetic is that of the compiler: of what is stored, in single precision.
    return (array.astype(np.float32) * np.array(recipe["by"], np.float32)[:, None]).astype(dtype)


def read_weights(path: Path, graph: Path) -> dict[str, np.ndarray]:
    """The constants that :func:`write_weights` was given, made again.

    Parameters
    ----------
    path
        The file of the weights.
    graph
        That of the model, as :func:`write_graph` makes it.

    Raises
    ------
    ValueError
        If a constant is not bit for bit what it was: NumPy draws differently here.
    """
    made: dict[str, np.ndarray] = {}
    drawn = _drawn_of(graph, graph.stat().st_mtime_ns)
    with np.load(path, allow_pickle=False) as file:
        for name, recipe in _content(file).items():
            array = _made(recipe, drawn, tuple(recipe["shape"]), np.dtype(recipe["dtype"]))
            _compare(array, recipe["sha256"], f"constant {name}", path)
            made[name] = array
        made |= {key.partition("/")[2]: file[key] for key in file.files if key.startswith("value/")}
    return made


def write_graph(path: Path, model: onnx.ModelProto, draws: Mapping[str, Draw]) -> None:
    """Write a model without the numbers that are drawn.

    Parameters
    ----------
    path
        The ``.npz`` file.
    model, draws
        As :func:`redrawn` gives them.
    """
    from onnx import ModelProto, numpy_helper

    small, content = ModelProto(), {}
    small.CopyFrom(model)
    for initializer in small.graph.initializer:
        if draw := draws.get(initializer.name):
            digest = _digest(numpy_helper.to_array(initializer))
            content[initializer.name] = {"seed": draw.seed, "shape": list(draw.shape), "sha256": digest}
            initializer.ClearField("raw_data")
    rows = {f"{part}/{name}": getattr(draw, part) for name, draw in draws.items() for part in ("mean", "std")}
    _write(path, content, {_GRAPH: np.frombuffer(small.SerializeToString(), np.uint8), **rows})


def read_graph(path: Path) -> onnx.ModelProto:
    """The model that :func:`write_graph` was given, its weights drawn again; needs the onnx package.

    Raises
    ------
    ValueError
        If a weight is not bit for bit what it was: NumPy draws differently here.
    """
    from onnx import ModelProto, numpy_helper

    with np.load(path, allow_pickle=False) as file:
        content, drawn = _content(file), _drawn(file)
        model = ModelProto.FromString(file[_GRAPH].tobytes())
    for initializer in model.graph.initializer:
        if initializer.name in drawn:
            array = drawn[initializer.name]
            _compare(array, content[initializer.name]["sha256"], f"initializer {initializer.name}", path)
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
    return model
