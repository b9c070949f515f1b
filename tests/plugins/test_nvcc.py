"""The kernels as nvcc compiles them: for every architecture, without spills."""

import re
import shutil
import subprocess

import host_library
import pytest

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc not found")
ARCHITECTURES = [80, *(pytest.param(a, marks=pytest.mark.slow) for a in (86, 89, 90, 100, 120))]
# Namespace of the kernels: header, function, struct.
CALLS = {
    "attention": ("block_attention.cuh", "block_attention", "BlockAttention"),
    "markov": ("markov_argmax.cuh", "markov_argmax", "MarkovArgmax"),
    "acceptance": ("accept.cuh", "accept", "Accept"),
}
SOURCE = """
#include "dspark/{0}"
dspark::Status call(const dspark::{2}& params, void* workspace, size_t bytes, dspark::Stream stream) {{
    return dspark::{1}(params, workspace, bytes, stream);
}}
"""
# Instances of each kernel: paths, dtypes and head sizes.
KERNELS = {
    "attention": {"append": 2, "attend": 16, "merge": 16},
    "markov": {"begin": 6, "head_step": 8, "vocabulary": 10, "finish": 6},
    "acceptance": {"rows": 3, "decide": 3, "masses": 3, "draw": 3},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_without_spills(tmp_path, name, architecture):
    source = tmp_path / f"{name}.cu"
    source.write_text(SOURCE.format(*CALLS[name]))
    command = ["nvcc", "-std=c++17", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-I{host_library.ROOT / 'plugins' / 'include'}", "-c", source, "-o", tmp_path / f"{name}.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict.fromkeys(KERNELS[name], 0)
    for entry in done.stderr.split("Compiling entry function")[1:]:
        kernel = re.search(rf"{name}\d+({'|'.join(KERNELS[name])})", entry)[1]
        found[kernel] += 1
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in entry, entry
    assert found == KERNELS[name]
