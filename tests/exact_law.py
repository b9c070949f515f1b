"""The law of what the runtime returns, exactly: every outcome of every random decision, with its probability.

The real session runs, on engines whose float64 logits are random functions of the whole prefix. Only the numbers that
`Draws` makes of a request's streams are replaced: each is a variable here, named by what keys it in the streams, and a
decision about it splits what is left of its range. A run follows a path of outcomes; runs are repeated until every path
was gone. A variable that two decisions share is shared here too, so wrong sharing shows as a wrong law.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import numpy as np
from fakes import TAP_WIDTH, FakeDrafter, FakeTarget, Language, fake_manifest
from races import Weights, race_odds

from dspark.runtime import Decoder, request
from dspark.runtime.random import ACCEPT, COUPLED, DRAFT, TARGET
from dspark.runtime.schedule import Always, Scheduler
from dspark.runtime.verify import DraftVocabulary

EXACT = 1e-12  # what float64 may deviate
Tokens = tuple[int, ...]


class Walk:
    """All paths through a program's random choices, by running it again for each: depth first."""

    def __init__(self) -> None:
        self._trail: list[list[tuple[int, float]]] = []  # per choice, the outcomes that are left; the first is taken
        self._at = 0
        self.weight = 1.0  # of the path so far

    def choose(self, weights: Sequence[float]) -> int:
        """An index, with the probability weights[index]; what has none is skipped."""
        if self._at == len(self._trail):
            self._trail.append([(index, weight) for index, weight in enumerate(weights) if weight > 1e-15])
        index, weight = self._trail[self._at][0]
        self._at += 1
        self.weight *= weight
        return index

    def paths(self) -> Iterator[None]:
        """Yields before every run."""
        while True:
            self._at, self.weight = 0, 1.0
            yield
            while self._trail and len(self._trail[-1]) == 1:
                self._trail.pop()
            if not self._trail:
                return
            self._trail[-1].pop(0)


# -- in the place of the runtime's Draws and engines ------------------------------------------------------------------
class EveryDraw:
    """`Draws`, whose streams are variables: an interval of each uniform number, a history of each token noise."""

    def __init__(self, walk: Walk, vocabulary: DraftVocabulary, size: int):
        self._walk, self._vocabulary, self._size = walk, vocabulary, size
        self._uniforms: dict[tuple, tuple[float, float]] = {}
        self._noises: dict[tuple, tuple] = {}
        self._drafting: tuple = ()

    def accepts(self, p: float, q: float, position: int) -> bool:
        return self.uniform((ACCEPT, position), [min(p / q, 1), 1]) == 0

    def token(self, law, position: int) -> int:
        bounds = np.cumsum(law.p)
        return int(law.tokens[self.uniform((TARGET, position), [*bounds[:-1], 1])])

    def race(self, law, position: int) -> int:
        weights = np.zeros(self._size)
        weights[law.tokens] = law.p
        return self.noise((COUPLED, position), tuple(weights.tolist()))

    def fresh_noise(self, first: int, count: int, round: int, size: int) -> np.ndarray:
        self._drafting = (DRAFT, first, round)
        return np.zeros((count, size), np.float32)

    def shared_noise(self, first: int, count: int, tokens) -> np.ndarray:
        self._drafting = (COUPLED, first)
        return np.zeros((count, self._vocabulary.size), np.float32)

    def draft(self, k: int, q: np.ndarray) -> int:
        """The drafter's k-th draw, an index, from its q over draft indices: what its noise would have done."""
        ids = np.arange(len(q)) if self._vocabulary.tokens is None else self._vocabulary.tokens
        weights = np.zeros(self._size)
        weights[ids] = q
        purpose, first, *round = self._drafting
        token = self.noise((purpose, first + k, *round), tuple(weights.tolist()))
        return int(np.flatnonzero(ids == token)[0])

    def uniform(self, key: tuple, bounds: Sequence[float]) -> int:
        """In which of the intervals 0..bounds[0]..bounds[1]..1 a number lies."""
        low, high = self._uniforms.get(key, (0.0, 1.0))
        parts = [(max(low, a), min(high, b)) for a, b in zip([0, *bounds], bounds, strict=False)]
        index = self._walk.choose([max(0, b - a) / (high - low) for a, b in parts])
        self._uniforms[key] = parts[index]
        return index

    def noise(self, key: tuple, weights: Weights) -> int:
        """Who wins a race of these weights by some noise."""
        history = self._noises.get(key, ())
        winner = self._walk.choose(race_odds(history, weights))
        self._noises[key] = (*history, (weights, winner))
        return winner


class Tables:
    """Random float64 logits and confidences as functions of the prefix."""

    def __init__(self, seed: int, spread: float = 1.5, holes: float = 0.0):
        """holes: the share of tokens (never the first) that have no chance at all."""
        self.seed, self.spread, self.holes = seed, spread, holes
        self.logits = cache(self._logits)
        self.confidence = cache(self._confidence)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(np.array([self.seed, *key], np.int64).tobytes()))

    def _logits(self, role: int, prefix: Tokens, size: int) -> np.ndarray:
        rng = self._rng(role, *prefix)
        logits = self.spread * rng.normal(size=size)
        logits[1:][rng.random(size - 1) < self.holes] = -np.inf
        return logits

    def _confidence(self, prefix: Tokens) -> float:
        return float(self._rng(2, *prefix).random())


class TableTarget(FakeTarget):
    """An Engine whose cache rows and taps are tokens."""

    def __init__(self, tables: Tables, size: int, capacity: int):
        super().__init__(Language(), capacity)
        self.tables, self.size = tables, size

    def run(self, inputs, fetch):
        tokens, length = inputs["tokens"].tolist(), int(inputs["length"][0])
        self.cache[length : length + len(tokens)] = tokens
        ends = [length + row + 1 for row in inputs["logit_rows"].tolist()]
        logits = [self.tables.logits(0, tuple(self.cache[:end]), self.size) for end in ends]
        taps = np.repeat(np.array(tokens, np.float32)[:, None], TAP_WIDTH, axis=1)
        return {"logits": np.array(logits), "taps": taps}


class TableDrafter(FakeDrafter):
    """An Engine; `draws` is set for every run of the session."""

    def __init__(self, tables: Tables, size: int, tokens: np.ndarray | None, capacity: int):
        super().__init__(Language(), capacity, lambda prefix, count: [])
        self.tables, self.size, self.tokens = tables, size, tokens
        self.draws: EveryDraw | None = None

    def run(self, inputs, fetch):
        length, context = int(inputs["length"][0]), inputs["taps"][:, 0].astype(int).tolist()
        end = length + len(context)
        self.cache[length:end] = context
        prefix, temperature = [*self.cache[:end], int(inputs["tokens"][0, 0])], float(inputs["temperature"][0])
        drafts, confidence, rows = [], [], []
        for k in range(inputs["tokens"].shape[1]):
            logits = self.tables.logits(1, tuple(prefix), self.size)
            confidence.append(self.tables.confidence(tuple(prefix)))
            index = self.choose(k, logits, temperature, inputs.get("noise"))
            drafts.append(index if self.tokens is None else int(self.tokens[index]))
            rows.append(logits)
            prefix.append(drafts[-1])
        return {
            "draft_tokens": np.array([drafts]),
            "confidence": np.array([confidence], np.float32),
            "draft_logits": np.array([rows]),
        }

    def choose(self, k: int, logits: np.ndarray, temperature: float, noise: np.ndarray | None) -> int:
        if temperature == 0:
            return int(logits.argmax())
        if self.draws is None:  # the runtime's own numbers
            return int((logits / temperature + noise[0, k]).argmax())
        drawn = np.exp((logits - logits.max()) / temperature)
        return self.draws.draft(k, drawn / drawn.sum())


# -- cases ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One pair and one way to generate. Temperatures are numbers that fp32 has too: the drafter gets them in it."""

    options: dict = field(default_factory=dict)  # of `Session.stream`
    size: int = 3  # of the vocabulary
    block: int = 3
    new: int = 4  # tokens of a turn
    seed: int = 0
    turns: int = 1  # with the same random numbers
    draft_tokens: Tokens | None = None  # of a drafter that has not all
    holes: float = 0.0
    spread: float = 1.5
    limit: int = 100
    prompt: Tokens = (1, 0)
    scheduler: Callable[[], Scheduler] | None = None  # makes one for each turn; None: the session's own
    draws: type[EveryDraw] = EveryDraw
    tables: type[Tables] = Tables

    def decoder(self) -> Decoder:
        tables, made = self.tables(self.seed, self.spread, self.holes), fake_manifest(self.block, limit=self.limit)
        tokens = None if self.draft_tokens is None else np.array(self.draft_tokens)
        known = self.size if tokens is None else len(tokens)
        manifest = dataclasses.replace(
            made,
            drafter=dataclasses.replace(made.drafter, draft_vocab_size=known, mask_token_id=0),
            target=dataclasses.replace(made.target, vocab_size=self.size, stop_token_ids=()),
        )
        capacity = self.limit + 2 * self.block
        drafter = TableDrafter(tables, known, tokens, capacity)
        return Decoder(manifest, TableTarget(tables, self.size, self.limit), drafter, None, self.limit, tokens)


@dataclass
class Outcome:
    law: dict[Tokens, float]  # of all tokens that were returned
    paths: int
    accepted: float  # expected number of drafts that were accepted
    verified: float
    first: float  # the chance that the first draft of all that was verified is accepted


def output_law(case: Case) -> Outcome:
    """The law of the answers of one session, by all paths of its random decisions."""
    decoder, walk = case.decoder(), Walk()
    found = Outcome({}, 0, 0.0, 0.0, 0.0)
    with mock.patch.object(request, "Draws", lambda streams: decoder.drafter_engine.draws), case_scheduler(case):
        for _ in walk.paths():
            decoder.drafter_engine.draws = case.draws(walk, decoder.vocabulary, case.size)
            talk, answer, rounds = decoder.session(), [], []
            for turn in range(case.turns):
                prompt, options = case.prompt if turn == 0 else (), {"max_new_tokens": case.new, **case.options}
                answer += talk.generate(prompt, seed=0, on_round=rounds.append, **options).token_ids
            key = tuple(answer)
            found.law[key] = found.law.get(key, 0.0) + walk.weight
            found.paths += 1
            found.accepted += walk.weight * sum(r.accepted for r in rounds)
            found.verified += walk.weight * sum(r.verified for r in rounds)
            found.first += walk.weight * next((r.accepted > 0 for r in rounds if r.verified), False)
    return found


def case_scheduler(case: Case):
    if case.scheduler is None:
        return mock.patch.object(request, "make_scheduler", request.make_scheduler)
    make = case.scheduler
    return mock.patch.object(request, "make_scheduler", lambda *_: make())


def target_law(case: Case) -> dict[Tokens, float]:
    """The law of the same answers by the definition: the target alone, filtered, token by token."""
    tables = case.tables(case.seed, case.spread, case.holes)
    options = request.Options(**{"max_new_tokens": case.new, **case.options})
    laws: dict[Tokens, float] = {(): 1.0}
    for _ in range(case.turns):
        ended: dict[Tokens, float] = {}
        for before, weight in laws.items():
            growing = {(): weight}
            while growing:
                answer, chance = growing.popitem()
                prefix = (*case.prompt, *before, *answer)
                p = token_law(tables.logits(0, prefix, case.size), options, (*case.prompt, *before), answer)
                for token in np.flatnonzero(p).tolist():
                    longer = (*answer, token)
                    full = len(case.prompt) + len(before) + len(answer) == case.limit
                    stopped = token in options.stop_token_ids
                    where = ended if stopped or full or len(longer) == options.max_new_tokens else growing
                    key = (*before, *longer) if where is ended else longer
                    where[key] = where.get(key, 0.0) + chance * float(p[token])
        laws = ended
    return laws


def token_law(logits: np.ndarray, options: request.Options, before: Tokens, answer: Tokens) -> np.ndarray:
    """The law of the next token, [V], as plainly as `Sampling` says it."""
    row = [float(x) for x in logits]
    for token in {*before, *answer}:
        factor = options.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(answer):
        row[token] -= options.presence_penalty + options.frequency_penalty * answer.count(token)
    if options.temperature == 0:
        return np.eye(len(row))[row.index(max(row))]
    p = np.exp((np.array(row) - max(row)) / options.temperature)
    if options.top_k:
        p[p < sorted(p)[::-1][: options.top_k][-1]] = 0
    order, total = sorted(range(len(p)), key=lambda token: -p[token]), p.sum()
    for place, token in enumerate(order):
        if p[order[:place]].sum() >= options.top_p * total:
            p[token] = 0
    p[p < options.min_p * p.max()] = 0
    return p / p.sum()


def deviation(found: dict[Tokens, float], expected: dict[Tokens, float]) -> float:
    """The largest difference of a probability."""
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected})


def check_law(case: Case) -> Outcome:
    """The law of the answers is the target's."""
    found = output_law(case)
    assert abs(sum(found.law.values()) - 1) < EXACT
    assert deviation(found.law, target_law(case)) < EXACT
    return found


class ByTheRoundBefore(Always):
    """All drafts or none, by the last confidence of the round before, which saw drafts that are drafted again."""

    reads_confidence = True

    def __init__(self):
        self.last = 1.0

    def lengths(self, confidence, drafted):
        before, self.last = self.last, confidence[0, -1]
        return drafted if before >= 0.5 else 0 * drafted
