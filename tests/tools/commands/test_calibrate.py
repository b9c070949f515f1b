"""`dspark calibrate`: what it prints, keeps and draws, and that a failure leaves nothing behind."""

import json
import shutil
import sys

import pytest
from command_line import failed

from dspark.manifest import read_manifest
from dspark.runtime import load
from dspark.tools import calibration
from dspark.tools.cli import main


@pytest.fixture
def bundle(pairs, tmp_path, capsys):
    folder = shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")
    capsys.readouterr()  # what making the bundle printed
    return folder


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "kind": "code", "prompt": f"def f{i}(x):"} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(file)


def content(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_calibration(bundle, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibration, "LEAST", 10)
    before, out = content(bundle), tmp_path / "report"
    argv = ["calibrate", str(bundle), "--prompts", prompts, "--max-new-tokens", "40", "--holdout", "0.4"]
    assert main([*argv, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fitted_on"]["prompts"] == 3 and report["held_out"]["prompts"] == 2
    assert len(report["temperatures"]) == len(report["shifts"]) == 7 and report["bins"] == "15 of equal mass"
    assert report["positions"][0]["rounds"] <= report["held_out"]["rounds"]
    for p in report["positions"]:
        for name in ("before", "after"):
            assert {"ece", "auc", "brier", "mean", "ece_by_chance", "bins"} <= set(p[name])
            assert sum(b["count"] for b in p[name]["bins"]) == p["rounds"]
    assert json.loads((out / "calibration.json").read_text(encoding="utf-8")) == report
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")
    after = content(bundle)
    assert set(after) == set(before)
    assert [name for name in after if after[name] != before[name]] == ["manifest.json"]
    kept = read_manifest(bundle).calibration
    assert kept == load(bundle).calibration
    assert (kept.temperatures, kept.shifts) == (tuple(report["temperatures"]), tuple(report["shifts"]))
    assert (kept.rounds, kept.prompts, kept.temperature) == (report["fitted_on"]["rounds"], 3, 0)

    assert main(["inspect", str(bundle)]) == 0
    inspected = capsys.readouterr().out
    assert f"on {kept.rounds} rounds of 3 prompts, greedy" in inspected
    assert f"shifts: {kept.shifts[0]:.2f} " in inspected
    argv = [*argv[:-2], "--limit", "2", "--holdout-prompts", prompts, "--temperature", "0.7"]
    assert main(argv) == 0
    assert "fitted on" in capsys.readouterr().out
    assert read_manifest(bundle).calibration.temperature == 0.7
    assert main(["inspect", str(bundle)]) == 0
    assert "at temperature 0.7" in capsys.readouterr().out


def test_without_matplotlib(bundle, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "report"
    argv = ["calibrate", str(bundle), "--prompts", prompts, "--limit", "2", "--max-new-tokens", "8", "--out", str(out)]
    assert main(argv) == 0
    assert capsys.readouterr().err.count(".[plot]") == 1
    assert [file.name for file in out.iterdir()] == ["calibration.json"]


def test_little_data_is_said(bundle, prompts, capsys):
    argv = ["calibrate", str(bundle), "--prompts", prompts, "--limit", "2", "--max-new-tokens", "8"]
    assert main(argv) == 0
    assert "warning: draft 1: reached in" in capsys.readouterr().err
    kept = read_manifest(bundle).calibration
    assert (kept.temperatures, kept.shifts) == ((1.0,) * 7, (0.0,) * 7)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--holdout", "1"], 2, ["--holdout 1"]),
        (["--limit", "0"], 2, ["--limit 0"]),
        (["--limit", "1"], 2, ["two prompts"]),
        (["--holdout-prompts", "no/such/file"], 2, ["no/such/file"]),
        (["--temperature", "-1"], 2, ["temperature"]),
        (["--out", "."], 2, ["exists already"]),
    ],
    ids=str,
)
def test_wrong_use(bundle, prompts, capsys, options, code, words):
    before = content(bundle)
    failed(capsys, ["calibrate", str(bundle), "--prompts", prompts, "--max-new-tokens", "4", *options], code, *words)
    assert content(bundle) == before


def test_nothing_drafted(bundle, prompts, capsys, tmp_path):
    before, out = content(bundle), tmp_path / "report"
    argv = ["calibrate", str(bundle), "--prompts", prompts, "--max-new-tokens", "1", "--out", str(out)]
    assert main(argv) == 1
    assert "no round" in capsys.readouterr().err.splitlines()[-1]
    assert content(bundle) == before and not out.exists()


def test_a_drafter_without_confidences(pairs, prompts, capsys):
    bundle = pairs("llama-none").bundle
    capsys.readouterr()
    failed(capsys, ["calibrate", str(bundle), "--prompts", prompts], 2, "no confidence head")
