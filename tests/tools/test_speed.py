"""What is measured for a profile: which steps run, behind which context, and that steps in the cost stay steps."""

from types import SimpleNamespace

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
    steps, drafts = speed.measure_speed(decoder, 30, 4)
    assert [(p.size, pytest.approx(p.ms)) for p in steps] == list(tiles.items())
    assert [p.per_second for p in steps] == pytest.approx([100] * 4 + [40] * 2)
    assert [(p.size, pytest.approx(p.ms)) for p in drafts] == [(size, size) for size in range(1, BLOCK + 1)]


def test_a_slow_spell_falls_on_all_sizes_and_the_median_passes_over_it(clock):
    decoder = decoder_with(clock, lambda size, run: 1000 if 40 < run < 60 else 10, lambda size, run: 1)
    steps, _ = speed.measure_speed(decoder, 30, 12)
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
