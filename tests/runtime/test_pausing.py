"""Pausing: plain rounds while drafts do not pay, with the drafter's context kept whole."""

import numpy as np
import pytest
from answers import MODES, Calm
from fakes import fake_decoder, oracle, right_for

from dspark.runtime.schedule import Pausing

BLOCK, PROMPT = 3, [3, 1, 4, 1, 5]
WINDOW, PAUSE = 16, 32
SPECULATIVE = [mode for mode in MODES if "plain" not in mode]


def rounds_of(decoder, **options):
    rounds = []
    return decoder.generate(PROMPT, on_round=rounds.append, **options), rounds


def wrong(language):
    return right_for(language, lambda position: 0)


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_off_by_default(mode):
    language = Calm(1)
    result, rounds = rounds_of(
        fake_decoder(language, wrong(language), block_size=BLOCK), max_new_tokens=70, **MODES[mode]
    )
    assert result.stats.pauses == result.stats.paused_rounds == 0
    assert all(done.drafts for done in rounds[:-1])


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_bad_drafter_pauses(mode):
    """After 16 rounds for 32, again and again; the last pause is cut short by the end of the answer."""
    language = Calm(2)
    decoder = fake_decoder(language, wrong(language), block_size=BLOCK)
    new = 1 + 2 * (WINDOW + PAUSE) + WINDOW + 10
    result, rounds = rounds_of(decoder, max_new_tokens=new, pause_below=0.1, **MODES[mode])
    assert result.token_ids == language.continuation(PROMPT, new)
    drafted = [bool(done.drafts) for done in rounds]
    assert drafted == ([True] * WINDOW + [False] * PAUSE) * 2 + [True] * WINDOW + [False] * 10
    s = result.stats
    assert (s.pauses, s.paused_rounds, s.rounds) == (3, 2 * PAUSE + 10, new - 1)
    assert s.drafted == 3 * WINDOW * BLOCK and s.accepted == 0 and s.emitted == 1 + s.rounds
    assert s.to_json()["pauses"] == 3 and s.to_json()["paused_rounds"] == 2 * PAUSE + 10
    for done in rounds:
        assert done.target_length[1] == done.target_length[0] + 1
        assert done.verified == (len(done.drafts) if mode != "exact gated" else min(len(done.drafts), done.verified))
    # The rows of a pause reach the drafter with its next proposal, which checks every one of them.
    assert decoder.drafter_engine.context_runs.count(PAUSE + 1) == 2


def test_drafts_after_a_pause_are_those_of_an_unbroken_context():
    language = Calm(3)

    def policy(prefix, size):
        """Bad for 20 tokens, then good."""
        return (wrong if len(prefix) < len(PROMPT) + 20 else oracle)(language)(prefix, size)

    options = {"max_new_tokens": 90}
    paused, paused_rounds = rounds_of(fake_decoder(language, policy, block_size=BLOCK), pause_below=0.3, **options)
    whole, whole_rounds = rounds_of(fake_decoder(language, policy, block_size=BLOCK), **options)
    assert paused.stats.pauses == 1 and paused.token_ids == whole.token_ids
    after = [done for done in paused_rounds if done.position > len(PROMPT) + WINDOW + PAUSE and done.drafts]
    assert after[0].accepted == BLOCK and len(after) > 5
    for done in after:
        assert done.drafts == language.continuation(PROMPT + paused.token_ids[: done.position + 1 - len(PROMPT)], BLOCK)


def test_a_pause_ends_with_its_turn():
    """The next turn begins by drafting, on a context that has the pause's rows."""
    language = Calm(4)
    decoder = fake_decoder(language, wrong(language), block_size=BLOCK)
    session = decoder.session()
    assert session.generate(PROMPT, max_new_tokens=1 + WINDOW + 5, pause_below=0.5).stats.paused_rounds == 5
    rounds = []
    more = session.generate([1, 2], max_new_tokens=6, pause_below=0.5, on_round=rounds.append)
    assert more.token_ids == language.continuation(session.tokens[: -len(more.token_ids)], 6)
    assert all(done.drafts for done in rounds[:-1])


def test_a_drafter_that_pays_is_left_alone():
    language = Calm(5)
    decoder = fake_decoder(language, right_for(language, lambda position: position % 2), block_size=BLOCK)
    stats = rounds_of(decoder, max_new_tokens=120)[0].stats
    rate = stats.accepted / stats.verified
    assert 0.1 < rate < 0.4
    assert rounds_of(decoder, max_new_tokens=120, pause_below=rate - 0.08)[0].stats.pauses == 0
    assert rounds_of(decoder, max_new_tokens=120, pause_below=rate + 0.08)[0].stats.pauses > 0
    assert rounds_of(decoder, max_new_tokens=120, pause_below=0.0)[0].stats.pauses == 0


def test_plain_decoding_never_pauses():
    language = Calm(6)
    decoder = fake_decoder(language, wrong(language), block_size=BLOCK)
    stats = rounds_of(decoder, max_new_tokens=60, mode="plain", pause_below=1.0)[0].stats
    assert stats.pauses == stats.paused_rounds == stats.drafted == 0


def test_the_rate_is_that_of_the_last_rounds():
    """Verified drafts, not drafted ones, of a window that slides and begins anew after a pause."""
    pausing = Pausing(0.5)
    for verified, accepted in [(1, 1)] * 8 + [(5, 0)] * 1 + [(1, 1)] * 7:
        assert not pausing.begin_round()
        pausing.end_round(verified, accepted)
    assert pausing.pauses == 0, "15 of 20"
    rounds = 0
    while not pausing.pauses:
        assert not pausing.begin_round()
        pausing.end_round(1, 0)
        rounds += 1
    assert rounds == 6, "9 of 20: what left the window counts no longer, or it were 15 of 26"
    assert [pausing.begin_round() for _ in range(PAUSE + 1)] == [True] * PAUSE + [False]
    for _ in range(WINDOW - 1):
        pausing.end_round(4, 0)
        assert not pausing.begin_round() and pausing.pauses == 1
    pausing.end_round(4, 0)
    assert pausing.begin_round() and pausing.pauses == 2


def test_drafts_that_nobody_verifies_do_not_pay():
    """A gate that lets nothing through: the drafter's runs are for nothing."""
    language = Calm(7)
    decoder = fake_decoder(language, None, block_size=BLOCK, confidence=lambda drafts: [0.0] * len(drafts))
    result, rounds = rounds_of(decoder, max_new_tokens=30, confidence_threshold=0.5, pause_below=0.2)
    assert result.stats.pauses == 1 and result.stats.verified == 0
    assert rounds_of(decoder, max_new_tokens=30, confidence_threshold=0.5)[0].stats.pauses == 0


def test_on_an_exported_pair(pairs):
    """Drafts that are falsified on their way out of the engine, so that all are rejected: what the drafter says after a
    pause is what it says without one."""
    from dspark.runtime import load

    decoder = load(pairs("qwen3-vanilla").bundle, threads=1)
    run, vocabulary = decoder.drafter_engine.run, decoder.manifest.target.vocab_size
    said: dict[int, tuple] = {}

    def falsified(inputs, fetch):
        outputs = dict(run(inputs, fetch))
        if "draft_tokens" in outputs:
            anchor = int(inputs["positions"][0, 0])
            said[anchor] = outputs["draft_tokens"][0].tolist(), outputs["confidence"][0].tolist()
            outputs["draft_tokens"] = (outputs["draft_tokens"] + 1 + np.arange(7)) % vocabulary
        return outputs

    decoder.drafter_engine.run = falsified
    options = {"max_new_tokens": 1 + WINDOW + PAUSE + 14, "ignore_eos": True, "read_confidence": True}
    whole = rounds_of(decoder, **options)[0]
    unbroken = said.copy()
    said.clear()
    result, rounds = rounds_of(decoder, pause_below=0.4, **options)
    assert result.token_ids == whole.token_ids
    assert result.stats.pauses == 1 and result.stats.paused_rounds == PAUSE
    after = [position for position in said if position >= rounds[WINDOW].position]
    assert len(after) > 10 and after[0] == rounds[WINDOW + PAUSE].position
    for position in after:
        tokens, confidence = said[position]
        assert tokens == unbroken[position][0]
        assert confidence == pytest.approx(unbroken[position][1], abs=1e-4)
