"""The kernels, the plugins and their runner under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import host_library
import pytest
from kernel_builds import assert_tests_pass

CHOSEN = {
    "test_block_attention.py": [
        "test_table",
        "test_head_sizes",
        "test_rows_behind_the_capacity_are_dropped",
        *(f"test_random[{seed}]" for seed in range(0, 320, 8)),
    ],
    "test_markov_argmax.py": ["test_table", "test_an_anchor_from_nowhere_reads_nothing_outside"],
    "test_accept.py": ["test_cases", "test_edges", "test_markers_outside_of_the_rows_read_nothing"],
}


@pytest.fixture(scope="module")
def environment(host_folder):  # host_folder skips where nothing can be built
    return host_library.sanitizer_environment()


def test_sanitizers_are_on(environment):
    folder = Path(environment["DSPARK_HOST_LIBRARY"]).parent
    done = host_library.shim_test(folder, *host_library.SHIM_CHECKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heap-buffer-overflow" in host_library.shim_test(folder, "bad_overrun").stderr


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels(environment, name):
    tests = Path(__file__).with_name(name)
    assert_tests_pass(*(f"{tests}::{chosen}" for chosen in CHOSEN[name]), environment=environment)


def test_random_markov_calls(environment):
    """Rows of every length and alignment, without guards: an overrun by one element is an error."""
    check = """
import ctypes, sys
from markov_kernel import Compared, Random, compare
library = ctypes.CDLL(sys.argv[1])
for seed in range(0, 360, 7):
    compare(library, *Random(seed).draw(), Compared())
"""
    command = [sys.executable, "-c", check, environment["DSPARK_HOST_LIBRARY"]]
    done = subprocess.run(command, cwd=host_library.ROOT / "tests", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_runner(host_runner):  # host_runner skips where nothing can be built
    folder = host_library.build(sanitize=True)
    host_library.run("cmake", "--build", folder, "--target", "dspark_runner_host")
    environment = os.environ | {
        "DSPARK_RUNNER": str(folder / "dspark_runner_host"),
        "DSPARK_PLUGIN_LIBRARY": str(folder / "libdspark_plugins_host.so"),
    }
    assert_tests_pass(str(Path(__file__).with_name("test_runner.py")), environment=environment)
