"""Where an answer ends, in every mode: nothing follows a stop, and the state is what was returned."""

import random

import pytest
from answers import (
    BEGIN,
    COLD,
    FINISH,
    MODES,
    PROMPT,
    STOP_TEXT,
    USER_STOP,
    WHOLE,
    Calm,
    PieceTokenizer,
    answer,
    check_chunks,
)
from fakes import MASK, STOPS, Language, fake_decoder, oracle, right_for

BLOCK = 3
POLICIES = {
    "oracle": oracle,
    "wrong": lambda language: right_for(language, lambda position: 0),
    "1, 3, 0": lambda language: right_for(language, lambda position: (1, BLOCK, 0)[position % 3]),
}
# What is planted so that the answer ends with the token at `index`, and the options that make it a stop.
KINDS = {
    "none": (lambda index: {}, {}),
    "model": (lambda index: {index: STOPS[index % 2]}, {}),
    "user": (lambda index: {index: USER_STOP}, {"stop_token_ids": [USER_STOP, MASK]}),
    "string within": (lambda index: {index: WHOLE}, {"stop": [STOP_TEXT, "never"]}),
    "string across": (lambda index: {index - 1: BEGIN, index: FINISH}, {"stop": [STOP_TEXT, "ENDLESS"]}),
}


def decoder_for(language, policy, **settings):
    decoder = fake_decoder(language, policy, block_size=BLOCK, **settings)
    decoder.tokenizer = PieceTokenizer()
    return decoder


def check_state(session, result, rounds):
    """Section 4's equation; a row of the cache for every token, but the last if it was drawn."""
    s = result.stats
    assert session.tokens[len(session.tokens) - len(result.token_ids) :] == result.token_ids
    assert s.emitted == len(result.token_ids) == 1 + s.accepted + s.rounds - s.ended_rounds
    assert s.rounds == len(rounds) == s.direct_full_commits + s.direct_partial_commits + s.replay_fallbacks
    assert s.accepted <= s.verified <= s.drafted
    accepted = bool(rounds) and len(rounds[-1].emitted) == rounds[-1].accepted
    assert s.ended_rounds == accepted
    assert session.target.length == len(session.tokens) - (not accepted)
    assert session.drafter.observed <= session.target.length
    return accepted


def read(session, prompt, **options):
    chunks = list(session.stream(prompt, **options))
    return chunks, [chunk.round for chunk in chunks if chunk.round is not None]


def run_case(kind, mode, policy, index, ignore_eos, limit):
    plant, options = KINDS[kind]
    if kind == "string across" and index == 0:
        return 0
    planted = {len(PROMPT) + at: token for at, token in plant(index).items()}
    language = Calm(index, planted)
    # Doubtful drafts are verified up to the least that the gate lets through.
    doubtful = (lambda drafts: [0.5] * len(drafts)) if mode == "exact gated" else None
    decoder = decoder_for(language, POLICIES[policy](language), confidence=doubtful)
    session = decoder.session()
    options = {**MODES[mode], **options, "ignore_eos": ignore_eos}
    chunks, rounds = read(session, PROMPT, max_new_tokens=limit, seed=index, **options)
    result = chunks[-1].generation

    stop_ids = {*options.get("stop_token_ids", ()), *(() if ignore_eos else STOPS)}
    expected = answer(language.continuation(PROMPT, limit), limit, stop_ids, options.get("stop", ()))
    assert result.token_ids == expected.tokens
    assert (result.finish_reason, result.text) == (expected.finish, expected.text)
    stopped = kind != "none" and (kind != "model" or not ignore_eos) and limit > index
    assert expected.finish == ("stop" if stopped else "length"), "the case is what it says"
    check_chunks(chunks, options.get("stop", ()))
    accepted = check_state(session, result, rounds)
    if "plain" in mode or "strict" in mode:
        assert not accepted
    elif policy == "oracle" and mode != "exact gated":
        place = (len(expected.tokens) - 2) % (BLOCK + 1)  # in its round; the one that fills the limit is drawn
        assert accepted == (stopped and len(expected.tokens) > 1 and len(expected.tokens) < limit and place < BLOCK)

    language.planted = {}
    whole = session.tokens + [7, 8]
    after_rounds = []
    after = session.generate([7, 8], max_new_tokens=6, on_round=after_rounds.append, **MODES[mode])
    assert after.token_ids == language.continuation(whole, 6)
    check_state(session, after, after_rounds)
    if policy == "oracle" and "plain" not in mode and mode != "exact gated":
        assert [done.accepted for done in after_rounds] == [BLOCK, 0], "its context has no hole"
    return 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_ending(kind, mode):
    cases = 0
    for policy in POLICIES:
        for index in range(2 * (BLOCK + 1) + 1):
            for limit in sorted({index or 1, index + 1, index + 2 + BLOCK}):
                for ignore_eos in (False, True) if kind in ("model", "user") else (index % 2 == 0,):
                    cases += run_case(kind, mode, policy, index, ignore_eos, limit)
    assert cases > 70


HOT = {
    "coupled": {"sampling": "coupled"},
    "coupled argmax": {"sampling": "coupled", "draft_temperature": 0.0},
    "exact": {"sampling": "exact", "scheduler": "off"},
    "exact argmax": {"sampling": "exact", "draft_temperature": 0.0},
    "opportunistic": {"sampling": "opportunistic"},
    "plain": {"mode": "plain"},
    "strict": {"mode": "strict"},
}


@pytest.mark.parametrize("mode", HOT)
def test_endings_by_chance(mode):
    """Texts, stops and limits at random. Where noise alone decides, the text is plain decoding's with that seed; and a
    next turn is a fresh start, to the token."""
    finishes = []
    for seed in range(60):
        rng = random.Random(seed)
        language = Language(seed)
        decoder = decoder_for(language, right_for(language, lambda position: position % 3), limit=60)
        strings = rng.sample(["END", "EN", "a", "é", "🙂", "ENDE", " x", "Dé", "ab", "!"], rng.randint(0, 4))
        stop_ids = rng.sample(range(40), rng.randint(0, 2))
        options = {"temperature": rng.choice([0.2, 0.4]), "seed": seed, "ignore_eos": rng.random() < 0.5}
        limit = rng.randint(1, 40)
        session = decoder.session()
        stops = {"stop": strings, "stop_token_ids": stop_ids}
        chunks, rounds = read(session, PROMPT, max_new_tokens=limit, **stops, **options, **HOT[mode])
        result = chunks[-1].generation
        check_chunks(chunks, strings)
        check_state(session, result, rounds)
        whole = session.tokens + [9, 1]
        more = {"max_new_tokens": 8, **options, **HOT[mode]}
        assert session.generate([9, 1], **more).token_ids == decoder.generate(whole, **more).token_ids

        said = result.token_ids
        if mode in ("coupled", "coupled argmax", "plain", "strict"):
            plain = {"mode": "plain", "max_new_tokens": limit, **options, "ignore_eos": True}
            said = decoder.generate(PROMPT, **plain).token_ids
        every = {*stop_ids, *(() if options["ignore_eos"] else STOPS)}
        expected = answer(said, min(limit, len(said)), every, strings)
        assert (result.token_ids, result.text) == (expected.tokens, expected.text)
        assert result.finish_reason == expected.finish
        finishes.append(result.finish_reason)
    assert 15 < finishes.count("stop") < 55


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left", range(BLOCK + 2))
def test_a_stop_at_the_context_limit(mode, left):
    """A stop token that takes the last row, or is drawn when no row is left, ends the text as anywhere else."""
    limit = 20
    for stop in range(left + 1):
        language = Calm(left, {limit - left + stop: STOPS[0]})
        prompt = language.continuation(PROMPT, limit - left)
        decoder = decoder_for(language, None, limit=limit)
        session = decoder.session()
        chunks, rounds = read(session, prompt, max_new_tokens=50, **MODES[mode])
        assert chunks[-1].generation.token_ids == language.continuation(prompt, stop + 1)
        assert chunks[-1].generation.finish_reason == "stop"
        check_state(session, chunks[-1].generation, rounds)
        assert session.target.length <= limit


def test_the_stop_at_one_temperature_is_that_of_all():
    """Or `every ending` would say nothing about drawing: its laws do have one token."""
    language = Calm(1)
    decoder = decoder_for(language, None)
    texts = {tuple(decoder.generate(PROMPT, temperature=COLD, max_new_tokens=20, seed=s).token_ids) for s in range(5)}
    assert texts == {tuple(language.continuation(PROMPT, 20))}
