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

PROFILE = "run `dspark profile BUNDLE`"
MOST_TOKENS = 2**20  # in a step, of a table
ENDS = 1e-7  # confidences are calibrated as if they were so far from 0 and 1


@dataclass(frozen=True)
class SpsTable:
    """How many steps per second the target runs, by B, the number of tokens in a step, the requests' anchors included.

    A curve of steps, which nothing smooths: between two measured sizes a step is as slow as the next larger one. More
    tokens never make a step faster, so that is the least that the speed can be, wherever between the two it drops; a
    draft is not admitted for a speed that nobody has measured. Beyond the last size there is no speed.
    """

    tokens: tuple[int, ...]  # measured sizes, ascending
    steps_per_second: tuple[float, ...]

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

    @classmethod
    def from_json(cls, data: object, where: str) -> "SpsTable":
        """Of {"tokens": [B, ..], "steps_per_second": [SPS(B), ..]}; UsageError, naming `where`, for anything else."""
        names = ("tokens", "steps_per_second")
        for name in names:
            if not isinstance(data, dict) or not isinstance(data.get(name), list):
                raise UsageError(f"{where}: {name} is missing or is not a list; {PROFILE} again")
        try:
            return cls(*(tuple(data[name]) for name in names))  # type: ignore[index]
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def to_json(self) -> dict:
        return {"tokens": list(self.tokens), "steps_per_second": list(self.steps_per_second)}

    @property
    def most(self) -> int:
        """The largest step that has a speed."""
        return self.tokens[-1]

    def speeds(self, first: int, last: int) -> np.ndarray:
        """Of steps of `first`..`last` tokens, fp64; those beyond `most` are left out. UsageError where first is."""
        if first > self.most:
            raise UsageError(
                f"profile: {first} requests in a step, it was measured up to {self.most} tokens; run `dspark profile`"
                " with more, or choose another scheduler"
            )
        return self._curve[first : last + 1]

    @cached_property
    def _curve(self) -> np.ndarray:
        """By the number of tokens, from 0."""
        return np.repeat(np.array(self.steps_per_second, float), np.diff(self.tokens, prepend=-1))


def calibrated(confidence: np.ndarray, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
    """sigmoid(logit(c) / T), float64: confidences [.., G] by the temperatures [G or more] of their positions.

    What sequential temperature scaling found (docs/scheduling.md). The order at a position stays; NaN stays NaN.
    """
    c = np.clip(np.asarray(confidence, np.float64), ENDS, 1 - ENDS)
    scales = np.asarray(temperatures, np.float64)[: c.shape[-1]]
    return 1 / (1 + np.exp(np.log(1 / c - 1) / scales))


def survival_of(confidence: np.ndarray) -> np.ndarray:
    """a [R, G] float64: the chance that a draft and all before it are accepted. NaN counts as 0."""
    return np.cumprod(np.where(confidence > 0, np.minimum(confidence, 1), 0), axis=1, dtype=np.float64)


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

    def __init__(self, sps: SpsTable, temperatures: Sequence[float] | None = None):
        """temperatures: of every position, for `calibrated`; None: confidences are taken as they are."""
        self.sps = sps
        self.temperatures = temperatures

    def lengths(
        self, confidence: np.ndarray | None, drafted: np.ndarray, requests: np.ndarray | None = None
    ) -> np.ndarray:
        assert confidence is not None
        if self.temperatures is not None:
            confidence = calibrated(confidence, self.temperatures)
        survival = survival_of(confidence)
        request, admitted = ranked(survival, drafted)
        count = self._count(survival, admitted, drafted, requests)
        return np.bincount(request[:count], minlength=len(drafted))

    def theta(self, admitted: np.ndarray, requests: int) -> np.ndarray:
        """Expected tokens per second with the first n drafts of `admitted`, by n, as far as steps have speeds."""
        speeds = self.sps.speeds(requests, requests + len(admitted))
        # cumsum adds from left to right: what comes later does not change a bit of what is here.
        return np.cumsum(np.concatenate(([float(requests)], admitted[: len(speeds) - 1]))) * speeds

    def _count(self, survival, admitted, drafted, requests) -> int:
        """How many of the drafts in `admitted` to verify."""
        theta = self.theta(admitted, len(drafted))
        better = theta[1:] > theta[:-1]
        return len(better) if better.all() else int(better.argmin())


class ThroughputGlobal(Throughput):
    """The most theta of all: it looks at tokens that it admits, so it is for `coupled` and greedy decoding alone."""

    def _count(self, survival, admitted, drafted, requests) -> int:
        return int(self.theta(admitted, len(drafted)).argmax())


class ThroughputAsync(Throughput):
    """How many drafts is known before the step: the most theta of all, by the confidences of two steps before.

    Which ones is what the step's own confidences say. For one generation, or one batch through all its steps.
    """

    def __init__(self, sps: SpsTable, temperatures: Sequence[float] | None = None):
        super().__init__(sps, temperatures)
        self._seen: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=2)  # requests [R] ascending, survival [R, G]

    def _count(self, survival, admitted, drafted, requests) -> int:
        if requests is None:
            if len(drafted) > 1:
                raise ValueError("several requests need numbers that tell them apart in later steps")
            requests = np.zeros(1, int)
        expected = self._expected(requests, survival.shape)
        candidates = expected[np.arange(expected.shape[1]) < drafted[:, None]]
        order = np.argsort(requests)
        order = order[drafted[order] > 0]
        self._seen.append((requests[order], survival[order]))
        return int(self.theta(np.sort(candidates)[::-1], len(drafted)).argmax())

    def _expected(self, requests: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Survivals [R, G] by what was seen two steps before; what was not seen has confidence 1."""
        expected = np.ones(shape)
        if len(self._seen) < 2 or not len(self._seen[0][0]):
            return expected
        before, survival = self._seen[0]
        place = np.searchsorted(before, requests).clip(max=len(before) - 1)
        same = np.flatnonzero(before[place] == requests)
        size = min(shape[1], survival.shape[1])
        expected[same, :size] = survival[place[same], :size]
        expected[same, size:] = expected[same, size - 1 : size]
        return expected
