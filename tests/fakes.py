"""A target and a drafter in plain Python that check every call they get.

The fake target's next token is a hash of the WHOLE prefix that its cache holds, so one wrong row, position or length
changes all text after it. Its taps spell out token, position and prefix hash; the fake drafter checks them, and knows
from them what the target will say.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from dspark import manifest as m
from dspark.runtime import Decoder

VOCAB = 40
STOPS = (38, 39)  # never said by hash, only where planted
MASK = 37
TAP_WIDTH = 3


class Language:
    """What the target says: a hash of the prefix, except at planted positions {index in the sequence: token}."""

    def __init__(self, seed: int = 0, planted: dict[int, int] | None = None):
        self.seed = seed
        self.planted = planted or {}

    def hash(self, prefix: Sequence[int]) -> int:
        return zlib.crc32(np.array([self.seed, *prefix], np.int64).tobytes()) % 2**20

    def next(self, prefix: Sequence[int]) -> int:
        return self.planted.get(len(prefix), self.hash(prefix) % MASK)

    def continuation(self, prefix: Sequence[int], count: int) -> list[int]:
        prefix = list(prefix)
        for _ in range(count):
            prefix.append(self.next(prefix))
        return prefix[len(prefix) - count :]


class FakeTarget:
    """An Engine. Rows of the caches hold tokens; None is a row that nobody wrote."""

    most_rows: int | None = None
    slots = 0

    def __init__(self, language: Language, capacity: int, requests: int = 1):
        self.language = language
        self.requests = requests
        self.capacity = capacity
        self.owners: dict[int, object] = {}
        self.seconds = 0.0
        self.caches: list[list[int | None]] = [[None] * capacity for _ in range(requests)]  # by place
        self.cache = self.caches[0]
        self.runs: list[int] = []  # rows of every run
        self._results: list[np.ndarray] = []

    def run(self, inputs, fetch):
        tokens, lengths, starts = inputs["tokens"], inputs["length"], inputs["row_start"].tolist()
        rows, count = len(tokens), len(lengths)
        check(inputs["tokens"], np.int64, (rows,))
        check(inputs["positions"], np.int64, (rows,))
        check(inputs["row_start"], np.int32, (count + 1,))
        check(inputs["length"], np.int32, (count,))
        check(inputs["pages"], np.int32, (count, 1))
        check(inputs["logit_rows"], np.int64, (len(inputs["logit_rows"]),))
        places = inputs["pages"][:, 0].tolist()
        assert len(set(places)) == count and max(places) < self.requests, "a place for every request"
        assert starts[0] == 0 and starts[-1] == rows and min(np.diff(starts)) >= 1, "rows of every request"
        prefixes = []  # of every row, its own token included
        for place, length, first, end in zip(places, lengths.tolist(), starts, starts[1:], strict=False):
            cache, last = self.caches[place], length + end - first
            assert last <= self.capacity, "rows beyond the cache"
            assert inputs["positions"][first:end].tolist() == list(range(length, last)), "positions follow the cache"
            assert None not in cache[:length], "a committed row was never written"
            cache[length:last] = tokens[first:end].tolist()
            prefixes += [cache[: at + 1] for at in range(length, last)]
        logits = np.zeros((len(inputs["logit_rows"]), VOCAB), np.float32)
        for i, row in enumerate(inputs["logit_rows"]):
            logits[i, self.language.next(prefixes[row])] = 1
        taps = [(prefix[-1], len(prefix) - 1, self.language.hash(prefix)) for prefix in prefixes]
        self.runs.append(rows)
        # Results of earlier runs are void: poison them, so that whoever kept one without copying is found out.
        for old in self._results:
            old.fill(np.nan)
        results = {"logits": logits, "taps": np.array(taps, np.float32)}
        self._results = list(results.values())
        return {name: results[name] for name in fetch}

    def keep(self, rows):
        assert all(count >= 0 for count in rows), "rows that the last run did not have"


Policy = Callable[[Sequence[int], int], list[int]]  # (prefix with the anchor, count) -> drafts


class FakeDrafter:
    """An Engine that proposes by a policy. Its block rows poison the cache rows after the context, as real ones may."""

    def __init__(
        self,
        language: Language,
        capacity: int,
        policy: Policy,
        confidence: Callable | None = None,
        requests: int = 1,
    ):
        self.language = language
        self.inputs = {
            "taps": m.Tensor("taps", "float32", ("Tc", TAP_WIDTH)),
            "noise": m.Tensor("noise", "float32", ("R", "G", VOCAB)),
        }
        self.requests = requests
        self.capacity = capacity
        self.owners: dict[int, object] = {}
        self.policy = policy
        self.confidence = confidence  # (drafts) -> values
        self.seconds = 0.0
        self.caches: list[list[tuple | None]] = [[None] * capacity for _ in range(requests)]  # by place
        self.cache = self.caches[0]
        self.context_runs: list[int] = []  # context rows of every run
        self.fetched: list[tuple] = []

    def run(self, inputs, fetch):
        count, size = inputs["tokens"].shape
        rows, starts = len(inputs["taps"]), inputs["context_start"].tolist()
        check(inputs["tokens"], np.int64, (count, size))
        check(inputs["positions"], np.int64, (count, size))
        check(inputs["taps"], np.float32, (rows, TAP_WIDTH))
        check(inputs["context_positions"], np.int64, (rows,))
        check(inputs["context_start"], np.int32, (count + 1,))
        check(inputs["length"], np.int32, (count,))
        check(inputs["pages"], np.int32, (count, 1))
        check(inputs["temperature"], np.float32, (count,))
        assert ("noise" in inputs) == bool((inputs["temperature"] > 0).any()), "noise is for drawn drafts alone"
        places = inputs["pages"][:, 0].tolist()
        assert len(set(places)) == count and max(places) < self.requests, "a place for every request"
        assert inputs["row_start"].tolist() == [size * r for r in range(count + 1)]
        assert starts[0] == 0 and starts[-1] == rows and min(np.diff(starts)) >= 1, "context of every request"
        drafts = [
            self._draft(inputs, r, place, slice(*starts[r : r + 2]), "draft_tokens" in fetch)
            for r, place in enumerate(places)
        ]
        self.context_runs.append(rows)
        self.fetched.append(tuple(fetch))
        if "draft_tokens" not in fetch:
            return {}
        confidence = [[1.0] * size if self.confidence is None else self.confidence(each) for each in drafts]
        results = {"draft_tokens": np.array(drafts), "confidence": np.array(confidence, np.float32)}
        results["draft_logits"] = np.eye(VOCAB, dtype=np.float32)[np.array(drafts)]
        return {name: results[name] for name in fetch}

    def _draft(self, inputs, request: int, place: int, context: slice, wanted: bool) -> list[int]:
        block, positions = inputs["tokens"][request].tolist(), inputs["positions"][request].tolist()
        cache, size, length = self.caches[place], len(block), int(inputs["length"][request])
        end = length + context.stop - context.start
        assert end + 2 * size <= self.capacity, "rows beyond the cache"
        assert inputs["context_positions"][context].tolist() == list(range(length, end)), "context positions"
        assert positions == list(range(end, end + size)), "block positions"
        cache[length:end] = [tuple(row) for row in inputs["taps"][context].tolist()]
        cache[end : end + 2 * size] = [None] * (2 * size)
        assert None not in cache[:end], "a context row was never written"
        tokens = [int(row[0]) for row in cache[:end]]
        for position, row in enumerate(cache[:end]):
            expected = (tokens[position], position, self.language.hash(tokens[: position + 1]))
            assert row == expected, f"context row {position} holds the taps of another token"
        if not wanted:
            return []
        assert block[1:] == [MASK] * (size - 1), "the block is the anchor, then masks"
        return self.policy([*tokens, block[0]], size)


def check(value: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    assert value.dtype == dtype and value.shape == shape, f"{value.dtype} {value.shape}, expected {dtype} {shape}"


def oracle(language: Language) -> Policy:
    """Always right."""
    return language.continuation


def right_for(language: Language, count: Callable[[int], int]) -> Policy:
    """Right for count(position of the anchor) tokens, then wrong."""

    def policy(prefix: Sequence[int], size: int) -> list[int]:
        drafts = language.continuation(prefix, size)
        good = count(len(prefix) - 1)
        return drafts[:good] + [(token + 1) % MASK for token in drafts[good:]]

    return policy


def fake_manifest(block_size: int, *, draft_len: int | None = None, confidence: bool = True, limit: int = 200):
    return m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        tool={"name": "dspark"},
        source={},
        drafter=m.Drafter(
            block_size, "anchor-first", (0,), MASK, m.Markov("none", 0), m.Confidence(confidence, False), VOCAB, ()
        ),
        target=m.Target("fake", 1, VOCAB, 1, limit, STOPS, None),
        dtype="fp32",
        onnx=m.Onnx(23, 10),
        io=(),
        profiles=m.Profiles(1, limit, draft_len or block_size),
        files={},
    )


def fake_decoder(
    language: Language,
    policy: Policy | None = None,
    *,
    block_size: int = 5,
    limit: int = 200,
    confidence: Callable | None = None,
    has_confidence: bool = True,
    requests: int = 1,
) -> Decoder:
    """A decoder over a fake pair; policy None: the oracle."""
    target = FakeTarget(language, limit, requests)
    drafter = FakeDrafter(language, limit + 2 * block_size, policy or oracle(language), confidence, requests)
    manifest = fake_manifest(block_size, confidence=has_confidence, limit=limit)
    return Decoder(manifest, target, drafter, None, limit)
