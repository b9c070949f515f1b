"""The Markov and acceptance kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import subprocess
import sys
from pathlib import Path

import host_library
import pytest

CHOSEN = {
    "test_markov_argmax.py": ["test_table", "test_an_anchor_from_nowhere_reads_nothing_outside"],
    "test_accept.py": ["test_cases", "test_edges", "test_markers_outside_of_the_rows_read_nothing"],
}


@pytest.fixture(scope="module")
def environment(host_folder):  # host_folder skips where nothing can be built
    return host_library.sanitizer_environment()


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels(environment, name):
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"{tests}::{chosen}" for chosen in CHOSEN[name]]
    done = subprocess.run(command, cwd=host_library.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


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
