"""How a network's large constants are made from the weights of a model that can be built again.

A model's weights come from a seed, so an artifact for the GPU host leaves them out and takes along, for each large
constant, the initializers that it is made of: one of them, a part of one, its transpose, or several stacked (as
horizontal transformation stacks them). Only what is none of these travels as numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["read_weights", "write_weights"]

_SMALL = 4 << 10
"""Bytes; smaller constants are in every artifact."""
_MOST_PARTS = 64
"""Along one axis; embedding tables are not looked at row by row."""
_RECIPES = "recipes"


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def _views(array: np.ndarray, path: tuple[int, ...] = ()) -> Iterator[tuple[np.ndarray, tuple[int, ...], bool]]:
    """An array and its parts along the first axes, each as it is and transposed."""
    if array.nbytes < _SMALL:
        return
    yield array, path, False
    if array.ndim == 2:
        yield array.T, path, True
    if array.ndim >= 2 and array.shape[0] <= _MOST_PARTS:
        for index in range(array.shape[0]):
            yield from _views(array[index], (*path, index))


class _Pieces:
    """Where to find an array among the initializers, by its content."""

    def __init__(self, initializers: Mapping[str, np.ndarray]) -> None:
        self._initializers = initializers
        self._tables: dict[np.dtype, dict[str, list[Any]]] = {}

    def find(self, array: np.ndarray) -> list[Any] | None:
        """Name, path and whether transposed; or None."""
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
        """A piece, a list of recipes to be stacked, or None."""
        piece = self.find(array)
        if piece is not None:
            return {"piece": piece}
        if array.ndim < 2 or array.shape[0] > _MOST_PARTS or array[0].nbytes < _SMALL:
            return None
        parts = []
        for part in array:
            parts.append(self.recipe(part))
            if parts[-1] is None:
                return None
        return {"stack": parts}


def write_weights(
    path: Path, constants: Mapping[str, np.ndarray], initializers: Mapping[str, np.ndarray]
) -> tuple[int, int]:
    """Write recipes for all large constants, and the numbers of those that have none.

    Parameters
    ----------
    path
        The ``.npz`` file.
    constants
        A plan's, by buffer name.
    initializers
        The model's, by name.

    Returns
    -------
    found, carried : int
        Bytes of the constants that are made of initializers, and of those whose numbers are in the file.
    """
    pieces = _Pieces(initializers)
    recipes: dict[str, Any] = {}
    values: dict[str, np.ndarray] = {}
    found = carried = 0
    for name, array in constants.items():
        if array.nbytes < _SMALL or array.dtype.kind != "f":
            continue
        recipe = pieces.recipe(array)
        if recipe is None:
            carried += array.nbytes
            values[f"value/{name}"] = array
        else:
            found += array.nbytes
            recipes[name] = {**recipe, "sha256": _digest(array), "shape": list(array.shape), "dtype": str(array.dtype)}
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **{_RECIPES: np.frombuffer(json.dumps(recipes).encode(), np.uint8)}, **values)
    part.replace(path)
    return found, carried


def _made(
    recipe: Mapping[str, Any], initializers: Mapping[str, np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    if "stack" in recipe:
        return np.stack([_made(part, initializers, shape[1:], dtype) for part in recipe["stack"]])
    name, path, transposed = recipe["piece"]
    array = initializers[name][tuple(path)]
    # Pieces are found by their content: the filter of a 1x1 convolution is found for the matrix that it became.
    return np.ascontiguousarray(array.T if transposed else array).astype(dtype, copy=False).reshape(shape)


def read_weights(path: Path, initializers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The constants that :func:`write_weights` was given, made again.

    Raises
    ------
    ValueError
        If a constant is not bit for bit what it was: the model was built differently here.
    """
    made: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as file:
        for name, recipe in json.loads(file[_RECIPES].tobytes()).items():
            array = _made(recipe, initializers, tuple(recipe["shape"]), np.dtype(recipe["dtype"]))
            if _digest(array) != recipe["sha256"]:
                raise ValueError(f"constant {name} is not what it was: the model's weights differ on this machine")
            made[name] = array
        made |= {key.partition("/")[2]: file[key] for key in file.files if key != _RECIPES}
    return made
