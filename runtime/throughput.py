"""The hardware-aware prefix scheduler (DSpark, algorithm 1): verify the drafts that pay at a step's measured speed.

A step of R requests verifies B tokens: R anchors, and the drafts that were admitted. Draft j of request r is reached
with the chance a[r, j], the product of its request's confidences up to j, so the step is expected to give tau = R + sum
of a tokens, at a rate of theta = tau * SPS(B) tokens per second. docs/scheduling.md says why each of the three searches
below keeps the target's distribution, or where it does not.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import Calibration

PROFILE = "run `dspark profile BUNDLE`"
MOST_TOKENS = 2**20  # in a step, of a table
GAIN = 1.1  # by which drafting has to be faster: what was seen is old, and a draft after a pause has more to read
PROBE = 32  # steps without a draft, after which there is one
ALONE = np.zeros(1, int)  # the number of the only request
Seen = tuple[np.ndarray, np.ndarray]  # numbers [R] of requests, ascending, and their survivals [R, G]
ENDS = 1e-7  # confidences are calibrated as if they were so far from 0 and 1


@dataclass(frozen=True)
class SpsTable:
    """How many steps per second the target runs, by B, the number of tokens in a step, the requests' anchors included.

    A curve of steps: between two measured sizes a step is as slow as the next larger one. More
    tokens never make a step faster, so that is the least that the speed can be, wherever between the two it drops; a
    draft is not admitted for a speed that nobody has measured. Beyond the last size there is no speed.
    """

    tokens: tuple[int, ...]  # measured sizes, ascending
    steps_per_second: tuple[float, ...]
    draft_seconds: tuple[float, ...] = ()  # that a draft takes for 1, 2, .. requests; empty: no matter
    requests: int = 1  # that share a step
    fewer: tuple["SpsTable", ...] = ()  # of steps with fewer requests, by these; a step of many costs more

    def __post_init__(self):
        """UsageError for sizes or speeds that cannot have been measured."""
        sizes, speeds = self.tokens, self.steps_per_second
        if not sizes or len(sizes) != len(speeds):
            raise UsageError(f"profile: {len(sizes)} sizes with {len(speeds)} speeds; {PROFILE} again")
        if not all(type(size) is int and 1 <= size <= MOST_TOKENS for size in sizes):
            raise UsageError(f"profile: sizes of steps are whole numbers from 1 to {MOST_TOKENS}; {PROFILE} again")
        if any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise UsageError(f"profile: sizes of steps must ascend; {PROFILE} again")
        if not all(type(speed) in (int, float) and 0 < speed < np.inf for speed in speeds):
            raise UsageError(f"profile: steps per second must be finite and above 0; {PROFILE} again")

    @property
    def most(self) -> int:
        """The largest step that has a speed."""
        return self.tokens[-1]

    def speeds(self, first: int, last: int) -> np.ndarray:
        """Of steps of `first` requests with `first`..`last` tokens, fp64; those beyond `most` are left out. UsageError
        where `first` tokens are: the profile is of smaller batches."""
        if first > self.most:
            raise UsageError(
                f"profile: {first} requests in a step, it was measured up to {self.most} tokens; run `dspark profile`"
                " with more, or choose another scheduler"
            )
        table = next((t for t in self.fewer if t.requests >= first), self)
        return table._curve[first : last + 1]

    def added(self, size: int, tokens: int) -> np.ndarray:
        """Seconds that 0..`tokens` more tokens add to a step of `size`, as far as steps are measured; at least [0].

        In proportion between two sizes: in steps as large as prompts make them few sizes are measured.
        """
        sizes = np.arange(size, max(size, min(size + tokens, self.most)) + 1)
        seconds = np.interp(sizes, self.tokens, 1 / np.array(self.steps_per_second))
        return seconds - seconds[0]

    def draft_time(self, requests: int) -> float:
        """Seconds; of more requests than were measured, in proportion."""
        known = len(self.draft_seconds)
        return self.draft_seconds[min(requests, known) - 1] * max(1, requests / known)

    @cached_property
    def _curve(self) -> np.ndarray:
        """By the number of tokens, from 0."""
        return np.repeat(np.array(self.steps_per_second, float), np.diff(self.tokens, prepend=-1))


def calibrated(
    confidence: np.ndarray,
    temperatures: Sequence[float] | np.ndarray,
    shifts: Sequence[float] | np.ndarray = (),
) -> np.ndarray:
    """sigmoid(logit(c) / T + b), float64: confidences [.., G] by the T and b [G or more] of their positions.

    What sequential scaling found (docs/scheduling.md); without shifts they are 0. The order at a position stays; NaN
    stays NaN.
    """
    c = np.clip(np.asarray(confidence, np.float64), ENDS, 1 - ENDS)
    size = c.shape[-1]
    against = np.log(1 / c - 1) / np.asarray(temperatures, np.float64)[:size]
    if len(shifts):
        against -= np.asarray(shifts, np.float64)[:size]
    return 1 / (1 + np.exp(against))


def survival_of(confidence: np.ndarray) -> np.ndarray:
    """a [R, G] float64: the chance that a draft and all before it are accepted. NaN counts as 0."""
    return np.multiply.accumulate(np.fmin(np.fmax(confidence, 0), 1), axis=1, dtype=np.float64)


def ranked(survival: np.ndarray, drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first `drafted` [R] drafts of each request in the order of their admission: requests int [N], survivals [N].

    By descending survival; among equals by position, then by request. So the first n of them are a prefix of each
    request, whatever n, and no token has a say. Each comes after all that it depends on: the order of the ones before
    it is the same, to the bit, whatever follows it in its request.
    """
    count, size = survival.shape
    candidates = np.arange(size)[:, None] < drafted
    keys = np.where(candidates, survival.T, -1.0).ravel()  # by position, then request, which a stable sort keeps
    order = np.argsort(-keys, kind="stable")[: np.count_nonzero(candidates)]
    return order % count, keys[order]


class Throughput:
    """Algorithm 1: admit draft by draft, and stop at the first that does not raise theta."""

    reads_confidence = True
    looks_ahead = False

    def __init__(self, sps: SpsTable, calibration: Calibration | None = None):
        """calibration: of every position; None: confidences are taken as they are."""
        self.sps = sps
        self.calibration = calibration
        self._last: Seen = (np.empty(0, int), np.empty((0, 0)))  # of every request of the last step that drafted once
        self._skipped = 0  # steps without a draft, since the last with one

    def drafts(self, asking: np.ndarray = ALONE, anchors: int = 1, beside: int = 0) -> bool:
        """Whether a draft pays for its own time in a step of `anchors` requests, of which `asking` [A] want drafts.

        By the survivals that each of them had last, so nothing of the step itself is looked at: what is decided here is
        no more bound to a token than the load is. Requests that never had any count as the mean of the others. Every
        PROBE steps without a draft there is one, to look again.
        """
        if not self.sps.draft_seconds or not len(self._last[0]):
            return True
        expected = _remembered(*self._last, asking, self._last[1].mean(axis=0))
        theta = self.theta(np.sort(expected, axis=None)[::-1], anchors, beside, len(asking))
        pays = theta[self._stop(theta)] > GAIN * self.theta(theta[:0], anchors, beside)[0]
        self._skipped = 0 if pays or self._skipped == PROBE else self._skipped + 1
        return self._skipped == 0

    def lengths(
        self,
        confidence: np.ndarray | None,
        drafted: np.ndarray,
        requests: np.ndarray | None = None,
        beside: int = 0,
    ) -> np.ndarray:
        assert confidence is not None
        if self.calibration is not None:
            confidence = calibrated(confidence, self.calibration.temperatures, self.calibration.shifts)
        survival = survival_of(confidence)
        request, admitted = ranked(survival, drafted)
        count = self._count(survival, admitted, drafted, requests, beside)
        if self.sps.draft_seconds:
            self._last = self._seen(_told_apart(requests, drafted), survival, drafted)
        return np.bincount(request[:count], minlength=len(drafted))

    def theta(self, admitted: np.ndarray, requests: int, beside: int = 0, drafting: int = 0) -> np.ndarray:
        """Expected tokens per second with the first n drafts of `admitted`, by n, as far as steps have speeds.

        beside: tokens of prompts that the step reads too. drafting: how many requests it drafted for, which took its
        time; 0: a step of plain decoding.
        """
        speeds = self.sps.speeds(requests, requests + len(admitted))
        if beside:  # reading prompts takes its time in any case: what counts is what drafts add to that
            added = self.sps.added(requests + beside, len(admitted))
            speeds = 1 / (1 / speeds[0] + added)
        if drafting and self.sps.draft_seconds:
            speeds = speeds / (1 + speeds * self.sps.draft_time(drafting))
        # cumsum adds from left to right: what comes later does not change a bit of what is here.
        return np.cumsum(np.concatenate(([float(requests)], admitted[: len(speeds) - 1]))) * speeds

    def _seen(self, requests: np.ndarray, survival: np.ndarray, drafted: np.ndarray) -> Seen:
        """The last survivals of those of `requests` that ever drafted."""
        before, known = self._last
        if len(before):
            place = np.searchsorted(before, requests).clip(max=len(before) - 1)
            stays = (before[place] == requests) & (drafted == 0)
            survival = np.where(stays[:, None], known[place], survival)
            drafted = drafted + stays
        return _of_drafting(requests, survival, drafted)

    def _count(self, survival, admitted, drafted, requests, beside) -> int:
        """How many of the drafts in `admitted` to verify."""
        return self._stop(self.theta(admitted, len(drafted), beside, int(np.count_nonzero(drafted))))

    def _stop(self, theta: np.ndarray) -> int:
        """How many drafts to admit, by the theta of every number of them."""
        better = theta[1:] > theta[:-1]
        return len(better) if better.all() else int(better.argmin())


class ThroughputGlobal(Throughput):
    """The most theta of all: it looks at tokens that it admits, so it is for `coupled` and greedy decoding alone."""

    looks_ahead = True

    def _stop(self, theta: np.ndarray) -> int:
        return int(theta.argmax())


class ThroughputAsync(ThroughputGlobal):
    """How many drafts is known before the step: the most theta of all, by the confidences of two steps before.

    Which ones is what the step's own confidences say. For one generation, or one batch through all its steps.
    """

    looks_ahead = False

    def __init__(self, sps: SpsTable, calibration: Calibration | None = None):
        super().__init__(sps, calibration)
        self._history: deque[Seen] = deque(maxlen=2)  # of the last two steps

    def _count(self, survival, admitted, drafted, requests, beside) -> int:
        requests, expected = _told_apart(requests, drafted), np.ones(survival.shape)
        if len(self._history) == 2:
            expected = _remembered(*self._history[0], requests, expected[0])
        candidates = expected[np.arange(expected.shape[1]) < drafted[:, None]]
        self._history.append(_of_drafting(requests, survival, drafted))
        ascending = np.sort(candidates, kind="stable")  # which is quicker, since those of a request are in order
        return super()._count(survival, ascending[::-1], drafted, requests, beside)


def _of_drafting(requests: np.ndarray, survival: np.ndarray, drafted: np.ndarray) -> Seen:
    """Those that drafted."""
    order = np.argsort(requests)
    order = order[drafted[order] > 0]
    return requests[order], survival[order]


def _told_apart(requests: np.ndarray | None, drafted: np.ndarray) -> np.ndarray:
    if requests is None and len(drafted) > 1:
        raise ValueError("several requests need numbers that tell them apart in later steps")
    return ALONE if requests is None else requests


def _remembered(before: np.ndarray, survival: np.ndarray, requests: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """Survivals [R, G] of `requests` as those `before` (ascending) had them; of others, `unknown` [G]."""
    if np.array_equal(before, requests):  # as in most steps
        return survival
    expected = np.tile(unknown, (len(requests), 1))
    if len(before):
        place = np.searchsorted(before, requests).clip(max=len(before) - 1)
        same = np.flatnonzero(before[place] == requests)
        expected[same] = survival[place[same]]
    return expected
