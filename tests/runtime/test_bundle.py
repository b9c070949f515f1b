"""A damaged or hostile bundle is refused with one line that names the file."""

import dataclasses
import hashlib
import json

import pytest
from fakes import fake_manifest

from dspark.errors import UsageError
from dspark.manifest import FileEntry
from dspark.runtime.bundle import open_bundle

CALIBRATION = {
    "temperatures": [1.5, 1, 0.5, 2, 1.0],
    "shifts": [-1, 0.5, 0, 0.0, 2],
    "rounds": 900,
    "prompts": 10,
    "temperature": 0,
}
SPS = {
    "table": {"tokens": [1, 2], "steps_per_second": [20, 12.5]},
    "draft_ms": [1, 2, 3, 4, 5],
    "context": 50,
    "repeats": 9,
    "machine": {"name": "CPU", "cores": 2},
    "engine": {"backend": "onnxruntime", "version": "1", "files": {}, "threads": None},
    "when": "2026-01-01T00:00:00+00:00",
}
BATCHES = SPS | {
    "table": {"tokens": [1, 2, 8], "steps_per_second": [20, 12.5, 9], "requests": 4},
    "fewer": [
        {"tokens": [1, 2], "steps_per_second": [21, 20], "requests": 1},
        {"tokens": [2, 4], "steps_per_second": [15, 14], "requests": 2},
    ],
    "requests_draft_ms": [1, 2, 3, 4],
}


def fewer(*changes):
    """BATCHES with so many tables of fewer requests, each changed so."""
    steps = [*BATCHES["fewer"], {"tokens": [3], "steps_per_second": [12], "requests": 3}]
    changed = [each | change for each, change in zip(steps, changes, strict=False)]
    return {"batch_sps": BATCHES | {"fewer": changed}}


@pytest.fixture(params=["bundle", "größe mit leer"])
def folder(tmp_path, request):
    """A bundle of two files, no graphs; also under a name with blanks and other letters."""
    folder = tmp_path / request.param
    files = {"onnx/weights.data": b"weights", "tokenizer.json": b"{}"}
    entries = {}
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        entries[name] = FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    write(folder, dataclasses.replace(fake_manifest(5), files=entries))
    return folder


def write(folder, manifest):
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")


def change(folder, **changes):
    """Overwrite manifest entries given as path__to__key=value."""
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = raw
        for key in parents:
            at = at[key]
        at[last] = value
    (folder / "manifest.json").write_text(json.dumps(raw), encoding="utf-8")


def refused(folder, *words):
    with pytest.raises(UsageError) as caught:
        open_bundle(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_good_bundle(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    bundle = open_bundle(folder.name)
    assert bundle.folder.is_absolute() and bundle.has("tokenizer.json")
    assert bundle.path("onnx/weights.data").read_bytes() == b"weights"
    with pytest.raises(KeyError):
        bundle.path("manifest.json")


def test_a_calibration_and_a_profile(folder):
    change(folder, calibration=CALIBRATION, sps=SPS)
    manifest = open_bundle(folder).manifest
    assert manifest.calibration.temperatures == (1.5, 1, 0.5, 2, 1) and manifest.sps.table.tokens == (1, 2)
    assert manifest.calibration.shifts == (-1, 0.5, 0, 0, 2)
    numbers = (*manifest.calibration.temperatures, *manifest.calibration.shifts, *manifest.sps.draft_ms)
    assert all(type(number) is float for number in numbers)
    assert manifest.sps.machine.cores == 2 and manifest.sps.engine.threads is None


def test_a_profile_of_batches(folder):
    change(folder, batch_sps=BATCHES)
    batch = open_bundle(folder).manifest.batch_sps
    assert [(steps.requests, steps.tokens) for steps in batch.fewer] == [(1, (1, 2)), (2, (2, 4))]
    assert batch.table.requests == 4 and batch.fewer[1].steps_per_second == (15.0, 14.0)
    change(folder, **fewer({}, {}, {}))
    assert [steps.requests for steps in open_bundle(folder).manifest.batch_sps.fewer] == [1, 2, 3]


def test_a_profile_of_an_older_version(folder):
    """One table, whatever the requests."""
    change(folder, sps=SPS, batch_sps=SPS | {"requests_draft_ms": [1, 2]})
    manifest = open_bundle(folder).manifest
    for sps in (manifest.sps, manifest.batch_sps):
        assert sps.table.requests == 1 and sps.fewer == ()
    assert manifest.sps.requests_draft_ms == ()


def test_a_calibration_of_an_older_version(folder):
    change(folder, calibration={name: value for name, value in CALIBRATION.items() if name != "shifts"})
    assert open_bundle(folder).manifest.calibration.shifts == ()


def test_tampered_file(folder):
    (folder / "onnx/weights.data").write_bytes(b"wEights")
    refused(folder, "weights.data", "SHA-256")


def test_longer_file(folder):
    (folder / "onnx/weights.data").write_bytes(b"weights, more")
    refused(folder, "weights.data", "13 bytes", "7")


def test_missing_file(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json", "missing")


def test_folder_in_a_files_place(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    refused(folder, "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "manifest.json", "onnx"])
def test_links(folder, tmp_path, name):
    real = tmp_path / "elsewhere"
    (folder / name).rename(real)
    (folder / name).symlink_to(real)
    refused(folder, name, "link")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "onnx/../../x", "a\\b", "./x", ""])
def test_paths_that_leave_the_bundle(folder, name):
    change(folder, files={name: {"sha256": "0", "size": 0}})
    refused(folder, "not a plain relative path")


def test_no_bundle(tmp_path):
    refused(tmp_path / "nothing", "nothing", "dspark-export")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file")


CACHE = {"input": "a", "output": "b", "dtype": "float32", "kv_heads": 1, "head_dim": 8}
GRAPH = {"role": "target", "form": "portable", "file": "onnx/weights.data", "inputs": [], "outputs": [], "caches": []}
GRAPH = GRAPH | {"cache_slack": 0}
STATE = {"input": "a", "output": "b", "dtype": "float32", "shape": [4, 8], "slots": 6, "kind": "recurrent"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"schema_version": "2.0"}, "schema_version"),
        ({"drafter__layout": "1+N"}, "layout"),
        ({"drafter__block_size": 0}, "block_size"),
        ({"profiles__draft_len": 6}, "draft_len"),
        ({"profiles__draft_len": 0}, "draft_len"),
        ({"drafter__mask_token_id": 40}, "mask_token_id"),
        ({"drafter__draft_vocab_size": 41}, "draft_vocab_size"),
        ({"profiles__max_context_len": 0}, "max_context_len"),
        ({"target__stop_token_ids": [40]}, "stop_token_ids"),
        ({"drafter__block_size": "5"}, "drafter.block_size"),
        ({"drafter__block_size": 10**12}, "block_size"),
        ({"drafter__block_size": True}, "drafter.block_size: expected int, found bool"),
        ({"drafter__block_size": 5.0}, "drafter.block_size: expected int, found float"),
        ({"profiles__max_context_len": 10**15}, "max_context_len"),
        ({"profiles__max_context_len": 10**15, "target__max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"profiles__max_context_len": 5}, "block_size < profiles.max_context_len"),
        ({"profiles__max_batch_size": 0}, "max_batch_size"),
        ({"target__stop_token_ids": [-1]}, "stop_token_ids"),
        ({"target__layers": -4}, "layers"),
        ({"target__hidden_size": 0}, "hidden_size"),
        ({"drafter__target_layer_ids": [1]}, "target_layer_ids"),
        ({"drafter__target_layer_ids": [False]}, "target_layer_ids[0]: expected int, found bool"),
        ({"drafter__windows": [-1]}, "windows"),
        ({"drafter__markov__rank": -1}, "rank"),
        ({"io": [GRAPH | {"cache_slack": -1}]}, "cache_slack"),
        ({"io": [GRAPH | {"cache_slack": 10**9}]}, "cache_slack"),
        ({"io": [GRAPH | {"caches": [CACHE | {"head_dim": -8}]}]}, "head_dim"),
        ({"io": [GRAPH | {"caches": [CACHE | {"kv_heads": 10**12}]}]}, "kv_heads"),
        ({"io": [GRAPH | {"caches": [CACHE | {"window": -1}]}]}, "window"),
        ({"io": [GRAPH | {"caches": [CACHE | {"window": None}]}]}, "window: expected int, found NoneType"),
        ({"io": [GRAPH | {"states": [STATE | {"slots": 0}]}]}, "slots"),
        ({"io": [GRAPH | {"states": [STATE | {"shape": [4, -8]}]}]}, "shape of io's states"),
        ({"io": [GRAPH | {"states": [STATE | {"dtype": "int8"}]}]}, "dtype of io's states"),
        ({"io": [GRAPH | {"states": [STATE | {"kind": "compressor"}]}]}, "kind of io's states is recurrent"),
        ({"io": [GRAPH | {"inputs": [{"name": "x", "dtype": "int64", "shape": [-1]}]}]}, "shapes"),
        ({"io": [GRAPH | {"inputs": [{"name": "x", "dtype": "int64", "shape": [True]}]}]}, "shape[0]"),
        ({"parity": "parity.json"}, "'parity.json' is not in files"),
        ({"calibration": CALIBRATION | {"temperatures": [1.0] * 4}}, "temperatures are block_size"),
        ({"calibration": CALIBRATION | {"temperatures": [1.0] * 4 + [0]}}, "above 0"),
        ({"calibration": CALIBRATION | {"temperatures": [1.0] * 4 + [10**400]}}, "temperatures"),
        ({"calibration": CALIBRATION | {"temperatures": "1"}}, "calibration.temperatures: expected a list"),
        ({"calibration": CALIBRATION | {"shifts": [0.0] * 4}}, "shifts are block_size finite numbers"),
        ({"calibration": CALIBRATION | {"shifts": [0.0] * 4 + [10**400]}}, "shifts"),
        ({"calibration": CALIBRATION | {"shifts": None}}, "calibration.shifts: expected a list"),
        ({"calibration": CALIBRATION, "drafter__confidence__enabled": False}, "has a confidence head"),
        ({"calibration": [1.0]}, "calibration: expected Calibration or NoneType, found list"),
        ({"sps": {}}, "'sps.table' is missing"),
        ({"sps": SPS | {"table": {"tokens": [], "steps_per_second": []}}}, "sps.table.tokens"),
        ({"sps": SPS | {"table": {"tokens": [0, 2], "steps_per_second": [2, 1]}}}, "sps.table.tokens"),
        ({"sps": SPS | {"table": {"tokens": [2, 2], "steps_per_second": [2, 1]}}}, "sps.table.tokens"),
        ({"sps": SPS | {"table": {"tokens": [1, 2**40], "steps_per_second": [2, 1]}}}, "sps.table.tokens"),
        ({"sps": SPS | {"table": {"tokens": [1, 2], "steps_per_second": [2, -1]}}}, "steps_per_second"),
        ({"sps": SPS | {"table": {"tokens": [1, 2], "steps_per_second": [2]}}}, "steps_per_second"),
        ({"sps": SPS | {"draft_ms": [1.0]}}, "sps.draft_ms are block_size"),
        ({"sps": SPS | {"context": 200}}, "put null for sps and run dspark profile again"),
        ({"sps": SPS | {"table": SPS["table"] | {"requests": 0}}}, "sps: the requests of fewer and table rise, from 1"),
        ({"sps": SPS | {"table": SPS["table"] | {"requests": "1"}}}, "sps.table.requests"),
        ({"sps": SPS | {"fewer": None}}, "sps.fewer: expected a list"),
        ({"batch_sps": BATCHES | {"requests_draft_ms": [1, 0]}}, "batch_sps.requests_draft_ms are finite"),
        ({"batch_sps": BATCHES | {"fewer": BATCHES["fewer"][::-1]}}, "batch_sps: the requests of fewer and table rise"),
        (fewer({}, {"requests": 1}), "batch_sps: the requests of fewer and table rise"),
        (fewer({}, {"requests": 4}), "put null for batch_sps and run dspark profile again"),
        (fewer({"requests": 0}), "the requests of fewer and table rise, from 1"),
        (fewer({}, {"requests": 5}), "the requests of fewer and table rise"),
        (fewer({"tokens": [], "steps_per_second": []}), "batch_sps.fewer[0].tokens are one number or more"),
        (fewer({}, {"tokens": [4, 2]}), "batch_sps.fewer[1].tokens are one number or more, rising"),
        (fewer({}, {"tokens": [2, 2**40]}), "batch_sps.fewer[1].tokens"),
        (fewer({}, {"steps_per_second": [15]}), "batch_sps.fewer[1].steps_per_second are finite"),
        (fewer({"steps_per_second": [1, 0]}), "batch_sps.fewer[0].steps_per_second are finite"),
        (fewer({"steps_per_second": [1, 10**400]}), "batch_sps.fewer[0].steps_per_second"),
        ({"calibration": json.loads('{"a":' * 80 + "1" + "}" * 80)}, "nested too deeply"),
        ({"target__max_position_embeddings": float("nan")}, "NaN is no JSON"),
    ],
)
def test_values_that_contradict_each_other(folder, changes, word):
    change(folder, **changes)
    refused(folder, "manifest.json", word)
