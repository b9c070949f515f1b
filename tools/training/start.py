"""Where a training starts: the draft vocabulary, the drafter's configuration, and weights taken from the target."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import UsageError
from dspark.export.checkpoints import Checkpoint, load_checkpoint
from dspark.export.config import DrafterConfig
from dspark.export.modules import Drafter
from dspark.export.modules.markov import RnnMarkovHead


def choose_vocabulary(tokens: Tensor, size: int, vocab_size: int) -> Tensor | None:
    """d2t int64 [size]: offsets of the `size` most frequent of `tokens` (any shape), None for the whole vocabulary.

    Draft index i stands for token i + d2t[i], in ascending order of tokens; the lowest unseen ids fill up.
    """
    if size == vocab_size:
        return None
    chosen = {token for token, _ in Counter(tokens.flatten().tolist()).most_common(size)}
    unseen = (token for token in range(vocab_size) if token not in chosen)
    ids = sorted(chosen | {next(unseen) for _ in range(size - len(chosen))})
    return torch.tensor(ids) - torch.arange(size)


def default_taps(layers: int) -> tuple[int, ...]:
    """Five taps, evenly from the second layer to the third last: DeepSpec's choice (fewer in a very shallow target)."""
    last = max(1, layers - 3)
    evenly = {round(1 + i * (last - 1) / 4) for i in range(5)}
    return tuple(sorted({min(tap, layers - 2) for tap in evenly}))


def drafter_config(
    target: Any,
    *,
    layers: int,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
    draft_vocab_size: int,
    markov_head_type: str,
    markov_rank: int,
) -> DrafterConfig:
    """A drafter shaped like the target (its transformers config): same widths, heads and RoPE.

    A Markov head brings a confidence head that reads W1 too; `none` (DFlash) has neither. UsageError where an option
    does not fit the target.
    """
    count, vocab = target.num_hidden_layers, target.vocab_size
    for tap in target_layer_ids:
        if not -1 <= tap < count - 1:
            # transformers gives the last layer's output after the final norm.
            raise UsageError(f"--taps: {tap} is not an output of the target's layers; choose from -1 to {count - 2}")
    if list(target_layer_ids) != sorted(set(target_layer_ids)):
        raise UsageError(f"--taps: {list(target_layer_ids)} is not strictly increasing")
    if not 0 <= mask_token_id < vocab:
        raise UsageError(f"--mask-token-id: {mask_token_id} is not in the target's vocabulary of {vocab}")
    if not 1 <= draft_vocab_size <= vocab:
        raise UsageError(f"--draft-vocab-size: {draft_vocab_size} is not between 1 and the target's {vocab}")
    if not 1 <= layers <= count:
        raise UsageError(f"--layers: {layers} is not between 1 and the target's {count}")
    heads, markov = target.num_attention_heads, markov_head_type != "none"
    if markov and not 1 <= markov_rank <= target.hidden_size:
        raise UsageError(f"--markov-rank: {markov_rank} is not between 1 and the target's width {target.hidden_size}")
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=dict(target.rope_parameters),
        max_position_embeddings=target.max_position_embeddings,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=count,
        mask_token_id=mask_token_id,
        markov_head_type=markov_head_type,
        markov_rank=markov_rank if markov else 0,
        confidence=markov,
        confidence_with_markov=markov,
    )


def target_weights(model: Any, layers: int) -> dict:
    """What `initialise` takes from a transformers model: embedding, head, final norm, its last `layers` layers."""
    parts = enumerate(model.model.layers[-layers:])
    return {
        "embed_tokens": model.get_input_embeddings().weight,
        "lm_head": model.get_output_embeddings().weight,
        "norm": model.model.norm.weight,
        "layers": {f"layers.{i}.{name}": value for i, part in parts for name, value in part.state_dict().items()},
    }


def read_start(folder: Path, config: DrafterConfig) -> Checkpoint:
    """The checkpoint that a drafter of `config` goes on from.

    UsageError where the two differ in more than block length and heads.
    """
    checkpoint = load_checkpoint(folder)
    heads = ("block_size", "markov_head_type", "markov_rank", "confidence", "confidence_with_markov")
    mine, theirs = asdict(config), asdict(checkpoint.config)
    for key in mine:
        if key not in heads and mine[key] != theirs[key]:
            raise UsageError(f"--start-from {folder}: its {key} is {theirs[key]}, this training's {mine[key]}")
    return checkpoint


def continue_from(drafter: Drafter, checkpoint: Checkpoint) -> None:
    """Take over what the drafter has in common with a trained one: all of it but heads that one of them lacks."""
    with torch.no_grad():
        for name, value in drafter.state_dict().items():
            found = checkpoint.tensors.get(name)
            if found is not None and found.shape == value.shape:
                value.copy_(found)


def initialise(drafter: Drafter, target: dict, d2t: Tensor | None) -> None:
    """Start from the target: its embedding and head, its last layers, the last tap as the context."""
    config = drafter.config
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target["embed_tokens"])
        head = target["lm_head"]
        if d2t is not None and drafter.d2t is not None:
            drafter.d2t.copy_(d2t)
            head = head[torch.arange(config.draft_vocab_size) + d2t]
        drafter.lm_head.weight.copy_(head)
        drafter.norm.weight.copy_(target["norm"])
        h = config.hidden_size
        nn.init.normal_(drafter.fc.weight, std=0.02 / math.sqrt(config.num_taps))
        drafter.fc.weight[:, -h:] += torch.eye(h)
        if drafter.markov_head is not None:
            # W1 as the embedding's leading directions: tokens alike start alike, the rare ones too.
            centred = target["embed_tokens"] - target["embed_tokens"].mean(0)
            _, _, directions = torch.linalg.svd(centred.T @ centred)
            w1 = centred @ directions[: config.markov_rank].T
            drafter.markov_head.markov_w1.weight.copy_(w1 / w1.std())
            nn.init.zeros_(drafter.markov_head.markov_w2.weight)
            if isinstance(drafter.markov_head, RnnMarkovHead):  # e near W1[prev], as in the vanilla head
                nn.init.zeros_(drafter.markov_head.joint_proj.bias)
                output = drafter.markov_head.joint_proj.weight[2 * config.markov_rank :].mul_(0.1)
                output[:, config.markov_rank : 2 * config.markov_rank] += 0.5 * torch.eye(config.markov_rank)
        if drafter.confidence_head is not None:
            nn.init.zeros_(drafter.confidence_head.proj.weight)
            nn.init.zeros_(drafter.confidence_head.proj.bias)
        for name, value in target["layers"].items():
            parameter = dict(drafter.named_parameters()).get(name)
            if parameter is not None and parameter.shape == value.shape:
                parameter.copy_(value)
