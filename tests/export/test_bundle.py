"""Bundles: built aside, whole or not there at all, the same bytes for the same inputs."""

import errno
import json
import os
from pathlib import Path

import pytest
from builders import write_drafter, write_target

from dspark import manifest
from dspark.errors import DSparkError, UsageError
from dspark.export import build, bundle


def export(pair, out, progress=lambda stage: None, **options):
    return build.export_bundle(build.Options(pair.drafter, str(pair.target), out, **options), progress)


class TestBuilding:
    def test_the_folder_appears_when_all_is_done(self, tmp_path):
        out = tmp_path / "engines"
        with bundle.building(out) as folder:
            (folder / "a").write_text("x")
            assert not out.exists() and folder.parent == tmp_path
        assert (out / "a").read_text() == "x" and os.listdir(tmp_path) == ["engines"]

    def test_it_can_be_read_by_whom_the_umask_lets(self, tmp_path):
        (tmp_path / "plain").mkdir()
        with bundle.building(tmp_path / "engines"):
            pass
        assert (tmp_path / "engines").stat().st_mode == (tmp_path / "plain").stat().st_mode

    @pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(143), UsageError("x")])
    def test_nothing_is_left_on_failure(self, tmp_path, error):
        with pytest.raises(type(error)), bundle.building(tmp_path / "engines") as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "a").write_text("x")
            raise error
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
    def test_what_exists_is_refused_and_kept(self, tmp_path, kind):
        out = tmp_path / "engines"
        {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: out.symlink_to("nowhere")}[kind]()
        with pytest.raises(UsageError, match="engines: exists already"), bundle.building(out):
            pass
        assert os.listdir(tmp_path) == ["engines"]

    def test_what_appears_meanwhile_is_kept(self, tmp_path):
        out = tmp_path / "engines"
        with pytest.raises(UsageError, match="engines"), bundle.building(out):
            out.mkdir()
            (out / "mine").touch()
        assert os.listdir(tmp_path) == ["engines"] and os.listdir(out) == ["mine"]

    def test_parents_are_made(self, tmp_path):
        with bundle.building(tmp_path / "a" / "b" / "c") as aside:
            (aside / "file").touch()
        assert os.listdir(tmp_path / "a" / "b") == ["c"] and os.listdir(tmp_path / "a" / "b" / "c") == ["file"]

    def test_parents_go_again_with_a_failure(self, tmp_path):
        (tmp_path / "a").mkdir()
        with pytest.raises(RuntimeError), bundle.building(tmp_path / "a" / "b" / "c"):
            raise RuntimeError
        assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == []

    def test_a_parent_that_is_a_file(self, tmp_path):
        (tmp_path / "a").touch()
        with pytest.raises(UsageError, match="cannot be written"), bundle.building(tmp_path / "a" / "b"):
            pass

    def test_parent_that_cannot_be_written(self, tmp_path, monkeypatch):
        def refuse(self, *_args, **_kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UsageError, match="cannot be written .*[Rr]ead-only"), bundle.building(tmp_path / "engines"):
            pass

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_full_disk(self, tmp_path, wrapped):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            pytest.raises(DSparkError, match="no space left") as caught,
            bundle.building(tmp_path / "engines") as folder,
        ):
            (folder / "a").write_text("x")
            if wrapped:
                raise RuntimeError("the exporter failed") from full
            raise full
        assert caught.value.exit_code == 1 and os.listdir(tmp_path) == []


class TestParts:
    def test_entries_are_sizes_and_hashes_of_all_files(self, tmp_path):
        (tmp_path / "onnx").mkdir()
        (tmp_path / "onnx" / "a").write_bytes(b"abc")
        (tmp_path / "manifest.json").touch()
        digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert bundle.entries(tmp_path) == {"onnx/a": manifest.FileEntry(digest, 3)}

    def test_tool_has_no_time_unless_told(self, monkeypatch):
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        assert "created" not in bundle.tool()
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
        assert bundle.tool()["created"] == "1970-01-01T00:00:00+00:00"

    @pytest.mark.parametrize("epoch", ["", "today", "1" * 30])
    def test_bad_source_date_epoch(self, monkeypatch, epoch):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
            bundle.tool()

    @pytest.mark.parametrize(
        "template", ["T", [{"name": "tool", "template": "X"}, {"name": "default", "template": "T"}]]
    )
    def test_chat_template_inside_the_tokenizer_config(self, tmp_path, template):
        files = {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()}
        bundle.write_target_files(files, tmp_path)
        assert (tmp_path / "chat_template.jinja").read_text() == "T"
        assert (tmp_path / "tokenizer_config.json").read_bytes() == files["tokenizer_config.json"]


class TestExport:
    def test_manifest_says_what_is_in_the_bundle(self, finished, pair):
        made = manifest.read_manifest(finished)
        assert made.files == bundle.entries(finished)
        assert {(g.role, g.form) for g in made.io} == {
            (role, form)
            for role in ("target", "drafter")
            for form in ("portable", "onnxruntime-cpu", "onnxruntime-cpu-batch")
        }
        assert set(made.source) >= {
            "checkpoint/config.json",
            "checkpoint/model.safetensors",
            "target/model.safetensors",
        }
        assert made.source["checkpoint/config.json"] == bundle.file_entry(pair.drafter / "config.json")
        assert (made.drafter.block_size, made.drafter.target_layer_ids, made.drafter.mask_token_id) == (5, (0, 2), 260)
        assert (made.target.model_type, made.target.layers, made.target.stop_token_ids) == ("llama", 4, (258,))
        assert made.target.tokenizer_sha256 == made.files["tokenizer.json"].sha256
        assert made.profiles == manifest.Profiles(max_batch_size=8, max_context_len=512, draft_len=5)
        assert made.parity == "parity.json" and made.dtype == "fp32"

    def test_target_files_are_copied_unchanged(self, finished, pair):
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            assert (finished / name).read_bytes() == (pair.target / name).read_bytes()

    def test_the_targets_embedding_and_head_are_stored_once(self, finished):
        # Vocabulary 272 x hidden 48 in fp32: neither may be in the drafter's own data.
        table = 272 * 48 * 4
        assert (finished / "onnx" / "target.data").stat().st_size > 2 * table
        own = 2 * 272 * 8 * 4 + 2 * (4 * 48 * 64 + 3 * 48 * 96) * 4 + 48 * 96 * 4  # Markov, two layers, fc
        assert (finished / "onnx" / "drafter.data").stat().st_size < own + table

    def test_no_link_and_nothing_beside_it(self, finished):
        assert not any(file.is_symlink() for file in finished.rglob("*"))
        assert os.listdir(finished.parent) == ["engines"]

    def test_options_reach_the_manifest(self, pair, tmp_path, instant_graphs):
        made = export(pair, tmp_path / "engines", max_batch_size=3, max_context_len=100, draft_len=2)
        assert made.profiles == manifest.Profiles(max_batch_size=3, max_context_len=100, draft_len=2)

    @pytest.mark.parametrize(
        "options", [{"draft_len": 0}, {"draft_len": 6}, {"max_context_len": 5}, {"max_context_len": 513}]
    )
    def test_options_out_of_range(self, pair, tmp_path, options):
        (value,) = options.values()
        with pytest.raises(UsageError, match=f"{value}: "):
            export(pair, tmp_path / "engines", **options)
        assert os.listdir(tmp_path) == []

    def test_a_block_that_no_context_holds(self, pair, tmp_path):
        """No tensor has the block's size in its shape."""
        drafter = write_drafter(tmp_path / "drafter", pair.target, block_size=2**31 - 1)
        with pytest.raises(UsageError, match=r"block_size \+ 1 = 2147483648 tokens.*512 positions"):
            build.export_bundle(build.Options(drafter, str(pair.target), tmp_path / "engines"), lambda stage: None)
        assert os.listdir(tmp_path) == ["drafter"]

    @pytest.mark.parametrize("which", ["drafter", "target"])
    def test_heads_that_the_cpu_form_cannot_have(self, pair, tmp_path, which, monkeypatch):
        monkeypatch.setattr(build, "record_target", lambda *_args: pytest.fail("this late"))
        target = pair.target if which == "drafter" else write_target(tmp_path / "target", head_dim=12)
        drafter = write_drafter(tmp_path / "drafter", target, head_dim=12 if which == "drafter" else 16)
        with pytest.raises(UsageError, match=f"{which}.*head_dim 12 is no multiple of 8"):
            build.export_bundle(build.Options(drafter, str(target), tmp_path / "engines"), lambda stage: None)

    @pytest.mark.parametrize(
        "stage", ["reading the drafter", "running the reference", "checking parity: drafter, portable"]
    )
    def test_interrupted_leaves_nothing(self, pair, tmp_path, instant_graphs, stage):
        def progress(name):
            if name == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export(pair, tmp_path / "engines", progress)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("file", ["parity.json", "tokenizer.json", "manifest.json"])
    def test_full_disk_while_writing(self, pair, tmp_path, instant_graphs, monkeypatch, file):
        """Writing to the device that is always full is the real error from the real call."""
        reference = build.record_target

        def plant(*args):
            (next(tmp_path.glob(".engines.*")) / file).symlink_to("/dev/full")
            reference(*args)

        monkeypatch.setattr(build, "record_target", plant)
        with pytest.raises(DSparkError, match="no space left"):
            export(pair, tmp_path / "engines")
        assert os.listdir(tmp_path) == []

    def test_failed_parity_is_a_failed_export(self, pair, tmp_path, instant_graphs, monkeypatch):
        instant = build.export_target

        def damage(target, taps, folder, slots):
            graph = instant(target, taps, folder, slots)
            file = folder / "onnx" / "drafter.data"
            raw = bytearray(file.read_bytes())
            raw[3::4] = bytes(0x3F for _ in raw[3::4])  # every weight becomes a number near 1
            file.write_bytes(raw)
            return graph

        monkeypatch.setattr(build, "export_target", damage)
        with pytest.raises(DSparkError, match="parity failed: drafter graph, form portable, output 'draft_") as caught:
            export(pair, tmp_path / "engines")
        assert caught.value.exit_code == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name, content",
    [("tokenizer.json", b'{"a":'), ("tokenizer_config.json", b"[]"), ("chat_template.jinja", b"\xff\xfe")],
)
def test_what_the_runtime_cannot_read_is_refused_at_export(tmp_path, name, content):
    with pytest.raises(UsageError, match=f"{name} cannot be read"):
        bundle.write_target_files({name: content}, tmp_path)
