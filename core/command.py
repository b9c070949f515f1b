"""What every command does alike: an error is one line, with --json one object too, and a signal ends it cleanly."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from dspark.errors import DSparkError, UsageError, unexpected

GRACE = 5.0  # seconds after a signal in which further ones are ignored, so that cleaning up comes to its end
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong option is a UsageError, and none is abbreviated: --json is seen before they are parsed."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def run_command(body: Callable[[], int], prefix: str, as_json: bool, kept: str = "") -> int:
    """Run `body` as the whole of a command; returns the exit code: its own, or that of what it raised.

    An error is one line on stderr after `prefix`, with `as_json` {"error", "exit_code"} on stdout too. `kept` is what a
    user wants to know of an interrupted job.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the job
    try:
        message, code = _outcome(body, kept)
        if message:
            line = " ".join(message.split())
            print(f"{prefix}error: {line}", file=sys.stderr, flush=True)
            if as_json:
                print(json.dumps({"error": line, "exit_code": code}, ensure_ascii=False))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DSparkError.exit_code


def _outcome(body: Callable[[], int], kept: str) -> tuple[str, int]:
    """(what went wrong or nothing, exit code)"""
    try:
        _raise_on_signals()
        return "", body()
    except DSparkError as error:
        return str(error), error.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        return unexpected(error), DSparkError.exit_code
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        # As shells count.
        return ("interrupted" if number == signal.SIGINT else "terminated") + kept, 128 + number


def _raise_on_signals() -> None:
    """Let signals raise Stopped. The handlers stay when the command is over: one may come while Python shuts down."""
    last = -GRACE

    def stop(number: int, _frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= GRACE:
            last = now
            raise Stopped(number)

    with contextlib.suppress(ValueError):  # only the main thread may
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's is to stay ignored
                signal.signal(number, stop)
