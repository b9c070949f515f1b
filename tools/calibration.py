"""Confidences that agree with how often drafts are accepted: a temperature and a shift for each draft position.

The confidence c_k estimates the chance that draft k is accepted if all before it are, so the product of c_1..c_k
estimates the chance that the prefix of k drafts survives. sigmoid(logit(c_k) / T_k + b_k) takes the place of c_k, with
the T_k > 0 and b_k under which what became of the drafts is likeliest (Platt, 1999). The likelihood of a round is the
product of what each draft that was reached adds to it, so the positions do not depend on each other.

How well probabilities agree is their expected calibration error (ECE) over BINS bins of equal mass, each of the same
number of rounds by ascending probability: the mean over all rounds of |mean probability - share of survivals| of their
bin. All arrays are float64.
"""

from dataclasses import dataclass

import numpy as np

from dspark.runtime.throughput import calibrated, survival_of

BINS = 15
GRID = np.geomspace(0.1, 10, 101)  # temperatures that are tried; 1 is among them
LIMIT = 30.0  # of a shift
LEAST = 100  # rounds that reach a position, with fewer of which it gets the scaling of the one before


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

    def reached(self, position: int) -> np.ndarray:
        """Bool [N]: rounds that saw draft `position` and accepted all before it, where its confidence is a number."""
        return self.seen(position) & (self.accepted >= position) & ~np.isnan(self.confidence[:, position])


@dataclass(frozen=True)
class Scaling:
    """What `calibrated` takes: a temperature and a shift for each of G positions."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]


def fit(outcomes: Outcomes) -> Scaling:
    """The likeliest scaling of every position."""
    found = [(1.0, 0.0)]
    for k in range(outcomes.confidence.shape[1]):
        reached = outcomes.reached(k)
        few = reached.sum() < LEAST
        found.append(found[-1] if few else likeliest(outcomes.confidence[reached, k], outcomes.accepted[reached] > k))
    return Scaling(*zip(*found[1:], strict=True))


def likeliest(confidence: np.ndarray, accepted: np.ndarray) -> tuple[float, float]:
    """(temperature of GRID, shift) under which it is likeliest that drafts of confidence [n] were accepted, bool [n].

    The likeliest shift at a temperature makes the mean of the calibrated confidences the share of acceptances. Outcomes
    count as almost sure, as in Platt's paper: without that a position that accepted everything would be worth 1.
    """
    yes, no = np.count_nonzero(accepted), np.count_nonzero(~accepted)
    outcome = np.where(accepted, (yes + 1) / (yes + 2), 1 / (no + 2))
    tried = np.broadcast_to(confidence[:, None], (len(confidence), len(GRID)))
    low, high = np.full(len(GRID), -LIMIT), np.full(len(GRID), LIMIT)
    for _ in range(25):
        shifts = (low + high) / 2
        over = calibrated(tried, GRID, shifts).mean(axis=0) > outcome.mean()
        low, high = np.where(over, low, shifts), np.where(over, shifts, high)
    p = np.clip(calibrated(tried, GRID, shifts), 1e-12, 1 - 1e-12)
    best = int((outcome @ np.log(p) + (1 - outcome) @ np.log(1 - p)).argmax())
    return float(GRID[best]), float(shifts[best])


def survival(outcomes: Outcomes, scaling: Scaling) -> np.ndarray:
    """[N, G]: the estimated chance that a draft and all before it are accepted."""
    return survival_of(calibrated(outcomes.confidence, scaling.temperatures, scaling.shifts))


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


def assess(outcomes: Outcomes, scaling: Scaling, bins: int = BINS) -> list[dict]:
    """Per position, of the prefix's survival: count, observed share, and {"before", "after"} with what `figures` says.

    `draft_auc` is of c_k alone, among the rounds that kept all before draft k; a scaling cannot change it.
    """
    size = outcomes.confidence.shape[1]
    before, after = survival_of(outcomes.confidence), survival(outcomes, scaling)
    positions = []
    for k in range(size):
        seen, survived = outcomes.seen(k), outcomes.survived(k)
        if not len(survived):
            break
        reached = outcomes.reached(k)
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


def doubts(outcomes: Outcomes, scaling: Scaling) -> list[str]:
    """What should be said about a fit on `outcomes`."""
    found = []
    for k, temperature in enumerate(scaling.temperatures):
        count = int(outcomes.reached(k).sum())
        if count < LEAST:
            found.append(f"draft {k + 1}: reached in {count} rounds, at least {LEAST} are needed; use more prompts")
        elif not GRID[0] < temperature < GRID[-1]:
            fault = "hardly differs between" if temperature < 1 else "hardly tells"
            found.append(
                f"draft {k + 1}: the best temperature lies beyond {temperature:g}: its confidence {fault} drafts that"
                " are accepted and others"
            )
    return found
