import json
import shutil

import pytest
from command_line import failed

from dspark.tools.cli import main

STATS = {
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "emitted",
    "acceptance_length",
    "accepted_per_position",
    "verified_per_position",
    "direct_full_commits",
    "direct_partial_commits",
    "replay_fallbacks",
    "draft_ms",
    "verify_ms",
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
        (["--threads", "0"], "threads 0"),
        (["--prompt", "x" * 600], "context limit"),
    ],
)
def test_bad_options(capsys, bundle, tmp_path, options, word):
    trace = tmp_path / "trace"
    prompt = [] if "--prompt" in options else ["--prompt", "a"]
    failed(capsys, ["generate", bundle, *prompt, "--trace", str(trace), *options], 2, word)
    assert not trace.exists(), "nothing is left behind"


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
