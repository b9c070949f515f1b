"""Loading targets: what the wrapped model computes, and which ones are refused in one line."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from builders import STOP_TOKEN, write_target
from transformers import AutoModelForCausalLM

from dspark.errors import UsageError
from dspark.export.target import _attention, _window, load_target

WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama", {"tie_word_embeddings": True}), ("qwen3", {}), ("qwen3", WINDOWED), ("mistral", {"sliding_window": 4})],
    ids=["llama, tied", "qwen3", "qwen3, windows", "mistral, windows"],
)
def test_wrapped_model_equals_the_original(kind, config, tmp_path):
    folder = write_target(tmp_path / "target", kind, **config)
    target, rows = load_target(folder), 12
    tokens = torch.randint(256, (rows,), generator=torch.Generator().manual_seed(0))
    caches = [[torch.full((1, c.kv_heads, 20, c.head_dim), float("nan")) for c in target.caches] for _ in range(2)]
    with torch.no_grad():
        logits, taps, _, _ = target.module((-1, 0, 2))(
            tokens, torch.arange(rows),
            torch.tensor([0, rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32), torch.arange(rows), *caches,
        )  # fmt: skip
        original = AutoModelForCausalLM.from_pretrained(folder)(tokens[None], output_hidden_states=True)
    torch.testing.assert_close(logits, original.logits[0], atol=1e-5, rtol=1e-5)
    hidden = torch.cat([original.hidden_states[i + 1][0] for i in (-1, 0, 2)], dim=-1)
    torch.testing.assert_close(taps, hidden, atol=1e-5, rtol=1e-5)


def test_what_the_bundle_needs(tmp_path):
    folder = write_target(tmp_path / "target", "llama", tie_word_embeddings=True)
    target = load_target(str(folder))
    assert target.stop_token_ids == (STOP_TOKEN,)
    assert (target.hidden_size, target.layers, target.vocab_size) == (48, 4, 272)
    assert target.lm_head.data_ptr() == target.embed_tokens.data_ptr()
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} <= set(target.files)
    assert {"config.json", "model.safetensors", *target.files} == set(target.sources)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 7}))
    assert load_target(folder).stop_token_ids == (7,)


@pytest.mark.parametrize("passed", [None, 9])
def test_window_of_a_layer(passed):
    def layer(index: int, **config) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(**config), layer_idx=index)

    kinds = ["full_attention", "sliding_attention", "chunked_attention"]
    assert _window(layer(0, layer_types=kinds, sliding_window=5), passed) == 0
    assert _window(layer(1, layer_types=kinds, sliding_window=5), passed) == (passed or 5)
    assert _window(layer(0, sliding_window=5), passed) == (passed or 0)
    assert _window(layer(0, layer_types=None), passed) == (passed or 0)
    with pytest.raises(UsageError, match="layer 2 is of type 'chunked_attention'"):
        _window(layer(2, layer_types=kinds), passed)


def test_attention_sinks_are_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UsageError, match="layer 1 has attention sinks"):
        _attention(SimpleNamespace(layer_idx=1), q, q, q, None, s_aux=torch.zeros(2))


def test_what_is_no_target(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    ggufs = tmp_path / "two"
    ggufs.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (ggufs / name).write_bytes(b"")
    folder = write_target(tmp_path / "target")
    truncated = shutil.copytree(folder, tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[:-100])
    for source in (tmp_path / "nowhere", empty, ggufs, truncated):
        with pytest.raises(UsageError) as error:
            load_target(source)
        assert len(str(error.value).splitlines()) == 1
