"""A plan's structure as JSON and back, every field checked, so that a file cannot send a kernel out of its buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import numpy as np

from souffle.certificate import Certificate, Counterexample, Section
from souffle.codegen.dataflow import Dataflow, StageUse, Steps
from souffle.codegen.plan import (
    PLACES,
    Buffer,
    CudaModule,
    Kernel,
    Launch,
    Plan,
    PredictedKernel,
    PredictedStage,
    Resources,
    Touched,
)
from souffle.counted_axes import check_counts
from souffle.decision import Barrier, Decision
from souffle.element_types import SMALL_TYPES
from souffle.errors import OptionError
from souffle.multiprocessor import MOST_THREADS
from souffle.options import Options

__all__ = ["PlanFormatError", "certificate_to_json", "plan_from_json", "plan_to_json"]

_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "bfloat16"}
)
_KINDS = ("input", "output", "constant", "workspace", "state", "record")
_EDGES = ("inputs", "constants", "outputs")
_WORKSPACE_ALIGNMENT = 16
"""Bytes; the widest load of one thread."""


class PlanFormatError(Exception):
    """A field is missing, of another type, or out of its range."""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Everything of a plan but its constants, its TensorIR and the contents of its modules."""
    return {
        "name": plan.name,
        "level": plan.options.level,
        "precision": plan.options.precision,
        "fusion": plan.options.fusion,
        "partition": plan.options.partition,
        "arch": plan.options.arch,
        "workspace_bytes": plan.workspace_bytes,
        "modules": len(plan.modules),
        "edited": [number for number, module in enumerate(plan.modules) if module.edited],
        "compiler": plan.compiler,
        "certificate": None if plan.certificate is None else certificate_to_json(plan.certificate),
        "buffers": [
            {
                "name": buffer.name,
                "shape": list(buffer.shape),
                "dtype": buffer.dtype,
                "kind": buffer.kind,
                "label": buffer.label,
                "offset": buffer.offset,
                **({"stands_for": buffer.stands_for} if buffer.stands_for else {}),
                **({"counts": [list(count) for count in buffer.counts]} if buffer.counts else {}),
            }
            for buffer in plan.buffers
        ],
        "kernels": [
            {
                "name": kernel.name,
                "module": kernel.module,
                "tiles": kernel.tiles,
                "most_blocks": kernel.most_blocks,
                "threads": kernel.threads,
                "teams": kernel.teams,
                "dynamic_shared_bytes": kernel.dynamic_shared_bytes,
                "grid_syncs": kernel.grid_syncs,
                "arrivals": kernel.arrivals,
                "flag_waits": [list(wait) for wait in kernel.flag_waits],
                "resources": None
                if kernel.resources is None
                else {
                    "registers": kernel.resources.registers,
                    "static_shared_bytes": kernel.resources.static_shared_bytes,
                    "spill_store_bytes": kernel.resources.spill_store_bytes,
                    "spill_load_bytes": kernel.resources.spill_load_bytes,
                    "stack_bytes": kernel.resources.stack_bytes,
                    "code_bytes": kernel.resources.code_bytes,
                },
                "stages": list(kernel.stages),
                "tes": list(kernel.tes),
                "predicted": None if kernel.predicted is None else asdict(kernel.predicted),
                "barriers": [asdict(barrier) for barrier in kernel.barriers],
            }
            for kernel in plan.kernels
        ],
        "launches": [
            {
                "kernel": launch.kernel,
                "buffers": list(launch.buffers),
                "tes": list(launch.tes),
                "bytes_read": launch.bytes_read,
                "bytes_written": launch.bytes_written,
                "touched": [list(astuple(one)) for one in launch.touched],
            }
            for launch in plan.launches
        ],
        "decisions": [list(decision) for decision in plan.decisions],
        "predicted_on": plan.predicted_on,
        "grid_barrier": plan.options.grid_barrier,
        "waits": plan.options.waits,
        "disable": list(plan.options.disable),
        "reuse_policy": plan.options.reuse_policy,
        "graph": plan.options.graph,
        "watchdog_ms": plan.options.watchdog_ms,
        **({} if plan.options.threads is None else {"threads": plan.options.threads}),
        "dataflow": None if plan.dataflow is None else asdict(plan.dataflow),
    }


def certificate_to_json(certificate: Certificate) -> dict[str, Any]:
    """A certificate; what follows from its parts, such as the verdict, stands with them for those who read it."""
    return {
        "verdict": certificate.verdict,
        "assumed": certificate.assumed,
        "kernels": [_section_to_json(section) for section in certificate.kernels],
        "launches": _section_to_json(certificate.launches),
        "others": [_section_to_json(section) for section in certificate.others],
    }


def _section_to_json(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "verdict": section.verdict,
        "counterexamples": [asdict(found) for found in section.counterexamples],
        "unknown": list(section.unknown),
        "facts": [list(fact) for fact in section.facts],
        "notes": list(section.notes),
    }


class _Fields:
    """One JSON object whose fields are taken with their types."""

    def __init__(self, content: Any, what: str) -> None:
        if not isinstance(content, dict):
            raise PlanFormatError(f"{what} is not an object")
        self._content, self._what = content, what

    def text(self, key: str) -> str:
        value = self._content.get(key)
        if not isinstance(value, str):
            raise PlanFormatError(f"{self._what} has no proper {key}")
        return value

    def whole(self, key: str, low: int = 0, high: int = 2**62) -> int:
        value = self._content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise PlanFormatError(f"{self._what} has {key} {value!r}, which is not a whole number from {low} to {high}")
        return value

    def seconds(self, key: str) -> float:
        value = self._content.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise PlanFormatError(f"{self._what} has {key} {value!r}, which is no time in seconds")
        return float(value)

    def wholes(self, key: str, low: int = 0, high: int = 2**62) -> tuple[int, ...]:
        values = self.items(key)
        if any(not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high for value in values):
            raise PlanFormatError(f"{self._what} has {key} {values!r}, not whole numbers from {low} to {high}")
        return tuple(values)

    def flag(self, key: str) -> bool:
        value = self._content.get(key)
        if not isinstance(value, bool):
            raise PlanFormatError(f"{self._what} has {key} {value!r}, which is neither true nor false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        if any(not isinstance(value, str) for value in values):
            raise PlanFormatError(f"{self._what} has {key} that are not texts")
        return tuple(values)

    def items(self, key: str) -> list[Any]:
        value = self._content.get(key)
        if not isinstance(value, list):
            raise PlanFormatError(f"{self._what} has no list {key}")
        return value

    def get(self, key: str) -> Any:
        return self._content.get(key)


def _buffer(content: Any, index: int, workspace_bytes: int) -> Buffer:
    fields = _Fields(content, f"buffer {index}")
    buffer = Buffer(
        name=fields.text("name"),
        shape=fields.wholes("shape"),
        dtype=fields.text("dtype"),
        kind=fields.text("kind"),
        label=fields.text("label"),
        offset=fields.whole("offset"),
        stands_for=fields.text("stands_for") if "stands_for" in content else "",
        counts=_counted_axes(fields) if "counts" in content else (),
    )
    if buffer.kind not in _KINDS or buffer.dtype not in _DTYPES:
        raise PlanFormatError(f"buffer {buffer.name} is of kind {buffer.kind!r} and dtype {buffer.dtype!r}")
    if buffer.stands_for and (buffer.stands_for not in SMALL_TYPES or buffer.dtype != "uint8"):
        raise PlanFormatError(f"buffer {buffer.name} of {buffer.dtype!r} cannot stand for {buffer.stands_for!r}")
    try:
        np.dtype(buffer.element_type)
    except TypeError as error:
        raise PlanFormatError(
            f"buffer {buffer.name} is {buffer.element_type}, which NumPy lacks here; install and import ml_dtypes"
        ) from error
    fits = buffer.offset % _WORKSPACE_ALIGNMENT == 0 and buffer.offset + buffer.nbytes <= workspace_bytes
    if buffer.kind == "workspace" and not fits:
        raise PlanFormatError(f"buffer {buffer.name} at {buffer.offset} lies outside of {workspace_bytes} bytes")
    return buffer


def _counted_axes(fields: _Fields) -> tuple[tuple[int, str], ...]:
    found = [tuple(item) if isinstance(item, list) else item for item in fields.items("counts")]
    if any(not isinstance(item, tuple) or [type(part) for part in item] != [int, str] for item in found):
        raise PlanFormatError(f"buffer {fields.text('name')} has counts that are not (axis, output)")
    return tuple(found)


def _kernel(content: Any, index: int, modules: int) -> Kernel:
    fields = _Fields(content, f"kernel {index}")
    resources = None
    if fields.get("resources") is not None:
        used = _Fields(fields.get("resources"), f"the resources of kernel {index}")
        resources = Resources(
            registers=used.whole("registers"),
            static_shared_bytes=used.whole("static_shared_bytes"),
            spill_store_bytes=used.whole("spill_store_bytes"),
            spill_load_bytes=used.whole("spill_load_bytes"),
            # Networks saved before these were kept lack them.
            stack_bytes=None if used.get("stack_bytes") is None else used.whole("stack_bytes"),
            code_bytes=None if used.get("code_bytes") is None else used.whole("code_bytes"),
        )
    return Kernel(
        name=fields.text("name"),
        module=fields.whole("module", 0, modules - 1),
        tiles=fields.whole("tiles"),
        threads=fields.whole("threads", 1, MOST_THREADS),
        dynamic_shared_bytes=fields.whole("dynamic_shared_bytes", 0, 2**31 - 1),
        grid_syncs=fields.whole("grid_syncs"),
        resources=resources,
        stages=fields.texts("stages"),
        tes=fields.texts("tes"),
        # Networks saved before times were predicted lack it.
        predicted=None if fields.get("predicted") is None else _predicted(fields.get("predicted"), index),
        barriers=() if fields.get("barriers") is None else _barriers(fields, index),
        most_blocks=None if fields.get("most_blocks") is None else fields.whole("most_blocks", 1),
        # Networks saved before there were flags lack these two.
        arrivals=0 if fields.get("arrivals") is None else fields.whole("arrivals"),
        flag_waits=() if fields.get("flag_waits") is None else _flag_waits(fields, index),
        # Those saved before there were teams lack it.
        teams=1 if fields.get("teams") is None else fields.whole("teams", 1, MOST_THREADS),
    )


def _flag_waits(fields: _Fields, index: int) -> tuple[tuple[int, int, int], ...]:
    found = []
    for item in fields.items("flag_waits"):
        if not (isinstance(item, list) and len(item) == 3 and all(type(n) is int and n >= 0 for n in item)):
            raise PlanFormatError(f"kernel {index} has the flag wait {item!r}, which is not three numbers")
        found.append(tuple(item))
    return tuple(found)


def _barriers(fields: _Fields, index: int) -> tuple[Barrier, ...]:
    parts = [_Fields(item, f"a barrier of kernel {index}") for item in fields.items("barriers")]
    names = ("scope", "before", "after", "tensor", "reason")
    return tuple(Barrier(*(part.text(name) for name in names), part.whole("runs")) for part in parts)


def _predicted(content: Any, index: int) -> PredictedKernel:
    fields = _Fields(content, f"the prediction of kernel {index}")
    stages = [_Fields(item, f"a predicted stage of kernel {index}") for item in fields.items("stages")]
    return PredictedKernel(
        seconds=fields.seconds("seconds"),
        launch_seconds=fields.seconds("launch_seconds"),
        sync_seconds=fields.seconds("sync_seconds"),
        blocks_per_sm=fields.whole("blocks_per_sm", 1),
        stages=tuple(
            PredictedStage(
                name=stage.text("name"),
                runs=stage.whole("runs", 1),
                tiles=stage.whole("tiles"),
                registers=stage.whole("registers"),
                shared_bytes=stage.whole("shared_bytes"),
                seconds=stage.seconds("seconds"),
                bound=stage.text("bound"),
                stack_bytes=None if stage.get("stack_bytes") is None else stage.whole("stack_bytes"),
            )
            for stage in stages
        ),
        code_seconds=0.0 if fields.get("code_seconds") is None else fields.seconds("code_seconds"),
    )


def _launch(content: Any, index: int, kernels: int, buffers: int) -> Launch:
    fields = _Fields(content, f"launch {index}")
    return Launch(
        kernel=fields.whole("kernel", 0, kernels - 1),
        buffers=fields.wholes("buffers", 0, buffers - 1),
        tes=fields.texts("tes"),
        bytes_read=fields.whole("bytes_read", 0),
        bytes_written=fields.whole("bytes_written", 0),
        touched=_touched(fields, index),
    )


def _touched(fields: _Fields, index: int) -> tuple[Touched, ...]:
    if fields.get("touched") is None:
        return ()
    found = tuple(Touched(*_entry(item, (str, str, str, bool, int))) for item in fields.items("touched"))
    if any(one.where not in PLACES or one.nbytes < 0 for one in found):
        raise PlanFormatError(f"launch {index} touches a tensor somewhere else, or in less than no bytes")
    return found


def _options(fields: _Fields) -> Options:
    given: dict[str, Any] = {name: fields.text(name) for name in ("level", "precision", "partition", "arch")}
    # Networks saved before there was a choice lack these six.
    if fields.get("fusion") is not None:
        given["fusion"] = fields.text("fusion")
    if fields.get("grid_barrier") is not None:
        given["grid_barrier"] = fields.text("grid_barrier")
    if fields.get("waits") is not None:
        given["waits"] = fields.text("waits")
    if fields.get("disable") is not None:
        given["disable"] = fields.texts("disable")
    if fields.get("reuse_policy") is not None:
        given["reuse_policy"] = fields.text("reuse_policy")
    if fields.get("graph") is not None:
        given["graph"] = fields.flag("graph")
    if fields.get("watchdog_ms") is not None:
        given["watchdog_ms"] = fields.get("watchdog_ms")
    if fields.get("threads") is not None:
        given["threads"] = fields.get("threads")
    try:
        return Options(**given)
    except OptionError as error:
        raise PlanFormatError(str(error)) from error


def _decision(content: Any) -> Decision:
    if not isinstance(content, list) or [type(item) for item in content] != [str, str, bool, str]:
        raise PlanFormatError("a decision is not (stage, subject, accepted, reason)")
    return Decision(*content)


def _dataflow(content: Any) -> Dataflow:
    fields = _Fields(content, "the dataflow")
    tensors = tuple(_entry(item, (str, int, int)) for item in fields.items("tensors"))
    edges = {key: tuple(_entry(item, (str, int)) for item in fields.items(key)) for key in _EDGES}
    found = Dataflow(tensors, **edges, items=tuple(_item(item, len(tensors)) for item in fields.items("items")))
    if any(not 0 <= number < len(tensors) for key in _EDGES for _, number in edges[key]):
        raise PlanFormatError("the dataflow speaks of a tensor that is not in its table")
    return found


def _item(content: Any, count: int) -> StageUse | Steps:
    fields = _Fields(content, "a stage of the dataflow")
    if fields.get("steps") is None:
        tensors = (fields.wholes(key, 0, count - 1) for key in ("inputs", "outputs"))
        every = fields.items("functions")
        if not every or any(not isinstance(forms, list) or not forms for forms in every):
            raise PlanFormatError("a stage of the dataflow has no functions")
        functions = tuple(tuple(_entry(form, (str, int, int)) for form in forms) for forms in every)
        return StageUse(functions, *tensors, name=_name(fields), label=_name(fields, "label"))
    indexed = tuple(_entry(item, (int, int, int)) for item in fields.items("indexed"))
    carried = tuple(_entry(item, (int, int, list)) for item in fields.items("carried"))
    collected = tuple(_entry(item, (int, int, bool)) for item in fields.items("collected"))
    numbers = [n for one in (*indexed, *collected) for n in one[:2]]
    numbers += [n for tensor, value, initial in carried for n in (tensor, value, *initial)]
    if any(type(n) is not int or not 0 <= n < count for n in numbers):
        raise PlanFormatError("a loop of the dataflow speaks of a tensor that is not in its table")
    body = tuple(_item(item, count) for item in fields.items("body"))
    if any(isinstance(item, Steps) for item in body):
        raise PlanFormatError("a loop of the dataflow holds a loop")
    carried = tuple((tensor, value, tuple(initial)) for tensor, value, initial in carried)
    return Steps(fields.whole("steps", 1), body, indexed, carried, collected, _name(fields))


def _name(fields: _Fields, key: str = "name") -> str:
    """Networks saved before stages and loops had names lack them."""
    return "" if fields.get(key) is None else fields.text(key)


def _entry(content: Any, types: tuple[type, ...]) -> tuple[Any, ...]:
    if not isinstance(content, list) or tuple(map(type, content)) != types:
        names = ", ".join(kind.__name__ for kind in types)
        raise PlanFormatError(f"an entry of the dataflow, or of what launches touch, is not ({names})")
    return tuple(content)


def _certificate(content: Any) -> Certificate:
    fields = _Fields(content, "the certificate")
    return Certificate(
        kernels=tuple(_section(item) for item in fields.items("kernels")),
        launches=_section(fields.get("launches")),
        others=tuple(_section(item) for item in fields.items("others")),
    )


def _section(content: Any) -> Section:
    fields = _Fields(content, "a part of the certificate")
    facts = fields.items("facts")
    if any(not isinstance(fact, list) or [type(item) for item in fact] != [str, int] for fact in facts):
        raise PlanFormatError("a fact of the certificate is not (text, number)")
    found = [_Fields(item, "a counterexample of the certificate") for item in fields.items("counterexamples")]
    return Section(
        name=fields.text("name"),
        counterexamples=tuple(
            Counterexample(
                rule=one.text("rule"),
                kernel=one.text("kernel"),
                stages=one.texts("stages"),
                statements=one.texts("statements"),
                blocks=one.texts("blocks"),
                element=one.text("element"),
                reason=one.text("reason"),
            )
            for one in found
        ),
        unknown=fields.texts("unknown"),
        facts=tuple((what, count) for what, count in facts),
        # Certificates of before there were notes have none.
        notes=fields.texts("notes") if fields.get("notes") is not None else (),
    )


def plan_from_json(content: Any, texts: Sequence[str], cubins: Sequence[bytes]) -> Plan:
    """The plan that :func:`plan_to_json` described, without its constants and its TensorIR.

    Raises
    ------
    PlanFormatError
        Naming the entry that is wrong.
    """
    fields = _Fields(content, "the plan")
    workspace_bytes = fields.whole("workspace_bytes")
    buffers = tuple(_buffer(item, index, workspace_bytes) for index, item in enumerate(fields.items("buffers")))
    if len({buffer.name for buffer in buffers}) != len(buffers):
        raise PlanFormatError("two buffers have one name")
    kernels = tuple(_kernel(item, index, len(texts)) for index, item in enumerate(fields.items("kernels")))
    launches = tuple(
        _launch(item, index, len(kernels), len(buffers)) for index, item in enumerate(fields.items("launches"))
    )
    # Networks saved before there were certificates lack these three.
    edited = frozenset() if fields.get("edited") is None else frozenset(fields.wholes("edited", 0, len(texts) - 1))
    compiler = "" if fields.get("compiler") is None else fields.text("compiler")
    certificate = None if fields.get("certificate") is None else _certificate(fields.get("certificate"))
    arity: dict[int, int] = {}
    for launch in launches:
        if arity.setdefault(launch.kernel, len(launch.buffers)) != len(launch.buffers):
            raise PlanFormatError(f"launches of kernel {kernels[launch.kernel].name} have different numbers of buffers")
    outputs = {buffer.label: (buffer.shape, buffer.dtype) for buffer in buffers if buffer.kind == "output"}
    try:
        check_counts({buffer.label: buffer.counts for buffer in buffers if buffer.counts}, outputs)
    except ValueError as error:
        raise PlanFormatError(str(error)) from error
    return Plan(
        name=fields.text("name"),
        options=_options(fields),
        buffers=buffers,
        constants={},
        modules=tuple(
            CudaModule(text, cubin, number in edited)
            for number, (text, cubin) in enumerate(zip(texts, cubins, strict=True))
        ),
        kernels=kernels,
        launches=launches,
        workspace_bytes=workspace_bytes,
        decisions=tuple(_decision(item) for item in fields.items("decisions")),
        predicted_on="" if fields.get("predicted_on") is None else fields.text("predicted_on"),
        compiler=compiler,
        certificate=certificate,
        # Networks saved before it was kept lack it.
        dataflow=None if fields.get("dataflow") is None else _dataflow(fields.get("dataflow")),
    )
