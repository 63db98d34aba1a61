"""Files of networks: they come back as they were, and bad ones are refused by name."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from souffle.codegen.plan import Buffer
from souffle.errors import ArtifactError, OptionError
from souffle.runtime import Network, describe, load, save
from tests.runtime.plans import cooperative_expected, cooperative_plan, many_types_plan


def _rewrite(path: Path, change: Callable[[dict[str, bytes]], None], *, resign: bool = True) -> None:
    """Change a file's members; with ``resign``, its manifest lists what they then are."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    change(members)
    if resign:
        manifest = json.loads(members["manifest.json"])
        manifest["members"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in members.items()
            if name != "manifest.json"
        }
        members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _edit(member: str, edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        content = json.loads(members[member])
        edit(content)
        members[member] = json.dumps(content).encode()

    return change


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "net.souffle"
    save(cooperative_plan(), path)
    return path


@pytest.mark.parametrize("plan", [cooperative_plan(), many_types_plan(), cooperative_plan(compiled=False)])
def test_what_was_saved_comes_back(plan, tmp_path: Path) -> None:
    path = tmp_path / "net.souffle"
    save(plan, path)
    back = load(path)
    for name in ("name", "options", "buffers", "modules", "kernels", "launches"):
        assert getattr(back, name) == getattr(plan, name)
    assert (back.workspace_bytes, back.decisions) == (plan.workspace_bytes, plan.decisions)
    assert list(back.constants) == list(plan.constants)
    for name, value in plan.constants.items():
        assert back.constants[name].dtype == value.dtype
        np.testing.assert_array_equal(back.constants[name], value)
    assert sorted(tmp_path.iterdir()) == [path]
    assert describe(path).constants == "stored" and describe(path).arch == plan.options.arch


def test_a_loaded_network_runs_and_saves_the_same_bytes(path: Path) -> None:
    x = np.ones((10, 10), np.float32)
    found = Network(load(path), device="cpu")(x)
    np.testing.assert_allclose(found["again"], cooperative_expected(x)["again"], atol=1e-4)
    again = path.with_name("again.souffle")
    save(load(path), again)
    assert again.read_bytes() == path.read_bytes()


def test_constants_of_every_kind(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {
        "flag": np.array([True, False]),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.array([[1.5, -0.0]], np.float16),
        "brain": np.array([1, 2, np.nan], ml_dtypes.bfloat16),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    plan = cooperative_plan()
    buffers = tuple(Buffer(n, v.shape, str(v.dtype), "constant", n) for n, v in values.items())
    plan = replace(plan, buffers=plan.buffers + buffers, constants={**plan.constants, **values})
    save(plan, tmp_path / "f")
    back = load(tmp_path / "f").constants
    for name, value in values.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape
        assert back[name].tobytes() == value.tobytes()


def test_synthetic_constants_keep_the_statistics_and_say_so(tmp_path: Path) -> None:
    big = np.random.default_rng(1).uniform(0.5, 2.5, (400, 300)).astype(np.float32)
    index = np.arange(100_000, dtype=np.int64)
    plan = cooperative_plan()
    buffers = (
        *plan.buffers,
        Buffer("big", big.shape, "float32", "constant", "big"),
        Buffer("index", index.shape, "int64", "constant", "index"),
    )
    plan = replace(plan, buffers=buffers, constants={**plan.constants, "big": big, "index": index})
    save(plan, tmp_path / "s", constants="synthetic")
    save(plan, tmp_path / "f")
    assert describe(tmp_path / "s").constants == "synthetic"
    assert (tmp_path / "s").stat().st_size + big.nbytes / 2 < (tmp_path / "f").stat().st_size
    back = load(tmp_path / "s")
    drawn = back.constants["big"]
    assert drawn.shape == big.shape and drawn.dtype == big.dtype and not np.array_equal(drawn, big)
    assert abs(drawn.mean() - big.mean()) < 0.05 and drawn.min() >= big.min() and drawn.max() <= big.max()
    np.testing.assert_array_equal(back.constants["index"], index)
    np.testing.assert_array_equal(back.constants["w"], plan.constants["w"])
    assert "outputs mean nothing" in Network(back).explain()
    with pytest.raises(OptionError, match="'none'"):
        save(plan, tmp_path / "x", constants="none")


def test_missing_foreign_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no file"):
        load(tmp_path / "none.souffle")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ArtifactError, match="cannot be written"):
        save(cooperative_plan(), tmp_path / "no" / "net.souffle")
    for name, content in {"a.onnx": b"\x08\x07\x12\x04onnx" * 50, "empty": b"", "text": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArtifactError, match=rf"{name}: it is not a \.souffle file"):
            load(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("data.txt", "x")
    with pytest.raises(ArtifactError, match=r"without manifest\.json"):
        load(tmp_path / "other.zip")


def test_files_cut_short_or_with_a_flipped_byte_never_load(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    bad = tmp_path / "bad.souffle"
    for size in range(0, len(data), max(1, len(data) // 40)):
        bad.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match=r"bad\.souffle"):
            load(bad)
    whole = load(path)
    for place in range(0, len(data), 23):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        try:
            plan = load(bad)
        except ArtifactError:
            continue
        # A byte that nothing reads, such as a member's date.
        assert plan.buffers == whole.buffers and plan.modules == whole.modules
        np.testing.assert_array_equal(plan.constants["w"], whole.constants["w"])


def _npy(shape: str, dtype: str = "<f4", body: bytes = b"") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


_STAGE = {"functions": [[["f", 1, 32]]], "inputs": [0], "outputs": [0]}
_LOOP = {"steps": 2, "body": [_STAGE], "indexed": [], "carried": [], "collected": []}


def _dataflow(**changed: object) -> dict[str, object]:
    """What a program says of its stages, with a mistake."""
    empty = {"inputs": [], "constants": [], "outputs": [], "items": []}
    return {"tensors": [["x", 4, 4]], **empty, **changed}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_edit("manifest.json", lambda m: m.update(format=99, souffle="7.1")), "format 99, of Souffle 7.1.*update"),
        (_edit("manifest.json", lambda m: m.update(format="1")), "names no format"),
        (_edit("manifest.json", lambda m: m.update(kind="onnx")), "not of a Souffle network"),
        (_edit("manifest.json", lambda m: m.update(stored=[])), "no proper stored"),
        (_edit("manifest.json", lambda m: m["stored"].clear()), "constant w is missing"),
        (_edit("manifest.json", lambda m: m["stored"].update(w="../../etc/passwd")), "passwd is missing"),
        (lambda m: m.update({"manifest.json": b'{"members": {}'}), "not JSON"),
        (_edit("plan.json", lambda p: p["launches"][0]["buffers"].append(99)), "launch 0 has buffers"),
        (_edit("plan.json", lambda p: p["launches"][1]["buffers"].pop()), "different numbers of buffers"),
        (_edit("plan.json", lambda p: p["launches"][0].update(kernel=-1)), "launch 0 has kernel -1"),
        (_edit("plan.json", lambda p: p["kernels"][0].update(threads=4096)), "kernel 0 has threads 4096"),
        (_edit("plan.json", lambda p: p["kernels"][0].update(threads=True)), "kernel 0 has threads True"),
        (_edit("plan.json", lambda p: p["buffers"][5].update(offset=900)), "buffer t at 900 lies outside of 1024"),
        (_edit("plan.json", lambda p: p["buffers"][0].update(dtype="object")), "dtype 'object'"),
        (_edit("plan.json", lambda p: p["buffers"][0].update(shape=[-1])), "buffer 0 has shape"),
        (_edit("plan.json", lambda p: p["buffers"][4].update(shape=[10**12])), "constant w is float32"),
        (_edit("plan.json", lambda p: p.update(decisions=[["a"]])), "a decision is not"),
        (_edit("plan.json", lambda p: p.update(modules=10**9)), "number of modules"),
        (_edit("plan.json", lambda p: p.update(dataflow=_dataflow(inputs=[["x", 9]]))), "not in its table"),
        (_edit("plan.json", lambda p: p.update(dataflow=_dataflow(tensors=[["x", 1]]))), "an entry of the dataflow"),
        (_edit("plan.json", lambda p: p.update(dataflow=_dataflow(items=[_STAGE | {"inputs": [4]}]))), "has inputs"),
        (
            _edit("plan.json", lambda p: p.update(dataflow=_dataflow(items=[_STAGE | {"functions": [[]]}]))),
            "no functions",
        ),
        (_edit("plan.json", lambda p: p.update(dataflow=_dataflow(items=[_LOOP | {"body": [_LOOP]}]))), "holds a loop"),
        (
            _edit("plan.json", lambda p: p.update(dataflow=_dataflow(items=[_LOOP | {"indexed": [[0, 3, 1]]}]))),
            "a loop",
        ),
        (_edit("plan.json", lambda p: p["launches"][0].update(touched=[["s", "x", "disk", True, 4]])), "somewhere"),
        (_edit("plan.json", lambda p: p["launches"][0].update(touched=[["s", "x", "global", True, -4]])), "no bytes"),
        (_edit("plan.json", lambda p: p["launches"][0].update(touched=[["s", "x"]])), "an entry of"),
        (lambda m: m.update({"plan.json": b"[" * 100_000}), "plan.json is not a plan"),
        (lambda m: m.update({"constants/0.npy": b"\x80\x04."}), r"constants/0\.npy is not a NumPy array"),
        (lambda m: m.update({"constants/0.npy": _npy("(1000000000000,)")}), "and constant w is float32"),
        (lambda m: m.update({"constants/0.npy": _npy("(100,)", "|O", b"x" * 400)}), "holds object"),
        (lambda m: m.update({"constants/0.npy": _npy("(100,)", body=b"x" * 404)}), "bytes after its array"),
        (lambda m: m.pop("constants/0.npy"), r"constants/0\.npy is missing"),
        (lambda m: m.pop("cubin/1.cubin"), r"cubin/1\.cubin is missing"),
    ],
)
def test_members_that_lie_are_named(path: Path, change, says: str) -> None:
    _rewrite(path, change, resign="not JSON" not in says)
    with pytest.raises(ArtifactError, match=rf"(?s)net\.souffle: .*{says}"):
        load(path)


def test_changed_and_added_members_are_named(path: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        members["text/0.cu"] = members["text/0.cu"].replace(b"x[i] * w[i]", b"x[i] + w[i]")

    data = path.read_bytes()
    _rewrite(path, change, resign=False)
    with pytest.raises(ArtifactError, match=r"text/0\.cu is damaged"):
        load(path)
    path.write_bytes(data)
    _rewrite(path, lambda members: members.update({"../evil.py": b"boom"}), resign=False)
    with pytest.raises(ArtifactError, match=r"'\.\./evil\.py' is not in the manifest"):
        load(path)


def test_a_member_that_would_unpack_to_more_is_not_unpacked(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    bomb = _npy("(100,)", body=bytes(2**22))
    manifest = json.loads(members["manifest.json"])
    manifest["members"]["constants/0.npy"] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
    members.update({"constants/0.npy": bomb, "manifest.json": json.dumps(manifest).encode()})
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            method = zipfile.ZIP_DEFLATED if name == "constants/0.npy" else zipfile.ZIP_STORED
            archive.writestr(name, data, method)
    with pytest.raises(ArtifactError, match=r"constants/0\.npy has 4194432 bytes for an array of 400"):
        load(path)
