"""Boards behind TVM's RPC: its own tracker and server run here, with its own CUDA runtime on a played CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from tvm import rpc, te, tirx

import souffle
from benchmarks.played_board import PlayedBoard, played_board, serving
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.codegen.plan import Plan, Resources
from souffle.errors import CompilerNotFoundError, NoGpuError, OptionError
from souffle.runtime import Network
from souffle.tuning.board import BoardAddress, BoardError, device, job_seconds, measure, parse_board_address
from souffle.tuning.board.artifact import cuda_module, host_library
from souffle.tuning.board.kernel import BoardKernel
from souffle.tuning.board.session import BoardDevice
from souffle.tuning.board.timing import InTurn, in_turn
from souffle.workers import Job, Outcome, engine_for
from tests.thorough import some

pytest.importorskip("tornado", reason="TVM's RPC tracker needs it")
pytest.importorskip("cloudpickle", reason="TVM's RPC server needs it")

ARCH = "sm_90"
MEASURE = "souffle.tuning.board:measure"
COLD, WARM = 12e-6, 5e-6
FASTER_COLD, FASTER_WARM = 9e-6, 4e-6


def program(rows: int, inner: int, columns: int, dtype: str = "float32") -> souffle.TEProgram:
    """A product with integers behind it."""
    a, b = te.placeholder((rows, inner), dtype, name="a"), te.placeholder((inner, columns), dtype, name="b")
    bias = te.placeholder((columns,), "int32", name="bias")
    k = te.reduce_axis((0, inner), name="k")
    product = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    shifted = te.compute((rows, columns), lambda i, j: product[i, j] + bias[j].astype(dtype), name="shifted")
    return souffle.from_te([a, b, bias], [shifted])


def machine_code(text: str) -> bytes:
    """Of nvcc where it is; else what looks like some to who reads its length, as the played CUDA does."""
    if find_nvcc() is not None:
        return compile_cubin(text, ARCH)[0]
    data = text.encode()
    return (b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(data))).ljust(64, b"\0") + data


def compiled(te_program: souffle.TEProgram, *names: str) -> list[Plan]:
    """A plan of one kernel, under several names."""
    plan = souffle.compile(
        te_program, arch=ARCH, level="V2", target="cuda", device="cpu", verify="off", tuning_log=None, cubin=False
    ).plan
    (kernel,), (module,) = plan.kernels, plan.modules
    plans = []
    for name in names:
        text = module.text.replace(kernel.name, name)
        code = dataclasses.replace(module, text=text, cubin=machine_code(text))
        plans.append(dataclasses.replace(plan, modules=(code,), kernels=(dataclasses.replace(kernel, name=name),)))
    return plans


class Played(NamedTuple):
    """A board that is served, and plans that it knows."""

    board: PlayedBoard
    address: str
    tracker: int
    rule: Plan
    candidate: Plan

    def payload(self, **changes: Any) -> dict[str, Any]:
        """What a job is given, with some of it in another way."""
        given = {"plan": self.candidate, "baseline": self.rule, **changes}
        plans = {role: pickle.dumps(given.pop(role)) for role in ("plan", "baseline")}
        return {"address": f"{self.address}?seconds=30&wait=20", **given, **plans}

    def knows(self, *plans: Plan) -> None:
        for plan in plans:
            self.board.add(plan.modules[0].cubin, plan.modules[0].text)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    board = PlayedBoard(tmp_path_factory.mktemp("board") / "board", {"name": "played GPU", "l2": 64 << 20})
    rule, candidate = compiled(program(13, 40, 7), "rule", "trial3")
    board.costs(rule=(COLD * 1e6, WARM * 1e6), trial3=(FASTER_COLD * 1e6, FASTER_WARM * 1e6))
    with played_board(board, "one") as (address, _):
        found = Played(board, address, parse_board_address(address).port, rule, candidate)
        found.knows(rule, candidate)
        yield found


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "played" in request.fixturenames:
        request.getfixturevalue("played").board.mend()


def measured(value: dict[str, Any]) -> tuple[float, ...]:
    """Cold and warm, of the candidate and the baseline, in a µs' thousandths, since floats are added on the way."""
    assert value["problem"] == ""
    return tuple(round(one * 1e9) for one in (*value["seconds"], *value["baseline_seconds"]))


FIGURES = tuple(round(one * 1e9) for one in (FASTER_COLD, FASTER_WARM, COLD, WARM))


# what needs no board


def test_addresses() -> None:
    given = {
        "rpc://10.0.0.7:9190/orin": BoardAddress("10.0.0.7", 9190, "orin"),
        "rpc://[::1]:9190/a%2520b?priority=-2": BoardAddress("::1", 9190, "a%20b", priority=-2),
        "rpc://lab:1/K?host=aarch64-linux-gnu&wait=3600&seconds=0.5": BoardAddress(
            "lab", 1, "K", "aarch64-linux-gnu", wait=3600.0, seconds=0.5
        ),
    }
    for text, address in given.items():
        assert parse_board_address(text) == address
        assert parse_board_address(str(address)) == address
    for text in (
        *("rpc://lab/K", "rpc://lab:9190", "rpc://lab:9190/", "rpc:///K", "http://lab:9190/K", "rpc://lab:x/K"),
        *("rpc://lab:99999/K", "rpc://lab:0/K", "rpc://lab:9190/a/b", "rpc://lab:9190/a%20b", "rpc://lab:1/K#x"),
        *("rpc://lab:1/K?wait=0", "rpc://lab:1/K?wait=nan", "rpc://lab:1/K?seconds=-1", "rpc://lab:1/K?seconds=inf"),
        *("rpc://lab:1/K?priority=1.5", "rpc://lab:1/K?color=red", "rpc://lab:1/K?wait=1&wait=2", "rpc://lab:1/K?host="),
    ):
        with pytest.raises(OptionError, match=re.escape(repr(text))):
            parse_board_address(text)
    assert job_seconds(BoardAddress("lab", 1, "K", wait=10.0, seconds=20.0)) > 30.0


@pytest.mark.thorough("TVM makes a module by nvcc, to compare with")
def test_machine_code_has_the_form_of_tvms_own_modules(played: Played) -> None:
    """Byte for byte what TVM writes of a module of its own, but for what code it is."""
    kernel = BoardKernel.of_plan(played.rule)
    target = tvm.target.Target({"kind": "cuda", "arch": ARCH}, host="llvm")
    pointer = tvm.ir.PointerType(tvm.ir.PrimType("uint8"), "global")
    parameters = [*(tirx.Var(f"p{i}", pointer) for i in range(len(kernel.tensors))), tirx.Var("blocks", "int32")]
    attributes = {
        **{"global_symbol": kernel.name, "target": target, "calling_conv": 2, "tirx.is_global_func": True},
        "tirx.kernel_launch_params": ["blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory"],
    }
    nothing = tirx.Evaluate(tirx.const(0, "int32"))
    own = tvm.get_global_func("target.build.cuda")(
        tvm.IRModule({kernel.name: tirx.PrimFunc(parameters, nothing).with_attrs(attributes)}), target
    )
    host = tvm.compile(tvm.IRModule({"f": tirx.PrimFunc([], nothing).with_attr("global_symbol", "f")}), target="llvm")
    module = getattr(host, "mod", host)
    module.import_module(own)
    text = tvm.get_global_func("runtime.ModulePackImportsToC")(module, False, "")
    packed = bytes(int(one, 16) for one in re.findall(r"0x([0-9a-fA-F]{2})", text))
    ours = cuda_module(dataclasses.replace(kernel, code=own.inspect_source("cuda").encode()))
    theirs = struct.pack("<Q", 5) + b"cubin"
    assert ours.startswith(theirs)
    assert struct.pack("<Q", 4) + b"cuda" + ours[len(theirs) :] in packed


def test_the_library_is_for_the_boards_processor(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = BoardKernel.of_plan(played.rule)
    with pytest.raises(CompilerNotFoundError, match=r"powerpc64le-linux-gnu-g\+\+.*package g\+\+-powerpc64le"):
        host_library(kernel, "powerpc64le-linux-gnu")
    # A linker that gives the code that it was to link: what LLVM has made of the library.
    script = 'while [ "$1" ]; do case "$1" in -o) shift; out=$1;; *.o) in=$1;; esac; shift; done; cp "$in" "$out"'
    for triple, machine in (("aarch64-linux-gnu", 183), ("nonsense", 0)):
        linker = tmp_path / f"{triple}-g++"
        linker.write_text(f"#!/bin/sh\n{script}\n")
        linker.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        if machine:
            assert struct.unpack_from("<H", host_library(kernel, triple), 18) == (machine,)
        else:
            with pytest.raises(OptionError, match="'nonsense'"):
                host_library(kernel, triple)
    own = host_library(kernel, "")
    assert host_library(kernel, "") is own


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: dataclasses.replace(plan, launches=plan.launches * 2), "2 launches of 1 kernels"),
        (lambda plan: with_kernel(plan, grid_syncs=1), "waits for its grid"),
        (lambda plan: with_kernel(plan, resources=Resources(9, 40000, 0, 0), dynamic_shared_bytes=9999), "40000 bytes"),
        (lambda plan: of_kind(plan, "constant"), "more than inputs and outputs"),
    ],
)
def test_what_a_board_is_not_sent(played: Played, change: Callable[[Plan], Plan], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        BoardKernel.of_plan(change(played.rule))
    without = dataclasses.replace(played.rule.modules[0], cubin=b"")
    with pytest.raises(CompilerNotFoundError, match="no machine code"):
        BoardKernel.of_plan(dataclasses.replace(played.rule, modules=(without,)))


def with_kernel(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, kernels=(dataclasses.replace(plan.kernels[0], **changes),))


def of_kind(plan: Plan, kind: str) -> Plan:
    first, *others = plan.buffers
    return dataclasses.replace(plan, buffers=(dataclasses.replace(first, kind=kind), *others))


def test_architectures() -> None:
    orin = BoardDevice("Orin", "sm_87", 0)
    for arch in ("sm_80", "sm_86", "sm_87"):
        orin.require(arch)
    BoardDevice("H100", "sm_90", 0).require("sm_90a")
    for arch in ("sm_89", "sm_90", "sm_75", "sm_80a", "sm_100"):
        with pytest.raises(NoGpuError, match=rf"{arch}, and the board's Orin is sm_87"):
            orin.require(arch)


# times


class Clock:
    """A device whose times are made up: a spacer, and launches behind it."""

    def __init__(self, cold: float, warm: float, change: Callable[[int, float], float] = lambda _, one: one) -> None:
        self.cold, self.warm, self.change = cold, warm, change

    def __call__(self, launches: int, repeats: int) -> list[float]:
        whole = 1e-4 + (self.cold + (launches - 1) * self.warm if launches else 0.0)
        return [self.change(next(CALLS), whole) for _ in range(repeats)]


CALLS = itertools.count()


def test_times_of_two_in_turn() -> None:
    def near(found: InTurn, part: float) -> bool:
        exact = (FASTER_COLD, FASTER_WARM, COLD, WARM)
        return all(abs(one / other - 1) < part for one, other in zip((*found.seconds, *found.baseline), exact))

    def pair(change: Callable[[int, float], float]) -> InTurn:
        return in_turn(Clock(FASTER_COLD, FASTER_WARM, change), Clock(COLD, WARM, change))

    assert near(pair(lambda _, one: one), 1e-6)
    # Each fifth run is interrupted.
    assert near(pair(lambda number, one: one * (40 if number % 5 == 0 else 1)), 1e-6)
    # A clock that gets slower by half while both are measured: what one is to the other stays.
    start = next(CALLS)
    slowing = pair(lambda number, one: one * (1 + 0.5 * (number - start) / 300))
    assert abs(slowing.seconds[1] / slowing.baseline[1] - FASTER_WARM / WARM) < 0.08
    # Rounds that are far from the others are said to be.
    number = iter(range(10**6))
    once_slow = Clock(FASTER_COLD, FASTER_WARM, lambda _, one: one * (3 if 60 < next(number) < 75 else 1))
    odd = in_turn(once_slow, Clock(COLD, WARM))
    assert odd.left_out >= 1 and near(odd, 1e-6)
    # What takes a second is not repeated as what takes a µs is.
    before = next(CALLS)
    slow = in_turn(Clock(1.0, 0.9), Clock(1.2, 1.0))
    assert next(CALLS) - before < 60
    assert slow.seconds == pytest.approx((1.0, 0.9))
    noise = np.random.default_rng(1)
    for change, words in (
        (lambda _, one: float("nan"), "took"),
        (lambda _, one: 0.0, "took"),
        (lambda _, one: -one, "took"),
        (lambda _, one: 1e-4, "are nothing"),
        (lambda _, one: 1e-4 + 1e-4 * noise.random() ** 8, "are (too unsteady|nothing)"),
    ):
        with pytest.raises(BoardError, match=words):
            pair(change)


# a board


def test_a_candidate_is_measured(played: Played) -> None:
    """With the figures that the played GPU was given, behind TVM's runtime, its RPC and its timer."""
    about = device({"address": played.address}, {})
    assert about == {"name": "played GPU", "arch": ARCH, "boards": 1}
    value = measure(played.payload(), {})
    assert measured(value) == FIGURES
    assert (value["device"], value["left_out"]) == ("played GPU", 0)


def test_launches_are_those_of_souffles_own_runtime(played: Played) -> None:
    """Grid, block, and dynamic shared memory, also where it has to be allowed."""
    large = with_kernel(played.rule, dynamic_shared_bytes=60_000)
    before = len(played.board.launches())
    assert measure(played.payload(plan=large, baseline=played.rule), {})["problem"] == ""
    seen = {launch for name, launch in played.board.launches()[before:] if name == "rule"}
    driver = RehearsalDriver({played.rule.modules[0].cubin: played.rule.modules[0].text})
    for plan, allowed in ((played.rule, 48 * 1024), (large, 60_000)):
        buffers = [one for one in plan.buffers if one.kind == "input"]
        Network(plan, device="cuda", driver=driver)(*(np.zeros(one.shape, one.dtype) for one in buffers))
        own = driver.launches[-1]
        assert not own["cooperative"]
        assert any(one[1:] == (own["grid"], 1, 1, own["block"], 1, 1, own["shared"], allowed, 0) for one in seen)
        assert own["integers"] == (own["grid"],)
    assert len({one[1:] for one in seen}) == 2


@pytest.mark.parametrize("shape", some([(17, 2, 31)], [(1, 1, 1), (3, 5, 1)]))
def test_odd_sizes_and_types(played: Played, shape: tuple[int, int, int]) -> None:
    plan, other = compiled(program(*shape, "float16" if shape[0] == 17 else "float32"), "odd", "other")
    played.knows(plan, other)
    given = played.payload(plan=other, baseline=plan)
    assert measure(given, {})["problem"] == ""
    played.board.fault("nan", "other", always=True)
    count = shape[0] * shape[2]
    assert measure(given, {})["problem"] == (
        f"shifted differs from the rule's own schedule in {count} of {count} elements"
    )


@pytest.mark.parametrize(
    ("fault", "kernel", "words"),
    [
        ("wrong", "trial3", "differs from the rule's own schedule in 1 of 91 elements"),
        ("nan", "trial3", "differs from the rule's own schedule in 91 of 91 elements"),
        ("lost", "trial3", "differs from the rule's own schedule in 91 of 91 elements"),
    ],
)
def test_what_a_candidate_computes_wrong(played: Played, fault: str, kernel: str, words: str) -> None:
    """Always, which is the candidate's own; once, which is asked for again."""
    played.board.fault(fault, kernel)
    with pytest.raises(BoardError, match=f"{words}, and not the next time"):
        measure(played.payload(), {})
    played.board.fault(fault, kernel, always=True)
    assert re.search(words, measure(played.payload(), {})["problem"])
    played.board.mend()
    assert measured(measure(played.payload(), {})) == FIGURES


@pytest.mark.parametrize(
    ("fault", "kernel", "words"),
    [
        ("fault", "trial3", "running the candidate: CUDALaunch Error: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("nan", "rule", "computes nothing with the rule's own schedule"),
        ("lost", "rule", "computes nothing with the rule's own schedule"),
        ("wrong", "rule", "computes nothing with the rule's own schedule"),
        ("no-time", "", "launches behind a copy took"),
    ],
)
def test_what_a_board_does_wrong(played: Played, fault: str, kernel: str, words: str) -> None:
    played.board.fault(fault, kernel, always=fault != "wrong")
    with pytest.raises(BoardError, match=words):
        measure(played.payload(), {})
    played.board.mend()
    assert measured(measure(played.payload(), {})) == FIGURES


def test_interruptions_are_left_out(played: Played) -> None:
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.01):
            played.board.fault("slow", "trial3")

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        found = measured(measure(played.payload(), {}))
    finally:
        stop.set()
        interrupting.join()
    assert found == FIGURES


def test_a_board_that_hangs_costs_one_attempt(played: Played) -> None:
    """A kernel without end, times that never come, and a server that is stopped: each ends in time and says where."""
    for fault, where in (("hang", "running the baseline"), ("nan-time", "measuring")):
        played.board.fault(fault, always=fault == "nan-time")
        with pytest.raises(BoardError, match=f"it took longer than 1 s, and was at {where}"):
            measure(played.payload(address=f"{played.address}?seconds=1&wait=20"), {})
        played.board.mend()
    played.board.fault("hang", "trial3")
    with engine_for("local:1") as engine:
        job = Job(MEASURE, played.payload(address=f"{played.address}?seconds=2&wait=20"), "a candidate", seconds=60.0)
        outcome = engine.submit(job).result()
    assert (outcome.failure, outcome.attempts, measured(outcome.value)) == ("", 2, FIGURES)


def test_two_drivers_on_one_board(played: Played) -> None:
    """Four jobs of two workers: none is beside another on the board, and all have the figures of one alone."""
    before = len(played.board.launches())
    with engine_for("local:2") as engine:
        jobs = [Job(MEASURE, played.payload(), f"candidate {number}", seconds=60.0) for number in range(4)]
        outcomes = [future.result() for future in [engine.submit(job) for job in jobs]]
    assert [(one.failure, measured(one.value)) for one in outcomes] == [("", FIGURES)] * 4
    sessions = [key for key, _ in itertools.groupby(launch[0] for _, launch in played.board.launches()[before:])]
    assert len(sessions) == len(set(sessions)) == 4


@pytest.mark.thorough("it waits for time to pass, as for a board that hangs")
def test_servers_that_end_in_the_middle(played: Played) -> None:
    """One of two boards ends with a candidate on it, the other takes over; without any, the reason is said."""
    played.board.fault("die", "trial3")
    address = f"rpc://127.0.0.1:{played.tracker}/two"
    with contextlib.ExitStack() as servers:
        groups = [servers.enter_context(played_board(played.board, "two", played.tracker))[1] for _ in range(2)]
        assert device({"address": address}, {})["boards"] == 2
        with engine_for("local:1") as engine:
            payload = played.payload(address=f"{address}?seconds=20&wait=20")
            outcome = engine.submit(Job(MEASURE, payload, "a candidate", seconds=60.0)).result()
            assert (outcome.failure, outcome.attempts, measured(outcome.value)) == ("", 2, FIGURES)
            # Now the machine goes away, with a kernel under way.
            played.board.fault("hang", "trial3")
            payload = played.payload(address=f"{address}?seconds=20&wait=3")
            future = engine.submit(Job(MEASURE, payload, "a candidate", seconds=60.0))
            while any((played.board.folder / "faults").iterdir()) and not future.done():
                time.sleep(0.02)
            for group in groups:
                os.killpg(group, signal.SIGKILL)
            outcome: Outcome = future.result()
            assert (outcome.failure, outcome.attempts, outcome.value["gone"]) == ("", 2, True)
            reason = f"no board is registered as two with the tracker 127.0.0.1:{played.tracker}; its keys are one"
            assert outcome.value["problem"].startswith(reason)
        with pytest.raises(OptionError, match=r"no board is registered as two .*; its keys are one; python -m tvm"):
            device({"address": address}, {})
    assert measured(measure(played.payload(), {})) == FIGURES


def test_a_board_of_another_architecture(played: Played, tmp_path: Path) -> None:
    older = PlayedBoard(tmp_path / "older", {"name": "older GPU", "major": 8, "minor": 6})
    with played_board(older, "older", played.tracker) as (address, group):
        assert device({"address": address}, {}) == {"name": "older GPU", "arch": "sm_86", "boards": 1}
        with pytest.raises(NoGpuError, match=r"for sm_90, and the board's older GPU is sm_86"):
            measure(played.payload(address=address), {})
        known = rpc.connect_tracker("127.0.0.1", played.tracker)
        while not known.summary()["queue_info"]["older"]["free"]:
            time.sleep(0.02)
        os.killpg(group, signal.SIGSTOP)
        try:
            with pytest.raises(BoardError, match="it took longer than 1 s, and was at connecting"):
                device({"address": f"{address}?seconds=1"}, {})
        finally:
            os.killpg(group, signal.SIGCONT)


@pytest.mark.thorough("it waits for time to pass")
def test_trackers_that_are_none(played: Played) -> None:
    found = measure(played.payload(address=f"rpc://127.0.0.1:{played.tracker}/other?wait=1"), {})
    assert found["gone"] and re.match(r"no board is registered as other with .*; its keys are one", found["problem"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BoardError, match=rf"what answers at 127.0.0.1:{port} is not TVM's RPC tracker"):
            device({"address": f"rpc://127.0.0.1:{port}/one"}, {})
        listener.shutdown(socket.SHUT_RDWR)
    found = measure(played.payload(address=f"rpc://127.0.0.1:{port}/one?wait=1"), {})
    assert found["gone"] and f"TVM's RPC tracker at 127.0.0.1:{port} cannot be reached" in found["problem"]
    with (
        serving("tvm.exec.rpc_tracker", "--port", "9190", "--port-end", "9999") as (empty, _),
        pytest.raises(OptionError, match=r"no board is registered as one .*; nothing is registered with it"),
    ):
        device({"address": f"rpc://127.0.0.1:{empty}/one"}, {})
