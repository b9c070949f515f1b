"""The mathematics of calibration against plain loops, and against synthetic rounds whose true scaling is known."""

import math

import numpy as np
import pytest

from dspark.runtime.throughput import calibrated
from dspark.tools.calibration import (
    GRID,
    LEAST,
    Outcomes,
    Scaling,
    assess,
    auc,
    brier,
    chance_ece,
    doubts,
    ece,
    fit,
    likeliest,
    reliability,
    survival,
)

TRUE = Scaling((1.8, 0.6, 1.3, 2.5), (-0.9, -0.4, 0.0, 0.5))  # of the synthetic drafter


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


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def scaled(c, temperature, shift):
    return sigmoid(math.log(c / (1 - c)) / temperature + shift)


def test_survival_is_the_product_of_scaled_confidences():
    confidence = np.random.default_rng(0).random((50, 4))
    found = survival(Outcomes(confidence, np.full(50, 4), np.zeros(50, int)), TRUE)
    for row, chances in zip(confidence.tolist(), found.tolist(), strict=True):
        product = 1.0
        for k, c in enumerate(row):
            product *= scaled(c, TRUE.temperatures[k], TRUE.shifts[k])
            assert chances[k] == pytest.approx(product, abs=1e-12)


def log_likelihood(confidence, accepted, temperature, shift):
    yes, no, total = sum(accepted), len(accepted) - sum(accepted), 0.0
    for c, kept in zip(confidence, accepted, strict=True):
        p, outcome = scaled(c, temperature, shift), (yes + 1) / (yes + 2) if kept else 1 / (no + 2)
        total += outcome * math.log(p) + (1 - outcome) * math.log(1 - p)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_nothing_near_is_likelier(seed):
    """And nothing far: the likelihood is concave in 1 / T and b."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(0.02, 0.98, 300)
    accepted = random.random(300) < calibrated(confidence[:, None], [random.uniform(0.5, 2)], [random.normal()])[:, 0]
    data = confidence.tolist(), accepted.tolist()
    temperature, shift = likeliest(confidence, accepted)
    best = log_likelihood(*data, temperature, shift)
    step = GRID[1] / GRID[0]
    near = [(step, 0), (1 / step, 0), (1, 1e-3), (1, -1e-3), (step, 0.05), (1 / step, -0.05)]
    for other, by in [*near, (3, 1), (0.3, -1)]:
        assert log_likelihood(*data, temperature * other, shift + by) < best
    mean = sum(scaled(c, temperature, shift) for c in data[0]) / 300
    assert mean == pytest.approx(accepted.mean(), abs=0.005)


@pytest.mark.parametrize("kept", [True, False])
def test_a_draft_that_always_has_one_fate_is_not_sure_of_it(kept):
    temperature, shift = likeliest(np.linspace(0.1, 0.9, 200), np.full(200, kept))
    p = calibrated(np.array([[0.5]]), [temperature], [shift])[0, 0]
    assert p == pytest.approx(201 / 202 if kept else 1 / 202, abs=1e-3)


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
    """Drafts that are accepted with known chances, and confidences that TRUE turns into these."""
    random = np.random.default_rng(seed)
    size = len(TRUE.shifts)
    skill = random.normal(1.0, 1.2, (rounds, 1))
    scores = skill + random.normal(0, 1, (rounds, size))
    confidence = 1 / (1 + np.exp(-(scores - TRUE.shifts) * TRUE.temperatures))
    chances = 1 / (1 + np.exp(-scores))
    accepted = np.logical_and.accumulate(random.random(chances.shape) < chances, axis=1).sum(axis=1)
    known = random.integers(0, size + 1, rounds) if cut else np.full(rounds, size)
    return Outcomes(confidence, known, np.minimum(accepted, known))


@pytest.fixture(scope="module")
def found():
    return fit(synthetic(0))


def test_the_fit_finds_the_truth(found):
    assert found.temperatures == pytest.approx(TRUE.temperatures, rel=0.1)
    assert found.shifts == pytest.approx(TRUE.shifts, abs=0.1)
    positions = assess(synthetic(1), found)
    for p in positions:
        before, after = p["before"], p["after"]
        assert before["ece"] > 0.05 > 0.012 > after["ece"] and after["ece_by_chance"] < 0.01
        assert after["brier"] < before["brier"] and after["mean"] == pytest.approx(p["survived"], abs=0.012)
        assert after["auc"] > before["auc"] - 0.001


def test_a_scaling_keeps_the_order_at_its_position(found):
    outcomes = synthetic(2)
    after = calibrated(outcomes.confidence, found.temperatures, found.shifts)
    for k in range(len(TRUE.shifts)):
        order = np.argsort(outcomes.confidence[:, k], kind="stable")
        assert (np.diff(after[order, k]) >= 0).all()
    first = assess(outcomes, found)[0]
    assert first["before"]["auc"] == first["after"]["auc"] == first["draft_auc"]


def test_confidences_that_mislead_keep_their_order():
    """The surer, the less is accepted: the best that a temperature above 0 can do is to believe none of it."""
    random = np.random.default_rng(0)
    confidence = random.random((2000, 1))
    outcomes = Outcomes(confidence, np.ones(2000, int), (random.random(2000) > confidence[:, 0]).astype(int))
    scaling = fit(outcomes)
    assert scaling.temperatures == (GRID[-1],)
    assert "beyond 10: its confidence hardly tells" in doubts(outcomes, scaling)[0]


def test_drafts_without_an_outcome_are_left_out(found):
    """Rounds that were cut at random say the same as whole ones. Taken for rejections, they would not."""
    cut = synthetic(3, rounds=40_000, cut=True)
    again = fit(cut)
    assert again.temperatures == pytest.approx(found.temperatures, rel=0.2)
    assert again.shifts == pytest.approx(found.shifts, abs=0.2)
    for p, whole in zip(assess(cut, found), assess(synthetic(4), found), strict=True):
        assert p["rounds"] == (cut.known >= p["position"]).sum()
        assert p["survived"] == pytest.approx(whole["survived"], abs=0.03) and p["after"]["ece"] < 0.03
    wrong = Outcomes(cut.confidence, np.full(len(cut), len(TRUE.shifts)), cut.accepted)
    assert assess(wrong, found)[2]["after"]["ece"] > 0.1


def test_a_position_is_fitted_on_rounds_that_reach_it(found):
    """What stands behind a rejected draft says nothing, whatever its confidence."""
    outcomes = synthetic(0)
    behind = np.arange(len(TRUE.shifts)) > outcomes.accepted[:, None]
    other = Outcomes(np.where(behind, 0.999, outcomes.confidence), outcomes.known, outcomes.accepted)
    assert fit(other) == found


def test_a_position_that_was_hardly_reached():
    outcomes = synthetic(5, rounds=3000)
    kept = np.flatnonzero(outcomes.accepted >= 2)
    known = np.full(3000, 2)
    known[kept[: LEAST - 1]] = 4
    few = Outcomes(outcomes.confidence, known, np.minimum(outcomes.accepted, known))
    scaling = fit(few)
    assert scaling.temperatures[3] == scaling.temperatures[2] == scaling.temperatures[1] != 1
    assert scaling.shifts[3] == scaling.shifts[2] == scaling.shifts[1] != 0
    assert [line.split(":")[0] for line in doubts(few, scaling)] == ["draft 3", "draft 4"]
    assert f"{LEAST - 1} rounds" in doubts(few, scaling)[0]
    never = Outcomes(outcomes.confidence, np.minimum(outcomes.known, 1), np.minimum(outcomes.accepted, 1))
    assert len(assess(never, scaling)) == 1
    nothing = Outcomes(np.zeros((0, 2)), np.zeros(0, int), np.zeros(0, int))
    assert fit(nothing) == Scaling((1.0, 1.0), (0.0, 0.0))


def test_confidences_that_are_too_high():
    """Always 0.7, accepted 3 times in 10: no temperature alone brings it below 0.5."""
    accepted = (np.arange(1000) % 10 < 3).astype(int)
    outcomes = Outcomes(np.full((1000, 1), 0.7), np.ones(1000, int), accepted)
    scaling = fit(outcomes)
    assert survival(outcomes, scaling) == pytest.approx(np.full((1000, 1), 0.3), abs=1e-3)


def test_no_number_counts_as_0():
    confidence = np.full((1000, 1), np.nan)
    outcomes = Outcomes(confidence, np.ones(1000, int), np.zeros(1000, int))
    scaling = fit(outcomes)
    assert scaling == Scaling((1.0,), (0.0,))
    (position,) = assess(outcomes, scaling)
    assert position["before"]["mean"] == position["after"]["mean"] == position["after"]["ece"] == 0
    assert position["draft_auc"] is None
