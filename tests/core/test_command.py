"""What holds for every command, whatever it does: one line for an error, and signals that end it cleanly."""

import json
import signal
import subprocess
import sys

import pytest

from dspark.command import Parser, run_command
from dspark.errors import DSparkError, UsageError


def fail(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UsageError("a\n  b"), 2, "a b"),
        (DSparkError("ü"), 1, "ü"),
        (ValueError("x"), 1, "unexpected ValueError: x; check the input, DSPARK_TRACEBACK=1 shows where it arose"),
        (KeyboardInterrupt(), 130, "interrupted, c"),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_is_one_line_and_one_object(capsys, error, code, line, as_json):
    assert run_command(fail(error), "cmd: ", as_json, kept=", c") == code
    out, err = capsys.readouterr()
    assert err == f"cmd: error: {line}\n"
    assert (json.loads(out) if as_json else out) == ({"error": line, "exit_code": code} if as_json else "")


def test_success_says_nothing(capsys):
    assert run_command(lambda: 7, "", True) == 7
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv, word", [(["--no"], "--no"), (["--js"], "--js"), (["--n", "x"], "--n")])
def test_a_wrong_option_is_a_usage_error(argv, word):
    parser = Parser(prog="cmd")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--n", type=int)
    with pytest.raises(UsageError, match=f"{word}.*; see cmd --help"):
        parser.parse_args(argv)


SLOW_CLEANING = """
import os, signal, sys, time
from dspark.command import run_command

def body():
    try:
        os.kill(os.getpid(), {first})
        time.sleep(60)
    finally:
        os.kill(os.getpid(), {second})
        time.sleep(0.1)
        print("cleaned", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would be born ignoring it
code = run_command(body, "cmd: ", False)
os.kill(os.getpid(), {second})  # while Python shuts down
sys.exit(code)
"""


@pytest.mark.parametrize("first, code, word", [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_does_not_disturb_the_cleaning(first, code, word, second):
    program = SLOW_CLEANING.format(first=int(getattr(signal, first)), second=int(getattr(signal, second)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "cleaned\n", f"cmd: error: {word}\n")


def test_a_signal_that_is_ignored_stays_so():
    """nohup's way of keeping a job when the terminal closes."""
    program = """
import os, signal
from dspark.command import run_command
signal.signal(signal.SIGHUP, signal.SIG_IGN)
run_command(lambda: os.kill(os.getpid(), signal.SIGHUP) or print("goes on") or 0, "", False)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("goes on\n", "")


def test_a_reader_that_went_away():
    program = "from dspark.command import run_command; import sys; sys.exit(run_command(lambda: 1 / 0, '', True))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read().count("\n") == 1
    assert process.returncode == 1
