"""Sampled output has the target's law: exactly, over whole answers of several rounds, by enumeration (exact_law.py)."""

import dataclasses
import itertools

import numpy as np
import pytest
from exact_law import EXACT, ByTheRoundBefore, Case, Tables, check_law, output_law, token_law
from races import race_odds

from dspark.runtime import request
from dspark.runtime.random import ACCEPT, COUPLED, DRAFT, TARGET, Streams
from dspark.runtime.schedule import Pausing

RULES = {
    "exact": {"sampling": "exact"},
    "exact, warmer drafts": {"sampling": "exact", "draft_temperature": 1.5},
    "exact, argmax drafts": {"sampling": "exact", "draft_temperature": 0.0},
    "coupled": {"sampling": "coupled"},
    "coupled, warmer drafts": {"sampling": "coupled", "draft_temperature": 1.5},
    "coupled, argmax drafts": {"sampling": "coupled", "draft_temperature": 0.0},
    "greedy": {"temperature": 0.0},
}
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5}
FILTERS = {
    "T 1": {"temperature": 1.0},
    "T 0.5": {"temperature": 0.5},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.75},
    "min-p": {"temperature": 2.0, "min_p": 0.4},
    "all filters": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.2},
    "penalties": {"temperature": 0.75, "top_p": 0.9, **PENALTIES},
}
GATES = {"full block": {"scheduler": "off"}, "threshold": {"confidence_threshold": 0.5}, "rule's own": {}}
SHAPES = {
    "V 2": {"size": 2, "block": 3, "new": 5},
    "V 3": {"size": 3, "block": 2, "new": 4},
    "V 4": {"size": 4, "block": 3, "new": 3},
}


def make(rule: str, filters: str, gate: str, shape: str, seed: int = 0) -> Case:
    return Case({**FILTERS[filters], **RULES[rule], **GATES[gate]}, seed=seed, **SHAPES[shape])


# Every rule with every filter; gates and shapes take turns.
TURNS = [
    (rule, filters, [*GATES][(i + j) % 3], [*SHAPES][(i + 2 * j) % 3])
    for (i, rule), (j, filters) in itertools.product(enumerate(RULES), enumerate(FILTERS))
]


@pytest.mark.parametrize(("rule", "filters", "gate", "shape"), TURNS)
def test_law_of_the_answer(rule, filters, gate, shape):
    check_law(make(rule, filters, gate, shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", RULES)
def test_law_of_the_answer_in_every_setting(rule, filters, gate, shape):
    check_law(make(rule, filters, gate, shape, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "block", "new"), [(2, 3, 6), (3, 3, 4), (4, 2, 4)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "greedy"])
def test_law_of_longer_answers(rule, size, block, new):
    check_law(Case({**FILTERS["T 1"], **RULES[rule]}, size=size, block=block, new=new, seed=2))


class DrafterIsTarget(Tables):
    """Of four tokens a filter leaves two, which are all that the drafter knows, and it knows their law."""

    KNOWN = (3, 1)

    def _logits(self, role, prefix, size):
        row = super()._logits(0, prefix, 4)
        return row[[*self.KNOWN]] if role else row - 50 * ~np.isin(np.arange(4), self.KNOWN)


WARM = {"temperature": 1.0, "scheduler": "off"}
SPECIAL = {
    "reduced vocabulary": Case(WARM, size=4, block=2, new=4, draft_tokens=(3, 1)),
    "one draft token": Case(WARM, size=3, block=2, new=4, draft_tokens=(2,)),
    "impossible tokens": Case(WARM, size=4, block=2, new=4, holes=0.5),
    "stop token": Case({**WARM, "stop_token_ids": (1,)}, size=3, block=3, new=4),
    "stop token, filtered": Case({**WARM, "stop_token_ids": (0,), "top_k": 2}, size=3, block=3, new=4, seed=4),
    "context limit": Case(WARM, size=2, block=3, new=9, limit=6),
    "two turns": Case({**WARM, **PENALTIES}, size=2, block=3, new=3, turns=2),
    "strict": Case({**WARM, "mode": "strict"}, size=3, block=2, new=4),
    "the drafter is the target": Case(
        {**WARM, "top_k": 2}, size=4, new=5, draft_tokens=DrafterIsTarget.KNOWN, tables=DrafterIsTarget
    ),
    "budget from the round before": Case({"temperature": 1.0}, size=2, scheduler=ByTheRoundBefore),
}


@pytest.mark.parametrize("rule", ["exact", "exact, argmax drafts", "coupled"])
@pytest.mark.parametrize("name", SPECIAL)
def test_law_where(name, rule):
    case = SPECIAL[name]
    found = check_law(dataclasses.replace(case, options={**case.options, **RULES[rule]}))
    if name == "the drafter is the target" and "argmax" not in rule:
        assert found.accepted == pytest.approx(found.verified)
    else:
        assert 0 < found.accepted < found.verified


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_law_with_pauses(rule, monkeypatch):
    monkeypatch.setattr(Pausing, "WINDOW", 1)
    monkeypatch.setattr(Pausing, "PAUSE", 1)
    check_law(Case({**WARM, **RULES[rule], "pause_below": 0.75}, size=2, new=6))


# -- acceptance -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["exact", "exact, argmax drafts", "coupled"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_acceptance_is_what_theory_says(rule, size):
    """Of the first draft: 1 - TV(p, q), p(argmax q), and the law of two Gumbel races."""
    case = Case({**WARM, "top_p": 0.9, **RULES[rule]}, size=size, block=1, new=3, seed=7)
    tables, options = Tables(case.seed, case.spread), request.Options(**case.options)
    expected = 0.0
    for anchor, chance in enumerate(token_law(tables.logits(0, case.prompt, size), options, case.prompt, ())):
        prefix = (*case.prompt, anchor)
        p = token_law(tables.logits(0, prefix, size), options, case.prompt, (anchor,))
        logits = tables.logits(1, prefix, size)
        q = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        match rule:
            case "exact":
                expected += chance * np.minimum(p, q).sum()
            case "coupled":
                expected += chance * meeting(p, q)
            case _:
                expected += chance * p[logits.argmax()]
    assert output_law(case).first == pytest.approx(expected, abs=EXACT)


def meeting(p: np.ndarray, q: np.ndarray) -> float:
    """The chance that races of p and of q by the same noise have the same winner (Daliri, Musco, Suresh 2024)."""
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in np.flatnonzero((p > 0) & (q > 0)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_coupled_races_meet_often_enough(size):
    """The enumeration's geometry against the closed formula, and the bound (1 - TV) / (1 + TV)."""
    rng = np.random.default_rng(size)
    for _ in range(200):
        p, q = rng.dirichlet([0.5] * size), rng.dirichlet([0.5] * size)
        distance = abs(p - q).sum() / 2
        draft = race_odds((), tuple(q))
        both = [race_odds(((tuple(q.tolist()), x),), tuple(p.tolist())) for x in range(size)]
        assert np.dot(draft, both) == pytest.approx(p, abs=EXACT), "the marginal law"
        met = sum(draft[x] * both[x][x] for x in range(size))
        assert met == pytest.approx(meeting(p, q), abs=EXACT)
        assert (1 - distance) / (1 + distance) - EXACT < met <= 1 - distance + EXACT


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"temperature": 1.0}, {}),
        ({"temperature": 0.5, "top_k": 3, "confidence_threshold": 0.5}, {}),
        ({"temperature": 2.0, "top_p": 0.8, "draft_temperature": 1.0, **PENALTIES}, {"draft_tokens": (3, 0, 1)}),
        ({"temperature": 1.0, "min_p": 0.1, "draft_temperature": 0.0}, {"holes": 0.4}),
    ],
)
def test_coupled_output_is_plain_decoding_with_the_same_noise(options, more):
    """Noise by noise, not only in law: 500 seeds each."""
    case = Case(size=4, block=3, spread=1.0, **more)
    decoder, accepted = case.decoder(), 0
    for seed in range(500):
        plain, ours = (
            decoder.generate(case.prompt, seed=seed, mode=mode, max_new_tokens=8, sampling="coupled", **options)
            for mode in ("plain", "speculative")
        )
        assert ours.token_ids == plain.token_ids
        accepted += ours.stats.accepted
    assert accepted > 500


@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_a_perfect_drafter_is_never_rejected(rule):
    """With the runtime's own numbers: a token's noise is the same among all, among few, and by draft index."""
    case = SPECIAL["the drafter is the target"]
    for seed in range(100):
        made = case.decoder().generate(case.prompt, seed=seed, max_new_tokens=9, **{**case.options, **RULES[rule]})
        assert 0 < made.stats.accepted == made.stats.verified


class Recorder(Streams):
    """Tells what every number was asked for."""

    asked: list[tuple] = []

    def uniform(self, purpose, position):
        self.asked.append((purpose, position))
        return super().uniform(purpose, position)

    def gumbel(self, purpose, position, tokens, round=0):
        self.asked.append((purpose, position, round))
        return super().gumbel(purpose, position, tokens, round)


@pytest.mark.parametrize("rule", ["exact", "exact, argmax drafts", "coupled"])
def test_numbers_are_keyed_as_the_enumeration_says(rule, monkeypatch):
    monkeypatch.setattr(request, "Streams", Recorder)
    monkeypatch.setattr(Recorder, "asked", [])
    rounds, case = [], Case({**WARM, **RULES[rule]}, size=4)
    made = case.decoder().generate(case.prompt, seed=1, max_new_tokens=20, on_round=rounds.append, **case.options)
    start, answer = len(case.prompt), range(len(case.prompt), len(case.prompt) + len(made.token_ids))
    drafted = [
        (DRAFT, r.position + 1 + k, index) for index, r in enumerate(rounds) if r.drafts for k in range(case.block)
    ]
    judged = [(ACCEPT, r.position + 1 + k) for r in rounds for k in range(min(r.accepted + 1, r.verified))]
    redrawn = [(TARGET, start)] + [(TARGET, r.position + len(r.emitted)) for r in rounds if len(r.emitted) > r.accepted]
    match rule:
        case "exact":
            expected = drafted + judged + redrawn
        case "coupled":
            positions = {*answer, *(position for _, position, _ in drafted)}
            assert {*Recorder.asked} == {(COUPLED, position, 0) for position in positions}
            return
        case _:
            expected = judged + redrawn
    assert sorted(Recorder.asked) == sorted(expected), "and no number is asked for twice"
