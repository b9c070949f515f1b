import json

import pytest
import torch
from safetensors.torch import load_file

from dspark.export.checkpoints import load_checkpoint
from dspark.export.modules import Drafter
from dspark.tools.training.checkpoint import save_drafter


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 40}, {"windows": (0, 8)}])
def test_what_is_written_is_what_the_loader_reads(make_config, tmp_path, head, changes):
    config = make_config(head, **changes)
    drafter = Drafter(config)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(40) // 3)
    save_drafter(drafter, tmp_path / "checkpoint")
    loaded = load_checkpoint(tmp_path / "checkpoint")
    assert loaded.config == config
    assert set(loaded.tensors) == set(drafter.state_dict()) - {"embed_tokens.weight", "lm_head.weight"}
    for name, value in loaded.tensors.items():
        wanted = drafter.state_dict()[name]
        assert value.dtype == (torch.int64 if name == "d2t" else torch.bfloat16)
        assert torch.equal(value, wanted.to(value.dtype)), name


def test_the_same_weights_give_the_same_bytes(make_config, tmp_path):
    drafter = Drafter(make_config("gated"))
    files = []
    for name in ("first", "second"):
        save_drafter(drafter, tmp_path / name)
        files.append({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()})
    assert files[0] == files[1] and set(files[0]) == {"config.json", "model.safetensors"}


def test_keys_of_absent_heads_are_left_out(make_config, tmp_path):
    save_drafter(Drafter(make_config("none")), tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["markov_rank"] == 0 and keys["enable_confidence_head"] is False
    assert not {"markov_head_type", "confidence_head_with_markov", "draft_vocab_size"} & set(keys)
    assert not any(name.startswith(("markov", "confidence")) for name in load_file(tmp_path / "model.safetensors"))
