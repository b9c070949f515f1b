"""DeepSpec checkpoints: what is read, and one clear line for every way in which a config or a tensor can be wrong."""

import functools
import json

import pytest
import refusals
import torch
from builders import drafter_config, drafter_shapes, drafter_tensors, save_checkpoint, write_drafter

from dspark.export.checkpoints import EMBEDDING, HEAD, load_checkpoint
from dspark.export.checkpoints.checkpoint import canonical_shapes
from dspark.export.modules import Drafter


def write(folder, target, tensors=None, **config):
    """A checkpoint with a changed config; its tensors, unless given, fit the unchanged one."""
    fitting = drafter_tensors(drafter_config(target)) if tensors is None else tensors
    return save_checkpoint(folder, drafter_config(target, **config), fitting)


refuse = functools.partial(refusals.refuse, load_checkpoint)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("confidence", [True, False])
def test_reads_every_head(tmp_path, target, head, confidence):
    folder = write_drafter(tmp_path / "d", target, head=head, confidence=confidence)
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    assert (checkpoint.dialect, config.layout) == ("DeepSpec", "anchor-first")
    assert (config.markov_head_type, config.markov_rank) == (head, 0 if head == "none" else 8)
    assert config.confidence is confidence and config.confidence_with_markov is (confidence and head != "none")
    assert config.target_layer_ids == (0, 2) and config.windows == ()
    written = json.loads((folder / "config.json").read_text())
    assert {name: tuple(t.shape) for name, t in checkpoint.tensors.items()} == drafter_shapes(written)
    assert checkpoint.ignored == ()
    assert [file.name for file in checkpoint.files] == ["config.json", "model.safetensors"]


def test_the_spec_and_the_modules_name_the_same_tensors(target):
    plain = {"markov_rank": 0, "markov_head_type": ..., "confidence_head_with_markov": False}
    gated = {"markov_head_type": "gated", "confidence_head_with_markov": False}
    rnn = {"markov_head_type": "rnn", "draft_vocab_size": 100, "num_key_value_heads": 1, "head_dim": 24}
    for changes in ({}, gated, rnn, plain, plain | {"enable_confidence_head": False}):
        written = drafter_config(target, **changes)
        expected = drafter_shapes(written)
        expected[EMBEDDING] = (written["vocab_size"], written["hidden_size"])
        expected[HEAD] = (written.get("draft_vocab_size", written["vocab_size"]), written["hidden_size"])
        config = _config_of(written)
        assert dict(canonical_shapes(config)) == expected
        assert {name: tuple(t.shape) for name, t in Drafter(config).state_dict().items()} == expected


HOSTILE_SIZES = {
    "head_dim": (2**30, "'layers.0.self_attn.q_norm.weight'"),
    "num_hidden_layers": (10**8, "'layers.2.input_layernorm.weight'"),
    "intermediate_size": (2**31 - 1, "'layers.0.mlp.gate_proj.weight'"),
    "hidden_size": (10**9, "'fc.weight'"),
    "num_attention_heads": (2 * 10**9, "'layers.0.self_attn.q_proj.weight'"),
    "markov_rank": (10**9, "'markov_head.markov_w1.weight'"),
    "vocab_size": (2**31 - 1, "'markov_head.markov_w1.weight'"),
}


@pytest.mark.parametrize("key", HOSTILE_SIZES)
def test_sizes_are_compared_before_anything_is_made_of_them(tmp_path, target, monkeypatch, key):
    size, tensor = HOSTILE_SIZES[key]
    config = drafter_config(target, layer_types=...)
    tensors = drafter_tensors(config)
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self: pytest.fail("a module was made"))
    refuse(save_checkpoint(tmp_path / "tensor", config | {key: size}, tensors), tensor)
    refuse(save_checkpoint(tmp_path / "key", config | {key: 10**18}, tensors), "config.json", key, 10**18)


def _config_of(written):
    from pathlib import Path

    from dspark.export.checkpoints.deepspec import read_config
    from dspark.export.checkpoints.files import Keys

    return read_config(Keys(Path("config.json"), written))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_keep_their_dtype_and_values(tmp_path, target, dtype):
    written = drafter_tensors(drafter_config(target), dtype=dtype)
    checkpoint = load_checkpoint(write(tmp_path / "d", target, written))
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, written[name])


def test_sharded_equals_single(tmp_path, target):
    single = load_checkpoint(write_drafter(tmp_path / "one", target))
    sharded = load_checkpoint(write_drafter(tmp_path / "three", target, shards=3))
    assert single.config == sharded.config
    assert all(torch.equal(single.tensors[name], tensor) for name, tensor in sharded.tensors.items())
    assert len(sharded.files) == 5  # config, index, three shards


def test_own_embedding_and_head_are_read(tmp_path, target):
    checkpoint = load_checkpoint(write_drafter(tmp_path / "d", target, own_embeddings=True))
    assert EMBEDDING in checkpoint.tensors and HEAD in checkpoint.tensors


def test_tied_embedding_is_the_head(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target), own_embeddings=True)
    del tensors[HEAD]
    checkpoint = load_checkpoint(write(tmp_path / "tied", target, tensors, tie_word_embeddings=True))
    assert torch.equal(checkpoint.tensors[HEAD], tensors[EMBEDDING])
    assert HEAD not in load_checkpoint(write(tmp_path / "untied", target, tensors)).tensors
    both = drafter_tensors(drafter_config(target), own_embeddings=True)
    refuse(write(tmp_path / "both", target, both, tie_word_embeddings=True), "config.json", "tie_word_embeddings", HEAD)


def test_stored_rope_tables_are_ignored_and_listed(tmp_path, target):
    name = "layers.0.self_attn.rotary_emb.inv_freq"
    tensors = drafter_tensors(drafter_config(target)) | {name: torch.ones(8)}
    assert load_checkpoint(write(tmp_path / "d", target, tensors)).ignored == (name,)


ROPE_SPELLINGS = {
    "rope_theta": {"rope_theta": 500.0, "rope_scaling": None},
    "rope_scaling": {"rope_theta": ..., "rope_scaling": {"rope_theta": 500, "type": "default"}},
    "rope_parameters": {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {"rope_theta": 500, "rope_type": "default", "partial_rotary_factor": 1.0},
    },
    "both, agreeing": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
}


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_rope_spellings_mean_the_same(tmp_path, target, spelling):
    rope = load_checkpoint(write(tmp_path / "d", target, **ROPE_SPELLINGS[spelling])).config.rope
    assert rope["rope_theta"] == 500.0 and rope["rope_type"] == "default"


def test_rope_scaling_reaches_the_frequencies(tmp_path, target):
    from dspark.export.modules.backbone import inverse_frequencies

    plain = load_checkpoint(write(tmp_path / "plain", target)).config
    scalings = {
        "linear": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    }
    for kind, parameters in scalings.items():
        scaling = {"rope_type": kind, **parameters}
        config = load_checkpoint(write(tmp_path / kind, target, rope_scaling=scaling)).config
        assert not torch.equal(inverse_frequencies(config), inverse_frequencies(plain))


WINDOWS = {
    "none": ({}, ()),
    "null": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, ()),
    "one layer": ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}, (0, 16)),
    "unused": ({"sliding_window": 16}, ()),
    "no layer types": ({"layer_types": ...}, ()),
    "switched off": ({"layer_types": ..., "sliding_window": 16, "use_sliding_window": False}, ()),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(tmp_path, target, case):
    changes, expected = WINDOWS[case]
    assert load_checkpoint(write(tmp_path / "d", target, **changes)).config.windows == expected


def test_reduced_vocabulary(tmp_path, target):
    checkpoint = load_checkpoint(write_drafter(tmp_path / "d", target, draft_vocab_size=100))
    assert checkpoint.config.reduced_vocab and checkpoint.config.draft_vocab_size == 100
    tokens = checkpoint.tensors["d2t"] + torch.arange(100)
    assert tokens.min() >= 0 and tokens.max() < checkpoint.config.vocab_size


REQUIRED = [
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "block_size", "target_layer_ids",
    "num_target_layers", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(tmp_path, target, key):
    refuse(write(tmp_path / "d", target, **{key: ...}), "config.json", repr(key), "missing")


WRONG_CONFIGS = {
    "mask id negative": ({"mask_token_id": -1}, ["mask_token_id", -1]),
    "mask id is V": ({"mask_token_id": 272}, ["mask_token_id", 272]),
    "mask id null": ({"mask_token_id": None}, ["mask_token_id", None]),
    "tap -2": ({"target_layer_ids": [-2, 1]}, ["target_layer_ids", -2, -1]),
    "tap last layer": ({"target_layer_ids": [0, 3]}, ["target_layer_ids", 3, "last layer", 2]),
    "tap too large": ({"target_layer_ids": [0, 4]}, ["target_layer_ids", 4, "too large", 2]),
    "taps out of order": ({"target_layer_ids": [2, 0]}, ["target_layer_ids", "increasing"]),
    "tap twice": ({"target_layer_ids": [1, 1]}, ["target_layer_ids", "increasing"]),
    "no taps": ({"target_layer_ids": []}, ["target_layer_ids", "empty"]),
    "taps no list": ({"target_layer_ids": 3}, ["target_layer_ids", "list"]),
    "taps no integers": ({"target_layer_ids": [0, 1.5]}, ["target_layer_ids", "list of int"]),
    "head type unknown": ({"markov_head_type": "lstm"}, ["markov_head_type", "lstm", "vanilla, gated, rnn"]),
    "rank 0, confidence wants it": ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank is 0"]),
    "block size 0": ({"block_size": 0}, ["block_size", 0]),
    "block size text": ({"block_size": "7"}, ["block_size", "integer", "'7'"]),
    "block size true": ({"block_size": True}, ["block_size", "integer"]),
    "block size beyond int32": ({"block_size": 10**18}, ["block_size", 10**18]),
    "window beyond int32": ({"sliding_window": 2**31}, ["sliding_window", 2**31]),
    "eps 0": ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
    "eps infinite": ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
    "eps no number": ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    "heads do not divide": ({"num_key_value_heads": 3}, ["num_key_value_heads", 3, 4]),
    "odd head": ({"head_dim": 15}, ["head_dim", 15]),
    "bias": ({"attention_bias": True}, ["attention_bias"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    "draft vocabulary too large": ({"draft_vocab_size": 273}, ["draft_vocab_size", 273, 272]),
    "layer type unknown": ({"layer_types": ["full_attention", "linear"]}, ["layer_types", "linear"]),
    "layer types too few": ({"layer_types": ["full_attention"]}, ["layer_types", 1, 2]),
    "which layers slide": ({"layer_types": ..., "sliding_window": 8}, ["layer_types", "missing", 8]),
    "window 0": ({"sliding_window": 0}, ["sliding_window", 0]),
    "rope contradicts": ({"rope_parameters": {"rope_theta": 1.0}}, ["rope_theta", "contradicts"]),
    "rope type": ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type", "longrope"]),
    "rope factor": ({"rope_scaling": {"rope_type": "yarn"}}, ["factor", "yarn"]),
    "rope partial": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "rope theta": ({"rope_theta": "1e6"}, ["rope_theta", "'1e6'"]),
    "rope theta null": ({"rope_theta": ..., "rope_parameters": {"rope_theta": None}}, ["rope_theta", "missing"]),
    "rope type no text": ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type", "yarn"]),
    "rope no object": ({"rope_scaling": 4}, ["rope_scaling", 4]),
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG_ROPES = [
    *(({"rope_theta": theta}, "rope_theta") for theta in (0, -1.0, 1, float("inf"), float("nan"), 10**400, True)),
    *(({"rope_type": "linear", "factor": factor}, "factor") for factor in (0, -2.0, float("inf"), "4", [4.0])),
    (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor"),
    (LLAMA3 | {"high_freq_factor": -4.0}, "high_freq_factor"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor"),
    (LLAMA3 | {"low_freq_factor": 8.0}, "high_freq_factor"),
    (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    (LLAMA3 | {"high_freq_factor": None}, "high_freq_factor"),
    (YARN | {"original_max_position_embeddings": float("nan")}, "original_max_position_embeddings"),
    (YARN | {"beta_fast": 0.5}, "beta_fast"),
    (YARN | {"beta_slow": 0}, "beta_slow"),
    (YARN | {"attention_factor": float("-inf")}, "attention_factor"),
    (YARN | {"mscale": "big"}, "mscale"),
]


@pytest.mark.parametrize("rope, key", WRONG_ROPES, ids=lambda value: str(value))
def test_rope_values_that_give_no_rotation_are_refused(tmp_path, target, rope, key):
    theta = {} if "rope_theta" in rope else {"rope_theta": 1e4}
    refuse(write(tmp_path / "d", target, rope_theta=..., rope_parameters=rope | theta), "config.json", repr(key))


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_wrong_config_is_refused(tmp_path, target, case):
    changes, parts = WRONG_CONFIGS[case]
    refuse(write(tmp_path / "d", target, **changes), "config.json", *parts)


OTHER_DIALECTS = {
    "speculators": {"speculators_model_type": "dspark", "transformer_layer_config": {}},
    "Model-Optimizer": {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
    "z-lab DFlash": {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}},
    "DeepSeek-V4 built-in": {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
    "DeepSpec for Gemma4": {"architectures": ["Gemma4DSparkModel"], "block_size": 7},
}


@pytest.mark.parametrize("dialect", OTHER_DIALECTS)
def test_other_dialects_are_recognised_and_refused(tmp_path, dialect):
    refuse(save_checkpoint(tmp_path / "d", OTHER_DIALECTS[dialect], {}), "config.json", dialect, "not supported yet")


@pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"]}, {"architectures": "Qwen3DSparkModel"}])
def test_unknown_dialect_is_refused(tmp_path, config):
    refuse(save_checkpoint(tmp_path / "d", config, {}), "config.json", "known dialect", "DeepSpec")


def test_missing_tensor_is_named(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target))
    del tensors["layers.1.self_attn.k_norm.weight"]
    refuse(write(tmp_path / "d", target, tensors), "'layers.1.self_attn.k_norm.weight' [16]", "missing")


def test_extra_tensor_is_named(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target)) | {"layers.2.mlp.up_proj.weight": torch.ones(2, 3)}
    refuse(write(tmp_path / "d", target, tensors), "'layers.2.mlp.up_proj.weight' [2, 3]", "no place")


def test_misshapen_tensor_is_named(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target)) | {"fc.weight": torch.ones(48, 95)}
    refuse(write(tmp_path / "d", target, tensors), "'fc.weight'", "[48, 95]", "[48, 96]")


def test_dtype_is_checked(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target)) | {"norm.weight": torch.ones(48, dtype=torch.float64)}
    refuse(write(tmp_path / "d", target, tensors), "'norm.weight'", "F64", "BF16")


def test_a_head_that_the_config_does_not_want_is_extra(tmp_path, target):
    unwanted = {"enable_confidence_head": False, "confidence_head_with_markov": ...}
    refuse(write(tmp_path / "d", target, **unwanted), "confidence_head.proj", "no place")


def test_a_head_that_is_not_there_is_missing(tmp_path, target):
    tensors = drafter_tensors(drafter_config(target, enable_confidence_head=False))
    refuse(write(tmp_path / "d", target, tensors), "'confidence_head.proj.weight' [1, 56]", "missing")


def test_d2t_must_hold_offsets_inside_the_vocabulary(tmp_path, target):
    config = drafter_config(target, draft_vocab_size=100)
    tensors = drafter_tensors(config)
    outside = tensors | {"d2t": torch.full((100,), 200)}
    refuse(save_checkpoint(tmp_path / "outside", config, outside), "'d2t'[72]", 272)
    ids = tensors | {"d2t": 100 - torch.arange(100)}
    refuse(save_checkpoint(tmp_path / "ids", config, ids), "d2t", "one token", "offsets")
    refuse(save_checkpoint(tmp_path / "full", drafter_config(target), drafter_tensors(drafter_config(target)) |
                           {"d2t": torch.zeros(272, dtype=torch.int64)}), "'d2t' [272]", "no place")  # fmt: skip
