"""The kernels as nvcc compiles them: for every architecture, without spills."""

import re
import shutil
import subprocess

import host_library
import pytest

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc not found")
ARCHITECTURES = [80, *(pytest.param(a, marks=pytest.mark.slow) for a in (86, 89, 90, 100, 120))]
SOURCE = """
#include "dspark/block_attention.cuh"
dspark::Status call(const dspark::BlockAttention& params, void* workspace, size_t bytes, dspark::Stream stream) {
    return dspark::block_attention(params, workspace, bytes, stream);
}
"""
KERNELS = {"append": 2, "attend": 16, "merge": 16}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_compiles_without_spills(tmp_path, architecture):
    source = tmp_path / "attention.cu"
    source.write_text(SOURCE)
    command = ["nvcc", "-std=c++17", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-I{host_library.ROOT / 'plugins' / 'include'}", "-c", source, "-o", tmp_path / "attention.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict.fromkeys(KERNELS, 0)
    for entry in done.stderr.split("Compiling entry function")[1:]:
        name = re.search(r"attention\d+(append|attend|merge)", entry)[1]
        found[name] += 1
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in entry, entry
    assert found == KERNELS
