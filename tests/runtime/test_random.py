"""Random numbers to the bit, and streams that share none of them."""

import math

import numpy as np
import pytest

from dspark.errors import UsageError
from dspark.runtime.random import (
    ACCEPT,
    COUPLED,
    DRAFT,
    MOST_GUMBEL,
    TARGET,
    Streams,
    TokenBlocks,
    fresh_seed,
    philox,
    philox_blocks,
)

# The known answers that the generator's authors publish for philox4x32, 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter, key, words):
    assert philox(counter, key) == words
    assert philox_blocks(np.array(counter[:1]), counter[1:], key).tolist() == [list(words)]


def test_many_blocks_equal_single_ones():
    first = np.array([0, 1, 5000, 9999, 2**32 - 1])
    many = philox_blocks(np.arange(10_000), (3, 4, 5), (6, 7))
    assert many[[0, 1, 5000, 9999]].tolist() == [list(philox((i, 3, 4, 5), (6, 7))) for i in first[:4].tolist()]
    assert philox_blocks(first, (3, 4, 5), (6, 7))[4].tolist() == list(philox((2**32 - 1, 3, 4, 5), (6, 7)))


def test_numbers_as_documented():
    streams = Streams(0x0123456789ABCDEF, request=77)
    key = (0x89ABCDEF, 0x01234567)
    a, b, _, _ = philox((0, 12, 0, (ACCEPT << 24) + 77), key)
    assert streams.uniform(ACCEPT, 12) == (a // 2**5 * 2**26 + b // 2**6) / 2**53
    noise = streams.gumbel(DRAFT, 12, 7, round=9)
    words = [word for block in (0, 1) for word in philox((block, 12, 9, (DRAFT << 24) + 77), key)]
    expected = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words[:7]]
    np.testing.assert_allclose(noise, expected, rtol=1e-14)


def test_noise_of_some_tokens_is_that_of_all():
    streams, tokens = Streams(5), np.array([0, 3, 40_000, 4, 11, 4095, 99_998])
    some, every = streams.gumbel(COUPLED, 3, TokenBlocks.of(tokens)), streams.gumbel(COUPLED, 3, 100_000)
    assert some.tolist() == every[tokens].tolist()


def test_largest_noise():
    assert -math.log(-math.log1p(-(2.0**-33))) == pytest.approx(MOST_GUMBEL, abs=1e-12)
    u = (np.array([2**32 - 1], np.uint32) + 0.5) * 2.0**-32
    assert -np.log(-np.log(u)) <= MOST_GUMBEL + 1e-9


def test_no_two_draws_share_a_number():
    seen = set()
    for seed in (1, 2):
        for request in (0, 1):
            streams = Streams(seed, request)
            for position in (0, 1, 2**20):
                draws = [streams.uniform(purpose, position) for purpose in (TARGET, ACCEPT)]
                draws += streams.gumbel(COUPLED, position, 8).tolist()
                for done in (0, 1, 2):
                    draws += streams.gumbel(DRAFT, position, 8, done).tolist()
                assert seen.isdisjoint(draws) and len(set(draws)) == len(draws)
                seen.update(draws)


def test_uniform_and_gumbel_laws():
    streams = Streams(3)
    uniform = np.array([streams.uniform(TARGET, position) for position in range(20_000)])
    noise = np.concatenate([streams.gumbel(COUPLED, position, 20_000) for position in range(5)])
    for values, law in ((uniform, lambda x: x), (noise, lambda x: np.exp(-np.exp(-x)))):
        ordered = law(np.sort(values))  # Kolmogorov and Smirnov's distance, 1.95 / sqrt(n) at a chance of 1 in 1,000
        distance = np.abs(ordered - (np.arange(len(values)) + 0.5) / len(values)).max()
        assert distance < 1.95 / math.sqrt(len(values))


def test_out_of_range():
    for seed in (-1, 2**64):
        with pytest.raises(UsageError, match="seed"):
            Streams(seed)
    with pytest.raises(UsageError, match="request 16777216"):
        Streams(0, 2**24)
    assert fresh_seed() != fresh_seed()
