"""The loop on fake engines: whatever the drafter proposes, the text is the target's and every count is exact."""

import dataclasses
import math

import pytest
from fakes import MASK, STOPS, VOCAB, Language, fake_decoder, oracle, right_for

from dspark.errors import DSparkError, UsageError
from dspark.runtime import Options

BLOCK = 5
PROMPT = [3, 1, 4, 1, 5]


def rounds_of(decoder, prompt=PROMPT, **options):
    rounds = []
    return decoder.generate(prompt, on_round=rounds.append, **options), rounds


def check_counts(result, rounds):
    """Section 4's equation, and every statistic against the rounds themselves."""
    s = result.stats
    assert s.emitted == len(result.token_ids) == 1 + s.accepted + s.rounds - s.ended_rounds
    assert s.rounds == len(rounds) == s.direct_full_commits + s.direct_partial_commits + s.replay_fallbacks
    assert s.drafted == sum(len(r.drafts) for r in rounds)
    assert s.verified == sum(r.verified for r in rounds) == sum(s.verified_per_position)
    assert s.accepted == sum(r.accepted for r in rounds) == sum(s.accepted_per_position)
    if rounds:
        assert s.acceptance_length == (s.emitted - 1) / s.rounds
    for done in rounds:
        before, after = done.target_length
        assert done.position == before and after == before + done.accepted + 1


POLICIES = {
    "oracle": oracle,
    "wrong": lambda language: right_for(language, lambda position: 0),
    "right for 2": lambda language: right_for(language, lambda position: 2),
    "0, 3, all": lambda language: right_for(language, lambda position: (0, 3, BLOCK)[position % 3]),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("mode", ["speculative", "plain"])
def test_text_is_the_targets(name, mode):
    language = Language(1)
    decoder = fake_decoder(language, POLICIES[name](language))
    result, rounds = rounds_of(decoder, mode=mode, max_new_tokens=60)
    assert result.token_ids == language.continuation(PROMPT, 60)
    assert result.finish_reason == "length"
    check_counts(result, rounds)


@pytest.mark.parametrize("draft_len", range(1, BLOCK + 1))
def test_oracle_is_accepted_whole_in_every_round(draft_len):
    language = Language(2)
    result, rounds = rounds_of(fake_decoder(language), max_new_tokens=1 + 8 * (draft_len + 1), draft_len=draft_len)
    assert [r.accepted for r in rounds] == [draft_len] * 8
    assert result.stats.acceptance_length == draft_len + 1
    assert result.stats.direct_full_commits == 8
    assert result.stats.accepted_per_position == result.stats.verified_per_position == [8] * draft_len


def test_accepted_counts_and_positions_per_round():
    """n = 0, in the middle, and gamma: the next anchor's position and both caches follow the accepted count."""
    language, counts = Language(3), [0, 3, BLOCK, 1, 0, BLOCK]
    at = {len(PROMPT) + sum(counts[:i]) + i: n for i, n in enumerate(counts)}  # {anchor position: drafts to get right}
    decoder = fake_decoder(language, right_for(language, lambda position: at.get(position, 0)))
    result, rounds = rounds_of(decoder, max_new_tokens=1 + sum(n + 1 for n in counts) + BLOCK, ignore_eos=True)
    assert [r.accepted for r in rounds[:6]] == counts
    position = len(PROMPT)
    for done, n in zip(rounds, counts, strict=False):
        assert done.position == done.target_length[0] == done.drafter_length[1] == position
        position += n + 1
    assert [r.commit for r in rounds[:6]] == ["full" if n == BLOCK else "partial" for n in counts]


def test_one_target_forward_per_round_of_the_verified_size():
    language = Language(4)
    decoder = fake_decoder(language, right_for(language, lambda position: position % 4))
    result, rounds = rounds_of(decoder, max_new_tokens=40)
    assert decoder.target_engine.runs == [len(PROMPT)] + [r.verified + 1 for r in rounds]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("limit", range(1, BLOCK + 3))
def test_every_limit_is_exact(name, limit):
    language = Language(5)
    result, rounds = rounds_of(fake_decoder(language, POLICIES[name](language)), max_new_tokens=limit)
    assert result.token_ids == language.continuation(PROMPT, limit)
    assert result.finish_reason == "length"
    check_counts(result, rounds)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("index", range(2 * (BLOCK + 1) + 1))
def test_stop_token_at_each_block_index(name, stop, index):
    """Index 0 is the prefill's token, 1.. the first block, its bonus token, and the second block."""
    language = Language(6, planted={len(PROMPT) + index: stop})
    decoder = fake_decoder(language, POLICIES[name](language))
    session, rounds = decoder.session(), []
    result = session.generate(PROMPT, max_new_tokens=60, on_round=rounds.append)
    assert result.token_ids == language.continuation(PROMPT, index + 1)
    assert result.token_ids[-1] == stop and result.finish_reason == "stop"
    check_counts(result, rounds)
    # An accepted stop token has its row in the cache and nothing after it; a drawn one waits for the next turn.
    accepted = bool(rounds) and len(rounds[-1].emitted) == rounds[-1].accepted
    assert session.target.length == len(PROMPT) + index + accepted
    follow_up(decoder, session, language)


def follow_up(decoder, session, language):
    """The next turn of `session` equals a fresh start from the same tokens, in text and in acceptance."""
    language.planted = {}
    more = [7, 8]
    whole = session.tokens + more
    continued, rounds = [], []
    continued = session.generate(more, max_new_tokens=13, on_round=rounds.append)
    check_counts(continued, rounds)
    fresh, fresh_rounds = rounds_of(decoder, whole, max_new_tokens=13)
    assert continued.token_ids == fresh.token_ids == language.continuation(whole, 13)
    assert [r.target_length for r in rounds] == [r.target_length for r in fresh_rounds]


@pytest.mark.parametrize("index", range(BLOCK + 3))
def test_ignore_eos(index):
    language = Language(7, planted={len(PROMPT) + index: STOPS[0], len(PROMPT) + index + 1: STOPS[1]})
    result, rounds = rounds_of(fake_decoder(language), max_new_tokens=20, ignore_eos=True)
    assert result.token_ids == language.continuation(PROMPT, 20)
    assert result.finish_reason == "length"
    check_counts(result, rounds)


def test_a_wrongly_drafted_stop_token_does_not_end_the_text():
    language = Language(8)
    decoder = fake_decoder(language, lambda prefix, size: [language.next(prefix)] + [STOPS[0]] * (size - 1))
    result, rounds = rounds_of(decoder, max_new_tokens=30)
    assert result.token_ids == language.continuation(PROMPT, 30)
    assert {r.verified for r in rounds[:-1]} == {2}, "the draft is cut after its first stop token"
    check_counts(result, rounds)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("left", range(BLOCK + 2))
def test_context_limit(name, left):
    """A prompt that leaves `left` rows free: they fill exactly, and the token after the last row is still right."""
    language, limit = Language(9), 30
    prompt = language.continuation(PROMPT, limit - left)
    decoder = fake_decoder(language, POLICIES[name](language), limit=limit)
    session, rounds = decoder.session(), []
    result = session.generate(prompt, max_new_tokens=100, on_round=rounds.append)
    assert result.token_ids == language.continuation(prompt, left + 1)
    assert result.finish_reason == "context"
    assert session.target.length == limit
    check_counts(result, rounds)
    with pytest.raises(UsageError, match="context limit"):
        session.generate([1])


def test_prompt_errors_leave_the_session_as_it_was():
    language = Language(10)
    decoder = fake_decoder(language, limit=20)
    session = decoder.session()
    for prompt, message in (([], "empty"), ([1] * 21, "context limit"), ([40], "vocabulary"), ([-1], "vocabulary")):
        with pytest.raises(UsageError, match=message):
            session.generate(prompt)
    with pytest.raises(UsageError, match="tokenizer"):
        session.generate("text")
    assert session.tokens == [] and decoder.target_engine.runs == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_len": 0}, "draft length 0"),
        ({"draft_len": BLOCK + 1}, f"draft length {BLOCK + 1}"),
        ({"max_new_tokens": 0}, "max new tokens"),
        ({"mode": "fast"}, "mode 'fast': choose one of speculative, plain, strict"),
        ({"scheduler": "fastest"}, "scheduler 'fastest': choose one of off, threshold, throughput"),
        ({"scheduler": "throughput", "confidence_threshold": 0.5}, "drop one"),
        ({"scheduler": "throughput"}, "nobody measured .*run `dspark profile BUNDLE`"),
        ({"scheduler": "threshold"}, "needs one"),
        ({"confidence_threshold": 1.5}, "from 0 to 1"),
        ({"confidence_threshold": math.nan}, "from 0 to 1"),
        ({"scheduler": "off", "confidence_threshold": 0.5}, "drop one"),
        ({"prefill_chunk": 0}, "prefill chunk"),
        ({"temperature": -0.5}, "temperature -0.5: must be 0"),
        ({"temperature": math.nan}, "temperature nan: must be a finite number"),
        ({"top_k": -1}, "top k -1"),
        ({"top_p": 0}, "top p 0"),
        ({"top_p": 1.5}, "top p 1.5"),
        ({"min_p": 2}, "min p 2"),
        ({"repetition_penalty": 0}, "repetition penalty 0"),
        ({"presence_penalty": math.nan}, "presence penalty nan"),
        ({"frequency_penalty": math.inf}, "frequency penalty inf"),
        ({"sampling": "exactly"}, "sampling 'exactly': choose one of exact, coupled, opportunistic"),
        ({"draft_temperature": -1.0}, "draft temperature -1"),
        ({"draft_temperature": math.nan}, "draft temperature nan"),
        ({"draft_temperature": math.inf}, "draft temperature inf"),
        ({"seed": -1}, "seed -1: must be from 0"),
        ({"seed": 2**64}, f"seed {2**64}"),
        ({"request": -1}, "request -1"),
        ({"request": 2**24}, f"request {2**24}"),
        ({"pause_below": -0.1}, "pause below -0.1"),
        ({"pause_below": 1.1}, "pause below 1.1"),
        ({"pause_below": math.nan}, "pause below nan"),
        ({"stop_token_ids": [3, VOCAB]}, f"stop token {VOCAB}: the vocabulary has 0 to {VOCAB - 1}"),
        ({"stop_token_ids": [-1]}, "stop token -1"),
        ({"stop": "END"}, "stop 'END': must be a list"),
        ({"stop_token_ids": 5}, "stop token ids 5: must be a list"),
        ({"logit_processors": len}, "logit processors .*: must be a list"),
        ({"top_k": 2.5}, "top k 2.5: must be an integer"),
        ({"max_new_tokens": 2.5}, "max new tokens 2.5: must be an integer"),
        ({"seed": "1"}, "seed '1': must be an integer"),
        ({"temperature": "0.7"}, "temperature '0.7': must be a number"),
        ({"stop": ["END", ""]}, "not empty"),
        ({"stop": [3]}, "give a list of texts"),
        ({"stop": ["END"]}, "no tokenizer: stop texts cannot be found"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"logprobs": VOCAB + 1}, f"logprobs {VOCAB + 1}"),
        ({"temprature": 1.0}, "option 'temprature': not known in this version; there are temperature"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bad_options(options, message, temperature):
    """In one line, and before anything has happened."""
    decoder = fake_decoder(Language())
    session = decoder.session()
    with pytest.raises(UsageError, match=message) as error:
        session.stream(PROMPT, **{"temperature": temperature, **options})
    assert "\n" not in str(error.value)
    assert session.tokens == [] and decoder.target_engine.runs == [] and decoder.owner is None


def test_every_option_has_its_error():
    """An option that can be out of range is among the cases above; of the others any value of its type will do."""
    (cases,) = (mark.args[1] for mark in test_bad_options.pytestmark if mark.args[0] == ("options", "message"))
    refused = {name for options, _ in cases for name in options} - {"temprature"}
    free = {"ignore_eos", "read_confidence", "logit_processors"}
    assert refused | free == {field.name for field in dataclasses.fields(Options)}


def test_a_drafter_that_cannot_draw():
    """A reduced vocabulary whose tokens nobody knows: drawn drafts are refused, the rest works."""
    decoder = fake_decoder(Language())
    decoder.can_draw = False
    for options in ({}, {"sampling": "exact"}, {"mode": "strict"}):
        with pytest.raises(UsageError, match="cannot draw tokens.*set the draft temperature to 0"):
            decoder.generate(PROMPT, temperature=1.0, **options)
    for options in ({"draft_temperature": 0.0}, {"sampling": "opportunistic"}, {"mode": "plain"}):
        result = decoder.generate(PROMPT, temperature=1.0, max_new_tokens=9, ignore_eos=True, **options)
        assert len(result.token_ids) == 9


def test_the_seed_that_was_used():
    """A generation tells its seed, and with it comes out again; where nothing is drawn there is none."""
    decoder = fake_decoder(Language(20))
    drawn = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    first = decoder.generate(PROMPT, **drawn)
    again = decoder.generate(PROMPT, seed=first.seed, **drawn)
    assert first.seed == again.seed is not None and first.token_ids == again.token_ids
    others = [decoder.generate(PROMPT, seed=7, request=request, **drawn).token_ids for request in range(3)]
    assert len(set(map(tuple, others))) == 3, "requests of one seed differ"
    assert decoder.generate(PROMPT, **drawn).seed != first.seed
    assert decoder.generate(PROMPT, max_new_tokens=4, seed=7).seed is None


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_chunked_prefill_gives_the_same_context(chunk, size):
    """The fake drafter checks that every context row is there, at its position, with the right taps."""
    language = Language(11)
    prompt = language.continuation(PROMPT, size)
    decoder = fake_decoder(language)
    result, rounds = rounds_of(decoder, prompt, max_new_tokens=1 + 4 * (BLOCK + 1), prefill_chunk=chunk)
    assert [r.accepted for r in rounds] == [BLOCK] * 4
    assert max(decoder.target_engine.runs[: -len(rounds)]) <= chunk
    assert sum(decoder.drafter_engine.context_runs) == rounds[-1].drafter_length[1]


def test_context_memory_is_bounded():
    """Rows that wait for the next proposal are handed to the drafter once they make a chunk."""
    language = Language(12)
    decoder = fake_decoder(language)
    session = decoder.session()
    session.drafter.chunk = 8
    session.generate(language.continuation(PROMPT, 50), max_new_tokens=20, prefill_chunk=4)
    assert max(decoder.drafter_engine.context_runs) <= 8


def test_sessions_take_turns():
    """Long then short prompt on the same engines, then back to the first session, whose caches are gone."""
    language = Language(13)
    decoder = fake_decoder(language, right_for(language, lambda position: position % (BLOCK + 1)))
    first, second = decoder.session(), decoder.session()
    long = language.continuation(PROMPT, 80)
    for session, prompt in ((first, long), (second, [9, 9]), (first, [2]), (second, [4, 4, 4])):
        whole = session.tokens + prompt
        assert session.generate(prompt, max_new_tokens=11).token_ids == language.continuation(whole, 11)


def test_turns_of_both_modes():
    """After a plain turn the drafter's context has no hole."""
    language = Language(14)
    session = fake_decoder(language).session()
    for mode in ("plain", "speculative", "plain", "plain", "speculative"):
        rounds, prompt = [], [5, 6]
        whole = session.tokens + prompt
        result = session.generate(prompt, max_new_tokens=13, mode=mode, on_round=rounds.append)
        assert result.token_ids == language.continuation(whole, 13)
        if mode == "speculative":
            assert [r.accepted for r in rounds] == [BLOCK, BLOCK]
        else:
            assert [r.verified for r in rounds] == [0] * 12 and result.stats.acceptance_length == 1


def test_a_turn_may_go_on_from_where_a_limit_ended_it():
    language = Language(15)
    session = fake_decoder(language).session()
    session.generate(PROMPT, max_new_tokens=4)
    assert session.generate([], max_new_tokens=9).token_ids == language.continuation(PROMPT, 13)[4:]


@pytest.mark.parametrize("same", [True, False])
def test_a_stream_that_was_overtaken(same):
    """Going on would continue from another text's cache."""
    language = Language(19)
    decoder = fake_decoder(language)
    session = decoder.session()
    stream = session.stream(PROMPT, max_new_tokens=40)
    next(stream)
    (session if same else decoder.session()).generate([7], max_new_tokens=3)
    with pytest.raises(DSparkError, match="another turn"):
        next(stream)
    late, last = session.stream([1], max_new_tokens=40), session.stream([2], max_new_tokens=2)
    assert len(list(last)) == 2
    with pytest.raises(DSparkError, match="another turn"):
        next(late)
    whole = list(session.tokens)
    assert session.generate([], max_new_tokens=9).token_ids == language.continuation(whole, 9)


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_stream_left_early(taken):
    language = Language(16)
    decoder = fake_decoder(language, right_for(language, lambda position: position % 3))
    session = decoder.session()
    stream = session.stream(PROMPT, max_new_tokens=40)
    got = [token for _ in range(taken) for token in next(stream).token_ids]
    stream.close()
    assert session.tokens == PROMPT + got == PROMPT + language.continuation(PROMPT, len(got))
    follow_up(decoder, session, language)


def test_a_limit_leaves_taps_for_the_next_turn():
    """The last round before a limit drafts nothing; its taps must still reach the drafter."""
    language = Language(17)
    decoder = fake_decoder(language)
    session = decoder.session()
    for size in (2, BLOCK + 3, 2):
        result = session.generate([1, 2], max_new_tokens=size)
        assert result.finish_reason == "length"
    follow_up(decoder, session, language)


def test_mask_is_an_ordinary_token_in_a_prompt():
    language = Language(18)
    assert fake_decoder(language).generate([MASK, 1], max_new_tokens=7).token_ids == language.continuation([MASK, 1], 7)
