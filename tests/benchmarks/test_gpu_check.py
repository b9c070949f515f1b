"""tools/gpu_check.sh as far as it goes without a GPU: what it says then, and how its parts are put together."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import gpu_engines
import pytest
from gpu_parts import NotRun, PartFailed, Report, counted, python, run

from dspark import cuda

ROOT = Path(__file__).parents[2]
H200 = cuda.Gpu("NVIDIA H200", (9, 0), 150 << 30)


@pytest.fixture
def report(tmp_path) -> Report:
    return Report(tmp_path / "report.json", {"card": "a card"}, seconds=60)


def saved(report: Report) -> dict:
    return json.loads(report.file.read_text())


@pytest.mark.skipif(bool(cuda.query().gpus), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = [ROOT / "tools" / "gpu_check.sh", "--out", tmp_path / "report.json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("gpu_check needs an NVIDIA GPU: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "report.json").exists()


def main(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(cuda, "require_gpu", lambda purpose: H200)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which it adds to
    return gpu_check.main()


def test_without_nvcc_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "find_nvcc", lambda environment: None)
    assert main(monkeypatch) == 1
    assert capsys.readouterr().err.startswith("gpu_check needs nvcc: not found in PATH, ")


def test_every_part_is_in_the_report_whatever_happens_to_the_others(monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise ZeroDivisionError("of all things")

    def wrong(*_):
        raise PartFailed("a race", found=["here"])

    def absent(*_):
        raise NotRun("no headers")

    parts = {
        "build_kernels": lambda nvcc, architecture, library, seconds: {"architecture": architecture},
        "build_plugins": absent,
        "kernel_tests": broken,
        "measurements": lambda report, seconds: {"report": {"verdicts": {}}},
        "sanitizer": wrong,
        "find_nvcc": lambda environment: Path("/nowhere/nvcc"),
        "WORK": tmp_path / "work",
    }
    for name, made in parts.items():
        monkeypatch.setattr(gpu_check, name, made)
    monkeypatch.setattr(gpu_engines, "run", lambda *_: (1, ["dspark.errors.DSparkError: it is not installed"]))
    assert main(monkeypatch, "--out", tmp_path / "a" / "report.json", "--commit", "abc") == 1
    made = json.loads((tmp_path / "a" / "report.json").read_text())
    assert (made["card"], made["compute_capability"], made["commit"]) == ("NVIDIA H200", "9.0", "abc")
    found = {name: (part["status"], part.get("why")) for name, part in made["parts"].items()}
    assert found == {
        "build, kernels": ("passed", None),
        "build, plugins": ("not run", "no headers"),
        "tests, kernels": ("failed", "ZeroDivisionError: of all things"),
        "measurements": ("passed", None),
        **{f"sanitizer, {tool}": ("failed", "a race") for tool in ("memcheck", "racecheck", "synccheck")},
        "tests, plugins": ("not run", "'build, plugins' did not pass"),
        **{f"engines, {b}": ("not run", "it is not installed") for b in gpu_engines.BACKENDS},
        **{f"tests of engines, {b}": ("not run", f"'engines, {b}' was not run") for b in gpu_engines.BACKENDS},
    }
    assert made["parts"]["build, kernels"]["architecture"] == "90"
    assert "sanitizer, racecheck: failed: a race" in capsys.readouterr().out


def test_the_report_is_written_after_every_part(report):
    assert saved(report) == {"card": "a card", "parts": {}}
    assert report.part("one", 9, lambda seconds: {"number": seconds})
    assert saved(report)["parts"]["one"]["number"] == 9
    assert report.exit_code() == 0
    assert not report.part("two", 9, lambda seconds: 1 / 0)
    assert [*saved(report)["parts"]] == ["one", "two"]
    assert report.exit_code() == 1


def test_no_part_begins_when_the_time_is_over(tmp_path):
    report = Report(tmp_path / "report.json", {}, seconds=1)
    assert not report.part("late", 60, lambda seconds: pytest.fail("it began"))
    assert saved(report)["parts"]["late"]["why"] == "no time left"
    assert report.exit_code() == 1, "nothing was checked"


def test_a_command_at_its_limit_is_ended_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    with pytest.raises(PartFailed, match="not done after 1 s") as error:
        run(python("-c", code), tmp_path / "log", 1)
    assert time.monotonic() - began < 2
    assert error.value.details["tail"] == ["begun"]
    time.sleep(1.5)
    assert not alive.exists()


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(PartFailed, match="/nowhere/nvcc: No such file"):
        run(["/nowhere/nvcc"], tmp_path / "log", 1)


@pytest.mark.parametrize(
    ("status", "lines", "error", "message"),
    [
        (0, ["..", "2 passed in 0.1s"], None, None),
        (0, ["ss", "SKIPPED [2] a.py:1: no card", "2 skipped in 0.1s"], NotRun, "2 skipped in 0.1s; .* no card"),
        (0, ["5 deselected in 0.1s"], PartFailed, "no test passed: 5 deselected"),
        (1, ["E   AssertionError: off", "FAILED a.py::b", "1 failed, 3 passed"], PartFailed, "1 failed, 3 passed"),
        (-11, [], PartFailed, "exit status -11: no output"),
    ],
)
def test_what_pytest_said(status, lines, error, message):
    if error is None:
        assert counted(status, lines) == {"tests": "2 passed in 0.1s"}
        return
    with pytest.raises(error, match=message) as raised:
        counted(status, lines)
    if status == 1:
        assert raised.value.details == {"errors": [lines[0]], "tests": [lines[1]]}


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return file


def test_nvcc_is_found_where_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(gpu_check.os, "access", lambda place, mode: str(place).startswith(str(tmp_path)))
    nothing = {"PATH": str(tmp_path / "empty")}
    assert gpu_check.find_nvcc(nothing) is None
    wheel = program(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc", "")
    assert gpu_check.find_nvcc(nothing) == wheel
    toolkit = program(tmp_path / "cuda" / "bin" / "nvcc", "")
    assert gpu_check.find_nvcc(nothing | {"CUDA_HOME": str(tmp_path / "cuda")}) == toolkit
    assert gpu_check.find_nvcc({"PATH": str(toolkit.parent), "CUDACXX": str(wheel)}) == wheel
    assert gpu_check.find_nvcc({"PATH": str(toolkit.parent), "CUDACXX": "nvcc"}) == toolkit


SANITIZER = """
import sys
assert sys.argv[1:3] == ["--tool", "racecheck"], sys.argv
print("========= COMPUTE-SANITIZER")
print("2 passed in 0.10s")
print("========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)")
sys.exit(99 if {0} else 0)
"""


@pytest.mark.parametrize("hazards", [0, 2])
def test_what_the_sanitizer_said(report, tmp_path, monkeypatch, hazards):
    monkeypatch.setattr(gpu_check, "WORK", tmp_path)
    program(tmp_path / "cuda" / "bin" / "compute-sanitizer", SANITIZER.format(hazards))
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    report.part("build, kernels", 9, lambda seconds: {})
    report.part("it", 9, lambda seconds: gpu_check.sanitizer(report, nvcc, "racecheck", "x", seconds))
    part = saved(report)["parts"]["it"]
    assert part["status"] == ("failed" if hazards else "passed")
    assert part["why" if hazards else "summary"].endswith(f"{hazards} hazards displayed ({hazards} errors, 0 warnings)")


def test_a_missing_sanitizer_is_a_failure(report, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda nvcc: None)
    report.part("build, kernels", 9, lambda seconds: {})
    report.part("it", 9, lambda seconds: gpu_check.sanitizer(report, Path("nvcc"), "memcheck", "x", seconds))
    assert saved(report)["parts"]["it"]["why"].startswith("compute-sanitizer is not installed")
    assert report.exit_code() == 1


def test_measurements_that_ran_out_of_time_are_kept(report, tmp_path, monkeypatch):
    def slow(command, log, seconds):
        (tmp_path / "kernels.json").write_text('{"kernels": {"accept": [{"check": {"passed": true}}]}}')
        raise PartFailed("not done after 9 s", tail=[])

    monkeypatch.setattr(gpu_check, "WORK", tmp_path)
    monkeypatch.setattr(gpu_check, "run", slow)
    report.part("build, kernels", 9, lambda seconds: {})
    report.part("it", 9, lambda seconds: gpu_check.measurements(report, seconds))
    part = saved(report)["parts"]["it"]
    assert (part["status"], part["why"]) == ("failed", "not done after 9 s")
    assert part["report"]["kernels"]["accept"]


def test_an_engine_that_the_card_is_not_for_is_not_run(report, tmp_path, monkeypatch):
    """And its words are in the report; anything else is a failure."""
    for folder in ("bundle", "tensorrt", "rtx"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bundle" / "manifest.json").touch()
    refusal = '{"error": "dspark build: error: builds for 8.0, 8.6", "exit_code": 2}'

    def fake(command, log, seconds, environment=None):
        if "-c" in command:
            return 0, ["11.4"]
        backend = command[command.index("--backend") + 1]
        if command[3] == "build":
            return (2, [refusal]) if backend == "tensorrt-rtx" else (0, ['{"bytes": 7, "seconds": 1.5}'])
        return (0, ['{"passed": true}']) if command[3] == "verify" else (1, ["no drafts"])

    monkeypatch.setattr(gpu_engines, "run", fake)
    gpu_engines.engine_parts(report, tmp_path / "bundle", tmp_path, tmp_path / "plugins.so", "9.0")
    parts = saved(report)["parts"]
    assert parts["engines, tensorrt-rtx"]["status"] == "not run"
    assert parts["engines, tensorrt-rtx"]["why"].endswith("builds for 8.0, 8.6")
    assert parts["tests of engines, tensorrt-rtx"]["status"] == "not run"
    ours = parts["engines, tensorrt"]
    assert (ours["status"], ours["why"]) == ("failed", "dspark bench: no drafts")
    assert (ours["build"], ours["verify"]) == ({"bytes": 7, "seconds": 1.5}, {"passed": True})
