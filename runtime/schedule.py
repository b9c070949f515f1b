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

    def __init__(self, threshold: float):
        self.threshold = threshold

    def length(self, drafted: int, confidence: np.ndarray | None) -> int:
        assert confidence is not None
        below = ~(confidence >= self.threshold)  # spelled so that NaN counts as 0
        return int(below.argmax()) if below.any() else drafted


SCHEDULERS = ("off", "threshold")


def make_scheduler(name: str | None, threshold: float | None, has_confidence: bool) -> Scheduler:
    """The scheduler for the options of a request; UsageError for options that contradict each other or the drafter.

    name None: `threshold` if a threshold is given, else `off`. A threshold of 0 is the full block.
    """
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
