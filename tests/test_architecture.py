"""The shape of the house: imports run one way, the runtime needs no compiler, the compiler is one page."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import models

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "souffle"
# rglob does not follow the link to the networks.
FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "models").rglob("*.py")})

# The program is the frontend's result, so its data types come before the frontend.
ORDER = (
    *("index", "program", "frontend", "analysis", "transform", "schedule", "cost"),
    *("placement", "learning", "stitching", "partition", "kernel", "choice", "codegen", "verify"),
    *("emulator", "runtime", "report", "hfuse", "calibrate", "mutation", "tuning"),
)
LOWEST = {
    "aligned",
    "alone",
    "errors",
    "garbage",
    "tvm_calls",
    "tvm_compat",
    "decision",
    "element_types",
    "multiprocessor",
    "certificate",
    "counted_axes",
    "cache",
    "dimensions",
    "named",
    "options",
    "tvm_pair",
    "parallel",
    "source",
    "watchdog",
    "whole_files",
    "wording",
    "workers",
}
# Written beside the compiler, with its errors.
NETWORKS = {"models", "errors"}
HIGHEST = {
    *("staging", "pipeline", "dump", "request", "background", "api", "searching", "loading", "versions"),
    *("onnx_backend", "torch", "byte_products"),
    *("reference", "benchmark", "doctor", "doctor_trial", "debug", "reporting", "evaluation", "cli", "__main__"),
    "kept",
}


def place(path: Path) -> str:
    """The folder of a file, or its name where it stands at the top."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> list[tuple[str, int]]:
    """Absolute names of the modules that a file imports, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def inside(path: Path) -> list[tuple[str, int]]:
    """What a file imports of Souffle: folders or top-level modules."""
    names = [(name.split("."), line) for name, line in imported(path)]
    return [(parts[1], line) for parts, line in names if parts[0] == "souffle" and len(parts) > 1]


@pytest.mark.parametrize("own", sorted({place(path) for path in FILES}))
def test_imports_run_one_way(own: str) -> None:
    imports = [(file, *one) for file in FILES if place(file) == own for one in inside(file)]
    for path, target, line in imports:
        where = f"{path.relative_to(ROOT)}:{line} imports souffle.{target}"
        if target.startswith("__") and target != "__main__":
            continue
        if own in LOWEST:
            assert target in LOWEST, where
        elif own == "models":
            assert target in NETWORKS, where
        elif own in ORDER:
            assert target in LOWEST or target in ORDER[: ORDER.index(own) + 1], f"{where}, which stands above it"
        else:
            assert own in HIGHEST or own == "__init__", f"{path} is in no folder of the flow"


def test_transformations_know_programs_and_their_analysis_only() -> None:
    used = {target for path in FILES if place(path) == "transform" for target, _ in inside(path)}
    assert used <= {*LOWEST, "program", "index", "analysis", "transform"}


def test_networks_have_one_name() -> None:
    """Imported as ``models``, which the folder beside the package allows in a checkout, they would be loaded twice."""
    wrong = re.compile(r"^\s*(?:import|from)\s+models\b", re.MULTILINE)
    for folder in ("models", "souffle", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not wrong.search(path.read_text()), f"{path.relative_to(ROOT)} imports models, not souffle.models"


def test_the_emulator_knows_nothing_of_the_compiler() -> None:
    used = {target for path in FILES if place(path) == "emulator" for target, _ in inside(path)}
    assert used <= {*LOWEST, "emulator"}


def test_every_folder_has_its_place() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders <= {*ORDER, *LOWEST, "background", "benchmark", "cli", "debug", "evaluation", "models", "torch"}


def trees(words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The files in which a pattern is found, without which nothing would be found in their trees."""
    for path in FILES:
        text = path.read_text()
        if re.search(words, text, re.MULTILINE | re.IGNORECASE):
            yield path, ast.parse(text)


def test_no_import_inside_of_a_function() -> None:
    for path, tree in trees(r"^[ \t]+(import|from \S+ import)\b"):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not inner, f"{path.relative_to(ROOT)}:{inner[0].lineno}: import inside of {node.name}"


def test_isl_is_imported_by_one_module() -> None:
    users = [path for path, _ in trees("islpy") if any(name.split(".")[0] == "islpy" for name, _ in imported(path))]
    assert users == [PACKAGE / "index" / "isl.py"]


def test_the_whole_compiler_fits_on_a_page() -> None:
    assert len((PACKAGE / "pipeline.py").read_text().splitlines()) <= 300


def test_no_broad_except_and_no_print_outside_of_the_command_line() -> None:
    for path, tree in trees(r"^ *except\b|\bprint\("):
        speaks = place(path) == "cli" or path == PACKAGE / "models" / "__main__.py"
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                caught = [] if node.type is None else ast.walk(node.type)
                names = {n.id for n in caught if isinstance(n, ast.Name)}
                assert node.type is not None and not names & {"Exception", "BaseException"}, where
            if not speaks and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", where


def test_no_stage_knows_a_model_by_name() -> None:
    names = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")
    for path, tree in trees("|".join(names)):
        if place(path) in {"benchmark", "cli", "frontend", "models"}:
            continue  # the frontend, and what reads ONNX for PyTorch, have an operator called LSTM
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Compare)):
            texts = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            assert not any(text.lower() in names for text in texts), f"{path.relative_to(ROOT)}:{node.lineno}"


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "tvm_ffi", "onnx", "islpy", "onnxruntime", "torch"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def _blocked(program: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_loading_and_running_need_neither_tvm_nor_onnx(tmp_path: Path) -> None:
    model = models.build("mmoe")
    net = souffle.compile(model, level="V4", target="cuda", arch="sm_90", cubin=False, device="cpu")
    net.save(tmp_path / "net.souffle")
    inputs = models.random_inputs(model)
    np.savez(tmp_path / "inputs.npz", **inputs)
    program = f"""
import numpy, souffle, souffle.runtime
net = souffle.load({str(tmp_path / "net.souffle")!r}, device="cpu")
found = net(dict(numpy.load({str(tmp_path / "inputs.npz")!r})))
numpy.savez({str(tmp_path / "outputs.npz")!r}, **found)
assert "tvm" not in sys.modules
"""
    done = _blocked(program)
    assert done.returncode == 0, done.stderr
    expected = net(inputs)
    for name, value in np.load(tmp_path / "outputs.npz").items():
        np.testing.assert_array_equal(value, expected[name])


def test_what_needs_the_compiler_says_so_where_it_is_missing() -> None:
    done = _blocked("import souffle\nsouffle.compile\n")
    assert done.returncode == 1 and "blocked" in done.stderr.splitlines()[-1]
    done = _blocked("import souffle\nprint(dir(souffle))\n")
    assert done.returncode == 0 and "'compile'" in done.stdout
