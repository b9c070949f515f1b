"""Wrong ways to sample, each found by the enumeration that the right ones pass (test_exact_law.py)."""

import numpy as np
import pytest
from exact_law import EXACT, ByTheRoundBefore, Case, EveryDraw, check_law, deviation, output_law, target_law

from dspark.runtime.random import ACCEPT, COUPLED, DRAFT
from dspark.runtime.sampling import Law
from dspark.runtime.schedule import Always

WRONG = 1e-3  # the least that a wrong law deviates


class ArgmaxDrafts(EveryDraw):
    """Drafts are argmaxes, and judged as if they had been drawn."""

    def draft(self, k, q):
        return int(q.argmax())


class WarmerDrafts(EveryDraw):
    """Drawn at twice the temperature that q is computed at."""

    def draft(self, k, q):
        return super().draft(k, q**0.5)


class SharedNumber(EveryDraw):
    """A draft is drawn by the number that judges it."""

    def draft(self, k, q):
        return self.uniform((ACCEPT, self._drafting[1] + k), [*np.cumsum(q)[:-1], 1])


class OneNumber(EveryDraw):
    """Every position is judged by the same number, or raced by the same noise."""

    def uniform(self, key, bounds):
        return super().uniform(key[:1] if key[0] == ACCEPT else key, bounds)

    def noise(self, key, weights):
        return super().noise(key[:1] if key[0] == COUPLED else key, weights)


class OldNoise(EveryDraw):
    """A position drafted again is drafted with the same noise."""

    def noise(self, key, weights):
        return super().noise(key[:2] if key[0] == DRAFT else key, weights)


class TwoOrNone(Always):
    """At least two drafts or none: the second confidence, which knows the first draft, decides about that draft."""

    reads_confidence = True

    def lengths(self, confidence, drafted):
        below = [*(confidence[0] < 0.5), True]
        return drafted if below.index(True) >= 2 else 0 * drafted


class LookingAhead(Always):
    """Draft k is verified where the confidence after it is high."""

    reads_confidence = True

    def lengths(self, confidence, drafted):
        return np.minimum([*(confidence[0, 1:] < 0.5), True].index(True), drafted)


EXACT_RULE = {"temperature": 1.0, "sampling": "exact", "scheduler": "off"}
WRONG_RULES = {
    "soft q of argmax drafts": Case(EXACT_RULE, block=2, draws=ArgmaxDrafts),
    "q of another temperature": Case(EXACT_RULE, block=2, draws=WarmerDrafts),
    "one number draws and judges": Case(EXACT_RULE, block=2, draws=SharedNumber),
    "one number judges all": Case(EXACT_RULE, block=2, draws=OneNumber),
    "one noise for all": Case({**EXACT_RULE, "sampling": "coupled"}, size=2, draws=OneNumber),
    "drafts' noise is used again": Case(EXACT_RULE, size=2, new=6, seed=3, draws=OldNoise, scheduler=ByTheRoundBefore),
    "two or none": Case(EXACT_RULE, block=2, scheduler=TwoOrNone),
    "the next confidence decides": Case(EXACT_RULE, block=2, scheduler=LookingAhead),
    "opportunistic": Case({**EXACT_RULE, "sampling": "opportunistic"}, block=2),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_found(name):
    case = WRONG_RULES[name]
    found = output_law(case).law
    assert sum(found.values()) == pytest.approx(1, abs=EXACT)
    assert deviation(found, target_law(case)) > WRONG


def test_a_wrong_residual_is_found(monkeypatch):
    monkeypatch.setattr(Law, "without", lambda self, weights: self)
    case = Case(EXACT_RULE, block=2)
    assert deviation(output_law(case).law, target_law(case)) > WRONG


def test_old_noise_harms_by_the_schedule_alone():
    """What nobody looks at may be used again: the wrong rule above is about the schedule, not about the noise."""
    check_law(Case(EXACT_RULE, size=2, block=2, draws=OldNoise))
