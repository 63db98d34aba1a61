"""Several programs as one, which the compiler sees as a whole: independent networks compiled together (001, HFuse).

::

    a: x -> f -> y        b: x -> g -> y      →      a.x -> f -> a.y,  b.x -> g -> b.y

No TE of one reads anything of another. So their stages may be in the same kernels, between the same barriers, and side
by side in the threads of a block; equal ones become one by the horizontal transformation, as they do in one network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from souffle.program.te import TE, ExternTE, Origin, ProgramError, Tensor
from souffle.program.te_program import Item, TEProgram

__all__ = ["together"]


def together(programs: Mapping[str, TEProgram]) -> TEProgram:
    """One program that computes what several do.

    Parameters
    ----------
    programs : mapping of str to TEProgram
        As imported, each under a name; the same program may be there several times. Input ``x`` of program ``a`` is
        ``a.x``, and so are outputs.

    Raises
    ------
    ProgramError
        If there are none or they are no programs, names make no difference once they are identifiers, programs have
        been transformed already (fused TEs, loops), or their products are to be computed in several ways.

    Examples
    --------
    >>> both = souffle.together({"text": souffle.import_onnx("text.onnx"), "image": souffle.import_onnx("image.onnx")})
    >>> souffle.compile(both)({"text.input_ids": ids, "image.input": pixels})
    """
    for name, program in programs.items():
        if not isinstance(program, TEProgram):
            what = type(program).__name__
            raise ProgramError(f"{name!r} is a {what} and no TEProgram; import a model with souffle.import_onnx first")
    prefixes = {name: re.sub(r"\W", "_", name) for name in programs}
    ways = {program.products for program in programs.values()}
    if not programs:
        raise ProgramError("together() of no programs; give at least one, such as {'a': program}")
    if len({*prefixes.values()}) < len(prefixes) or not all(prefixes.values()):
        raise ProgramError(f"the names {', '.join(map(repr, prefixes))} are not different identifiers; rename one")
    if len(ways) > 1:
        raise ProgramError(f"products are to be computed as {' and '.join(sorted(ways))}; transform the whole instead")
    parts = [_Renamed(program, name, prefixes[name]) for name, program in programs.items()]
    program = TEProgram(
        tuple(tensor for part in parts for tensor in part.of(part.program.inputs)),
        tuple(tensor for part in parts for tensor in part.of(part.program.outputs)),
        tuple(item for part in parts for item in part.items()),
        {part.tensors[tensor]: array for part in parts for tensor, array in part.program.constants.items()},
        tuple(f"{part.name}.{name}" for part in parts for name in part.program.input_names),
        tuple(f"{part.name}.{name}" for part in parts for name in part.program.output_names),
        "_".join(prefixes.values()),
        *ways,
        {f"{part.name}.{name}": dtype for part in parts for name, dtype in part.program.small_types.items()},
        {f"{part.name}.{name}": part.counts(name) for part in parts for name in part.program.counts},
    )
    program.check()
    return program


class _Renamed:
    """A program whose tensors and TEs have names of their own."""

    def __init__(self, program: TEProgram, name: str, prefix: str) -> None:
        self.program, self.name, self.prefix = program, name, prefix
        known = dict.fromkeys((*program.tensors(), *program.outputs))
        self.tensors = {t: Tensor(f"{prefix}_{t.name}", t.shape, t.dtype) for t in known}

    def of(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors in the place of some."""
        return tuple(self.tensors[tensor] for tensor in tensors)

    def counts(self, output: str) -> tuple[tuple[int, str], ...]:
        """The counted axes of an output, with the names of their counts."""
        return tuple((axis, f"{self.name}.{count}") for axis, count in self.program.counts[output])

    def items(self) -> list[Item]:
        """Its TEs, in order."""
        return [self.item(item) for item in self.program.tes]

    def item(self, item: Item) -> Item:
        """A TE that computes the same of the program's own tensors."""
        if not isinstance(item, TE | ExternTE):
            raise ProgramError(
                f"{self.name}: {item.name} is a {type(item).__name__}; give the program as it was imported"
            )
        nodes = tuple(f"{self.name}.{node}" for node in item.origin.nodes)
        origin = Origin(nodes, item.origin.operators, f"{self.prefix}_{item.origin.group}")
        own = {"name": f"{self.prefix}_{item.name}", "inputs": self.of(item.inputs), "outputs": self.of(item.outputs)}
        return replace(item, **own, origin=origin)
