"""A drafter that crashes or gives NaN in a session: the turn goes on plainly, and the next one tries again."""

import numpy as np
import pytest
from fakes import Language, fake_decoder, oracle

from dspark.runtime.draft import Drafter, DraftError

LANGUAGE = Language(9)
PROMPT = [4, 2]


class Breaking:
    """An engine that fails in some of its runs, or changes what they give."""

    def __init__(self, engine, spoil):
        self.engine, self.spoil, self.runs, self.owners = engine, spoil, 0, {}

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run(self, inputs, fetch):
        self.runs += 1
        outputs = self.engine.run(inputs, fetch)
        self.spoil(self.runs, outputs)
        return outputs


def crash(at: int):
    def spoil(run, outputs):
        if run == at:
            raise MemoryError("no memory")

    return spoil


def nan(at: int):
    def spoil(run, outputs):
        if run == at:
            outputs["confidence"][0, 1] = np.nan

    return spoil


def decoder_with(spoil):
    decoder = fake_decoder(LANGUAGE, oracle(LANGUAGE))
    decoder.drafter_engine = Breaking(decoder.drafter_engine, spoil)
    return decoder


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize(("spoil", "why"), [(crash, "no memory"), (nan, "NaN")])
def test_the_turn_goes_on_plainly(spoil, why, at, caplog):
    rounds = []
    talk = decoder_with(spoil(at)).session()
    result = talk.generate(PROMPT, max_new_tokens=40, read_confidence=True, on_round=rounds.append)
    assert result.token_ids == LANGUAGE.continuation(PROMPT, 40)
    assert result.stats.drafter_failures == result.to_json()["stats"]["drafter_failures"] == 1
    failed = [i for i, done in enumerate(rounds) if done.failure]
    assert failed == [at - 1] and why in rounds[at - 1].failure
    assert all(done.drafts for done in rounds[: at - 1]) and not any(done.drafts for done in rounds[at:])
    assert rounds[at - 1].verified == (spoil is nan), "the draft before the one with NaN is as good as any"
    assert caplog.text.count("goes on without drafts") == 1 and why in caplog.text
    again = talk.generate([7], max_new_tokens=20)
    expected = LANGUAGE.continuation([*PROMPT, *result.token_ids, 7], 20)
    assert again.token_ids == expected and again.stats.accepted > 10 and again.stats.drafter_failures == 0


def test_a_failure_while_a_prompt_is_read(caplog):
    """Prompts longer than the drafter's chunk make runs of their own before any draft."""
    prompt = [1] * 1300
    decoder = fake_decoder(LANGUAGE, oracle(LANGUAGE), limit=1500)
    decoder.drafter_engine = Breaking(decoder.drafter_engine, crash(1))
    result = decoder.generate(prompt, max_new_tokens=12)
    assert result.token_ids == LANGUAGE.continuation(prompt, 12) and result.stats.drafter_failures == 1
    assert result.stats.drafted == 0 and "no memory" in caplog.text


def test_a_drafter_alone_tells_its_caller():
    decoder = decoder_with(crash(2))
    drafter = Drafter(decoder.drafter_engine, decoder.manifest.drafter, 100)
    taps = np.array([[token, at, LANGUAGE.hash(PROMPT[: at + 1])] for at, token in enumerate(PROMPT)], np.float32)
    drafter.propose(5, taps)
    drafter.reset()
    with pytest.raises(DraftError, match="^drafter: no memory$"):
        drafter.propose(5, taps)
    drafter.reset()
    assert drafter.propose(5, taps).tokens == LANGUAGE.continuation([*PROMPT, 5], 5)
