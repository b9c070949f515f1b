"""Each stage alone."""

import numpy as np
import pytest
from fakes import MASK, VOCAB, FakeDrafter, FakeTarget, Language, fake_manifest

from dspark.errors import UsageError
from dspark.runtime.commit import commit
from dspark.runtime.draft import Draft, Drafter
from dspark.runtime.random import Streams
from dspark.runtime.sampling import Sampling
from dspark.runtime.target import Forward, Target
from dspark.runtime.verify import DraftVocabulary, Draws, Judge, Verdict, verify


def greedy_judge():
    return Judge(Sampling(), "exact", Draws(Streams(0)), DraftVocabulary(VOCAB), [])


class Rows:
    """A target whose forward gives these logits, row by row."""

    def __init__(self, logits):
        self.logits, self.length = logits, 0

    def forward(self, tokens, logit_rows, taps=True):
        return Forward(self.logits[: len(logit_rows)], None)


def never(_token):
    return False


@pytest.mark.parametrize(
    ("drafts", "accepted", "extra"),
    [([], 0, 5), ([5], 1, 6), ([5, 6, 7], 3, 8), ([5, 6, 0], 2, 7), ([0, 6, 7], 0, 5), ([5, 0, 7], 1, 6)],
)
def test_greedy_acceptance(drafts, accepted, extra):
    kept = []
    target = Rows(np.eye(10, dtype=np.float32)[[5, 6, 7, 8]])
    verdict = verify(target, 1, Draft(drafts, None), len(drafts), greedy_judge(), lambda token: kept.append(token))
    assert (verdict.verified, verdict.accepted, verdict.extra) == (len(drafts), accepted, extra)
    assert kept == [*drafts[:accepted], extra], "told once of every kept token, in order, and of no other"


def test_a_token_that_ends_the_text_is_the_last():
    target = Rows(np.eye(10, dtype=np.float32)[[5, 6, 7, 8]])
    verdict = verify(target, 1, Draft([5, 6, 7], None), 3, greedy_judge(), lambda token: token == 6)
    assert (verdict.accepted, verdict.extra) == (2, None)
    verdict = verify(target, 1, Draft([5, 9, 7], None), 3, greedy_judge(), lambda token: token == 6)
    assert (verdict.accepted, verdict.extra) == (1, 6), "a drawn one has no row yet"


def test_ties_go_to_the_lowest_token():
    assert greedy_judge().choose(np.array([0, 2, 2, 1], np.float32), 5) == 1


@pytest.mark.parametrize("draft", [1, 2])
def test_a_draft_that_the_drafter_cannot_have_drawn_is_not_judged(draft):
    """Nobody knows its probability: the token is drawn from the target's law, whatever the draft."""

    class NoJudging(Draws):
        def accepts(self, p, q, position):
            assert draft == 2, "token 1 is none of the drafter's"
            return super().accepts(p, q, position)

    vocabulary = DraftVocabulary.of(np.array([2, 0]), 4)
    logits = np.log([0.1, 0.6, 0.2, 0.1])
    judge = Judge(Sampling(1.0), "exact", NoJudging(Streams(3)), vocabulary, [], draft_temperature=1.0)
    plain = Judge(Sampling(1.0), "exact", Draws(Streams(3)), vocabulary, [])
    for position in range(50):
        token = judge.choose(logits, position, draft, np.zeros(2))
        assert draft == 2 or token == plain.choose(logits, position)


@pytest.mark.parametrize("accepted", range(4))
def test_commit_keeps_a_prefix(accepted):
    target = Target(FakeTarget(Language(), 20), 20)
    target.length = 4
    taps = np.arange(12, dtype=np.float32).reshape(4, 3)
    kept = commit(target, Verdict(3, accepted, 1, taps))
    assert target.length == 4 + accepted + 1
    assert kept.kind == ("full" if accepted == 3 else "partial")
    assert np.array_equal(kept.taps, taps[: accepted + 1])


def test_verify_does_not_commit():
    language = Language()
    target = Target(FakeTarget(language, 20), 20)
    target.forward([1, 2, 3], np.array([2]))
    target.length = 3
    right = language.continuation([1, 2, 3, 4], 2)
    for drafts, accepted in ((right, 2), ([MASK, right[1]], 0)):
        assert verify(target, 4, Draft(drafts, None), 2, greedy_judge(), never).accepted == accepted
    assert target.length == 3


class ElsewhereTarget:
    """A service's own target: whatever it is, it hands over taps of the tokens that it committed."""

    def __init__(self, language):
        self.language = language
        self.tokens = []

    def commit(self, tokens):
        at = len(self.tokens)
        self.tokens += tokens
        rows = [(self.tokens[p], p, self.language.hash(self.tokens[: p + 1])) for p in range(at, len(self.tokens))]
        return np.array(rows, np.float32)


def make_drafter(language, limit=100, block=4, chunk=512):
    engine = FakeDrafter(language, limit + 2 * block, language.continuation, lambda drafts: [0.5] * len(drafts))
    return Drafter(engine, fake_manifest(block).drafter, limit, chunk)


def test_drafter_alone():
    """A service commits tokens in steps of its own and asks for drafts; no target of this runtime is involved."""
    language = Language(3)
    drafter, target = make_drafter(language), ElsewhereTarget(language)
    tokens = [1, *language.continuation([1], 30)]
    taps = target.commit(tokens[:6])
    for step in (1, 3, 5, 2):
        at = len(target.tokens)
        draft = drafter.propose(tokens[at], taps, draft_len=3)
        assert draft.tokens == tokens[at + 1 : at + 4]
        assert draft.confidence.dtype == np.float32 and draft.confidence.shape == (3,)
        assert drafter.length == drafter.observed == at
        taps = target.commit(tokens[at : at + step])
    assert drafter.propose(tokens[len(target.tokens)], taps, read_confidence=False).confidence is None


def test_drafter_takes_taps_in_any_pieces():
    language = Language(4)
    tokens = [1, *language.continuation([1], 40)]
    for sizes, chunk in (([30], 7), ([30], 512), ([1] * 30, 7), ([10, 20], 7), ([29, 1], 16)):
        drafter, target = make_drafter(language, chunk=chunk), ElsewhereTarget(language)
        for size in sizes:
            drafter.observe(target.commit(tokens[len(target.tokens) : len(target.tokens) + size]))
        assert drafter.propose(tokens[30]).tokens == tokens[31:35]
        assert max(drafter.engine.context_runs) <= chunk


@pytest.mark.parametrize("size", [0, 5, -1])
def test_drafter_refuses_a_wrong_length(size):
    drafter = make_drafter(Language())
    with pytest.raises(UsageError, match=f"draft length {size}"):
        drafter.propose(1, np.zeros((1, 3), np.float32), draft_len=size)


def test_drafter_hands_over_noise_and_takes_logits():
    language = Language(5)
    drafter, target = make_drafter(language), ElsewhereTarget(language)
    draft = drafter.propose(7, target.commit([1, 2]), temperature=0.5, noise=np.zeros((4, VOCAB), np.float32))
    assert draft.logits is None and drafter.engine.fetched == [("draft_tokens", "confidence")]
    draft = drafter.propose(7, target.commit([7]), draft_len=2, read_confidence=False, read_logits=True)
    assert drafter.engine.fetched[-1] == ("draft_tokens", "draft_logits")
    assert draft.logits.shape == (2, VOCAB) and draft.logits.argmax(-1).tolist() == draft.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0: must be a number from 0"),
        ({"temperature": float("nan")}, "temperature nan: must be a number from 0"),
        ({"temperature": float("inf")}, "temperature inf: must be a number from 0"),
        ({"temperature": 1.0}, "give both, or neither"),
        ({"noise": np.zeros((4, VOCAB), np.float32)}, "give both, or neither"),
        ({"temperature": 1.0, "noise": np.zeros((4, VOCAB))}, r"noise float64 \[4, 40\]; give float32 \[4, 40\]"),
        ({"temperature": 1.0, "noise": np.zeros((3, VOCAB), np.float32)}, r"noise float32 \[3, 40\]; give"),
    ],
)
def test_drafter_refuses_wrong_noise(options, message):
    drafter = make_drafter(Language())
    with pytest.raises(UsageError, match=message):
        drafter.propose(7, np.zeros((1, 3), np.float32), **options)
    assert drafter.observed == 0, "a refused call changes nothing"


def test_a_bundle_without_noise_drafts_greedily():
    language = Language()
    drafter, target = make_drafter(language), ElsewhereTarget(language)
    del drafter.engine.inputs["noise"]
    drafter.propose(7, target.commit([1, 2]))
    with pytest.raises(UsageError, match="exported without noise.*export it again"):
        drafter.propose(7, target.commit([7]), temperature=1.0, noise=np.zeros((4, VOCAB), np.float32))


def test_drafter_refuses_what_it_cannot_hold_or_lacks():
    language = Language()
    drafter, target = make_drafter(language, limit=5), ElsewhereTarget(language)
    with pytest.raises(UsageError, match="no new committed tokens"):
        drafter.propose(1)
    drafter.observe(target.commit([1, 2, 3]))
    with pytest.raises(UsageError, match="full"):
        drafter.observe(target.commit([1, 2, 3]))
    drafter.reset()
    assert drafter.observed == 0
    with pytest.raises(UsageError, match=r"taps \[2, 4\]; a row has 3 numbers, those of 1 layers"):
        drafter.observe(np.zeros((2, 4), np.float32))
