"""Parts of a check: each with its own time limit and result, all of them in one JSON file that is always up to date.

Standard library only, so that a check can begin anywhere and say what is missing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
Command = list[str | Path]
TAIL = 12  # lines of output that a result keeps


class PartFailed(Exception):
    """The part ran, and something is wrong; `details` are more fields of its result."""

    def __init__(self, why: str, **details):
        super().__init__(why)
        self.details = details


class NotRun(Exception):
    """The part cannot be run here, and why."""


class Report:
    """The JSON file. header: its first fields."""

    def __init__(self, file: Path, header: Mapping, seconds: float):
        self.file = file
        self.data = {**header, "parts": {}}
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def left(self) -> float:
        return self._end - time.monotonic()

    def save(self) -> None:
        aside = file_beside(self.file)
        aside.write_text(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")
        aside.rename(self.file)

    def part(self, name: str, limit: float, work: Callable[[float], Mapping]) -> bool:
        """Run one part: work(seconds that it may take) -> fields of its result. Never raises; whether it passed."""
        began = time.monotonic()
        seconds = min(limit, self.left())
        result: dict = {"status": PASSED}
        try:
            if seconds < 3:
                raise NotRun("no time left")
            result |= work(seconds)
        except NotRun as error:
            result = {"status": NOT_RUN, "why": str(error)}
        except PartFailed as error:
            result = {"status": FAILED, "why": str(error), **error.details}
        except Exception as error:  # noqa: BLE001 - a part that breaks must not lose the others
            result = {"status": FAILED, "why": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - began, 1)
        with self._lock:
            self.data["parts"][name] = result
            self.save()
        why = f": {result['why']}" if "why" in result else ""
        print(f"{name}: {result['status']}{why} ({result['seconds']} s)", flush=True)
        return result["status"] == PASSED

    def status(self, name: str) -> str | None:
        return self.data["parts"].get(name, {}).get("status")

    def exit_code(self) -> int:
        """0: something passed, and nothing failed."""
        found = [part["status"] for part in self.data["parts"].values()]
        return int(FAILED in found or PASSED not in found)


def file_beside(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def run(
    command: Sequence[str | Path], log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """(exit status, lines of stdout and stderr), which are in `log` too. PartFailed at the time limit; then the command
    and all that it has started are ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    with log.open("w") as out:
        try:
            # A session of its own, so that its children can be ended with it and nothing else is.
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        except OSError as error:
            raise PartFailed(f"{words[0]}: {error.strerror}") from error
        try:
            status = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what hangs in the driver may not end
                process.wait(10)
            if isinstance(error, subprocess.TimeoutExpired):
                raise PartFailed(f"not done after {seconds:.0f} s", tail=tail(log)) from error
            raise
    return status, log.read_text(errors="replace").splitlines()


def expect(command: Sequence[str | Path], log: Path, seconds: float, environment=None) -> list[str]:
    """As `run`, and PartFailed for an exit status other than 0."""
    status, lines = run(command, log, seconds, environment)
    if status:
        raise PartFailed(f"exit status {status}: {last_line(lines)}", tail=lines[-TAIL:])
    return lines


def tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-TAIL:]


def last_line(lines: Sequence[str]) -> str:
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "no output")


def python(*arguments: str | Path) -> Command:
    return [sys.executable, *arguments]


def pytest(*arguments: str | Path) -> Command:
    return python("-m", "pytest", "-q", "--tb=short", "--maxfail=40", "-p", "no:cacheprovider", *arguments)


def counted(status: int, lines: Sequence[str]) -> dict:
    """{"tests": pytest's last line}. PartFailed for failures or no test at all, NotRun where every test was skipped."""
    summary = last_line(lines).strip("= ")
    if status:
        errors = [line for line in lines if line.startswith("E  ")]
        names = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise PartFailed(f"exit status {status}: {summary}", errors=errors[:20], tests=names[:40])
    if " passed" not in summary:
        skipped = [line for line in lines if line.startswith("SKIPPED")]
        raise NotRun(f"{summary}; {last_line(skipped)}") if skipped else PartFailed(f"no test passed: {summary}")
    return {"tests": summary}
