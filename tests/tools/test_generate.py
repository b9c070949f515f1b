import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import failed
from fakes import Language, fake_decoder, right_for

from dspark.runtime import Draft
from dspark.runtime.schedule import SCHEDULERS
from dspark.tools.cli import main
from dspark.tools.commands import generate as command

STATS = {
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "emitted",
    "ended_rounds",
    "acceptance_length",
    "accepted_per_position",
    "verified_per_position",
    "direct_full_commits",
    "direct_partial_commits",
    "replay_fallbacks",
    "target_steps",
    "net_saved",
    "pauses",
    "paused_rounds",
    "drafter_failures",
    "prefill_ms",
    "draft_ms",
    "verify_ms",
    "engine_ms",
    "total_ms",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def bundle(pairs):
    return str(pairs("qwen3-vanilla").bundle)


def generate(capsys, bundle, *options):
    assert (
        main(["generate", bundle, "--prompt", "Hello wörld", "--max-new-tokens", "20", "--threads", "1", *options]) == 0
    )
    return capsys.readouterr()


def test_json_is_exactly_the_contracts(capsys, bundle):
    out, err = generate(capsys, bundle, "--json", "--ignore-eos")
    answer = json.loads(out)
    assert out.count("\n") == 1 and err == ""
    assert set(answer) == {"text", "token_ids", "finish_reason", "stats"} and set(answer["stats"]) == STATS
    stats = answer["stats"]
    assert stats["emitted"] == len(answer["token_ids"]) == 20 and answer["finish_reason"] == "length"
    assert stats["acceptance_length"] == (stats["emitted"] - 1) / stats["rounds"]
    assert stats["emitted"] == 1 + stats["accepted"] + stats["rounds"] - stats["ended_rounds"]
    assert stats["total_ms"] > stats["prefill_ms"] > 0 and stats["total_ms"] > stats["engine_ms"] > 0


def test_sampling(capsys, bundle):
    """The same seed gives the same text, and plain decoding with it too; the seed that was used is told."""
    options = ["--json", "--temperature", "0.8", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01", "--ignore-eos"]
    fresh = json.loads(generate(capsys, bundle, *options).out)
    assert set(fresh) == {"text", "token_ids", "finish_reason", "stats", "seed"}
    seed = ["--seed", str(fresh["seed"])]
    for more in (["--mode", "plain"], ["--mode", "strict"], ["--draft-temperature", "0"], ["--draft-len", "2"]):
        assert json.loads(generate(capsys, bundle, *options, *seed, *more).out)["token_ids"] == fresh["token_ids"], more
    other = json.loads(generate(capsys, bundle, *options, "--seed", "12345").out)
    assert other["seed"] == 12345 and other["token_ids"] != fresh["token_ids"]
    for rule in ("exact", "opportunistic"):
        assert len(json.loads(generate(capsys, bundle, *options, "--sampling", rule).out)["token_ids"]) == 20


def test_log_probs_penalties_and_stops(capsys, bundle):
    answer = json.loads(generate(capsys, bundle, "--json", "--ignore-eos", "--logprobs", "2").out)
    assert [entry["top"][0][0] for entry in answer["logprobs"]] == answer["token_ids"], "greedy: the likeliest"
    assert all(len(entry["top"]) == 2 and entry["logprob"] == entry["top"][0][1] < 0 for entry in answer["logprobs"])
    stop = answer["token_ids"][5]
    first = answer["token_ids"].index(stop)
    stopped = json.loads(generate(capsys, bundle, "--json", "--ignore-eos", "--stop-token-id", str(stop)).out)
    assert stopped["token_ids"] == answer["token_ids"][: first + 1] and stopped["finish_reason"] == "stop"
    text = answer["text"][4:7]
    stopped = json.loads(generate(capsys, bundle, "--json", "--ignore-eos", "--stop", text).out)
    assert stopped["text"] == answer["text"][: answer["text"].index(text)] and stopped["finish_reason"] == "stop"
    unlike = json.loads(generate(capsys, bundle, "--json", "--ignore-eos", "--frequency-penalty", "100").out)
    assert len(set(unlike["token_ids"])) == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature -1"),
        (["--top-p", "0"], "top p 0"),
        (["--temperature", "1", "--seed", "-1"], "seed -1"),
        (["--logprobs", "-1"], "logprobs -1"),
        (["--stop", ""], "stop"),
        (["--stop-token-id", "100000"], "stop token 100000"),
        (["--pause-below", "2"], "pause below 2"),
    ],
)
def test_wrong_sampling_options(capsys, bundle, options, words):
    failed(capsys, ["generate", bundle, "--prompt", "x", *options], 2, words)


def test_text_is_streamed_to_stdout(capsys, bundle):
    answer = json.loads(generate(capsys, bundle, "--json").out)
    out, err = generate(capsys, bundle)
    assert out == answer["text"] + "\n"
    assert "tokens/s" in err


def test_modes_agree(capsys, bundle):
    answers = [
        json.loads(generate(capsys, bundle, "--json", "--ignore-eos", *options).out)
        for options in (
            [],
            ["--mode", "plain"],
            ["--confidence-threshold", "0.4"],
            ["--scheduler", "off"],
            ["--draft-len", "2"],
            ["--prefill-chunk", "3"],
        )
    ]
    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)
    assert answers[1]["stats"]["drafted"] == 0 and answers[1]["stats"]["acceptance_length"] == 1
    assert len(answers[4]["stats"]["accepted_per_position"]) == 2


def test_no_round(capsys, bundle):
    answer = json.loads(generate(capsys, bundle, "--json", "--max-new-tokens", "1").out)
    assert answer["stats"]["rounds"] == 0 and answer["stats"]["acceptance_length"] is None


def test_trace(capsys, bundle, tmp_path):
    file = tmp_path / "trace ü.jsonl"
    answer = json.loads(generate(capsys, bundle, "--json", "--ignore-eos", "--trace", str(file)).out)
    rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [r["round"] for r in rounds] == list(range(answer["stats"]["rounds"]))
    emitted = [token for r in rounds for token in r["emitted"]]
    assert emitted == answer["token_ids"][1:]
    for before, after in zip(rounds, rounds[1:], strict=False):
        assert before["target_length"][1] == after["target_length"][0] == after["positions"][0]
        assert after["anchor"] == before["emitted"][-1]
    for r in rounds:
        assert len(r["positions"]) == r["verified"] + 1 == r["positions"][-1] - r["positions"][0] + 1
        assert r["target_length"][1] - r["target_length"][0] == r["accepted"] + 1
        assert r["confidences"] is None if not r["drafts"] else len(r["confidences"]) == len(r["drafts"])
        assert r["total_ms"] >= r["engine_ms"] and r["total_ms"] >= r["draft_ms"] + r["verify_ms"] - 0.01


def documented_fields():
    """The names in the first column of the trace's table."""
    text = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text(encoding="utf-8")
    table = text.partition("## Trace")[2].partition("## Training")[0]
    return {name for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}


def test_every_field_of_the_trace_is_documented(capsys, bundle, tmp_path):
    generate(capsys, bundle, "--json", "--trace", str(tmp_path / "trace"))
    line = json.loads((tmp_path / "trace").read_text(encoding="utf-8").splitlines()[0])
    assert set(line) == documented_fields()


def with_drafter(monkeypatch, right):
    """`dspark generate` on a fake pair whose drafter has so many of its tokens right; None: it proposes nothing."""
    language = Language(7)
    policy = right_for(language, lambda position: right or 0)
    decoder = fake_decoder(language, policy, confidence=lambda drafts: [0.5] * len(drafts))
    if right is None:
        monkeypatch.setattr("dspark.runtime.draft.Drafter.propose", lambda *_args, **_options: Draft([], None))
    decoder.encode = lambda prompt, first=True: [1, 2, 3]
    monkeypatch.setattr("dspark.runtime.load", lambda folder, **options: decoder)


@pytest.mark.parametrize(
    ("right", "options", "word"),
    [
        (0, ["--max-new-tokens", "17"], "accepted none of 65 drafts in 16 rounds"),
        (0, ["--max-new-tokens", "16"], None),
        (1, ["--max-new-tokens", "40"], None),
        (0, ["--max-new-tokens", "17", "--confidence-threshold", "1"], "no draft was verified in 16 rounds"),
        (None, ["--max-new-tokens", "3"], "proposed nothing in 2 rounds"),
        (None, ["--max-new-tokens", "2"], None),
        (None, ["--max-new-tokens", "30", "--mode", "plain"], None),
    ],
)
def test_a_useless_drafter_is_warned_about(capsys, monkeypatch, right, options, word):
    with_drafter(monkeypatch, right)
    assert main(["generate", "x", "--prompt", "a", "--ignore-eos", "--json", *options]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == (word is not None)
    assert word is None or (word in err and err.startswith("dspark generate: warning: "))


def test_a_tokenizer_of_another_model(capsys, pairs, tmp_path):
    """Ids that the target does not have would be rows of the embedding that are not there."""
    folder = shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["model"]["vocab"]["Q"] = 300
    data = json.dumps(raw).encode()
    (folder / "tokenizer.json").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["tokenizer.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for chat in ([], ["--chat"]):
        failed(capsys, ["generate", str(folder), "--prompt", "aQ", *chat], 2, "token 300 at index", str(folder), "271")


def test_chat_and_prompt_file(capsys, bundle, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("Hello wörld", encoding="utf-8")
    options = ["--max-new-tokens", "8", "--json", "--threads", "1"]
    answers = []
    for prompt in (["--prompt", "Hello wörld"], ["--prompt-file", str(file)], ["--prompt-file", str(file), "--chat"]):
        assert main(["generate", bundle, *prompt, *options]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--draft-len", "0"], "draft length 0"),
        (["--draft-len", "8"], "draft length 8"),
        (["--max-new-tokens", "0"], "max new tokens"),
        (["--confidence-threshold", "2"], "from 0 to 1"),
        (["--scheduler", "threshold"], "needs one"),
        (["--scheduler", "throughput"], "dspark profile"),
        (["--scheduler", "throughput-global", "--temperature", "1", "--sampling", "exact"], "sampling coupled"),
        (["--threads", "0"], "threads 0"),
        (["--threads", "99999999999"], "threads 99999999999"),
        (["--prompt", "a\ud800"], "character 1 is no Unicode text"),
        (["--prompt", "x" * 600], "context limit"),
    ],
)
def test_bad_options(capsys, bundle, tmp_path, options, word):
    trace = tmp_path / "trace"
    prompt = [] if "--prompt" in options else ["--prompt", "a"]
    failed(capsys, ["generate", bundle, *prompt, "--trace", str(trace), *options], 2, word)
    assert not trace.exists(), "nothing is left behind"


def test_every_scheduler_can_be_chosen():
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    for name in SCHEDULERS:
        assert parser.parse_args(["generate", "b", "--prompt", "a", "--scheduler", name]).scheduler == name
    assert ("off", "threshold", *command.THROUGHPUT) == SCHEDULERS


def test_a_trace_does_not_overwrite_what_is_read(capsys, bundle, tmp_path):
    before = (Path(bundle) / "manifest.json").read_bytes()
    command = ["generate", bundle, "--prompt", "a", "--trace", str(Path(bundle) / "onnx" / ".." / "manifest.json")]
    failed(capsys, command, 2, "--trace", "is in the bundle")
    assert (Path(bundle) / "manifest.json").read_bytes() == before
    (tmp_path / "prompt").write_text("a")
    command = ["generate", bundle, "--prompt-file", str(tmp_path / "prompt"), "--trace", str(tmp_path / "prompt")]
    failed(capsys, command, 2, "--trace", "is the prompt file")
    assert (tmp_path / "prompt").read_text() == "a"


def test_unwritable_trace(capsys, bundle, tmp_path):
    failed(capsys, ["generate", bundle, "--prompt", "a", "--trace", str(tmp_path / "no" / "trace")], 2, "trace")


def test_prompt_that_is_not_text(capsys, bundle, tmp_path):
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    failed(capsys, ["generate", bundle, "--prompt-file", str(tmp_path / "bytes")], 2, "UTF-8")


def test_tampered_bundle(capsys, pairs, tmp_path):
    bundle = tmp_path / "copy"
    shutil.copytree(pairs("qwen3-vanilla").bundle, bundle)
    data = bytearray((bundle / "onnx/target.data").read_bytes())
    data[100] ^= 1
    (bundle / "onnx/target.data").write_bytes(data)
    failed(capsys, ["generate", str(bundle), "--prompt", "a"], 2, "target.data", "SHA-256")
