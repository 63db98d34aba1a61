"""Stages with several choices of their knobs as one CUDA text, each run on the CPU device beside the plain function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import tvm
from tvm import tirx

from souffle.codegen.device_functions import with_device_functions
from souffle.decision import Refused
from souffle.emulator import compile_text
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.schedule_check import check_schedule
from souffle.schedule.lower import cuda_target
from tests.schedule.stage_kernels import PLAIN


class Stage(Protocol):
    """A case: its name, its function, and what is asked for."""

    name: str
    request: GpuRequest

    @property
    def func(self) -> tirx.PrimFunc: ...


AnyStage = TypeVar("AnyStage", bound=Stage)


@dataclass(frozen=True, eq=False)
class Choices:
    """All choices as one CUDA text, since each compilation costs more than a case."""

    kernels: dict[str, list[tuple[str, GpuSchedule]]]
    text: str
    module: object
    reference: object

    def assert_equal(
        self, case: str, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], tolerance: float
    ) -> None:
        """Every choice gives what the plain function does, in a fixed and in a shuffled order."""
        expected = [tvm.runtime.tensor(array) for array in outputs]
        self.reference[case](*(tvm.runtime.tensor(array) for array in inputs), *expected)
        for name, schedule in self.kernels[case]:
            signature = re.search(rf"\b{name}_kernel\(([^)]*)\) {{", self.text)
            assert signature is not None
            parameters = [re.sub(r"_ptr$", "", p.split()[-1]) for p in signature.group(1).split(",")]
            by_name = dict(zip([v.name for v in schedule.func.params], (*inputs, *outputs), strict=True))
            for order in ("fixed", "shuffled"):
                for output in outputs:
                    output.fill(7)
                self.module.launch(
                    f"{name}_kernel",
                    grid=(schedule.tiles, 1, 1),
                    block=(schedule.threads, 1, 1),
                    args=[by_name[p] for p in parameters],
                    order=order,
                )
                for output, wanted in zip(outputs, expected, strict=True):
                    np.testing.assert_allclose(output, wanted.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


def built_choices(cases: Sequence[AnyStage], offered: Callable[[AnyStage], Sequence[GpuSchedule | Refused]]) -> Choices:
    """The choices that are offered for each case, of which the first has to be a schedule."""
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    kernels: dict[str, list[tuple[str, GpuSchedule]]] = {}
    every = {}
    for case in cases:
        made = offered(case)
        assert isinstance(made[0], GpuSchedule), made[0]
        good = [one for one in made if isinstance(one, GpuSchedule)]
        kernels[case.name] = [(f"{case.name}_n{number}", one) for number, one in enumerate(good)]
        for name, one in kernels[case.name]:
            check_schedule(one, case.request)
            every[name] = one.func.with_attr("global_symbol", name)
    text = tvm.compile(tvm.IRModule(every), target=cuda_target("sm_90")).mod.imports[0].inspect_source()
    text = with_device_functions(text)
    plain = tvm.IRModule({case.name: case.func for case in cases})
    return Choices(kernels, text, compile_text(text), tvm.compile(plain, target=PLAIN))
