"""Cancelling in every engine run of an answer, in every mode: nothing is half done, and the session goes on."""

import threading

import pytest
from answers import MODES, PROMPT, STOP_TEXT, Calm, PieceTokenizer, check_chunks
from fakes import Language, fake_decoder, right_for

BLOCK, NEW, CHUNK = 3, 14, 2


def make(language):
    decoder = fake_decoder(
        language, right_for(language, lambda position: (1, BLOCK, 0, 2)[position % 4]), block_size=BLOCK
    )
    decoder.tokenizer = PieceTokenizer()
    return decoder


def cancel_in_run(engine, cancel, at, ran, late):
    """`ran` collects the engines that run; number `at` of them cancels, before or after its run."""
    run = engine.run

    def wrapped(inputs, fetch):
        ran.append(engine)
        hit = len(ran) == at
        if hit and not late:
            cancel()
        result = run(inputs, fetch)
        if hit and late:
            cancel()
        return result

    engine.run = wrapped


def from_a_thread(cancel):
    def act():
        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join()

    return act


def counting():
    calls = []

    def process(tokens, logits):
        calls.append(list(tokens))
        return logits

    return process, calls


def cancelled_at(language, at, late, threaded, options):
    """(session, generation, calls of the logit processor, engines that ran); cancelled in engine run `at`."""
    decoder = make(language)
    session, ran = decoder.session(), []
    cancel = from_a_thread(session.cancel) if threaded else session.cancel
    engines = decoder.target_engine, decoder.drafter_engine
    for engine in engines:
        cancel_in_run(engine, cancel, at, ran, late)
    process, calls = counting()
    chunks = list(session.stream(PROMPT, logit_processors=[process], **options))
    check_chunks(chunks, options.get("stop", ()))
    for engine in engines:
        del engine.run
    return session, chunks[-1].generation, calls, ran


HOT = {
    "coupled, hot": {"temperature": 0.3, "sampling": "coupled"},
    "strict, hot": {"mode": "strict", "temperature": 0.3, "sampling": "coupled"},
    "plain, hot": {"mode": "plain", "temperature": 0.3},
}


@pytest.mark.parametrize("mode", [*MODES, *HOT])
def test_in_every_engine_run(mode):
    language = Language(1) if mode in HOT else Calm(1)
    options = {"max_new_tokens": NEW, "prefill_chunk": CHUNK, "seed": 5, "stop": [STOP_TEXT * 2]} | (MODES | HOT)[mode]
    whole = make(language).generate(PROMPT, **options)
    assert len(whole.token_ids) == NEW
    runs = cancelled_at(language, 0, False, False, options)[3]
    finishes = []
    for at in range(1, len(runs) + 1):
        session, result, calls, ran = cancelled_at(language, at, at % 3 == 0, at % 2 == 0, options)
        count = len(result.token_ids)
        assert result.token_ids == whole.token_ids[:count] and session.tokens == PROMPT + result.token_ids
        assert [len(seen) - len(PROMPT) for seen in calls] == list(range(count)), "advanced once per returned token"
        assert result.stats.emitted == count
        if not count:
            rows = sum(engine is session.target.engine for engine in ran) * CHUNK
            assert session.target.length == min(rows, len(PROMPT)), "whole chunks of the prompt"
        else:
            assert session.target.length == len(session.tokens) - 1
            s = result.stats
            assert s.emitted == 1 + s.accepted + s.rounds
        assert session.drafter.observed <= session.target.length
        if "strict" not in mode:  # there a round is finished: it has committed some of its tokens already
            done = sum(engine is session.target.engine for engine in ran[: at - 1]) - -(-len(PROMPT) // CHUNK)
            assert result.stats.rounds == max(done, 0), "the round that was cancelled decided nothing"
        finishes.append(result.finish_reason)
        if result.finish_reason == "length":
            assert count == NEW
            continue
        assert result.finish_reason == "cancelled" and count < NEW
        # The very next engine run would have been one too many, but for a prefill or a strict round that is finished.
        assert len(ran) == at or "strict" in mode
        rounds, rest = [], options | {"max_new_tokens": NEW - count}
        if at % 2:
            assert session.generate([], on_round=rounds.append, **rest).token_ids == whole.token_ids[count:]
        else:
            text = session.tokens + [9]
            assert session.generate([9], **rest).token_ids == make(language).generate(text, **rest).token_ids
    assert finishes.count("length") <= 1 + ("strict" in mode) * BLOCK, "only what the answer's last round was running"


@pytest.mark.parametrize("mode", ["speculative", "plain", "strict"])
def test_between_rounds(mode):
    language = Calm(2)
    for taken in range(5):
        session = make(language).session()
        stream, got = session.stream(PROMPT, mode=mode, max_new_tokens=NEW, prefill_chunk=CHUNK), []
        for _ in range(taken):
            got += next(stream).token_ids
        session.cancel()
        (last,) = list(stream)
        assert last.generation.finish_reason == "cancelled" and last.token_ids == [] and last.round is None
        assert last.generation.token_ids == got
        if not taken:
            assert session.target.length == 0 and session.tokens == PROMPT
        assert session.generate([], mode=mode, max_new_tokens=5).token_ids == language.continuation(PROMPT + got, 5)


def test_a_cancel_is_for_the_running_turn():
    """One that comes late does not end the next turn; twice is once."""
    language = Calm(3)
    session = make(language).session()
    session.cancel()
    assert session.generate(PROMPT, max_new_tokens=4).finish_reason == "length"
    session.cancel()
    session.cancel()
    assert session.generate([], max_new_tokens=4).token_ids == language.continuation(PROMPT, 8)[4:]


def test_a_cancelled_turn_keeps_its_log_probs_in_step():
    language = Calm(4)
    session = make(language).session()
    stream = session.stream(PROMPT, max_new_tokens=NEW, logprobs=1)
    for _ in range(3):
        next(stream)
    session.cancel()
    (last,) = list(stream)
    assert len(last.generation.logprobs) == len(last.generation.token_ids) > 2 and last.logprobs == []
