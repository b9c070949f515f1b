"""Mode strict: not even rounding tells it from plain decoding."""

import pytest

PROMPT = [80, 105, 32, 104, 101]
LAWS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "coupled": {"temperature": 0.8, "seed": 11, "sampling": "coupled"},
    "filters": {"temperature": 1.2, "seed": 12, "sampling": "coupled", "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}


@pytest.fixture(scope="module", params=["qwen3-vanilla", "llama-rnn"])
def decoder(request, pairs):
    from dspark.runtime import load

    return load(pairs(request.param).bundle, threads=1)


@pytest.mark.parametrize("name", LAWS)
def test_bit_for_bit(decoder, name):
    for prompt in (PROMPT, PROMPT * 20):
        options = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 5, **LAWS[name]}
        plain, strict = (decoder.generate(prompt, mode=mode, **options) for mode in ("plain", "strict"))
        assert strict.token_ids == plain.token_ids
        assert strict.logprobs == plain.logprobs
        s = strict.stats
        assert s.replay_fallbacks == s.rounds and s.direct_full_commits == s.direct_partial_commits == 0
        assert s.emitted == 1 + s.accepted + s.rounds and s.drafted > 0
        if name == "greedy":
            assert s.accepted > 0, "drafts were accepted, or this would be plain decoding"


@pytest.mark.parametrize("index", [3, 4, 7, 11])
def test_bit_for_bit_over_two_turns(decoder, index):
    """The first one ends at a stop token, which is an accepted draft or not: its row is run with the next turn's."""
    stop = decoder.generate(PROMPT, max_new_tokens=index + 1, mode="plain", ignore_eos=True).token_ids[index]
    turns = []
    for mode in ("plain", "strict"):
        session = decoder.session()
        options = {"mode": mode, "ignore_eos": True, "logprobs": 3}
        first = session.generate(PROMPT, max_new_tokens=40, stop_token_ids=[stop], **options)
        assert first.finish_reason == "stop"
        second = session.generate([5, 6, 7], max_new_tokens=20, **options)
        turns.append((first.token_ids, first.logprobs, second.token_ids, second.logprobs))
    assert turns[0] == turns[1]


def test_rows_one_at_a_time(decoder):
    """Every run of the target after the prefill has one row; a speculative run has more."""
    run, rows = decoder.target_engine.run, []

    def counted(inputs, fetch):
        rows.append(len(inputs["tokens"]))
        return run(inputs, fetch)

    decoder.target_engine.run = counted
    try:
        strict = decoder.generate(PROMPT, max_new_tokens=20, mode="strict", ignore_eos=True)
        assert rows == [len(PROMPT)] + [1] * (len(strict.token_ids) - 1)
        rows.clear()
        decoder.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
        assert max(rows[1:]) > 1
    finally:
        decoder.target_engine.run = run


def test_rounds_say_how_they_were_committed(decoder):
    rounds = []
    decoder.generate(PROMPT, max_new_tokens=20, mode="strict", ignore_eos=True, on_round=rounds.append)
    assert {done.commit for done in rounds} == {"replay"}
    for done in rounds:
        assert done.target_length[1] == done.target_length[0] + done.accepted + 1
