"""One compilation as data: what is compiled, how, and for which machine. What it gives is a plan, in any process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from souffle.cache import cache_root
from souffle.codegen.plan import Plan
from souffle.dump import Dump
from souffle.errors import CertificateError
from souffle.options import Hook, Options, keep, quiet
from souffle.pipeline import check_names, compile_cuda, compile_host
from souffle.program import TEProgram

__all__ = ["CompileRequest", "Dims", "Model", "checked_options"]

Model = str | os.PathLike | bytes | onnx.ModelProto | TEProgram

Dims = Mapping[str, int | Sequence[int]]
"""The values of open dimensions by name."""


def checked_options(arch: str | None, cache_dir: str | os.PathLike | None, **choices: object) -> Options:
    """What a caller chose, checked before anything is done; where no architecture is given, for the options' own."""
    given = {"arch": arch} if arch else {}
    kept_in = Path(cache_dir) if cache_dir is not None else cache_root()
    options = Options(**choices, **given, cache_dir=kept_in)
    check_names(options)
    return options


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A program and how it is to be compiled.

    Attributes
    ----------
    program : TEProgram
    options : Options
        With the architecture that was settled on.
    on_host : bool
        LLVM code for this machine's processor instead of CUDA kernels.
    dump : Dump or None
        Where what each stage gives is written.
    """

    program: TEProgram
    options: Options
    on_host: bool
    dump: Dump | None = None

    def first(self, *, on_host: bool) -> CompileRequest:
        """What of the same program is compiled soonest: V0, whose kernels are proven unless nothing is to be proven.

        Parameters
        ----------
        on_host : bool
            For this machine's processor, whatever the whole is for.
        """
        wanted = self.options
        options = Options(
            level="V0",
            precision=wanted.precision,
            arch=wanted.arch,
            grid_barrier=wanted.grid_barrier,
            waits=wanted.waits,
            graph=wanted.graph,
            threads=wanted.threads,
            processor=wanted.processor,
            verify="off" if wanted.verify == "off" else "memory",
            tuning_log=wanted.tuning_log,
            cubin=wanted.cubin,
            cache_dir=wanted.cache_dir,
        )
        return CompileRequest(self.program, options, self.on_host or on_host)

    def plan(self, *, progress: Callable[[str], None] = quiet, hook: Hook = keep) -> Plan:
        """Compile it.

        Raises
        ------
        OptionError, CompilerNotFoundError, CertificateError
            As :func:`souffle.compile`.
        """
        dumped = self.dump
        hook = hook if dumped is None else dumped.around(hook)
        try:
            if self.on_host:
                plan = compile_host(self.program, self.options, progress=progress, hook=hook)
            else:
                plan = compile_cuda(self.program, self.options, progress=progress, hook=hook).plan
        except CertificateError as error:
            if dumped is not None:
                dumped.certificate(error.certificate)
            raise
        if dumped is not None:
            dumped.plan(plan)
        return plan
