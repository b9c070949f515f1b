"""The hardware-aware prefix scheduler against its definition: algorithm 1 by hand, and every choice of lengths."""

import heapq
import itertools
import math

import numpy as np
import pytest
from fakes import Language, fake_decoder, right_for

from dspark.errors import UsageError
from dspark.manifest import Calibration
from dspark.runtime.schedule import SCHEDULERS, make_scheduler
from dspark.runtime.throughput import (
    SpsTable,
    Throughput,
    ThroughputAsync,
    ThroughputGlobal,
    calibrated,
    ranked,
    survival_of,
)

EVERY = [Throughput, ThroughputAsync, ThroughputGlobal]
CASES = 1000


# -- by the definition ------------------------------------------------------------------------------------------------
def survivals(confidence, drafted) -> list[list[float]]:
    """a[r][j] of the candidates, in plain Python."""
    rows = []
    for row, count in zip(confidence.tolist(), drafted.tolist(), strict=True):
        product, found = 1.0, []
        for c in row[:count]:
            product *= 0.0 if math.isnan(c) else min(c, 1.0)
            found.append(product)
        rows.append(found)
    return rows


def in_order(rows: list[list[float]]):
    """Requests by descending survival; each offers its next draft only when the one before it was taken."""
    offers = [(-row[0], 0, r) for r, row in enumerate(rows) if row]
    heapq.heapify(offers)
    while offers:
        a, j, r = heapq.heappop(offers)
        yield r, -a
        if j + 1 < len(rows[r]):
            heapq.heappush(offers, (-rows[r][j + 1], j + 1, r))


def algorithm_1(rows: list[list[float]], sps) -> list[int]:
    """As the paper writes it. sps(B): None where there is no speed."""
    lengths, size, tau = [0] * len(rows), len(rows), float(len(rows))
    best = tau * sps(size)
    for r, a in in_order(rows):
        size, tau = size + 1, tau + a
        if sps(size) is None or tau * sps(size) <= best:
            return lengths
        best = tau * sps(size)
        lengths[r] += 1
    return lengths


def best_by_size(rows: list[list[float]], sps) -> list[float]:
    """The most theta of all choices of lengths, by how many drafts they verify, as far as there are speeds."""
    found: dict[int, float] = {}
    for lengths in itertools.product(*(range(len(row) + 1) for row in rows)):
        tau = len(rows) + math.fsum(a for row, n in zip(rows, lengths, strict=True) for a in row[:n])
        speed = sps(len(rows) + sum(lengths))
        if speed is not None:
            found[sum(lengths)] = max(found.get(sum(lengths), 0), tau * speed)
    return [found[n] for n in range(len(found))]


def theta_of(rows, lengths, sps) -> float:
    tau = len(rows) + math.fsum(a for row, n in zip(rows, lengths, strict=True) for a in row[:n])
    return tau * sps(len(rows) + sum(lengths))


def speed_of(table: SpsTable):
    points = list(zip(table.tokens, table.steps_per_second, strict=True))
    return lambda size: next((speed for measured, speed in points if measured >= size), None)


def random_table(rng, most: int, first: int) -> SpsTable:
    """Speeds that fall, in steps, at some of the sizes up to `most`; measured up to `first` at least."""
    sizes = np.flatnonzero(rng.random(most) < 0.6) + 1
    sizes = np.unique([*sizes, first])
    drops = np.where(rng.random(len(sizes)) < 0.4, rng.uniform(0.4, 1, len(sizes)), rng.uniform(0.9, 1, len(sizes)))
    return SpsTable(tuple(sizes.tolist()), tuple(np.cumprod(drops).tolist()))


def random_case(rng):
    """Confidences [R, G], caps [R] and a table: every second case is full of ties, some have NaN."""
    requests, size = rng.integers(1, 4, 2)
    confidence = rng.random((requests, size)) ** 0.3
    if rng.random() < 0.5:
        confidence = rng.choice([0, 0.5, 0.5, 1, 1], (requests, size))
    confidence = confidence.astype(np.float32)
    confidence[rng.random(confidence.shape) < 0.03] = np.nan
    drafted = np.where(rng.random(requests) < 0.7, size, rng.integers(0, size + 1, requests))
    return confidence, drafted, random_table(rng, requests * (size + 1), requests)


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(6)
    return [random_case(rng) for _ in range(CASES)]


def test_algorithm_1_against_every_choice(cases):
    """A prefix of each request; the best of its size; stopped by the first that is no better; and the best of all
    wherever nothing better hides behind a worse one."""
    unimodal = stopped = 0
    for confidence, drafted, table in cases:
        rows, sps = survivals(confidence, drafted), speed_of(table)
        lengths = Throughput(table).lengths(confidence, drafted)
        assert lengths.dtype.kind == "i" and lengths.shape == drafted.shape
        assert (lengths >= 0).all() and (lengths <= drafted).all()
        assert lengths.tolist() == algorithm_1(rows, sps)
        best, n, theta = best_by_size(rows, sps), int(lengths.sum()), theta_of(rows, lengths, sps)
        assert theta == pytest.approx(best[n], rel=1e-12)
        assert all(a < b for a, b in zip(best[: n + 1], best[1 : n + 1], strict=False))
        assert n + 1 == len(best) or best[n + 1] <= best[n] * (1 + 1e-12)
        stopped += n + 1 < len(best)
        if max(best) <= theta * (1 + 1e-12):
            unimodal += 1
    assert CASES / 2 < unimodal < CASES and CASES / 4 < stopped < CASES, "cases of every kind"


def test_global_search_against_every_choice(cases):
    for confidence, drafted, table in cases:
        rows, sps = survivals(confidence, drafted), speed_of(table)
        lengths = ThroughputGlobal(table).lengths(confidence, drafted)
        assert theta_of(rows, lengths, sps) == pytest.approx(max(best_by_size(rows, sps)), rel=1e-12)


def test_async_against_every_choice(cases):
    """The budget is the best size by what was seen two steps before; the present says which drafts have it."""
    rng = np.random.default_rng(1)
    for confidence, drafted, table in cases[:300]:
        scheduler, sps, seen = ThroughputAsync(table), speed_of(table), []
        ids = rng.permutation(100)[: len(drafted)]
        for step in range(5):
            now = np.roll(confidence, step, axis=1)
            lengths = scheduler.lengths(now, drafted, ids)
            before = seen[step - 2] if step >= 2 else np.ones(now.shape, np.float32)
            budget = int(np.argmax(np.round(best_by_size(survivals(before, drafted), sps), 12)))
            taken = [r for r, _ in itertools.islice(in_order(survivals(now, drafted)), budget)]
            assert lengths.tolist() == np.bincount(taken, minlength=len(drafted)).tolist()
            seen.append(now)


@pytest.mark.parametrize("kind", [Throughput, ThroughputAsync])
def test_no_draft_is_judged_by_itself(cases, kind):
    """Confidences after a draft depend on its token: whatever they are, they do not decide whether it is verified."""
    rng = np.random.default_rng(2)
    for confidence, drafted, table in cases:
        lengths = run(kind, table, confidence, drafted)
        for r, k in np.ndindex(confidence.shape):
            other = confidence.copy()
            other[r, k + 1 :] = rng.choice([0, 0.5, 0.7, 1, np.nan], other[r, k + 1 :].shape)
            assert (run(kind, table, other, drafted)[r] > k) == (lengths[r] > k)


def test_the_global_search_judges_drafts_by_themselves():
    table = SpsTable((1, 2, 3), (1.0, 0.5, 0.45))
    lengths = [run(ThroughputGlobal, table, np.array([[0.8, c]]), np.array([2])).tolist() for c in (0.9, 0)]
    assert lengths == [[2], [0]]


def run(kind, table, confidence, drafted):
    """The lengths of a step; `async` has seen two steps that were otherwise."""
    scheduler, ids = kind(table), np.arange(len(drafted))
    if kind is ThroughputAsync:
        for before in (np.full(confidence.shape, 0.75), np.full(confidence.shape, 0.1)):
            scheduler.lengths(before, drafted, ids)
    return scheduler.lengths(confidence, drafted, ids)


# -- ties, bad values, requests that come and go ----------------------------------------------------------------------
def test_ties_go_by_position_then_request():
    ones = np.ones((3, 2))
    order, values = ranked(survival_of(ones), np.array([2, 2, 2]))
    assert order.tolist() == [0, 1, 2, 0, 1, 2] and values.tolist() == [1] * 6
    for room, lengths in enumerate([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]):
        for kind in EVERY:
            assert run(kind, SpsTable((3 + room,), (1.0,)), ones, np.array([2, 2, 2])).tolist() == lengths


@pytest.mark.parametrize("kind", EVERY)
def test_what_is_no_chance_counts_as_none(kind):
    flat = SpsTable((64,), (1.0,))
    rows = np.array([[0.5, np.nan, 0.9], [np.nan, 1, 1], [0.9, 0.9, 0.9], [0.5, 0.5, 0.5]], np.float32)
    assert np.isfinite(survival_of(rows)).all()
    found = kind(flat).lengths(rows, np.array([3, 3, 2, 0]), np.arange(4))
    if kind is ThroughputAsync:  # which has seen nothing yet, so that there is room for all
        assert found.tolist() == [3, 3, 2, 0]
        kind = lambda table: scheduler  # noqa: E731
        scheduler = ThroughputAsync(flat)
        for _ in range(2):
            scheduler.lengths(rows, np.array([3, 3, 2, 0]), np.arange(4))
        found = scheduler.lengths(rows, np.array([3, 3, 2, 0]), np.arange(4))
    assert found.tolist() == [1, 0, 2, 0]


def test_async_knows_its_requests_again():
    """Two steps later, in another order and company, and whoever is new counts as sure."""
    table = SpsTable((2, 3, 4, 5, 6), (1.0, 0.8, 0.62, 0.5, 0.42))
    budgets = []
    scheduler, sure, unsure = ThroughputAsync(table), [1.0, 1.0], [0.1, 0.1]
    for ids, rows in [
        ((7, 4), (unsure, unsure)),
        ((4, 7), (unsure, unsure)),
        ((4, 7), (sure, sure)),  # seen: unsure
        ((9, 4), (sure, sure)),  # 9 is new
        ((4, 9), (unsure, unsure)),  # 4 was sure, 9 is new to that step
        ((9, 4), (unsure, unsure)),
    ]:
        budgets.append(int(scheduler.lengths(np.array(rows), np.array([2, 2]), np.array(ids)).sum()))
    sure_theta, one_new = [2, 3 * 0.8, 4 * 0.62, 5 * 0.5, 6 * 0.42], [2, 3 * 0.8, 4 * 0.62, 4.1 * 0.5, 4.11 * 0.42]
    full, half = int(np.argmax(sure_theta)), int(np.argmax(one_new))
    assert budgets == [full, full, 0, half, full, full] and full != half
    with pytest.raises(ValueError, match="tell them apart"):
        scheduler.lengths(np.ones((2, 2)), np.array([2, 2]))


def test_async_has_no_confidences_of_requests_without_drafts():
    scheduler, table = ThroughputAsync(SpsTable((1, 2), (1.0, 0.6))), np.full((1, 1), 0.1)
    for drafted, length in [(0, 0), (1, 1), (1, 1), (1, 0)]:
        assert scheduler.lengths(table, np.array([drafted])).tolist() == [length]


# -- under load -------------------------------------------------------------------------------------------------------
LOADS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)


def mean_lengths(kind, width: int) -> list[float]:
    """By LOADS, 7 drafts each. Steps of up to 64 tokens take the same time, then it grows, every `width` tokens."""
    rng, sizes, means = np.random.default_rng(3), np.arange(width, 4097, width), []
    table = SpsTable(tuple(sizes.tolist()), tuple((1 / (1 + np.maximum(sizes - 64, 0) / 96)).tolist()))
    for count in LOADS:
        confidence, drafted, scheduler = rng.beta(6, 1.2, (count, 7)), np.full(count, 7), kind(table)
        for _ in range(3):
            lengths = scheduler.lengths(confidence, drafted, np.arange(count))
        means.append(lengths.mean())
    return means


@pytest.mark.parametrize(
    ("kind", "width"), [(Throughput, 1), (ThroughputAsync, 1), (ThroughputAsync, 8), (ThroughputAsync, 64)]
)
def test_lengths_shrink_under_load(kind, width):
    """The paper's figure 8: most of the block while the engine has room, no draft when requests fill it."""
    means = mean_lengths(kind, width)
    assert means[0] > 4 and 1 < means[LOADS.index(32)] < 4 and means[-1] < 0.1
    assert means == sorted(means, reverse=True)


def test_wide_steps_are_a_trap_for_early_stopping():
    """At the edge of a step the next draft costs all of it, so that algorithm 1 gives up what the others find."""
    early, later = mean_lengths(Throughput, 8), mean_lengths(ThroughputAsync, 8)
    assert early[LOADS.index(64)] == 0 and later[LOADS.index(64)] > 1


# -- the table --------------------------------------------------------------------------------------------------------
TABLE = SpsTable((2, 4, 8), (10.0, 9.0, 4.0))


def test_between_two_sizes_a_step_is_as_slow_as_the_larger():
    assert TABLE.speeds(1, 8).tolist() == [10, 10, 9, 9, 4, 4, 4, 4]
    assert TABLE.speeds(3, 100).tolist() == [9, 9, 4, 4, 4, 4] and TABLE.speeds(8, 8).tolist() == [4]
    with pytest.raises(UsageError, match="9 requests in a step, it was measured up to 8 .*`dspark profile`"):
        TABLE.speeds(9, 9)


@pytest.mark.parametrize("kind", EVERY)
def test_no_step_is_larger_than_what_was_measured(kind):
    rows = np.ones((5, 7))
    assert kind(TABLE).lengths(rows, np.full(5, 7), np.arange(5)).sum() == 3
    assert kind(TABLE).lengths(np.ones((8, 7)), np.full(8, 7), np.arange(8)).sum() == 0
    with pytest.raises(UsageError, match="9 requests"):
        kind(TABLE).lengths(np.ones((9, 7)), np.full(9, 7), np.arange(9))


@pytest.mark.parametrize(
    ("sizes", "speeds", "word"),
    [
        ((), (), "0 sizes"),
        ((1, 2), (1.0,), "2 sizes with 1 speeds"),
        ((0,), (1.0,), "whole numbers"),
        ((True,), (1.0,), "whole numbers"),
        ((2**40,), (1.0,), "whole numbers"),
        ((2, 2), (1.0, 1.0), "ascend"),
        ((1,), (0,), "finite and above 0"),
        ((1,), (math.nan,), "finite and above 0"),
        ((1,), (math.inf,), "finite and above 0"),
        ((1,), ("1",), "finite and above 0"),
    ],
)
def test_a_table_that_was_not_measured(sizes, speeds, word):
    with pytest.raises(UsageError, match=f"{word}.*run `dspark profile BUNDLE`") as error:
        SpsTable(sizes, speeds)
    assert "\n" not in str(error.value)


# -- whether to draft at all ------------------------------------------------------------------------------------------
def pays(table: SpsTable, survival: list[list[float]], anchors: int, beside: int, search: type = Throughput) -> bool:
    """Plainly: the likeliest drafts that the search admits give more tokens per second, with the draft's time in it,
    than a step without drafts, by a tenth."""
    ranked = sorted((a for row in survival for a in row), reverse=True)
    speed = {size: s for size, s in zip(table.tokens, table.steps_per_second, strict=True)}
    rates, reading = [], 1 / speed[anchors + beside] - 1 / speed[anchors]
    for count in range(len(ranked) + 1):
        size = anchors + beside + count
        if size in speed:
            seconds = 1 / speed[size] - reading + table.draft_seconds[len(survival) - 1]
            rates.append((anchors + sum(ranked[:count])) / seconds)
    best = 0
    while best + 1 < len(rates) and rates[best + 1] > rates[best]:
        best += 1
    return (max(rates) if search is ThroughputGlobal else rates[best]) > 1.1 * anchors * speed[anchors]


def test_a_draft_has_to_pay_for_its_time():
    rng, said = np.random.default_rng(5), []
    for _ in range(400):
        asking, plain, beside = int(rng.integers(1, 4)), int(rng.integers(3)), int(rng.integers(0, 6))
        sizes = range(1, 20)
        table = SpsTable(
            tuple(sizes),
            tuple((1 / (0.02 + np.cumsum(rng.uniform(0, 0.004, len(sizes))))).tolist()),
            tuple(rng.uniform(0.001, 0.03, 3).tolist()),
        )
        kind = (Throughput, ThroughputGlobal)[int(rng.integers(2))]
        scheduler, confidence = kind(table), rng.random((asking + plain, 3))
        numbers, drafted = rng.permutation(50)[: asking + plain], np.array([3] * asking + [0] * plain)
        assert scheduler.drafts(numbers[:asking], asking + plain, beside), "nothing was seen yet"
        scheduler.lengths(confidence, drafted, numbers)
        seen = np.cumprod(confidence[:asking], axis=1).tolist()
        found = scheduler.drafts(numbers[:asking], asking + plain, beside)
        assert found == pays(table, seen, asking + plain, beside, kind)
        said.append(found)
    assert 0.1 < np.mean(said) < 0.9


def test_the_time_of_the_draft_is_in_theta():
    """What a step has paid for its draft is no reason to verify little of it."""
    speeds = tuple(1 / (1 + 0.3 * n) for n in range(8))
    free, dear = (SpsTable(tuple(range(1, 9)), speeds, seconds) for seconds in ((), (2.0,)))
    confidence, drafted = np.full((1, 7), 0.75), np.array([7])
    survival, found = np.cumprod(np.full(7, 0.75)), []
    for table, seconds in ((free, 0), (dear, 2)):
        plainly = int(np.argmax([(1 + survival[:n].sum()) / (1 + 0.3 * n + seconds) for n in range(8)]))
        for kind in (Throughput, ThroughputGlobal):
            assert kind(table).lengths(confidence, drafted).tolist() == [plainly]
        found.append(plainly)
    assert found[0] < found[1]


def test_requests_that_never_drafted_count_as_the_mean_of_the_others():
    table = SpsTable(tuple(range(1, 9)), tuple(1 / (1 + 0.1 * n) for n in range(8)), (0.2, 0.4))
    for survival in (0.05, 0.9):
        scheduler = Throughput(table)
        scheduler.lengths(np.array([[survival], [0.0]]), np.array([1, 0]), np.array([3, 8]))
        assert scheduler.drafts(np.array([9, 3]), 2) == pays(table, [[survival], [survival]], 2, 0)


def test_what_a_request_was_seen_to_do_stays_until_it_drafts_again():
    scheduler = Throughput(SpsTable((1, 2, 3), (1.0, 1.0, 1.0), (0.1,)))
    scheduler.lengths(np.array([[0.9], [0.2]]), np.array([1, 1]), np.array([7, 2]))
    scheduler.lengths(np.array([[0.5], [0.4], [0.3]]), np.array([0, 1, 0]), np.array([7, 2, 4]))
    requests, survival = scheduler._last
    assert requests.tolist() == [2, 7] and survival.tolist() == [[0.4], [0.9]]


def test_it_looks_again_after_some_steps_without_a_draft():
    scheduler = Throughput(SpsTable((1, 2), (1.0, 0.9), (0.5,)))
    scheduler.lengths(np.array([[0.1]]), np.array([1]))
    found = [scheduler.drafts() for _ in range(70)]
    assert [i for i, drafts in enumerate(found) if drafts] == [32, 65]


def test_prompts_in_the_same_step_are_no_reason_to_draft():
    """They are read in any case. What counts is what drafts add to a step that is as large as they make it; one that is
    larger than any that was measured has no drafts."""
    milliseconds = [10, 10, 11, 15, 16, 16.5, 17]  # of 2, 3, .. 8 tokens; 4 and 7 are not measured
    measured = {size: ms for size, ms in enumerate(milliseconds, 2) if size not in (4, 7)}
    milliseconds[2], milliseconds[5] = (10 + 15) / 2, (16 + 17) / 2
    table = SpsTable(tuple(measured), tuple(1e3 / ms for ms in measured.values()))
    rows, ids = np.array([[0.8, 0.6], [0.7, 0.5]]), np.arange(2)
    admitted = np.sort(np.cumprod(rows, axis=1), axis=None)[::-1]
    for beside in range(9):
        # Without prompts, a size between two measured ones is as slow as the larger one.
        known = milliseconds[beside : beside + 5] if beside else [10, 10, 15, 15, 16]
        rates = [(2 + admitted[:n].sum()) / (10 + ms - known[0]) for n, ms in enumerate(known)] or [0]
        stop = next((n for n in range(len(rates) - 1) if rates[n + 1] <= rates[n]), len(rates) - 1)
        assert Throughput(table).lengths(rows, np.full(2, 2), ids, beside).sum() == stop
        assert ThroughputGlobal(table).lengths(rows, np.full(2, 2), ids, beside).sum() == int(np.argmax(rates))


# -- calibration ------------------------------------------------------------------------------------------------------
def calibration(temperatures, shifts=()) -> Calibration:
    return Calibration(temperatures, rounds=900, prompts=10, temperature=0.0, shifts=shifts)


def test_calibration_scales_and_shifts_the_logit():
    c = np.array([[0.5, 0.9, 0.1], [0.2, 0.8, 0.999]], np.float32)
    temperatures, shifts = (2.0, 0.5, 1.0, 9.0), (-1.0, 0.3, 2.0, 9.0)  # of a longer block
    expected = [
        [
            1 / (1 + math.exp(-(math.log(x / (1 - x)) / t + b)))
            for x, t, b in zip(row, temperatures, shifts, strict=False)
        ]
        for row in c.astype(float).tolist()
    ]
    assert calibrated(c, temperatures, shifts) == pytest.approx(np.array(expected), abs=1e-12)
    assert (calibrated(c, temperatures, (0.0,) * 4) == calibrated(c, temperatures)).all()
    assert calibrated(c, (1.0, 1.0, 1.0)) == pytest.approx(c)


def test_calibration_at_the_ends():
    c = np.array([[0.0, 1.0, np.nan, 1e-30]], np.float32)
    with np.errstate(all="raise"):
        low, high, nan, small = calibrated(c, [4.0] * 4)[0]
    assert low == small == pytest.approx(1 / (1 + 1e7**0.25), rel=1e-6) and high == pytest.approx(1 - low)
    assert math.isnan(nan)
    rising = calibrated(np.linspace(0, 1, 1001)[:, None], [3.0], [-1.5])[:, 0]
    assert (np.diff(rising) > 0).all()


@pytest.mark.parametrize("kind", EVERY)
def test_the_schedule_is_by_calibrated_confidences(kind):
    """Overconfident: 0.9 that is worth 0.6, and the other way round."""
    table, rows, drafted = SpsTable((1, 2, 3), (1.0, 0.55, 0.4)), np.full((1, 2), 0.9), np.array([2])
    scale, shift = math.log(9) / math.log(1.5), math.log(1.5) - math.log(9)
    as_found = [
        (None, 2),
        (calibration((scale, scale)), 0),
        (calibration((1.0, scale)), 1),
        (calibration((1.0, 1.0), (shift, shift)), 0),
        (calibration((1.0, 1.0), (0.0, shift)), 1),
        (calibration((scale, scale), (-shift, -shift)), 2),
    ]
    for found, length in as_found:
        scheduler = kind(table, found)
        for _ in range(3):
            lengths = scheduler.lengths(rows, drafted)
        assert lengths.tolist() == [length]


# -- as an option -----------------------------------------------------------------------------------------------------
def test_schedulers_by_name():
    worth = calibration((1.0,))
    found = [make_scheduler(name, None, True, "coupled", TABLE, worth) for name in SCHEDULERS[2:]]
    assert [*map(type, found)] == [Throughput, ThroughputAsync, ThroughputGlobal]
    assert all(s.sps is TABLE and s.calibration is worth and s.reads_confidence for s in found)
    for rule in ("exact", "opportunistic"):
        with pytest.raises(UsageError, match=f"throughput-global with sampling {rule}: .*sampling coupled") as error:
            make_scheduler("throughput-global", None, True, rule, TABLE)
        assert "\n" not in str(error.value)
    make_scheduler("throughput-global", None, True, "greedy", TABLE)
    with pytest.raises(UsageError, match="scheduler throughput: this drafter has no confidence head"):
        make_scheduler("throughput", None, False, "exact", TABLE)


@pytest.mark.parametrize("name", SCHEDULERS[2:])
def test_generation_with_a_profile(name):
    """The text is the target's, and steps shrink as the profile says."""
    language, unsure = Language(5), [0.9, 0.9, 0.2, 0.9, 0.9]
    decoder = fake_decoder(language, right_for(language, lambda at: 2), confidence=lambda drafts: unsure)
    with pytest.raises(UsageError, match=f"scheduler {name}: .*run `dspark profile BUNDLE`"):
        decoder.generate([1, 2], scheduler=name)
    decoder.sps = SpsTable((1, 2, 3, 4, 5, 6), (1.0, 0.8, 0.6, 0.5, 0.4, 0.35))
    for worth, length in [(None, 2), (calibration((1.0,) * 5, (0.0, -2.0, 0.0, 0.0, 0.0)), 1)]:
        decoder.calibration, rounds = worth, []
        answer = decoder.generate([1, 2], max_new_tokens=60, scheduler=name, on_round=rounds.append)
        assert answer.token_ids == language.continuation([1, 2], 60)
        assert {r.verified for r in rounds[2:-2]} == {length}
        assert rounds[0].verified == (5 if name == "throughput-async" else length)  # which has seen nothing yet


def test_the_global_search_is_for_rules_that_do_not_mind():
    decoder = fake_decoder(Language())
    decoder.sps, options = TABLE, {"scheduler": "throughput-global", "sampling": "exact", "max_new_tokens": 9}
    with pytest.raises(UsageError, match="throughput-global with sampling exact"):
        decoder.generate([1, 2], temperature=1.0, **options)
    assert decoder.generate([1, 2], **options).stats.verified  # greedy
