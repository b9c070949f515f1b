"""A target with recurrent layers: their state after a commit is that of plain decoding, whatever was verified."""

import functools
import json
import random

import numpy as np
import pytest
from pairs import keep_last_state_alone

from dspark.manifest import MANIFEST, read_manifest
from dspark.runtime import load
from dspark.runtime.bundle import open_bundle
from dspark.runtime.commit import commit
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.target import Target
from dspark.runtime.verify import Verdict

BLOCK = 7
VOCAB = 272
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
ROUNDS = 200


@pytest.fixture(scope="module")
def bundle(pairs):
    return pairs("hybrid").bundle


@pytest.fixture(scope="module")
def last_state_only(bundle, tmp_path_factory):
    return keep_last_state_alone(bundle, tmp_path_factory.mktemp("last") / "bundle")


@pytest.fixture(scope="module")
def text(bundle):
    """What plain decoding says after PROMPT, as far as the longest test goes."""
    options = {"mode": "plain", "max_new_tokens": 1 + ROUNDS * (BLOCK + 1), "ignore_eos": True}
    return PROMPT + load(bundle, threads=1).generate(PROMPT, **options).token_ids


@functools.cache
def engine_of(bundle, which):
    return OnnxRuntimeEngine(open_bundle(bundle), "target", 64, threads=1)


def target_of(bundle, which=0):
    """A new request on one of two engines, which hold whatever the tests before left there."""
    return Target(engine_of(bundle, which), 64)


def run(target, tokens, chunk=512):
    """Prefill or plain decoding: every token is committed."""
    for at in range(0, len(tokens), chunk):
        rows = tokens[at : at + chunk]
        logits = target.forward(rows, np.array([len(rows) - 1])).logits[-1].copy()
        target.commit(len(rows))
    return logits


def compare(ours, theirs):
    """States and committed cache rows, and what is said next."""
    assert ours.length == theirs.length
    for name, state in ours.engine.states.items():
        np.testing.assert_allclose(state, theirs.engine.states[name], atol=1e-5, err_msg=name)
    for name, cache in ours.engine.caches.items():
        rows = (slice(None), slice(None), slice(0, ours.length))
        np.testing.assert_allclose(cache[rows], theirs.engine.caches[name][rows], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(run(ours, [7]), run(theirs, [7]), atol=1e-4)


def test_what_the_manifest_says(bundle):
    graph = read_manifest(bundle).graph("target", "onnxruntime-cpu")
    states = {state.input: (state.output, state.shape, state.kind) for state in graph.states}
    assert states["delta_state.1"] == ("delta_state_out.1", (4, 8, 6), "recurrent")
    assert states["conv_state.0"] == ("conv_state_out.0", (3, 56), "recurrent")
    assert len(states) == 4 and len(graph.caches) == 2 and graph.slots == BLOCK + 1
    assert read_manifest(bundle).target.layers == 3
    assert not read_manifest(bundle).graph("drafter", "portable").states


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_state_after_a_commit(bundle, accepted):
    draw = np.random.default_rng(accepted)
    for verified in {accepted, BLOCK}:
        ours, theirs = target_of(bundle), target_of(bundle, 1)
        for target in (ours, theirs):
            run(target, PROMPT)
        block = draw.integers(VOCAB, size=verified + 1).tolist()
        taps = ours.forward(block, np.arange(verified + 1)).taps
        kept = commit(ours, Verdict(verified, accepted, 1, taps))
        assert kept.kind == ("full" if accepted == verified else "partial")
        run(theirs, block[: accepted + 1], chunk=1)
        compare(ours, theirs)


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_state_after_a_replay(bundle, last_state_only, accepted):
    ours, theirs = target_of(last_state_only), target_of(bundle)
    for target in (ours, theirs):
        run(target, PROMPT)
    block = np.random.default_rng(accepted).integers(VOCAB, size=BLOCK + 1).tolist()
    taps = ours.forward(block, np.arange(BLOCK + 1)).taps
    expected = taps[: accepted + 1].copy()
    kept = commit(ours, Verdict(BLOCK, accepted, 1, taps))
    assert kept.kind == ("full" if accepted == BLOCK else "replay")
    np.testing.assert_allclose(kept.taps, expected, atol=1e-5)
    run(theirs, block[: accepted + 1], chunk=1)
    compare(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_of_a_prompt(bundle, chunk):
    ours, theirs = target_of(bundle), target_of(bundle, 1)
    tokens = np.random.default_rng(chunk).integers(VOCAB, size=40).tolist()
    run(ours, tokens, chunk)
    run(theirs, tokens)
    compare(ours, theirs)


def test_nothing_of_an_earlier_request_is_read(bundle):
    target, fresh = target_of(bundle), target_of(bundle, 1)
    run(target, PROMPT)
    target.truncate(0)
    for part in (*target.engine.states.values(), *target.engine.caches.values()):
        part.fill(np.nan)
    for each in (target, fresh):
        run(each, [1, 2, 3])
    compare(target, fresh)


def test_a_run_that_nobody_keeps_changes_nothing(bundle):
    ours, theirs = target_of(bundle), target_of(bundle, 1)
    for target in (ours, theirs):
        run(target, PROMPT)
    ours.forward([1, 2, 3], np.arange(3))
    ours.engine.keep([0])
    ours.forward([4] * (BLOCK + 1), np.arange(2))
    compare(ours, theirs)


def test_states_cannot_be_truncated(bundle):
    target = target_of(bundle)
    run(target, PROMPT)
    target.truncate(len(PROMPT) + 3)
    assert target.length == len(PROMPT)
    target.truncate(len(PROMPT) - 1)
    assert target.length == 0


class Forced:
    """A drafter engine that knows the text, and is right for count(position of the anchor) tokens."""

    capacity, seconds, slots, most_rows = 10**6, 0.0, 0, None

    def __init__(self, inputs, text, count):
        self.inputs, self.text, self.count, self.owners = inputs, text, count, {}

    def run(self, inputs, fetch):
        positions = (inputs["positions"][0] + 1).tolist()
        right = self.count(positions[0] - 1)
        drafts = [(self.text[p] + (k >= right)) % VOCAB for k, p in enumerate(positions)]
        return {"draft_tokens": np.array([drafts])} if fetch else {}


class Counting:
    """A target engine whose runs are counted, as numbers of rows."""

    def __init__(self, real):
        self.real, self.runs = real, []

    def run(self, inputs, fetch):
        self.runs.append(len(inputs["tokens"]))
        return self.real.run(inputs, fetch)

    def __getattr__(self, name):
        return getattr(self.real, name)


def mixed(seed):
    draw = random.Random(seed)
    return lambda position: draw.randint(0, BLOCK)


PATTERNS = {"reject all": lambda: lambda position: 0, "accept all": lambda: lambda position: BLOCK}
PATTERNS |= {"mixed": lambda: mixed(1)}


def forced(bundle, text, count):
    decoder = load(bundle, threads=1)
    decoder.drafter_engine = Forced(decoder.drafter_engine.inputs, [*text, *[0] * BLOCK], count)
    decoder.target_engine = Counting(decoder.target_engine)
    return decoder


def generate(decoder, prompt=PROMPT, **options):
    rounds = []
    return decoder.generate(prompt, ignore_eos=True, on_round=rounds.append, **options), rounds


def rounds_within(count):
    """How many tokens ROUNDS rounds of a pattern emit after the prefill's one."""
    position = len(PROMPT)
    for _ in range(ROUNDS):
        position += count(position) + 1
    return position - len(PROMPT)


@pytest.mark.parametrize("name", PATTERNS)
def test_rounds_equal_plain_decoding(bundle, text, name):
    tokens = rounds_within(PATTERNS[name]())
    decoder = forced(bundle, text, PATTERNS[name]())
    result, rounds = generate(decoder, max_new_tokens=1 + tokens)
    assert PROMPT + result.token_ids == text[: len(PROMPT) + 1 + tokens]
    assert len(rounds) >= ROUNDS and decoder.target_engine.runs == [len(PROMPT)] + [r.verified + 1 for r in rounds]
    stats = result.stats
    assert stats.replay_fallbacks == 0 and stats.direct_full_commits + stats.direct_partial_commits == len(rounds)
    accepted = {r.accepted for r in rounds[: ROUNDS - 10]}
    assert accepted == {"reject all": {0}, "accept all": {BLOCK}, "mixed": set(range(BLOCK + 1))}[name]


@pytest.mark.parametrize("name", PATTERNS)
def test_replay_equals_plain_decoding(last_state_only, text, name):
    tokens = rounds_within(PATTERNS[name]())
    decoder = forced(last_state_only, text, PATTERNS[name]())
    result, rounds = generate(decoder, max_new_tokens=1 + tokens)
    assert PROMPT + result.token_ids == text[: len(PROMPT) + 1 + tokens]
    replays = [r for r in rounds if r.accepted < r.verified]
    assert {r.commit for r in replays} <= {"replay"} and result.stats.replay_fallbacks == len(replays)
    assert result.stats.direct_full_commits == len(rounds) - len(replays)
    runs = [[r.verified + 1] + [1] * (r.accepted + 1) * (r in replays) for r in rounds]
    assert decoder.target_engine.runs == [len(PROMPT)] + [rows for done in runs for rows in done]


def test_a_wrong_state_is_heard(bundle, text):
    """Or the tests above would say nothing."""
    decoder = forced(bundle, text, mixed(1))
    real = decoder.target_engine.real
    keep = real.keep
    real.keep = lambda rows: keep([max(n - 1, 1) if n <= BLOCK + 1 else n for n in rows])
    assert PROMPT + generate(decoder, max_new_tokens=60)[0].token_ids != text[: len(PROMPT) + 60]


def test_sessions_take_turns(bundle):
    """Long then short prompts on the same engines, then back to a session whose state is gone."""
    decoder, draw = load(bundle, threads=1), random.Random(0)
    first, second = decoder.session(), decoder.session()
    for session, size in ((first, 90), (second, 2), (first, 1), (second, 5)):
        prompt = draw.choices(range(VOCAB), k=size)
        whole = session.tokens + prompt
        continued = session.generate(prompt, max_new_tokens=20, ignore_eos=True)
        assert continued.token_ids == generate(load(bundle, threads=1), whole, max_new_tokens=20)[0].token_ids


def test_a_next_turn_runs_what_is_missing_alone(bundle):
    decoder = load(bundle, threads=1)
    decoder.target_engine = Counting(decoder.target_engine)
    session = decoder.session()
    session.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    missing, before = len(session.tokens) - session.target.length, len(decoder.target_engine.runs)
    session.generate([1, 2], max_new_tokens=3, ignore_eos=True)
    assert decoder.target_engine.runs[before] == missing + 2


@pytest.mark.parametrize("mode", ["plain", "speculative"])
def test_a_conversation_that_goes_back(bundle, mode):
    """Another answer in the history: the state runs from the beginning, and equals a fresh start's."""
    session = load(bundle, threads=1).session()
    options = {"max_new_tokens": 24, "mode": mode}
    messages = [{"role": "user", "content": "Name a prime number."}]
    session.generate(messages, **options)
    for answer in ("Seven.", "Nine. No, eleven."):
        messages = [messages[0], {"role": "assistant", "content": answer}, {"role": "user", "content": "Another?"}]
        continued, rounds, fresh_rounds = None, [], []
        continued = session.generate(messages, on_round=rounds.append, **options)
        fresh = load(bundle, threads=1).session().generate(messages, on_round=fresh_rounds.append, **options)
        assert continued.token_ids == fresh.token_ids
        assert [(r.drafts, r.accepted) for r in rounds] == [(r.drafts, r.accepted) for r in fresh_rounds]


def test_turns_of_both_modes(bundle):
    """After a plain turn the taps of its tokens are missing: all runs again, so that the context is whole."""
    session = load(bundle, threads=1).session()
    for mode in ("plain", "speculative", "plain", "speculative"):
        whole, rounds, fresh_rounds = [*session.tokens, 5, 6], [], []
        result = session.generate([5, 6], max_new_tokens=15, mode=mode, ignore_eos=True, on_round=rounds.append)
        fresh = load(bundle, threads=1).generate(
            whole, max_new_tokens=15, mode=mode, ignore_eos=True, on_round=fresh_rounds.append
        )
        assert result.token_ids == fresh.token_ids
        assert [(r.drafts, r.accepted) for r in rounds] == [(r.drafts, r.accepted) for r in fresh_rounds]


@pytest.mark.parametrize("left", [0, 1, BLOCK, BLOCK + 1])
def test_context_limit(bundle, text, left):
    decoder = load(bundle, threads=1, max_context_len=40)
    prompt = text[: 40 - left]
    result, _ = generate(decoder, prompt, max_new_tokens=100)
    assert result.finish_reason == "context" and result.token_ids == text[40 - left : 41]


def test_bundles_without_states_still_open(bundle, tmp_path):
    """Bundles of earlier versions do not have the field; they are those of targets without recurrent layers."""
    raw = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    for graph in raw["io"]:
        del graph["states"]
    (tmp_path / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")
    assert [graph.slots for graph in read_manifest(tmp_path).io] == [0] * 6
