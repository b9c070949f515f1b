"""The batch on fakes that check every call: what each request gets is what it gets alone, whatever the others do."""

import random
import threading
import time

import numpy as np
import pytest
from fakes import STOPS, VOCAB, Language, fake_decoder, right_for

from dspark.errors import DSparkError, UsageError
from dspark.runtime import Decoder, QueueFull
from dspark.runtime.schedule import SCHEDULERS
from dspark.runtime.throughput import SpsTable

LANGUAGE = Language(3)
PLACES = 3


def uneven(at: int) -> int:
    """How many drafts are right behind an anchor at this position: 0, some and all of 5."""
    return (0, 3, 5, 1, 4)[at % 5]


def confidence(drafts: list[int]) -> list[float]:
    return [0.5 + (token * 7 + k) % 10 / 20 for k, token in enumerate(drafts)]


def make(requests: int = PLACES, language: Language = LANGUAGE, **more) -> Decoder:
    decoder = fake_decoder(language, right_for(language, uneven), confidence=confidence, requests=requests, **more)
    decoder.sps = SpsTable((1, 2, 3, 6, 9, 12, 18, 90), (10.0, 9.9, 9.8, 9.0, 8.0, 6.0, 4.0, 1.0), (0.01, 0.015, 0.02))
    return decoder


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB - 4), k=rng.choice((1, 2, 5, 30, 90))) for _ in range(count)]


def threshold(name: str) -> dict:
    return {"confidence_threshold": 0.7} if name == "threshold" else {}


# -- the same as alone ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_request_equals_its_run_alone(name, requests):
    decoder, alone = make(requests), make(1)
    batch, prompts = decoder.batch(name, **threshold(name)), some_prompts(12)
    found = [batch.submit(prompt, max_new_tokens=8 + i) for i, prompt in enumerate(prompts)]
    for i, (prompt, request) in enumerate(zip(prompts, found, strict=True)):
        expected = alone.generate(prompt, max_new_tokens=8 + i, scheduler="off")
        assert request.result().token_ids == expected.token_ids == LANGUAGE.continuation(prompt, 8 + i)
        assert request.result().finish_reason == "length"


@pytest.mark.parametrize("name", ["off", "threshold"])
def test_with_a_fixed_schedule_so_does_its_acceptance(name):
    decoder, alone = make(), make(1)
    prompts, options = some_prompts(9), threshold(name)
    for prompt, found in zip(prompts, decoder.batch(name, **options).generate(prompts, max_new_tokens=25), strict=True):
        ours, theirs = found.stats, alone.generate(prompt, max_new_tokens=25, scheduler=name, **options).stats
        for counted in ("rounds", "drafted", "verified", "accepted", "accepted_per_position", "verified_per_position"):
            assert getattr(ours, counted) == getattr(theirs, counted), counted
        assert (
            ours.target_steps == ours.rounds and ours.direct_full_commits + ours.direct_partial_commits == ours.rounds
        )


def test_rows_of_a_step_accept_none_some_and_all():
    language, counts = Language(5), {0: 0, 1: 3, 2: 5}
    decoder = fake_decoder(language, right_for(language, lambda at: counts[at % 3]), requests=3)
    batch = decoder.batch("off")
    requests = [batch.submit([7] * (1 + r), max_new_tokens=30) for r in range(3)]
    for _ in range(2):
        batch.step()
    assert sorted(request.answer.stats.accepted for request in requests) == [0, 3, 5]


def test_plain_requests_run_beside_others():
    decoder = make()
    batch = decoder.batch("off")
    plain, drafted = (batch.submit([1, 2, 3], mode=mode, max_new_tokens=20) for mode in ("plain", "speculative"))
    assert plain.result().token_ids == drafted.result().token_ids
    assert plain.result().stats.drafted == 0 and plain.result().stats.rounds == 19
    assert drafted.result().stats.accepted > 0


def test_stop_tokens_and_limits_end_requests_one_by_one():
    prompt = [5, 6]
    language = Language(3, planted={12: STOPS[0]})
    decoder, alone = make(language=language, limit=30), make(1, language, limit=30)
    batch = decoder.batch("off")
    requests = [
        batch.submit(prompt, max_new_tokens=50),
        batch.submit(prompt, max_new_tokens=50, ignore_eos=True),
        batch.submit(prompt, max_new_tokens=4),
        batch.submit(prompt, max_new_tokens=50, ignore_eos=True, stop_token_ids=language.continuation(prompt, 7)[-1:]),
    ]
    results = [request.result() for request in requests]
    assert [result.finish_reason for result in results] == ["stop", "context", "length", "stop"]
    assert results[0].token_ids == alone.generate(prompt, max_new_tokens=50).token_ids
    assert results[1].token_ids == alone.generate(prompt, max_new_tokens=50, ignore_eos=True).token_ids


def test_a_place_that_was_used_starts_clean():
    """One place after another request's long and short text; the fakes check every row of every context."""
    decoder, prompts = make(1), some_prompts(15, seed=2)
    batch = decoder.batch("off")
    for prompt in prompts:
        assert batch.submit(prompt, max_new_tokens=9).result().token_ids == LANGUAGE.continuation(prompt, 9)


# -- queue, order, fairness -------------------------------------------------------------------------------------------
def test_the_queue_has_an_end():
    decoder = make(2)
    batch = decoder.batch("off", max_queue=3)
    requests = [batch.submit([1, 2], max_new_tokens=5) for _ in range(5)]  # two places are free
    with pytest.raises(QueueFull, match="5 requests wait already and 0 run: try again later.*max_queue"):
        batch.submit([1, 2])
    batch.step()
    assert (batch.running, batch.waiting) == (2, 3)
    with pytest.raises(QueueFull, match="3 requests wait already and 2 run"):
        batch.submit([1, 2])
    assert all(request.result().finish_reason == "length" for request in requests)
    assert not batch.step() and (batch.running, batch.waiting) == (0, 0)
    assert len(batch.generate([[1, 2]] * 20, max_new_tokens=3)) == 20, "it waits for room in the queue"


def test_who_comes_first_is_admitted_first():
    batch, order = make(2).batch("off"), []
    requests = [batch.submit([1, 2, r], max_new_tokens=2 + r, deliver=lambda _, r=r: order.append(r)) for r in range(6)]
    while batch.step():
        pass
    first = list(dict.fromkeys(order))
    assert first == list(range(6)) and all(request.generation is not None for request in requests)


def test_a_long_prompt_holds_up_no_short_one():
    decoder = make(3)
    batch = decoder.batch("off", prefill=12)
    long, short, running = [1] * 150, [2] * 6, batch.submit([3], max_new_tokens=60)
    batch.step()
    requests = [batch.submit(prompt, max_new_tokens=5) for prompt in (long, short)]
    batch.step()
    assert requests[1].answer.token_ids and not requests[0].answer.token_ids, "6 of the 12 tokens are the short one's"
    steps = 1
    while not requests[0].answer.token_ids:
        before = len(running.answer.token_ids)
        batch.step()
        steps += 1
        assert len(running.answer.token_ids) > before, "decoding goes on beside"
    assert steps == 1 + (150 - 6 + 11) // 12
    assert requests[0].result().token_ids == LANGUAGE.continuation(long, 5)


def test_prompts_alone_are_read_in_large_pieces():
    decoder = make(2, limit=2000)
    batch = decoder.batch("off")
    assert batch.submit([1] * 1100, max_new_tokens=1).result().token_ids == LANGUAGE.continuation([1] * 1100, 1)
    assert decoder.target_engine.runs == [512, 512, 76]


# -- endings from outside ---------------------------------------------------------------------------------------------
def test_cancelling():
    batch = make(2).batch("off")
    running, other, waiting = (batch.submit([1, r], max_new_tokens=60) for r in range(3))
    batch.step()
    batch.step()
    had = list(running.answer.token_ids)
    for request in (running, waiting):
        request.cancel()
    assert running.result().finish_reason == waiting.result().finish_reason == "cancelled"
    assert running.result().token_ids == had and waiting.result().token_ids == []
    assert other.result().token_ids == LANGUAGE.continuation([1, 1], 60)
    assert batch.submit([9], max_new_tokens=3).result().token_ids == LANGUAGE.continuation([9], 3)


def test_a_cancel_within_a_step_comes_before_it_decides():
    decoder = make(2)
    batch, run = decoder.batch("off"), decoder.target_engine.run
    one, two = (batch.submit([1, r], max_new_tokens=20) for r in range(2))
    batch.step()
    before = list(one.answer.token_ids)
    decoder.target_engine.run = lambda inputs, fetch: (one.cancel(), run(inputs, fetch))[1]
    batch.step()
    assert one.answer.token_ids == before and len(two.answer.token_ids) > 1
    assert one.result().finish_reason == "cancelled" and two.result().finish_reason == "length"


def test_deadlines():
    batch = make(1).batch("off")
    late, waiting = (batch.submit([1], max_new_tokens=100, timeout=seconds) for seconds in (30, 1e-9))
    batch.step()
    assert waiting.generation.finish_reason == "deadline" and waiting.generation.token_ids == []
    late._deadline = time.monotonic()
    batch.step()
    assert late.generation.finish_reason == "deadline" and len(late.generation.token_ids) >= 1
    for timeout in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="timeout .*seconds above 0"):
            batch.submit([1], timeout=timeout)


def test_closing_ends_all():
    batch = make(2).batch("off")
    requests = [batch.submit([1, r]) for r in range(4)]
    batch.step()
    batch.close()
    assert [request.generation.finish_reason for request in requests] == ["cancelled"] * 4
    assert not batch.step()


# -- faults -----------------------------------------------------------------------------------------------------------
def test_a_processor_that_fails_ends_its_own_request():
    def fails(tokens, logits):
        if len(tokens) > 6:
            raise RuntimeError("no more")
        return logits

    batch = make(2).batch("off")
    bad, good = (batch.submit([1, 2], max_new_tokens=20, logit_processors=p) for p in ([fails], []))
    assert bad.result().finish_reason == "error" and bad.result().error == "no more"
    assert bad.result().token_ids == LANGUAGE.continuation([1, 2], len(bad.result().token_ids))
    assert good.result().token_ids == LANGUAGE.continuation([1, 2], 20)
    assert batch.counters.finished == {"error": 1, "length": 1}


def test_a_target_that_fails_ends_what_is_in_its_step():
    decoder = make(2)
    batch, run, runs = decoder.batch("off"), decoder.target_engine.run, []

    def fails_once(inputs, fetch):
        runs.append(1)
        if len(runs) == 3:
            raise DSparkError("the target is broken")
        return run(inputs, fetch)

    decoder.target_engine.run = fails_once
    one, two, later = (batch.submit([1, r], max_new_tokens=30) for r in range(3))
    assert [request.result().finish_reason for request in (one, two, later)] == ["error", "error", "length"]
    assert one.result().error == "the target is broken"
    assert one.result().token_ids == LANGUAGE.continuation([1, 0], len(one.result().token_ids))
    assert later.result().token_ids == LANGUAGE.continuation([1, 2], 30)


def test_an_interrupted_step_ends_what_is_in_it():
    decoder = make(1)
    batch, run = decoder.batch("off"), decoder.target_engine.run

    def interrupted(inputs, fetch):
        raise KeyboardInterrupt

    one, two = (batch.submit([1, r], max_new_tokens=5) for r in range(2))
    decoder.target_engine.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    decoder.target_engine.run = run
    assert one.generation.finish_reason == "error" and one.generation.error == "interrupted"
    assert two.result().token_ids == LANGUAGE.continuation([1, 1], 5)


@pytest.mark.parametrize("kind", ["crash", "NaN confidence", "NaN logits", "token"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_drafter_that_breaks_costs_speed_alone(kind, at, caplog):
    decoder = make(3)
    batch, run, runs = decoder.batch("threshold", confidence_threshold=0.1), decoder.drafter_engine.run, []

    def breaks(inputs, fetch):
        runs.append(1)
        if len(runs) == at and kind == "crash":
            raise RuntimeError("out of memory")
        outputs = run(inputs, fetch)
        if len(runs) == at:
            name = {"NaN confidence": "confidence", "NaN logits": "draft_logits", "token": "draft_tokens"}[kind]
            outputs[name][1] = -1 if kind == "token" else np.nan
        return outputs

    decoder.drafter_engine.run = breaks
    options = {"temperature": 1.0, "sampling": "exact", "seed": 3, "ignore_eos": True} if kind == "NaN logits" else {}
    requests = [batch.submit([1, r], max_new_tokens=30, **options) for r in range(3)]
    broken = {0, 1, 2} if kind == "crash" else {1}
    for r, request in enumerate(requests):
        result = request.result()
        assert result.finish_reason == "length" and result.stats.drafter_failures == (r in broken)
        if not options:
            assert result.token_ids == LANGUAGE.continuation([1, r], 30)
        assert (result.stats.rounds > 20) == (r in broken) or options, "plain decoding from there on"
    assert batch.counters.drafter_failures == len(broken)
    assert caplog.text.count("goes on without drafts") == len(broken)


def test_a_session_that_takes_the_engines_is_told_of():
    decoder = make(2)
    batch = decoder.batch("off")
    request = batch.submit([1, 2], max_new_tokens=30)
    batch.step()
    decoder.generate([4, 5], max_new_tokens=5)
    assert request.result().finish_reason == "error" and "batch or session" in request.result().error
    assert batch.submit([1, 2], max_new_tokens=5).result().token_ids == LANGUAGE.continuation([1, 2], 5)


def test_making_a_batch_and_an_idle_step_take_nothing_from_others():
    decoder = make(2)
    batch = decoder.batch("off")
    request = batch.submit([1, 2], max_new_tokens=20)
    batch.step()
    assert not decoder.batch("off").step()
    assert request.result().token_ids == LANGUAGE.continuation([1, 2], 20)
    stream = decoder.stream([1, 2], max_new_tokens=20)
    next(stream)
    assert not batch.step() and sum(len(chunk.token_ids) for chunk in stream) == 19


def test_a_reader_that_interrupts_ends_what_is_in_the_step():
    """Also with the last chunk of its request, when that has already left its place."""
    for last in (False, True):
        decoder = make(3)
        batch = decoder.batch("off", max_queue=9)

        def interrupts(chunk, last=last):
            if (chunk.generation is not None) == last:
                raise KeyboardInterrupt

        bad = batch.submit([1, 2], max_new_tokens=3, deliver=interrupts)
        others = [batch.submit([1, r], max_new_tokens=30) for r in range(3, 8)]
        with pytest.raises(KeyboardInterrupt):
            while batch.step():
                pass
        assert bad.generation is not None
        assert [other.generation.finish_reason for other in others[:2]] == ["error"] * 2
        assert [other.result().token_ids for other in others[2:]] == [
            LANGUAGE.continuation([1, r], 30) for r in range(5, 8)
        ]
        assert sorted(batch._free) == [0, 1, 2]


def test_a_reader_must_not_step_or_close():
    batch = make(2).batch("off")
    for act in (batch.step, batch.close):
        bad = batch.submit([1, 2], max_new_tokens=20, deliver=lambda _, act=act: act())
        good = batch.submit([1, 3], max_new_tokens=20)
        assert good.result().token_ids == LANGUAGE.continuation([1, 3], 20)
        assert bad.generation.finish_reason == "cancelled"


def test_the_text_of_a_request_that_failed_is_that_of_its_tokens(tmp_path):
    """A round has decided more when it fails than it returns."""

    class Letters:
        has_chat_template = False

        def decode(self, ids):
            return "".join(chr(97 + token) for token in ids)

    def fails(tokens, logits):
        if len(tokens) == 7:
            raise RuntimeError("no more")
        return logits

    decoder = fake_decoder(LANGUAGE, requests=2)
    decoder.tokenizer = Letters()
    result = decoder.batch("off").submit([1, 2], max_new_tokens=20, logit_processors=[fails]).result()
    assert result.finish_reason == "error" and result.token_ids == LANGUAGE.continuation([1, 2], 1)
    assert result.text == Letters().decode(result.token_ids)


def test_one_prompt_that_is_refused_leaves_none_of_the_others():
    batch = make(1).batch("off")
    with pytest.raises(UsageError, match="token 99"):
        batch.generate([[1], [2], [99]], max_new_tokens=5)
    assert not batch.step() and batch.counters.finished == {"cancelled": 2}


def test_exact_requests_that_share_their_random_numbers():
    """A schedule by all confidences would tell of each other's drafts: refused, and numbered by `generate`."""
    options = {"temperature": 1.0, "sampling": "exact", "seed": 3, "max_new_tokens": 4}
    for name in SCHEDULERS[:-1]:
        batch = make(2).batch(name, **threshold(name))
        first = batch.submit([1], **options)
        if name.startswith("throughput"):
            with pytest.raises(UsageError, match="seed 3: another exact request.*request 0"):
                batch.submit([2], **options)
        else:
            batch.submit([2], **options)
        batch.submit([2], request=1, **options)
        first.result()
        assert len(batch.generate([[1]] * 3, request=5, **options)) == 3
    streams = {request.answer.options.request for request in _submitted(make(2).batch("off"), options)}
    assert streams == {5, 6, 7}


def _submitted(batch, options) -> list:
    found, submit = [], batch.submit
    batch.submit = lambda *given, **more: found.append(submit(*given, **more)) or found[-1]
    batch.generate([[1]] * 3, request=5, **options)
    return found


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "off"}, "scheduler: is the batch's"),
        ({"confidence_threshold": 0.5}, "confidence threshold: is the batch's"),
        ({"draft_len": 2}, "draft len: is the batch's"),
        ({"prefill_chunk": 2}, "prefill chunk: is the batch's"),
        ({"mode": "strict"}, "mode strict: a batch has none"),
        ({"mode": "fast"}, "mode 'fast'"),
        ({"max_new_tokens": 0}, "max new tokens 0"),
        ({"warmth": 1}, "option 'warmth'"),
        ({"timeout": "5"}, "timeout '5': must be a number"),
        ({"timeout": True}, "timeout True: must be a number"),
        ({"deliver": 3}, "deliver 3: must be a function"),
        ({"stop_token_ids": [1.5]}, "stop token 1.5: must be an integer"),
        ({"logit_processors": [3]}, "logit processor 3: must be a function"),
    ],
)
def test_bad_options(options, message):
    batch = make().batch("off")
    with pytest.raises(UsageError, match=message):
        batch.submit([1], **options)
    assert not batch.step()


def test_bad_prompts_and_batches():
    decoder = make()
    batch = decoder.batch("off")
    for prompt, message in (
        ([], "the prompt is empty"),
        ([1] * 201, "context limit"),
        ([99], "token 99 at index 0"),
        ([1.7], "token 1.7: must be an integer"),
        (["a"], "token 'a': must be an integer"),
        (5, "int: give text, token ids or chat messages"),
    ):
        with pytest.raises(UsageError, match=message):
            batch.submit(prompt)
    for options, message in (
        ({"draft_len": 9}, "draft length 9"),
        ({"draft_len": 2.5}, "draft len 2.5: must be an integer"),
        ({"prefill": float("nan")}, "prefill nan: must be an integer"),
        ({"max_queue": None}, "max queue None: must be an integer"),
        ({"confidence_threshold": "0.5"}, "confidence threshold '0.5': must be a number"),
        ({"max_queue": -1}, "max queue -1"),
        ({"prefill": 0}, "prefill 0"),
        ({"scheduler": "fastest"}, "scheduler 'fastest'"),
    ):
        with pytest.raises(UsageError, match=message):
            decoder.batch(**options)
    with pytest.raises(UsageError, match="throughput-global with sampling exact"):
        decoder.batch("throughput-global").submit([1], temperature=1.0, sampling="exact")


def test_one_prompt_where_many_belong():
    batch = make().batch("off")
    for prompts in ("some text", [1, 2, 3], [{"role": "user", "content": "hi"}]):
        with pytest.raises(UsageError, match="this is one prompt; give a list"):
            batch.generate(prompts)
    for prompt, message in ((b"hi", "bytes: give text"), ([{"role": "user", "content": "hi"}, "more"], "beside")):
        with pytest.raises(UsageError, match=message):
            batch.submit(prompt)


def test_the_default_scheduler():
    decoder = make()
    assert type(decoder.batch().scheduler).__name__ == "Throughput"
    decoder.sps = None
    assert type(decoder.batch().scheduler).__name__ == "Threshold"
    assert type(fake_decoder(LANGUAGE, has_confidence=False).batch().scheduler).__name__ == "FullBlock"


# -- streaming --------------------------------------------------------------------------------------------------------
def test_chunks_make_the_answer():
    batch = make(2).batch("off")
    one, two = (batch.submit([1, r], max_new_tokens=20) for r in range(2))
    chunks = list(one)
    assert [t for chunk in chunks for t in chunk.token_ids] == one.generation.token_ids
    assert chunks[-1].generation is one.generation and all(chunk.generation is None for chunk in chunks[:-1])
    assert chunks[0].round is None and all(chunk.round.emitted == chunk.token_ids for chunk in chunks[1:])
    assert [t for chunk in two for t in chunk.token_ids] == two.generation.token_ids


def test_a_reader_that_fails_ends_its_own_request():
    def fails(chunk):
        raise OSError("gone")

    batch = make(2).batch("off")
    bad, good = batch.submit([1, 2], max_new_tokens=20, deliver=fails), batch.submit([1, 3], max_new_tokens=20)
    assert good.result().token_ids == LANGUAGE.continuation([1, 3], 20)
    assert bad.generation.finish_reason == "cancelled"


def test_threads_share_a_batch():
    batch, found = make(3).batch("off"), {}

    def ask(r):
        found[r] = batch.submit([1, r], max_new_tokens=15).result().token_ids

    threads = [threading.Thread(target=ask, args=(r,)) for r in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {r: LANGUAGE.continuation([1, r], 15) for r in range(10)}


def test_one_step_is_one_run_of_each_engine():
    decoder = make(3)
    batch = decoder.batch("off")
    batch.generate(some_prompts(6), max_new_tokens=20)
    assert len(decoder.target_engine.runs) == batch.counters.steps
    assert len(decoder.drafter_engine.context_runs) <= batch.counters.steps
    assert batch.counters.rounds > 1.5 * batch.counters.steps
