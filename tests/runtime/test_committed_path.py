"""Penalties, logit processors and log-probabilities follow the committed path alone."""

import numpy as np
import pytest
from answers import MODES, PROMPT, Calm
from fakes import VOCAB, FakeTarget, Language, fake_decoder, right_for

from dspark.errors import DSparkError, UsageError

BLOCK, NEW = 4, 40
GREEDY = {name: MODES[name] for name in ("greedy", "plain", "strict")}
HOT = {
    "coupled": {"sampling": "coupled"},
    "coupled argmax": {"sampling": "coupled", "draft_temperature": 0.0},
    "exact": {"sampling": "exact", "scheduler": "off"},
    "exact gated": {"sampling": "exact"},
    "exact argmax": {"sampling": "exact", "draft_temperature": 0.0},
    "opportunistic": {"sampling": "opportunistic"},
    "plain": {"mode": "plain"},
    "strict": {"mode": "strict"},
    "strict exact": {"mode": "strict", "sampling": "exact"},
}
PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.4},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "encouraged": {"repetition_penalty": 0.8, "presence_penalty": -0.3},
}


class Rich(FakeTarget):
    """A fake target with a whole law in its logits: a hash of the prefix in each."""

    def run(self, inputs, fetch):
        outputs = super().run(inputs, fetch)
        length = int(inputs["length"][0])
        for i, row in enumerate(inputs["logit_rows"]):
            prefix = self.cache[: length + row + 1]
            noise = np.random.default_rng(self.language.hash(prefix)).normal(size=VOCAB)
            outputs["logits"][i] = noise + 1.5 * outputs["logits"][i]
        return outputs


def rich_decoder(language, count=lambda position: position % (BLOCK + 1)):
    decoder = fake_decoder(language, right_for(language, count), block_size=BLOCK)
    decoder.target_engine = Rich(language, decoder.target_engine.capacity)
    return decoder


def plain_greedy(language, sampling, count):
    """Greedy decoding with penalties, spelled out: tokens and log-probabilities by the model's own logits."""
    target, tokens, logprobs = Rich(language, 200), list(PROMPT), []
    for _ in range(count):
        inputs = {
            "tokens": np.array(tokens),
            "positions": np.arange(len(tokens)),
            "row_start": np.array([0, len(tokens)], np.int32),
            "length": np.zeros(1, np.int32),
            "pages": np.zeros((1, 1), np.int32),
            "logit_rows": np.array([len(tokens) - 1]),
        }
        raw = target.run(inputs, ("logits",))["logits"][0].astype(np.float64)
        logits, answer = raw.copy(), tokens[len(PROMPT) :]
        for token in set(tokens):
            rate = sampling.get("repetition_penalty", 1)
            logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
            if token in answer:
                logits[token] -= sampling.get("presence_penalty", 0)
                logits[token] -= sampling.get("frequency_penalty", 0) * answer.count(token)
        tokens.append(int(logits.argmax()))
        logprobs.append(raw[tokens[-1]] - np.log(np.exp(raw).sum()))
    return tokens[len(PROMPT) :], logprobs


@pytest.mark.parametrize("mode", GREEDY)
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_on_a_fake_pair(name, mode):
    for seed in range(4):
        language, options = Language(seed), {**PENALTIES[name], **GREEDY[mode], "ignore_eos": True, "logprobs": 3}
        result = rich_decoder(language).generate(PROMPT, max_new_tokens=NEW, **options)
        tokens, logprobs = plain_greedy(language, PENALTIES[name], NEW)
        assert result.token_ids == tokens
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(logprobs, abs=1e-9)
        assert all(len(entry.top) == 3 and entry.top[0][1] >= entry.logprob for entry in result.logprobs)
        if mode != "plain":
            assert 0 < result.stats.accepted < result.stats.verified
        unpenalised = rich_decoder(language).generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        assert result.token_ids != unpenalised.token_ids


@pytest.mark.parametrize("mode", HOT)
def test_log_probs_come_with_their_tokens(mode):
    """In chunks as in the whole, one for every token, of the raw logits; the same whatever the filters."""
    language = Language(5)
    options = {"temperature": 0.5, "seed": 3, "top_k": 12, "ignore_eos": True, **HOT[mode], "max_new_tokens": NEW}
    session = rich_decoder(language).session()
    chunks = list(session.stream(PROMPT, logprobs=2, presence_penalty=0.4, **options))
    result = chunks[-1].generation
    assert [entry for chunk in chunks for entry in chunk.logprobs] == result.logprobs
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    session = rich_decoder(language).session()
    for i, entry in enumerate(result.logprobs):
        raw = session.next_logits(PROMPT if i == 0 else result.token_ids[i - 1 : i]).astype(np.float64)
        expected = raw - np.log(np.exp(raw).sum())
        assert entry.logprob == pytest.approx(expected[result.token_ids[i]], abs=1e-9)
        assert [token for token, _ in entry.top] == np.argsort(-expected)[:2].tolist()
    assert rich_decoder(language).generate(PROMPT, **options).logprobs is None
    assert "logprobs" in result.to_json() and len(result.to_json()["logprobs"]) == NEW


class NotAgain:
    """Forbids the token of `ago` calls ago, and keeps what it was shown."""

    def __init__(self, ago=3):
        self.ago, self.seen = ago, []

    def __call__(self, tokens, logits):
        self.seen.append(list(tokens))
        if len(self.seen) > self.ago:
            logits[self.seen[-self.ago][-1]] = -np.inf
        return logits


@pytest.mark.parametrize("mode", HOT)
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_logit_processor_sees_the_committed_path(mode, temperature):
    """Once per returned token, in order, whatever was drafted and rejected; after the penalties."""
    accepted = 0
    for seed in range(4):
        language = Language(seed)
        process, second = NotAgain(), NotAgain(10**9)
        options = {"temperature": temperature, "seed": seed, **HOT[mode], "ignore_eos": True, "max_new_tokens": NEW}
        options |= {"frequency_penalty": 0.3, "logit_processors": [process, second]}
        result = rich_decoder(language).generate(PROMPT, **options)
        path = PROMPT + result.token_ids
        assert process.seen == second.seen == [path[: len(PROMPT) + i] for i in range(NEW)]
        for i in range(3, NEW):
            assert path[len(PROMPT) + i] != path[len(PROMPT) + i - 3]
        accepted += result.stats.accepted
        if temperature == 0 or mode in ("coupled", "coupled argmax", "strict"):
            options |= {"mode": "plain", "logit_processors": [NotAgain()]}
            assert rich_decoder(language).generate(PROMPT, **options).token_ids == result.token_ids
    assert accepted > 0 or mode == "plain"


BLIND = {"seed": 5, "ignore_eos": True}  # nothing ends the answer by chance


@pytest.mark.parametrize("mode", MODES)
def test_a_processor_gets_penalised_logits(mode):
    penalised = []

    def look(tokens, logits):
        penalised.append(set(np.flatnonzero(logits < -50).tolist()) == set(tokens[len(PROMPT) :]))
        return logits

    fake_decoder(Calm(8)).generate(
        PROMPT, max_new_tokens=12, presence_penalty=100.0, logit_processors=[look], **BLIND, **MODES[mode]
    )
    assert penalised == [True] * 12


@pytest.mark.parametrize("mode", MODES)
def test_a_processor_that_writes_in_place_does_not_touch_the_log_probs(mode):
    """Nor the engine's buffers; and it may return a new array."""
    language = Calm(6)

    def only_seven(tokens, logits):
        logits[:] = -np.inf
        logits[7] = 0
        return logits.astype(np.float64)

    result = fake_decoder(language).generate(
        PROMPT, max_new_tokens=12, logprobs=0, logit_processors=[only_seven], **BLIND, **MODES[mode]
    )
    assert result.token_ids == [7] * 12
    assert all(-5 < entry.logprob < -2 and entry.top == [] for entry in result.logprobs)


@pytest.mark.parametrize("mode", ["speculative", "plain", "strict"])
def test_a_processor_that_forbids_everything(mode):
    """The turn fails in mid-round, and the session goes on from what was returned."""
    language = Calm(7)
    for size in range(len(PROMPT) + 1, len(PROMPT) + 12):

        def broken(tokens, logits, size=size):
            return logits - np.inf if len(tokens) == size else logits

        session = fake_decoder(language).session()
        with pytest.raises(DSparkError, match="no token can be chosen"):
            session.generate(PROMPT, max_new_tokens=20, mode=mode, logit_processors=[broken])
        returned = session.tokens[len(PROMPT) :]
        assert len(session.tokens) <= size and returned == language.continuation(PROMPT, len(returned))
        assert session.target.length < len(session.tokens), "what was not returned is not kept"
        more = session.generate([], max_new_tokens=6, mode=mode)
        assert more.token_ids == language.continuation(PROMPT + returned, 6)


@pytest.mark.parametrize("pair", ["qwen3-vanilla", "llama-rnn"])
def test_greedy_on_an_exported_pair(pairs, pair):
    """Speculative, plain and strict: token for token, and log-probability for log-probability."""
    from dspark.runtime import load

    decoder = load(pairs(pair).bundle, threads=1)
    for name, penalties in {"none": {}, **PENALTIES}.items():
        results, seen = {}, {}
        for mode in ("speculative", "plain", "strict"):
            process = NotAgain()
            options = {"logit_processors": [process], "logprobs": 4, "ignore_eos": True, **penalties}
            results[mode] = decoder.generate([80, 105, 32], max_new_tokens=32, mode=mode, **options)
            seen[mode] = process.seen
        plain = results["plain"]
        for mode in ("speculative", "strict"):
            assert results[mode].token_ids == plain.token_ids, (name, mode)
            assert seen[mode] == seen["plain"]
            for ours, theirs in zip(results[mode].logprobs, plain.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)
        if name == "none":
            assert results["speculative"].stats.accepted > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda tokens, logits: logits[:10], r"returned float32 \[10\]: it must return the logits, floats \[40\]"),
        (lambda tokens, logits: None, "returned NoneType"),
        (lambda tokens, logits: logits.astype(int), r"returned int64 \[40\]"),
        (lambda tokens, logits: logits.tolist(), "returned list"),
    ],
)
def test_a_processor_that_returns_no_logits(wrong, words):
    with pytest.raises(UsageError, match=words):
        fake_decoder(Calm(9)).generate(PROMPT, max_new_tokens=5, logit_processors=[wrong])
