"""`dspark verify`: a whole bundle passes, a changed weight does not, and what cannot run here is said."""

import json
import shutil
import sys

import numpy as np
import pytest
from gpu_fakes import fake_gpu, with_engines
from pairs import keep_last_state_alone

from dspark.export import bundle as writing
from dspark.tools.cli import main


@pytest.fixture(scope="module")
def plain(pairs):
    return pairs("llama-rnn").bundle  # a reduced vocabulary


def verify(capsys, bundle, *options):
    code = main(["verify", str(bundle), "--threads", "1", *options])
    return code, *capsys.readouterr()


def test_a_bundle_passes(capsys, plain):
    code, out, _ = verify(capsys, plain, "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"] and out.count("\n") == 1 and report["skipped"] == {}
    assert [(g["role"], g["form"]) for g in report["graphs"]] == [
        ("target", "onnxruntime fp32"), ("drafter", "onnxruntime fp32")
    ]  # fmt: skip
    target, drafter = (g["outputs"] for g in report["graphs"])
    assert set(target) == {"logits", "taps"} and set(drafter) == {"draft_tokens", "draft_logits", "confidence"}
    assert drafter["draft_logits"]["top1_agreement"] == 1
    assert [p["position"] for p in drafter["draft_logits"]["positions"]] == list(range(7))
    assert [p["position"] for p in target["logits"]["positions"]] == ["prompt", *range(8)]


def test_a_hybrid_bundle_passes(capsys, pairs, tmp_path):
    """Its session commits parts of what it verified: the states behind them are chosen, or made by a second run."""
    bundle = pairs("hybrid").bundle
    assert verify(capsys, bundle)[0] == 0
    assert verify(capsys, keep_last_state_alone(bundle, tmp_path / "last"))[0] == 0


def test_lines_for_people(capsys, plain):
    code, out, err = verify(capsys, plain)
    assert code == 0 and "passed; reference: portable graphs" in out and "top-1 100.0%" in out
    assert "comparing onnxruntime" in err


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_lowered_graph_that_is_wrong(capsys, plain, tmp_path, role):
    """The lowered graph gets a constant of its own that is off; the portable one stays."""
    import onnx

    bundle = shutil.copytree(plain, tmp_path / "bundle")
    file = bundle / "onnx" / f"{role}.cpu.onnx"
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 0.5
    onnx.save(model, file)
    entry = writing.file_entry(file)
    raw = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    raw["files"][f"onnx/{role}.cpu.onnx"] = {"sha256": entry.sha256, "size": entry.size}
    (bundle / "manifest.json").write_text(json.dumps(raw), encoding="utf-8")
    code, out, _ = verify(capsys, bundle, "--json")
    report = json.loads(out)
    assert code == 1 and not report["passed"]
    assert [g["role"] for g in report["graphs"] if not g["passed"]] == [role]


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_engines_are_compared_where_they_run(capsys, plain, tmp_path, monkeypatch, backend):
    bundle = with_engines(plain, tmp_path / "bundle", backend)
    with fake_gpu(monkeypatch, backend):
        code, out, _ = verify(capsys, bundle, "--json")
    report = json.loads(out)
    assert code == 0 and report["skipped"] == {}
    assert {g["form"] for g in report["graphs"]} == {"onnxruntime fp32", f"{backend} fp32"}


def test_an_engine_that_is_wrong(capsys, plain, tmp_path, monkeypatch):
    bundle = with_engines(plain, tmp_path / "bundle", "tensorrt")
    with fake_gpu(monkeypatch, "tensorrt") as (cuda, trt):
        from gpu_fakes import FakeEngine

        right = FakeEngine.compute

        def wrong(self, shapes, addresses):
            right(self, shapes, addresses)
            if "draft_logits" in addresses:
                self.view(addresses["draft_logits"], np.float32, (1,))[:] += 9

        monkeypatch.setattr(FakeEngine, "compute", wrong)
        code, out, _ = verify(capsys, bundle, "--backend", "tensorrt", "--json")
    report = json.loads(out)
    assert code == 1
    assert [(g["role"], g["passed"]) for g in report["graphs"]] == [("target", True), ("drafter", False)]


def test_engines_that_cannot_run_here(capsys, plain, tmp_path, monkeypatch):
    """Skipped where all are asked for, an error where they are."""
    from dspark import cuda

    bundle = with_engines(plain, tmp_path / "bundle", "tensorrt-rtx")
    with fake_gpu(monkeypatch, "tensorrt-rtx"):
        monkeypatch.setattr(cuda, "query", lambda: cuda.Cuda(None, (), "no CUDA driver"))
        code, out, _ = verify(capsys, bundle)
        assert code == 0 and "skipped tensorrt-rtx: backend tensorrt-rtx needs an NVIDIA GPU" in out
        code, out, err = verify(capsys, bundle, "--backend", "tensorrt-rtx")
        assert code == 1 and out == "" and "needs an NVIDIA GPU" in err


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--backend", "cuda"], 2, "'cuda'"),
        (["--threads", "0"], 2, "--threads 0"),
        (["--threads", "99999999999"], 2, "--threads 99999999999"),
        (["--backend", "tensorrt"], 1, "tensorrt"),
    ],
)
def test_wrong_use(capsys, plain, options, code, word):
    found = main(["verify", str(plain), *options])
    out, err = capsys.readouterr()
    assert (found, out) == (code, "") and word in err.splitlines()[-1]


def test_a_missing_comparator_is_found_first(capsys, plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    code, out, err = verify(capsys, plain)
    assert (code, out) == (1, "") and "running the portable graphs" not in err
    assert "package 'polygraphy' is not installed; run pip install" in err.splitlines()[-1]
