import math

import numpy as np
import pytest
from fakes import Language, fake_decoder

from dspark.errors import UsageError
from dspark.runtime.schedule import GATE, FullBlock, Threshold, make_scheduler


@pytest.mark.parametrize(
    ("confidence", "length"),
    [
        ([0.9, 0.9, 0.9], 3),
        ([0.9, 0.4, 0.9], 1),
        ([0.4, 0.9, 0.9], 0),
        ([0.5, 0.5, 0.49], 2),
        ([0.9, math.nan, 0.9], 1),
        ([math.nan], 0),
    ],
)
def test_threshold_stops_at_the_first_doubtful_token(confidence, length):
    rows, drafted = np.array([confidence, confidence], np.float32), np.array([len(confidence), 1])
    assert Threshold(0.5).lengths(rows, drafted).tolist() == [length, min(length, 1)]


def test_the_gate_shows_two_drafts_whatever_their_confidence():
    rows = np.array([[0.1, 0.1, 0.9, 0.9, 0.7], [0.9, math.nan, 0.7, 0.9, 0.9]], np.float32)
    assert GATE.lengths(rows, np.array([5, 5])).tolist() == [4, 2]
    assert GATE.lengths(rows[:, :1], np.array([1, 0])).tolist() == [1, 0]


def test_threshold_zero_is_the_full_block_and_reads_no_confidence():
    scheduler = make_scheduler("threshold", 0.0, has_confidence=False)
    assert isinstance(scheduler, FullBlock)
    language = Language(1)
    decoder = fake_decoder(language)
    decoder.generate([1, 2], max_new_tokens=20, confidence_threshold=0.0)
    assert not any("confidence" in fetch for fetch in decoder.drafter_engine.fetched)
    decoder.generate([1, 2], max_new_tokens=20, confidence_threshold=0.5)
    assert any("confidence" in fetch for fetch in decoder.drafter_engine.fetched)


def test_threshold_needs_a_confidence_head():
    with pytest.raises(UsageError, match="no confidence head"):
        make_scheduler(None, 0.5, has_confidence=False)


@pytest.mark.parametrize("cut", range(6))
def test_verify_shrinks_with_the_schedule(cut):
    language = Language(2)
    decoder = fake_decoder(language, confidence=lambda drafts: [0.9] * cut + [0.1] * (5 - cut))
    rounds = []
    result = decoder.generate([1, 2], max_new_tokens=30, confidence_threshold=0.5, on_round=rounds.append)
    assert result.token_ids == language.continuation([1, 2], 30)
    whole = rounds[:-1] if cut else rounds  # the last may be bounded by the limit
    assert {r.verified for r in whole} == {cut} == {rows - 1 for rows in decoder.target_engine.runs[1 : 1 + len(whole)]}
    assert result.stats.drafted >= result.stats.verified
