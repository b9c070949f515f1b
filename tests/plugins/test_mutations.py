"""The tests of the kernels have to fail when a kernel is wrong: each mutation is one mistake, made in a copy."""

import os
from pathlib import Path

import pytest
from kernel_builds import Mutation, build_mutants, run_tests

# (old text, new text) in attention_kernels.cuh; the old text is there exactly once.
MUTATIONS = {
    "nothing": ("#pragma once", "#pragma once"),
    "no barrier before the keys are read": ("sync_block();  // this tile's keys are there", "// this tile's keys"),
    "no barrier before the maxima are read": ("sync_block();  // every warp is done with the keys", "// every warp"),
    "no barrier before the weights are read": (
        "sync_block();  // the weights and this tile's values",
        "// the weights",
    ),
    "no wait for the values": ("copy_async_wait<1>();", "copy_async_wait<2>();"),
    "a row sees the next one": (
        "p.causal ? tile.committed + (tile.first + row) / group + 1 : tile.end",
        "p.causal ? tile.committed + (tile.first + row) / group + 2 : tile.end",
    ),
    "a window is one short": ("column >= ends[m][half] - reach", "column > ends[m][half] - reach"),
    "old sums are not scaled": ("total[m][half] *= factor;", ""),
    "the last split is lost": ("(tile.end - tile.begin + split_columns - 1) / split_columns : 0", "1 : 0"),
    "the block overwrites the new context": ("if (!is_context && p.context_start) column +=", "if (false) column +="),
}
# As host_attention.cpp, for the two kernels that the table is run with here: a full build takes longer.
SOURCE = """
#include "dspark/block_attention.cuh"
#include "host_api.h"
using namespace dspark;
DSPARK_HOST_API size_t dspark_host_block_attention_size() { return sizeof(BlockAttention); }
DSPARK_HOST_API size_t dspark_host_block_attention_workspace(const BlockAttention* params) {
    return block_attention_workspace(*params);
}
DSPARK_HOST_API void dspark_host_seed(uint64_t seed) { shim::set_seed(seed); }
DSPARK_HOST_API const char* dspark_host_status_text(int32_t status) { return status_text(static_cast<Status>(status)); }
DSPARK_HOST_API int32_t dspark_host_block_attention(const BlockAttention* p, void* workspace, size_t bytes, Stream s) {
    return static_cast<int32_t>(attention::run<Half, 64, 2>(*p, workspace, bytes, s));
}
"""


@pytest.fixture(scope="module")
def mutants(host_folder, tmp_path_factory) -> dict[str, Path]:
    """The libraries with the mistakes."""
    folder = tmp_path_factory.mktemp("mutants")
    source = folder / "mutant.cpp"
    source.write_text(SOURCE)
    mutations = {name: Mutation("attention_kernels.cuh", *texts) for name, texts in MUTATIONS.items()}
    return build_mutants(folder, host_folder, mutations, dict.fromkeys(mutations, source))


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_table_finds_the_mistake(mutants, name):
    tests = str(Path(__file__).with_name("test_block_attention.py"))
    environment = os.environ | {"DSPARK_HOST_LIBRARY": str(mutants[name])}
    done = run_tests("-s", tests, "-k", "table and fp16", environment=environment)
    if name == "nothing":
        assert done.returncode == 0, done.stdout + done.stderr
    else:  # tests that fail, or an abort of the shim
        assert done.returncode == 1 or done.returncode < 0, done.stdout + done.stderr
        assert "test_table[" in done.stdout + done.stderr or "dspark shim" in done.stderr
