"""The plugins and their runner under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import host_library


def test_runner(host_runner):  # host_runner skips where nothing can be built
    folder = host_library.build(sanitize=True)
    host_library.run("cmake", "--build", folder, "--target", "dspark_runner_host")
    environment = os.environ | {
        "DSPARK_RUNNER": str(folder / "dspark_runner_host"),
        "DSPARK_PLUGIN_LIBRARY": str(folder / "libdspark_plugins_host.so"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).with_name("test_runner.py")))
    done = subprocess.run(command, cwd=host_library.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
