"""From a row of logits to the distribution that a token is drawn from: penalties, temperature, filters, log-probs."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.runtime.random import MOST_GUMBEL

LogitProcessor = Callable[[Sequence[int], np.ndarray], np.ndarray]
"""(tokens so far, logits [V] of the next one) -> logits [V]. Called once for every token that is returned, in order, in
every mode: it may keep state. The logits may be changed in place."""


COLDEST = 1e-4  # the least temperature above 0: over it, logits in fp32 leave noise its last digits
HOTTEST = MOST_PENALTY = 1e6  # beyond it fp32 has nothing left to tell


@dataclass(frozen=True)
class Sampling:
    """The law of the next token: penalties, then temperature -> top-k -> top-p -> min-p, each on what the ones before
    it left. The defaults are greedy decoding of the model's own logits."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest, and what is as likely as the last of them; 0: all
    top_p: float = 1.0  # keep the fewest likeliest that have this much together
    min_p: float = 0.0  # keep what has at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # of all tokens so far: divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # of tokens in this answer: taken from the logit
    frequency_penalty: float = 0.0  # likewise, once for each time

    def check(self) -> None:
        """UsageError for a value out of its range."""
        for field in dataclasses.fields(Sampling):
            if not math.isfinite(getattr(self, field.name)):
                raise UsageError(f"{_words(field.name)} {getattr(self, field.name)}: must be a finite number")
        for name, holds, rule in (
            (
                "temperature",
                self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
                f"0 (greedy), or from {COLDEST:g} to {HOTTEST:g}",
            ),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, and 1 (all tokens) at most"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            (
                "repetition_penalty",
                1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
                f"from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}; 1 is none",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g} in size"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g} in size"),
        ):
            if not holds:
                raise UsageError(f"{_words(name)} {getattr(self, name):g}: must be {rule}")


def _words(name: str) -> str:
    return name.replace("_", " ")


@dataclass(frozen=True)
class Law:
    """A distribution over tokens int64 [n], ascending: p float64 [n], which sums to 1."""

    tokens: np.ndarray
    p: np.ndarray

    def of(self, token: int) -> float:
        """The probability of one token; 0 where the law does not have it."""
        at = int(np.searchsorted(self.tokens, token))
        return float(self.p[at]) if at < len(self.tokens) and self.tokens[at] == token else 0.0

    def without(self, weights: np.ndarray) -> "Law":
        """The residual law: max(p - weights, 0), normalised; this law itself where nothing is left. weights [n]."""
        left = np.maximum(self.p - weights, 0)
        total = left.sum()
        return Law(self.tokens, left / total) if total > 0 else self

    def draw(self, uniform: float) -> int:
        """The token at a number in [0, 1): inverse of the cumulative distribution."""
        cumulative = np.cumsum(self.p)
        at = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return int(self.tokens[min(int(at), len(self.tokens) - 1)])

    def race(self, noise: Callable[[np.ndarray], np.ndarray]) -> int:
        """argmax(log p + g): a draw from the law where g is independent Gumbel noise (Gumbel-max).

        noise: (tokens int64 [n]) -> their g; asked only for those that can win.
        """
        with np.errstate(divide="ignore"):
            logs = np.log(self.p)
        runners = _head(logs, 64)
        scores = logs[runners] + noise(self.tokens[runners])
        # Noise is bounded: what is too far behind the best so far need not draw any.
        more = logs >= scores.max() - MOST_GUMBEL
        more[runners] = False
        if more.any():
            others = np.flatnonzero(more)
            runners = np.concatenate((runners, others))
            scores = np.concatenate((scores, logs[others] + noise(self.tokens[others])))
        return int(self.tokens[runners[np.argmax(scores)]])


def law_of(logits: np.ndarray, sampling: Sampling) -> Law:
    """The law after temperature (above 0), top-k, top-p and min-p. logits [V], float32 or float64.

    DSparkError where they leave nothing to draw from: NaN, or -inf everywhere.
    """
    scaled = logits - largest(logits)
    scaled /= logits.dtype.type(sampling.temperature)
    tokens: np.ndarray | None = None  # None: all
    if 0 < sampling.top_k < len(scaled):
        head = _head(scaled, sampling.top_k)
        values = scaled[head]
        tokens = head[values >= np.partition(values, -sampling.top_k)[-sampling.top_k]]
        scaled = scaled[tokens]
    weights = np.exp(scaled)  # of the likeliest: 1
    kept: np.ndarray | None = None
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p * float(weights.sum()))
    if sampling.min_p > 0:
        enough = weights >= sampling.min_p if kept is None else weights[kept] >= sampling.min_p
        kept = np.flatnonzero(enough) if kept is None else kept[enough]
    if kept is not None:
        tokens, scaled = kept if tokens is None else tokens[kept], scaled[kept]
    p = np.exp(scaled.astype(np.float64))
    return Law(np.arange(len(logits)) if tokens is None else tokens, p / p.sum())


def largest(logits: np.ndarray) -> float:
    """The largest logit; DSparkError if it is no number that something could be chosen by."""
    top = logits.max()
    if not math.isfinite(top):
        raise DSparkError(
            f"the target's largest logit is {top}, so no token can be chosen; check the model and logit processors"
        )
    return top


def greedy(logits: np.ndarray) -> int:
    """The likeliest token, the lowest among equals. Errors as `law_of`."""
    best = int(logits.argmax())  # of NaN, where there is one
    largest(logits[best : best + 1])
    return best


def _nucleus(weights: np.ndarray, mass: float) -> np.ndarray:
    """Indices, ascending, of the fewest largest weights with the sum `mass`; of equal ones the lower index first."""
    count = 256
    while True:
        head = _head(weights, count)
        order = head[np.argsort(-weights[head], kind="stable")]
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= mass or len(head) == len(weights):
            return np.sort(order[: np.searchsorted(cumulative, mass) + 1])
        count *= 8


def _head(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of at least the `count` largest: of all values from some bound on.

    Most of a large vocabulary can be left out cheaply: the count-th largest of the maxima of groups is such a bound.
    """
    size, width = len(values), 64
    if count >= size:
        return np.arange(size)
    many = count * width <= size
    maxima = values[: size // width * width].reshape(width, -1).max(axis=0) if many else values
    return np.flatnonzero(values >= np.partition(maxima, -count)[-count])


class Penalties:
    """A LogitProcessor for the penalties of a request. Not to be shared by requests."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        """prompt: everything before this answer."""
        self.sampling = sampling
        self._answer_from = self._read = len(prompt)
        self._seen = set(prompt)
        self._counts: dict[int, int] = {}

    def __call__(self, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        for token in tokens[self._read :]:
            self._seen.add(token)
            self._counts[token] = self._counts.get(token, 0) + 1
        self._read = len(tokens)
        s = self.sampling
        if s.repetition_penalty != 1:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if (s.presence_penalty or s.frequency_penalty) and self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            logits[ids] -= s.presence_penalty + s.frequency_penalty * counts
        return logits

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class LogProbs:
    """Natural log-probabilities of a token, and of the likeliest ones, by the model's own logits: before penalties,
    processors, temperature and filters."""

    logprob: float
    top: list[tuple[int, float]]  # (token, log-probability), the likeliest first

    def to_json(self) -> dict:
        """null for the logarithm of 0."""
        finite = [
            (token, value if math.isfinite(value) else None) for token, value in ((None, self.logprob), *self.top)
        ]
        return {"logprob": finite[0][1], "top": [list(pair) for pair in finite[1:]]}


def log_probs(logits: np.ndarray, token: int, count: int) -> LogProbs:
    """logits [V]; count: how many of the likeliest tokens to give too."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= math.log(np.exp(exact).sum())
    head = _head(exact, count) if count else np.empty(0, np.int64)
    best = head[np.argsort(-exact[head], kind="stable")][:count]
    return LogProbs(float(exact[token]), [(int(i), float(exact[i])) for i in best])
