"""The emitted text: the same in every process, one copy of what several places call, resources read back."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.codegen.cuda import emit_cuda, text_of_functions
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.tensor_ir import pack, unpack
from souffle.errors import CudaCompileError
from souffle.pipeline import compile_cuda
from souffle.runtime import Network
from souffle.schedule.lower import cuda_target
from tests.testlib import Builder
from tests.thorough import some

ROOT = Path(__file__).resolve().parents[2]

NETWORKS = some([("mmoe", "V4")], [("mmoe", "V1"), ("bert", "V1")])
DIGEST = f"""
import hashlib, models, souffle
from souffle.runtime.plan_json import plan_to_json
for name, level in {NETWORKS}:
    net = souffle.compile(models.build(name), level=level, target="cuda", arch="sm_90", cubin=False, device="cpu")
    content = repr((plan_to_json(net.plan), [m.text for m in net.plan.modules], list(net.plan.constants)))
    print(name, hashlib.sha256(content.encode()).hexdigest())
"""


def test_the_text_and_the_decisions_are_the_same_under_any_hash_seed() -> None:
    """In a process of its own, and in this one, which has a seed of its own, too."""
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == len(NETWORKS)
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(DIGEST, {})
    assert here.getvalue() == done.stdout


def _matmul(count: int):
    b, rng = Builder(), np.random.default_rng(0)
    x = b.input(8, 16)
    for _ in range(count):
        x = b.matmul(x, b.constant(rng.standard_normal((16, 16)).astype(np.float32)))
    return b.program(x)


def _compile(program, **options):
    return souffle.compile(program, **({"level": "V3", "target": "cuda", "arch": "sm_90", "device": "cpu"} | options))


@pytest.mark.parametrize(("count", "keyword"), [(1, "__forceinline__"), (2, "__noinline__"), (3, "__forceinline__")])
def test_code_that_several_places_call_is_one_copy(count: int, keyword: str) -> None:
    """Three equal layers are a loop, which calls its stage in one place."""
    text = _compile(_matmul(count), cubin=False).plan.modules[0].text
    assert len(re.findall(rf"^static __device__ {keyword} void stage0_\w+\(.*\{{$", text, re.MULTILINE)) == 1
    assert "cuda/barrier" not in text


def test_only_v4_prefetches() -> None:
    texts = {lv: _compile(_matmul(3), cubin=False, level=lv).plan.modules[0].text for lv in ("V3", "V4")}
    assert "prefetch.global.L2" in texts["V4"] and "prefetch.global.L2" not in texts["V3"]


def test_the_text_can_be_replaced_before_it_is_compiled() -> None:
    def hook(stage: str, result: object) -> object:
        return result.replace("0x0p+0f", "0x1p+0f") if stage == "text" else result

    program = _matmul(1)
    x = np.ones((8, 16), np.float32)
    plain, edited = (_compile(program, cubin=False, **o)(x)["out0"] for o in ({}, {"hook": hook}))
    # Every total begins at 1; how many there are for a result is the schedule's.
    np.testing.assert_allclose(edited - plain, np.full_like(plain, round(float((edited - plain)[0, 0]))), rtol=1e-5)
    assert (edited > plain + 0.9).all()


@pytest.mark.thorough("that a network has its registers is in tests/test_cli.py, and what nvcc says in test_nvcc.py")
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_a_network_compiles_to_a_cubin_with_its_resources(tmp_path: Path) -> None:
    net = _compile(models.build("lstm"), level="V3", cache_dir=tmp_path)
    assert isinstance(net, Network)
    (kernel,) = net.kernels
    assert kernel.registers > 0 and kernel.spill_bytes is not None and kernel.grid_syncs > 0
    assert net.plan.modules[0].cubin[:4] == b"\x7fELF"
    assert f"{kernel.registers} registers" in net.explain()
    assert len(list(tmp_path.glob("*.cubin"))) == 1


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_text_that_was_broken_on_the_way_is_rejected(tmp_path: Path) -> None:
    def hook(stage: str, result: object) -> object:
        return result.replace("num_blocks", "") if stage == "text" else result

    with pytest.raises(CudaCompileError, match="nvcc rejected the CUDA text for sm_90"):
        _compile(_matmul(1), hook=hook, cache_dir=tmp_path)


def test_the_compiler_is_told_how_many_blocks_must_be_resident() -> None:
    (merged,) = compile_cuda(_matmul(2), level="V3", arch="sm_90", cubin=False).merged
    for blocks, bounds in ((1, "__launch_bounds__(256)"), (3, "__launch_bounds__(256, 3)")):
        shape = replace(merged.shape, blocks_per_sm=blocks)
        text, kernels = emit_cuda([("one", shape), ("two", merged.shape)], cuda_target("sm_90"))
        assert f"{bounds} one(" in text and "__launch_bounds__(256) two(" in text
        functions = {function.name: function.func for function in merged.shape.functions}
        packed = pack({k.name: k.func for k in kernels}, functions)
        again = unpack(packed)
        assert text_of_functions(again.kernels, again.functions, cuda_target("sm_90")) == text
