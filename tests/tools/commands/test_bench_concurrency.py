"""`dspark bench --concurrency`: settings, what is written, and what is refused."""

import json
import shutil
import sys

import pytest
from command_line import failed

from dspark.tools.cli import main


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"{kind}{i}", "kind": kind, "prompt": f"def f{i}(x):"} for kind in ("code", "chat") for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(file)


@pytest.fixture
def argv(pairs, prompts, capsys):
    bundle = str(pairs("qwen3-vanilla").bundle)
    capsys.readouterr()  # what making the bundle printed
    return ["bench", bundle, "--prompts", prompts, "--threads", "1", "--max-new-tokens", "16"]


def test_settings_and_files(argv, tmp_path, capsys):
    """With a profile of batches the default is plain, the full block, the threshold 0.4 and throughput."""
    bundle = shutil.copytree(argv[1], tmp_path / "bundle")
    profile = ["profile", str(bundle), "--threads", "1", "--context", "20", "--repeats", "1"]
    assert main([*profile, "--max-batch-size", "3"]) == 0
    capsys.readouterr()
    argv[1], out = str(bundle), tmp_path / "report"
    assert main([*argv, "--concurrency", "3,1", "--repeats", "1", "--out", str(out), "--json"]) == 0
    printed, err = capsys.readouterr()
    report = json.loads(printed)
    names = ["plain", "full block", "threshold 0.4", "throughput"]
    assert [(p["concurrency"], p["setting"]) for p in report["points"]] == [(n, s) for n in (1, 3) for s in names]
    assert report["differences"] == [] and (report["max_batch_size"], report["repeats"]) == (3, 1)
    assert err.count(" tokens/s\n") == 8
    for p in report["points"]:
        assert p["tokens"] > 0 and (p["verified_per_round"] == 0) == (p["setting"] == "plain")
    assert json.loads((out / "concurrency.json").read_text(encoding="utf-8")) == report
    assert sorted(f.name for f in out.iterdir()) == ["budget.png", "concurrency.json", "frontier.png"]
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")

    more = ["--confidence-threshold", "0.2", "--confidence-threshold", "0.7", "--scheduler", "throughput-async"]
    assert main([*argv, "--concurrency", "2", *more]) == 0, "a profile of more requests at once will do"
    text = capsys.readouterr().out
    for name in ("full block", "threshold 0.2", "threshold 0.7", "throughput-async", "every text"):
        assert name in text
    assert "throughput " not in text and "threshold 0.4" not in text


def test_without_matplotlib(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "report"
    argv += ["--concurrency", "2", "--repeats", "1", "--scheduler", "none", "--out", str(out)]
    assert main(argv) == 0
    assert "pip install '.[plot]'" in capsys.readouterr().err
    assert [f.name for f in out.iterdir()] == ["concurrency.json"]
    failed(capsys, argv, 2, str(out))


def test_a_scheduler_without_a_profile(argv, capsys):
    command = f"dspark profile {argv[1]} --threads 1 --max-batch-size 4"
    failed(capsys, [*argv, "--concurrency", "1,4"], 2, command, "--scheduler none")
    failed(capsys, [*argv, "--concurrency", "4", "--scheduler", "throughput-async", "--json"], 2, command)
    failed(capsys, [*argv, "--concurrency", "1"], 2, command.removesuffix(" --max-batch-size 4") + "; or leave")


def test_a_rule_at_a_temperature(argv, capsys):
    argv += ["--concurrency", "3", "--repeats", "1", "--scheduler", "none", "--temperature", "0.8"]
    assert main([*argv, "--sampling", "coupled", "--sampling", "exact", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    named = [f"{rule} {schedule}" for rule in ("coupled", "exact") for schedule in ("full block", "threshold 0.4")]
    assert [p["setting"] for p in report["points"]] == ["plain", *named]
    assert report["differences"] == [] and report["sampling"] == {"temperature": 0.8, "seed": 0}


def test_a_drafter_without_confidences(argv, pairs, capsys):
    argv[1] = str(pairs("llama-none").bundle)
    capsys.readouterr()
    argv += ["--concurrency", "2", "--repeats", "1"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["setting"] for p in report["points"]] == ["plain", "full block"]
    failed(capsys, [*argv, "--confidence-threshold", "0.4"], 2, "no confidence head")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "0"], ["--concurrency 0"]),
        (["--concurrency", "1,x"], ["'1,x'", "numbers with commas"]),
        (["--concurrency", ""], ["numbers with commas"]),
        (["--concurrency", "2,2"], ["2,2", "twice"]),
        (["--concurrency", "2000"], ["2000", "1 to 1024"]),
        (["--concurrency", "2", "--repeats", "0"], ["--repeats 0"]),
        (["--concurrency", "2", "--compare"], ["--compare"]),
        (["--concurrency", "2", "--scheduler", "none", "--draft-len", "9"], ["draft length 9"]),
        (["--concurrency", "2", "--limit", "0"], ["--limit 0"]),
        (["--repeats", "2"], ["--repeats", "--concurrency"]),
        (["--out", "x"], ["--out", "--concurrency"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_use(argv, capsys, options, words):
    failed(capsys, [*argv, *options], 2, *words)


def test_a_text_that_differs_fails(argv, capsys, monkeypatch):
    from dspark.tools import concurrency, measure

    wrong = measure.Difference("code0", "full block at 2", 3, 0.5, False)
    monkeypatch.setattr(concurrency, "compare", lambda decoder, measured: [wrong])
    assert main([*argv, "--concurrency", "2", "--repeats", "1", "--scheduler", "none"]) == 1
    out, err = capsys.readouterr()
    assert "1 texts differ" in out and "NOT a near-tie" in err
