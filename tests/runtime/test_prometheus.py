"""What Prometheus is shown: counts of a known run, by a plain loop over its rounds."""

import sys

import pytest
from fakes import STOPS, Language, fake_decoder, right_for
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dspark.errors import DSparkError
from dspark.runtime.batch import Batch
from dspark.runtime.prometheus import Collector
from dspark.runtime.schedule import Threshold

PLANTED = {9: STOPS[0], 30: STOPS[0]}


def rendered(batch):
    """{(name, labels): value} of the text that a scrape gets, and {name: (type, help)}."""
    registry = CollectorRegistry()
    registry.register(Collector(batch))
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    values = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    return values, {family.name: (family.type, family.documentation) for family in families}


def confidence(drafts):
    """Of the drafts themselves, so that rounds verify different numbers: none, some and all."""
    return [0.1 if token % 4 == 0 else 0.9 for token in drafts]


@pytest.fixture
def run():
    language = Language(3, PLANTED)
    policy = right_for(language, lambda position: position % 4)
    decoder = fake_decoder(language, policy, confidence=confidence, requests=3)
    return Batch(decoder, Threshold(0.5), draft_len=4)


def test_counts_of_a_run(run):
    requests, rounds, prompts, tokens = [], [], [[1, 2, 3], [4], [5, 6], [7, 8], [9] * 5], 0
    for number, prompt in enumerate(prompts):
        mode = "plain" if number == 1 else "speculative"
        requests.append(run.submit(prompt, max_new_tokens=20 + number, mode=mode, ignore_eos=number == 2))
    for request in requests:
        for chunk in request:
            tokens += len(chunk.token_ids)
            if chunk.round is not None:
                rounds.append(chunk.round)
    run.submit([1, 1]).cancel()
    assert not run.step()

    drafting = [r for r in rounds if r.drafts]
    assert len(drafting) < len(rounds) and {r.verified for r in drafting} >= {0, 1, 4}
    reasons = [request.generation.finish_reason for request in requests] + ["cancelled"]
    assert {"stop", "length"} < set(reasons)
    expected = {
        ("spec_decode_num_drafts_total",): len(drafting),
        ("spec_decode_num_proposed_tokens_total",): sum(len(r.drafts) for r in rounds),
        ("spec_decode_num_draft_tokens_total",): sum(r.verified for r in rounds),
        ("spec_decode_num_accepted_tokens_total",): sum(r.accepted for r in rounds),
        ("rounds_total",): len(rounds),
        ("steps_total",): len(run.decoder.target_engine.runs),
        ("prompt_tokens_total",): sum(map(len, prompts)),
        ("generation_tokens_total",): tokens,
        ("drafter_failures_total",): 0,
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
    }
    for k in range(4):
        position = str(k)
        expected["spec_decode_num_draft_tokens_per_pos_total", position] = sum(r.verified > k for r in rounds)
        expected["spec_decode_num_accepted_tokens_per_pos_total", position] = sum(r.accepted > k for r in rounds)
    for reason in set(reasons):
        expected["request_success_total", reason] = reasons.count(reason)
    values, families = rendered(run)
    assert values == {(f"dspark_{name}", *labels): value for (name, *labels), value in expected.items()}
    for name, (kind, text) in families.items():
        assert kind == ("gauge" if "num_requests" in name else "counter") and len(text) > 20


def test_requests_that_run_and_wait(run):
    for number in range(5):
        run.submit([1 + number], max_new_tokens=9)
    run.step()
    values, _ = rendered(run)
    assert (values["dspark_num_requests_running",], values["dspark_num_requests_waiting",]) == (3, 2)
    assert values["dspark_steps_total",] == 1 and values["dspark_generation_tokens_total",] == 3
    assert not [name for name in values if name[0] == "dspark_request_success_total"]


def test_a_drafter_that_fails_is_counted(run):
    def crash(inputs, fetch):
        raise DSparkError("out of memory")

    for number in range(2):
        run.submit([1 + number], max_new_tokens=9, ignore_eos=True)
    run.step()
    run.decoder.drafter_engine.run = crash
    while run.step():
        pass
    values, _ = rendered(run)
    assert values["dspark_drafter_failures_total",] == 2 and values["dspark_request_success_total", "length"] == 2


def test_a_registry_takes_one_batch(run):
    registry = CollectorRegistry()
    registry.register(Collector(run))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector(run))


def test_without_the_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(DSparkError, match=r"prometheus_client is missing; .*pip install '\.\[metrics\]'"):
        Collector(run)
