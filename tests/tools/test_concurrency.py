"""Continuous batching as it is measured: which steps count, what is counted in them, and whose text is compared."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import Language, fake_decoder, oracle, right_for

from dspark.errors import DSparkError, UsageError
from dspark.runtime.batch import Batch
from dspark.tools import concurrency as c
from dspark.tools import frontier
from dspark.tools import measure as m

PLAIN = m.Setting(m.PLAIN, {"mode": "plain"})
FULL = m.Setting("full block", {"scheduler": "off", "draft_len": None})
HALF = m.Setting("threshold 0.5", {"confidence_threshold": 0.5, "draft_len": None})
PROMPTS = [m.Prompt(str(i), kind, [i + 1]) for i, kind in enumerate(("chat", "chat", "chat", "code", "code"))]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test lets it."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(c, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def timed(clock, decoder, step=1.0, row=0.0, draft=0.0):
    """Seconds of a run of the target, of each of its rows, and of a run of the drafter."""

    def slowed(engine, seconds):
        plain = engine.run

        def run(inputs, fetch):
            clock.seconds += seconds(inputs)
            return plain(inputs, fetch)

        engine.run = run

    slowed(decoder.target_engine, lambda inputs: step + row * len(inputs["tokens"]))
    slowed(decoder.drafter_engine, lambda inputs: draft)
    return decoder


def unsure(drafts):
    return [0.9 if token % 3 else 0.1 for token in drafts]


def test_window_of_plain_decoding(clock):
    """By hand. Prompts of a token, 6 tokens each but for the first one's 3: each takes as many steps as it has tokens,
    the first of which reads its prompt. Step 1 reads both prompts and is left out. The places are taken by requests
    that begin at steps 1, 4, 10, 16, 22 and 1, 7, 13, 19, 25; at the end of step 27 one of them is free for good."""
    decoder = timed(clock, fake_decoder(Language(0), requests=2))
    (measured,) = c.measure(decoder, PROMPTS, [2], [PLAIN], 6, 1)
    window = measured.window
    assert (window.steps, window.seconds, window.prompts, window.tokens) == (26, 26, 8, 52)
    assert (window.rounds, window.decoded, window.request_seconds) == (44, 44, 44)
    assert (window.verified, window.accepted, window.drafting_steps) == (0, 0, 0)
    assert sorted(len(run.generation.token_ids) for run in measured.runs) == [3, *[6] * 9]
    figures = c._figures([window], [window])
    assert figures["tokens_per_second"] == 2 and figures["tokens_per_second_per_user"] == 1


@pytest.mark.parametrize("setting", [FULL, HALF], ids=lambda s: s.name)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_window_equals_the_batch_s_own_counters(clock, monkeypatch, setting, concurrency):
    language, log = Language(1), []
    policy = right_for(language, lambda position: position % 4)
    decoder = timed(clock, fake_decoder(language, policy, confidence=unsure, requests=3), 1, 0.1, 0.25)
    plain = Batch.step

    def step(batch):
        held, before, began = batch.running + batch.waiting, copy.deepcopy(batch.counters), clock.seconds
        done = plain(batch)
        log.append((batch, held, before, copy.deepcopy(batch.counters), clock.seconds - began))
        return done

    monkeypatch.setattr(Batch, "step", step)
    (measured,) = c.measure(decoder, PROMPTS, [concurrency], [setting], 12, 1)
    window = measured.window
    full = [entry for entry in log if entry[0] is log[-1][0] and entry[1] == concurrency]
    opened, closed = full[1], full[-1]  # prompts of a token are read in the first step
    assert len(full) < len([entry for entry in log if entry[0] is log[-1][0]]) or concurrency == 1
    (_, _, before, _, _), (_, _, _, after, _) = opened, closed

    def counted(name):
        return getattr(after, name) - getattr(before, name)

    assert window.steps == counted("steps") == len(full) - 1
    assert window.seconds == pytest.approx(sum(entry[4] for entry in full[1:]))
    assert window.tokens == counted("generated_tokens") and window.prompts == counted("prompt_tokens")
    assert window.rounds == counted("rounds") and window.verified == counted("draft_tokens")
    assert window.accepted == counted("accepted_tokens")
    assert window.drafting_steps == sum(b.drafts > a.drafts for _, _, a, b, _ in full[1:])
    seconds = sum((b.rounds - a.rounds) * spent for _, _, a, b, spent in full[1:])
    assert window.request_seconds == pytest.approx(seconds)
    assert after.accepted_tokens > before.accepted_tokens and window.verified > window.accepted


def test_report(clock):
    language = Language(2)
    policy = right_for(language, lambda position: position % 3)
    decoder = timed(clock, fake_decoder(language, policy, confidence=unsure, requests=4), 1, 0.05, 0.2)
    done = []
    measured = c.measure(decoder, PROMPTS, [4, 1], [PLAIN, FULL, HALF], 10, 2, done.append)
    assert measured == done
    order = [(each.concurrency, each.setting.name) for each in measured]
    names = ["plain", "full block", "threshold 0.5"]
    turns = [names[i:] + names[:i] for i in (0, 1, 1, 2)]
    assert order == [(n, name) for n, turn in zip([1, 4, 1, 4], turns, strict=True) for name in turn]
    report = c.report(decoder, measured)
    assert report["differences"] == report["warnings"] == []
    assert [(p["concurrency"], p["setting"]) for p in report["points"]] == [(n, s) for n in (1, 4) for s in names]
    for p in report["points"]:
        mine = [e.window for e in measured if (e.concurrency, e.setting.name) == (p["concurrency"], p["setting"])]
        base = [e.window for e in measured if (e.concurrency, e.setting.name) == (p["concurrency"], "plain")]

        def total(name, windows=mine):
            return sum(getattr(w, name) for w in windows)

        speed = (total("decoded") + total("prompts")) / total("seconds")
        reference = (total("decoded", base) + total("prompts", base)) / total("seconds", base)
        assert p["tokens_per_second"] == pytest.approx(speed)
        assert p["ratio_to_plain"] == pytest.approx(speed / reference)
        assert p["tokens_per_second_per_user"] == pytest.approx(total("decoded") / total("request_seconds"))
        assert p["verified_per_round"] == pytest.approx(total("verified") / total("rounds"))
        assert p["tokens_per_round"] == pytest.approx(total("decoded") / total("rounds"))
        assert p["tokens_per_round"] == pytest.approx(1 + total("accepted") / total("rounds"))
        if p["setting"] == "plain":
            assert p["accept_rate"] is None and p["drafting_share"] == 0 and p["ratios"] == [1, 1]
        else:
            assert p["accept_rate"] == pytest.approx(total("accepted") / total("verified"))
            assert 0 < p["drafting_share"] <= 1 and len(p["ratios"]) == 2
    json.dumps(report)


def test_jobs():
    """Kinds in turn; the first answers end one after the other; a repetition goes on with the next prompts."""
    mixed, jobs = ["0", "3", "1", "4", "2"], c.make_jobs(PROMPTS, 4, 0, 10)
    assert [job.prompt.id for job in jobs] == [mixed[i % 5] for i in range(12)]
    assert [job.max_new_tokens for job in jobs] == [3, 5, 8, 10] + [10] * 8
    later = c.make_jobs(PROMPTS, 4, 1, 10)
    assert [job.prompt.id for job in later] == [mixed[(12 + i) % 5] for i in range(12)]
    assert [job.max_new_tokens for job in c.make_jobs(PROMPTS, 32, 0, 64)[:4]] == [2, 4, 6, 8]
    assert [job.max_new_tokens for job in c.make_jobs(PROMPTS, 32, 0, 8)[:5]] == [2] * 5, "one is the prompt's alone"
    assert len(c.make_jobs(PROMPTS, 32, 0, 64)) == 64


def test_every_measurement_has_a_scheduler_of_its_own():
    decoder = fake_decoder(Language(0), requests=2)
    first, second = (c.open_batch(decoder, HALF) for _ in range(2))
    assert first.scheduler is not second.scheduler and first.scheduler.threshold == 0.5
    assert c.open_batch(decoder, m.Setting("x", {"draft_len": 2})).draft_len == 2


def changed(measured, concurrency, name, prompt, position):
    """Let all answers to a prompt in a measurement say another token at a position."""
    for each in measured:
        if (each.concurrency, each.setting.name) == (concurrency, name):
            for run in each.runs:
                if run.prompt.id == prompt and len(run.generation.token_ids) > position:
                    run.generation.token_ids[position] = (run.generation.token_ids[position] + 1) % 30


class Scaled:
    """The target's logits, with a gap between the best two."""

    def __init__(self, language, gap):
        self.language, self.gap = language, gap

    def session(self):
        return self

    def next_logits(self, tokens):
        logits = np.zeros(40)
        best = self.language.next(tokens)
        logits[best], logits[(best + 1) % 30] = 5, 5 - self.gap
        return logits


@pytest.mark.parametrize("gap", [1.0, 1e-5])
def test_texts_are_held_to_plain_ones(gap):
    language = Language(5)
    decoder = fake_decoder(language, oracle(language), requests=2)
    measured = c.measure(decoder, PROMPTS, [1, 2], [PLAIN, FULL], 8, 1)
    assert c.compare(decoder, measured) == []
    changed(measured, 2, "full block", "1", 3)
    changed(measured, 2, "plain", "4", 5)
    found = c.compare(Scaled(language, gap), measured)
    assert {(d.prompt, d.setting, d.position) for d in found} == {("1", "full block at 2", 3), ("4", "plain at 2", 5)}
    for d in found:
        assert d.gap == pytest.approx(gap) and d.near_tie == (gap < m.NEAR_TIE)
    changed(measured, 1, "plain", "0", 0)
    assert {d.setting for d in c.compare(Scaled(language, gap), measured) if d.prompt == "0"} == {
        "full block at 1",
        "full block at 2",
        "plain at 2",
    }


def test_texts_that_a_rule_draws_otherwise_are_not_compared():
    language = Language(5)
    decoder = fake_decoder(language, oracle(language), requests=2)
    other = m.Setting("exact", {"scheduler": "off"}, comparable=False)
    measured = c.measure(decoder, PROMPTS, [2], [PLAIN, other], 8, 1)
    changed(measured, 2, "exact", "1", 3)
    assert c.compare(decoder, measured) == []


def test_a_request_that_fails_ends_the_measurement():
    def broken(tokens, logits):
        if len(tokens) > 6:
            raise ValueError("no such token")
        return logits

    decoder = fake_decoder(Language(0), requests=2)
    setting = m.Setting(m.PLAIN, {"mode": "plain", "logit_processors": [broken]})
    with pytest.raises(DSparkError, match=r"bench: \d, plain: the answer ended by error: .*no such token"):
        c.measure(decoder, PROMPTS, [2], [setting], 12, 1)


def test_a_setting_that_cannot_be_run_is_refused_before_anything_is_measured():
    done = []
    settings = [PLAIN, m.Setting("wrong", {"scheduler": "throughput"})]
    with pytest.raises(UsageError, match="scheduler throughput"):
        c.measure(fake_decoder(Language(0), requests=2), PROMPTS, [2], settings, 8, 1, done.append)
    assert done == []


def test_more_at_once_than_the_engines_take():
    with pytest.raises(UsageError, match="concurrency 3: .* for 2 requests"):
        c.measure(fake_decoder(Language(0), requests=2), PROMPTS, [1, 3], [PLAIN], 8, 1)


def test_no_window():
    """The first prompt takes longer to read than all other requests to be answered."""
    decoder = fake_decoder(Language(0), requests=2)
    decoder.target_engine.most_rows = 4
    prompts = [m.Prompt("long", "text", [1] * 150), m.Prompt("short", "text", [2])]
    jobs = [c.Job(prompt, 2) for prompt in (prompts[0], *prompts[1:] * 9)]
    with pytest.raises(DSparkError, match="no step ran with 2 requests at once, plain: .*--max-new-tokens"):
        c._run(c.open_batch(decoder, PLAIN), jobs, 2, PLAIN)


def test_nothing_drafted_is_no_benchmark():
    decoder = fake_decoder(Language(0), requests=2)
    measured = c.measure(decoder, PROMPTS, [2], [PLAIN, m.Setting("none", {"mode": "plain"})], 8, 1)
    with pytest.raises(DSparkError, match="nothing was drafted"):
        c.report(decoder, measured)


def test_useless_and_failing_drafters_are_warned_about():
    language = Language(3)
    decoder = fake_decoder(language, right_for(language, lambda position: 0), requests=2)
    measured = c.measure(decoder, PROMPTS, [2], [PLAIN, FULL], 8, 1)
    assert c.report(decoder, measured)["warnings"] == [m.USELESS]
    measured[-1].window.drafter_failures = 3
    assert "failed in 3 requests" in c.report(decoder, measured)["warnings"][1]


@pytest.mark.parametrize(
    ("numbers", "repeats", "word"), [([0, 2], 1, "--concurrency 0"), ([2, 4, 2], 1, "2,4,2"), ([1], 0, "--repeats 0")]
)
def test_numbers_that_cannot_be_measured(numbers, repeats, word):
    with pytest.raises(UsageError, match=word):
        c.check(numbers, repeats)


def test_diagrams(tmp_path):
    points = [
        {"setting": s, "concurrency": n, "tokens_per_second": n * 2.0, "tokens_per_second_per_user": u}
        | {"verified_per_round": 1}
        for s in ("plain", "full block")
        for n, u in ((1, 3.0), (2, None), (4, 1.0))
    ]
    assert frontier.lines(points, "tokens_per_second_per_user", "tokens_per_second") == {
        name: [(3.0, 2.0, 1), (1.0, 8.0, 4)] for name in ("plain", "full block")
    }
    frontier.draw(points, tmp_path)
    for name in (frontier.FRONTIER, frontier.BUDGET):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
