"""Compiling in the background: what runs when, what is refused, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import souffle
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle import models
from souffle.background import BackgroundNetwork, exchange, network, process
from souffle.background.worker import check_rules
from souffle.certificate import Counterexample, Section
from souffle.codegen.plan import Plan
from souffle.errors import (
    ArtifactError,
    BackgroundError,
    CertificateError,
    InputError,
    NoGpuError,
    OptionError,
)
from souffle.program import TEProgram
from souffle.runtime import DeviceArray, Network, artifact
from souffle.runtime.detect import gpu_arch
from souffle.schedule.gpu import RULES
from tests.runtime.plans import cooperative_plan, machine_code
from tests.runtime.played import on_device
from tests.testlib import Builder

_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 60
_CUDA = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu"}
_X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)

_STUB = """
import os, shutil, sys, time
from multiprocessing.connection import Connection
sys.path[:] = sys.argv[3:]
parent, folder = Connection(int(sys.argv[1])), sys.argv[2]
for _ in range(parent.recv()):
    parent.recv_bytes()
{}
"""
"""A process in the compiler's place: it takes what it is sent, and compiles nothing."""

_FOR_EVER = "time.sleep(600)"
_ANSWER = """
while not os.path.exists({go!r}):
    time.sleep(0.01)
shutil.copy({path!r}, folder + "/network.souffle")
parent.send(("end", None))
"""


def program(factor: float = 1.0, outputs: int = 2, extent: int = 3) -> TEProgram:
    """Several outputs, each the input and so many times as much."""
    b = Builder()
    x = b.input(2, extent)
    return b.program(*(b.scaled(x, (number + 2) * factor) for number in range(outputs)))


@cache
def host(factor: float = 1.0, level: str = "V4", **options: int) -> souffle.runtime.Network:
    return souffle.compile(program(factor, **options), target="cpu", level=level)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(what: str, **values: object) -> None:
        text = what.format(**{name: str(value) for name, value in values.items()}) if values else what
        monkeypatch.setattr(process, "WORKER", _STUB.format(text))

    return put


@pytest.fixture
def answers(stub: Callable[..., None], tmp_path: Path) -> Callable[..., Callable[[], None]]:
    """``answers(net)``: the process gives this network, once what is returned is called."""

    def put(answer: Network) -> Callable[[], None]:
        go, path = tmp_path / "go", tmp_path / "answer.souffle"
        answer.save(path)
        stub(_ANSWER, go=go, path=path)
        return go.touch

    return put


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each process that is started ends, and takes its folder away."""
    started: list[process.CompileProcess] = []
    real = process.CompileProcess._started

    def noted(self: process.CompileProcess, folder: Path) -> tuple:
        found = real(self, folder)
        started.append(self)
        return found

    monkeypatch.setattr(process.CompileProcess, "_started", noted)
    # What other tests have left is of no interest, and takes long to look through.
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    for one in started:
        until(lambda one=one: not alive(one.pid) and not one.folder.exists())


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < end, "it takes for ever"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether it runs, or has ended and nobody has asked how."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def in_background(made: TEProgram | None = None, **options: object) -> BackgroundNetwork:
    return souffle.compile(made or program(), **{"target": "cpu", "background": True, **options})


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in other)


def without_identity(plan: Plan) -> tuple:
    how = plan.options
    return (how.level, [m.text for m in plan.modules], plan.kernels, plan.launches, plan.decisions, plan.certificate)


def test_it_ends_with_what_a_plain_compilation_gives(tmp_path: Path) -> None:
    """An ONNX model, the real compiler: V0 first, then V4 and the very same plan; and it is kept in a file."""
    model = models.build("mmoe")
    inputs = models.random_inputs(model)
    plain, quick = souffle.compile(model, **_CUDA), souffle.compile(model, level="V0", **_CUDA)
    net = souffle.compile(model, background=True, dump=tmp_path / "steps", **_CUDA)
    # At once, while the process begins.
    assert isinstance(net, BackgroundNetwork) and not net.ready and net.plan.options.level == "V0"
    assert net.explain().startswith("in the background: V4 is being compiled (") and "level V0, fp32" in net.explain()
    first = net.network
    assert first is not plain and net.signature == plain.signature and same(first(inputs), quick(inputs))
    net.save(tmp_path / "net.souffle")
    assert net.ready and net.error is None and net.wait(0) and "level V4, fp32" in net.explain()
    assert re.match(r"in the background: V4 was compiled; for random inputs, outputs of both .* apart\n", net.explain())
    assert same(net(inputs), plain(inputs)) and same(first(inputs), quick(inputs))
    assert without_identity(net.plan) == without_identity(plain.plan) and net.certificate.verdict == "PROVEN"
    assert [k.name for k in net.kernels] == [k.name for k in plain.kernels] and len(net.stages) == len(plain.stages)
    assert without_identity(souffle.load(tmp_path / "net.souffle", device="cpu").plan) == without_identity(plain.plan)
    assert (tmp_path / "steps" / "certificate.txt").is_file()


def test_calls_of_four_threads_while_it_changes(answers: Callable) -> None:
    """Each call's outputs are of one of the two networks, and no call after one of the second is of the first."""
    made = program(outputs=8)
    go = answers(host(1 + 2**-20, outputs=8))
    net = in_background(made)
    quick, optimized = net(_X), host(1 + 2**-20, outputs=8)(_X)
    assert not any(np.array_equal(quick[name], optimized[name]) for name in quick)
    seen: list[list[bool]] = [[] for _ in range(4)]
    over, refused = threading.Event(), []

    def work(thread: int) -> None:
        while not over.is_set():
            found = net(_X)
            seen[thread].append(same(found, optimized))
            if not seen[thread][-1] and not same(found, quick):
                refused.append(found)
            with pytest.raises(InputError):
                net(_X[:1])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(4)]
    try:
        for thread in threads:
            thread.start()
        until(lambda: all(len(calls) > 20 for calls in seen))
        assert not net.ready
        go()
        assert net.wait(_SECONDS)
        counts = [len(calls) for calls in seen]
        until(lambda: all(len(calls) > count + 20 for calls, count in zip(seen, counts, strict=True)))
    finally:
        over.set()
        sys.setswitchinterval(before)
    for thread in threads:
        thread.join(_SECONDS)
    assert not refused
    for calls in seen:
        assert calls == sorted(calls) and not calls[0] and calls[-1]


def test_the_first_network_is_given_back(answers: Callable) -> None:
    go = answers(host())
    net = in_background()
    first = weakref.ref(net.network)
    go()
    net.wait()
    gc.collect()
    assert first() is None


@cache
def text(factor: float = 1.0, level: str = "V4") -> Network:
    return souffle.compile(program(factor), level=level, **_CUDA)


def test_outputs_stay_on_a_gpu_across_the_change(
    answers: Callable, both_modes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first network gave outlives it, and is an input of the second where it lies."""
    texts = [m.text for compiled in (text(level="V0"), text(1 + 2**-20)) for m in compiled.plan.modules]
    texts += [module.text for module in cooperative_plan().modules]  # of what lays an array there
    driver = RehearsalDriver({machine_code(one): one for one in texts})

    def played(plan: Plan, *, device: str) -> Network:
        modules = tuple(replace(module, cubin=machine_code(module.text)) for module in plan.modules)
        return Network(replace(plan, modules=modules), device=device, driver=driver)

    for user in (exchange, network):
        monkeypatch.setattr(user, "network_of", played)
    go = answers(text(1 + 2**-20))
    net = in_background(**{**_CUDA, "device": "cuda"})
    before = net(on_device(_X, driver))
    assert all(isinstance(value, DeviceArray) for value in before.values())
    go()
    assert net.wait(_SECONDS)
    gc.collect()
    after = net(before["out0"])
    for number, (name, value) in enumerate(before.items()):
        np.testing.assert_array_equal(value.numpy(), host()(_X)[name])
        np.testing.assert_array_equal(after[name].numpy(), text(1 + 2**-20)(_X * np.float32(2))[name])
        assert not np.array_equal(after[name].numpy(), _X * 2 * (number + 2))
    del before, after, value, net
    until(lambda: gc.collect() is not None and driver.live_bytes() == 0)


def refuted() -> Network:
    plan = text().plan
    wrong = Counterexample("launch", "", (), (), (), "", "for no reason")
    certificate = replace(plan.certificate, others=(Section("made up", (wrong,), (), ()),))
    return Network(replace(plan, certificate=certificate), device="cpu")


def unproven() -> Network:
    return Network(replace(text().plan, certificate=None), device="cpu")


@pytest.mark.parametrize(
    ("wrong", "options", "error", "said"),
    [
        (
            lambda: host(1.01),
            {},
            BackgroundError,
            r"V0 and V4 of main do not compute the same: .* fp32 allows; verify=",
        ),
        (lambda: host(np.nan), {}, BackgroundError, "do not compute the same"),
        (lambda: host(outputs=3), {}, BackgroundError, "has other inputs and outputs"),
        (lambda: host(extent=4), {}, BackgroundError, "has other inputs and outputs"),
        (lambda: host(level="V3"), {}, BackgroundError, "has level V3, and V4 was asked for"),
        (lambda: host(), {"precision": "mixed"}, BackgroundError, "has precision fp32, and mixed was asked for"),
        (lambda: text(1.01), _CUDA, BackgroundError, "do not compute the same"),
        (refuted, _CUDA, CertificateError, "is refuted"),
        (unproven, _CUDA, BackgroundError, "without a certificate"),
    ],
)
def test_a_wrong_network_does_not_take_the_place(
    wrong: Callable[[], Network], options: dict, error: type[Exception], said: str, answers: Callable
) -> None:
    go = answers(wrong())
    net = in_background(**options)
    before = net(_X)
    go()
    with pytest.raises(error, match=said):
        net.wait(_SECONDS)
    assert not net.ready and isinstance(net.error, error) and same(net(_X), before)
    assert net.plan.options.level == "V0" and f"V4 is not to be had: {error.__name__}" in net.explain()


def test_what_is_not_to_be_verified_is_not_compared(answers: Callable) -> None:
    go = answers(host(1.01))
    net = in_background(verify="off")
    go()
    assert net.wait(_SECONDS) and same(net(_X), host(1.01)(_X)) and 'as verify="off"' in " ".join(net.explain().split())


@pytest.mark.skipif(gpu_arch() is not None, reason="there is a GPU")
def test_a_network_for_a_gpu_that_is_not_here(answers: Callable) -> None:
    """It is compiled and kept; it does not take the place of one that runs."""
    go = answers(text())
    net = in_background(**{**_CUDA, "device": "cuda"})
    go()
    assert net.wait(_SECONDS) and "neither runs here" in net.explain()
    net = in_background(**{**_CUDA, "device": "cuda", "background": "cpu"})
    assert net.device == "host" and same(net(_X), host()(_X))
    with pytest.raises(NoGpuError):
        net.wait(_SECONDS)
    assert same(net(_X), host()(_X))


def test_machine_code_for_the_host_runs_until_cuda_text_does(answers: Callable) -> None:
    go = answers(text())
    net = in_background(**{**_CUDA, "background": "cpu"})
    assert net.device == "host" and net.certificate is None and same(net(_X), host()(_X))
    go()
    assert net.wait(_SECONDS) and net.device == "cpu" and net.certificate.verdict == "PROVEN"
    assert same(net(_X), text()(_X))


_SENT = "sys.path.insert(0, {root!r}); from souffle.errors import OptionError; parent.send(('end', OptionError('no')))"


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        (_SENT, OptionError, "^no$"),
        ("parent.send(('end', None))", ArtifactError, "there is no file"),
        (
            "open(folder + '/network.souffle', 'w').write('x'); parent.send(('end', None))",
            ArtifactError,
            "souffle file",
        ),
        ("raise ValueError('unheard of')", BackgroundError, "status 1; it said\n(?s:.*)ValueError: unheard of"),
        ("sys.exit(0)", BackgroundError, "has ended with status 0$"),
        ("os.kill(os.getpid(), 9)", BackgroundError, "has ended with signal SIGKILL, as where memory runs out$"),
        ("os.write(parent.fileno(), b'x' * 100)", BackgroundError, "has ended with status 0$"),
    ],
)
def test_errors_are_told_once_and_raised_by_wait(
    what: str, error: type[Exception], said: str, stub: Callable[..., None]
) -> None:
    stub(what, root=_ROOT) if what is _SENT else stub(what)
    net = in_background()
    until(lambda: net.error is not None)
    with pytest.warns(RuntimeWarning, match=r"\(V4\) is not to be had, and V0 goes on: ") as warned:
        expected = net(_X)
    assert len(warned) == 1 and Path(warned[0].filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(net(_X), expected)
        for work in (net.wait, lambda: net.save("never.souffle"), lambda: pickle.dumps(net)):
            with pytest.raises(error, match=said):
                work()
    assert not net.ready and not Path("never.souffle").exists()


def test_what_the_process_says_is_logged(answers: Callable, caplog: pytest.LogCaptureFixture) -> None:
    go = answers(host())
    said = "print('careful', file=sys.stderr, flush=True)\n"
    process.WORKER = process.WORKER.replace("parent.send", f"{said}parent.send")  # the fixture puts it back
    net = in_background()
    go()
    net.wait()
    (record,) = (one for one in caplog.records if one.name == "souffle.background.process")
    assert record.getMessage() == "while main (V4) was compiled in the background, its process said\ncareful"


def test_what_wait_raised_is_not_warned_of(stub: Callable[..., None]) -> None:
    stub("sys.exit(3)")
    net = in_background()
    with pytest.raises(BackgroundError, match="status 3"):
        net.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(_X)


_PLANNER = """
class Failing:
    name, measures = "failing", False
    def plan(self, request):
        raise ZeroDivisionError("in the planner")
"""


def test_a_planner_that_raises_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planners_of_a_test.py").write_text(_PLANNER)
    monkeypatch.syspath_prepend(tmp_path)
    net = in_background(**_CUDA, partition="planners_of_a_test:Failing")
    with pytest.raises(BackgroundError, match="ZeroDivisionError: in the planner"):
        net.wait()
    assert same(net(_X), text()(_X))


def test_the_process_has_to_know_the_rules_that_this_one_knows() -> None:
    known = tuple(RULES)
    check_rules(known)
    for others, named in ((known[1:], known[0]), ((*known, "mine"), "mine"), (known[::-1], ", ".join(known[::-1]))):
        with pytest.raises(OptionError, match=f"the rules {named} were registered or taken out in the process that a"):
            check_rules(others)


def test_what_was_cancelled_goes_on_as_it_is(stub: Callable[..., None]) -> None:
    stub(_FOR_EVER)
    net = in_background()
    assert not net.wait(0.01) and not net.ready
    net.cancel()
    with pytest.raises(BackgroundError, match="the compilation of V4 in the background was cancelled"):
        net.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(net(_X), host()(_X))
    net.cancel()


_WITH_A_COMPILER = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
parent.send(("progress", str(child.pid)))
time.sleep(600)
"""


def _numbers(net: BackgroundNetwork) -> tuple[int, int, Path]:
    exchange = net._exchange
    until(lambda: exchange.doing.isdecimal())
    return exchange.process.pid, int(exchange.doing), exchange.process.folder


def test_a_network_that_is_dropped_ends_its_process(stub: Callable[..., None]) -> None:
    """Its compilers too, which are in the process's group."""
    stub(_WITH_A_COMPILER)
    net = in_background()
    running, compiler, folder = _numbers(net)
    assert alive(running) and alive(compiler) and folder.is_dir()
    assert f"V4 is being compiled ({compiler})" in net.explain()
    call = net.__call__
    del net
    gc.collect()
    assert alive(running) and same(call(_X), host()(_X)), "a bound method is a name of the network"
    del call
    gc.collect()
    until(lambda: not alive(running) and not folder.exists() and gone(compiler))


def test_a_first_network_that_cannot_be_compiled_ends_the_process(
    stub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(_FOR_EVER)
    for error in (CertificateError("wrong", None), KeyboardInterrupt()):

        def plan(request: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr("souffle.request.CompileRequest.plan", plan)
        with pytest.raises(type(error)):
            in_background()


def test_copies_and_pickles_are_of_the_optimized_network(answers: Callable) -> None:
    go = answers(host())
    net = in_background()
    threading.Timer(0.2, go).start()
    for made in (copy.copy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(made, BackgroundNetwork) and made.ready and made.plan.options.level == "V4"
        assert made.network is not net.network or made is not net
        assert same(made(_X), host()(_X))


def test_a_fork_goes_on_with_the_first_network(answers: Callable) -> None:
    go = answers(text())
    net = in_background(**_CUDA)
    expected = net(_X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads, which is what is tested
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                right = same(net(_X), expected) and same(net(_X), expected) and not net.ready
            try:
                net.wait()
            except BackgroundError as error:
                right = right and "forked" in str(error) and len(warned) == 1
                del net
                gc.collect()
                status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not net.ready and alive(net._exchange.process.pid), "it is this process's still"
    go()
    assert net.wait(_SECONDS) and net.plan.options.level == "V4"


def test_at_v0_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.CompileProcess, "__init__", None)
    net = in_background(level="V0")
    assert isinstance(net, BackgroundNetwork) and net.ready and net.wait() and net.error is None
    assert net.explain() == host(level="V0").explain() and same(net(_X), host()(_X))
    net.cancel()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hook": lambda stage, result: result}, "no hook of this one can be called; give dump="),
        ({"background": "V0"}, "background='V0' is not valid; choose one of False, True and \"cpu\""),
        ({"background": None}, "background=None is not valid"),
        ({"partition": "none such"}, "partition='none such' is not valid"),
    ],
)
def test_what_cannot_be_asked_for(options: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.CompileProcess, "__init__", None)
    with pytest.raises(OptionError, match=re.escape(said)):
        in_background(**options)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(
        process.tempfile, "mkdtemp", lambda prefix: os.mkdir(tmp_path / prefix) or str(tmp_path / prefix)
    )
    monkeypatch.setattr(process.subprocess, "Popen", refuse)
    with pytest.raises(BackgroundError, match=r"no process can be started to compile main \(V4\): .*allocate memory"):
        in_background()
    assert not list(tmp_path.iterdir())


_PROCESS = """
import sys, time
from souffle.background import process
from tests.test_background import _CUDA, _STUB, in_background, until
{}
print(net._exchange.process.pid, net._exchange.process.folder, flush=True)
{}
"""
_STUBBED = f"process.WORKER = _STUB.format({_FOR_EVER!r})\nnet = in_background()"
# Where this process can do nothing any more, the real one sees that, while it compiles.
_REAL = """
sys.path.insert(0, {!r})
net = in_background(**_CUDA, partition="sleeping:Sleeping")
until(lambda: net._exchange.doing.startswith("lowering"))
"""
_SLEEPING = """
import time
class Sleeping:
    name, measures = "sleeping", False
    def plan(self, request):
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "prepared", "last", "statuses"),
    [
        (signal.SIGINT, _STUBBED, _FOR_EVER, (130, -signal.SIGINT)),
        (signal.SIGKILL, _REAL, _FOR_EVER, (-signal.SIGKILL,)),
        (0, _STUBBED, "", (0,)),
    ],
    ids=["interrupt", "killed", "end"],
)
def test_nothing_outlives_the_interpreter(
    number: int, prepared: str, last: str, statuses: tuple[int, ...], tmp_path: Path
) -> None:
    """The signal is for the whole group, as a terminal's is."""
    (tmp_path / "sleeping.py").write_text(_SLEEPING)
    command = [sys.executable, "-c", _PROCESS.format(prepared.replace("{!r}", repr(str(tmp_path))), last)]
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, cwd=_ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    running, folder = run.stdout.readline().split()
    assert Path(folder).name.startswith("souffle-background-")
    if number:
        os.killpg(run.pid, number)
    _, err = run.communicate(timeout=_SECONDS)
    assert run.returncode in statuses and err.count("Traceback") == (number == signal.SIGINT), err
    until(lambda: not Path(folder).exists() and gone(int(running)))


def gone(pid: int) -> bool:
    """Whether it has ended; of another one's child only its parent can ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_file_is_not_looked_at_again(answers: Callable, tmp_path: Path) -> None:
    """Compiled once, run many times: a file needs no compilation, and the network of it is no other."""
    go = answers(host())
    net = in_background()
    go()
    net.save(tmp_path / "kept.souffle")
    again = souffle.load(tmp_path / "kept.souffle")
    assert same(again(_X), net(_X)) and artifact.describe(tmp_path / "kept.souffle").level == "V4"
