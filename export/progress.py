"""Progress on stderr: the current stage with the time passed, turning on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from typing import Self, TextIO

_FRAMES = "|/-\\"
_PERIOD = 0.1  # seconds


class Progress:
    """Call it with the name of each stage as it begins; leave the context when the last one is over."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._turning = self._stream.isatty()
        self._start = time.monotonic()
        self._stage = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __enter__(self) -> Self:
        if self._turning:
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._turning:
            self._over.set()
            self._thread.join()
            self._finish_stage()

    def __call__(self, stage: str) -> None:
        with self._lock:
            if self._turning:
                self._finish_stage()
            else:
                print(f"[{self.seconds:6.1f} s] {stage}", file=self._stream, flush=True)
            self._stage = stage

    def _finish_stage(self) -> None:
        if self._stage:
            print(f"\r\x1b[K[{self.seconds:6.1f} s] {self._stage}", file=self._stream, flush=True)

    def _turn(self) -> None:
        tick = 0
        while not self._over.wait(_PERIOD):
            with self._lock:
                if self._stage:
                    line = f"\r{_FRAMES[tick % len(_FRAMES)]} [{self.seconds:6.1f} s] {self._stage}\x1b[K"
                    print(line, end="", file=self._stream, flush=True)
            tick += 1
