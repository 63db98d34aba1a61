"""A candidate on its way: what the worker that looks at it has lowered, another compiles, without lowering it again."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx

from souffle.codegen.cuda import merged_kernels, text_of_functions
from souffle.codegen.plan import Resources
from souffle.cost import CostDevice, CountedFunction, predict_counted
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.resources import StageResources

__all__ = ["Candidate", "kernel_name", "text_of_candidates"]

_DIGITS = 16
"""Of a name, by which candidates in one text differ."""

_LEVEL = 1
"""Of compression, the quickest: JSON of TVM's becomes a sixth by it."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate that lowers.

    Attributes
    ----------
    name : str
        Of its kernel: a digest of the recipe.
    tiles, threads, shared_bytes : int
        Of the kernel.
    counted : tuple of CountedFunction
        What the cost model has to know of the functions of the stage.
    kernel : tirx.PrimFunc
    functions : dict of str to PrimFunc
        That it calls, by name.
    """

    name: str
    tiles: int
    threads: int
    shared_bytes: int
    counted: tuple[CountedFunction, ...]
    kernel: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]

    @staticmethod
    def of_stage(
        key: str,
        functions: Sequence[DeviceFunction],
        parameters: Sequence[tuple[str, int]],
        counted: Sequence[CountedFunction],
    ) -> Candidate:
        """Of a lowered stage.

        Parameters
        ----------
        key : str
            Of the recipe.
        functions : sequence of DeviceFunction
        parameters : sequence of (str, int)
            Type and bytes of each tensor that it takes.
        counted : sequence of CountedFunction
            Of the functions.

        Raises
        ------
        LoweringError
            If no kernel can call the functions.
        """
        name = kernel_name(key)
        shape = kernel_of_stage(functions, parameters, f"{name}_part")
        (merged,), called = merged_kernels([(name, shape)])
        return Candidate(name, shape.tiles, shape.threads, shape.shared_bytes, tuple(counted), merged.func, called)

    @staticmethod
    def of_bytes(data: bytes) -> Candidate:
        """What :meth:`packed` packed."""
        return Candidate(*pickle.loads(zlib.decompress(data)))

    def packed(self) -> bytes:
        """The same as bytes."""
        fields = (self.name, self.tiles, self.threads, self.shared_bytes, self.counted, self.kernel, self.functions)
        return zlib.compress(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL), _LEVEL)

    def seconds(self, device: CostDevice, used: Resources | None = None) -> list[float]:
        """As predicted, with a cold and with a warm second-level cache.

        Parameters
        ----------
        device : CostDevice
        used : Resources, optional
            As ptxas reports them of the kernel; estimated without.

        Raises
        ------
        OptionError
            If a block does not fit on the device.
        """
        counted = self.counted
        if used is not None:
            resources = StageResources(
                used.registers,
                used.static_shared_bytes,
                max(one.resources.dynamic_shared_bytes for one in counted),
                max(one.resources.threads for one in counted),
                used.spill_store_bytes,
                True,
            )
            counted = tuple(replace(one, resources=resources) for one in counted)
        return [predict_counted(counted, device, warm=warm).seconds for warm in (False, True)]


def kernel_name(key: str) -> str:
    """The name of a candidate's kernel, by its recipe's key."""
    return f"candidate_{hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]}"


def text_of_candidates(candidates: Sequence[Candidate], target: tvm.target.Target) -> str:
    """The CUDA text of the kernels of some candidates, no two of one recipe."""
    functions = {name: func for one in candidates for name, func in one.functions.items()}
    return text_of_functions({one.name: one.kernel for one in candidates}, functions, target)
