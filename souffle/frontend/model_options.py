"""What a caller gives about a model: values of its open dimensions, and of inputs that are known now."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from souffle.errors import OptionError

__all__ = ["ModelOptions", "values_of"]


def values_of(value: Any) -> list[Any]:
    """The values that ``dims`` gives one dimension: those of a list, or the one that is given."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


@dataclass(frozen=True, eq=False)
class ModelOptions:
    """What of a caller's choices the frontend needs; see :func:`souffle.compile` and :func:`souffle.import_onnx`.

    Attributes
    ----------
    batch : int or None
    dims, constants : mapping or None
    integers : bool
        Whether products of what was quantized are computed on the integers.

    Raises
    ------
    OptionError
        If one of them is no number or mapping.
    """

    batch: int | None = None
    dims: Mapping[str, Any] | None = None
    constants: Mapping[str, Any] | None = None
    integers: bool = True

    def __post_init__(self) -> None:
        dims, constants = self.dims, self.constants
        try:
            batch = 1 if self.batch is None else 0 if isinstance(self.batch, bool) else operator.index(self.batch)
        except TypeError:
            batch = 0
        if batch < 1:
            raise OptionError(f"batch is {self.batch!r}; it must be a whole number of at least 1")
        if dims is not None and not isinstance(dims, Mapping):
            raise OptionError(
                f'dims={dims!r} is not valid; give a dict, such as {{"seq": 128}} or {{"seq": [128, 384]}}'
            )
        if constants is not None and not isinstance(constants, Mapping):
            raise OptionError(
                f"constants={constants!r} is not valid; give a mapping of names of inputs to their values"
            )

    @property
    def has_versions(self) -> bool:
        """Whether an open dimension is given several values, as a list."""
        return any(isinstance(value, Sequence) and not isinstance(value, str) for value in (self.dims or {}).values())

    def words(self) -> str:
        """What is given, as in a call; empty where nothing is. Of constants, the names alone."""
        values = ", ".join(f"{name!r}: ..." for name in self.constants or {})
        batch = None if self.batch is None else f"batch={self.batch}"
        dims = f"dims={dict(self.dims)}" if self.dims else None
        return ", ".join(filter(None, (batch, dims, f"constants={{{values}}}" if values else None)))
