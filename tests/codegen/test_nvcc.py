"""The CUDA compiler: found or not, what it reports, and what it rejects."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from souffle.codegen import nvcc
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.codegen.plan import Resources
from souffle.errors import CompilerNotFoundError, CudaCompileError

HAS_NVCC = find_nvcc() is not None
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="no nvcc here")

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel0_a' for 'sm_90'
ptxas info    : Function properties for kernel0_a
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for stage0
    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for stage1
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'kernel1_b' for 'sm_90'
ptxas info    : Function properties for kernel1_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""

KERNEL = """
extern "C" __global__ void __launch_bounds__(64) twice(float* x, int num_blocks) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[63 - threadIdx.x] * 2.0f;
}
"""


def test_the_report_is_parsed_for_each_kernel_with_the_functions_that_it_calls() -> None:
    assert nvcc._parse_report(REPORT) == {
        "kernel0_a": Resources(40, 1024, 24, 28, 24),
        "kernel1_b": Resources(16, 0, 0, 0, 0),
    }
    assert nvcc._parse_report("") == {}


def test_without_nvcc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    with pytest.raises(CompilerNotFoundError, match=r"no nvcc found.*pip install 'souffle-dl\[cuda\]'.*cubin=False"):
        compile_cubin(KERNEL, "sm_90")


def test_where_nvcc_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    home = tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() != home
    home.parent.mkdir()
    home.touch()
    assert find_nvcc() == home
    on_path = tmp_path / "nvcc"
    on_path.touch()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: str(on_path))
    assert find_nvcc() == on_path


@needs_nvcc
def test_a_kernel_compiles_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin, resources = compile_cubin(KERNEL, "sm_90", cache_dir=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    used = resources["twice"]
    assert used.registers > 0 and used.static_shared_bytes == 256 and used.spill_store_bytes == 0
    # Instructions of 16 bytes, in lines of 128.
    assert 128 <= used.code_bytes < 2048 and used.code_bytes % 128 == 0
    real = nvcc.subprocess.run

    def only_version(command: list[str], **options):
        assert command[1:] == ["--version"], "the kernel was compiled again"
        return real(command, **options)

    monkeypatch.setattr(nvcc.subprocess, "run", only_version)
    assert compile_cubin(KERNEL, "sm_90", cache_dir=tmp_path) == (cubin, resources)
    assert not list(tmp_path.glob("*.part"))


@needs_nvcc
def test_an_array_that_is_indexed_at_run_time_is_a_stack() -> None:
    text = """
    extern "C" __global__ void turned(float* x, int* at) {
      float own[32];
      for (int i = 0; i < 32; ++i) own[at[i] & 31] = x[i];
      for (int i = 0; i < 32; ++i) x[i] = own[i];
    }
    """
    used = compile_cubin(text, "sm_90")[1]["turned"]
    assert used.stack_bytes == 128 and used.spill_store_bytes == 0


@needs_nvcc
def test_broken_text_is_rejected_with_nvcc_s_words() -> None:
    with pytest.raises(CudaCompileError, match=r"(?s)rejected the CUDA text for sm_90: .*error.*undefined_thing"):
        compile_cubin(re.sub("2.0f", "undefined_thing", KERNEL), "sm_90")


@needs_nvcc
def test_an_architecture_that_nvcc_lacks_is_rejected() -> None:
    with pytest.raises(CudaCompileError, match="sm_10"):
        compile_cubin(KERNEL, "sm_10")
