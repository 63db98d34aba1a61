"""Which definitions each stage reads and makes, as the program says it: plain data, for those who check the kernels.

It is taken from the stages' TEs and the program's loops, before it is decided where anything lies in memory or when it
runs. Tensors are numbers into one table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Dataflow", "StageUse", "Steps"]


@dataclass(frozen=True)
class StageUse:
    """A stage of the program.

    Attributes
    ----------
    functions : tuple of tuple of (str, int, int)
        Its functions in the order in which they run: for each all forms in which it is called, each with its name, its
        tiles and its threads. Their pointer parameters are the inputs, then the outputs.
    inputs, outputs : tuple of int
        Tensors.
    name : str
        Of its last TE, as decisions and barriers say it. Empty in files of before it was kept.
    label : str
        The name of its first function before kernels chose a form, as predictions say it. Empty in such files.
    """

    functions: tuple[tuple[tuple[str, int, int], ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str = ""
    label: str = ""


@dataclass(frozen=True)
class Steps:
    """A loop of the program (:class:`souffle.program.Loop`), whose body is stages.

    Attributes
    ----------
    steps : int
    body : tuple of StageUse
    indexed : tuple of (int, int, int)
        Tensor of the body, outer tensor, and how many elements further it begins in each step.
    carried : tuple of (int, int, tuple of int)
        Tensor of the body, what it is of so many steps before as there are outer tensors, and those, for the first
        steps.
    collected : tuple of (int, int, bool)
        Outer tensor, what the body defines, and whether that is kept of every step, or of the last.
    name : str
        Of the loop. Empty in files of before it was kept.
    """

    steps: int
    body: tuple[StageUse, ...]
    indexed: tuple[tuple[int, int, int], ...]
    carried: tuple[tuple[int, int, tuple[int, ...]], ...]
    collected: tuple[tuple[int, int, bool], ...]
    name: str = ""


@dataclass(frozen=True)
class Dataflow:
    """A program whose TEs are stages.

    Attributes
    ----------
    tensors : tuple of (str, int, int)
        Name, elements, and bytes of an element.
    inputs, constants, outputs : tuple of (str, int)
        The labels of the plan's buffers that they are, and tensors.
    items : tuple of StageUse or Steps
        In topological order.
    """

    tensors: tuple[tuple[str, int, int], ...]
    inputs: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    items: tuple[StageUse | Steps, ...]
