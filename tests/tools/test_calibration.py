"""The mathematics of calibration against plain loops, and against synthetic rounds whose temperatures are known."""

import numpy as np
import pytest

from dspark.runtime.throughput import calibrated
from dspark.tools.calibration import (
    GRID,
    LEAST,
    Outcomes,
    assess,
    auc,
    brier,
    chance_ece,
    doubts,
    ece,
    fit,
    reliability,
)

TRUE = (1.8, 0.6, 1.3, 2.5)  # temperatures of the synthetic drafter


def sample(seed: int, ties: bool):
    random = np.random.default_rng(seed)
    p = random.random(200)
    if ties:
        p = np.round(p, 1)  # on the edges of bins too, 0 and 1 among them
    return p, random.random(200) < p**2


def ece_by_loops(p, survived, bins):
    order, total, at = sorted(range(len(p)), key=lambda i: (p[i], i)), 0.0, 0
    for b in range(bins):
        inside = order[at : at + len(p) // bins + (b < len(p) % bins)]
        at += len(inside)
        if inside:
            mean = sum(p[i] for i in inside) / len(inside)
            share = sum(bool(survived[i]) for i in inside) / len(inside)
            total += len(inside) / len(p) * abs(mean - share)
    assert at == len(p)
    return total


def auc_by_pairs(p, survived):
    wins = [
        1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0
        for i in np.flatnonzero(survived)
        for j in np.flatnonzero(~survived)
    ]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("bins", [1, 10, 15, 300])
def test_ece(ties, bins):
    p, survived = sample(bins, ties)
    assert ece(p, survived, bins) == pytest.approx(ece_by_loops(p, survived, bins), abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_auc(ties):
    p, survived = sample(1, ties)
    assert auc(p, survived) == pytest.approx(auc_by_pairs(p, survived), abs=1e-12)


def test_auc_of_one_class():
    assert auc(np.array([0.1, 0.2]), np.array([True, True])) is None
    assert auc(np.array([0.1, 0.2]), np.array([False, False])) is None
    assert auc(np.array([0.1, 0.2]), np.array([False, True])) == 1


def test_brier():
    assert brier(np.array([0.5, 1.0, 0.25]), np.array([True, True, False])) == pytest.approx((0.25 + 0.0625) / 3)


def test_reliability_is_what_the_error_sums():
    p, survived = sample(2, True)
    bins = reliability(p, survived, 10)
    assert [b.count for b in bins] == [20] * 10
    assert all(b.low - 1e-9 <= b.probability <= b.high + 1e-9 for b in bins)
    assert all(a.high <= b.low for a, b in zip(bins, bins[1:], strict=False))
    total = sum(b.count * abs(b.probability - b.observed) for b in bins) / len(p)
    assert total == pytest.approx(ece(p, survived, 10), abs=1e-12)


def test_what_chance_alone_makes_of_the_error():
    p = np.full(400, 0.5)  # the mean of |share - 1/2| over 400 coins, and over 100 coins in each of four bins
    for bins, coins in ((1, 400), (4, 100)):
        assert chance_ece(p, bins, draws=3000) == pytest.approx(np.sqrt(2 / np.pi) * 0.5 / np.sqrt(coins), rel=0.06)


def test_flat_probabilities_are_no_good_ones():
    """One chance for all agrees on average, and yet the likely and the unlikely ones are found out by their order."""
    random = np.random.default_rng(0)
    true = random.random(5000)
    survived = random.random(5000) < true
    assert ece(0.5 + 1e-6 * (true - 0.5), survived) > 0.2 > 0.02 > ece(true, survived)


def synthetic(seed: int, rounds: int = 20_000, cut: bool = False) -> Outcomes:
    """Drafts that are accepted with known chances, and confidences that tell these sharpened by 1 / TRUE."""
    random = np.random.default_rng(seed)
    skill = random.normal(1.0, 1.2, (rounds, 1))
    chances = 1 / (1 + np.exp(-(skill + random.normal(0, 1, (rounds, len(TRUE))))))
    confidence = calibrated(chances, 1 / np.array(TRUE))
    accepted = np.logical_and.accumulate(random.random(chances.shape) < chances, axis=1).sum(axis=1)
    known = random.integers(0, len(TRUE) + 1, rounds) if cut else np.full(rounds, len(TRUE))
    return Outcomes(confidence, known, np.minimum(accepted, known))


@pytest.fixture(scope="module")
def found():
    return fit(synthetic(0))


def test_the_fit_finds_the_temperatures(found):
    assert found == pytest.approx(TRUE, rel=0.12)
    before = [p["before"]["ece"] for p in assess(synthetic(1), found)]
    after = [p["after"] for p in assess(synthetic(1), found)]
    assert max(before) > 0.05 and all(a["ece"] < 0.012 for a in after)
    assert all(a["ece_by_chance"] < 0.01 for a in after)


def test_a_temperature_keeps_the_order_at_its_position(found):
    outcomes = synthetic(2)
    for k in range(len(TRUE)):
        c = outcomes.confidence[:, k]
        order = np.argsort(c, kind="stable")
        assert (np.diff(calibrated(outcomes.confidence, found)[order, k]) >= 0).all()
    first = assess(outcomes, found)[0]
    assert first["before"]["auc"] == first["after"]["auc"] == first["draft_auc"]


def test_drafts_without_an_outcome_are_left_out(found):
    """Rounds that were cut at random say the same as whole ones. Taken for rejections, they would not."""
    cut = synthetic(3, rounds=40_000, cut=True)
    assert fit(cut)[:3] == pytest.approx(found[:3], rel=0.2)  # few rounds know the fourth
    for p, whole in zip(assess(cut, found), assess(synthetic(4), found), strict=True):
        assert p["rounds"] == (cut.known >= p["position"]).sum()
        assert p["survived"] == pytest.approx(whole["survived"], abs=0.03) and p["after"]["ece"] < 0.03
    wrong = Outcomes(cut.confidence, np.full(len(cut), len(TRUE)), cut.accepted)
    assert assess(wrong, found)[2]["after"]["ece"] > 0.1


def test_a_position_that_was_hardly_seen():
    outcomes = synthetic(5, rounds=3000)
    known = np.where(np.arange(3000) < LEAST - 1, 4, 2)
    few = Outcomes(outcomes.confidence, known, np.minimum(outcomes.accepted, known))
    temperatures = fit(few)
    assert temperatures[3] == temperatures[2] == temperatures[1] != 1
    assert [line.split(":")[0] for line in doubts(few, temperatures)] == ["draft 3", "draft 4"]
    assert f"{LEAST - 1} rounds" in doubts(few, temperatures)[0]
    never = Outcomes(outcomes.confidence, np.minimum(outcomes.known, 1), np.minimum(outcomes.accepted, 1))
    assert len(assess(never, temperatures)) == 1


def test_confidences_that_no_temperature_mends():
    """Always 0.7, accepted 3 times in 10: flatter than flat is still 0.5."""
    accepted = (np.arange(1000) % 10 < 3).astype(int)
    outcomes = Outcomes(np.full((1000, 1), 0.7), np.ones(1000, int), accepted)
    (temperature,) = fit(outcomes)
    assert temperature == GRID[-1]
    assert "beyond 10" in doubts(outcomes, [temperature])[0]


def test_no_number_counts_as_0():
    confidence = np.full((1000, 1), np.nan)
    outcomes = Outcomes(confidence, np.ones(1000, int), np.zeros(1000, int))
    (position,) = assess(outcomes, fit(outcomes))
    assert position["before"]["mean"] == position["after"]["mean"] == position["after"]["ece"] == 0
