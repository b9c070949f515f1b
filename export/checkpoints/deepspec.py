"""DeepSpec checkpoints of the Qwen3 kind (deepseek-ai/dspark_qwen3_*_block7 and what `dspark train` writes).

Beyond DeepSpec: `draft_vocab_size` < `vocab_size` in the config, with a tensor `d2t` int64 [draft_vocab_size], lets the
head propose a subset of the target's tokens; draft index i stands for token i + d2t[i].
"""

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import UsageError
from dspark.export.config import MARKOV_HEADS, DrafterConfig

from .checkpoint import EMBEDDING, HEAD, Checkpoint, canonical_shapes
from .files import Keys, TensorFiles
from .rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

NAME = "DeepSpec"
# Tables that old transformers versions stored; they follow from the config.
_IGNORED = ("rotary_emb.inv_freq",)


def load(folder: Path, keys: Keys) -> Checkpoint:
    """The checkpoint whose config.json holds `keys`; see `load_checkpoint` for the errors."""
    config = read_config(keys)
    stored = TensorFiles(folder)
    own_head_wanted = _tied_head_is_own(keys, stored)
    tensors: dict[str, Tensor] = {}
    for name, shape in canonical_shapes(config):
        if name in (EMBEDDING, HEAD) and name not in stored:
            continue
        tensors[name] = stored.take(name, shape, ("I64", "I32") if name == "d2t" else ("F32", "F16", "BF16"))
    if own_head_wanted:
        tensors[HEAD] = tensors[EMBEDDING]
    if config.reduced_vocab:
        _check_d2t(folder, tensors["d2t"], config.vocab_size)
    ignored = stored.finish(_IGNORED)
    files = (keys.file, *([stored.index] if stored.index else []), *stored.files)
    return Checkpoint(NAME, folder, config, tensors, ignored, files)


def read_config(keys: Keys) -> DrafterConfig:
    """The canonical config, every key checked. Raises UsageError naming the file and the key."""
    if keys.has("hidden_act"):
        keys.choice("hidden_act", ("silu",))
    if keys.raw.get("attention_bias"):
        raise keys.fail("attention_bias", "true is not supported; the drafter's projections have no bias")
    layers = keys.integer("num_hidden_layers")
    heads, kv_heads = keys.integer("num_attention_heads"), keys.integer("num_key_value_heads")
    if heads % kv_heads:
        raise keys.fail("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = keys.integer("head_dim")
    if head_dim % 2:
        raise keys.fail("head_dim", f"{head_dim} is odd; RoPE needs an even size")
    vocab = keys.integer("vocab_size")
    draft_vocab = keys.integer("draft_vocab_size") if keys.has("draft_vocab_size") else vocab
    if draft_vocab > vocab:
        raise keys.fail("draft_vocab_size", f"{draft_vocab} is larger than vocab_size {vocab}")
    rank = keys.integer("markov_rank", minimum=0)
    confidence = keys.boolean("enable_confidence_head")
    with_markov = confidence and keys.boolean("confidence_head_with_markov")
    if with_markov and not rank:
        raise keys.fail(
            "confidence_head_with_markov", "true needs the Markov embedding, but markov_rank is 0; set it to false"
        )
    num_target_layers = keys.integer("num_target_layers")
    return DrafterConfig(
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=read_rope(keys),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        block_size=keys.integer("block_size"),
        target_layer_ids=_tap_ids(keys, num_target_layers),
        num_target_layers=num_target_layers,
        mask_token_id=_mask_token(keys, vocab),
        markov_head_type=keys.choice("markov_head_type", MARKOV_HEADS[:-1]) if rank else "none",
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=with_markov,
        layout="anchor-first",
        windows=_windows(keys, layers),
    )


def _tap_ids(keys: Keys, num_target_layers: int) -> tuple[int, ...]:
    ids = keys.items("target_layer_ids", int)
    if not ids:
        raise keys.fail("target_layer_ids", "the list is empty; the drafter needs at least one tapped layer")
    last = num_target_layers - 1
    for tap in ids:
        if tap < -1:
            raise keys.fail("target_layer_ids", f"{tap} names no layer; the smallest id is -1, the embedding output")
        if tap == last:
            raise keys.fail(
                "target_layer_ids", f"{tap} is the last layer, known only after the final norm; max {last - 1}"
            )
        if tap > last:
            raise keys.fail("target_layer_ids", f"{tap} is too large for {num_target_layers} layers; max {last - 1}")
    if list(ids) != sorted(set(ids)):
        # The columns of fc follow the taps; a list out of order leaves open which order they were trained in.
        raise keys.fail("target_layer_ids", f"{list(ids)} is not strictly increasing")
    return ids


def _mask_token(keys: Keys, vocab: int) -> int:
    value = keys.integer("mask_token_id", minimum=0)
    if value >= vocab:
        raise keys.fail("mask_token_id", f"{value} is outside the vocabulary of {vocab} tokens")
    return value


def _windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """Attention windows per layer, 0 = none. `sliding_window: null` means none, whatever `layer_types` says."""
    window = keys.integer("sliding_window") if keys.has("sliding_window") else 0
    if not keys.has("layer_types"):
        if window and keys.raw.get("use_sliding_window", True):
            raise UsageError(
                f"{keys.file}: key 'layer_types' is missing; it must say which layers have the sliding_window {window}"
            )
        return ()
    types = keys.items("layer_types", str)
    if len(types) != layers:
        raise keys.fail("layer_types", f"{len(types)} entries for num_hidden_layers {layers}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.fail("layer_types", f"{kind!r} is not known; expected full_attention or sliding_attention")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def _tied_head_is_own(keys: Keys, stored: TensorFiles) -> bool:
    """tie_word_embeddings: the drafter's own embedding, where it has one, is its head too."""
    if not keys.raw.get("tie_word_embeddings") or EMBEDDING not in stored:
        return False
    if HEAD in stored:
        raise keys.fail("tie_word_embeddings", f"true, but the checkpoint holds its own {HEAD!r}; set it to false")
    if keys.has("draft_vocab_size") and keys.raw["draft_vocab_size"] != keys.raw["vocab_size"]:
        raise keys.fail("tie_word_embeddings", "true cannot go with a smaller draft_vocab_size; set it to false")
    return True


def _check_d2t(folder: Path, d2t: "Tensor", vocab: int) -> None:
    import torch

    tokens = d2t.long() + torch.arange(len(d2t))
    outside = (tokens < 0) | (tokens >= vocab)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise UsageError(f"{folder}: tensor 'd2t'[{i}] gives token {int(tokens[i])}, outside the vocabulary of {vocab}")
    if len(tokens.unique()) != len(tokens):
        raise UsageError(f"{folder}: tensor 'd2t' maps two draft indices to one token; it must hold offsets, not ids")
