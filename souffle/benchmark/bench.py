"""``souffle.bench``: a model beside other compilers on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

import souffle
from souffle.benchmark.host_way import settle
from souffle.benchmark.measure import machine_name, measure
from souffle.benchmark.peer import Setting
from souffle.benchmark.profile import profile_of
from souffle.benchmark.registry import peer_named
from souffle.benchmark.report import BenchmarkReport
from souffle.benchmark.threads import on_cores
from souffle.benchmark.trace import Trace
from souffle.errors import OptionError
from souffle.frontend.model_options import ModelOptions
from souffle.options import INTEGERS, Progress, quiet
from souffle.parallel import usable_cores
from souffle.reference import has_onnxruntime, onnxruntime_outputs, static_model
from souffle.runtime import Network
from souffle.runtime.comparison import random_inputs
from souffle.runtime.detect import gpu_arch
from souffle.versions import program_of

__all__ = ["bench"]


def bench(
    model: str | os.PathLike | bytes | onnx.ModelProto,
    *,
    against: Sequence[str] = ("ort",),
    threads: int | None = None,
    runs: int = 100,
    warmup: int = 10,
    seconds: float = 300.0,
    inputs: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    target: str = "auto",
    level: str = "V4",
    precision: str = "fp32",
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
    disable: Sequence[str] = (),
    profile: Callable[[Trace], None] | None = None,
    progress: Progress = quiet,
    **options: Any,
) -> BenchmarkReport:
    """Time a model beside other compilers, after their outputs were compared.

    All have the same weights and inputs. Who gives wrong outputs is not timed. Then a round runs each once, in turn, as
    often as `runs` says: with warm caches, where the same has run right before, untimed, and again with caches that are
    overwritten before each run. Between two runs the threads of the process come to rest. On a GPU all are timed as one
    CUDA graph where they can be, and as plain launches.

    Parameters
    ----------
    model : path, bytes or ModelProto
    against : sequence of str
        Of :data:`souffle.benchmark.registry.PEERS`.
    threads : int, optional
        Cores that all may use; all cores that this process may use without.
    runs, warmup : int
        Rounds that count, and rounds before them.
    seconds : float
        The most that all runs of one peer may take, by its first one; whoever would need more is not timed.
    inputs : mapping of str to array, optional
        By the model's names; random ones without.
    seed : int
        Of random inputs.
    target, level, precision, batch, dims, constants, disable, options
        Of :func:`souffle.compile`. Each open dimension has one value. Peers compute in fp32, beside ``"tf32"`` in that
        where they can, and PyTorch beside ``"mixed"`` in float16.
    profile : callable, optional
        Given a trace of our own network by kernel and stage, before anything is timed.
    progress : callable, optional
        Told in a few words what is being done.

    Returns
    -------
    BenchmarkReport
        Also after an interrupt, once there is a network to run.

    Raises
    ------
    OptionError
        If an option is not valid.
    SouffleError
        As :func:`souffle.compile`.
    """
    if runs < 1 or warmup < 0:
        raise OptionError(f"runs is {runs} and warmup {warmup}; they must be at least 1 and 0")
    given = ModelOptions(batch, dims, constants, INTEGERS not in disable)
    if given.has_versions:
        raise OptionError("a benchmark is of one shape; give each open dimension one value")
    peers = [peer_named(name) for name in dict.fromkeys(against)]
    with on_cores(usable_cores() if threads is None else threads):
        setting_threads = usable_cores()
        program = program_of(model, given)
        begin = time.perf_counter()
        # Without a GPU its kernels can be compared, and counted, on the CPU device.
        emulated = target == "cuda" and gpu_arch() is None
        network = souffle.compile(
            program,
            target=target,
            **({"device": "cpu", "cubin": False} if emulated else {}),
            level=level,
            precision=precision,
            disable=disable,
            progress=progress,
            **options,
        )
        prepared = time.perf_counter() - begin
        device = "cuda" if isinstance(network, Network) else "cpu"
        values = random_inputs(network.signature.inputs, seed) if inputs is None else dict(inputs)
        progress("computing what is compared with")
        proto = static_model(model, given)
        reference = "ONNX Runtime, not optimized" if has_onnxruntime() else "Souffle's reference evaluator"
        expected = onnxruntime_outputs(proto, values) if has_onnxruntime() else program.run(values)
        setting = Setting(device, setting_threads, precision)
        machine = machine_name("cpu" if emulated else device)
        report = BenchmarkReport(program.name, machine, setting, level, reference, runs, warmup)
        if profile is not None:
            progress("profiling")
            profile(profile_of(network, values))
        measure(
            proto,
            network,
            peers,
            report,
            inputs=values,
            expected=expected,
            seconds=seconds,
            prepared=prepared,
            version=souffle.__version__,
            progress=progress,
            rest=settle,
        )
    return report
