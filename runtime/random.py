"""Random numbers of a request: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

A counter-based generator: every number is a function of the key and of a counter that says what it is for. So numbers
can be drawn in any order, on any machine, and nothing has to be carried along.

    key      k0, k1 = the low and the high 32 bits of the seed
    counter  c0 = index of the block of four words, c1 = position in the text (absolute, from 0: the prompt's first
             token), c2 = round within the generation (DRAFT alone, else 0), c3 = purpose * 2**24 + request

    gumbel   token v's noise, from word v % 4 of block v // 4: u = (word + 1/2) / 2**32, g = -log(-log(u))
    uniform  from words 0 and 1 of block 0: (word0 // 2**5 * 2**26 + word1 // 2**6) / 2**53, in [0, 1)

The purposes share no number. `position` is that of the token which is drawn or judged. A position is decided once, so
that needs no round; it may be drafted more than once, and a draft that reused its noise would no longer be independent
of a schedule that saw the earlier one. COUPLED is the noise that target and drafter share on purpose.
"""

import secrets
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError

TARGET, ACCEPT, DRAFT, COUPLED = range(4)  # purposes
MOST_REQUESTS = 2**24
MOST_GUMBEL = -float(np.log(-np.log1p(-(2.0**-33))))  # the largest noise there is

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_FEW = 12  # blocks that are made sooner one by one
_CHUNK = 8192  # blocks at a time: their buffers stay in the cache of a core


def fresh_seed() -> int:
    """A seed that nobody has used: 63 bits from the system."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class TokenBlocks:
    """Tokens int64 [n] whose noise is wanted again and again, and where it is found."""

    blocks: np.ndarray  # the blocks that have them
    owner: np.ndarray  # for every token: which of those blocks,
    word: np.ndarray  # and which of its words

    @classmethod
    def of(cls, tokens: np.ndarray) -> "TokenBlocks":
        blocks, owner = np.unique(tokens >> 2, return_inverse=True)
        return cls(blocks, owner, tokens & 3)


class Streams:
    """The random numbers of one request."""

    def __init__(self, seed: int, request: int = 0):
        """seed: 0 to 2**64 - 1. request: tells requests of one seed apart, 0 to 2**24 - 1. UsageError: out of range."""
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed {seed}: must be from 0 to 2**64 - 1")
        if not 0 <= request < MOST_REQUESTS:
            raise UsageError(f"request {request}: must be from 0 to {MOST_REQUESTS - 1}")
        self.seed = seed
        self.request = request
        self._key = (seed & _MASK, seed >> 32)

    def uniform(self, purpose: int, position: int) -> float:
        """One number in [0, 1), of 53 bits."""
        a, b, _, _ = philox((0, position, 0, self._what(purpose)), self._key)
        return ((a >> 5) * 2**26 + (b >> 6)) / 2**53

    def gumbel(self, purpose: int, position: int, tokens: int | TokenBlocks, round: int = 0) -> np.ndarray:
        """Standard Gumbel noise float64 [n] of the tokens 0..n-1, or of those in blocks."""
        if isinstance(tokens, TokenBlocks):
            words = self._words(purpose, position, round, tokens.blocks)[tokens.owner, tokens.word]
        else:
            words = self._words(purpose, position, round, np.arange(-(-tokens // 4))).reshape(-1)[:tokens]
        noise = (words + 0.5) * 2.0**-32
        for _ in range(2):
            np.log(noise, out=noise)
            np.negative(noise, out=noise)
        return noise

    def _words(self, purpose: int, position: int, round: int, blocks: np.ndarray) -> np.ndarray:
        return philox_blocks(blocks, (position, round, self._what(purpose)), self._key)

    def _what(self, purpose: int) -> int:
        return purpose << 24 | self.request


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block: four 32-bit words. In plain integers, since numpy takes longer for a single one."""
    (a, b, c, d), (x, y) = counter, key
    for _ in range(10):
        p, q = a * _M0, c * _M1
        a, b, c, d = q >> 32 ^ b ^ x, q & _MASK, p >> 32 ^ d ^ y, p & _MASK
        x, y = x + _W0 & _MASK, y + _W1 & _MASK
    return a, b, c, d


def philox_blocks(first: np.ndarray, rest: tuple[int, int, int], key: tuple[int, int]) -> np.ndarray:
    """The blocks of counters (first[i], *rest): uint32 [n, 4]."""
    if len(first) <= _FEW:
        return np.array([philox((counter, *rest), key) for counter in first.tolist()], np.uint32).reshape(-1, 4)
    words = np.empty((len(first), 4), np.uint32)
    for at in range(0, len(first), _CHUNK):
        words[at : at + _CHUNK] = _philox_chunk(first[at : at + _CHUNK].astype(np.uint64), rest, key)
    return words


def _philox_chunk(first: np.ndarray, rest: tuple[int, int, int], key: tuple[int, int]) -> np.ndarray:
    # Words 0 and 2, which are multiplied, are the rows of one array, words 1 and 3 those of another.
    even, odd = np.empty((2, len(first)), np.uint64), np.empty((2, len(first)), np.uint64)
    even[0], even[1] = first, rest[1]
    odd[0], odd[1] = rest[0], rest[2]
    products, factors = np.empty_like(even), np.array([[_M0], [_M1]], np.uint64)
    half, mask = np.uint64(32), np.uint64(_MASK)
    x, y = key
    for _ in range(10):
        np.multiply(even, factors, out=products)
        swapped = products[::-1]
        np.right_shift(swapped, half, out=even)
        even ^= odd
        even ^= np.array([[x], [y]], np.uint64)
        np.bitwise_and(swapped, mask, out=odd)
        x, y = x + _W0 & _MASK, y + _W1 & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=1)
