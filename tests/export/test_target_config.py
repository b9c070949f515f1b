"""A target's folder is checked before transformers allocates what is described."""

import functools
import json
import shutil

import pytest
import refusals
import torch
import transformers
from builders import write_target
from safetensors.torch import load_file, save_file

from dspark.export.target import load_target


def change(target, folder, tensors=None, **config):
    """A copy with other config entries (... leaves one out) and tensors (None leaves one out)."""
    shutil.copytree(target, folder)
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
    if tensors:
        kept = load_file(folder / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


refuse = functools.partial(refusals.refuse, load_target)


@pytest.mark.parametrize("key", ["rope_parameters", "rms_norm_eps", "max_position_embeddings"])
def test_a_key_that_is_not_written_down_has_the_familys_value(tmp_path, key):
    """Llama 2 has no rope_theta, Gemma 3 hardly anything."""
    folder = change(write_target(tmp_path / "whole", "llama"), tmp_path / "target", **{key: ...})
    found, usual = load_target(folder).model.config.to_dict()[key], transformers.LlamaConfig().to_dict()[key]
    assert found == usual


SPELLINGS = [
    {"rope_parameters": ..., "rope_theta": 500.0},
    {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_parameters": {"rope_theta": 500.0}},
]


@pytest.mark.parametrize("rope", SPELLINGS, ids=str)
def test_spellings_of_rope(tmp_path, target, rope):
    assert load_target(change(target, tmp_path / "t", **rope)).config.rope_parameters["rope_theta"] == 500.0


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
WRONG_ROPES = [
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"rope_type": "linear", "factor": 0}, "factor"),
    ({"rope_type": "linear", "factor": -1.0}, "factor"),
    ({"rope_type": "dynamic", "factor": float("inf")}, "factor"),
    (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor"),
    (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
    (LLAMA3 | {"original_max_position_embeddings": -1}, "original_max_position_embeddings"),
]


@pytest.mark.parametrize("rope, key", WRONG_ROPES, ids=str)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "per layer"])
def test_rope_values_that_give_no_rotation(tmp_path, target, spelling, rope, key):
    rope = {"rope_theta": 1e4} | rope
    written = {"rope_parameters": {"full_attention": rope} if spelling == "per layer" else rope}
    if spelling == "rope_scaling":
        written = {"rope_parameters": ..., "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    refuse(change(target, tmp_path / "t", **written), "config.json", repr(key))


def test_a_model_that_does_not_run(tmp_path, target):
    """A rotary part of an odd size, which StableLM takes from its config until it runs."""
    sizes = {"rms_norm_eps": ..., "num_key_value_heads": 4, "partial_rotary_factor": 0.25}
    folder = tmp_path / "stablelm"
    with pytest.raises(RuntimeError):
        transformers.AutoModelForCausalLM.from_pretrained(write_target(folder, "stablelm", **sizes))(
            torch.ones(1, 2).long()
        )
    refuse(folder, "transformers cannot run it")


@pytest.mark.parametrize("source", ["rope_parameters", "rope_scaling"])
def test_rope_that_is_no_object(tmp_path, target, source):
    refuse(change(target, tmp_path / "t", **{source: 4}), repr(source), 4)


@pytest.mark.parametrize(
    "config, part",
    [
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_values_that_make_no_sense(tmp_path, target, config, part):
    refuse(change(target, tmp_path / "t", **config), part)


HOSTILE_SIZES = {
    "num_hidden_layers": (10**8, "'num_hidden_layers'"),
    "head_dim": (10**9, "'model.layers.0.self_attn.q_proj.weight'"),
    "intermediate_size": (2**31 - 1, "'model.layers.0.mlp.gate_proj.weight'"),
    "vocab_size": (10**9, "'model.embed_tokens.weight'"),
    "hidden_size": (48 * 10**7, "'model.embed_tokens.weight'"),
    "num_key_value_heads": (4, "'model.layers.0.self_attn.k_proj.weight'"),
}


@pytest.mark.parametrize("key", HOSTILE_SIZES)
def test_sizes_are_compared_before_anything_is_allocated(tmp_path, target, monkeypatch, key):
    size, part = HOSTILE_SIZES[key]
    load = "from_pretrained"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, load, lambda *_a, **_k: pytest.fail("it was loaded"))
    refuse(change(target, tmp_path / "tensor", **{key: size}), part)
    refuse(change(target, tmp_path / "key", **{key: 10**18}), "config.json", key, 10**18)


def test_tensors_without_a_place_are_refused(tmp_path, target):
    refuse(change(target, tmp_path / "few", num_hidden_layers=3), "'model.layers.3.input_layernorm.weight'", "no place")
    refuse(change(target, tmp_path / "more", {"extra.weight": torch.ones(2)}), "'extra.weight'", "no place")


def test_tensors_that_are_known_to_be_superfluous(tmp_path, target):
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)}
    head = {"lm_head.weight": load_file(target / "model.safetensors")["model.embed_tokens.weight"].clone()}
    assert load_target(change(target, tmp_path / "t", tables | head, tie_word_embeddings=True)).layers == 4
