"""The runner of ONNX's conformance suite tells right from wrong, and outlives what it runs."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test.case.test_case import TestCase as Case

from benchmarks.campaign import read_records, without_times
from benchmarks.onnx_suite import __main__ as suite
from benchmarks.onnx_suite import engines, operators_page
from benchmarks.onnx_suite.cases import case_data, case_of, model_and_data, subject_of
from benchmarks.onnx_suite.engines import run_case
from benchmarks.onnx_suite.outcomes import CaseResult, Subject
from benchmarks.onnx_suite.results import result_file, results_in, summary
from benchmarks.record import checkout_state
from souffle.errors import OptionError
from souffle.frontend.operators import own_operators
from tests.frontend.support import node_model

X = np.array([[-1.0, 2.0, np.nan]], dtype="float32")
CPU = {"device": "CPU", "level": "V4"}


def made_case(expected: np.ndarray, operator: str, *more: np.ndarray, name: str = "", **attributes) -> Case:
    inputs = [X, *more]
    model = node_model(operator, [(str(x.dtype), x.shape) for x in inputs], opset=18, **attributes)
    name = f"test_{name or operator}"
    return Case(name, operator, None, None, model, [(inputs, [expected])], "node", 1e-3, 1e-7)


AXES = np.array([1])


@pytest.mark.parametrize(
    ("case", "outcome", "message"),
    [
        (made_case(np.array([[1, 2, np.nan]], "float32"), "Abs"), "passed", ""),
        (made_case(np.array([[1, 3, np.nan]], "float32"), "Abs"), "wrong", "3 differ, 0 NaN; largest error 1 of 3"),
        (made_case(np.array([[1, 2, 0]], "float32"), "Abs"), "wrong", "1 of 3 differ, 1 NaN"),
        (made_case(np.array([1, 2, np.nan], "float32"), "Abs"), "wrong", "float32[1, 3], expected float32[3]"),
        (made_case(np.array([[1, 2, np.nan]], "float64"), "Abs"), "wrong", "expected float64"),
        (made_case(X, "SequenceConstruct"), "refused", "let the model return tensors of numbers"),
        (made_case(np.array([[np.nan]], "float32"), "ReduceSum", AXES), "constants", ""),
        (made_case(np.array([[1]], "float32"), "ReduceSum", AXES), "wrong", "1 of 1 differ, 1 NaN"),
    ],
)
def test_outcomes(case, outcome, message):
    result = run_case(case, "souffle", CPU)
    assert (result.outcome, message in result.message) == (outcome, True), result
    refusals = {"refused": "SEQUENCE"}
    assert result.refusal == refusals.get(outcome, "")
    assert (result.constants == ("x1",)) == (case.name == "test_ReduceSum")


@pytest.mark.parametrize(("zero", "outcome"), [(0, "passed"), (1.9e-7, "inexact"), (1e-3, "wrong"), (np.nan, "wrong")])
def test_an_expected_value_that_was_rounded_on_its_way_is_told_from_a_wrong_output(zero, outcome):
    inputs = [np.array(values, "float32") for values in ([1, 2, 100], [1, 1, 0])]
    model = node_model("Sub", [("float32", (3,))] * 2, opset=14)
    data = [(inputs, [np.array([zero, 1, 100], "float32")])]
    result = run_case(Case("test_sub", "Sub", None, None, model, data, "node", 1e-3, 1e-7), "souffle", CPU)
    assert result.outcome == outcome, result


def test_onnx_runtime_is_counted_by_the_same_comparison():
    right, wrong = (made_case(np.array([[1, last, np.nan]], "float32"), "Abs") for last in (2, 3))
    text = Case("test_text", "", None, None, node_model("Abs", [("float32", (1,))]), [([1], [1])], "node", 0, 0)
    outcomes = [run_case(case, "ort", {}).outcome for case in (right, wrong, text)]
    assert outcomes == ["passed", "wrong", "refused"]


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_onnx_runtime_gets_types_that_numpy_lacks(kind):
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    infos = [helper.make_tensor_value_info(name, element, [3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    values = np.array([1, -2, 3]).astype(kind)
    results = [
        run_case(Case("test_same", "", None, None, model, [([values], [wanted])], "node", 1e-3, 1e-7), "ort", {})
        for wanted in (values, values[::-1])
    ]
    assert [result.outcome for result in results] == ["passed", "wrong"], results


SIMPLE = ["--kinds", "simple", "--only", "shrink|sign_model|sequence_model1|relu|empty_output"]


def test_a_case_that_kills_its_worker_or_hangs_is_noted_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    """Whoever runs them; what dies once is tried again."""
    monkeypatch.setattr(suite, "WORK", "tests.benchmarks.deadly_work")
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.jsonl"
        assert suite.main([*SIMPLE, "--jobs", jobs, "--limit", "1.5", "--out", str(out)]) == 1
        found.append({r["name"]: (r["outcome"], r["message"]) for r in read_records(out)[1:]})
        captured = capsys.readouterr()
        assert "crash: shrink: its worker ended with signal SIGABRT (it had 8192 MB)" in captured.out
        assert "Assertion failed" in captured.err
    assert found[0] == found[1] == {
        "sequence_model1": ("timeout", "took longer than 1.5 s"),
        "shrink": ("crash", "its worker ended with signal SIGABRT (it had 8192 MB)"),
        "sign_model": ("crash", "its worker gave 'nonsense' for an outcome"),
        "single_relu_model": ("passed", ""),
        "strnorm_model_monday_empty_output": ("passed", "at the second try"),
    }


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_all_workers_give_the_same_and_go_on(tmp_path, capsys):
    found = []
    for word in ("here", "local:1", "local:2"):
        out = tmp_path / f"{word}.jsonl"
        options = ["--on", word, "--out", str(out), "--against", "ort"]
        if word == "here":
            assert suite.main([*SIMPLE[:3], "relu|sign", *options]) == 0
        assert suite.main([*SIMPLE, *options]) == 0
        found.append(without_times(read_records(out)))
    assert found[0] == found[1] == found[2]
    outcomes = {(r["engine"], r["name"]): r["outcome"] for r in found[0][1:]}
    assert len(outcomes) == 10 and outcomes["souffle", "strnorm_model_monday_empty_output"] == "refused"
    out = ["--out", str(tmp_path / "here.jsonl"), "--on", "no such engine"]
    assert suite.main([*SIMPLE, *out, "--against", "ort"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("souffle, all") == 5 and "0 of 6 cases" in captured.err
    # Some are forgotten, and asked again.
    assert suite.main([*SIMPLE, *out, "--again", "refused"]) == 2
    assert suite.main([*SIMPLE, *out, "--level", "V0"]) == 2
    assert "'level': 'V4'" in capsys.readouterr().err


def test_a_case_is_the_same_where_it_is_sent_to():
    whole = made_case(np.array([[1, 2, np.nan]], "float32"), "Abs")
    there = case_of(case_data(whole))
    assert (there.name, there.kind, there.rtol, there.atol) == ("test_Abs", "node", 1e-3, 1e-7)
    model, sets = model_and_data(there)
    assert model == whole.model
    np.testing.assert_array_equal(sets[0][0][0], X)
    own, other = (asdict(run_case(case, "souffle", CPU)) for case in (whole, there))
    assert own | {"seconds": 0} == other | {"seconds": 0}


def test_memory_that_runs_out_says_nothing_of_a_case(monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(engines.onnx_backend, "prepare", fail)
    with pytest.raises(MemoryError):
        run_case(made_case(X, "Abs"), "souffle", CPU)


def test_a_model_that_writes_an_operator_with_others_is_about_that_operator():
    whole = made_case(X, "Celu")
    parts = onnx.ModelProto()
    parts.CopyFrom(whole.model)
    parts.graph.node.append(helper.make_node("Abs", ["y0"], ["z"]))
    cases = {"celu": whole, "celu_expanded_ver12": Case("", "", None, None, parts, [], "node", 0, 0)}
    cases["two"] = cases["celu_expanded_ver12"]
    named = [subject_of(name, cases, case.model) for name, case in cases.items()]
    assert [subject.operator for subject in named] == ["Celu", "Celu", "several operators"]
    assert {subject.element_type for subject in named} == {"float32"}


SUBJECTS = {
    "a": Subject("node", "", "Abs", "float32"),
    "b": Subject("node", "", "Abs", "float64"),
    "c": Subject("simple", "ai.onnx.ml", "Scaler", "float32"),
}
RESULTS = {
    "souffle": {
        "a": CaseResult("a", "passed", extern=("Abs",)),
        "b": CaseResult("b", "constants", constants=("axes",), folded=True),
        "c": CaseResult("c", "refused", "why", refusal="TEXT"),
    },
    "ort": {name: CaseResult(name, outcome) for name, outcome in zip("abc", ("passed", "refused", "passed"))},
}


def test_results_are_gone_on_with(tmp_path):
    path = tmp_path / "results.jsonl"
    with result_file(path, CPU) as file:
        for engine, own in RESULTS.items():
            for result in own.values():
                file.add({"engine": engine, **asdict(result)})
    with result_file(path, CPU) as file:
        assert results_in(file.records, RESULTS, "abc") == RESULTS
    with result_file(path, CPU, ["refused"]) as file:
        assert set(results_in(file.records, ["souffle"], "abc")["souffle"]) == {"a", "b"}
    with pytest.raises(OptionError, match="give another file"):
        result_file(path, {})
    lines = summary(RESULTS, SUBJECTS, refusals=True).splitlines()
    words = [line.split() for line in lines]
    assert ["souffle,", "node", "1", "1", *"000000"] in words
    assert ["ort,", "all", "2", "0", "1", *"00000"] in words
    assert "refused: c: why" in lines


def test_the_record_and_the_page_say_what_a_run_found(tmp_path, monkeypatch):
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    monkeypatch.setattr(operators_page, "RECORD", record)
    monkeypatch.setattr(operators_page, "PAGE", page)
    operators_page.record_run("cpu", CPU, RESULTS, SUBJECTS)
    without = {"souffle": {"a": CaseResult("a", "wrong", "off by one")}}
    header = {key: value for key, value in json.loads(record.read_text()).items() if key not in ("runs", "operators")}
    assert header["date"] and header == {"date": header["date"], **checkout_state()}
    operators_page.record_run("cuda", CPU, without, SUBJECTS)
    operators_page.write_page()
    entry = json.loads(record.read_text())["operators"]["Abs"]
    assert entry["cpu"] == {"cases": 2, "passed": 1, "constants": 1, "types": ["float32", "float64"], "extern": True}
    assert (entry["cuda"], entry["ort"]) == ({"cases": 1, "wrong": 1}, 1)
    text = page.read_text()
    assert "| Abs |  | float32, float64 | 1 + 1 of 2 | 0 of 1, 1 wrong | 1 |" in text
    assert "| ONNX Runtime" in text and "| CPU, all | 1 | 1 | 1 | 0 |" in text
    assert "not with text | 1 | 0 | ai.onnx.ml::Scaler |" in text
    assert "(paper, §9): Abs." in text
    part = {"souffle": {name: CaseResult(name, "passed") for name in "ac"}}
    assert operators_page.record_part("cpu", part, SUBJECTS) == ["ai.onnx.ml::Scaler"]
    part["souffle"]["b"] = CaseResult("b", "refused", "why", refusal="FORM")
    assert operators_page.record_part("cpu", part, SUBJECTS) == ["Abs", "ai.onnx.ml::Scaler"]
    found = json.loads(record.read_text())
    assert found["runs"]["cpu"]["totals"] == {"node": {"passed": 1, "refused": 1}, "simple": {"passed": 1}}
    entry = {"cases": 2, "passed": 1, "refused": 1, "refusals": {"FORM": 1}, "types": ["float32"]}
    assert found["operators"]["Abs"]["cpu"] == entry


def test_the_page_is_that_of_the_record_and_of_the_operators_that_there_are():
    record = json.loads(operators_page.RECORD.read_text())
    text = operators_page.operators_page(record, own_operators())
    again = "write it again with: python -m benchmarks.onnx_suite.operators_page"
    assert operators_page.PAGE.read_text() == text, again
