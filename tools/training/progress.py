"""Elapsed and remaining time of a long part, as text. Lines, not a moving bar: a training's log is read from a file."""

import threading
import time
from collections.abc import Callable
from typing import Self

INTERVAL = 10.0  # seconds between two lines of progress, and the longest silence


class Heartbeat:
    """A log that is never silent for longer than `interval` seconds: it repeats its last line with the time passed."""

    def __init__(self, log: Callable[[str], None], interval: float = INTERVAL):
        self._log, self._interval = log, interval
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._last, self._since, self._shown = "starting", time.monotonic(), time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, line: str) -> None:
        with self._lock:
            self._last, self._since, self._shown = line, time.monotonic(), time.monotonic()
            self._log(line)

    def _beat(self) -> None:
        wait = self._interval
        while not self._over.wait(wait):
            with self._lock:
                wait = self._shown + self._interval - time.monotonic()
                if wait <= 0:
                    wait, self._shown = self._interval, time.monotonic()
                    self._log(f"{clock(self._shown - self._since)} since: {self._last}")


class Pace:
    """Measures a part from the moment that it is made, with `done` units of work behind it already."""

    def __init__(self, done: int):
        self.began, self.first = time.monotonic(), done

    def text(self, done: int, total: int) -> str:
        """ "0:01:30 elapsed, 0:12:00 left" once there is something to estimate from."""
        elapsed = time.monotonic() - self.began
        text = f"{clock(elapsed)} elapsed"
        if done > self.first:
            text += f", {clock(elapsed / (done - self.first) * (total - done))} left"
        return text


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def progress(log: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """A `progress(done, total)` that logs a line at the start, every INTERVAL, and at the end."""
    pace: Pace | None = None
    shown = -INTERVAL

    def show(done: int, total: int) -> None:
        nonlocal pace, shown
        pace = pace or Pace(done)
        if done == total or time.monotonic() - shown >= INTERVAL:
            shown = time.monotonic()
            log(f"{what} {done}/{total}  {pace.text(done, total)}")

    return show
