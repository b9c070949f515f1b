"""Stage 2, schedule: how many of the drafted tokens are worth a row of the target's next forward.

Whether token k is verified may depend on confidences up to c_k, never on token k itself: c_k is computed before x_k is
drawn, which is what keeps sampled output exact.
"""

from typing import Protocol

import numpy as np

from dspark.errors import UsageError


class Scheduler(Protocol):
    reads_confidence: bool  # False: the confidences need not leave the engine

    def length(self, drafted: int, confidence: np.ndarray | None) -> int:
        """How many of `drafted` tokens to verify (0..drafted); confidence fp32 [drafted] where it was read."""
        ...


class FullBlock:
    """Verify everything."""

    reads_confidence = False

    def length(self, drafted: int, confidence: np.ndarray | None) -> int:
        return drafted


class Threshold:
    """Verify up to the first token whose confidence is below a fixed threshold (DSpark's static gate)."""

    reads_confidence = True

    def __init__(self, threshold: float, least: int = 0):
        """least: so many drafts are verified whatever their confidence."""
        self.threshold = threshold
        self.least = least

    def length(self, drafted: int, confidence: np.ndarray | None) -> int:
        assert confidence is not None
        below = ~(confidence >= self.threshold)  # spelled so that NaN counts as 0
        below[: self.least] = False
        return int(below.argmax()) if below.any() else drafted


SCHEDULERS = ("off", "threshold")
GATE = Threshold(0.8, least=2)  # the default for drafts that are judged by chance: more of them are rejected


def make_scheduler(name: str | None, threshold: float | None, has_confidence: bool, drawn: bool = False) -> Scheduler:
    """The scheduler for the options of a request; UsageError for options that contradict each other or the drafter.

    name None: `threshold` if a threshold is given, else GATE where drafts are judged by chance (`drawn`) and the
    drafter has confidences, else `off`. A threshold of 0 is the full block.
    """
    if name is None and threshold is None and drawn and has_confidence:
        return GATE
    if name is None:
        name = "off" if threshold is None else "threshold"
    if name not in SCHEDULERS:
        raise UsageError(f"scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    if name == "off":
        if threshold:
            raise UsageError(f"confidence threshold {threshold:g} with scheduler off: drop one of the two")
        return FullBlock()
    if threshold is None or not 0 <= threshold <= 1:
        raise UsageError(f"confidence threshold {threshold}: scheduler threshold needs one from 0 to 1")
    if threshold == 0:
        return FullBlock()
    if not has_confidence:
        raise UsageError("scheduler threshold: this drafter has no confidence head; use scheduler off")
    return Threshold(threshold)


class Pausing:
    """Pauses drafting for PAUSE rounds when over the last WINDOW rounds the accept rate was below a minimum."""

    WINDOW, PAUSE = 16, 32

    def __init__(self, least: float | None):
        """least: accepted over verified drafts, 0..1; None: never pause. UsageError: out of range."""
        if least is not None and not 0 <= least <= 1:
            raise UsageError(f"pause below {least:g}: must be an accept rate from 0 to 1")
        self.least = least
        self.pauses = 0
        self._rounds: list[tuple[int, int]] = []  # (verified, accepted) since the last pause
        self._left = 0  # rounds that this pause still has

    def begin_round(self) -> bool:
        """True: this round drafts nothing."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def end_round(self, verified: int, accepted: int) -> None:
        """Of a round that drafted."""
        self._rounds = [*self._rounds, (verified, accepted)][-self.WINDOW :]
        if self.least is None or len(self._rounds) < self.WINDOW:
            return
        shown, kept = (sum(column) for column in zip(*self._rounds, strict=True))
        if kept < self.least * shown or not shown:
            self._rounds, self._left = [], self.PAUSE
            self.pauses += 1
