"""The law of a token, held against transformers' own processors in float64 and against plain definitions."""

import math
import re

import numpy as np
import pytest

from dspark.errors import DSparkError, UsageError
from dspark.runtime.random import COUPLED, Streams
from dspark.runtime.sampling import Law, Penalties, Sampling, greedy, largest, law_of, log_probs

EPS = 1e-12  # what a sum of float64 probabilities may be off by
SIZES = (1, 2, 3, 7, 63, 64, 65, 300, 3000)


def shapes(rng, size):
    """Logits float64 [size], by name."""
    normal = rng.normal(size=size)
    holes = np.where(rng.random(size) < 0.7, -np.inf, normal * 3)
    holes[rng.integers(size)] = 1.5
    return {
        "flat": np.full(size, rng.normal()),
        "nearly flat": normal * 1e-3,
        "normal": normal * 2 + 5,
        "peaky": normal * 20 - 100,
        "ties": np.round(normal),
        "holes": holes,
        "one": np.where(np.arange(size) == rng.integers(size), 0.0, -np.inf),
    }


def settings(rng, size):
    return Sampling(
        temperature=float(rng.choice([0.05, 0.3, 0.7, 1.0, 1.9, 50.0])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 40, size, size + 3])),
        top_p=float(rng.choice([1.0, 1.0, 0.999999, 0.95, 0.5, 0.1, 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0])),
    )


def reference(logits, sampling):
    """Probabilities float64 [V] by transformers' chain."""
    import torch
    from transformers.generation import logits_process as hf

    chain = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for warper in chain:
        scores = warper(None, scores)
    return scores.softmax(-1)[0].numpy()


def dense(law, size):
    assert law.tokens.dtype == np.int64 and law.p.dtype == np.float64
    assert np.all(np.diff(law.tokens) > 0) and law.p.sum() == pytest.approx(1, abs=EPS)
    p = np.zeros(size)
    p[law.tokens] = law.p
    return p


def same_law(ours, theirs, plain, tolerance):
    """Equal in value; of equally likely tokens at the edge of top-p others may be kept, but as many.

    Where the sum of the kept ones is top-p to within rounding, one more or one fewer may be: that is what False says.
    """
    if np.count_nonzero(ours) != np.count_nonzero(theirs):
        return False
    np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=tolerance, atol=1e-300)
    if len(np.unique(plain)) == len(plain):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-300)
    return True


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 2e-3)])
@pytest.mark.parametrize("size", SIZES)
def test_chain(size, dtype, tolerance):
    rng, edges, cases = np.random.default_rng(size), 0, 0
    for _ in range(9):
        for name, logits in shapes(rng, size).items():
            logits, sampling = logits.astype(dtype), settings(rng, size)
            before = logits.copy()
            ours = dense(law_of(logits, sampling), size)
            assert np.array_equal(logits, before), "the logits are the caller's"
            theirs = reference(logits, sampling)
            if not same_law(ours, theirs, logits, tolerance):
                assert sampling.top_p < 1 or sampling.min_p, (name, sampling)
                assert abs(np.count_nonzero(ours) - np.count_nonzero(theirs)) == 1, (name, sampling)
                edges += 1
            cases += 1
    assert edges <= cases * 0.06, "rounding decides seldom"


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
def test_each_filter_alone(field):
    """With distinct logits and no sum near its bound: the very same tokens."""
    rng = np.random.default_rng(1)
    values = {
        "temperature": (1e-3, 0.1, 1.0, 3.0, 1e6),
        "top_k": (1, 2, 17, 499, 500, 501, 10**9),
        "top_p": (1e-9, 0.1, 0.37, 0.9, 0.99999, 1.0),
        "min_p": (1e-9, 0.01, 0.3, 0.999, 1.0),
    }
    for value in values[field]:
        for spread in (0.1, 1.0, 8.0):
            logits = rng.normal(size=500) * spread
            sampling = Sampling(**{"temperature": 1.0, field: value})
            ours, theirs = dense(law_of(logits, sampling), 500), reference(logits, sampling)
            np.testing.assert_array_equal(ours > 0, theirs > 0)
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_large_vocabulary(dtype):
    rng, size = np.random.default_rng(2), 151_936
    for spread in (0.0, 1.0, 4.0):
        logits = (rng.normal(size=size) * spread).astype(dtype)
        for sampling in (
            Sampling(0.8, top_k=50, top_p=0.95, min_p=0.02),
            Sampling(1.0, top_p=0.9),
            Sampling(1.0, top_p=0.9999),
            Sampling(1.3, top_k=5000),
            Sampling(1.3, min_p=0.05),
        ):
            ours, theirs = dense(law_of(logits, sampling), size), reference(logits, sampling)
            # In float32 a few of 100,000 equally unlikely tokens may fall on the other side of the bound.
            slack = 0 if dtype == np.float64 else size // 10_000
            assert abs(np.count_nonzero(ours) - np.count_nonzero(theirs)) <= slack + (spread == 0)
            np.testing.assert_allclose(np.sort(ours)[-40:], np.sort(theirs)[-40:], rtol=1e-4)
            if not spread:
                assert law_of(logits, sampling).tokens.tolist() == list(range(np.count_nonzero(ours)))


def test_top_p_keeps_the_fewest_that_have_enough():
    """The definition itself, ties to the lower token."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        size, top_p = int(rng.integers(1, 40)), float(rng.uniform(0.001, 0.999))
        logits = np.round(rng.normal(size=size) * 2) if rng.random() < 0.5 else rng.normal(size=size)
        p = np.exp(logits) / np.exp(logits).sum()
        order = sorted(range(size), key=lambda token: (-logits[token], token))
        sums = [p[order[:n]].sum() for n in range(1, size + 1)]
        if min(abs(total - top_p) for total in sums) < EPS:
            continue
        fewest = next(n for n, total in enumerate(sums, 1) if total >= top_p)
        assert law_of(logits, Sampling(1.0, top_p=top_p)).tokens.tolist() == sorted(order[:fewest])


def test_top_k_keeps_ties_of_the_last():
    law = law_of(np.array([1.0, 3.0, 2.0, 2.0, 0.0, 2.0]), Sampling(1.0, top_k=2))
    assert law.tokens.tolist() == [1, 2, 3, 5]
    # min-p and top-p see what top-k left, and min-p measures by the likeliest.
    law = law_of(np.log([0.5, 0.25, 0.15, 0.1]), Sampling(1.0, top_k=2, top_p=0.6))
    assert law.tokens.tolist() == [0] and law.p.tolist() == [1]
    assert law_of(np.log([0.5, 0.25, 0.15, 0.1]), Sampling(1.0, min_p=0.31)).tokens.tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30])
def test_a_temperature_near_zero_is_greedy(temperature):
    for dtype in (np.float32, np.float64):
        law = law_of(np.array([30, 99, -7, 98], dtype), Sampling(temperature, top_p=0.9))
        assert law.of(1) == 1


BROKEN = {
    "NaN": [0.0, math.nan, 2.0],
    "all -inf": [-math.inf] * 3,
    "inf": [0.0, math.inf, 0.0],
    "all NaN": [math.nan] * 3,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", BROKEN)
def test_nothing_to_choose_from(name, dtype):
    logits = np.array(BROKEN[name], dtype)
    draw = [lambda: law_of(logits, Sampling(1.0, top_k=2, top_p=0.9, min_p=0.1)), lambda: law_of(logits, Sampling(1.0))]
    for choose in (lambda: greedy(logits), lambda: largest(logits), *draw):
        with pytest.raises(DSparkError, match="no token can be chosen; check the model and logit processors") as error:
            choose()
        assert "\n" not in str(error.value)


def test_greedy_is_the_first_of_the_largest():
    rng = np.random.default_rng(4)
    for size in SIZES:
        logits = rng.integers(0, 4, size).astype(np.float32)
        assert greedy(logits) == next(i for i, value in enumerate(logits) if value == max(logits))
    assert greedy(np.array([-np.inf, -5, -np.inf, -5], np.float32)) == 1


def some_law(rng, size):
    tokens = np.sort(rng.choice(10 * size, size, replace=False)) if rng.random() < 0.7 else np.arange(size)
    p = rng.random(size) * (rng.random(size) < 0.8)
    p[rng.integers(size)] += 0.1
    return Law(tokens, p / p.sum())


@pytest.mark.parametrize("size", [1, 2, 5, 200])
def test_law(size):
    rng = np.random.default_rng(size)
    for _ in range(60):
        law = some_law(rng, size)
        chances = dict(zip(law.tokens.tolist(), law.p.tolist(), strict=True))
        for token in range(-1, 10 * size + 1):
            assert law.of(token) == chances.get(token, 0.0)

        weights = rng.random(size) * rng.choice([0.1, 1.0, 5.0])
        left = [max(p - w, 0) for p, w in zip(law.p, weights, strict=True)]
        residual = law.without(weights)
        expected = np.array(left) / sum(left) if sum(left) > 0 else law.p
        assert residual.tokens.tolist() == law.tokens.tolist()
        np.testing.assert_allclose(residual.p, expected, atol=EPS)
        assert law.without(law.p).p.tolist() == law.p.tolist(), "nothing is left: the law itself"

        for uniform in [0.0, 1 - 2**-53, *rng.random(20)]:
            token = law.draw(uniform)
            assert law.of(token) > 0
            below = sum(p for t, p in chances.items() if t < token)
            assert below - EPS <= uniform <= below + chances[token] + EPS


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129, 3000])
def test_race(size):
    """The winner over all tokens, though noise is asked only for those that can win, and once for each."""
    rng, streams = np.random.default_rng(size), Streams(size)
    for case in range(100):
        law = some_law(rng, size)
        if case % 2:  # the likeliest far ahead, or noise that brings a straggler to the front
            p = law.p ** rng.choice([0.1, 4, 40])
            law = Law(law.tokens, p / p.sum())
        every, asked = streams.gumbel(COUPLED, case, int(law.tokens[-1]) + 1), []

        def noise(tokens, every=every, asked=asked):
            asked.extend(tokens.tolist())
            return every[tokens]

        scores = [math.log(p) + every[t] if p else -math.inf for t, p in zip(law.tokens, law.p, strict=True)]
        assert law.race(noise) == law.tokens[scores.index(max(scores))]
        assert len(set(asked)) == len(asked) and set(asked) <= set(law.tokens.tolist())


def test_draws_have_the_laws_frequencies():
    """Two ways to draw: an even grid of numbers through `draw`, and Gumbel noise through `race`."""
    law, rng, count = Law(np.array([2, 3, 7, 9]), np.array([0.5, 0.0, 0.125, 0.375])), np.random.default_rng(5), 8000
    for drawn in (
        [law.draw((i + 0.5) / count) for i in range(count)],
        [law.race(lambda tokens: rng.gumbel(size=len(tokens))) for _ in range(count)],
    ):
        shares = [drawn.count(token) / count for token in law.tokens]
        np.testing.assert_allclose(shares, law.p, atol=4 * math.sqrt(0.25 / count))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [*SIZES, 151_936])
def test_log_probs(size, dtype):
    import torch

    rng = np.random.default_rng(size)
    for name, logits in shapes(rng, size).items():
        logits = logits.astype(dtype)
        expected = torch.from_numpy(logits.astype(np.float64)).log_softmax(-1).numpy()
        for count in sorted({0, 1, min(5, size), min(size, 3000)}):
            token = int(rng.integers(size))
            ours = log_probs(logits, token, count)
            np.testing.assert_allclose(ours.logprob, expected[token], rtol=EPS, atol=EPS, err_msg=name)
            best = sorted(range(size), key=lambda i: (-expected[i], i))[:count] if size < 4000 else None
            assert len(ours.top) == count and (best is None or [i for i, _ in ours.top] == best), name
            np.testing.assert_allclose([p for _, p in ours.top], np.sort(expected)[::-1][:count], rtol=EPS, atol=EPS)
            assert all(math.isclose(p, expected[i], rel_tol=EPS, abs_tol=EPS) for i, p in ours.top[:50])


def plain_penalties(sampling, prompt, answer, logits):
    """One token after another, as the options describe it."""
    out = logits.astype(np.float64).copy()
    for token in range(len(out)):
        if token in prompt or token in answer:
            r = sampling.repetition_penalty
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        if token in answer:
            out[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_penalties(dtype):
    """Called again and again with the growing text, they give what one look at the whole text gives."""
    rng, size = np.random.default_rng(6), 30
    for _ in range(60):
        sampling = Sampling(
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.7, 5.0])),
            presence_penalty=float(rng.choice([0.0, 0.5, -0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.25, -1.0])),
        )
        prompt = rng.integers(0, size, rng.integers(1, 12)).tolist()
        tokens, process = list(prompt), Penalties(sampling, prompt)
        for _ in range(15):
            logits = rng.normal(size=size).astype(dtype) * 4
            logits[rng.integers(size, size=3)] = (0, -np.inf, 7)
            expected = plain_penalties(sampling, prompt, tokens[len(prompt) :], logits)
            ours = process(tokens, logits.copy())
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, expected, rtol=1e-6 if dtype == np.float32 else EPS, atol=1e-6)
            tokens.append(int(rng.integers(size)))


def test_repetition_penalty_is_that_of_transformers():
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    rng, size = np.random.default_rng(7), 50
    for penalty in (0.5, 1.0, 1.1, 2.0):
        for _ in range(40):
            tokens = rng.integers(0, size, rng.integers(1, 80)).tolist()
            cut = int(rng.integers(0, len(tokens)))
            logits = rng.normal(size=size) * 5
            process = Penalties(Sampling(repetition_penalty=penalty), tokens[:cut])
            theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), torch.from_numpy(logits)[None])
            np.testing.assert_allclose(process(tokens, logits.copy()), theirs[0].numpy(), rtol=EPS)


def test_penalties_are_wanted_only_where_they_change_something():
    assert not Penalties.wanted(Sampling(1.0, top_k=5, top_p=0.5, min_p=0.1))
    for field, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert Penalties.wanted(Sampling(**{field: value}))


GOOD = {
    "temperature": (0, 0.0, 1e-4, 1, 1e6),
    "top_k": (0, 1, 10**9),
    "top_p": (1e-9, 0.5, 1, 1.0),
    "min_p": (0, 0.5, 1),
    "repetition_penalty": (1e-6, 1, 2.5),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
}
BAD = {
    "temperature": (-1e-9, -1, 1e-9, 1e-5, 1e7),
    "top_k": (-1,),
    "top_p": (0, -0.1, 1.0001),
    "min_p": (-1e-9, 1.0001),
    "repetition_penalty": (0, -1.0),
    "presence_penalty": (),
    "frequency_penalty": (),
}


@pytest.mark.parametrize("field", GOOD)
def test_check(field):
    for value in GOOD[field]:
        Sampling(**{field: value}).check()
    for value in (*BAD[field], math.nan, math.inf, -math.inf):
        with pytest.raises(UsageError, match=re.escape(f"{field.replace('_', ' ')} {value:g}: must be")) as error:
            Sampling(**{field: value}).check()
        assert "\n" not in str(error.value)
