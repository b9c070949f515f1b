"""Sampling on the demo pair (marker slow: exporting it takes a minute, and the rest some more)."""

import warnings

import numpy as np
import pytest
from proposing import proposing

from dspark.export.build import Options, export_bundle
from dspark.export.demo import demo_drafter, demo_target
from dspark.runtime import load

pytestmark = pytest.mark.slow

NEW = 40
QUESTION = [{"role": "user", "content": "Write a Python function that checks whether a list contains duplicates."}]
FILTERS = ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "bundle"
    export_bundle(Options(demo_drafter(), str(demo_target()), folder), lambda stage: None)
    return folder


@pytest.fixture(scope="module")
def decoder(bundle):
    return load(bundle)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_coupled_is_plain_sampling(decoder, temperature):
    """Every block length, gate on and off; the pair's drafter, a random one, and one that is always right."""
    prompt, rng = decoder.encode(QUESTION), np.random.default_rng(0)
    anything = proposing(decoder, lambda first, count: rng.integers(0, 49_152, count).tolist())
    near_ties = 0
    for seed, filters in enumerate(FILTERS):
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": NEW, "ignore_eos": True, **filters}
        plain = decoder.generate(prompt, mode="plain", **options).token_ids
        text = [*prompt, *plain, *[0] * 8]
        oracle = proposing(decoder, lambda first, count, text=text: text[first : first + count])
        for block in range(1, 8):
            for kind in (decoder, anything, oracle):
                made = kind.generate(prompt, draft_len=block, confidence_threshold=0.8 * (block % 2), **options)
                if made.token_ids != plain:
                    near_ties += 1
                    warnings.warn(f"T {temperature}, {filters}, block {block}: another text", stacklevel=1)
                elif kind is oracle:
                    assert made.stats.accepted == made.stats.verified
    assert near_ties == 0, "none was met when this was written; look at the gap before this is loosened"


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_a_conversation_of_three_turns(bundle, decoder, rule):
    """Continuing the session equals starting fresh from the same tokens, temperature 0.8."""
    other, session = load(bundle), decoder.session()
    options = {"temperature": 0.8, "sampling": rule, "max_new_tokens": NEW}
    turns = [
        decoder.encode(QUESTION),
        "<|im_end|>\n<|im_start|>user\nNow without a set.<|im_end|>\n<|im_start|>assistant\n",
    ]
    turns.append(
        "<|im_end|>\n<|im_start|>user\nThank you! What is its running time?<|im_end|>\n<|im_start|>assistant\n"
    )
    for seed, turn in enumerate(turns):
        added = turn if seed == 0 else decoder.encode(turn, first=False)
        whole, ours, theirs = [*session.tokens, *added], [], []
        made = session.generate(added, seed=seed, on_round=ours.append, **options)
        fresh = other.generate(whole, seed=seed, on_round=theirs.append, **options)
        assert made.token_ids == fresh.token_ids
        assert [(r.drafts, r.accepted) for r in ours] == [(r.drafts, r.accepted) for r in theirs]
        assert sum(r.accepted for r in ours) > 0
