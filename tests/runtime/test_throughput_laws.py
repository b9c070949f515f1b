"""The throughput schedulers keep the target's law, exactly, by enumeration; so do batches, which share a schedule."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
from exact_law import EXACT, Case, EveryDraw, Tables, Walk, check_law, deviation, output_law, target_law, token_law
from together import Together

from dspark.manifest import Calibration
from dspark.runtime import Batch, Decoder, request
from dspark.runtime import batch as runtime_batch
from dspark.runtime.loop import usable
from dspark.runtime.schedule import FullBlock, Scheduler
from dspark.runtime.throughput import SpsTable, Throughput, ThroughputAsync, ThroughputGlobal

WRONG = 1e-3  # the least that a wrong law deviates
LOSSLESS = {"throughput": Throughput, "throughput-async": ThroughputAsync}
EXACT_RULE = {"temperature": 1.0, "sampling": "exact"}
COUPLED = {"temperature": 1.0, "sampling": "coupled"}
CALIBRATION = Calibration((0.5, 2.0, 1.5), rounds=1, prompts=1, temperature=1.0, shifts=(0.3, -0.2, 0.1))
RULES = {"exact": EXACT_RULE, "argmax drafts": {**EXACT_RULE, "draft_temperature": 0.0}, "coupled": COUPLED}


# -- the paper's counter-example (appendix A) -------------------------------------------------------------------------
class CounterExample(Tables):
    """Two tokens: p = (0.7, 0.3) and q = (0.5, 0.5) everywhere; the second confidence knows the first draft."""

    def _logits(self, role, prefix, size):
        return np.log([0.5, 0.5] if role else [0.7, 0.3])

    def _confidence(self, prefix):
        return 0.8 if len(prefix) == len(Case.prompt) + 1 else 0.9 * (prefix[-1] == 0)


@pytest.mark.parametrize(
    ("kind", "rule", "law"),
    [
        (Throughput, EXACT_RULE, 0.7),
        (ThroughputAsync, EXACT_RULE, 0.7),
        (ThroughputGlobal, EXACT_RULE, 0.85),  # it is refused for this rule: here is why
        (ThroughputGlobal, COUPLED, 0.7),
    ],
)
def test_counter_example(kind, rule, law):
    table = SpsTable((1, 2, 3), (1.0, 0.5, 0.45))
    case = Case(rule, size=2, block=2, new=4, tables=CounterExample, scheduler=lambda: kind(table))
    found = output_law(case).law
    first = sum(chance for answer, chance in found.items() if answer[1] == 0)  # of the first round
    assert first == pytest.approx(law, abs=EXACT)
    assert (deviation(found, target_law(case)) < EXACT) == (law == 0.7)


# -- one request, through the runtime ---------------------------------------------------------------------------------
def stepped(seed: int, most: int, requests: int = 1) -> SpsTable:
    """Random speeds of up to `most` tokens: the first draft costs a lot, of the others most cost nothing."""
    rng, drafts = np.random.default_rng(seed), most - requests
    drops = np.where(rng.random(drafts - 1) < 0.7, 1, rng.uniform(0.5, 0.9, drafts - 1))
    speeds = np.cumprod([1, rng.uniform(0.5, 0.75) ** (1 / requests), *drops])
    return SpsTable(tuple(range(requests, most + 1)), tuple(speeds.tolist()))


SHAPES = {
    "short": {"size": 2, "block": 2, "new": 4},
    "block of 3": {"size": 2, "block": 3, "new": 4},
    "long": {"size": 2, "block": 2, "new": 6},  # so that the schedule of two steps before has room to matter
    "three tokens": {"size": 3, "block": 2, "new": 4},
}


def scheduled(rule: str, kind: type[Throughput], shape: str, seed: int, **more) -> Case:
    table, scales = stepped(seed, SHAPES[shape]["block"] + 1), CALIBRATION if seed % 2 else None
    return Case({**RULES[rule], **more}, seed=seed, scheduler=lambda: kind(table, scales), **SHAPES[shape])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("throughput", "short"), ("throughput", "block of 3"), ("throughput-async", "block of 3")],
)
@pytest.mark.parametrize("rule", RULES)
def test_law_with_random_speeds(rule, kind, shape, seed):
    check_law(scheduled(rule, LOSSLESS[kind], shape, seed))


class Watched(ThroughputAsync):
    """Tells how many drafts were left out, and in which step of the generation."""

    left_out: set[tuple[int, int]] = set()

    def lengths(self, confidence, drafted, requests=None, beside=0):
        self.steps = getattr(self, "steps", -1) + 1
        lengths = super().lengths(confidence, drafted, requests)
        self.left_out.add((self.steps, int((drafted - lengths)[0])))
        return lengths


@pytest.mark.parametrize("seed", [3, 6])
@pytest.mark.parametrize("rule", ["exact", "argmax drafts"])
def test_law_of_budgets_from_two_steps_before(rule, seed, monkeypatch):
    monkeypatch.setattr(Watched, "left_out", set())
    check_law(scheduled(rule, Watched, "long", seed))
    assert {(0, 0), (2, 0), (2, 2)} <= Watched.left_out, "both happen where there is something to look back to"


class Skipping(Throughput):
    """Counts the steps in which drafting would not have paid."""

    asked = skipped = 0

    def drafts(self, *load):
        pays = super().drafts(*load)
        Skipping.asked, Skipping.skipped = Skipping.asked + 1, Skipping.skipped + (not pays)
        return pays


@pytest.mark.parametrize("rule", RULES)
def test_law_where_a_draft_has_to_pay_for_its_time(rule, monkeypatch):
    monkeypatch.setattr(Skipping, "asked", 0)
    monkeypatch.setattr(Skipping, "skipped", 0)
    for seed in (2, 4, 5):
        table = replace(stepped(seed, 3), draft_seconds=(0.3,))
        check_law(replace(scheduled(rule, Skipping, "long", seed), scheduler=lambda table=table: Skipping(table)))
    assert 0.05 * Skipping.asked < Skipping.skipped < 0.95 * Skipping.asked


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("rule", RULES)
def test_law_with_many_random_speeds(rule, kind, shape, seed):
    check_law(scheduled(rule, LOSSLESS[kind], shape, seed))


@pytest.mark.parametrize("kind", LOSSLESS)
def test_law_with_stop_tokens(kind):
    for seed in (3, 6):
        check_law(scheduled("exact", LOSSLESS[kind], "short", seed, stop_token_ids=(1,)))


def test_the_speeds_bite():
    """With such tables a search that looks ahead loses the law; not where the rule does not mind."""
    wrong = []
    for seed in range(12):
        case = scheduled("exact", ThroughputGlobal, "short", seed)
        wrong.append(deviation(output_law(case).law, target_law(case)))
    assert sum(w > WRONG for w in wrong) >= 2
    check_law(scheduled("coupled", ThroughputGlobal, "short", int(np.argmax(wrong))))


# -- two requests, with one schedule ----------------------------------------------------------------------------------
class Pair:
    """Requests in one `Batch`, each on tables of its own, with variables for its random numbers."""

    def __init__(self, cases: list[Case], scheduler: Scheduler, walk: Walk):
        self.cases, decoders = cases, [case.decoder() for case in cases]
        self.tables = [decoder.target_engine.tables for decoder in decoders]
        target, drafter = (
            Together([getattr(decoder, name) for decoder in decoders]) for name in ("target_engine", "drafter_engine")
        )
        first = decoders[0]
        decoder = Decoder(first.manifest, target, drafter, None, first.context_limit)
        self.batch = Batch(decoder, scheduler)
        draws = [EveryDraw(walk, decoder.vocabulary, cases[0].size) for _ in cases]
        for own, each in zip(decoders, draws, strict=True):
            own.drafter_engine.draws = each
        with mock.patch.object(request, "Draws", lambda streams: draws[streams]), NUMBERED, ANY_SCHEDULER:
            self.requests = [
                self.batch.submit(case.prompt, seed=0, request=r, max_new_tokens=case.new, **case.options)
                for r, case in enumerate(cases)
            ]

    def endings(self, r: int) -> dict[tuple[int, ...], float]:
        """The whole answers that the target would make of request r's, with their chances."""
        case, options, ended = self.cases[r], self.requests[r].answer.options, {}
        growing = {tuple(self.requests[r].answer.token_ids): 1.0}
        while growing:
            answer, chance = growing.popitem()
            if len(answer) == case.new or answer[-1:] and answer[-1] in options.stop_token_ids:
                ended[answer] = chance
                continue
            logits = self.tables[r].logits(0, (*case.prompt, *answer), case.size)
            for token, p in enumerate(token_law(logits, options, case.prompt, answer)):
                growing[(*answer, token)] = chance * p
        return ended

    def joint(self) -> dict[tuple, float]:
        """The law of all answers, if each goes on by itself."""
        laws = [self.endings(r) for r in range(len(self.cases))]
        return {
            answers: float(np.prod([law[answer] for law, answer in zip(laws, answers, strict=True)]))
            for answers in itertools.product(*laws)
        }


ANY_SCHEDULER = mock.patch.object(runtime_batch, "check_rule", lambda *_: None)  # the refused one too: to see why
NUMBERED = mock.patch.object(request, "Streams", lambda seed, number: number)


def deviation_of_batch(cases: list[Case], make: Callable[[], Scheduler], steps: int) -> float:
    """How far the joint law of a batch's answers is from the product of the target's laws, at most.

    steps: after the prompts; after so many the target goes on alone.
    """
    walk, found, expected = Walk(), {}, {}
    for _ in walk.paths():
        pair = Pair(cases, make(), walk)
        expected = expected or pair.joint()
        for _ in range(1 + steps):
            pair.batch.step()
        for answers, chance in pair.joint().items():
            found[answers] = found.get(answers, 0.0) + walk.weight * chance
    assert sum(found.values()) == pytest.approx(1, abs=EXACT)
    return deviation(found, expected)


def batch(seed: int, *lengths: int, **options) -> list[Case]:
    made = {**EXACT_RULE, **options}
    return [Case(made, size=2, block=2, new=new, seed=seed + 100 * r) for r, new in enumerate(lengths)]


def seen(kind: type[Throughput], table: SpsTable, seed: int) -> Throughput:
    """A scheduler that has random confidences to look back to."""
    scheduler, rng = kind(table), np.random.default_rng(seed)
    for _ in range(2):
        scheduler.lengths(rng.random((2, 2)), np.array([2, 2]), np.array([1, 2]))
    return scheduler


class Breaking(Tables):
    """What follows the first token drafted is no number where that was token 0."""

    def _confidence(self, prefix):
        return float("nan") if len(prefix) > len(Case.prompt) + 2 and prefix[-1] == 0 else super()._confidence(prefix)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_law_where_a_drafter_gives_nan(kind):
    """Where it does may hang on the draft before: that one is verified as if nothing had happened."""
    for seed in (0, 3):
        check_law(replace(scheduled("exact", LOSSLESS[kind], "block of 3", seed), tables=Breaking))
        cases = [replace(case, tables=Breaking) for case in batch(seed, 4, 4)]
        assert deviation_of_batch(cases, partial(LOSSLESS[kind], stepped(seed, 6, 2)), 1) < EXACT
    whole = Case({**EXACT_RULE, "read_confidence": True}, size=2, block=3, new=4, tables=Breaking)
    check_law(replace(whole, scheduler=FullBlock))


BITING = (7, 31, 37)  # seeds whose tables a search that looks ahead does not survive


@pytest.mark.parametrize("kind", LOSSLESS)
def test_law_of_a_batch(kind):
    """Jointly: no answer tells of the other, though one request's drafts have a say in the other's lengths."""
    for seed in (0, 1, *BITING):
        table = stepped(seed, 6, 2)
        assert deviation_of_batch(batch(seed, 4, 4), partial(seen, LOSSLESS[kind], table, seed), 1) < EXACT


@pytest.mark.parametrize("kind", LOSSLESS)
def test_law_of_a_batch_that_loses_a_request(kind):
    table = stepped(3, 6, 2)
    assert deviation_of_batch(batch(3, 3, 4), lambda: seen(LOSSLESS[kind], table, 3), 2) < EXACT


@pytest.mark.parametrize("seed", BITING)
def test_a_batch_that_looks_ahead_is_found(seed):
    table = stepped(seed, 6, 2)
    assert deviation_of_batch(batch(seed, 4, 4), lambda: ThroughputGlobal(table), 1) > WRONG


@pytest.mark.parametrize("lengths", [(4,), (4, 4)])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_law_of_drafts_cut_after_a_stop_token(kind, lengths):
    """A first draft does not pay, two do. The cut is made when the lengths are chosen."""
    for seed in range(3):
        cases, table = batch(seed, *lengths, stop_token_ids=(1,)), dear_first_draft(len(lengths))
        assert deviation_of_batch(cases, partial(LOSSLESS[kind], table), 1) < EXACT


def test_a_budget_that_knows_of_the_cut_is_found(monkeypatch):
    """A search with a cut among its caps knows of the stop token. Algorithm 1 comes to the token before the cut."""
    schedule = Batch._schedule

    def cut_before(self, parts):
        for part in parts:
            if part.draft is not None:
                tokens = part.draft.tokens
                part.draft = replace(part.draft, tokens=tokens[: usable(part.draft, part.running.answer.rules.stops)])
        schedule(self, parts)

    monkeypatch.setattr(Batch, "_schedule", cut_before)
    for kind, wrong in [(ThroughputAsync, True), (Throughput, False)]:
        cases, table = batch(0, 4, stop_token_ids=(1,)), dear_first_draft(1)
        found = deviation_of_batch(cases, partial(kind, table), 1)
        assert found > WRONG if wrong else found < EXACT


def dear_first_draft(requests: int) -> SpsTable:
    speed = 0.45 if requests == 1 else 0.62
    return SpsTable((requests, 3 * requests), (1.0, speed))
