"""Tiny random models for tests, written to a folder exactly as the real ones lie on disk.

    target = write_target(tmp_path / "target", "qwen3")
    drafter = write_drafter(tmp_path / "drafter", target, head="gated", block_size=7)

Weights are drawn from a seed with gains large enough that logits differ clearly from each other: the same call gives
the same bytes, and a greedy token is rarely a near-tie.
"""

import json
from pathlib import Path

CENTRED = ("qwen3_next", "qwen3_5_text")  # families whose norms scale by 1 + weight
VOCAB_SIZE = 272  # 256 bytes, three special tokens, and some rows that no text uses, as real models have them
STOP_TOKEN = 258  # <|im_end|>
MASK_TOKEN = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: every byte of a text is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_target(folder: Path, kind: str = "llama", *, seed: int = 0, dtype: str = "float32", **config) -> Path:
    """A tiny Hugging Face causal language model (kind: llama | qwen3) with tokenizer, chat template, stop tokens.

    `config` overrides entries of its config.json (layers, sizes, tie_word_embeddings, sliding_window, ...); an entry
    overridden with `...` is left out.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": STOP_TOKEN,
        "dtype": dtype,
    }
    settings = AutoConfig.for_model(kind, **{k: v for k, v in {**sizes, **config}.items() if v is not ...})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_random(name, tuple(parameter.shape)))
                if kind in CENTRED and name.endswith("norm.weight") and "linear_attn" not in name:
                    parameter.sub_(1)
    model.save_pretrained(folder)
    _write_json(folder / "generation_config.json", {"bos_token_id": 257, "eos_token_id": [STOP_TOKEN]})
    write_tokenizer(folder)
    return folder


# A hybrid target's sizes: two gated DeltaNet layers around one that attends, no experts.
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "num_experts": 0,
    "max_position_embeddings": 2048,
}


def drafter_config(target: Path, **config) -> dict:
    """config.json of a DeepSpec drafter that fits the target in folder `target`, with `config` overriding entries.

    An entry overridden with `...` is left out.
    """
    base = json.loads((target / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers", 2)
    layers = 2 if layers is ... else layers
    settings = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        **{key: base[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
        **{key: base[key] for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")},
        "rope_theta": base["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "num_target_layers": base["num_hidden_layers"],
        "num_hidden_layers": layers,
        "block_size": 5,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [0, base["num_hidden_layers"] - 2],
        "num_anchors": 64,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
    }
    settings.update(config)
    return {key: value for key, value in settings.items() if value is not ...}


def drafter_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that this config.json describes, embed_tokens and lm_head left out."""
    hidden, inter, rank = config["hidden_size"], config["intermediate_size"], config["markov_rank"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    vocab, draft_vocab = config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{norm}.weight": (config["head_dim"],) for norm in ("q_norm", "k_norm")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (query, hidden), f"{at}.self_attn.o_proj.weight": (hidden, query)}
        shapes |= {f"{at}.self_attn.{name}.weight": (key, hidden) for name in ("k_proj", "v_proj")}
        shapes |= {f"{at}.mlp.{name}.weight": (inter, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inter)
    if rank:
        head = config["markov_head_type"]
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (draft_vocab, rank)}
        if head == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head"):
        width = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if draft_vocab != vocab:
        shapes["d2t"] = (draft_vocab,)
    return shapes


def drafter_tensors(config: dict, *, seed: int = 0, own_embeddings: bool = False, dtype: str = "float32") -> dict:
    """Random tensors for `config`; with `own_embeddings` embed_tokens and lm_head too."""
    import torch

    shapes = drafter_shapes(config)
    if own_embeddings:
        hidden = config["hidden_size"]
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
        shapes["lm_head.weight"] = (config.get("draft_vocab_size", config["vocab_size"]), hidden)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tensors = {name: _random(name, shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}
        if "d2t" in shapes:
            count = shapes["d2t"][0]
            tensors["d2t"] = torch.randperm(config["vocab_size"])[:count].sort().values - torch.arange(count)
    return tensors


def write_drafter(
    folder: Path,
    target: Path,
    *,
    head: str = "vanilla",
    confidence: bool = True,
    seed: int = 1,
    own_embeddings: bool = False,
    dtype: str = "bfloat16",
    shards: int = 1,
    **config,
) -> Path:
    """A random DeepSpec checkpoint that fits `target`. head: vanilla, gated, rnn or none; `config`: see drafter_config.

    `shards` > 1 writes a sharded index instead of one file.
    """
    rank = {"markov_rank": 0, "markov_head_type": ..., "confidence_head_with_markov": False} if head == "none" else {}
    without = {} if confidence else {"enable_confidence_head": False, "confidence_head_with_markov": ...}
    settings = drafter_config(target, **{"markov_head_type": head, **rank, **without, **config})
    tensors = drafter_tensors(settings, seed=seed, own_embeddings=own_embeddings, dtype=dtype)
    return save_checkpoint(folder, settings, tensors, shards)


def save_checkpoint(folder: Path, config: dict, tensors: dict, shards: int = 1) -> Path:
    """Write config.json and the tensors as model.safetensors, or as `shards` files with an index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def _random(name: str, shape: tuple[int, ...]):
    """Norm weights near 1, embeddings of unit size, projections that keep the size of what they map."""
    import torch

    if "norm" in name:
        return 1 + 0.1 * torch.randn(shape)
    if "bias" in name:
        return 0.1 * torch.randn(shape)
    if "embed_tokens" in name or "markov_w1" in name:
        return torch.randn(shape)
    return torch.randn(shape) / shape[-1] ** 0.5 if len(shape) > 1 else torch.zeros(shape)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
