import argparse
import json

import numpy as np
import pytest
from command_line import failed
from fakes import Language, fake_decoder, oracle, right_for

from dspark.errors import DSparkError, UsageError
from dspark.runtime.random import COUPLED, Streams
from dspark.tools import measure as m
from dspark.tools import prompts as disk
from dspark.tools.cli import main
from dspark.tools.commands import bench

SETTINGS = [
    m.Setting(m.PLAIN, {"mode": "plain"}),
    m.Setting("full block"),
    m.Setting("threshold 0.5", {"confidence_threshold": 0.5}),
]
PROMPTS = [m.Prompt("a", "code", [1, 2, 3]), m.Prompt("b", "code", [4]), m.Prompt("c", "chat", [5, 6])]


def measured(language, policy, count=13):
    decoder = fake_decoder(language, policy, confidence=lambda drafts: [0.9, 0.9, 0.1, 0.9, 0.9])
    return decoder, m.measure(decoder, PROMPTS, SETTINGS, count)


def test_figures():
    language = Language(1)
    decoder, runs = measured(language, oracle(language))
    assert [run.setting.name for run in runs[3:6]] == ["full block", "threshold 0.5", "plain"], "the order rotates"
    report = m.report(decoder, runs)
    assert report["differences"] == report["warnings"] == []
    full, plain = report["settings"]["full block"], report["settings"]["plain"]
    assert set(full) == {"all", "code", "chat"}
    assert full["all"]["acceptance_length"] == 6 and plain["all"]["acceptance_length"] == 1
    assert full["code"]["acceptance_per_position"] == [1] * 5 and plain["code"]["acceptance_per_position"] == []
    assert report["settings"]["threshold 0.5"]["all"]["acceptance_length"] == 3
    assert report["settings"]["threshold 0.5"]["all"]["verified_per_round"] == 2
    assert (full["code"]["prompts"], full["code"]["tokens"], full["code"]["rounds"]) == (2, 26, 4)
    assert plain["chat"]["ratio_to_plain"] == 1


def test_acceptance_per_position():
    language = Language(2)
    decoder, runs = measured(language, right_for(language, lambda position: 1 + position % 2))
    figures = m.report(decoder, runs)["settings"]["full block"]["all"]
    assert figures["acceptance_per_position"][0] == 1
    assert 0 < figures["acceptance_per_position"][1] < 1 and figures["acceptance_per_position"][2] == 0


def test_a_useless_drafter_is_warned_about():
    language = Language(3)
    decoder, runs = measured(language, right_for(language, lambda position: 0))
    assert "accepted no draft" in m.report(decoder, runs)["warnings"][0]


def test_nothing_drafted_is_no_benchmark():
    language = Language(4)
    decoder, runs = measured(language, None, count=1)
    with pytest.raises(DSparkError, match="nothing was drafted"):
        m.report(decoder, runs)


def test_schedulers_are_settings(pairs, capsys):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    argv = ["bench", str(pairs("qwen3-vanilla").bundle), "--scheduler", "throughput", "--scheduler", "throughput-async"]
    args = parser.parse_args(argv)
    names = {s.name: s.options.get("scheduler") for s in bench._settings(args, {}, [], args.scheduler)}
    more = {name: name for name in ("throughput", "throughput-async")}
    capsys.readouterr()
    assert names == {"plain": None, "full block": "off", **more}
    failed(capsys, [*argv, "--limit", "1"], 2, "scheduler throughput", "dspark profile")


@pytest.mark.parametrize("gap", [1.0, 1e-5])
def test_differences_are_found(gap):
    """A second run that says another token at position 4 of one answer."""
    language = Language(5)
    decoder, runs = measured(language, oracle(language))
    index = next(i for i, run in enumerate(runs) if run.setting.name == "full block" and run.prompt.id == "b")
    tokens = runs[index].generation.token_ids
    tokens[4] = (tokens[4] + 1) % 30

    class Scaled:
        """The target's logits, with another gap between the best two."""

        def session(self):
            return self

        def next_logits(self, prompt):
            assert len(prompt) == 1 + 4
            return np.array([0, gap, 0], np.float32)

    (difference,) = m.compare(Scaled(), runs)
    assert (difference.prompt, difference.setting, difference.position) == ("b", "full block", 4)
    assert difference.near_tie == (gap < m.NEAR_TIE) and difference.gap == pytest.approx(gap)


def test_a_text_that_ends_early_differs_at_its_end():
    language = Language(6)
    decoder, runs = measured(language, oracle(language))
    next(run for run in runs if run.setting.name == "full block").generation.token_ids.pop()
    assert m.compare(decoder, runs)[0].position == 12


def test_prompts_are_encoded_and_limited_by_kind():
    decoder = fake_decoder(Language())
    rows = [disk.Prompt(str(i), kind, [1, i]) for i, kind in enumerate(("code", "code", "chat", "code"))]
    assert [p.tokens for p in m.encode_prompts(rows, decoder, None)] == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert [p.id for p in m.encode_prompts(rows, decoder, 1)] == ["0", "2"]


@pytest.mark.parametrize(("tokens", "word"), [([1] * 201, "201 tokens"), ([1, 40], "token 40 at index 1")])
def test_a_prompt_that_cannot_be_run_is_named(tokens, word):
    rows = [disk.Prompt("a", "text", [1]), disk.Prompt("b", "text", tokens, "p.jsonl: line 2")]
    with pytest.raises(UsageError, match=f"p.jsonl: line 2: id 'b': .*{word}"):
        m.encode_prompts(rows, fake_decoder(Language()), None)


def test_command(pairs, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": "x", "kind": "code", "prompt": "def f"}, {"id": "y", "kind": "chat", "prompt": "Hi"}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    argv = ["bench", str(pairs("qwen3-vanilla").bundle), "--prompts", str(file), "--threads", "1"]
    thresholds = ["--confidence-threshold", "0.3", "--confidence-threshold", "0.6"]
    assert main([*argv, "--max-new-tokens", "24", *thresholds, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["settings"]) == ["plain", "full block", "threshold 0.3", "threshold 0.6"]
    assert report["differences"] == []
    assert report["settings"]["full block"]["all"]["drafted"] > 0
    assert main([*argv, "--max-new-tokens", "8", "--limit", "1"]) == 0
    assert "every text equals the plain one" in capsys.readouterr().out


def test_command_with_sampling(pairs, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "x", "kind": "code", "prompt": "def f"}), encoding="utf-8")
    argv = [
        "bench",
        str(pairs("qwen3-vanilla").bundle),
        "--prompts",
        str(file),
        "--threads",
        "1",
        "--temperature",
        "0.8",
    ]
    argv += ["--max-new-tokens", "24", "--sampling", "coupled", "--sampling", "exact"]
    assert main([*argv, "--json", "--confidence-threshold", "0.5"]) == 0
    report = json.loads(capsys.readouterr().out)
    schedules = ["", " full block", " threshold 0.5"]
    assert list(report["settings"]) == ["plain", *(f"{r}{s}" for r in ("coupled", "exact") for s in schedules)]
    assert {c["setting"]: c["output_match"] for c in report["comparisons"]} == {
        **{f"coupled{s}": True for s in schedules},
        **{f"exact{s}": None for s in schedules},
    }
    for c in report["comparisons"]:
        figures = report["settings"][c["setting"]]["all"]
        assert c["direct_full_commits"] + c["direct_partial_commits"] == figures["rounds"]
        assert c["replay_fallbacks"] == 0 and c["net_saved"] == figures["tokens"] - 1 - figures["rounds"]
    assert main([*argv, "--compare"]) == 0
    out = capsys.readouterr().out
    assert "drawn otherwise" in out and "where the rule says that it must" in out
    failed(capsys, [*argv[:6], "--sampling", "exact"], 2, "--sampling exact", "--temperature")


@pytest.mark.parametrize("gap", [1.0, 1e-5])
def test_gap_of_a_race(gap):
    """At a temperature above 0 the best two scores of the race are compared, and not the logits."""
    noise, tokens = Streams(3).gumbel(COUPLED, 7, 5), [0] * 7
    logits = 2 * (np.array([0, 1, 1 - gap, -9, -9]) - noise)  # scores: 0, 1, 1 - gap
    found = m._gap(logits, tokens, 7, {"temperature": 2.0, "seed": 3})
    assert found == pytest.approx(gap, abs=1e-9)
    assert m._gap(logits, tokens, 7, {"temperature": 2.0, "seed": 3, "top_k": 1}) is None, "there is no second"
    penalised = m._gap(np.array([9.0, 8.0, 7.5, 0, 0]), [1, 0, 0], 1, {"presence_penalty": 4.0})
    assert penalised == 0.5, "token 0 was said, and is at 5"


def test_command_refuses_a_report_without_drafts(pairs, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "x", "kind": "code", "prompt": "def f"}), encoding="utf-8")
    argv = ["bench", str(pairs("qwen3-vanilla").bundle), "--prompts", str(file), "--max-new-tokens", "1"]
    assert main([*argv, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 1 and "nothing was drafted" in json.loads(out)["error"]
    assert "nothing was drafted" in err


def test_a_prompt_too_long_or_empty_is_named_by_its_line(pairs, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    argv = ["bench", str(pairs("qwen3-vanilla").bundle), "--prompts", str(file)]
    for prompt, word in (("x" * 600, "600"), ("", "empty")):
        lines = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": prompt}]
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        failed(capsys, argv, 2, f"{file}: line 2", *(["'y'"] if prompt else []), *([] if prompt else [word]))


def test_default_prompts_exist(pairs, capsys):
    argv = ["bench", str(pairs("qwen3-vanilla").bundle), "--limit", "1", "--max-new-tokens", "4", "--draft-len", "9"]
    failed(capsys, argv, 2, "draft length 9")
