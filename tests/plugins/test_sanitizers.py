"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import subprocess
import sys
from pathlib import Path

import host_library
import pytest


@pytest.fixture(scope="module")
def environment(host_folder):  # host_folder skips where nothing can be built
    return host_library.sanitizer_environment()


def test_sanitizers_are_on(environment):
    folder = Path(environment["DSPARK_HOST_LIBRARY"]).parent
    done = host_library.shim_test(folder, *host_library.SHIM_CHECKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heap-buffer-overflow" in host_library.shim_test(folder, "bad_overrun").stderr


def test_block_attention(environment):
    tests = Path(__file__).with_name("test_block_attention.py")
    chosen = ["test_table", "test_head_sizes", "test_rows_behind_the_capacity_are_dropped"]
    chosen += [f"test_random[{seed}]" for seed in range(0, 320, 8)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"{tests}::{name}" for name in chosen]
    done = subprocess.run(command, cwd=host_library.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
