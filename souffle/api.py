"""What a user calls: compile a model, load a saved network, import a program, analyse it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx

from souffle.cache import cache_root
from souffle.errors import OptionError
from souffle.frontend import import_onnx
from souffle.pipeline import check_options, compile_cuda, compile_host
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.runtime.detect import gpu_arch
from souffle.runtime.host_network import HostNetwork
from souffle.runtime.network import check_device

__all__ = ["compile"]

Model = str | os.PathLike | bytes | onnx.ModelProto | TEProgram


def compile(
    model: Model,
    *,
    level: str = "V4",
    target: str = "auto",
    arch: str | None = None,
    precision: str = "fp32",
    partition: str = "souffle",
    batch: int | None = None,
    device: str = "auto",
    cubin: bool = True,
    cache_dir: str | os.PathLike | None = None,
    progress: Callable[[str], None] = lambda message: None,
    hook: Callable[[str, object], object] = lambda stage, result: result,
) -> Network | HostNetwork:
    """Compile a model.

    Parameters
    ----------
    model : path, bytes, ModelProto or TEProgram
        An ONNX model, or a program from :func:`souffle.import_onnx`.
    level : str
        ``"V0"`` to ``"V4"``, each adding one optimization to the last (paper, Table 4).
    target : str
        ``"cuda"``; ``"cpu"`` for LLVM code of the transformed program; ``"auto"`` for CUDA where a GPU is usable, else
        the CPU.
    arch : str, optional
        The GPU's architecture, such as ``"sm_90"``, which is the default where there is no GPU to ask.
    precision : str
        ``"fp32"``, or ``"mixed"``: fp16 operands with fp32 accumulation for GEMM and convolution (paper, §7.1).
    partition : str
        ``"souffle"``, the paper's rule (§5.4), or ``"persistent"``, which does not cut where blocks exceed a wave.
    batch : int, optional
        The value of a symbolic first dimension.
    device : str
        Where a CUDA network runs: ``"cuda"``, or ``"cpu"`` for its emitted text on the CPU; ``"auto"`` is ``"cuda"``.
    cubin : bool
        Whether CUDA text is compiled for a GPU. Without, no CUDA compiler is needed and only ``device="cpu"`` runs it.
    cache_dir : path, optional
        Where compiled kernels are kept; :func:`souffle.cache.cache_root` where not given.
    progress : callable, optional
        Told in a few words what is being done.
    hook : callable, optional
        Sees, and may replace, what each stage of the compiler gives (``docs/debugging.md``).

    Returns
    -------
    Network or HostNetwork

    Raises
    ------
    ModelError, UnsupportedOperatorError
        If the model cannot be imported.
    OptionError
        If an option is not valid.
    CompilerNotFoundError
        If CUDA text has to be compiled and no compiler is found.
    """
    if target not in ("auto", "cuda", "cpu"):
        raise OptionError(f"target={target!r} is not valid; choose one of auto, cuda, cpu")
    check_options(level, precision, partition, arch)
    check_device(device)
    present = gpu_arch() if target == "auto" or (target == "cuda" and arch is None) else None
    progress("importing")
    program = model if isinstance(model, TEProgram) else import_onnx(model, batch=batch)
    if target == "cpu" or (target == "auto" and present is None):
        return HostNetwork(compile_host(program, level=level, precision=precision, progress=progress, hook=hook))
    compiled = compile_cuda(
        program,
        level=level,
        arch=arch or present or "sm_90",
        precision=precision,
        partition=partition,
        cubin=cubin,
        cache_dir=Path(cache_dir) if cache_dir is not None else cache_root(),
        progress=progress,
        hook=hook,
    )
    return Network(compiled.plan, device=device)
