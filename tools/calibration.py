"""Sequential temperature scaling (DSpark): confidences that agree with how often drafts are accepted.

The confidence c_k estimates the chance that draft k is accepted if all before it are, so the product of c_1..c_k
estimates the chance that the prefix of k drafts survives. For k = 1, 2, .. in order one temperature T_k is searched, by
which sigmoid(logit(c_k) / T_k) makes that product agree best with what was observed; the earlier ones stay as found.

How well probabilities agree is their expected calibration error (ECE) over BINS bins of equal mass, each of the same
number of rounds by ascending probability: the mean over all rounds of |mean probability - share of survivals| of their
bin. Bins of equal width would reward a temperature that flattens all probabilities into one bin, where they agree on
average and tell nothing apart. All arrays are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.runtime.throughput import calibrated, survival_of

BINS = 15
GRID = np.geomspace(0.1, 10, 101)  # temperatures that are tried; 1 is among them
LEAST = 100  # rounds, with fewer of which a position gets the temperature of the one before


@dataclass(frozen=True)
class Outcomes:
    """What became of N rounds' drafts. A draft that was never shown to the target, or stands behind the end of the
    text, has no outcome: it is left out, and counts neither as survived nor as rejected."""

    confidence: np.ndarray  # [N, G], before calibration
    known: np.ndarray  # int [N]: of how many drafts, from the first, the outcome is known
    accepted: np.ndarray  # int [N]

    def __len__(self) -> int:
        return len(self.known)

    def seen(self, position: int) -> np.ndarray:
        """Bool [N]: rounds in which the outcome of draft `position` (from 0) is known."""
        return self.known > position

    def survived(self, position: int) -> np.ndarray:
        """Bool, of the rounds that saw it: draft `position` and all before it were accepted."""
        return self.accepted[self.seen(position)] > position


def survival(outcomes: Outcomes, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
    """[N, G]: the estimated chance that a draft and all before it are accepted."""
    return survival_of(calibrated(outcomes.confidence, temperatures))


def fit(outcomes: Outcomes, bins: int = BINS) -> np.ndarray:
    """Temperatures [G] by sequential temperature scaling; of equal errors, that of the temperature closest to 1."""
    size = outcomes.confidence.shape[1]
    found = np.ones(size)
    grid = sorted(GRID, key=lambda t: abs(np.log(t)))
    before = np.ones(len(outcomes))
    for k in range(size):
        seen = outcomes.seen(k)
        if seen.sum() < LEAST:
            found[k] = found[k - 1] if k else 1
        else:
            c, survived = outcomes.confidence[seen, k], outcomes.survived(k)
            errors = [ece(before[seen] * chance(c, t), survived, bins) for t in grid]
            found[k] = grid[int(np.argmin(errors))]
        before = before * chance(outcomes.confidence[:, k], found[k])
    return found


def chance(confidence: np.ndarray, temperature: float) -> np.ndarray:
    """[N] calibrated confidences of one position; no number counts as 0."""
    return np.nan_to_num(calibrated(confidence[:, None], [temperature])[:, 0])


@dataclass(frozen=True)
class Bin:
    low: float
    high: float
    count: int
    probability: float  # mean of those in it
    observed: float  # share of them that survived


def reliability(probability: np.ndarray, survived: np.ndarray, bins: int = BINS) -> list[Bin]:
    """The bins of equal mass, in order; probability [n], survived bool [n]."""
    order = np.argsort(probability, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [
        Bin(
            low=float(probability[part[0]]),
            high=float(probability[part[-1]]),
            count=len(part),
            probability=float(probability[part].mean()),
            observed=float(survived[part].mean()),
        )
        for part in parts
    ]


def ece(probability: np.ndarray, survived: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error of probability [n] against survived bool [n], n > 0."""
    order = np.argsort(probability, kind="stable")
    return _mean_gap((probability - survived)[order], bins)


def _mean_gap(differences: np.ndarray, bins: int) -> float:
    """differences [n] of probability and outcome, by ascending probability."""
    ends = np.cumsum([0, *(len(part) for part in np.array_split(differences, bins))])
    sums = np.diff(np.concatenate(([0.0], np.cumsum(differences)))[ends])
    return float(np.abs(sums).sum() / len(differences))


def chance_ece(probability: np.ndarray, bins: int = BINS, draws: int = 100) -> float:
    """The ECE that perfectly calibrated probabilities have in a sample of this size: what no fit can go below."""
    random, ascending = np.random.default_rng(0), np.sort(probability)
    draw = (random.random(len(ascending)) < ascending for _ in range(draws))
    return float(np.mean([_mean_gap(ascending - survived, bins) for survived in draw]))


def brier(probability: np.ndarray, survived: np.ndarray) -> float:
    """Mean squared distance of probability [n] from survived bool [n] as 0 and 1."""
    return float(np.mean((probability - survived) ** 2))


def auc(probability: np.ndarray, survived: np.ndarray) -> float | None:
    """The chance that a survival has a larger probability than a rejection, ties count half; None without both."""
    positive = int(survived.sum())
    negative = len(survived) - positive
    if not positive or not negative:
        return None
    values, index, counts = np.unique(probability, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # from 1, the mean of equal ones
    return float((ranks[index][survived].sum() - positive * (positive + 1) / 2) / (positive * negative))


def assess(outcomes: Outcomes, temperatures: Sequence[float] | np.ndarray, bins: int = BINS) -> list[dict]:
    """Per position, of the prefix's survival: count, observed share, and {"before", "after"} with what `figures` says.

    `draft_auc` is of c_k alone, among the rounds that kept all before draft k; a temperature cannot change it.
    """
    size = outcomes.confidence.shape[1]
    before, after = survival_of(outcomes.confidence), survival(outcomes, temperatures)
    positions = []
    for k in range(size):
        seen, survived = outcomes.seen(k), outcomes.survived(k)
        if not len(survived):
            break
        reached = seen & (outcomes.accepted >= k)
        positions.append(
            {
                "position": k + 1,
                "rounds": len(survived),
                "survived": float(survived.mean()),
                "draft_auc": auc(outcomes.confidence[reached, k], outcomes.accepted[reached] > k),
                "before": figures(before[seen, k], survived, bins),
                "after": figures(after[seen, k], survived, bins),
            }
        )
    return positions


def figures(probability: np.ndarray, survived: np.ndarray, bins: int = BINS) -> dict:
    return {
        "mean": float(probability.mean()),
        "ece": ece(probability, survived, bins),
        "ece_by_chance": chance_ece(probability, bins),
        "auc": auc(probability, survived),
        "brier": brier(probability, survived),
        "bins": [vars(b) for b in reliability(probability, survived, bins)],
    }


def doubts(outcomes: Outcomes, temperatures: Sequence[float]) -> list[str]:
    """What should be said about a fit on `outcomes`."""
    found = []
    for k, temperature in enumerate(temperatures):
        count = int(outcomes.seen(k).sum())
        if count < LEAST:
            found.append(f"draft {k + 1}: seen in {count} rounds, at least {LEAST} are needed; use more prompts")
        elif not GRID[0] < temperature < GRID[-1]:
            found.append(
                f"draft {k + 1}: the best temperature lies beyond {temperature:g}: its confidence is wrong in a way"
                " that no temperature mends, such as too high on average"
            )
    return found
