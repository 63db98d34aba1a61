"""What a user calls to compile a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from souffle.background import BackgroundNetwork, compile_in_background
from souffle.codegen.plan import Plan
from souffle.dump import Dump
from souffle.errors import OptionError
from souffle.frontend.load import LoadedModel, load_model, open_model
from souffle.frontend.model_options import ModelOptions
from souffle.frontend.onnx_import import import_loaded
from souffle.kept import KeptPlan, kept_or_made, place_of
from souffle.loading import network_of
from souffle.options import INTEGERS, Hook, Options, keep
from souffle.program import TEProgram
from souffle.request import CompileRequest, Dims, Model, checked_options
from souffle.runtime import Network, VersionedNetwork
from souffle.runtime.detect import gpu_arch
from souffle.runtime.host_network import HostNetwork
from souffle.runtime.network import check_device
from souffle.schedule.cpu import host_target
from souffle.versions import VersionsRequest, check_open, in_versions

__all__ = ["compile"]

def compile(
    model: Model,
    *,
    level: str = "V4",
    target: str = "auto",
    arch: str | None = None,
    precision: str = "fp32",
    fusion: str = "souffle",
    policy: str | os.PathLike | None = None,
    partition: str = "souffle",
    reductions: str = "ordered",
    grid_barrier: str = "counter",
    waits: str = "auto",
    disable: Sequence[str] = (),
    reuse_policy: str = "belady",
    graph: bool = False,
    watchdog_ms: float | None = None,
    threads: int | None = None,
    processor: str | Sequence[str] | None = None,
    batch: int | None = None,
    dims: Dims | None = None,
    constants: Mapping[str, Any] | None = None,
    pad: bool | Sequence[str] = False,
    pad_values: Mapping[str, float] | None = None,
    on_demand: bool = False,
    verify: str = "memory",
    tuning_log: str | os.PathLike | None = "auto",
    device: str = "auto",
    cubin: bool = True,
    cache_dir: str | os.PathLike | None = None,
    progress: Callable[[str], None] = lambda message: None,
    hook: Hook = keep,
    dump: str | os.PathLike | None = None,
    background: bool | str = False,
) -> Network | HostNetwork | BackgroundNetwork | VersionedNetwork:
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
        ``"fp32"``, IEEE arithmetic throughout; ``"tf32x3"``: GEMM and convolution of fp32 operands on tensor cores from
        sm_80 on, each factor as a sum of two numbers in TF32, which is about as exact as fp32 (an infinite factor gives
        NaN); ``"tf32"``: the same with each factor rounded to TF32 once, to 11 bits, as what frameworks call TF32; or
        ``"mixed"``: fp16 operands with fp32 accumulation for GEMM and convolution (paper, §7.1). Products that no rule
        takes to tensor cores, and all with ``target="cpu"``, stay in IEEE fp32 under both of TF32.
    fusion : str
        Which TEs one block computes together (``docs/planners.md``): ``"souffle"``, its own rules; ``"stitching-ilp"``
        and ``"stitching-dp"``, the planners of FusionStitching (2019 and 2021); ``"xla-rules"``; ``"tvm"``, TVM's own
        operator fusion; ``"learned"``, priority fusion by a policy that was trained, and beside it
        ``"priority-default"``, ``"priority-greedy"`` and ``"priority-annealing"``; or a planner of your own, as
        ``"mypackage.module:planner"``. Up to V2 a pattern of theirs is a
        kernel, as far as it needs no barrier of the whole grid; from V3 on `partition` merges what they made. Not for
        ``target="cpu"``.
    policy : path, optional
        The file of the policy for ``fusion="learned"`` (``souffle learn``); without, the one that ships.
    partition : str
        ``"souffle"``, the paper's rule (§5.4), or ``"persistent"``, which cuts only where the cost model says that it
        pays; or a planner of your own, as ``"mypackage.module:planner"`` (``docs/extending.md``).
    reductions : str
        ``"ordered"``: from V3 on, a reduction that leaves multiprocessors idle may be taken in two phases (§6.3),
        combined in a fixed order, so that results are the same bits in every run; ``"one_phase"``: none is.
    grid_barrier : str
        How the blocks of a kernel wait for each other (§6.4): ``"counter"``, by our own counter of arrivals in memory
        of the network, or ``"cooperative"``, by cooperative groups, which take longer (`docs/results.md`) and cannot
        have a limit (`watchdog_ms`).
    waits : str
        What stands between stages of a kernel that depend on each other: ``"barriers"``, of all blocks (§6.4);
        ``"flags"``, for which tiles wait until the tiles that they need are done; or ``"auto"``, at V4 what is
        predicted to take less.
    disable : sequence of str
        What V4 is to leave out, to see its effect alone: any of ``"attention"``, ``"normalization"``,
        ``"interleaving"``, ``"channels"``, ``"reuse"``, ``"resident"``, ``"ramps"``,
        ``"weights"``, ``"teams"``, ``"hfuse"`` and ``"prologues"`` (:data:`souffle.options.ON_CHIP`). Levels below have
        none of them, but for ``"teams"``, which V3 has. And ``"integers"``, which every level has of an ONNX model:
        products of what ``DequantizeLinear`` makes are computed on the integers. And ``"winograd"``, which the CPU
        target has at every level: convolutions of 3 x 3 weights by minimal filtering, which where the image is infinite
        or NaN give NaN for results up to four places away from there. And ``"gathered"``, which it has from V1 on:
        independent products with the same weights, such as those of a recurrent layer's inputs, are one. On the CPU
        ``"interleaving"`` is had from V2 on.
    reuse_policy : str
        Which tensors stay in shared memory where not all have room that could: ``"belady"``, those that are needed
        soonest, or ``"lru"``, those that were used last (the paper's, §6.5).
    graph : bool
        Whether the network is to run as one CUDA graph on a GPU, whose kernels follow each other sooner than those that
        are launched one by one, and whose inputs and outputs are copied. At V4, kernels end where that pays then.
    watchdog_ms : float, optional
        After how many milliseconds a wait of a kernel for its other blocks is over. Then the kernel, and those that
        follow in the run, end, and a :class:`souffle.errors.KernelTimeoutError` says where which block waited for what;
        the next run is right again (``docs/debugging.md``). None: waits have no limit, nor their text a watchdog.
    threads : int, optional
        With how many threads a call of a network for the CPU computes at most, the calling one among them (what ONNX
        Runtime calls ``intra_op_num_threads``): its loops are cut for so many, and so many are kept in the file that
        it is saved to; :func:`souffle.load` may give another number. Without, as many as there are cores that the
        process may use, by its affinity and a container's quota; more than these never compute. Calls at the same time
        divide them. Results do not depend on how many threads compute a call.
    processor : str or sequence of str, optional
        Which processor a network for the CPU is compiled for, by LLVM's name: this machine's without. A file that is to
        run on others is compiled for the oldest of them, such as ``"x86-64-v3"`` (AVX2) or ``"x86-64-v4"`` (AVX-512);
        where instructions are missing, the first call raises a :class:`souffle.errors.ArtifactError`. Of several, the
        file has code and packed weights for each, and :func:`souffle.load` takes what suits the machine.
    batch : int, optional
        The value of a symbolic first dimension of an ONNX model.
    dims : mapping of str to int or list of int, optional
        The values of its open dimensions, by the names that the model gives them, or as ``"input:axis"`` where it gives
        none: ``{"seq": 128}``. With a list for any of them, such as ``{"batch": [1, 4], "seq": [128, 384]}``, a version
        is compiled for each combination, and a call runs the one that its inputs have the shape of.
    constants : mapping of str to array, optional
        Values of inputs of an ONNX model that are known now, such as axes, sizes and conditions on which the program
        depends, or weights that are given as inputs: the network has them as constants, and no such inputs. An array
        has the input's type and shape; numbers and lists of them are taken in that type. They are those of all
        versions, and open dimensions of such an input are what its value has.
    pad : bool or list of str
        With versions: an input of another shape is made larger to the smallest version that holds it, along all open
        dimensions or those that are named, and outputs are cut back. It is for models that bear it, by an attention
        mask or along a batch, and where the model declares the shapes of outputs by the names of open dimensions.
        Outputs of two versions are compared, for one random input along each dimension, and padding that changes them
        is refused (not with ``verify="off"``, nor with ``device="cpu"``). See
        :class:`souffle.runtime.VersionedNetwork`.
    pad_values : mapping of str to number, optional
        With what inputs are padded, by their names; 0 where nothing is given.
    on_demand : bool
        With versions: a shape that none has is compiled by the first call that needs it, and kept. The model's weights
        are kept for that.
    verify : str
        What the compiler proves of the CUDA kernels that it made (``docs/verification.md``). ``"memory"``: no races, no
        divergent barriers, no stray accesses, and a grid that fits; if that is refuted, compiling fails. ``"values"``:
        also, by random evaluation, that stages compute what they are to. ``"off"``: nothing. For ``target="cpu"``
        nothing is proven.
    tuning_log : path, "auto" or None
        Where schedules are looked up that a search found (:func:`souffle.tune`): a folder; ``"auto"`` for those named
        in ``$SOUFFLE_TUNING_LOGS`` and the one that ships; ``None`` for the rules' own choices.
    device : str
        Where a CUDA network runs: ``"cuda"``, or ``"cpu"`` for its emitted text on the CPU; ``"auto"`` is ``"cuda"``.
    cubin : bool
        Whether CUDA text is compiled for a GPU. Without, no CUDA compiler is needed and only ``device="cpu"`` runs it.
    cache_dir : path, optional
        Where compiled kernels are kept, and whole networks for the CPU, so that the second compilation of a model
        takes about the time of reading it (``docs/debugging.md``); :func:`souffle.cache.cache_root` where not given.
    progress : callable, optional
        Told in a few words what is being done.
    hook : callable, optional
        Sees, and may replace, what each stage of the compiler gives (``docs/debugging.md``).
    dump : path, optional
        A folder for what each stage of the compiler gives, as numbered files of text, in which a compilation that fails
        leaves what it has (``docs/debugging.md``). The files of an earlier dump are replaced. Each version has a folder
        of its own in it, such as ``batch=1,seq=128``.
    background : bool or "cpu"
        Compile in a process of its own, and give a network that runs meanwhile (FusionStitching, §6): the same model at
        V0 for the same device, or with ``"cpu"`` LLVM code for this machine's processor. The optimized network takes
        its place, between calls, when it is compiled and verified. `progress` is told of the first one only; a `hook`
        cannot be had. See :class:`souffle.background.BackgroundNetwork`.

    Returns
    -------
    Network, HostNetwork, BackgroundNetwork or VersionedNetwork
        Any number of threads may call it at the same time: calls run in parallel and none sees another.

    Raises
    ------
    ModelError, UnsupportedOperatorError
        If the model cannot be imported.
    OptionError
        If an option is not valid.
    CompilerNotFoundError
        If CUDA text has to be compiled and no compiler is found.
    CertificateError
        If `verify` finds that a kernel is wrong: the counterexample, which is a bug of the compiler.
    """
    if target not in ("auto", "cuda", "cpu"):
        raise OptionError(f"target={target!r} is not valid; choose one of auto, cuda, cpu")
    processors = _processors(processor)
    options = checked_options(
        arch,
        cache_dir,
        level=level,
        precision=precision,
        fusion=fusion,
        policy=policy,
        partition=partition,
        reductions=reductions,
        grid_barrier=grid_barrier,
        waits=waits,
        disable=disable,
        reuse_policy=reuse_policy,
        graph=graph,
        watchdog_ms=watchdog_ms,
        threads=threads,
        processor=processors[0],
        verify=verify,
        tuning_log=tuning_log,
        cubin=cubin,
    )
    check_device(device)
    if background not in (False, True, "cpu"):
        raise OptionError(f'background={background!r} is not valid; choose one of False, True and "cpu"')
    if background and hook is not keep:
        raise OptionError(
            "background=True compiles in another process, where no hook of this one can be called; give dump= to see "
            "what each stage gives, or compile with background=False"
        )
    given = ModelOptions(batch, dims, constants, INTEGERS not in options.disable)
    versions = given.has_versions
    if not versions and (pad or pad_values or on_demand):
        what = "on_demand=True" if on_demand else "pad"
        raise OptionError(f'{what} is for versions; give dims lists of values, such as {{"seq": [128, 384]}}')
    if versions and background:
        raise OptionError(
            "background=True is for one version; compile the versions with background=False, or one of them by single "
            "values in dims"
        )
    check_open(model, given)
    present = gpu_arch() if target == "auto" or (target == "cuda" and arch is None) else None
    # Where it cannot be written is said before anything is imported.
    dumped = None if dump is None or versions or len(processors) > 1 else Dump(dump)
    progress("importing")
    on_host = target == "cpu" or (target == "auto" and present is None)
    if not on_host:
        options = replace(options, arch=arch or present or options.arch)
    if len(processors) > 1 and (background or not on_host):
        raise OptionError(
            f"processor={processor!r} is for networks of the CPU that are compiled here; give target=\"cpu\" and "
            "background=False"
        )
    for name in processors if on_host else ():
        host_target(threads, name)  # a name that is wrong is said before anything is compiled

    def place(source: LoadedModel | TEProgram, chosen: Options) -> KeptPlan | None:
        """Where its plan may be; who looks into a compilation, or changes it, has one."""
        looked_into = hook is not keep or dump is not None
        return None if looked_into or isinstance(source, TEProgram) else place_of(source, chosen, on_host=on_host)

    def request(source: LoadedModel | TEProgram, chosen: Options, into: Dump | None) -> CompileRequest:
        program = source if isinstance(source, TEProgram) else import_loaded(source)
        return CompileRequest(program, chosen, on_host, into)

    def plan_of(source: LoadedModel | TEProgram, into: Dump | None, *folder: str) -> Plan:
        """For each processor; what is dumped is in a folder for each where these are several."""

        def plan_for(name: str | None) -> Plan:
            chosen = replace(options, processor=name)
            where = Dump(Path(dump, *folder, str(name))) if dump is not None and len(processors) > 1 else into

            def made() -> Plan:
                return request(source, chosen, where).plan(progress=progress, hook=hook)

            return kept_or_made(place(source, chosen), made, progress)

        first, *others = map(plan_for, processors)
        return replace(first, others=tuple(others)) if others else first

    if versions:
        opened = open_model(model, given)
        # On the CPU device, only small networks run in no time.
        compares = verify != "off" and (on_host or device != "cpu")
        wanted = VersionsRequest(opened, given, pad, pad_values or {}, on_demand, device, compares)

        def in_folder(loaded: LoadedModel, said: str) -> Plan:
            name = re.sub(r"[^\w=,+-]+", "_", said.replace(", ", ","))
            into = None if dump is None or len(processors) > 1 else Dump(Path(dump) / name)
            return plan_of(loaded, into, name)

        return in_versions(wanted, in_folder, progress)
    source = model if isinstance(model, TEProgram) else load_model(model, given)
    if background:
        kept = place(source, options)
        found = None if kept is None else kept.plan()
        if found is not None:
            return BackgroundNetwork(None, network_of(found, device=device))
        return compile_in_background(
            request(source, options, dumped),
            device=device,
            on_host=background == "cpu",
            progress=progress,
            ready=None if kept is None else kept.keep,
        )
    return network_of(plan_of(source, dumped), device=device)


def _processors(given: str | Sequence[str] | None) -> tuple[str | None, ...]:
    """The processors that a caller named, each once; None for this machine's.

    Raises
    ------
    OptionError
        If it is no name and no list of names.
    """
    if given is None or isinstance(given, str):
        return (given,)
    names = tuple(dict.fromkeys(given))
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f'processor={given!r} is not valid; give a name, or a list of names such as ["x86-64-v3", "x86-64-v4"]'
        )
    return names
