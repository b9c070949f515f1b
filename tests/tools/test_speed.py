"""What is measured for a profile: which steps run, behind which context, and that steps in the cost stay steps."""

import math
import random
import statistics
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import Language, fake_decoder

from dspark.errors import UsageError
from dspark.tools import speed

BLOCK = 5


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test lets it."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def decoder_with(clock, verify_ms, draft_ms):
    """verify_ms, draft_ms: of the size of a step and of the number of this run."""
    decoder = fake_decoder(Language(0), block_size=BLOCK)
    for engine, cost in ((decoder.target_engine, verify_ms), (decoder.drafter_engine, draft_ms)):
        engine.measured = []

        def run(inputs, fetch, engine=engine, cost=cost, plain=engine.run):
            size = inputs["tokens"].shape[-1]
            engine.measured.append((size, int(inputs["length"][0])))
            clock.seconds += cost(size, len(engine.measured)) / 1e3
            return plain(inputs, fetch)

        engine.run = run
    return decoder


def test_steps_stay_steps(clock):
    tiles = {1: 10, 2: 10, 3: 10, 4: 10, 5: 25, 6: 25}
    decoder = decoder_with(clock, lambda size, run: tiles.get(size, 99), lambda size, run: size)
    measured = speed.measure_speed(decoder, 30, 4)
    assert list(measured.steps) == [1] and measured.batch_drafts == []
    steps, drafts = measured.steps[1], measured.drafts
    assert [(p.size, pytest.approx(p.ms)) for p in steps] == list(tiles.items())
    assert speed.even(steps) == pytest.approx(list(tiles.values()))
    assert [(p.size, pytest.approx(p.ms)) for p in drafts] == [(size, size) for size in range(1, BLOCK + 1)]


def test_a_slow_spell_falls_on_all_sizes_and_the_median_passes_over_it(clock):
    decoder = decoder_with(clock, lambda size, run: 1000 if 40 < run < 60 else 10, lambda size, run: 1)
    steps = speed.measure_speed(decoder, 30, 12).steps[1]
    assert [p.ms for p in steps] == pytest.approx([10] * (BLOCK + 1))
    assert all(p.low == pytest.approx(10) for p in steps)


def test_every_step_begins_behind_the_context(clock):
    decoder, done = decoder_with(clock, lambda size, run: 1, lambda size, run: 1), []
    session = decoder.session()
    before = session.generate([1, 2, 3], max_new_tokens=5).token_ids
    decoder.target_engine.measured.clear()
    decoder.drafter_engine.measured.clear()
    speed.measure_speed(decoder, 30, 2, done.append)
    assert done == [1, 2]
    prefill, extra, *steps = decoder.target_engine.measured
    assert prefill == (30, 0) and extra == (speed.FRESH, 30)
    assert {length for _, length in steps} == {30}
    repeats = 2 + speed.WARM_UP
    assert sorted(size for size, _ in steps) == sorted(list(range(1, BLOCK + 2)) * repeats)
    orders = [[size for size, _ in steps[i * 6 : i * 6 + 6]] for i in range(repeats)]
    assert len({tuple(order) for order in orders}) > 1
    drafts = decoder.drafter_engine.measured[-BLOCK * repeats :]
    assert {length for _, length in drafts} == {30} and {size for size, _ in drafts} == set(range(1, BLOCK + 1))
    # A session that had the caches runs its tokens again.
    assert session.generate([], max_new_tokens=5).token_ids == Language(0).continuation([1, 2, 3, *before], 5)


def test_limits(clock):
    decoder = decoder_with(clock, lambda size, run: 1, lambda size, run: 1)
    assert speed.most_context(decoder) == 200 - BLOCK - 1 == speed.default_context(decoder)
    for context in (1, 194):
        speed.measure_speed(decoder, context, 1)
    for context in (0, 195):
        with pytest.raises(UsageError, match=f"context {context}: .* 1 to 194"):
            speed.measure_speed(decoder, context, 1)
    with pytest.raises(UsageError, match="repeats 0"):
        speed.measure_speed(decoder, 10, 0)


def batch_with(clock, verify_ms, draft_ms, requests=3):
    """As `decoder_with`, of several requests. verify_ms: of the tokens of each; draft_ms: of requests and drafts."""
    decoder = fake_decoder(Language(0), block_size=BLOCK, requests=requests)
    target, drafter = decoder.target_engine, decoder.drafter_engine
    target.measured, drafter.measured = [], []

    def verify(inputs, fetch, plain=target.run):
        counts = [int(n) for n in inputs["row_start"][1:] - inputs["row_start"][:-1]]
        rows = inputs["logit_rows"].tolist()
        target.measured.append((counts, inputs["length"].tolist(), inputs["pages"][:, 0].tolist(), rows))
        clock.seconds += verify_ms(counts) / 1e3
        return plain(inputs, fetch)

    def draft(inputs, fetch, plain=drafter.run):
        drafter.measured.append((*inputs["tokens"].shape, inputs["length"].tolist(), len(inputs["taps"])))
        clock.seconds += draft_ms(*inputs["tokens"].shape) / 1e3
        return plain(inputs, fetch)

    target.run, drafter.run = verify, draft
    return decoder


def batch_sizes(most, block):
    """By the definition: whether steps of `size` tokens in `requests` are measured."""
    counts = [n for n in range(1, most + 1) if n == most or n & (n - 1) == 0]
    found = {}
    for before, requests in zip([0, *counts], counts, strict=False):
        least, largest = 1 if requests == most else before + 1, requests * block
        within = [n for n in range(least, largest + 1) if n <= 64 or (largest - n) % 4 == 0 or n == requests]
        found[requests] = within + ([largest + more for more in (16, 32, 48, 64)] if requests == most > 1 else [])
    return found


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 10, 32, 67, 128, 300])
def test_sizes_of_steps(requests):
    """Every size up to a block for each request or 64, then every fourth, then steps with 16 to 64 prompt tokens."""
    sizes = speed.step_sizes(fake_decoder(Language(0), block_size=6, requests=requests))
    assert sizes == batch_sizes(requests, 7) and list(sizes) == sorted(sizes)
    for count, each in sizes.items():
        assert each == sorted(set(each)) and {count, count * 7} <= set(each)
    for beside in range(1, requests + 1):  # a token for each of any number of requests, in the table that has to tell
        table = next(each for count, each in sizes.items() if count >= beside)
        assert beside in table or (beside > 64 and beside + 3 >= min(n for n in table if n >= beside))


def test_sizes_of_a_small_batch():
    sizes = speed.step_sizes(fake_decoder(Language(0), block_size=2, requests=6))
    assert sizes == {
        1: [1, 2, 3],
        2: [2, 3, 4, 5, 6],
        4: [3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        6: [*range(1, 19), 34, 50, 66, 82],
    }


def test_speed_of_a_batch(clock):
    """By requests: steps of the same size take longer with more of them, and tiles of two tokens of a request stay."""
    cost = lambda counts: 10 * len(counts) + sum(-(-n // 2) for n in counts)  # noqa: E731
    decoder = batch_with(clock, cost, lambda requests, size: 5 * requests + size)
    measured = speed.measure_speed(decoder, 30, 3)
    assert list(measured.steps) == [1, 2, 3]
    for requests, sizes in batch_sizes(3, BLOCK + 1).items():
        expected = []
        for size in sizes:
            counts = [0] * min(requests, size)
            for token in range(size):  # dealt out in turn
                counts[token % len(counts)] += 1
            expected.append(cost(counts))
        points = measured.steps[requests]
        assert [(p.size, pytest.approx(p.ms)) for p in points] == list(zip(sizes, expected, strict=True))
        assert speed.even(points) == pytest.approx(expected)
    assert [(p.size, pytest.approx(p.ms)) for p in measured.drafts] == [(k, 5 + k) for k in range(1, BLOCK + 1)]
    assert [(p.size, pytest.approx(p.ms)) for p in measured.batch_drafts] == [(r, 5 * r + BLOCK) for r in (1, 2, 3)]


def test_a_step_of_a_batch_is_spread_evenly(clock):
    decoder = batch_with(clock, lambda counts: 1, lambda requests, size: 1)
    speed.measure_speed(decoder, 30, 2)
    prefills, steps = decoder.target_engine.measured[:6], decoder.target_engine.measured[6:]
    assert [(counts, lengths, places) for counts, lengths, places, _ in prefills] == [
        (counts, lengths, [place]) for place in range(3) for counts, lengths in (([30], [0]), ([speed.FRESH], [30]))
    ]
    repeats = 2 + speed.BATCH_WARM_UP
    ran = Counter((len(counts), sum(counts)) for counts, *_ in steps)
    wanted = Counter((min(r, size), size) for r, sizes in batch_sizes(3, BLOCK + 1).items() for size in sizes)
    assert ran == {step: times * repeats for step, times in wanted.items()} and wanted[2, 6] == wanted[3, 6] == 1
    for counts, lengths, places, rows in steps:
        assert max(counts) - min(counts) <= 1
        assert lengths == [30] * len(counts) and places == list(range(len(counts)))
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        # A row of a block has logits; of rows of a prompt before it nobody wants them.
        wanted = [at for first, end in zip(starts, starts[1:], strict=False) for at in range(max(first, end - 6), end)]
        assert rows == wanted
    drafts = decoder.drafter_engine.measured[3:]
    assert {(r, size, *lengths, taps) for r, size, lengths, taps in drafts} == {
        *((1, size, 30, speed.FRESH) for size in range(1, BLOCK + 1)),
        *((r, BLOCK, *[30] * r, speed.FRESH * r) for r in (1, 2, 3)),
    }


def test_context_of_a_batch(clock):
    """By default so long that all requests together have 4,096 tokens, and never beyond what the largest step needs."""
    decoder = batch_with(clock, lambda counts: 1, lambda requests, size: 1)
    rows = -(-(3 * (BLOCK + 1) + 64) // 3)
    assert speed.most_context(decoder) == 200 - rows == speed.default_context(decoder)
    speed.measure_speed(decoder, 200 - rows, 1)
    with pytest.raises(UsageError, match=f"context {201 - rows}: .* 1 to {200 - rows}"):
        speed.measure_speed(decoder, 201 - rows, 1)
    for requests, context in ((2, 512), (8, 512), (16, 256), (32, 128)):
        assert speed.default_context(fake_decoder(Language(0), limit=2000, requests=requests)) == context


# -- evening ----------------------------------------------------------------------------------------------------------
def points_of(sizes, times):
    """As the measurement makes them of `times` [sizes][repeats]."""
    quartiles = [statistics.quantiles(each, n=4, method="inclusive") for each in times]
    return [speed.Point(size, middle, low, high) for size, (low, middle, high) in zip(sizes, quartiles, strict=True)]


def random_points(rng, count):
    """A random walk of medians, or a line, or tiles, with quartiles about them of any width, some of none."""
    sizes = np.cumsum(rng.integers(1, 5, count)).tolist()
    walk = {0: rng.normal(0, 2, count).cumsum(), 1: np.array(sizes) * 0.5, 2: np.array(sizes) // 8 * 6.0}
    medians = 50 + walk[int(rng.integers(3))] + rng.normal(0, 0.5, count)
    widths = rng.exponential(rng.choice([0.1, 1, 5]), (2, count)) * (rng.random((2, count)) < 0.9)
    rows = zip(sizes, medians, medians - widths[0], medians + widths[1], strict=True)
    return [speed.Point(size, *map(float, values)) for size, *values in rows]


def length(points, curve):
    return math.fsum(
        math.hypot(b.size - a.size, y - x) for a, b, x, y in zip(points, points[1:], curve, curve[1:], strict=False)
    )


def shortest(points, end):
    """The shortest curve from the first median to `end`, by convex minimisation: one point after the other is put where
    it is best between its neighbours as they are (on the straight line between them, or as near as it may)."""
    curve = [points[0].ms, *(p.ms for p in points[1:-1]), end]
    for _ in range(5000):
        moved = 0.0
        for i in range(1, len(points) - 1):
            a, p, b = points[i - 1 : i + 2]
            straight = curve[i - 1] + (curve[i + 1] - curve[i - 1]) * (p.size - a.size) / (b.size - a.size)
            best = min(max(straight, p.low), p.high)
            moved, curve[i] = max(moved, abs(best - curve[i])), best
        if moved < 1e-11:
            break
    return curve


def bends_of(points, curve):
    slopes = np.diff(curve) / np.diff([p.size for p in points])
    return [int(i) + 1 for i in np.flatnonzero(np.abs(np.diff(slopes)) > 1e-9)]


def inside(points, curve, slack=1e-9):
    return len(curve) == len(points) and all(
        p.low - slack <= y <= p.high + slack for p, y in zip(points, curve, strict=True)
    )


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(11)
    return [random_points(rng, int(rng.integers(2, 9))) for _ in range(200)]


def test_the_evened_curve_is_the_shortest(cases):
    """Between its ends: no curve that a convex minimisation or chance finds is shorter, and it is the one that the
    minimisation finds."""
    rng, bent = np.random.default_rng(12), 0
    for points in cases:
        curve = speed.even(points)
        assert inside(points, curve) and curve[0] == points[0].ms
        assert shortest(points, curve[-1]) == pytest.approx(curve, abs=1e-6)
        least = length(points, curve)
        lows, highs = (np.array([getattr(p, name) for p in points]) for name in ("low", "high"))
        for _ in range(50):
            anywhere = lows + (highs - lows) * rng.random(len(points))
            near = np.clip(np.array(curve) + rng.normal(0, 0.01, len(points)), lows, highs)
            for other in (anywhere, near):
                other[[0, -1]] = curve[0], curve[-1]
                assert length(points, other.tolist()) >= least - 1e-6
        bent += len(bends_of(points, curve)) > 0
    assert 50 < bent < 200, "cases of both kinds"


def test_where_the_evened_curve_ends(cases):
    """Where a straight line from the last bend comes nearest to the last median; up to that bend it is the shortest
    curve to the median as well."""
    exact = 0
    for points in cases:
        curve, median = speed.even(points), points[-1].ms
        last = max([0, *bends_of(points, curve)])
        assert shortest(points, median)[: last + 1] == pytest.approx(curve[: last + 1], abs=1e-6)
        start, rest = points[last], points[last + 1 :]
        lowest = max((p.low - curve[last]) / (p.size - start.size) for p in rest)
        highest = min((p.high - curve[last]) / (p.size - start.size) for p in rest)
        width = points[-1].size - start.size
        nearest = min(max((median - curve[last]) / width, lowest), highest)
        assert curve[-1] == pytest.approx(curve[last] + nearest * width)
        exact += curve[-1] == pytest.approx(median)
    assert 20 < exact < 200, "cases of both kinds"


def test_the_evened_curve_rises_wherever_one_can(cases):
    """It turns only where every curve between the same ends does."""
    rising = 0
    for points in cases:
        curve = speed.even(points)
        fixed = [speed.Point(p.size, y, y, y) for p, y in ((points[0], curve[0]), (points[-1], curve[-1]))]
        tube = [fixed[0], *points[1:-1], fixed[1]]
        possible = all(a.low <= b.high + 1e-12 for i, a in enumerate(tube) for b in tube[i:])
        assert possible == (np.diff(curve) >= -1e-9).all()
        rising += possible
    assert 40 < rising < 160, "cases of both kinds"


@pytest.mark.parametrize("seed", range(10))
def test_noise_makes_no_step(seed):
    """A line with noise that is larger than what a token more costs: its medians fall here and there."""
    rng, sizes = random.Random(seed), range(8, 65)
    points = points_of(sizes, [[20 + 0.2 * size + rng.gauss(0, 1) for _ in range(30)] for size in sizes])
    curve = speed.even(points)
    assert sum(a.ms > b.ms for a, b in zip(points, points[1:], strict=False)) > 5
    assert inside(points, curve) and (np.diff(curve) > 0).all()
    off = [abs(y - 20 - 0.2 * size) for size, y in zip(sizes, curve, strict=True)]
    assert max(off) < 1, "a standard deviation of the noise"


def test_more_repetitions_leave_less_noise():
    """A step takes 1 to 2 % longer with each token, single measurements are off by 5 %: falls per curve of 64 sizes."""
    rng, sizes = random.Random(5), range(1, 65)
    found = {}
    for repeats in (7, 30):
        falls = Counter()
        for _ in range(40):
            costs = [(1 + 0.02 * size) * 20 for size in sizes]
            points = points_of(
                sizes, [[cost * (1 + abs(rng.gauss(0, 0.05))) for _ in range(repeats)] for cost in costs]
            )
            for kind, curve in (("medians", [p.ms for p in points]), ("evened", speed.even(points))):
                falls[kind] += sum(a > b for a, b in zip(curve, curve[1:], strict=False))
        found[repeats] = {kind: total / 40 for kind, total in falls.items()}
    assert found[7]["medians"] > 12 and 0 < found[7]["evened"] < 1.5
    assert found[30]["medians"] > 3 and found[30]["evened"] < 0.1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("edge", [9, 20, 31])
def test_a_step_that_is_larger_than_the_noise_stays(seed, edge):
    """At its place, and at its height but for the noise; the rest is even."""
    rng, sizes = random.Random(seed), range(1, 41)
    cost = {size: 20 if size <= edge else 32 for size in sizes}
    points = points_of(sizes, [[cost[size] + rng.gauss(0, 1) for _ in range(30)] for size in sizes])
    curve = speed.even(points)
    jumps = np.diff(curve)
    assert int(np.argmax(jumps)) + 1 == edge and inside(points, curve)
    before, after = points[edge - 1 : edge + 1]
    assert after.low - before.high - 1e-9 <= jumps[edge - 1] <= after.high - before.low + 1e-9
    assert jumps[edge - 1] == pytest.approx(12, abs=3) and max(np.abs(np.delete(jumps, edge - 1))) < 1
    assert max(abs(y - cost[size]) for size, y in zip(sizes, curve, strict=True)) < 1.5


def test_evening_of_few_points():
    Point = speed.Point
    assert speed.even([Point(3, 7.0, 6.0, 9.0)]) == [7.0]
    assert speed.even([Point(1, 7.0, 6.0, 9.0), Point(5, 8.0, 7.5, 9.0)]) == [7.0, 8.0]
    assert speed.even([Point(1, 7.0, 7.0, 7.0), Point(5, 3.0, 3.0, 3.0)]) == [7.0, 3.0]


def test_measurements_without_noise_stay_as_they_are():
    rng = np.random.default_rng(3)
    for count in range(1, 30):
        times = (rng.integers(1, 6, count) * 2.5).tolist()  # many of them the same
        sizes = np.cumsum(rng.integers(1, 5, count)).tolist()
        points = [speed.Point(size, ms, ms, ms) for size, ms in zip(sizes, times, strict=True)]
        assert speed.even(points) == pytest.approx(times, rel=1e-12)


def test_evening_keeps_to_the_quartiles_of_many_sizes():
    rng = np.random.default_rng(4)
    for _ in range(50):
        points = random_points(rng, 200)
        curve = speed.even(points)
        assert inside(points, curve)
        assert len(bends_of(points, curve)) < 199 and length(points, curve) <= length(
            points, [*(p.ms for p in points[:-1]), curve[-1]]
        )
