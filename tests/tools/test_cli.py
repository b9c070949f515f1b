"""What holds for every command: help without heavy packages, one line for an error, one object for --json."""

import hashlib
import json
import shutil
import subprocess
import sys
from functools import reduce

import pytest
from command_line import failed

from dspark.tools.cli import build_parser, main

COMMANDS = ("bench", "build", "calibrate", "doctor", "generate", "inspect", "profile", "train", "verify")


def test_help_needs_nothing_but_python():
    program = f"""
import sys, contextlib, io
for name in ("torch", "transformers", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "tokenizers", "numpy"):
    sys.modules[name] = None
from dspark.tools.cli import main
for argv in [["--help"], ["--version"], *([name, "--help"] for name in {COMMANDS!r})]:
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(argv)
    except SystemExit as exit_:
        assert exit_.code == 0 and out.getvalue(), argv
    else:
        raise AssertionError(argv)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_command_takes_json():
    for name in COMMANDS:
        bundle = [] if name in ("doctor", "train") else ["x"]
        needed = {"generate": ["--prompt", "x"], "build": ["--backend", "tensorrt"], "calibrate": ["--prompts", "x"]}
        prompt = needed.get(name, [])
        if name != "train":
            assert build_parser().parse_args([name, *bundle, *prompt, "--json"]).json


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["COMMAND"]),
        (["sing"], ["sing"]),
        (["generate", "x"], ["--prompt"]),
        (["generate", "x", "--prompt", "a", "--temperature", "hot"], ["--temperature"]),
        (["generate", "x", "--prompt", "a", "--mode", "fast"], ["fast"]),
        (["generate", "x", "--prompt", "a", "--sampling", "greedy"], ["greedy"]),
        (["bench", "x", "--limit", "none"], ["--limit"]),
        (["bench", "x", "--limit", "0"], ["--limit 0"]),
        (["generate", "no/such/bundle", "--prompt", "a"], ["no/such/bundle", "dspark-export"]),
        (["inspect", "no/such/bundle"], ["no/such/bundle"]),
        (["doctor", "no/such/bundle"], ["no/such/bundle"]),
        (["generate", "x", "--prompt", ""], ["empty"]),
        (["generate", "x", "--prompt-file", "no/such/file"], ["no/such/file"]),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_wrong_use(capsys, argv, words, form):
    failed(capsys, [*argv, *form], 2, *words)


def test_inspect(pairs, capsys):
    bundle = pairs("qwen3-vanilla").bundle
    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    for word in ("qwen3", "block 7", "vanilla", "onnx/target.cpu.onnx", "passed"):
        assert word in text
    assert main(["inspect", str(bundle), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    assert manifest.items() <= out.items()
    assert out["total_bytes"] == sum(entry["size"] for entry in manifest["files"].values())
    assert out["parity_report"]


def test_inspect_names_the_kinds_of_state(pairs, capsys):
    assert main(["inspect", str(pairs("hybrid").bundle)]) == 0
    text = capsys.readouterr().out
    assert "logits, taps; 2 caches, 4 recurrent states, after the last 8 rows" in text
    assert "draft_logits; 4 caches\n" in text


def test_inspect_names_the_windows(pairs, capsys):
    assert main(["inspect", str(pairs("qwen3-gated").bundle)]) == 0
    text = capsys.readouterr().out
    assert "logits, taps; 6 caches (4 with windows [8])\n" in text and "draft_logits; 4 caches\n" in text


def test_train_explains_the_mask_token(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "stands for every draft that is still to be found" in text and "that no text uses" in text


def damage(pairs, tmp_path, report=None, **changes):
    """A copy of a bundle with another parity report, listed as such, and manifest entries given as path__to__key."""
    folder = shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if report is not None:
        (folder / "parity.json").write_bytes(report)
        raw["files"]["parity.json"] = {"sha256": hashlib.sha256(report).hexdigest(), "size": len(report)}
    for path, value in changes.items():
        *parents, last = path.split("__")
        reduce(lambda at, key: at[key], parents, raw)[last] = value
    (folder / "manifest.json").write_text(json.dumps(raw), encoding="utf-8")
    return ["inspect", str(folder)]


REPORTS = {
    "empty": b"",
    "list": b"[1]",
    "bytes": b"\xff",
    "NaN": b'{"passed": NaN}',
    "nested": b'{"a":' * 70 + b"1" + b"}" * 70,
    "nested without end": b"[" * 10**5,
}


@pytest.mark.parametrize("case", REPORTS)
def test_inspect_of_a_damaged_parity_report(pairs, capsys, tmp_path, case):
    argv = damage(pairs, tmp_path, REPORTS[case])
    failed(capsys, argv, 2, "parity.json", "export the bundle again")
    failed(capsys, [*argv, "--json"], 2, "parity.json")


def test_inspect_of_a_manifest_that_does_not_list_its_report(pairs, capsys, tmp_path):
    failed(capsys, damage(pairs, tmp_path, parity="other.json"), 2, "manifest.json", "'other.json' is not in files")


def test_doctor(pairs, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["onnxruntime"] and "CPUExecutionProvider" in report["onnxruntime_providers"]
    assert report["can"]["generate on the CPU"]["yes"]
    assert set(report["tensorrt"]) == {"tensorrt", "tensorrt_rtx", "tensorrt_lean"}
    assert report["cuda"]["gpus"] or report["cuda"]["error"]
    assert main(["doctor", str(pairs("qwen3-vanilla").bundle)]) == 0
    assert "runs here" in capsys.readouterr().out


def test_doctor_says_what_is_missing(pairs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["doctor", str(pairs("qwen3-vanilla").bundle), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["can"]["generate on the CPU"]["yes"]
    assert not report["bundle"]["runs"] and ".[cpu]" in report["bundle"]["why"]


def test_interrupted(capsys, monkeypatch):
    from dspark.tools.commands import inspect

    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", interrupt)
    failed(capsys, ["inspect", "x"], 130, "dspark inspect: error: interrupted")
    failed(capsys, ["inspect", "x", "--json"], 130, "interrupted")


def test_a_reader_that_went_away(pairs):
    program = "import sys; from dspark.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "inspect", str(pairs("qwen3-vanilla").bundle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_unforeseen_error_is_one_line(monkeypatch, capsys):
    def run(args):
        raise ZeroDivisionError("by zero\nmore")

    monkeypatch.setattr("dspark.tools.commands.inspect.run", run)
    assert main(["inspect", "nowhere"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.count("\n") == 1
        and "unexpected ZeroDivisionError: by zero;" in captured.err
    )
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "nowhere"])
