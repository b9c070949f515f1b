"""Write a trained drafter as a checkpoint folder in the DeepSpec dialect (docs/checkpoints.md)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save

from dspark.export.config import DrafterConfig
from dspark.export.modules import Drafter

SHARED = ("embed_tokens.weight", "lm_head.weight")  # the target's own tensors: not written


def deepspec_config(config: DrafterConfig) -> dict:
    """config.json of a drafter; the keys of a head are there only if the head is."""
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    keys = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": max(windows) or None,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
    }
    if config.markov_rank:
        keys["markov_head_type"] = config.markov_head_type
    if config.confidence:
        keys["confidence_head_with_markov"] = config.confidence_with_markov
    if config.reduced_vocab:
        keys["draft_vocab_size"] = config.draft_vocab_size
    return keys


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16; d2t int64) to `folder`.

    The target's embedding and head are left out. The same weights give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in drafter.state_dict().items()
        if name not in SHARED
    }
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = json.dumps(deepspec_config(drafter.config), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
