"""Which drafts have an outcome, and what it is: against what the fake target would have said."""

import numpy as np
import pytest
from fakes import STOPS, Language, fake_decoder, right_for

from dspark.errors import UsageError
from dspark.runtime.loop import Round
from dspark.tools.measure import Prompt
from dspark.tools.outcomes import collect, join, outcomes, sample, split

BLOCK = 5


def decoder_for(language, stop_at=None):
    """Right for 0, 1, 2, .. drafts in turn; at `stop_at` a stop token is drafted, rightly or not."""
    policy = right_for(language, lambda position: position % (BLOCK + 1))

    def drafts(prefix, size):
        found = policy(prefix, size)
        at = None if stop_at is None else stop_at - len(prefix)
        if at is not None and 0 <= at < size:
            found[at] = STOPS[0]
        return found

    return fake_decoder(
        language, drafts, block_size=BLOCK, confidence=lambda drafts: [(d + 1) / (k + 50) for k, d in enumerate(drafts)]
    )


@pytest.mark.parametrize("limit", range(2, 14))
@pytest.mark.parametrize("stop_at", [None, 6, 9])
@pytest.mark.parametrize("is_stop", [False, True])
def test_an_outcome_is_what_the_target_would_say(limit, stop_at, is_stop):
    language = Language(limit, {stop_at: STOPS[0]} if stop_at and is_stop else None)
    decoder, rounds = decoder_for(language, stop_at), []
    decoder.generate([1, 2], max_new_tokens=limit, read_confidence=True, on_round=rounds.append)
    rounds = [done for done in rounds if done.drafts]
    (found,) = collect(decoder, [Prompt("a", "text", [1, 2])], limit)
    assert len(found) == len(rounds)
    text = [1, 2, *language.continuation([1, 2], 60)]
    for done, known, accepted, confidence in zip(rounds, found.known, found.accepted, found.confidence, strict=True):
        following = text[done.position + 1 :][: len(done.drafts)]
        right = [a == b for a, b in zip(done.drafts, following, strict=True)]
        for k in range(known):
            assert (accepted > k) == all(right[: k + 1])
        stops = [k + 1 for k, token in enumerate(done.drafts) if token in STOPS]
        left = limit - (done.position - 2 + 1) - 1  # tokens that may follow the anchor, but for the extra one
        assert known == min([BLOCK, left, *stops[:1]])
        assert confidence.tolist() == done.confidences


def test_drafts_behind_an_end_that_was_accepted_have_none():
    """A stop text that ends within an accepted draft: the target saw more drafts, nobody judged them."""
    numbers = dict.fromkeys(("draft_ms", "verify_ms", "total_ms", "engine_ms"), 0.0)
    numbers |= {"commit": "partial", "target_steps": 1, "target_length": (3, 5), "drafter_length": (2, 3)}

    def done(verified, accepted, emitted, drafts=(5, 6, 7)):
        confidences = [0.5] * len(drafts) if drafts else None
        return Round(4, 3, list(drafts), confidences, verified, accepted, emitted, **numbers)

    ended, whole, empty = done(3, 2, [5, 6]), done(3, 2, [5, 6, 9]), done(0, 0, [9], ())
    found = outcomes([ended, whole, empty], 3)
    assert found.known.tolist() == [2, 3] and found.accepted.tolist() == [2, 2]
    assert len(outcomes([empty], 3)) == 0 and outcomes([], 3).confidence.shape == (0, 3)


def test_rounds_are_joined_and_counted():
    decoder, calls = decoder_for(Language(1)), []
    prompts = [Prompt(str(i), "text", [1, i]) for i in range(3)]
    parts = collect(decoder, prompts, 20, progress=lambda *counts: calls.append(counts))
    whole = join(parts)
    assert calls[-1] == (3, len(whole)) and len(whole) == sum(map(len, parts))
    assert whole.confidence.shape == (len(whole), BLOCK)
    np.testing.assert_array_equal(whole.accepted[: len(parts[0])], parts[0].accepted)


def test_drawn_rounds_differ_from_prompt_to_prompt_and_repeat():
    decoder = decoder_for(Language(1))
    prompts = [Prompt(str(i), "text", [1, 2]) for i in range(2)]
    first, second = (collect(decoder, prompts, 40, temperature=2.0) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.confidence, b.confidence)
    assert first[0].confidence.tolist() != first[1].confidence.tolist()


def test_prompts_are_split_and_never_rounds():
    prompts = list("abcdefghij")
    fitted, held_out = split(prompts, 0.3, 0)
    assert len(held_out) == 3 and sorted(fitted + held_out) == prompts
    assert split(prompts, 0.3, 0) == (fitted, held_out) != split(prompts, 0.3, 1)
    for fraction, count in ((0.001, 1), (0.999, 9)):
        assert len(split(prompts, fraction, 0)[1]) == count
    for fraction in (0, 1, -1, float("nan")):
        with pytest.raises(UsageError, match="--holdout"):
            split(prompts, fraction, 0)
    with pytest.raises(UsageError, match="two prompts"):
        split(["a"], 0.5, 0)


def test_samples_are_drawn_by_the_seed():
    assert sample("abc", None, 0) == sample("abc", 5, 0) == ["a", "b", "c"]
    drawn = sample(range(100), 10, 0)
    assert len(drawn) == 10 == len(set(drawn)) and drawn == sorted(drawn) != list(range(10))
    assert drawn == sample(range(100), 10, 0) != sample(range(100), 10, 1)
