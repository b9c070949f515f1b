"""`dspark profile`: what it prints and keeps, and that a failure leaves the bundle as it was."""

import errno
import json
import shutil

import pytest
from command_line import failed

from dspark.export import bundle as writing
from dspark.manifest import read_manifest
from dspark.runtime import load
from dspark.runtime.bundle import open_bundle
from dspark.tools.cli import main


@pytest.fixture
def bundle(pairs, tmp_path):
    return shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")


def content(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_profile(bundle, capsys):
    before = content(bundle)
    argv = ["profile", str(bundle), "--context", "40", "--repeats", "3", "--threads", "1"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["tokens"] for p in report["points"]] == list(range(1, 9))
    assert [d["drafts"] for d in report["drafts"]] == list(range(1, 8))
    for p in report["points"]:
        low, high = p["quartiles"]
        assert p["requests"] == 1 and low <= p["milliseconds"] <= high
        assert low * (1 - 1e-9) <= 1e3 / p["steps_per_second"] <= high * (1 + 1e-9), "evened within the quartiles"
    after = content(bundle)
    assert set(after) == set(before)
    assert [name for name in after if after[name] != before[name]] == ["manifest.json"]
    sps = open_bundle(bundle).manifest.sps
    assert sps.table.tokens == tuple(range(1, 9)) and (sps.context, sps.repeats) == (40, 3)
    assert sps.table.steps_per_second == tuple(p["steps_per_second"] for p in report["points"])
    assert sps.table.requests == 1 and sps.fewer == ()
    assert sps.draft_ms == tuple(d["milliseconds"] for d in report["drafts"])
    assert sps.engine.threads == 1 and sps.engine.files["target"] in {
        e.sha256 for e in read_manifest(bundle).files.values()
    }
    assert load(bundle, threads=1).sps.tokens == sps.table.tokens and load(bundle).sps is None

    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert "profile     onnxruntime" in text and "1 threads" in text and "40 tokens committed" in text
    assert main([*argv[:-2], "--repeats", "1"]) == 0, "the last profile takes the place of the one before"
    lines = capsys.readouterr().out.splitlines()[-9:]
    assert "steps/s" in lines[0]
    sps = read_manifest(bundle).sps
    assert sps.engine.threads is None and sps.repeats == 1
    rates = [f"{rate:.2f}" for rate in sps.table.steps_per_second]
    assert [line.split()[4] for line in lines[1:]] == rates, "printed is what is stored"


def test_a_profile_of_batches(bundle, capsys):
    """It stands beside that of one request: neither takes the other's place."""
    argv = ["profile", str(bundle), "--context", "20", "--repeats", "1", "--threads", "1"]
    assert main(argv) == 0
    alone, before = read_manifest(bundle).sps, content(bundle)
    capsys.readouterr()
    assert main([*argv, "--max-batch-size", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = {1: [*range(1, 9)], 2: [*range(1, 17), 32, 48, 64, 80]}
    points = {r: [p for p in report["points"] if p["requests"] == r] for r in sizes}
    assert {r: [p["tokens"] for p in each] for r, each in points.items()} == sizes and report["max_batch_size"] == 2
    assert report["points"] == points[1] + points[2]
    for p in report["points"]:
        assert p["steps_per_second"] == pytest.approx(1e3 / p["milliseconds"]), "one repetition leaves nothing to even"
    assert [d["drafts"] for d in report["drafts"]] == list(range(1, 8))
    assert [d["requests"] for d in report["batch_drafts"]] == [1, 2]
    after = content(bundle)
    assert [name for name in after if after[name] != before.get(name)] == ["manifest.json"]
    manifest = read_manifest(bundle)
    batch = manifest.batch_sps
    assert manifest.sps == alone and alone.requests_draft_ms == ()
    assert (batch.context, batch.repeats) == (20, 1)
    assert [steps.requests for steps in (*batch.fewer, batch.table)] == [1, 2]
    for steps in (*batch.fewer, batch.table):
        assert steps.tokens == tuple(sizes[steps.requests])
        assert steps.steps_per_second == tuple(p["steps_per_second"] for p in points[steps.requests])
    assert batch.requests_draft_ms == tuple(d["milliseconds"] for d in report["batch_drafts"])
    assert batch.draft_ms == tuple(d["milliseconds"] for d in report["drafts"])
    graphs = {
        role: manifest.files[manifest.graph(role, "onnxruntime-cpu-batch").file].sha256 for role in alone.engine.files
    }
    assert batch.engine.files == graphs != alone.engine.files

    decoder = load(bundle, threads=1, max_batch_size=2)
    assert decoder.sps.tokens == tuple(sizes[2])
    assert decoder.sps.speeds(1, 8).tolist() == list(batch.fewer[0].steps_per_second)
    assert decoder.sps.speeds(2, 16).tolist() == list(batch.table.steps_per_second[1:16])
    assert decoder.sps.draft_seconds == tuple(ms / 1e3 for ms in batch.requests_draft_ms)
    assert load(bundle, threads=1).sps.tokens == alone.table.tokens
    assert "up to 2 requests" in load(bundle, threads=1, max_batch_size=3).no_sps
    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert text.count("profile     onnxruntime") == 2 and "batches of up to 2 requests" in text
    assert "ms by requests that draft: 1:" in text
    assert [text.count(f"steps/s by tokens{of}: 1:") for of in ("", " in 1 requests", " in 2 requests")] == [1, 1, 1]
    assert main(argv) == 0, "and the other way round"
    assert read_manifest(bundle).batch_sps == batch
    assert main([*argv[:2], "--context", "20", "--repeats", "1", "--max-batch-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 21 and "requests" in lines[-21] and len(lines[-1].split()) == 5


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--max-batch-size", "0"], "max batch size 0"),
        (["--max-batch-size", "2", "--context", "473"], "1 to 472"),
        (["--context", "0"], "context 0"),
        (["--context", "505"], "1 to 504"),
        (["--repeats", "0"], "repeats 0"),
        (["--threads", "0"], "threads 0"),
        (["--backend", "cuda"], "backend 'cuda'"),
    ],
    ids=str,
)
def test_wrong_use(bundle, capsys, options, word):
    before = content(bundle)
    assert main(["profile", str(bundle), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and word in err.splitlines()[-1]
    assert content(bundle) == before


def test_no_bundle(capsys):
    assert main(["profile", "no/such/bundle"]) == 2
    assert "no/such/bundle" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_leaves_the_bundle(bundle, capsys, monkeypatch, when):
    before, real = content(bundle), writing.Path.write_text

    def full(self, *args, **options):
        if when == "after":
            real(self, *args, **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(writing.Path, "write_text", full)
    assert main(["profile", str(bundle), "--context", "10", "--repeats", "1"]) == 1
    monkeypatch.undo()
    assert "no space left" in capsys.readouterr().err.splitlines()[-1]
    assert content(bundle) == before


def test_engines_that_were_built_meanwhile_stay(bundle, monkeypatch):
    """The manifest is read again when the measurement is over."""
    from dspark.tools import speed

    real = speed.measure_speed

    def measure(*args):
        raw = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
        raw["tool"]["note"] = "changed meanwhile"
        (bundle / "manifest.json").write_text(json.dumps(raw), encoding="utf-8")
        return real(*args)

    monkeypatch.setattr(speed, "measure_speed", measure)
    assert main(["profile", str(bundle), "--context", "10", "--repeats", "1"]) == 0
    manifest = read_manifest(bundle)
    assert manifest.sps is not None and manifest.tool["note"] == "changed meanwhile"


def test_json_of_an_error(bundle, capsys):
    capsys.readouterr()  # what making the bundle printed
    failed(capsys, ["profile", str(bundle), "--sing"], 2, "--sing")
