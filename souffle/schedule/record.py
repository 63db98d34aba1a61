"""What a tuning log holds: stages before they are scheduled, and records of candidates; as data and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

import tvm
from tvm import tirx

from souffle.schedule.packed import pack, pack_function, unpack, unpack_function
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.tvm_calls import copied
from souffle.tvm_compat import const_int, structural_digest

__all__ = [
    "DAMAGED",
    "FAILED_SECONDS",
    "Record",
    "RecordOrigin",
    "Workload",
    "named_workload",
    "record_line",
    "record_of",
    "signature_of",
    "workload_digest",
    "workload_line",
    "workload_module",
    "workload_of",
]

FAILED_SECONDS = 1e10
"""Of a candidate that could not be built or gave wrong results, as MetaSchedule writes it."""

DAMAGED = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError)
"""What damaged input raises in TVM and in Python's own readers."""

_ROUNDING = 1e-6
"""Of seconds that MetaSchedule's annotations held, in fp32."""


@dataclass(frozen=True)
class RecordOrigin:
    """Where the figure of a record comes from.

    Attributes
    ----------
    figure : str
        ``"measured"`` or ``"predicted"``.
    device : str
        The GPU that it was measured on, as the driver names it, or the product whose cost model predicted it.
    tvm, souffle, date : str
        Versions, and the day as ``YYYY-MM-DD``.
    spill_bytes : int
        Stores of spilled registers, as ptxas reports them.
    own_seconds : float
        Of the schedule that the rules chose by themselves then, by the same figure; 0 where that is not known.
    registers, shared_bytes : int
        Of a thread and of a block, as compiled alone; 0 registers where no compiler was asked.
    tiles : int
        Of the schedule; 0 where that was not written down.
    text : str
        The digest of what its schedule was lowered to (:func:`souffle.schedule.lower.text_of`): rules and passes
        change, and the figure is of this text. Empty where that was not written down.
    trial : int
        Which candidate of its workload and search it was, from 0.
    problem : str
        Why it cannot be used, if it cannot.
    """

    figure: str
    device: str
    tvm: str
    souffle: str
    date: str
    spill_bytes: int = 0
    own_seconds: float = 0.0
    registers: int = 0
    shared_bytes: int = 0
    tiles: int = 0
    text: str = ""
    trial: int = 0
    problem: str = ""

    def data(self) -> dict[str, Any]:
        """As JSON: what is as it is without being said is left out."""
        return {name: value for name, value in vars(self).items() if value != _FIELDS[name][1]}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> RecordOrigin:
        """Of JSON data that has other things too.

        Raises
        ------
        ValueError
            If it says nothing of that kind.
        """
        known = {}
        for name, (kinds, unsaid) in _FIELDS.items():
            value = data.get(name, unsaid)
            if value is MISSING:
                raise ValueError(f"it does not say {name}")
            if type(value) not in kinds:
                raise ValueError(f"its {name} is {value!r}")
            known[name] = value
        if known["figure"] not in ("measured", "predicted"):
            raise ValueError(f"its figure is {known['figure']!r}, neither measured nor predicted")
        return cls(**known)


_KINDS = {"str": (str,), "int": (int,), "float": (float, int)}
_FIELDS = {field.name: (_KINDS[str(field.type)], field.default) for field in fields(RecordOrigin)}
"""The types that each may have in JSON, and what it is where a line does not say it."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A stage before it is scheduled, not decoded yet.

    Attributes
    ----------
    where : str
        File and line.
    digest : str
        By which records name it.
    signature : tuple
        Shape and dtype of each parameter.
    name : str
        Of the first stage that it was written for; for people.
    packed : str
        The function (:func:`souffle.schedule.packed.pack_function`).
    """

    where: str
    digest: str
    signature: tuple
    name: str
    packed: str

    @cached_property
    def func(self) -> tirx.PrimFunc:
        """The function, or what :func:`souffle.schedule.packed.unpack_function` raises."""
        return unpack_function(self.packed)


@dataclass(frozen=True, eq=False)
class Record:
    """One schedule of one workload, not replayed yet.

    Attributes
    ----------
    where : str
        File and line.
    workload : str
        Digest of the workload.
    figures : tuple of float
        Seconds with a cold and with a warm second-level cache; empty for a schedule that cannot be used.
    origin : RecordOrigin
    rule : str
    knobs : mapping of str to int
    packed_trace : str
        MetaSchedule's, if it is one.
    """

    where: str
    workload: str
    figures: tuple[float, ...]
    origin: RecordOrigin
    rule: str
    knobs: Mapping[str, int]
    packed_trace: str = ""

    @cached_property
    def recipe(self) -> Recipe:
        """What makes its schedule.

        Raises
        ------
        ValueError, LookupError, TypeError
            If the trace is damaged. Records that :meth:`TuningLog.of` gives raise nothing.
        """
        if not self.packed_trace:
            return Recipe(self.rule, self.knobs)
        steps, decisions = unpack(self.packed_trace)
        return Recipe(self.rule, self.knobs, [steps, decisions])

    @property
    def seconds(self) -> float:
        """The mean of its figures."""
        return sum(self.figures) / len(self.figures) if self.figures else FAILED_SECONDS

    @property
    def failed(self) -> bool:
        """Whether it says only that this schedule cannot be used."""
        return not self.figures

    @property
    def useful(self) -> bool:
        """Whether it is as good as what the rules chose when it was found: a search writes down what is worse, too."""
        own = self.origin.own_seconds
        return not self.failed and (own <= 0 or self.seconds <= own * (1 + _ROUNDING))

    @property
    def summary(self) -> str:
        """Such as ``measured 12.3 µs on NVIDIA H200``."""
        verb = "measured" if self.origin.figure == "measured" else "predicted"
        where = f"on {self.origin.device}" if verb == "measured" else f"with the cost model of {self.origin.device}"
        return f"{verb} {self.seconds * 1e6:.1f} µs {where}"

    def rank(self, product: str, *, measured: bool = True) -> tuple:
        """Smaller is better: measured before predicted, on this product before another, no spills, less time.

        Parameters
        ----------
        product : str
            The GPU that is compiled for.
        measured : bool
            Whether its figure may count as measured, if it is.
        """
        measured = measured and self.origin.figure == "measured"
        spills = not measured and self.origin.spill_bytes > 0
        words = self.origin.device.replace("-", " ").split()
        return (not measured, product not in words, spills, self.seconds)


def workload_module(func: tirx.PrimFunc) -> tvm.IRModule:
    """A stage as MetaSchedule's workload: named alike whatever network it is of, and a copy of its own.

    Replaying a trace changes statements of the function in place that others share, so MetaSchedule too copies first.
    """
    return copied(tvm.IRModule({"main": named_workload(func)}))


def named_workload(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A stage as it is compared with others: named alike whatever network it is of."""
    return func.with_attr("global_symbol", "main")


def workload_digest(func: tirx.PrimFunc) -> str:
    """Of a stage's structure, whatever network it is of."""
    return structural_digest(named_workload(func))


def signature_of(func: tirx.PrimFunc) -> tuple:
    """Shape and dtype of each parameter."""
    return tuple((tuple(const_int(extent) for extent in p.shape), str(p.dtype)) for p in func.params)


def workload_line(func: tirx.PrimFunc, digest: str, name: str) -> bytes:
    """A stage as a line of the table of workloads, its end too."""
    shapes = [[dtype, list(shape)] for shape, dtype in signature_of(func)]
    packed = pack_function(named_workload(func))
    return json_line({"digest": digest, "name": name, "parameters": shapes, "function": packed})


def check_arch(data: Mapping[str, Any], arch: str) -> None:
    """Raises ValueError if a line is of another architecture."""
    if data["arch"] != arch:
        raise ValueError(f"it is for {data['arch']}, not for {arch}")


def figures_of(seconds: Iterable[float], whose: str = "") -> list[float]:
    """Seconds as they stand in a line.

    Raises
    ------
    ValueError
        If one is no time; `whose` is said behind it.
    """
    figures = [float(figure) for figure in seconds]
    if not all(0 < figure < FAILED_SECONDS for figure in figures):
        raise ValueError(f"{figures} are no seconds{whose}")
    return figures


def record_line(workload: str, arch: str, recipe: Recipe, seconds: Iterable[float], origin: RecordOrigin) -> bytes:
    """A candidate as a line of the table of records, its end too.

    Raises
    ------
    ValueError
        If a figure is no time.
    """
    figures = figures_of(seconds, f", of {recipe.summary}")
    made: dict[str, Any] = {"workload": workload, "arch": arch, "rule": recipe.rule}
    if recipe.trace is None:
        made["knobs"] = dict(sorted(recipe.knobs.items()))
    else:
        made["trace"] = pack(recipe.trace)
    made["seconds"] = figures
    return json_line(made | origin.data())


def json_line(data: Mapping[str, Any]) -> bytes:
    """A line of a table, its end too."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def workload_of(where: str, line: str) -> Workload:
    """A line of the table of workloads, or one of :data:`DAMAGED`."""
    data = json.loads(line)
    shapes = tuple((tuple(map(int, shape)), str(dtype)) for dtype, shape in data["parameters"])
    return Workload(where, str(data["digest"]), shapes, str(data["name"]), str(data["function"]))


def record_of(where: str, data: Mapping[str, Any], arch: str) -> Record:
    """A line of the table of records, as JSON; or one of :data:`DAMAGED`."""
    check_arch(data, arch)
    figures = tuple(figures_of(data["seconds"]))
    rule, trace = str(data["rule"]), str(data.get("trace", ""))
    knobs = {str(name): value for name, value in data.get("knobs", {}).items()}
    if (rule == NATIVE_RULE) != bool(trace) or not all(type(value) is int for value in knobs.values()):
        raise ValueError(f"it is no recipe of rule {rule}")
    return Record(where, str(data["workload"]), figures, RecordOrigin.of_data(data), rule, knobs, trace)
