"""A profile is used on its own machine and engines, and refused elsewhere with the command that makes a new one."""

import dataclasses
import shutil

import pytest

from dspark.errors import DSparkError, UsageError
from dspark.manifest import Machine, Measured, Sps, Steps, read_manifest
from dspark.runtime import load, profile
from dspark.runtime.throughput import SpsTable

HERE = Machine("Fast CPU", 8)
ENGINES = Measured("onnxruntime", "1.2", {"target": "a", "drafter": "b"}, None)
SPS = Sps(Steps((1, 2), (20.0, 10.0)), (1.0,) * 7, 30, 5, HERE, ENGINES, "2026-01-01T00:00:00+00:00")


def test_it_fits():
    assert profile.misfit(SPS, HERE, ENGINES) is None


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        ("machine", {"name": "Slow CPU"}, "is of Fast CPU with 8 cores, this is Slow CPU with 8 cores"),
        ("machine", {"cores": 2}, "this is Fast CPU with 2 cores"),
        ("machine", {"name": "GPU", "cores": None}, "this is GPU"),
        ("engine", {"backend": "tensorrt"}, "is of onnxruntime, not of tensorrt"),
        ("engine", {"version": "1.3"}, "is of onnxruntime 1.2, 1.3 is installed"),
        ("engine", {"threads": 2}, "is of the default number of threads, not of 2 threads"),
        ("engine", {"files": {"target": "a", "drafter": "c"}}, "other graphs or engines"),
    ],
    ids=str,
)
def test_it_does_not_fit(place, change, words):
    now = {"machine": HERE, "engine": ENGINES}
    now[place] = dataclasses.replace(now[place], **change)
    assert words in profile.misfit(SPS, now["machine"], now["engine"])


def test_there_is_none():
    assert "no profile" in profile.misfit(None, HERE, ENGINES)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (ENGINES, "dspark profile folder"),
        (dataclasses.replace(ENGINES, threads=3), "dspark profile folder --threads 3"),
        (dataclasses.replace(ENGINES, backend="tensorrt"), "dspark profile folder --backend tensorrt"),
    ],
)
def test_the_command(engines, expected):
    assert profile.command("folder", engines) == expected


def test_the_machine(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(profile, "_CPUINFO", file)
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz: fast\n", encoding="utf-8")
    machine = profile.this_machine("onnxruntime")
    assert machine.name == "Some CPU @ 3 GHz: fast" and machine.cores >= 1
    file.write_text("processor\t: 0\n", encoding="utf-8")
    assert profile.this_machine("onnxruntime").name
    file.unlink()
    assert profile.this_machine("onnxruntime").name


def test_a_gpu_is_the_machine(monkeypatch):
    from dspark.cuda import Gpu

    monkeypatch.setattr(profile, "require_gpu", lambda purpose: Gpu("H200", (9, 0), 2**37))
    assert profile.this_machine("tensorrt") == Machine("H200", None)


def test_load(pairs, tmp_path):
    folder = shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")
    decoder = load(folder)
    assert decoder.sps is None and decoder.calibration is None
    assert f"bundle {folder}: has no profile" in decoder.no_sps and f"dspark profile {folder}" in decoder.no_sps
    engines = profile.these_engines("onnxruntime", decoder.target_engine, decoder.drafter_engine, None)
    sps = dataclasses.replace(SPS, machine=profile.this_machine("onnxruntime"), engine=engines)
    manifest = dataclasses.replace(read_manifest(folder), sps=sps)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    assert read_manifest(folder) == manifest
    decoder = load(folder)
    assert decoder.sps == SpsTable((1, 2), (20.0, 10.0), (0.001,)) and decoder.no_sps is None
    other = load(folder, threads=1)
    assert other.sps is None and other.no_sps.endswith(f"dspark profile {folder} --threads 1")
    assert other.generate([1, 2], max_new_tokens=3).token_ids, "decoding itself needs no profile"
    with pytest.raises(DSparkError) as caught:
        other.generate([1, 2], max_new_tokens=3, scheduler="throughput")
    assert str(caught.value) == f"scheduler throughput: {other.no_sps}" and "\n" not in other.no_sps
    assert decoder.generate([1, 2], max_new_tokens=3, scheduler="throughput").token_ids


def speed_of(tables, first, size):
    """By the definition, from {requests: {tokens: speed}} of what was measured; None: no speed."""
    fit = [requests for requests in sorted(tables) if requests >= first]
    table = tables[fit[0] if fit else max(tables)]
    return next((table[tokens] for tokens in sorted(table) if tokens >= size), None)


def test_a_profile_of_batches_is_used_by_requests(pairs, tmp_path):
    """The table of the smallest measured number of requests that is not smaller than the step's."""
    folder = shutil.copytree(pairs("qwen3-vanilla").bundle, tmp_path / "bundle")
    decoder = load(folder, max_batch_size=5)
    measured = {
        1: {1: 100.0, 2: 98.0, 8: 90.0},
        2: {2: 80.0, 3: 79.0, 16: 60.0},
        4: {3: 72.0, 4: 70.0, 8: 66.0, 32: 50.0},
        5: {1: 101.0, 2: 81.0, 3: 73.0, 4: 71.0, 5: 65.0, 40: 40.0, 104: 20.0},
    }
    *fewer, table = [Steps(tuple(each), tuple(each.values()), requests) for requests, each in measured.items()]
    engines = profile.these_engines("onnxruntime", decoder.target_engine, decoder.drafter_engine, None)
    sps = dataclasses.replace(
        SPS,
        table=table,
        fewer=tuple(fewer),
        requests_draft_ms=(2.0, 3.0, 4.0, 5.0, 6.0),
        machine=profile.this_machine("onnxruntime"),
        engine=engines,
    )
    manifest = dataclasses.replace(read_manifest(folder), batch_sps=sps)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    assert read_manifest(folder) == manifest
    assert load(folder).sps is None, "it is not of the engines of one request"

    found = load(folder, max_batch_size=5).sps
    assert [found.draft_time(r) for r in range(1, 6)] == pytest.approx([0.002, 0.003, 0.004, 0.005, 0.006])
    assert (found.requests, [t.requests for t in found.fewer]) == (5, [1, 2, 4])
    for first in range(1, 9):  # more than 5: as many as have a speed
        for last in (first, first * 8, 120):
            speeds = [speed_of(measured, first, size) for size in range(first, last + 1)]
            expected = [speed for speed in speeds if speed is not None]
            assert found.speeds(first, last).tolist() == expected, (first, last)
    # Beside prompts the fullest table counts, between its sizes in proportion: 35 tokens from 5 to 40, 64 to 104.
    slope, steeper = (1 / 40 - 1 / 65) / 35, (1 / 20 - 1 / 40) / 64
    assert found.added(10, 3) == pytest.approx([0, slope, 2 * slope, 3 * slope])
    assert found.added(39, 2) == pytest.approx([0, slope, slope + steeper])
    assert len(found.added(102, 5)) == 3 and found.added(200, 5).tolist() == [0]
    assert found.speeds(1, 8)[-1] == 90 > found.speeds(4, 8)[-1] == 66, "8 tokens of one request, and of four"
    with pytest.raises(UsageError, match="105 requests in a step"):
        found.speeds(105, 105)
    assert decoder.sps is None and "no profile of its steps per second in batches" in decoder.no_sps
