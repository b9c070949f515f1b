"""The batch on tiny real pairs: mixed requests equal their runs alone on the engines for one request."""

import random

import numpy as np
import pytest
from pairs import PAIRS, keep_last_state_alone

from dspark.runtime import Decoder, load
from dspark.runtime.sampling import law_of
from dspark.runtime.schedule import SCHEDULERS
from dspark.runtime.throughput import SpsTable

SPS = SpsTable(tuple(range(1, 80)), tuple(100 / (10 + size + size // 4) for size in range(1, 80)), (0.02, 0.03))


def requests() -> list[tuple[list[int], dict]]:
    """8 prompts of different lengths, greedy and coupled, at different temperatures, filters and seeds."""
    rng = random.Random(11)
    options = [
        {},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9},
        {"mode": "plain"},
        {"temperature": 1.3, "seed": 3, "top_k": 20},
        {"repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 2, "request": 1, "min_p": 0.05},
        {"temperature": 0.4, "seed": 5, "mode": "plain"},
    ]
    lengths = [1, 40, 3, 17, 9, 150, 2, 5]
    return [
        (rng.choices(range(256), k=n), {**o, "max_new_tokens": 10 + 3 * i, "ignore_eos": True})
        for i, (n, o) in enumerate(zip(lengths, options, strict=True))
    ]


@pytest.fixture(scope="module")
def decoders(pairs):
    made = {}

    def pair(name: str) -> tuple[Decoder, Decoder, list]:
        """(of a batch, of one request, the answers alone)"""
        if name not in made:
            alone = load(pairs(name).bundle, threads=1)
            many = load(pairs(name).bundle, threads=1, max_batch_size=5)
            many.sps = SPS
            answers = [alone.generate(prompt, scheduler="off", **options) for prompt, options in requests()]
            made[name] = many, alone, answers
        return made[name]

    return pair


def check(decoder: Decoder, answers: list, name: str, **more) -> None:
    batch = decoder.batch(name, prefill=16, **more)
    found = [batch.submit(prompt, **options) for prompt, options in requests()]
    for (_, options), request, expected in zip(requests(), found, answers, strict=True):
        ours = request.result()
        assert ours.finish_reason == expected.finish_reason == "length"
        assert ours.token_ids == expected.token_ids, options


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("pair", [pair for pair, (_, _, confidence, *_) in PAIRS.items() if confidence != "off"])
def test_mixed_requests_equal_their_runs_alone(decoders, pair, name):
    many, _, answers = decoders(pair)
    check(many, answers, name, **({"confidence_threshold": 0.5} if name == "threshold" else {}))


@pytest.mark.parametrize("pair", PAIRS)
def test_with_a_fixed_schedule_acceptance_equals_that_of_the_run_alone(decoders, pair):
    many, _, answers = decoders(pair)
    batch = many.batch("off", prefill=16)
    found = [batch.submit(prompt, **options) for prompt, options in requests()]
    kept = 0
    for request, expected in zip(found, answers, strict=True):
        assert request.result().token_ids == expected.token_ids
        ours, theirs = request.result().stats, expected.stats
        assert (ours.rounds, ours.verified, ours.accepted) == (theirs.rounds, theirs.verified, theirs.accepted)
        assert ours.accepted_per_position == theirs.accepted_per_position
        kept += ours.accepted
    assert kept > 10, "there has to be something to compare"


@pytest.mark.parametrize("pair", ["qwen3-vanilla", "llama-rnn"])
def test_exact_requests_with_a_fixed_schedule_equal_their_runs_alone(decoders, pair):
    """Drawn drafts and accept decisions come from each request's own streams and rounds."""
    many, alone, _ = decoders(pair)
    batch = many.batch("off", prefill=16)
    options = [{"temperature": 1.0, "sampling": "exact", "seed": seed, "ignore_eos": True} for seed in range(6)]
    prompts = [prompt for prompt, _ in requests()]
    found = [batch.submit(p, max_new_tokens=20, **o) for p, o in zip(prompts, options, strict=False)]
    for prompt, request, asked in zip(prompts, found, options, strict=False):
        expected = alone.generate(prompt, max_new_tokens=20, scheduler="off", **asked)
        assert request.result().token_ids == expected.token_ids
        assert request.result().stats.accepted == expected.stats.accepted


def test_states_that_have_to_be_replayed(decoders, pairs, tmp_path):
    _, _, answers = decoders("hybrid")
    folder = keep_last_state_alone(pairs("hybrid").bundle, tmp_path / "bundle")
    batch = load(folder, threads=1, max_batch_size=5).batch("off", prefill=16)
    found = [batch.submit(prompt, **options) for prompt, options in requests()]
    results = [request.result() for request in found]
    assert [result.token_ids for result in results] == [answer.token_ids for answer in answers]
    assert sum(result.stats.replay_fallbacks for result in results) > 3


def test_log_probabilities_are_those_of_the_run_alone(decoders):
    many, alone, _ = decoders("qwen3-vanilla")
    prompts = [prompt for prompt, _ in requests()][:4]
    found = many.batch("off").generate(prompts, max_new_tokens=12, logprobs=3)
    for prompt, result in zip(prompts, found, strict=True):
        expected = alone.generate(prompt, max_new_tokens=12, logprobs=3)
        ours, theirs = ([entry.logprob for entry in g.logprobs] for g in (result, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_law_of_a_coupled_token_needs_no_neighbours(decoders):
    """The first token of a request in a full batch is the argmax of its own logits and its own noise."""
    from dspark.runtime.random import Streams
    from dspark.runtime.request import Options
    from dspark.runtime.verify import Draws

    many, alone, _ = decoders("qwen3-vanilla")
    batch = many.batch("off")
    asked = [(prompt, options) for prompt, options in requests() if options.get("temperature")]
    found = [batch.submit(prompt, **options) for prompt, options in asked]
    for (prompt, options), request in zip(asked, found, strict=True):
        law = law_of(alone.session().next_logits(prompt), Options(**options))
        streams = Streams(options["seed"], options.get("request", 0))
        assert request.result().token_ids[0] == Draws(streams).race(law, len(prompt))
