"""Elapsed and remaining time of a long part, as text. Lines, not a moving bar: a training's log is read from a file."""

import time
from collections.abc import Callable

INTERVAL = 10.0  # seconds between two lines at least


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
    """A `progress(done, total)` that logs a line every INTERVAL and one at the end."""
    pace: Pace | None = None
    shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal pace, shown
        pace = pace or Pace(done)
        if done == total or time.monotonic() - shown >= INTERVAL:
            shown = time.monotonic()
            log(f"{what} {done}/{total}  {pace.text(done, total)}")

    return show
