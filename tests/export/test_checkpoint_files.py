"""Damaged, cut short and hostile checkpoint folders: one clear line each, never a traceback."""

import functools
import json
import struct

import pytest
import refusals
from builders import write_drafter

from dspark.errors import UsageError
from dspark.export.checkpoints import load_checkpoint
from dspark.export.locate import locate

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path, target):
    return write_drafter(tmp_path / "d", target)


@pytest.fixture
def sharded(tmp_path, target):
    return write_drafter(tmp_path / "s", target, shards=2)


refuse = functools.partial(refusals.refuse, load_checkpoint)


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


HOSTILE = {
    "empty": b"",
    "shorter than a header": b"\x08\0\0",
    "header of 4 exabytes": struct.pack("<Q", 1 << 62) + b"{}",
    "header longer than the file": struct.pack("<Q", 5000) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "no tensor": header(a=1),
    "data beyond the end": header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}) + b"\0" * 8,
    "shape and size disagree": header(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}) + b"\0" * 4,
    "shape overflows": header(a={"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}) + b"\0" * 4,
    "offsets run backwards": header(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}) + b"\0" * 4,
    "negative offset": header(a={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}) + b"\0" * 4,
    "unknown dtype": header(a={"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}) + b"\0" * 4,
    "overlap": header(
        a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        b={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    )
    + b"\0" * 4,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_safetensors(folder, case):
    (folder / WEIGHTS).write_bytes(HOSTILE[case])
    refuse(folder, WEIGHTS, "damaged or cut short")


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_truncated_safetensors(folder, cut):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-cut])
    refuse(folder, WEIGHTS, "damaged or cut short")


def test_no_weights(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refuse(folder, WEIGHTS, INDEX)


def test_a_folder_in_the_place_of_the_weights(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    refuse(folder, WEIGHTS)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff", "[" * 100_000])
def test_config_is_no_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refuse(folder, "config.json")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refuse(folder, "config.json", "no such file")


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refuse(sharded, INDEX, "'model-00002-of-00002.safetensors'", "missing")


def test_truncated_shard_is_named(sharded):
    file = sharded / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refuse(sharded, file.name, "damaged or cut short")


@pytest.mark.parametrize("shard", ["/etc/passwd", "../model.safetensors", "a/b.safetensors", "..", "a\\b", ""])
def test_shard_outside_the_folder(sharded, shard):
    change_index(sharded, lambda index: index["weight_map"].update({"fc.weight": shard}))
    refuse(sharded, INDEX, repr(shard), "plain file name")


def test_tensor_in_another_shard_than_listed(sharded):
    def swap(index):
        index["weight_map"]["fc.weight"] = "model-00002-of-00002.safetensors"

    before = json.loads((sharded / INDEX).read_text())["weight_map"]["fc.weight"]
    if before == "model-00002-of-00002.safetensors":
        pytest.fail("the builder changed: fc.weight was expected in the first shard")
    change_index(sharded, swap)
    refuse(sharded, "'fc.weight'")


def test_tensor_listed_but_not_held(sharded):
    change_index(sharded, lambda index: index["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"}))
    refuse(sharded, INDEX, "'ghost'", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("weight_map", [None, [], {"fc.weight": 3}])
def test_index_without_a_map(sharded, weight_map):
    change_index(sharded, lambda index: index.update(weight_map=weight_map))
    refuse(sharded, INDEX, "weight_map")


class TestLocate:
    def test_a_folder_wins_over_a_hub_id(self, tmp_path, monkeypatch):
        (tmp_path / "owner" / "name").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
        assert locate("owner/name", "--ckpt").is_dir()

    def test_hub_id_is_fetched(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.append(name) or str(tmp_path))
        assert locate("owner/name", "--ckpt") == tmp_path and asked == ["owner/name"]

    @pytest.mark.parametrize("name", ["/no/such/folder", "./no", "~/no-such-folder", "a/b/c", "nothing"])
    def test_a_path_that_is_not_there_asks_no_hub(self, name, monkeypatch):
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
        with pytest.raises(UsageError, match="--ckpt .*no such folder"):
            locate(name, "--ckpt")

    def test_hub_out_of_reach(self, monkeypatch):
        def fail(*_args, **_kwargs):
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(UsageError, match="owner/name.*ConnectionError"):
            locate("owner/name", "--ckpt")

    def test_a_file(self, tmp_path):
        (tmp_path / "model.gguf").touch()
        with pytest.raises(UsageError, match="this is a file"):
            locate(str(tmp_path / "model.gguf"), "--ckpt")
        assert locate(str(tmp_path / "model.gguf"), "--target", suffix=".gguf").is_file()
