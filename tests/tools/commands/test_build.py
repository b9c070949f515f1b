"""`dspark build`: options, one-line errors, and what --json says. Engines themselves: tests/export/test_engines.py."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from command_line import failed
from gpu_fakes import with_engines

from dspark.errors import UsageError
from dspark.tools.cli import main
from dspark.tools.commands.build import parse_profile


@pytest.fixture
def bundle(pairs, tmp_path):
    return shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")


def test_profiles_are_read():
    assert parse_profile(["T=1:6:512", "R + 1=2:2:2"]) == {"T": (1, 6, 512), "R + 1": (2, 2, 2)}


@pytest.mark.parametrize("text", ["T", "T=", "=1:2:3", "T=1:2", "T=1:2:3:4", "T=a:b:c", "T=-1:2:3", "T=1:2:9999999999"])
def test_profiles_that_cannot_be_read(text):
    with pytest.raises(UsageError, match="expected DIM=MIN:OPT:MAX"):
        parse_profile([text])


def test_a_profile_given_twice():
    with pytest.raises(UsageError, match="T is given twice"):
        parse_profile(["T=1:2:3", "T=1:2:4"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--backend"]),
        (["--backend", "cuda"], ["--backend cuda"]),
        (["--backend", "tensorrt-rtx", "--dtype", "int4"], ["--dtype int4"]),
        (["--backend", "tensorrt-rtx", "--profile", "T=1"], ["--profile T=1"]),
        (["--backend", "tensorrt-rtx", "--timing-cache", "x"], ["--timing-cache"]),
        (["--backend", "tensorrt", "--compute-capability", "8.9"], ["--compute-capability"]),
        (["--backend", "tensorrt", "--profile", "T=1:2:3"], ["input 'tokens'"]),
    ],
    ids=str,
)
def test_wrong_options(capsys, bundle, options, words):
    before = sorted(bundle.rglob("*"))
    capsys.readouterr()  # what making the bundle printed
    code = main(["build", str(bundle), *options])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("[")]
    assert (code, out, len(errors)) == (2, "", 1), err
    for word in words:
        assert word in errors[0]
    assert sorted(bundle.rglob("*")) == before


def test_no_bundle(capsys):
    code = main(["build", "no/such/bundle", "--backend", "tensorrt-rtx"])
    assert code == 2 and "no/such/bundle" in capsys.readouterr().err


def test_no_tensorrt(capsys, bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(["build", str(bundle), "--backend", "tensorrt"]) == 1
    assert "pip install '.[tensorrt]'" in capsys.readouterr().err


def test_json(capsys, bundle, monkeypatch):
    """What a build says; the build itself is a stand-in."""
    from dspark.export import engines

    seen = []

    def build(folder, options, progress):
        seen.append(options)
        made = with_engines(Path(folder), Path(folder).with_name("built"), "tensorrt-rtx", dtype=options.dtype)
        return engines.read_manifest(made)

    monkeypatch.setattr(engines, "build_engines", build)
    options = ["--backend", "tensorrt-rtx", "--dtype", "fp16", "--profile", "T=1:6:600", "--compute-capability", "8.9"]
    assert main(["build", str(bundle), *options, "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert out.count("\n") == 1
    assert [e["graph"] for e in report["engines"]] == ["target", "drafter"] and report["bytes"] > 0
    assert (seen[0].profile, seen[0].compute_capabilities) == ({"T": (1, 6, 600)}, ("8.9",))


def test_help_lists_the_dimensions(capsys):
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    assert "T target rows" in " ".join(capsys.readouterr().out.split())


def test_wrong_use_is_one_line(capsys):
    failed(capsys, ["build"], 2, "BUNDLE")
