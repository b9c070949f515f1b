import argparse
import json
import subprocess
import sys

import builders
import pytest
import torch

from dspark.errors import UsageError
from dspark.export.checkpoints import load_checkpoint
from dspark.tools.commands import train
from dspark.tools.training import pipeline


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return builders.write_target(tmp_path_factory.mktemp("models") / "target", "llama")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "kind": kind} for kind in ("code", "chat") for text in (f"say {kind}", "go", "a b c")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(target, prompts, out, *options):
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    small = ["--texts", "2", "--anchors", "3", "--block-size", "3", "--max-new-tokens", "8", "--mask-token-id", "260"]
    base = ["train", "--target", str(target), "--prompts", str(prompts), "--out", str(out)]
    args = parser.parse_args([*base, *small, "--markov-rank", "4", "--steps", "4", "--threads", "1", *options])
    return train.run(args)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_prompts_become_a_checkpoint_and_a_result(target, prompts, tmp_path, capsys):
    out = tmp_path / "drafter ü"
    assert run(target, prompts, out, "--heldout", str(prompts), "--draft-vocab-size", "200", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["out"], result["steps"], result["device"]) == (str(out), 4, "cpu")
    assert set(result["heldout"]) == {"code", "chat"}
    assert set(result["heldout"]["code"]) == {"rounds", "accepted", "acceptance_length", "per_position"}
    assert set(result["seconds"]) == {"responses", "features", "training"}
    config = load_checkpoint(out).config
    assert (config.block_size, config.markov_rank, config.draft_vocab_size) == (3, 4, 200)
    assert config.num_target_layers == 4 and config.mask_token_id == 260


def test_every_part_is_announced_before_it_begins(target, prompts, tmp_path, capsys, monkeypatch):
    """The first batch of responses takes minutes on a CPU, and says nothing of its own until it is done."""
    started = []
    write = pipeline.write_responses

    def observed(*args, progress, **options):
        def show(done, total):
            progress(done, total)
            started.append(capsys.readouterr().err)

        write(*args, progress=show, **options)

    monkeypatch.setattr(pipeline, "write_responses", observed)
    run(target, prompts, tmp_path / "out")
    assert "loading the target" in started[0] and "train: responses 0/6" in started[0]


def test_an_interrupted_end_leaves_no_folder(target, prompts, tmp_path, monkeypatch):
    def killed(drafter, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "save_drafter", killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompts, tmp_path / "out", "--work", str(tmp_path / "work"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "work"]


def test_a_twin_shares_responses_and_features_but_not_the_training(target, prompts, tmp_path, capsys, monkeypatch):
    work = tmp_path / "work"
    run(target, prompts, tmp_path / "dspark", "--work", str(work))
    monkeypatch.setattr(pipeline, "write_features", None)  # must not be called again
    before = (work / "train.jsonl").read_bytes()
    run(target, prompts, tmp_path / "dflash", "--work", str(work), "--markov-head", "none")
    assert (work / "train.jsonl").read_bytes() == before
    assert load_checkpoint(tmp_path / "dflash").config.markov_head_type == "none"
    assert len(list(work.glob("training-*.pt"))) == 2
    assert "resumed" not in capsys.readouterr().err

    # The same training once more is found finished, and gives the same bytes.
    run(target, prompts, tmp_path / "again", "--work", str(work))
    assert "resumed at step 4" in capsys.readouterr().err
    first, again = (tmp_path / name / "model.safetensors" for name in ("dspark", "again"))
    assert first.read_bytes() == again.read_bytes()


def test_prompts_added_later_are_answered_and_learnt(target, prompts, tmp_path, capsys):
    work = ("--work", str(tmp_path / "work"), "--json")
    run(target, prompts, tmp_path / "few", *work)
    few = json.loads(capsys.readouterr().out)
    with open(prompts, "a") as file:
        file.write(json.dumps({"prompt": "one more", "kind": "chat"}))
    run(target, prompts, tmp_path / "more", *work)
    output = capsys.readouterr()
    assert json.loads(output.out)["tokens"] > few["tokens"]
    assert "resumed" not in output.err


def test_a_work_folder_made_for_something_else_is_refused(target, prompts, tmp_path):
    work = ("--work", str(tmp_path / "work"))
    run(target, prompts, tmp_path / "first", *work)
    with pytest.raises(UsageError, match="made for"):
        run(target, prompts, tmp_path / "second", *work, "--max-new-tokens", "9")
    with pytest.raises(UsageError, match="features of taps"):
        run(target, prompts, tmp_path / "second", *work, "--taps", "0,2")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("options, named", [(("--steps", "0"), "--steps"), (("--taps", "3"), "--taps")])
def test_options_that_cannot_be_used_leave_nothing_behind(target, prompts, tmp_path, options, named):
    before = set(tmp_path.iterdir())
    with pytest.raises(UsageError, match=named):
        run(target, prompts, tmp_path / "out", *options)
    assert set(tmp_path.iterdir()) == before


def test_no_bar_of_another_library_is_drawn():
    program = """
from dspark.errors import UsageError
from dspark.tools.cli import build_parser
from dspark.tools.commands import train
try:
    train.run(build_parser().parse_args(["train", "--target", "x", "--prompts", "no/file", "--out", "no/folder"]))
except UsageError:
    from tqdm import tqdm
    print(tqdm(range(1)).disable)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr


def test_an_output_folder_that_exists_is_refused(target, prompts, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        run(target, prompts, tmp_path / "out")


def test_a_target_without_a_mask_token_needs_one_named(target, prompts, tmp_path):
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    args = parser.parse_args(
        ["train", "--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "o")]
    )
    with pytest.raises(UsageError, match="--mask-token-id"):
        train.run(args)
