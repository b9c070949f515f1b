"""The comparisons of the Markov and acceptance kernels have to find mistakes: each is made in a copy of one header."""

import subprocess
import sys
from pathlib import Path

import host_library
import pytest
from kernel_builds import PLUGINS, Mutation, build_mutants

# Kernel, header, old text, new text; the old text is in the header exactly once.
MUTATIONS = {
    "markov: nothing": ("markov", "markov_argmax.cuh", "#pragma once", "#pragma once"),
    "markov: the highest of equal logits": ("markov", "best.h", "| ~index", "| index"),
    "markov: e as one bf16": ("markov", "tile_dot.cuh", ": 3;", ": 1;"),
    "markov: loads behind the end of a row": ("markov", "tile_dot.cuh", "nullptr && at < depth", "nullptr"),
    "markov: an index for a token": (
        "markov",
        "markov_kernels.cuh",
        "drafted_token(p, work.best[at - 1])",
        "best_index(work.best[at - 1])",
    ),
    "markov: one state for old and new": ("markov", "markov_kernels.cuh", "(step + 1) % 2 * units", "step % 2 * units"),
    "markov: no barrier before the maxima of the warps are read": (
        "markov",
        "markov_kernels.cuh",
        "    sync_block();\n    const int request = first_request",
        "    const int request = first_request",
    ),
    "markov: maxima are not cleared": ("markov", "markov_kernels.cuh", "work.best[at] = NO_BEST;", ";"),
    "accept: nothing": ("accept", "accept.cuh", "#pragma once", "#pragma once"),
    "accept: -0 is less than 0": ("accept", "best.h", "score == 0.0f ? 0.0f : score", "score"),
    "accept: q is 1": ("accept", "accept_kernels.cuh", "u * q < ", "u < "),
    "accept: chunks are not rescaled": (
        "accept",
        "accept_kernels.cuh",
        "work.sum[first + chunk] * exponential(largest, best_score(best), per_temperature)",
        "work.sum[first + chunk]",
    ),
    "accept: p for the residual": ("accept", "accept_kernels.cuh", "if (residual && ending.refused) {", "if (false) {"),
    "accept: d2t as tokens": (
        "accept",
        "accept_kernels.cuh",
        "return index + (p.d2t == nullptr ? 0",
        "return (p.d2t == nullptr ? index",
    ),
    "accept: the draft's row at the target's temperature": (
        "accept",
        "accept_kernels.cuh",
        "if (draft && temperature > 0.0f) temperature = draft_temperature_of",
        "if (false) temperature = draft_temperature_of",
    ),
    "accept: no barrier before the residual": (
        "accept",
        "accept_kernels.cuh",
        "    sync_block();\n    if (residual && ending.refused) {",
        "    if (residual && ending.refused) {",
    ),
}
# What a mistake is looked for with: the table and a part of the random calls.
CHECKS = {
    "markov": """
import ctypes, itertools, sys, markov_kernel, reference
from markov_kernel import Call, Compared, Random, compare
library = ctypes.CDLL(sys.argv[1])
for case, dtype in itertools.product(reference.MARKOV_CASES, ("fp32", "bf16")):
    compare(library, case.inputs(), case.attributes, Call(dtype), Compared())
for seed in range(60):
    compare(library, *Random(seed).draw(), Compared())
""",
    "accept": """
import ctypes, sys
from accept_kernel import Compared, compare, random_calls
library = ctypes.CDLL(sys.argv[1])
for seed in range(60):
    compare(library, *random_calls(seed), Compared())
""",
}


@pytest.fixture(scope="module")
def mutants(host_folder, tmp_path_factory) -> dict[str, Path]:
    """The libraries with the mistakes."""
    sources = {name: PLUGINS / "tests" / f"host_{kernel}.cpp" for name, (kernel, *_) in MUTATIONS.items()}
    mutations = {name: Mutation(*texts) for name, (_, *texts) in MUTATIONS.items()}
    return build_mutants(tmp_path_factory.mktemp("mutants"), host_folder, mutations, sources)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_finds_the_mistake(mutants, name):
    command = [sys.executable, "-c", CHECKS[name.split(":")[0]], mutants[name]]
    done = subprocess.run(command, cwd=host_library.ROOT / "tests", capture_output=True, text=True)
    if name.endswith(": nothing"):
        assert done.returncode == 0, done.stdout + done.stderr
    else:  # a comparison that fails, or an abort of the shim
        assert "AssertionError" in done.stderr or "dspark shim" in done.stderr, done.stdout + done.stderr
