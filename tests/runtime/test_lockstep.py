"""The exported loop and a plain torch loop, round by round: drafts, confidences, counts, positions, lengths."""

import functools
import random

import builders
import pytest
from pairs import MORE_PAIRS, PAIRS

from dspark.runtime import load

BLOCKS = (1, 2, 5, 7)
SIZES = (1, 2, 200)
NEW_TOKENS = 17


@pytest.fixture(scope="module")
def loops(pairs):
    """loops(name) -> (the runtime's decoder, the eager loop's memoised generate) for a pair."""
    import torch
    from eager import EagerLoop

    torch.set_num_threads(1)  # such small matrices only lose by being shared out

    @functools.cache
    def make(name):
        pair = pairs(name)
        return load(pair.bundle, threads=1), functools.cache(EagerLoop(pair).generate)

    return make


def prompt_of(size: int) -> tuple[int, ...]:
    return tuple(random.Random(size).choices(range(256), k=size))


def compare(loops, name, size, block, chunk, threshold=0.0, stops=()):
    decoder, eager = loops(name)
    rounds, tokens = [], list(prompt_of(size))
    options = {"draft_len": block, "prefill_chunk": chunk, "ignore_eos": not stops, "read_confidence": True}
    if threshold:
        options["confidence_threshold"] = threshold
    result = decoder.generate(tokens, max_new_tokens=NEW_TOKENS, on_round=rounds.append, **options)
    expected, expected_rounds = eager(prompt_of(size), NEW_TOKENS, block, threshold, stops)
    drafter_length = 0 if size <= chunk else None  # in whole prefill the context waits for the first proposal
    for ours, theirs in zip(rounds, expected_rounds, strict=True):
        assert ours.drafts == theirs.drafts
        for field in ("anchor", "position", "verified", "accepted", "emitted", "target_length"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert (ours.confidences is None) == (theirs.confidences is None)
        if ours.confidences is not None:
            assert ours.confidences == pytest.approx(theirs.confidences, abs=1e-4)
        assert ours.drafter_length[0] == (ours.drafter_length[0] if drafter_length is None else drafter_length)
        drafter_length = ours.drafter_length[1]
        assert drafter_length == (ours.position if ours.drafts else ours.drafter_length[0])
    assert result.token_ids == expected
    return [r.accepted for r in rounds]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAIRS)
def test_lockstep(loops, name, size, block):
    for chunk in (3, 512):
        compare(loops, name, size, block, chunk)


@pytest.mark.parametrize("name", [name for name, (_, _, confidence, *_) in PAIRS.items() if confidence != "off"])
def test_lockstep_with_a_threshold(loops, name):
    for size in SIZES:
        compare(loops, name, size, 7, 512, threshold=0.45)


@pytest.mark.parametrize("name", PAIRS)
def test_lockstep_with_a_stop_token(loops, name):
    """A token that the text contains becomes the stop token of the bundle."""
    decoder, eager = loops(name)
    for size in SIZES:
        text = eager(prompt_of(size), NEW_TOKENS, 7, 0.0, ())[0]
        for index in (0, 3, 7):
            before, decoder.stops = decoder.stops, frozenset({text[index]})
            try:
                compare(loops, name, size, 7, 512, stops=(text[index],))
            finally:
                decoder.stops = before


def test_the_pair_accepts_none_some_and_all(loops):
    """Or the tests above would say nothing about rounds that accept."""
    accepted = [n for size in SIZES for n in compare(loops, "qwen3-vanilla", size, 5, 512)]
    assert {0, 5} <= set(accepted) and set(accepted) & {1, 2, 3, 4}


def test_stop_token_of_the_bundle(loops):
    assert loops("qwen3-vanilla")[0].stops == {builders.STOP_TOKEN}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", MORE_PAIRS)
def test_lockstep_of_every_pair(loops, name, block):
    for size in SIZES:
        for chunk in (1, 7, 512):
            compare(loops, name, size, block, chunk)
