"""The fuzzer: what it finds, that it goes on, and the small files of what it once found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import souffle
from benchmarks.campaign import read_records, without_times
from benchmarks.fuzz import oracle, trying
from benchmarks.fuzz.__main__ import main
from benchmarks.fuzz.case import Case, operators_of, read_case, write_case
from benchmarks.fuzz.draft import Settings
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.oracle import ORACLE_ERRORS, expect, judge
from benchmarks.fuzz.targets import FAILURES, failure_class, run_target
from souffle.cli.interruption import INTERRUPTED
from tests.thorough import sized

CORPUS = sorted((Path(__file__).parent.parent / "corpus").glob("*.json"))
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("target", ["cpu", "V4"])
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_once_failed_is_right(path, target):
    case = read_case(path)
    outcome = run_target(case, target, expect(case), seed=1, checked=True)
    assert outcome.kind == "right", outcome.detail


def test_a_range_of_seeds_is_right(tmp_path):
    out = tmp_path / "out.jsonl"
    main(["--seeds", SEEDS, "--out", str(out), "--on", "here"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    failed = {
        (record["seed"], target): outcome["detail"]
        for record in records
        for target, outcome in record["outcomes"].items()
        if outcome["kind"] in FAILURES
    }
    assert not failed
    kinds = [outcome["kind"] for record in records for outcome in record["outcomes"].values()]
    assert kinds.count("right") > 0.8 * len(kinds)


SEEDS = f"20000:{20000 + sized(2, 8)}"


def test_equal_seeds_give_equal_networks():
    program = (
        "import hashlib; from benchmarks.fuzz.generate import generate\n"
        "cases = [generate(seed).case for seed in range(12)]\n"
        "print(hashlib.sha256(b''.join(c.model.SerializeToString(deterministic=True) + "
        "b''.join(a.tobytes() for a in c.inputs.values()) for c in cases)).hexdigest())"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_networks_are_valid_and_varied():
    operators = set()
    for seed in range(150):
        case = generate(seed).case
        operators |= operators_of(case.model).keys()
        # ONNX cannot infer the shape of its own function body of MeanVarianceNormalization, and of a pooling's last
        # window it thinks otherwise than ONNX Runtime.
        odd = {"MeanVarianceNormalization", "MaxPool", "AveragePool", "LpPool"}
        onnx.checker.check_model(case.model, full_check=not odd & operators_of(case.model).keys())
    assert len(operators) >= 120


def test_settings_leave_operators_out():
    settings = Settings(without=frozenset({"Conv", "MatMul"}), only=frozenset({"Conv", "Relu", "mlp", "Add"}))
    operators = set()
    for seed in range(20):
        operators |= operators_of(generate(seed, settings).case.model).keys()
    assert {"Add", "Relu"} <= operators <= {"Add", "Relu", "Constant", "Identity"}


def _with_tanh_for_sigmoid(compile_model):
    """A compiler with a bug."""

    def compile_wrong(model, **options):
        wrong = onnx.ModelProto()
        wrong.CopyFrom(model)
        for node in wrong.graph.node:
            if node.op_type == "Tanh":
                node.op_type = "Sigmoid"
        return compile_model(wrong, **options)

    return compile_wrong


PLAIN = ["--targets", "cpu", "--specials", "0", "--dtypes", "float32"]


def test_a_planted_bug_is_found_made_small_and_run_again(tmp_path, monkeypatch, capsys):
    out, failures = tmp_path / "out.jsonl", tmp_path / "out.jsonl.failures"
    options = ["--on", "here", "--out", str(out)]
    recipes = ["--only", "Tanh", "Add", "Mul", "Relu", "Transpose", "Reshape"]
    with monkeypatch.context() as patch:
        patch.setattr(souffle, "compile", _with_tanh_for_sigmoid(souffle.compile))
        assert main([*options, *PLAIN, *recipes, "--seeds", "7:10"]) == 1
        wrong = {r["seed"]: o for r in read_records(out) for o in r["outcomes"].values() if o["kind"] == "wrong"}
        assert wrong and {path.name for path in failures.iterdir()} == {o["file"] for o in wrong.values()}
        whole = {path: len(read_case(path).model.graph.node) for path in failures.iterdir()}
        assert max(whole.values()) >= 5
        assert main([*options, "--minimize"]) == 0
        for path in whole:
            small = read_case(path.with_suffix(".min.json"))
            assert [node.op_type for node in small.model.graph.node] == ["Tanh"]
            assert sum(array.size for array in small.inputs.values()) <= 1
        there = sorted(failures.iterdir())
        assert main([*options, "--minimize"]) == 0 and sorted(failures.iterdir()) == there
        cases = ["--on", "here", "--case", *map(str, there)]
        capsys.readouterr()
        assert main(cases) == 1
        assert capsys.readouterr().out.count(" cpu: wrong value: ") == len(there)
    assert main(cases) == 0
    assert main(["--minimize"]) == 2


def test_what_dies_names_its_target_and_is_kept(tmp_path, monkeypatch):
    """Whoever runs it; what dies once is tried again."""
    monkeypatch.setattr(trying, "WORK", "tests.benchmarks.deadly_work")
    found = []
    for workers in ("1", "2"):
        out = tmp_path / f"{workers}.jsonl"
        options = ["--workers", workers, "--timeout", "1.5", "--targets", "cpu", "V0", "V3", "V4", "mixed", "tf32"]
        assert main(["--seeds", "0:2", "--out", str(out), *options]) == 1
        found.append(without_times(read_records(out)))
    (first, second), _ = found
    assert found[0] == found[1]
    lost = {"kind": "unsure", "detail": "crash of the oracle: its worker ended with signal SIGSEGV (it had 8192 MB)"}
    assert second == {"seed": 1, "generate": {}, "outcomes": {"generate": lost}}
    assert first["outcomes"] == {
        "cpu": {"kind": "right", "detail": ""},
        "V0": {
            "kind": "crash",
            "detail": "its worker ended with signal SIGABRT (it had 8192 MB)",
            "file": "0-V0.json",
        },
        "V3": {"kind": "timeout", "detail": "took longer than 1.5 s", "file": "0-V3.json"},
        "V4": {"kind": "right", "detail": "at the second try"},
        "mixed": {"kind": "crash", "detail": "its worker gave 'nonsense' for an outcome", "file": "0-mixed.json"},
        "tf32": {"kind": "crash", "detail": "needed more memory than its 8192 MB", "file": "0-tf32.json"},
    }
    for workers in ("1", "2"):
        failures = tmp_path / f"{workers}.jsonl.failures"
        assert [path.stem for path in sorted(failures.iterdir())] == ["0-V0", "0-V3", "0-mixed", "0-tf32"]
        kept = json.loads((failures / "0-V0.json").read_text())
        assert (kept["target"], kept["kind"], kept["note"]) == ("V0", "crash", "played")
        assert "Assertion failed" in kept["said"]
        assert "in tried_case" in json.loads((failures / "0-V3.json").read_text())["said"]


@pytest.mark.parametrize("error", [MemoryError(), ORACLE_ERRORS[0]("initialization: std::bad_alloc")])
def test_memory_that_runs_out_says_nothing_of_a_network(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    case = _tiny("Abs", np.ones(3, np.float32))
    expected = expect(case)
    if isinstance(error, MemoryError):
        monkeypatch.setattr(souffle, "compile", fail)
        with pytest.raises(MemoryError):
            run_target(case, "cpu", expected, seed=1)
    monkeypatch.setattr(oracle.onnxruntime, "InferenceSession", fail)
    with pytest.raises(MemoryError):
        expect(case)


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_all_workers_give_the_same(tmp_path):
    found = []
    for word in ("here", "local:2"):
        out = tmp_path / f"{word}.jsonl"
        assert main(["--seeds", "40:43", *PLAIN, "--nodes", "3", "--on", word, "--out", str(out)]) == 0
        found.append(without_times(read_records(out)))
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_run_goes_on_where_its_file_stops(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    settings = [*PLAIN, "--only", "Relu", "Add", "--on", "here"]
    assert main(["--seeds", "0:2", "--out", str(out), *settings]) == 0
    with out.open("a") as file:
        file.write('{"seed": 2, "outc')
    out.write_text(out.read_text() + "\n")
    assert main(["--count", "2", "--out", str(out), *settings]) == 0
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [0, 1, 2, 3]
    assert main(["--report", "--out", str(out)]) == 0
    assert "4 networks" in capsys.readouterr().out


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_an_interrupt_ends_a_run_and_keeps_its_file(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "benchmarks.fuzz", "--targets", "cpu", "--nodes", "1", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while not read_records(out) and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "Traceback" not in complaints and process.returncode == INTERRUPTED
    assert f"{len(out.read_text().splitlines())} networks" in printed


def _tiny(op: str, array: np.ndarray) -> Case:
    info = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "tiny", [info], [onnx.ValueInfoProto(name="y")])
    return Case(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), {"x": array})


def test_the_oracle_tells_wrong_from_unsure():
    expected = expect(_tiny("Sqrt", np.array([1.0, 4.0, np.nan, np.inf], np.float32)))
    assert judge(expected.outputs, expected).kind == "right"
    assert judge({"y": np.array([1, 2.01, np.nan, np.inf], np.float32)}, expected).kind == "value"
    assert judge({"y": np.array([1, 2, 0, np.inf], np.float32)}, expected).kind == "nan"
    assert judge({"y": np.array([1, 2, np.nan, 3e38], np.float32)}, expected).kind == "nan"
    assert judge({"y": np.array([[1, 2, np.nan, np.inf]], np.float32)}, expected).kind == "type"
    assert judge({"z": expected.outputs["y"]}, expected).kind == "names"
    # A floor of what rounding may have moved to either side of an integer is not compared; another is.
    above = expect(_tiny("Floor", np.array([1.0, 2.5], np.float32)))
    assert judge({"y": np.array([0.0, 2.0], np.float32)}, above).kind == "value"
    edge = expect(_tiny("Floor", np.nextafter(np.array([2.0, 2.3], np.float32), 0)))
    assert judge({"y": np.array([2.0, 2.0], np.float32)}, edge).kind == "right"
    assert judge({"y": np.array([2.0, 3.0], np.float32)}, edge).kind == "value"
    # ONNX Runtime leaves minus infinity and NaN out of a maximum, which starts from the least number.
    lowest = expect(_tiny("GlobalMaxPool", np.array([[[-np.inf, -np.inf], [np.nan, 1], [-np.inf, -2]]], np.float32)))
    np.testing.assert_array_equal(lowest.outputs["y"], np.array([[[-np.inf], [np.nan], [-2]]], np.float32))


def test_cases_survive_their_file(tmp_path):
    case = generate(5).case
    write_case(case, tmp_path / "case.json", kind="wrong")
    back = read_case(tmp_path / "case.json")
    assert back.model == case.model
    for name, array in case.inputs.items():
        assert back.inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(back.inputs[name], array)


def test_failures_of_one_kind_are_one_class():
    one = failure_class("V4", "exception", "ValueError in kernel/a.py:f: 'x1' has 17 elements (of t_12)")
    assert one == failure_class("V0", "exception", "ValueError in kernel/a.py:f: 'y' has 3 elements (of t_9)")
    assert one != failure_class("cpu", "exception", "ValueError in kernel/a.py:f: 'x1' has 17 elements (of t_12)")
