"""Stage 2, schedule: how many of the drafted tokens are worth a row of the target's next forward.

Whether token k is verified may depend on confidences up to c_k, never on token k itself: c_k is computed before x_k is
drawn, which is what keeps sampled output exact.
"""

from typing import Protocol

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import Calibration
from dspark.runtime.throughput import ALONE, PROFILE, SpsTable, Throughput, ThroughputAsync, ThroughputGlobal


class Scheduler(Protocol):
    reads_confidence: bool  # False: the confidences need not leave the engine
    looks_ahead: bool  # whether a draft is verified may hang on the draft: not for every rule

    def drafts(self, asking: np.ndarray = ALONE, anchors: int = 1, beside: int = 0) -> bool:
        """Whether a step of `anchors` requests should draft at all, for the requests `asking` [A] that could. Before
        `lengths` of the same step; by earlier steps alone."""
        ...

    def lengths(
        self, confidence: np.ndarray | None, drafted: np.ndarray, requests: np.ndarray | None = None, beside: int = 0
    ) -> np.ndarray:
        """How many drafts of each of R requests to verify, int [R], 0..drafted.

        confidence fp32 [R, G], where it was read; G is that of all steps. drafted int [R]: how many of the G there are
        room and drafts for; never by what the drafts are: a draft is cut after a stop token when the lengths are
        chosen. requests int [R]: a number for each request, the same in all its steps and never another's; None: it is
        the only one. beside: tokens of prompts that the same step reads.
        """
        ...


class Always:
    """Draft in every step."""

    looks_ahead = False

    def drafts(self, asking: np.ndarray = ALONE, anchors: int = 1, beside: int = 0) -> bool:
        return True


class FullBlock(Always):
    """Verify everything."""

    reads_confidence = False

    def lengths(
        self, confidence: np.ndarray | None, drafted: np.ndarray, requests: np.ndarray | None = None, beside: int = 0
    ) -> np.ndarray:
        return drafted


class Threshold(Always):
    """Verify up to the first token whose confidence is below a fixed threshold (DSpark's static gate)."""

    reads_confidence = True

    def __init__(self, threshold: float, least: int = 0):
        """least: so many drafts are verified whatever their confidence."""
        self.threshold = threshold
        self.least = least

    def lengths(
        self, confidence: np.ndarray | None, drafted: np.ndarray, requests: np.ndarray | None = None, beside: int = 0
    ) -> np.ndarray:
        assert confidence is not None
        sure = confidence >= self.threshold  # NaN counts as 0
        sure[:, : self.least] = True
        return np.minimum(np.logical_and.accumulate(sure, axis=1).sum(axis=1), drafted)


THROUGHPUT: dict[str, type[Throughput]] = {
    "throughput": Throughput,
    "throughput-async": ThroughputAsync,
    "throughput-global": ThroughputGlobal,
}
SCHEDULERS = ("off", "threshold", *THROUGHPUT)
GATE = Threshold(0.8, least=2)  # the default for drafts that are judged by chance: more of them are rejected


def make_scheduler(
    name: str | None,
    threshold: float | None,
    has_confidence: bool,
    rule: str = "greedy",
    sps: SpsTable | None = None,
    calibration: Calibration | None = None,
    no_sps: str | None = None,
) -> Scheduler:
    """The scheduler for the options of a request; UsageError for options that contradict each other or the drafter.

    name None: `threshold` if a threshold is given, else GATE where drafts are judged by chance and the drafter has
    confidences, else `off`. A threshold of 0 is the full block. rule: greedy (temperature 0), or the sampling rule.
    sps and calibration, for the throughput schedulers alone: the bundle's profile and what its confidences are worth.
    no_sps: why there is no profile, and what to do.
    """
    if name is None and threshold is None and rule in ("exact", "coupled") and has_confidence:
        return GATE
    if name is None:
        name = "off" if threshold is None else "threshold"
    if name not in SCHEDULERS:
        raise UsageError(f"scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    if name != "threshold":
        if threshold:
            raise UsageError(f"confidence threshold {threshold:g} with scheduler {name}: drop one of the two")
        if name == "off":
            return FullBlock()
    elif threshold is None or not 0 <= threshold <= 1:
        raise UsageError(f"confidence threshold {threshold}: scheduler threshold needs one from 0 to 1")
    elif threshold == 0:
        return FullBlock()
    if not has_confidence:
        raise UsageError(f"scheduler {name}: this drafter has no confidence head; use scheduler off")
    if name == "threshold":
        assert threshold is not None
        return Threshold(threshold)
    kind = THROUGHPUT[name]
    check_rule(kind, rule)
    if sps is None:
        why = no_sps or f"nobody measured this bundle's speed on this machine; {PROFILE}"
        raise UsageError(f"scheduler {name}: {why}")
    return kind(sps, calibration)


def check_rule(scheduler: Scheduler | type[Throughput], rule: str) -> None:
    """UsageError for a scheduler by which the rule's output would no longer be the target's."""
    if scheduler.looks_ahead and rule not in ("coupled", "greedy"):
        raise UsageError(
            f"scheduler throughput-global with sampling {rule}: it looks at the drafts that it admits, which changes"
            " the distribution; use throughput or throughput-async, or sampling coupled"
        )


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
        if kept < self.least * shown or (not shown and self.least > 0):
            self._rounds, self._left = [], self.PAUSE
            self.pauses += 1
