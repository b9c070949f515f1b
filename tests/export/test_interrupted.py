"""The real command, stopped from outside at different moments or by a disk that fills up: nothing may be left."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow


def start(pair, out, **options):
    command = [sys.executable, "-m", "dspark.export.cli", "--ckpt", pair.drafter, "--target", pair.target, "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("stage", ["loading the target", "exporting the target graph", "checking parity"])
def test_signals(pair, tmp_path, number, code, stage):
    process = start(pair, tmp_path / "engines")
    lines = []
    for line in process.stderr:
        lines.append(line)
        if stage in line:
            process.send_signal(number)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)  # impatience
            break
    lines += process.stderr.readlines()
    # The second signal may find Python gone already, and only the process there.
    assert process.wait() in (code, -signal.SIGINT)
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert [line for line in lines if not line.startswith("[")] == [f"error: {word}; nothing was kept\n"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("megabytes", [1, 2])
def test_small_disk(pair, tmp_path, megabytes):
    """A file system with room for a part of the bundle (about 1 MB of weights in pieces of 4 kB)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={megabytes * 400}k"
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        process = start(pair, disk / "engines")
        _, errors = process.communicate()
        assert process.returncode == 1
        assert "error: " in errors and "no space left" in errors and "Traceback" not in errors
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)
